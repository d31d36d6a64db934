"""Recipes against the paper's tables, and the settings that make them."""

import json

import pytest
import torch
import torch.nn.functional as F

from vitfast import InputError, ViT
from vitfast.cli import main
from vitfast.train.recipes import RECIPES, resolve
from vitfast.train.setup import new_model, set_up

# Table 3 of arXiv 2010.11929, typed in from the paper: models, data set, epochs, base rate, decay, weight decay,
# dropout. The two ResNets of 14 epochs are Table 6's, at the rate of Table 3's R152x{1,2}.
TABLE_3 = """
vit-b16 vit-b32 | jft-7ep | 7 | 8e-4 | linear | 0.1 | 0.0
vit-l32 | jft-7ep | 7 | 6e-4 | linear | 0.1 | 0.0
vit-l16 | jft-7ep | 7 | 4e-4 | linear | 0.1 | 0.0
vit-l16 | jft-14ep | 14 | 4e-4 | linear | 0.1 | 0.0
vit-h14 | jft-14ep | 14 | 3e-4 | linear | 0.1 | 0.0
bit-r50x1 bit-r50x2 | jft-7ep | 7 | 1e-3 | linear | 0.1 | 0.0
bit-r101x1 | jft-7ep | 7 | 8e-4 | linear | 0.1 | 0.0
bit-r152x1 bit-r152x2 | jft-7ep | 7 | 6e-4 | linear | 0.1 | 0.0
bit-r152x2 bit-r200x3 | jft-14ep | 14 | 6e-4 | linear | 0.1 | 0.0
vit-r50-b16 vit-r50-b32 | jft-7ep | 7 | 8e-4 | linear | 0.1 | 0.0
vit-r50-l32 | jft-7ep | 7 | 2e-4 | linear | 0.1 | 0.0
vit-r50-l16 | jft-7ep | 7 | 4e-4 | linear | 0.1 | 0.0
vit-r50-l16 | jft-14ep | 14 | 4e-4 | linear | 0.1 | 0.0
vit-b16 vit-b32 | imagenet21k | 90 | 1e-3 | linear | 0.03 | 0.1
vit-l16 vit-l32 | imagenet21k | 90 | 1e-3 | linear | 0.03 | 0.1
vit-l16 vit-l32 | imagenet21k-30ep | 30 | 1e-3 | linear | 0.03 | 0.1
vit-b16 vit-b32 vit-l16 vit-l32 | imagenet | 300 | 3e-3 | cosine | 0.3 | 0.1
"""


TABLE_4 = """
imagenet | 20000 | 0.003 0.01 0.03 0.06
cifar100 | 10000 | 0.001 0.003 0.01 0.03
cifar10 | 10000 | 0.001 0.003 0.01 0.03
pets | 500 | 0.001 0.003 0.01 0.03
flowers | 500 | 0.001 0.003 0.01 0.03
vtab | 2500 | 0.01
"""


# Table 6: accuracy after fine-tuning on ImageNet and on CIFAR-100, exaFLOPs.
TABLE_6 = """
vit-b32/jft-7ep | 80.73 | 90.49 | 55
vit-b16/jft-7ep | 84.15 | 91.87 | 224
vit-l32/jft-7ep | 84.37 | 92.52 | 196
vit-l16/jft-7ep | 86.30 | 93.46 | 783
vit-l16/jft-14ep | 87.12 | 94.04 | 1567
vit-h14/jft-14ep | 88.08 | 94.71 | 4262
bit-r50x1/jft-7ep | 77.54 | 86.07 | 50
bit-r50x2/jft-7ep | 82.12 | 89.20 | 199
bit-r101x1/jft-7ep | 80.67 | 89.17 | 96
bit-r152x1/jft-7ep | 81.88 | 90.22 | 141
bit-r152x2/jft-7ep | 84.97 | 92.05 | 563
bit-r152x2/jft-14ep | 85.56 | 91.92 | 1126
bit-r200x3/jft-14ep | 87.22 | 93.53 | 3306
vit-r50-b32/jft-7ep | 84.90 | 92.24 | 106
vit-r50-b16/jft-7ep | 85.58 | 92.63 | 274
vit-r50-l32/jft-7ep | 85.68 | 92.93 | 246
vit-r50-l16/jft-7ep | 86.60 | 93.64 | 859
vit-r50-l16/jft-14ep | 87.12 | 93.89 | 1668
"""


def test_every_row_of_table_6_is_told_with_its_recipe():
    rows = [[part.strip() for part in line.split("|")] for line in TABLE_6.strip().splitlines()]
    assert {row[0] for row in rows} == {name for name in RECIPES if "/jft" in name and not name.startswith("masked")}
    for name, imagenet, cifar100, exaflops in rows:
        told = f"{float(imagenet)} % on ImageNet, {float(cifar100)} % on CIFAR-100; {exaflops} exaFLOPs"
        assert told in RECIPES[name].about, name
    assert "Table 3 has no row of it: assumed" in RECIPES["bit-r200x3/jft-14ep"].about


def test_masked_pre_training_is_b_1_2_with_the_weight_decay_of_4_1():
    r = RECIPES["masked-b16/jft"]
    assert (r.model, r.objective, r.mask_target, r.mask_share, r.steps, r.epochs) == (
        "B/16",
        "masked",
        "mean",
        0.5,
        1_000_000,
        None,
    )
    assert (r.batch_size, r.lr, r.lr_decay, r.lr_end, r.warmup_steps) == (4096, 2e-4, "cosine", 0.0, 10_000)
    assert (r.optimizer, r.betas, r.weight_decay, r.dropout, r.img_size) == ("adamw", (0.9, 0.999), 0.1, 0.0, 224)
    assert (r.clip_norm, r.hidden_head) == (None, False) and "names no weight decay" in r.about


def test_recipes_of_released_flax_code_take_its_gelu():
    """flax's nn.gelu is the tanh approximation; PyTorch's is exact; a ResNet has none."""
    tanh = {name for name, recipe in RECIPES.items() if recipe.act_layer == "gelu_tanh"}
    assert tanh == {name for name in RECIPES if name.startswith(("vit-", "masked-", "plain-"))}
    for name, activation in (("vit-b32/jft-7ep", "gelu_tanh"), ("deit3-b16/imagenet", "gelu")):
        with torch.device("meta"):
            model = new_model(resolve("pretrain", dict(recipe=name)), 10)
        assert model.config["act_layer"] == activation
    with torch.device("meta"):
        mlp = new_model(resolve("pretrain", dict(recipe="plain-s16/imagenet-90ep")), 10).blocks[0].mlp
    mlp, x = mlp.to_empty(device="cpu"), torch.linspace(-3, 3, 384)[None]
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.normal_(std=0.1)
        h = F.gelu(mlp.fc1(x), approximate="tanh")
        assert torch.allclose(mlp(x), mlp.fc2(h), atol=1e-6) and not torch.equal(h, F.gelu(mlp.fc1(x)))


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_fine_tuning_takes_the_activation_of_the_weights(tmp_path, activation):
    sizes = dict(img_size=16, patch_size=8, embed_dim=32, depth=1, num_heads=2)
    ViT(**sizes, num_classes=10, act_layer=activation).save_pretrained(tmp_path)
    for recipe in ("finetune/cifar10", "vit-b32/jft-7ep", "deit3-b16/imagenet"):
        fields = dict(recipe=recipe, weights=str(tmp_path), data="digits", img_size=16, device="cpu")
        model, _ = set_up(resolve("pretrain", fields), torch.device("cpu"))
        assert model.config["act_layer"] == activation


def test_a_resnets_head_starts_at_its_recipes_bias():
    with torch.device("meta"):
        sketch = new_model(resolve("pretrain", dict(recipe="bit-r50x1/jft-7ep")), 10)
    assert type(sketch).__name__ == "ResNetV2"
    fields = dict(recipe="bit-r50x1/jft-7ep", model="timm:test_resnet", img_size=32)
    assert new_model(resolve("pretrain", fields), 10).get_classifier().bias.tolist() == [-10.0] * 10


def test_every_row_of_table_3_and_4_is_a_recipe():
    seen = set()
    for line in TABLE_3.strip().splitlines():
        models, data, epochs, lr, decay, weight_decay, dropout = (part.strip() for part in line.split("|"))
        for model in models.split():
            r = RECIPES[f"{model}/{data}"]
            seen.add(r.name)
            assert (r.epochs, r.lr, r.lr_decay, r.weight_decay, r.dropout) == (
                int(epochs),
                float(lr),
                decay,
                float(weight_decay),
                float(dropout),
            ), r.name
            assert (r.batch_size, r.img_size, r.betas, r.warmup_steps, r.optimizer) == (
                4096,
                224,
                (0.9, 0.999),
                10_000,
                "adamw",
            )
            assert r.clip_norm == (1.0 if data == "imagenet" else None) and r.steps is None
            assert r.name in r.about and r.about.startswith("vitfast pretrain --recipe")
    assert seen == {name for name in RECIPES if name.startswith(("vit-", "bit-"))}
    for line in TABLE_4.strip().splitlines():
        data, steps, rates = (part.strip() for part in line.split("|"))
        r = RECIPES[f"finetune/{data}"]
        assert (r.steps, r.sweep_lr) == (int(steps), tuple(map(float, rates.split()))) and r.lr in r.sweep_lr
        assert (r.optimizer, r.momentum, r.lr_decay, r.batch_size, r.weight_decay, r.clip_norm, r.img_size) == (
            "sgd",
            0.9,
            "cosine",
            512,
            0,
            1.0,
            384,
        )
    held = {
        name: RECIPES[f"finetune/{name}"].sweep_hold_out
        for name in ("pets", "flowers", "cifar10", "cifar100", "imagenet")
    }
    assert held == dict(pets=0.1, flowers=0.1, cifar10=0.02, cifar100=0.02, imagenet=0.01)
    for name in ("finetune/imagenet-512", "finetune/imagenet-518"):
        assert RECIPES[name].ema_decay == 0.9999 and RECIPES[name].img_size == int(name[-3:])


def test_every_recipe_resolves_and_the_command_line_lists_it(capsys):
    for name in RECIPES:
        assert resolve("pretrain", dict(recipe=name)).name == name
    assert main(["recipes", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(RECIPES) and all(
        isinstance(row["lr"], float) and isinstance(row["img_size"], int) for row in rows
    )
    assert main(["recipes", "vit-l16/jft-14ep"]) == 0
    assert "87.12 %" in capsys.readouterr().out
    assert main(["recipes", "vit-l16/jft-15ep"]) == 2


def test_settings_layer_over_each_other():
    config = resolve(
        "pretrain",
        dict(recipe="digits", data="digits", lr=0.1, seed=3),
        dict(lr=0.2),
        {"betas": "0.8,0.99", "clip_norm": "none", "compile": "no"},
    )
    assert (config.lr, config.seed, config.betas, config.clip_norm, config.compile) == (
        0.2,
        3,
        (0.8, 0.99),
        None,
        False,
    )
    assert config.model == "Nano/8" and config.task == "pretrain"
    assert resolve("pretrain", dict(recipe="digits", steps=5)).epochs is None
    assert resolve("pretrain", dict(recipe="finetune/cifar10", epochs=2)).steps is None
    assert (
        resolve("finetune", dict(data="digits")).name == "finetune/digits"
        and resolve("pretrain", dict(data="x")).name == "vit-b16/imagenet"
    )


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(recipe="digit"), "unknown recipe 'digit'; did you mean digits"),
        (dict(recipe="digits", learning_rate="1"), "unknown setting 'learning_rate'"),
        (dict(recipe="digits", lr="fast"), "lr must be a finite number, got 'fast'"),
        (dict(recipe="digits", batch_size="2.5"), "batch_size must be a whole number, got '2.5'"),
        (dict(recipe="digits", betas="0.9"), "betas must be numbers"),
        (dict(recipe="digits", compile="perhaps"), "compile must be true or false"),
        (dict(recipe="digits", lr=-1), "lr must be positive"),
        (dict(recipe="digits", lr="nan"), "lr must be a finite number"),
        (dict(recipe="digits", epochs="inf"), "epochs must be a finite number"),
        (dict(recipe="digits", seed=-1), "seed must lie in"),
        (dict(recipe="digits", betas="2,3"), "betas must lie in"),
        (dict(recipe="digits", auto_augment="rand-x9"), "auto_augment must be a policy of timm"),
        (dict(recipe="digits", random_erasing=-0.1), "random_erasing must lie in"),
        (dict(recipe="digits", crop_scale="1,0.1"), "crop_scale must be two numbers, the smaller first"),
        (dict(recipe="digits", ema_decay=2), "ema_decay must lie in"),
        (dict(recipe="digits", weight_decay=-1), "weight_decay must be at least 0"),
        (dict(recipe="digits", workers=-1), "workers must be at least 0"),
        (dict(recipe="digits", batch_size=10**10), "batch_size must be positive, and at most 1000000000"),
        (dict(recipe="digits", steps=10**400), "steps must be positive, and at most"),
        (dict(recipe="digits", model=["B/16"]), "model must be text"),
        (dict(recipe="digits", data="a\0b"), "data must be text"),
        ({"recipe": "digits", 5: 1}, "unknown setting '5'"),
        (dict(recipe=["digits"]), "unknown recipe"),
        (dict(recipe="digits", steps=0), "steps must be positive"),
        (dict(recipe="digits", optimizer="lion"), "optimizer must be one of adamw, sgd"),
        (dict(recipe="digits", dropout=1.5), r"dropout must lie in \[0, 1\)"),
        (
            dict(recipe="digits", objective="masked", mixup=0.5),
            "masked patch prediction takes its targets from the images",
        ),
        (dict(recipe="digits", epochs="none"), "the run has no length"),
    ],
    ids=str,
)
def test_wrong_settings_are_named(fields, message):
    with pytest.raises(InputError, match=message):
        resolve("pretrain", fields)


def test_recipes_are_frozen_and_complete():
    for name, recipe in RECIPES.items():
        assert recipe.name == name and (recipe.epochs or recipe.steps)
        with pytest.raises(AttributeError):
            recipe.lr = 1.0
