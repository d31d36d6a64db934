"""The recipes by name, the Config that a run makes of one, and the arguments of its ViT.

A Config is made of a recipe, a file and flags. Nothing here needs PyTorch.
"""

import logging
import os
from pathlib import Path

from ..errors import InputError, unknown
from ..model.config import ViTConfig
from ..model.presets import pair, preset
from ..run.config import FIELDS, Config, Recipe, as_plain, check_run, crop_sizes
from ..run.fields import is_none
from .paper import PAPER

# Recipes are data: each is written out, here as in paper.py, even where two agree in many fields.
DIGITS = (
    Recipe(
        name="digits",
        about="""vitfast pretrain --recipe digits --data digits --output runs/digits
scikit-learn's 8 x 8 scans at 32 px, 16 patches; about 0.98 on the test split.""",
        model="Nano/8",
        img_size=32,
        epochs=44,
        batch_size=48,
        lr=2e-3,
        warmup_steps=100,
        weight_decay=0.05,
        clip_norm=1.0,
        crop_scale=(0.8, 1.0),
        crop_ratio=(0.9, 1.1),
        hflip=0.0,
        label_smoothing=0.1,
        hidden_head=True,
        weight_init="jax",
    ),
    Recipe(
        name="finetune/digits",
        about="vitfast finetune --recipe finetune/digits --weights runs/digits/checkpoints/last --data digits "
        "--output runs/digits48\n"
        "bench/results/digits/choice.json chose rate and length; the paper's SGD is worse (folds.json).",
        model="Nano/8",
        img_size=48,
        epochs=24,
        batch_size=64,
        lr=1e-3,
        sweep_lr=(3e-4, 1e-3, 3e-3),
        warmup_steps=20,
        weight_decay=0.05,
        clip_norm=1.0,
        crop_scale=(0.8, 1.0),
        crop_ratio=(0.9, 1.1),
        hflip=0.0,
        label_smoothing=0.1,
    ),
)
SMALL = Recipe(
    name="finetune/small",
    about="vitfast finetune --weights hf-hub:timm/vit_base_patch16_224.augreg2_in21k_ft_in1k --data photos "
    "--output runs/photos\n"
    "For tens to about a hundred thousand images; size and normalisation are those of the weights.",
    img_size=0,
    epochs=100,
    batch_size=64,
    lr=5e-4,
    sweep_lr=(2e-4, 5e-4, 1e-3),
    warmup_ratio=0.1,
    weight_decay=0.05,
    layer_decay=0.75,
    clip_norm=1.0,
    crop_scale=(0.5, 1.0),
    color_jitter=0.2,
    label_smoothing=0.1,
    drop_path=0.1,
)
WITHOUT_LABELS = Recipe(
    name="ssl/small",
    about="vitfast pretrain --recipe ssl/small --data photos --output runs/photos\n"
    "LeJEPA, without labels, for thousands to about a million images. Settings are those of the authors' small example "
    "(Imagenette, 9,469 images: 90.7 % by an online linear probe), except that of 8 crops 6 are small.",
    model="S/8",
    img_size=128,
    epochs=800,
    batch_size=256,
    lr=2e-3,
    lr_end=1e-3,
    warmup_ratio=1 / 800,
    weight_decay=0.05,
    objective="lejepa",
    sigreg_lambda=0.02,
    crop_scale=(0.3, 1.0),
    color_jitter=0.8,
    hue_jitter=0.2,
    jitter_share=0.8,
    grayscale=0.2,
    blur=0.5,
    solarize=0.2,
    drop_path=0.1,
    drop_path_mode="subset",
    global_pool="avg",
)
RECIPES = {recipe.name: recipe for recipe in (*DIGITS, SMALL, WITHOUT_LABELS, *PAPER)}
# The recipe of a run that names none: on digits, and on other data.
DEFAULTS = dict(pretrain=("digits", "vit-b16/imagenet"), finetune=("finetune/digits", SMALL.name))
LARGE = "finetune/imagenet"  # used in place of SMALL for more training images than FEW
# With so many images, the 100 epochs of SMALL see as many as the 20,000 steps of 512 images of LARGE do. The paper
# fine-tunes on fewer, CIFAR's 50,000, for as many epochs (Table 4).
FEW = 20_000 * 512 // 100
logger = logging.getLogger("vitfast")


def get(name: str) -> Recipe:
    """The recipe of this name. Raises InputError, with the nearest names, where there is none."""
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]


def _for_its_size(config: Config) -> str:
    """The recipe of a fine-tuning that names none: its run's, else one by the number of its images."""
    from ..data.counting import count_images  # here, because these import torch, NumPy and YAML
    from ..run.distributed import is_first_rank
    from .run_folder import read_settings

    run = Path(config.output)
    for folder in (run, *run.glob("seed-*"), *run.glob("sweep/lr-*")) if os.path.isdir(config.output) else ():
        begun = read_settings(folder) or {}
        if (begun.get("task"), begun.get("data")) == ("finetune", config.data) and begun["name"] in RECIPES:
            return begun["name"]
    if not config.data or config.shots:
        return SMALL.name
    count = count_images(config, FEW)
    name = SMALL.name if count <= FEW else LARGE
    if count and is_first_rank():
        told = f"more than {FEW:,}" if count == FEW + 1 else f"{count:,}"
        logger.info("recipe %s: %s images (%s up to %s, %s above)", name, told, SMALL.name, f"{FEW:,}", LARGE)
    return name


def resolve(task: str, *layers: dict) -> Config:
    """A Config from the recipe that the layers name, over which each layer sets its fields in turn.

    An evaluation starts from no recipe, because a default one would say nothing about weights that another trained. For
    a fine-tuning that names none, the training images are counted, and their number decides. `epochs` of a layer
    replaces `steps` of an earlier one, and the other way round. Raises InputError for a field that does not exist, a
    value that a field does not allow, two lengths in one layer, or a missing length.
    """
    data = next((layer["data"] for layer in reversed(layers) if layer.get("data")), "")
    fields = as_plain(Recipe(steps=1) if task == "eval" else get(DEFAULTS[task][data != "digits"]))
    names = [layer.get("recipe", layer.get("name")) for layer in layers]
    for name, layer in zip(names, layers):
        if name not in (None, ""):
            fields.update(as_plain(get(str(name))))
        given = {key: value for key, value in layer.items() if key not in ("recipe", "name", "task")}
        lengths = {name for name in ("epochs", "steps") if not is_none(given.get(name))}
        if len(lengths) == 2:
            both = f"epochs {given['epochs']} and steps {given['steps']}"
            raise InputError(f"{both} are two lengths of one run; give one of them")
        if lengths:  # the other one may come from a weaker layer
            fields.update(epochs=None, steps=None)
        fields.update(given)
    for name in fields:
        if name not in FIELDS:
            raise unknown("setting", name, FIELDS)
    config = Config(**{**fields, "task": task})
    check_run(config)
    undecided = task == "finetune" and data != "digits" and not any(names)
    if undecided and (name := _for_its_size(config)) != config.name:
        return resolve(task, dict(recipe=name), *layers)
    return config


def model_arguments(config: Config, loaded: bool = False) -> dict:
    """The ViT arguments that a recipe decides; `loaded`: only those that loaded weights let it change."""
    rates = dict(pos_drop_rate=config.dropout, proj_drop_rate=config.dropout, drop_path_rate=config.drop_path)
    same = ["residual_in_fp32", "drop_path_mode", *(["img_size"] if config.img_size or not loaded else [])]
    if loaded:  # img_size 0: the weights keep their own
        return rates | {name: getattr(config, name) for name in same}
    same += ["init_values", "global_pool", "pos_embed", "pos_embed_at", "head_init_bias", "weight_init", "act_layer"]
    return rates | {name: getattr(config, name) for name in same} | dict(class_token=config.global_pool == "token")


def vit_arguments(config: Config, classes: int) -> dict:
    """The arguments of a new ViT. Raises InputError for a model that is no preset."""
    shape = preset(config.model)
    hidden = shape["embed_dim"] if config.hidden_head else None
    return {**model_arguments(config), **shape, "num_classes": classes, "representation_size": hidden}


def cost_arguments(config: Config, model: ViTConfig) -> dict:
    """The arguments of `vitfast.tools.cost.training.estimate` that the settings of a run decide."""
    found = dict(batch_size=config.batch_size, optimizer=config.optimizer, averaged=bool(config.ema_decay))
    if config.objective == "lejepa":
        kinds = crop_sizes(config, pair(model.img_size), pair(model.patch_size))
        widths = (model.embed_dim, config.projector_width, config.projector_width, config.projector_dim)
        found |= dict(crops=[kind for kind in kinds if kind[0]], projector=widths)
    return found
