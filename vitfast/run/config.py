"""A run's settings: Recipe (the computation) and Config (also where it runs).

Both are frozen, and no instance holds a value that its field does not allow: each field has its type, its range or
its choices here, and nowhere else. Any field can be set with --set FIELD=VALUE.
"""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import InputError, both_ends

# What the names of timm's data sets start with, and an example of each.
NAMED_DATA = {"torch/": "torch/cifar10", "hfds/": "hfds/timm/mini-imagenet", "wds/": "wds/DIR"}
NAMED_DATA |= {"hfids/": "hfids/timm/mini-imagenet", "tfds/": "tfds/mnist"}
MOST_CLASSES = 10**6  # of a data set: a larger label is damaged, and would fill the memory with classes


def rule(default, holds: Callable[[object], bool], text: str):
    """A field whose values other than None must fulfil `holds`; `text` completes "FIELD must ..."."""
    return field(default=default, metadata=dict(holds=holds, text=text))


def choice(*names: str):
    """A field with one of these values, the first by default."""
    return rule(names[0], lambda value: value in names, f"be one of {', '.join(name or repr(name) for name in names)}")


def positive(default):
    return rule(default, lambda value: value > 0, "be positive")


def count(default: int | None, most: int):
    """A field of a whole number from 1 to `most`, so that no slip of the finger takes the machine down."""
    return rule(default, lambda value: 1 <= value <= most, f"be positive, and at most {most}")


def within(default: float | None, interval: str):
    """A field of a number in an interval such as "[0, 1)", which includes the end at a square bracket."""
    low, high = map(float, interval[1:-1].split(","))
    ends = {low} if interval[0] == "[" else set()
    ends |= {high} if interval[-1] == "]" else set()
    return rule(default, lambda value: low < value < high or value in ends, f"lie in {interval}")


def at_least(default, low):
    return rule(default, lambda value: value >= low, f"be at least {low:g}")


def span(default: tuple[float, float], low: float, high: float):
    """A field of two numbers, the smaller first, above `low` and up to `high`."""
    text = f"be two numbers, the smaller first, above {low:g} and at most {high:g}"
    return rule(default, lambda value: low < value[0] <= value[1] <= high, text)


def _sizes(value: str) -> bool:
    """ "128:256": two sides in pixels, the smaller first; or "native"."""
    low, _, high = value.partition(":")
    return value in ("", "native") or (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high) <= 16384)


# The names of augmentations as timm takes them: AutoAugment, RandAugment, AugMix.
_NUMBER = r"\d{1,3}(\.\d+)?"
_POLICIES = rf"(original|originalr|v0|v0r|3a)(-mstd{_NUMBER})?"
_RANDOM = rf"rand(-(m\d{{1,2}}|n\d|p(0(\.\d+)?|1)|mstd{_NUMBER}|mmax\d{{1,2}}|inc[01]|tweights|t3aw?))*"
_AUGMIX = rf"augmix(-(m\d{{1,2}}|w[1-9]|d[1-9]|a[1-9]\d*|b[01]|mstd{_NUMBER}))*"
AUTO_AUGMENT = re.compile(rf"|{_POLICIES}|{_RANDOM}|{_AUGMIX}")


@dataclass(frozen=True)
class Recipe:
    """The computation of a run. `batch_size` is the global batch of one optimiser step."""

    name: str = ""
    about: str = ""  # the command, and what was published for it
    model: str = "B/16"
    # 0: the size of the weights that the run starts from.
    img_size: int = rule(
        224, lambda value: 0 <= value <= 16384, "be at most 16384, and positive, or 0 for the weights' own"
    )
    epochs: float | None = rule(None, lambda value: 0 < value <= 1e6, "be positive, and at most a million")
    steps: int | None = count(None, 10**12)  # in place of epochs
    batch_size: int = count(1024, 10**9)
    # Micro-batches per step and device: the same step in less memory, but for random numbers. Dropout, drop path,
    # mixup, cutmix and the masks of patch prediction are drawn anew for each micro-batch.
    accumulate: int = count(1, 10**9)
    scale_lr: int | None = positive(None)  # multiply lr by batch_size / this

    optimizer: str = choice("adamw", "sgd", "lamb")
    lr: float = rule(1e-3, lambda value: 0 < value <= 1e9, "be positive, and at most 1e9")
    # The candidates the paper tried; finetune --sweep tries them on sweep_hold_out of the training set.
    sweep_lr: tuple[float, ...] = rule((), lambda value: min(value, default=1) > 0, "be positive numbers")
    sweep_hold_out: float = within(0.1, "[0, 1)")
    lr_decay: str = choice("cosine", "linear", "constant")
    lr_end: float = at_least(0.0, 0)
    warmup_steps: int = within(0, "[0, 1e12]")
    warmup_ratio: float = within(0.0, "[0, 1)")  # share of the run, where that is longer than warmup_steps
    weight_decay: float = at_least(0.0, 0)  # decoupled, times the learning rate, on kernels only
    momentum: float = within(0.9, "[0, 1)")  # of sgd
    # Of adamw and lamb.
    betas: tuple[float, float] = rule((0.9, 0.999), lambda v: 0 <= min(v) <= max(v) < 1, "lie in [0, 1)")
    layer_decay: float | None = within(None, "(0, 1]")  # each layer's rate is this times the next one's
    clip_norm: float | None = positive(None)
    non_finite: str = choice("stop", "skip")  # what happens at a step whose gradients are not finite
    ema_decay: float | None = within(None, "[0, 1)")

    objective: str = choice("softmax", "sigmoid", "masked")  # masked: patch prediction
    mask_target: str = choice("mean", "downsized", "pixels")
    mask_share: float = within(0.5, "(0, 1]")
    label_smoothing: float = within(0.0, "[0, 1)")
    mixup: float = within(0.0, "[0, 100]")
    cutmix: float = within(0.0, "[0, 100]")
    # Images of many sizes, packed without padding (NaViT): each is given the area of a square of a side drawn from
    # LOW:HIGH pixels, in its own aspect; a step takes as many as fit into tokens_per_step (unset: batch_size images);
    # drop_tokens: the share of an image's patches that is dropped. Evaluations are at img_size; those of `vitfast eval`
    # and `predict` with sizes=native at each image's own size.
    sizes: str = rule("", _sizes, "be LOW:HIGH in pixels, the smaller first, such as 128:256, or native, or empty")
    tokens_per_step: int | None = count(None, 10**9)
    drop_tokens: float = within(0.0, "[0, 1)")
    train_crop_mode: str = choice("rrc", "squash")  # random resized crop; or the image's own aspect, resized square
    crop_scale: tuple[float, float] = span((0.08, 1.0), 0, 1)  # share of the area; (1, 1) with squash only resizes
    crop_ratio: tuple[float, float] = span((0.75, 4 / 3), 0, 100)  # of rrc
    hflip: float = within(0.5, "[0, 1]")
    color_jitter: float = within(0.0, "[0, 10]")
    auto_augment: str = rule("", AUTO_AUGMENT.fullmatch, "be a policy of timm, such as rand-m10-n2, or empty")
    random_erasing: float = within(0.0, "[0, 1]")  # share of the images that lose a rectangle to noise
    # Evaluation, in timm's words: resized to img_size / crop_pct, then cut at the centre. Unset: as the weights say
    # (the run they come from, timm's config.json), else center and 1. center keeps the aspect and cuts off what is
    # over, squash does not keep it, border keeps it and fills up. interpolation: Pillow's filter, else bicubic.
    crop_mode: str = choice("", "center", "squash", "border")
    crop_pct: float | None = within(None, "[0.1, 1]")
    interpolation: str = choice("", "nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")

    dropout: float = within(0.0, "[0, 1)")  # the paper's, after dense layers and positions
    drop_path: float = within(0.0, "[0, 1)")
    drop_path_mode: str = choice("mask", "subset")  # subset (DINOv2): branches run on a fixed share of the images
    init_values: float | None = rule(None, lambda value: 0 < value <= 1e9, "be positive, and at most 1e9")  # LayerScale
    global_pool: str = choice("token", "avg")
    pos_embed: str = choice("learn", "learn2d", "factorized", "sincos2d", "relative", "none")
    pos_embed_at: str = choice("stem", "layers", "layers_shared")
    act_layer: str = choice("gelu", "gelu_tanh")  # of new models; weights say their own
    hidden_head: bool = False  # the paper's pre-training head: one tanh layer before the last
    head_init_bias: float | None = within(None, "[-1e9, 1e9]")
    weight_init: str = choice("", "jax", "jax_nlhb", "moco", "reset", "skip")
    residual_in_fp32: bool = False

    def __post_init__(self):
        for each in dataclasses.fields(self):
            object.__setattr__(self, each.name, allowed(each, getattr(self, each.name)))


@dataclass(frozen=True)
class Config(Recipe):
    """A recipe, and where and how it runs: the content of `config.yaml` in the run folder."""

    task: str = choice("pretrain", "finetune", "eval")
    data: str = ""
    data_dir: str = ""  # root of timm's dataset names
    num_classes: int | None = count(None, MOST_CLASSES)  # only where the data does not say
    # Turn the images of folders, and those of `vitfast predict`, upright as their EXIF orientation says. timm's and
    # torchvision's readers ignore it, so the images of their names (torch/, hfds/, wds/) stay as they are stored. A run
    # that began before there was this setting goes on without it.
    exif_orientation: bool = True
    shots: int | None = positive(None)  # train on this many images a class alone
    train_images: int | None = positive(None)  # train on this many images alone
    hold_out: float = within(0.0, "[0, 1)")  # validate on this share of the training images, and do not train on it
    early_stop: int | None = positive(None)  # evaluations without a better accuracy before the end; keeps the best too
    output: str = ""
    weights: str = ""
    seed: int = rule(0, lambda value: 0 <= value < 2**63, "lie in [0, 2^63)")
    # "": cuda where there is one, else cpu.
    device: str = rule("", re.compile(r"|cpu|cuda(:\d{1,3})?").fullmatch, "be cpu, cuda or cuda:N")
    amp: str = choice("auto", "bf16", "fp16", "none")  # auto: bf16 on cuda, none on cpu
    compile: bool | None = None  # default: on cuda
    workers: int | None = at_least(None, 0)  # loader processes; default by data and cores
    decode: str = choice("host", "device")  # where JPEG files are decoded, cropped and resized for training
    eval_batch_size: int = count(256, 10**9)
    eval_every: int | None = positive(None)  # steps; default: at most 20 times, at the ends of epochs
    log_every: int = positive(10)
    save_every: int | None = positive(None)  # steps; default: at each evaluation
    parallel: str = choice("ddp", "fsdp")  # under torchrun; fsdp: parameters, gradients, optimiser sharded by block
    max_unreadable: int = at_least(100, 0)  # images that may be unreadable: training replaces, evaluation skips them


# Fields that do not change the course of a run: it may be continued with other values of them.
RUN_ONLY = frozenset(
    "output device compile workers eval_batch_size eval_every log_every save_every data_dir parallel max_unreadable "
    "decode non_finite".split()
)

# The values that runs had from before there were these fields.
BEFORE = dict(exif_orientation=False)

FIELDS = tuple(each.name for each in dataclasses.fields(Config))
_TYPES = typing.get_type_hints(Config)
_TRUTH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def is_none(value) -> bool:
    """Whether a value, perhaps as text, says that an optional field is unset."""
    return value is None or str(value).lower() in ("none", "null", "")


def allowed(each: dataclasses.Field, value):
    """`value`, perhaps given as text, in the field's type. Raises InputError if the field forbids it."""
    options = typing.get_args(_TYPES[each.name]) if isinstance(_TYPES[each.name], types.UnionType) else ()
    if type(None) in options and is_none(value):
        return None
    kind = next((option for option in options if option is not type(None)), _TYPES[each.name])
    shown = both_ends(repr(value), 80)
    try:
        parsed = _parse(kind, value)
    except (TypeError, ValueError, KeyError, OverflowError):
        expected = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}
        text = expected.get(kind, "numbers, such as 0.9,0.999")
        raise InputError(f"{each.name} must be {text}, got {shown}") from None
    if each.metadata and not each.metadata["holds"](parsed):
        raise InputError(f"{each.name} must {each.metadata['text']}, got {shown}")
    return parsed


def _parse(kind, value):
    """Converts one value to `kind`; raises a built-in exception of Python where that is impossible."""
    if kind is bool:
        return _TRUTH[str(value).lower()]
    if kind is str:
        if isinstance(value, bool) or not isinstance(value, (str, int, float)) or "\0" in str(value):
            raise ValueError("text")
        return str(value)
    if typing.get_origin(kind) is tuple:
        items = value.strip("()[] ").split(",") if isinstance(value, str) else list(value)
        numbers = tuple(_parse(float, item) for item in items if str(item).strip())
        lengths = typing.get_args(kind)
        if Ellipsis not in lengths and len(numbers) != len(lengths):
            raise ValueError(f"{len(lengths)} numbers")
        return numbers
    if isinstance(value, bool):
        raise ValueError("a number")
    if kind is int and re.fullmatch(r"\s*[+-]?\d+\s*", str(value)):  # not by way of float, which holds 53 bits
        return int(value)
    number = float(value)
    if not math.isfinite(number) or (kind is int and not number.is_integer()):
        raise ValueError("a number")
    return kind(number)


def total_steps(config: Recipe, images: int, per_step: float | None = None) -> int:
    """Optimiser steps of a run on `images` training images, `per_step` (default: batch_size) in each."""
    return config.steps or max(1, round((config.epochs or 0) * images / (per_step or config.batch_size)))


def as_plain(config: Recipe) -> dict:
    """The fields as YAML and JSON hold them."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(config).items()}


def course(settings: dict, length: bool = False) -> dict:
    """The settings that decide the course of a run; with `length`, epochs and steps are among them."""
    other = RUN_ONLY | {"about"} if length else RUN_ONLY | {"about", "epochs", "steps"}
    return {name: value for name, value in settings.items() if name not in other}


def changes(before: dict, now: dict, inside: str = "") -> list[str]:
    """The settings that differ, as text; those inside a mapping have its name in front."""
    found = []
    for name in dict.fromkeys((*before, *now)):
        there, here = before.get(name), now.get(name)
        if isinstance(there, dict) and isinstance(here, dict):
            found += changes(there, here, f"{inside}{name}.")
        elif there != here:
            told = ("unset" if value in (None, "", []) else both_ends(str(value), 60) for value in (there, here))
            found.append("{}{}: {} there, {} now".format(inside, name, *told))
    return found


def check_run(config: Config) -> None:
    """Raises InputError for settings that contradict each other, or tell no length."""
    if config.objective == "masked" and (config.mixup or config.cutmix):
        raise InputError("masked patch prediction takes its targets from the images: set mixup=0 cutmix=0")
    if config.epochs is None and config.steps is None:
        raise InputError("the run has no length: give --epochs or --steps")
