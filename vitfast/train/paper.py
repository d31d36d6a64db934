"""The paper's recipes as data: Tables 3 and 4 of arXiv 2010.11929 row by row, and two later recipes.

The released code adds this to the text: a linear decay ends at 1e-5, pre-training with sigmoid cross-entropy starts
with a head bias of -10, weight decay is decoupled and on kernels only, fine-tuning warms up for 500 steps (50 where a
run has 500 in all, our choice), crops are 5 to 100 % of the area, and the classes of ImageNet-21k are trained with
sigmoid cross-entropy too. GELU is flax's `nn.gelu`, the tanh approximation, in Table 3, in the masked pre-training and
in "Better plain ViT baselines", whose code (big_vision) is flax too; DeiT III uses PyTorch's exact GELU. Fine-tuning
takes the activation of the weights. `about` has the command and the published top-1 accuracy.
No table says how images are cut for an evaluation. Pre-training follows the released configurations for ImageNet and
ImageNet-21k, resize_small(256)|central_crop(224) (big_vision, configs/vit_i1k.py, vit_i21k.py, vit_s16_i1k.py).
Fine-tuning follows the released code, which resizes to a square whatever the aspect (vision_transformer,
vit_jax/input_pipeline.py). We resample bicubically, where these use TensorFlow's area and bilinear methods.
"""

from ..run.config import Recipe

_CENTRAL = dict(crop_mode="center", crop_pct=224 / 256)
_SQUASHED = dict(crop_mode="squash", crop_pct=1.0)

# ---- Table 3: pre-training

_TABLE_3 = dict(
    optimizer="adamw",
    betas=(0.9, 0.999),
    batch_size=4096,
    warmup_steps=10_000,
    img_size=224,
    crop_scale=(0.05, 1.0),
    hidden_head=True,
    weight_init="jax",
    act_layer="gelu_tanh",
    **_CENTRAL,
)
_SIGMOID = dict(objective="sigmoid", head_init_bias=-10.0, lr_decay="linear", lr_end=1e-5)
_JFT = dict(weight_decay=0.1, **_SIGMOID, **_TABLE_3)
_IMAGENET21K = dict(lr=1e-3, weight_decay=0.03, dropout=0.1, **_SIGMOID, **_TABLE_3)
_IMAGENET = dict(epochs=300, lr=3e-3, lr_decay="cosine", weight_decay=0.3, dropout=0.1, clip_norm=1.0, **_TABLE_3)

# Model, epochs, learning rate; from Table 6: accuracy after fine-tuning on ImageNet and on CIFAR-100, exaFLOPs.
_JFT_ROWS = (
    ("B/32", 7, 8e-4, (80.73, 90.49, 55)),
    ("B/16", 7, 8e-4, (84.15, 91.87, 224)),
    ("L/32", 7, 6e-4, (84.37, 92.52, 196)),
    ("L/16", 7, 4e-4, (86.3, 93.46, 783)),
    ("L/16", 14, 4e-4, (87.12, 94.04, 1567)),
    ("H/14", 14, 3e-4, (88.08, 94.71, 4262)),
    ("R50x1", 7, 1e-3, (77.54, 86.07, 50)),
    ("R50x2", 7, 1e-3, (82.12, 89.2, 199)),
    ("R101x1", 7, 8e-4, (80.67, 89.17, 96)),
    ("R152x1", 7, 6e-4, (81.88, 90.22, 141)),
    ("R152x2", 7, 6e-4, (84.97, 92.05, 563)),
    ("R152x2", 14, 6e-4, (85.56, 91.92, 1126)),
    ("R200x3", 14, 6e-4, (87.22, 93.53, 3306)),
    ("R50+B/32", 7, 8e-4, (84.9, 92.24, 106)),
    ("R50+B/16", 7, 8e-4, (85.58, 92.63, 274)),
    ("R50+L/32", 7, 2e-4, (85.68, 92.93, 246)),
    ("R50+L/16", 7, 4e-4, (86.6, 93.64, 859)),
    ("R50+L/16", 14, 4e-4, (87.12, 93.89, 1668)),
)
# What Table 3 does not say about a row, and what is assumed.
_ASSUMED = {
    ("R152x2", 14): "Table 3 has only 7 epochs; 14 take the same rate, as for L/16 and R50+L/16 there.",
    ("R200x3", 14): "Table 3 has no such row; the rate is that of R152x2, the largest ResNet there.",
}
_FROM_SCRATCH = {"B/32": 69.19, "B/16": 74.79, "L/32": 66.90, "L/16": 72.59}
_TOP1 = "Table 3; {} % on ImageNet before fine-tuning (from the authors' issue tracker)."


def _pretrain(model: str, data: str, published: str = "Table 3.", **fields) -> Recipe:
    """A pre-training recipe with a name such as vit-b16/jft-7ep or, for a ResNet, bit-r50x1/jft-7ep."""
    resnet = model.startswith("R") and "+" not in model
    name = f"{'bit' if resnet else 'vit'}-{model.lower().replace('/', '').replace('+', '-')}/{data}"
    about = f"vitfast pretrain --recipe {name} --data DIR --output runs/{name.replace('/', '-')}\n{published}"
    if resnet:
        fields |= dict(hidden_head=False, weight_init="", act_layer="gelu")
    return Recipe(name=name, model=model, about=about, **fields)


def _jft(model: str, epochs: int, lr: float, table_6: tuple) -> Recipe:
    published = "Tables 3 and 6: after fine-tuning {} % on ImageNet, {} % on CIFAR-100; {} exaFLOPs on JFT-300M."
    published = published.format(*table_6)
    if assumed := _ASSUMED.get((model, epochs)):
        published += f"\n{assumed}"
    return _pretrain(model, f"jft-{epochs}ep", published, epochs=epochs, lr=lr, **_JFT)


# ---- Table 4: fine-tuning by SGD with momentum, cosine, no weight decay

_TABLE_4 = dict(
    optimizer="sgd",
    momentum=0.9,
    lr_decay="cosine",
    batch_size=512,
    clip_norm=1.0,
    img_size=384,
    warmup_steps=500,
    crop_scale=(0.05, 1.0),
    **_SQUASHED,
)
_SMALL = (0.001, 0.003, 0.01, 0.03)
_LARGE = (0.003, 0.01, 0.03, 0.06)
_L16 = "Table 4; L/16 after JFT-300M (14 epochs):"
_AVERAGED = "Table 2: {} at {} px with Polyak averaging, {} %."
_POLYAK = dict(ema_decay=0.9999, ema_warmup=False)  # "a factor of 0.9999"; timm's warm-up would end at 0.9986


def _finetune(
    data: str, steps: int, rates: tuple[float, ...], hold_out: float, published: str, spec: str = "DIR", **fields
) -> Recipe:
    """Fine-tuning at rates[len(rates) // 2]; a sweep holds out `hold_out` of the images and tries all."""
    name, sweep = f"finetune/{data}", " --sweep" if len(rates) > 1 else ""
    command = f"vitfast finetune --recipe {name} --weights L_16.npz --data {spec} --output runs/{data}{sweep}"
    tried = dict(lr=rates[len(rates) // 2], sweep_lr=rates, sweep_hold_out=hold_out)
    return Recipe(name=name, about=f"{command}\n{published}", steps=steps, **tried, **{**_TABLE_4, **fields})


# ---- later recipes


def _plain(epochs: int, top1: float) -> Recipe:
    name = f"plain-s16/imagenet-{epochs}ep"
    return Recipe(
        name=name,
        about=f"vitfast pretrain --recipe {name} --data DIR --output runs/s16\n"
        f'"Better plain ViT baselines for ImageNet-1k" (Beyer et al., 2022): {top1} %.',
        model="S/16",
        epochs=epochs,
        batch_size=1024,
        lr=1e-3,
        warmup_steps=10_000,
        weight_decay=0.1,
        clip_norm=1.0,
        mixup=0.2,
        crop_scale=(0.05, 1.0),
        auto_augment="rand-m10-n2",
        global_pool="avg",
        pos_embed="sincos2d",
        hidden_head=True,
        weight_init="jax",
        act_layer="gelu_tanh",
        **_CENTRAL,
    )


PAPER = (
    *(_jft(*row) for row in _JFT_ROWS),
    *(_pretrain(model, "imagenet21k", epochs=90, **_IMAGENET21K) for model in ("B/32", "B/16", "L/32", "L/16")),
    *(_pretrain(model, "imagenet21k-30ep", epochs=30, **_IMAGENET21K) for model in ("L/32", "L/16")),
    *(_pretrain(model, "imagenet", _TOP1.format(top1), **_IMAGENET) for model, top1 in _FROM_SCRATCH.items()),
    Recipe(
        name="masked-b16/jft",
        about="vitfast pretrain --recipe masked-b16/jft --data DIR --output runs/masked-b16\n"
        "B.1.2: masked patch prediction, mean colours; 79.9 % on ImageNet after fine-tuning, 2 % over training from "
        "scratch. 1M steps of 4096 images. B.1.2 names no weight decay: 0.1 is Table 3's on JFT-300M, and 4.1's of "
        "all models.",
        model="B/16",
        steps=1_000_000,
        objective="masked",
        lr=2e-4,
        lr_decay="cosine",
        weight_decay=0.1,
        **{**_TABLE_3, "hidden_head": False},
    ),
    _finetune("imagenet", 20_000, _LARGE, 0.01, f"{_L16} 87.12 %."),
    *(
        _finetune(f"imagenet-{row[1]}", 20_000, _LARGE, 0.01, _AVERAGED.format(*row), img_size=row[1], **_POLYAK)
        for row in (("L/16", 512, 87.76), ("H/14", 518, 88.55))
    ),
    _finetune("cifar100", 10_000, _SMALL, 0.02, f"{_L16} 94.04 %.", "torch/cifar100"),
    _finetune("cifar10", 10_000, _SMALL, 0.02, f"{_L16} 99.38 %.", "torch/cifar10"),
    _finetune("pets", 500, _SMALL, 0.1, f"{_L16} 97.11 %.", warmup_steps=50),
    _finetune("flowers", 500, _SMALL, 0.1, f"{_L16} 99.66 %.", warmup_steps=50),
    _finetune(  # only resizes images; `vitfast vtab` adds crops and flips where a task allows them
        "vtab",
        2_500,
        (0.01,),
        0.0,
        "Table 4, for each of VTAB's 19 tasks of 1000 training images (`vitfast vtab`).",
        train_crop_mode="squash",
        crop_scale=(1.0, 1.0),
        hflip=0.0,
    ),
    _plain(90, 76.5),
    _plain(300, 80),
    Recipe(
        name="deit3-b16/imagenet",
        about="vitfast pretrain --recipe deit3-b16/imagenet --data DIR --output runs/deit3-b16\n"
        'In the style of "DeiT III" (Touvron et al., 2022), without its repeated augmentation and its BCE at 192 px: '
        "no published number is claimed for it.",
        model="B/16",
        epochs=400,
        batch_size=2048,
        optimizer="lamb",
        lr=3e-3,
        warmup_steps=3_128,
        weight_decay=0.02,
        clip_norm=1.0,
        objective="sigmoid",
        mixup=0.8,
        cutmix=1.0,
        auto_augment="3a",
        color_jitter=0.3,
        drop_path=0.2,
        init_values=1e-6,
        crop_mode="center",
        crop_pct=1.0,  # --eval-crop-ratio 1.0 (deit, README_revenge.md)
    ),
)
