"""The recipes by name, and a run's Config out of a recipe, a file and flags."""

from ..errors import InputError, unknown
from ..run.config import FIELDS, NAMED_DATA, Config, Recipe, as_plain, check_run, is_none
from .paper import PAPER

# Recipes are data: each stands whole, here as in paper.py, even where two agree in many fields.
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
    "For a folder of tens to about ten thousand images; size and normalisation are those of the weights.",
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
RECIPES = {recipe.name: recipe for recipe in (*DIGITS, SMALL, *PAPER)}
# The recipe of a run that names none: on digits, on a folder, and on other data.
DEFAULTS = dict(
    pretrain=("digits", "vit-b16/imagenet", "vit-b16/imagenet"),
    finetune=("finetune/digits", "finetune/small", "finetune/imagenet"),
)


def get(name: str) -> Recipe:
    """The recipe of this name; InputError with the nearest names where there is none."""
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]


def default(task: str, data: str) -> Recipe:
    """The recipe of a run on this data that names none."""
    data = str(data)
    other = data == "synthetic" or data.startswith(tuple(NAMED_DATA))
    return get(DEFAULTS[task][0 if data == "digits" else 2 if other else 1])


def resolve(task: str, *layers: dict) -> Config:
    """A Config from the recipe that the layers name, then each layer of fields over the one before it.

    An evaluation starts from no recipe, because a default one would say nothing about weights that another trained.
    `epochs` of a layer replaces `steps` of an earlier one, and the other way round. Raises InputError for a field that
    does not exist, a value that a field does not allow, two lengths in one layer, or a missing length.
    """
    data = next((layer["data"] for layer in reversed(layers) if layer.get("data")), "")
    fields = as_plain(Recipe(steps=1) if task == "eval" else default(task, data))
    for layer in layers:
        name = layer.get("recipe", layer.get("name"))
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
    return config
