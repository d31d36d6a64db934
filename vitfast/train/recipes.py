"""Recipes: everything that decides what a run computes, as frozen data. Any field can be overridden with --set FIELD=VALUE."""

import dataclasses
import types
import typing
from dataclasses import dataclass

from ..errors import InputError, unknown


@dataclass(frozen=True)
class Recipe:
    """What a run computes. Lengths are `epochs` or `steps` (steps win); batch_size is the global batch of one optimiser step."""

    name: str = ""
    model: str = "B/16"
    img_size: int = 224
    epochs: float | None = None
    steps: int | None = None
    batch_size: int = 1024
    accumulate: int = 1  # micro-batches per step

    optimizer: str = "adamw"  # adamw | sgd
    lr: float = 1e-3
    sweep_lr: tuple[float, ...] = ()  # the candidates the paper tried
    lr_decay: str = "cosine"  # cosine | linear | constant
    lr_end: float = 0.0
    warmup_steps: int = 0
    weight_decay: float = 0.0  # decoupled, times the learning rate, on kernels only
    momentum: float = 0.9  # of sgd
    betas: tuple[float, float] = (0.9, 0.999)  # of adamw
    clip_norm: float | None = None
    ema_decay: float | None = None

    objective: str = "softmax"  # softmax | sigmoid
    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    crop_scale: tuple[float, float] = (0.08, 1.0)  # share of the area; (1, 1) is the plain resize
    crop_ratio: tuple[float, float] = (0.75, 4 / 3)
    hflip: float = 0.5
    color_jitter: float = 0.0
    auto_augment: str = ""  # timm's names, such as rand-m10-n2

    dropout: float = 0.0  # the paper's, after dense layers and positions
    drop_path: float = 0.0
    init_values: float | None = None  # LayerScale
    global_pool: str = "token"
    pos_embed: str = "learn"
    hidden_head: bool = False  # the paper's pre-training head: one tanh layer before the last
    head_init_bias: float | None = None
    weight_init: str = ""
    residual_in_fp32: bool = False


@dataclass(frozen=True)
class Config(Recipe):
    """A recipe, and where and how it runs: what `config.yaml` in the run folder holds."""

    task: str = "pretrain"  # pretrain | finetune | eval
    data: str = ""
    data_dir: str = ""  # root of timm's dataset names
    num_classes: int | None = None  # only where the data does not say
    output: str = ""
    weights: str = ""
    seed: int = 0
    device: str = ""  # cuda where there is one, else cpu
    amp: str = "auto"  # auto: bf16 on cuda, none on cpu | bf16 | fp16 | none
    compile: bool | None = None  # default: on cuda
    workers: int | None = None  # loader processes; default by data and cores
    eval_batch_size: int = 256
    eval_every: int | None = None  # steps; default: at most 20 times, at the ends of epochs
    log_every: int = 10
    save_every: int | None = None  # steps; default: at each evaluation
    parallel: str = "ddp"  # under torchrun: ddp | fsdp (parameters, gradients and optimiser state sharded by block)
    max_unreadable: int = 100  # training images that may be replaced because they cannot be read, before the run stops


# What another value of does not change the course of a run that is continued.
RUN_ONLY = frozenset(
    {"output", "device", "compile", "workers", "eval_batch_size", "eval_every", "log_every", "save_every", "data_dir", "parallel", "max_unreadable"}
)

_PAPER_PRETRAIN = dict(optimizer="adamw", betas=(0.9, 0.999), batch_size=4096, warmup_steps=10_000, img_size=224, hidden_head=True, weight_init="jax")
_PAPER_FINETUNE = dict(optimizer="sgd", momentum=0.9, lr_decay="cosine", batch_size=512, clip_norm=1.0, img_size=384, warmup_steps=500, crop_scale=(0.05, 1.0))

_ALL = (
    # vitfast pretrain --recipe digits --data digits --output runs/digits
    # 8 x 8 scans at 32 px, 16 patches; about 0.98 on the test split.
    Recipe(
        name="digits",
        model="Nano/8",
        img_size=32,
        epochs=48,
        batch_size=48,
        lr=2e-3,
        warmup_steps=100,
        weight_decay=0.05,
        clip_norm=1.0,
        crop_scale=(0.8, 1.0),
        crop_ratio=(0.9, 1.1),
        hflip=0.0,
        hidden_head=True,
        weight_init="jax",
    ),
    # vitfast finetune --recipe finetune/digits --weights runs/digits/checkpoints/last --data digits --output runs/digits48
    Recipe(
        name="finetune/digits",
        model="Nano/8",
        img_size=48,
        epochs=14,
        optimizer="sgd",
        batch_size=64,
        lr=0.03,
        sweep_lr=(0.003, 0.01, 0.03, 0.06),
        warmup_steps=20,
        clip_norm=1.0,
        crop_scale=(0.85, 1.0),
        crop_ratio=(0.9, 1.1),
        hflip=0.0,
    ),
    # vitfast pretrain --recipe vit/imagenet --model B/16 --data DIR --output runs/b16
    # Table 3, last row. The paper: 74.79 % top-1 for B/16 before fine-tuning.
    Recipe(name="vit/imagenet", model="B/16", epochs=300, lr=3e-3, lr_decay="cosine", weight_decay=0.3, dropout=0.1, clip_norm=1.0, **_PAPER_PRETRAIN),
    # vitfast pretrain --recipe plain-s16/imagenet-90ep --data DIR --output runs/s16
    # "Better plain ViT baselines for ImageNet-1k" (Beyer et al., 2022): 76.5 % top-1.
    Recipe(
        name="plain-s16/imagenet-90ep",
        model="S/16",
        epochs=90,
        batch_size=1024,
        lr=1e-3,
        warmup_steps=10_000,
        weight_decay=0.1,
        clip_norm=1.0,
        mixup=0.2,
        auto_augment="rand-m10-n2",
        global_pool="avg",
        pos_embed="sincos2d",
        weight_init="jax",
    ),
    # vitfast finetune --recipe finetune/cifar10 --weights B_16.npz --data torch/cifar10 --output runs/cifar10
    # Table 4. The paper, B/16 pre-trained on JFT-300M: 99.00 %.
    Recipe(name="finetune/cifar10", steps=10_000, lr=0.01, sweep_lr=(0.001, 0.003, 0.01, 0.03), **_PAPER_FINETUNE),
    Recipe(name="finetune/imagenet", steps=20_000, lr=0.03, sweep_lr=(0.003, 0.01, 0.03, 0.06), **_PAPER_FINETUNE),
)
RECIPES = {recipe.name: recipe for recipe in _ALL}


def default_recipe(task: str, data: str) -> str:
    """The recipe of a run that names none."""
    if data == "digits":
        return "finetune/digits" if task == "finetune" else "digits"
    return "finetune/imagenet" if task == "finetune" else "vit/imagenet"


def get(name: str) -> Recipe:
    """The recipe of this name; InputError with the nearest names where there is none."""
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]


def resolve(task: str, *layers: dict) -> Config:
    """A Config from the recipe that the layers name, then each layer of fields over the one before it.

    Raises InputError for a field that does not exist, a value of the wrong type, or a length that is not there.
    """
    data = next((layer["data"] for layer in reversed(layers) if layer.get("data")), "")
    fields = as_plain(get(default_recipe(task, data)))
    for layer in layers:
        name = layer.get("recipe") or layer.get("name")
        if name:
            fields.update(as_plain(get(name)))
        given = {key: value for key, value in layer.items() if key not in ("recipe", "name", "task")}
        if "epochs" in given and "steps" not in given:
            fields["steps"] = None
        elif "steps" in given and "epochs" not in given:
            fields["epochs"] = None
        fields.update(given)
    fields = {key: coerce(key, value) for key, value in fields.items()}
    config = Config(**{**fields, "task": task})
    _check(config)
    return config


_TYPES = typing.get_type_hints(Config)


def coerce(field: str, value):
    """`value` (perhaps text from the command line) as the type of a field of Config; InputError where it is not one."""
    if field not in _TYPES:
        raise unknown("setting", field, _TYPES)
    wanted = _TYPES[field]
    options = typing.get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,)
    if type(None) in options and (value is None or str(value).lower() in ("none", "null", "")):
        return None
    kind = next(o for o in options if o is not type(None))
    try:
        return _convert(kind, value)
    except (TypeError, ValueError):
        shown = getattr(kind, "__name__", str(kind)) if typing.get_origin(kind) is None else "numbers, such as 0.9,0.999"
        raise InputError(f"{field} must be {shown}, got {value!r}") from None


def as_plain(config: Recipe) -> dict:
    """The fields as YAML and JSON hold them."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(config).items()}


_TRUTH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def _convert(kind, value):
    """One value as `kind`; ValueError or TypeError where it is not one."""
    if kind is bool:
        return _TRUTH.get(str(value).lower()) if str(value).lower() in _TRUTH else int("not a truth value")
    if typing.get_origin(kind) is tuple:
        parts = value.strip("()[] ").split(",") if isinstance(value, str) else list(value)
        numbers = tuple(float(part) for part in parts if str(part).strip())
        expected = [arg for arg in typing.get_args(kind) if arg is not Ellipsis]
        if Ellipsis not in typing.get_args(kind) and len(numbers) != len(expected):
            raise ValueError(f"{len(expected)} numbers")
        return numbers
    if kind is int:
        if isinstance(value, bool) or float(value) != int(float(value)):
            raise ValueError("a whole number")
        return int(float(value))
    return kind(value)


_CHOICES = dict(
    optimizer=("adamw", "sgd"),
    lr_decay=("cosine", "linear", "constant"),
    objective=("softmax", "sigmoid"),
    parallel=("ddp", "fsdp"),
    amp=("auto", "bf16", "fp16", "none"),
)
_POSITIVE = ("img_size", "batch_size", "accumulate", "lr", "eval_batch_size", "log_every", "epochs", "steps", "save_every", "eval_every", "clip_norm")


def _check(config: Config) -> None:
    for field, known in _CHOICES.items():
        if getattr(config, field) not in known:
            raise InputError(f"{field} must be one of {', '.join(known)}, got {getattr(config, field)!r}")
    for field in _POSITIVE:
        value = getattr(config, field)
        if value is not None and not value > 0:
            raise InputError(f"{field} must be positive, got {value}")
    for field in ("dropout", "drop_path", "label_smoothing", "hflip", "momentum"):
        if not 0 <= getattr(config, field) < 1 and not (field == "hflip" and config.hflip == 1):
            raise InputError(f"{field} must lie in [0, 1), got {getattr(config, field)}")
    if config.epochs is None and config.steps is None:
        raise InputError("the run has no length: give --epochs or --steps")
