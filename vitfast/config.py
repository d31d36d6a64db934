"""A run's settings: Recipe (the computation) and Config (also where it runs).

Both are frozen; values are typed and checked. Any field can be set with --set FIELD=VALUE.
"""

import dataclasses
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field

from .errors import InputError, unknown


def rule(default, holds: Callable[[object], bool], text: str):
    """A field whose values other than None must fulfil `holds`; `text` completes "FIELD must ..."."""
    return field(default=default, metadata=dict(holds=holds, text=text))


def choice(*names: str):
    """A field with one of these values, the first by default."""
    return rule(names[0], lambda value: value in names, f"be one of {', '.join(names)}")


def positive(default):
    return rule(default, lambda value: value > 0, "be positive")


def fraction(default: float):
    return rule(default, lambda value: 0 <= value < 1, "lie in [0, 1)")


def share(default: float):
    return rule(default, lambda value: 0 <= value <= 1, "lie in [0, 1]")


@dataclass(frozen=True)
class Recipe:
    """The computation of a run. `batch_size` is the global batch of one optimiser step."""

    name: str = ""
    about: str = ""  # the command, and what was published for it
    model: str = "B/16"
    img_size: int = positive(224)
    epochs: float | None = positive(None)
    steps: int | None = positive(None)  # in place of epochs
    batch_size: int = positive(1024)
    accumulate: int = positive(1)  # micro-batches per step and device: the same step in less memory
    scale_lr: int | None = positive(None)  # multiply lr by batch_size / this

    optimizer: str = choice("adamw", "sgd", "lamb")
    lr: float = positive(1e-3)
    sweep_lr: tuple[float, ...] = ()  # the candidates the paper tried; finetune --sweep tries them on
    sweep_hold_out: float = fraction(0.1)  # this share of the training set
    lr_decay: str = choice("cosine", "linear", "constant")
    lr_end: float = 0.0
    warmup_steps: int = 0
    weight_decay: float = 0.0  # decoupled, times the learning rate, on kernels only
    momentum: float = fraction(0.9)  # of sgd
    betas: tuple[float, float] = (0.9, 0.999)  # of adamw
    layer_decay: float | None = None  # each layer's rate is this times the next one's
    clip_norm: float | None = positive(None)
    ema_decay: float | None = None

    objective: str = choice("softmax", "sigmoid", "masked")  # masked: patch prediction
    mask_target: str = choice("mean", "downsized", "pixels")
    mask_share: float = share(0.5)
    label_smoothing: float = fraction(0.0)
    mixup: float = 0.0
    cutmix: float = 0.0
    train_crop_mode: str = choice(
        "rrc", "squash"
    )  # random resized crop; or with the image's own aspect, resized square
    crop_scale: tuple[float, float] = (0.08, 1.0)  # share of the area; (1, 1) with squash is the plain resize
    crop_ratio: tuple[float, float] = (0.75, 4 / 3)  # of rrc
    hflip: float = share(0.5)
    color_jitter: float = 0.0
    auto_augment: str = ""  # timm's names, such as rand-m10-n2
    random_erasing: float = share(0.0)  # share of the images that lose a rectangle to noise
    # Evaluation, in timm's words: resized to img_size / crop_pct, then cut at the centre. Unset: as the weights say
    # (the run they come from, timm's config.json), else center and 1. center keeps the aspect and cuts off what is
    # over, squash does not keep it, border keeps it and fills up.
    crop_mode: str = choice("", "center", "squash", "border")
    crop_pct: float | None = rule(None, lambda value: 0 < value <= 1, "lie in (0, 1]")

    dropout: float = fraction(0.0)  # the paper's, after dense layers and positions
    drop_path: float = fraction(0.0)
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
    """A recipe, and where and how it runs: the content of `config.yaml` in the run folder."""

    task: str = "pretrain"  # pretrain | finetune | eval
    data: str = ""
    data_dir: str = ""  # root of timm's dataset names
    num_classes: int | None = None  # only where the data does not say
    shots: int | None = positive(None)  # train on this many images a class alone
    train_images: int | None = positive(None)  # train on this many images alone
    hold_out: float = fraction(0.0)  # validate on this share of the training images, which are then not trained on
    output: str = ""
    weights: str = ""
    seed: int = 0
    device: str = ""  # cuda where there is one, else cpu
    amp: str = choice("auto", "bf16", "fp16", "none")  # auto: bf16 on cuda, none on cpu
    compile: bool | None = None  # default: on cuda
    workers: int | None = None  # loader processes; default by data and cores
    decode: str = choice("host", "device")  # where JPEG files are decoded, cropped and resized for training
    eval_batch_size: int = positive(256)
    eval_every: int | None = positive(None)  # steps; default: at most 20 times, at the ends of epochs
    log_every: int = positive(10)
    save_every: int | None = positive(None)  # steps; default: at each evaluation
    parallel: str = choice("ddp", "fsdp")  # under torchrun; fsdp: parameters, gradients, optimiser sharded by block
    max_unreadable: int = 100  # images that may be unreadable: replaced in training, left out of an evaluation


# Fields that do not change the course of a run: it may be continued with other values of them.
RUN_ONLY = frozenset(
    "output device compile workers eval_batch_size eval_every log_every save_every data_dir parallel max_unreadable "
    "decode".split()
)

_TYPES = typing.get_type_hints(Config)
_TRUTH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def coerce(name: str, value):
    """`value`, perhaps text, as the type of the field `name` of Config. Raises InputError."""
    if name not in _TYPES:
        raise unknown("setting", name, _TYPES)
    options = typing.get_args(_TYPES[name]) if isinstance(_TYPES[name], types.UnionType) else (_TYPES[name],)
    if type(None) in options and (value is None or str(value).lower() in ("none", "null", "")):
        return None
    kind = next(option for option in options if option is not type(None))
    try:
        return _parse(kind, value)
    except (TypeError, ValueError, KeyError):
        expected = "numbers, such as 0.9,0.999" if typing.get_origin(kind) is tuple else kind.__name__
        raise InputError(f"{name} must be {expected}, got {value!r}") from None


def _parse(kind, value):
    """One value as `kind`; ValueError, TypeError or KeyError where it is not one."""
    if kind is bool:
        return _TRUTH[str(value).lower()]
    if typing.get_origin(kind) is tuple:
        texts = value.strip("()[] ").split(",") if isinstance(value, str) else list(value)
        numbers = tuple(float(text) for text in texts if str(text).strip())
        lengths = typing.get_args(kind)
        if Ellipsis not in lengths and len(numbers) != len(lengths):
            raise ValueError(f"{len(lengths)} numbers")
        return numbers
    if kind is int:
        if isinstance(value, bool) or float(value) != int(float(value)):
            raise ValueError("a whole number")
        return int(float(value))
    return kind(value)


def total_steps(config: Recipe, images: int) -> int:
    """Optimiser steps of a whole run on `images` training images."""
    return config.steps or max(1, round((config.epochs or 0) * images / config.batch_size))


def as_plain(config: Recipe) -> dict:
    """The fields as YAML and JSON hold them."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(config).items()}


def check_config(config: Config) -> None:
    """Raises InputError for a value that its field does not allow, and for contradictions."""
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if each.metadata and value is not None and not each.metadata["holds"](value):
            raise InputError(f"{each.name} must {each.metadata['text']}, got {value!r}")
    if config.objective == "masked" and (config.mixup or config.cutmix):
        raise InputError("masked patch prediction takes its targets from the images: set mixup=0 cutmix=0")
    if config.epochs is None and config.steps is None:
        raise InputError("the run has no length: give --epochs or --steps")
