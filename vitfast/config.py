"""What a run is told: Recipe (what it computes) and Config (and where it runs), frozen, typed, checked. Any field can be set with --set FIELD=VALUE."""

import dataclasses
import types
import typing
from dataclasses import dataclass

from .errors import InputError, unknown


@dataclass(frozen=True)
class Recipe:
    """What a run computes. Lengths are `epochs` or `steps` (steps win); batch_size is the global batch of one optimiser step."""

    name: str = ""
    about: str = ""  # the command, and what was published for it
    model: str = "B/16"
    img_size: int = 224
    epochs: float | None = None
    steps: int | None = None
    batch_size: int = 1024
    accumulate: int = 1  # micro-batches per step and device: the same step in less memory
    scale_lr: int | None = None  # multiply lr by batch_size / this

    optimizer: str = "adamw"  # adamw | sgd | lamb
    lr: float = 1e-3
    sweep_lr: tuple[float, ...] = ()  # the candidates the paper tried; finetune --sweep tries them on
    sweep_hold_out: float = 0.1  # this share of the training set
    lr_decay: str = "cosine"  # cosine | linear | constant
    lr_end: float = 0.0
    warmup_steps: int = 0
    weight_decay: float = 0.0  # decoupled, times the learning rate, on kernels only
    momentum: float = 0.9  # of sgd
    betas: tuple[float, float] = (0.9, 0.999)  # of adamw
    layer_decay: float | None = None  # each layer's rate is this times the next one's
    clip_norm: float | None = None
    ema_decay: float | None = None

    objective: str = "softmax"  # softmax | sigmoid | masked (patch prediction)
    mask_target: str = "mean"  # mean | downsized | pixels
    mask_share: float = 0.5
    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    crop_scale: tuple[float, float] = (0.08, 1.0)  # share of the area; (1, 1) is the plain resize
    crop_ratio: tuple[float, float] = (0.75, 4 / 3)
    hflip: float = 0.5
    color_jitter: float = 0.0
    auto_augment: str = ""  # timm's names, such as rand-m10-n2
    random_erasing: float = 0.0  # share of the images that lose a rectangle to noise

    dropout: float = 0.0  # the paper's, after dense layers and positions
    drop_path: float = 0.0
    init_values: float | None = None  # LayerScale
    global_pool: str = "token"
    pos_embed: str = "learn"
    pos_embed_at: str = "stem"  # stem | layers | layers_shared
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
    shots: int | None = None  # train on this many images a class alone
    train_images: int | None = None  # train on this many images alone
    hold_out: float = 0.0  # validate on this share of the training images, which are then not trained on
    output: str = ""
    weights: str = ""
    seed: int = 0
    device: str = ""  # cuda where there is one, else cpu
    amp: str = "auto"  # auto: bf16 on cuda, none on cpu | bf16 | fp16 | none
    compile: bool | None = None  # default: on cuda
    workers: int | None = None  # loader processes; default by data and cores
    decode: str = "host"  # host | device: where JPEG files are decoded, cropped and resized for training
    eval_batch_size: int = 256
    eval_every: int | None = None  # steps; default: at most 20 times, at the ends of epochs
    log_every: int = 10
    save_every: int | None = None  # steps; default: at each evaluation
    parallel: str = "ddp"  # under torchrun: ddp | fsdp (parameters, gradients and optimiser state sharded by block)
    max_unreadable: int = 100  # training images that may be replaced because they cannot be read, before the run stops


# What another value of does not change the course of a run that is continued.
RUN_ONLY = frozenset(
    {
        "output",
        "device",
        "compile",
        "workers",
        "eval_batch_size",
        "eval_every",
        "log_every",
        "save_every",
        "data_dir",
        "parallel",
        "max_unreadable",
        "decode",
    }
)

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
        shown = (
            getattr(kind, "__name__", str(kind)) if typing.get_origin(kind) is None else "numbers, such as 0.9,0.999"
        )
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
    optimizer=("adamw", "sgd", "lamb"),
    lr_decay=("cosine", "linear", "constant"),
    objective=("softmax", "sigmoid", "masked"),
    mask_target=("mean", "downsized", "pixels"),
    parallel=("ddp", "fsdp"),
    decode=("host", "device"),
    amp=("auto", "bf16", "fp16", "none"),
)
_POSITIVE = (
    "img_size",
    "batch_size",
    "accumulate",
    "lr",
    "eval_batch_size",
    "log_every",
    "epochs",
    "steps",
    "save_every",
    "eval_every",
    "clip_norm",
    "shots",
    "train_images",
    "scale_lr",
)


def check(config: Config) -> None:
    for field, known in _CHOICES.items():
        if getattr(config, field) not in known:
            raise InputError(f"{field} must be one of {', '.join(known)}, got {getattr(config, field)!r}")
    for field in _POSITIVE:
        value = getattr(config, field)
        if value is not None and not value > 0:
            raise InputError(f"{field} must be positive, got {value}")
    for field in ("dropout", "drop_path", "label_smoothing", "momentum", "hold_out", "sweep_hold_out"):
        if not 0 <= getattr(config, field) < 1:
            raise InputError(f"{field} must lie in [0, 1), got {getattr(config, field)}")
    for field in ("hflip", "random_erasing", "mask_share"):
        if not 0 <= getattr(config, field) <= 1:
            raise InputError(f"{field} must lie in [0, 1], got {getattr(config, field)}")
    if config.objective == "masked" and (config.mixup or config.cutmix):
        raise InputError("masked patch prediction takes its targets from the images: set mixup=0 cutmix=0")
    if config.epochs is None and config.steps is None:
        raise InputError("the run has no length: give --epochs or --steps")
