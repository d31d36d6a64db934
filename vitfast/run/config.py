"""A run's settings: Recipe (the computation) and Config (also where it runs).

Both are frozen, and no instance holds a value that its field does not allow: each field has its type, its range or
its choices here, and nowhere else. Any field can be set with --set FIELD=VALUE.
"""

import dataclasses
import functools
import math
import re
import typing
from dataclasses import dataclass

from ..errors import InputError, both_ends
from .fields import allowed, choice, count, natural, plain, positive, rule, span, within

# What the names of timm's data sets start with, and an example of each.
NAMED_DATA = {"torch/": "torch/cifar10", "hfds/": "hfds/timm/mini-imagenet", "wds/": "wds/DIR"}
UNLABELLED = {"masked": "masked patch prediction", "lejepa": "LeJEPA"}  # the objectives that need no labels
LEAST = 4  # images of a micro-batch that LeJEPA compares
MAX_PIXELS = 250_000_000  # in an image: telephones take photographs of up to 200 million
MOST_CLASSES = 10**6  # in a data set: a larger label is damaged, and would fill the memory with classes


def _sizes(value: str) -> bool:
    """Whether a text is "", "native" or two sides in pixels, the smaller first, such as "128:256"."""
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

    name: str = plain("", "the recipe's name")
    about: str = plain("", "the recipe's command, and what was published for it")
    model: str = plain(
        "B/16",
        "a preset, such as Ti/16 S/8 S/16 S/32 B/16 B/32 L/16 L/32 H/14; R50+B/16; DINOv3-S/16 S+ B L H+ 7B; "
        "SigLIP2-B/16 L So400m/14; CLIP-B/32; EVA02-Ti/14 S B L; a ResNet such as R50x1; or timm:NAME",
    )
    img_size: int = rule(
        224,
        lambda value: 0 <= value <= 16384,
        "be at most 16384, and positive, or 0 for the weights' own",
        "the side of the images in pixels, to which positions are interpolated; 0: the size of the weights from which "
        "the run starts",
    )
    epochs: float | None = rule(
        None, lambda value: 0 < value <= 1e6, "be positive, and at most a million", "passes over the training images"
    )
    steps: int | None = count(None, 10**12, "optimiser steps, in place of epochs")
    batch_size: int = count(1024, 10**9, "images of an optimiser step, over all devices and micro-batches")
    accumulate: int = count(
        1,
        10**9,
        "micro-batches of a step on each device: the same step in less memory, except that dropout, drop path, mixup, "
        "cutmix and the masks of patch prediction are drawn for each micro-batch, and LeJEPA's statistics are of it",
    )
    scale_lr: int | None = positive(None, "lr is multiplied by batch_size / scale_lr")

    optimizer: str = choice(("adamw", "sgd", "lamb"), "the optimiser")
    lr: float = rule(
        1e-3, lambda value: 0 < value <= 1e9, "be positive, and at most 1e9", "the learning rate after the warm-up"
    )
    sweep_lr: tuple[float, ...] = rule(
        (), lambda value: min(value, default=1) > 0, "be positive numbers", "the learning rates that --sweep tries"
    )
    sweep_hold_out: float = within(0.1, "[0, 1)", "the share of the training images on which --sweep compares them")
    lr_decay: str = choice(("cosine", "linear", "constant"), "how the learning rate falls after the warm-up")
    lr_end: float = natural(0.0, "the learning rate at the end")
    warmup_steps: int = within(0, "[0, 1e12]", "steps in which the learning rate rises linearly from 0")
    warmup_ratio: float = within(
        0.0, "[0, 1)", "the warm-up as a share of the run; the longer of this and warmup_steps counts"
    )
    weight_decay: float = natural(0.0, "decoupled weight decay, times the learning rate, for weight matrices only")
    momentum: float = within(0.9, "[0, 1)", "the momentum of sgd")
    betas: tuple[float, float] = rule(
        (0.9, 0.999), lambda v: 0 <= min(v) <= max(v) < 1, "lie in [0, 1)", "the betas of adamw and lamb"
    )
    layer_decay: float | None = within(
        None, "(0, 1]", "the learning rate of a layer is this times that of the next layer"
    )
    clip_norm: float | None = positive(None, "the largest norm of the gradient; a larger gradient is scaled down")
    non_finite: str = choice(
        ("stop", "skip"), "what a run does at a step whose gradients are not finite: stop, or skip the step"
    )
    ema_decay: float | None = within(None, "[0, 1)", "the decay of a moving average of the weights, which is evaluated")
    ema_warmup: bool = plain(True, "the average's decay at step n is at most 1 - n^(-2/3), as in timm's warm-up")

    objective: str = choice(
        ("softmax", "sigmoid", "masked", "lejepa"),
        "the loss: cross-entropy by softmax or by sigmoid; or, without labels, masked patch prediction or LeJEPA",
    )
    mask_target: str = choice(
        ("mean", "downsized", "pixels"),
        "what is predicted for a masked patch: its mean colour, 4 x 4 colours, or all pixels",
    )
    mask_share: float = within(0.5, "(0, 1]", "the share of an image's patches that is masked")
    global_crops: int = count(2, 100, "LeJEPA's large crops of an image, of img_size pixels and crop_scale of its area")
    local_crops: int = within(6, "[0, 100]", "LeJEPA's small crops of an image")
    local_size: int | None = count(None, 16384, "the side of a small crop in pixels; unset: 3/7 of img_size")
    local_scale: tuple[float, float] = span((0.05, 0.3), 1, "the share of an image's area that a small crop keeps")
    sigreg_lambda: float = within(0.05, "[0, 1]", "LeJEPA's lambda: the share of SIGReg in the loss")
    projector_width: int = count(2048, 10**6, "the width of the two hidden layers of LeJEPA's projector")
    projector_dim: int = within(16, "[2, 1e5]", "the dimensions of LeJEPA's projections")
    label_smoothing: float = within(0.0, "[0, 1)", "the share of the target that is spread over all classes")
    mixup: float = within(0.0, "[0, 100]", "alpha of mixup; 0 for none")
    cutmix: float = within(0.0, "[0, 100]", "alpha of cutmix; 0 for none")

    sizes: str = rule(
        "",
        _sizes,
        "be LOW:HIGH in pixels, the smaller first, such as 128:256, or native, or empty",
        "draw a side from LOW:HIGH for each training image: it gets the area of this square, in its own aspect, and "
        "batches have no padding (NaViT); native: vitfast eval and predict take each image at its own size",
    )
    tokens_per_step: int | None = count(
        None, 10**9, "with sizes: a step takes as many images as fit into this many tokens; unset: batch_size images"
    )
    drop_tokens: float = within(0.0, "[0, 1)", "the share of an image's patches that training drops")

    train_crop_mode: str = choice(
        ("rrc", "squash"), "rrc: a random resized crop; squash: a crop in the image's own aspect, resized to a square"
    )
    crop_scale: tuple[float, float] = span(
        (0.08, 1.0), 1, "the share of the area that a crop keeps; 1,1 with squash only resizes"
    )
    crop_ratio: tuple[float, float] = span((0.75, 4 / 3), 100, "the aspect ratio of rrc's crops, width over height")
    hflip: float = within(0.5, "[0, 1]", "the share of the images that are mirrored")
    color_jitter: float = within(0.0, "[0, 10]", "the strength of changes in brightness, contrast and saturation")
    hue_jitter: float = within(0.0, "[0, 0.5]", "the strength of changes in hue, as a share of the colour circle")
    jitter_share: float = within(1.0, "[0, 1]", "the share of the images whose colours change")
    grayscale: float = within(0.0, "[0, 1]", "the share of the images that become grey")
    blur: float = within(
        0.0, "[0, 1]", "the share of the images that are blurred, by up to 2 pixels, and by less below 96 pixels"
    )
    solarize: float = within(0.0, "[0, 1]", "the share of the images whose light half is inverted")
    auto_augment: str = rule(
        "",
        AUTO_AUGMENT.fullmatch,
        "be a policy of timm, such as rand-m10-n2, or empty",
        "AutoAugment, RandAugment or AugMix, by timm's name",
    )
    random_erasing: float = within(0.0, "[0, 1]", "the share of the images that lose a rectangle to noise")

    crop_mode: str = choice(
        ("", "center", "squash", "border"),
        "images are resized to img_size / crop_pct and then cut; center keeps the aspect, squash does not, border "
        "keeps it and fills up with the model's mean; empty: as the weights say, else center",
    )
    crop_pct: float | None = within(
        None, "[0.1, 1]", "the share of a side that the central crop keeps; unset: as the weights say, else 1"
    )
    interpolation: str = choice(
        ("", "nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"),
        "the filter with which Pillow resizes; empty: as the weights say, else bicubic",
    )

    dropout: float = within(0.0, "[0, 1)", "the paper's dropout, after dense layers and positions")
    drop_path: float = within(
        0.0, "[0, 1)", "the rate of stochastic depth in the last layer; it rises linearly from 0 in the first"
    )
    drop_path_mode: str = choice(
        ("mask", "subset"),
        "mask: drop path computes all images and drops some; subset: it computes a fixed share of them (DINOv2)",
    )
    init_values: float | None = rule(
        None,
        lambda value: 0 < value <= 1e9,
        "be positive, and at most 1e9",
        "LayerScale's start value; unset: no LayerScale",
    )
    global_pool: str = choice(("token", "avg"), "what the head reads: the class token or the mean of the patches")
    pos_embed: str = choice(
        ("learn", "learn2d", "factorized", "sincos2d", "relative", "none"),
        "position embeddings: one table; tables of columns and rows, joined (learn2d) or added (factorized); fixed "
        "sines; relative in each layer's attention; or none",
    )
    pos_embed_at: str = choice(
        ("stem", "layers", "layers_shared"),
        "where positions are added: once, or before each layer with tables of its own or one shared table",
    )
    act_layer: str = choice(("gelu", "gelu_tanh"), "the activation of a new model; weights keep their own")
    hidden_head: bool = plain(False, "the paper's pre-training head: a tanh layer before the last")
    head_init_bias: float | None = within(None, "[-1e9, 1e9]", "the head's bias at the start; unset: by weight_init")
    weight_init: str = choice(
        ("", "jax", "jax_nlhb", "moco", "reset", "skip"), "timm's mode of initialisation; empty: timm's default"
    )
    residual_in_fp32: bool = plain(False, "keep the residual stream in fp32 when the matrix products run in 16 bits")

    def __post_init__(self):
        for each in dataclasses.fields(self):
            object.__setattr__(self, each.name, allowed(each, _types()[each.name], getattr(self, each.name)))


@dataclass(frozen=True)
class Config(Recipe):
    """A recipe, and where and how it runs: the content of `config.yaml` in the run folder."""

    task: str = choice(("pretrain", "finetune", "eval"), "what the run does; the command sets it")
    data: str = plain(
        "",
        "a folder with train/<class>/ and val/<class>/, or with train/labels.csv and val/labels.csv; or digits, "
        "synthetic, torch/NAME, hfds/NAME, wds/FOLDER; without labels also any folder or list of images",
    )
    probe: str = plain(
        "", "labelled images, given as data is, by which training without labels is evaluated; empty: those of data"
    )
    data_dir: str = plain("", "the root folder of timm's data sets")
    num_classes: int | None = count(None, MOST_CLASSES, "the number of classes, if the data does not say it")
    exif_orientation: bool = plain(True, "turn images upright as EXIF says")
    max_pixels: int = count(MAX_PIXELS, 2**31, "the most pixels of an image; one with more counts as unreadable")
    shots: int | None = positive(None, "train on only this many images of each class")
    train_images: int | None = positive(None, "train on only this many images")
    hold_out: float = within(0.0, "[0, 1)", "validate on this share of the training images, which are not trained on")
    early_stop: int | None = positive(None, "the run ends after this many evaluations without a better accuracy")
    weights: str = plain("", "the weights to start from: file, folder or hf-hub:owner/name")
    seed: int = rule(
        0,
        lambda value: 0 <= value < 2**63,
        "lie in [0, 2^63)",
        "the seed of initialisation, the order of images, augmentation and dropout",
    )

    output: str = plain("", "the run folder: settings, log, checkpoints, results")
    device: str = rule(
        "",
        re.compile(r"|cpu|cuda(:\d{1,3})?").fullmatch,
        "be cpu, cuda or cuda:N",
        "where the run computes; empty: cuda if there is a GPU, else cpu",
    )
    amp: str = choice(("auto", "bf16", "fp16", "none"), "autocast's dtype; auto is bf16 on cuda and none on cpu")
    compile: bool | None = plain(None, "whether to use torch.compile; unset: only on cuda")
    compile_mode: str = choice(("default", "reduce-overhead"), "torch.compile's mode; reduce-overhead: CUDA graphs")
    workers: int | None = natural(
        None,
        "loader processes of each rank; unset: none for digits and synthetic, else its share of cores, at most 8",
    )
    decode: str = choice(
        ("host", "device"), "what decodes, crops and resizes JPEG files for training: the CPU or the GPU"
    )
    eval_batch_size: int = count(256, 10**9, "images at once in evaluations, on each device")
    eval_every: int | None = positive(None, "steps between evaluations; unset: after each epoch, but at most 20 times")
    log_every: int = positive(10, "steps between lines of the log")
    save_every: int | None = positive(None, "steps between checkpoints; unset: at each evaluation")
    parallel: str = choice(
        ("ddp", "fsdp"),
        "how processes share the model: ddp copies it; fsdp shards parameters, gradients and optimiser state by block",
    )
    max_unreadable: int = natural(
        100, "how many images may be unreadable: training replaces them, evaluations leave them out"
    )


# Fields that do not change the course of a run: it may be continued with other values of them.
RUN_ONLY = frozenset(
    "output device compile compile_mode workers eval_batch_size eval_every log_every save_every data_dir parallel "
    "max_unreadable decode non_finite probe".split()
)

FIELDS = tuple(each.name for each in dataclasses.fields(Config))


@functools.cache
def _types() -> dict[str, typing.Any]:
    return typing.get_type_hints(Config)


def values(each: dataclasses.Field) -> str:
    """The range or the choices of a field, "" where its type says them."""
    return each.metadata.get("text", "").removeprefix("be ").removeprefix("lie ")


def commented(config: Recipe) -> str:
    """The fields as YAML, which --config takes, with the meaning and the range of each beside it."""
    import yaml

    lines = []
    for name, value in as_plain(config).items():
        each = config.__dataclass_fields__[name]
        # A list of one value in the flow style is the value in one line, between brackets.
        line = f"{name}: {yaml.safe_dump([value], default_flow_style=True, width=math.inf).strip()[1:-1]}"
        meaning = each.metadata["meaning"] + (f" ({values(each)})" if values(each) else "")
        lines.append(line if "\n" in line else f"{line:<24}  # {meaning}")
    return "\n".join(lines)


def total_steps(config: Recipe, images: int, per_step: float | None = None) -> int:
    """Optimiser steps of a run on `images` training images, `per_step` (default: batch_size) in each."""
    return config.steps or max(1, round((config.epochs or 0) * images / (per_step or config.batch_size)))


def as_plain(config: Recipe) -> dict:
    """The fields as YAML and JSON hold them."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(config).items()}


def course(settings: dict, length: bool = False) -> dict:
    """The settings that decide the course of a run; with `length`, epochs and steps are among them."""
    other = RUN_ONLY | {"about"} if length else RUN_ONLY | {"about", "epochs", "steps"}
    whole = as_plain(Config()) | settings
    return {name: whole[name] for name in FIELDS if name not in other}


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


def crop_sizes(config: Recipe, img_size: tuple[int, int], patch: tuple[int, int]) -> list[tuple[int, tuple[int, int]]]:
    """(how many, (height, width) in pixels) of LeJEPA's global and local crops, in whole patches.

    Raises InputError for a local_size that is not a multiple of the patch.
    """
    local = (config.local_size,) * 2 if config.local_size else img_size
    if config.local_size and (local[0] % patch[0] or local[1] % patch[1]):
        raise InputError(f"local_size {config.local_size} must be a multiple of the patch, {patch[0]} x {patch[1]}")
    if not config.local_size:  # 3/7: 96 of 224 pixels
        local = tuple(max(1, round(side * 3 / 7 / part)) * part for side, part in zip(img_size, patch))
    return [(config.global_crops, img_size), (config.local_crops, local)]


def check_run(config: Config) -> None:
    """Raises InputError for settings that contradict each other or give the run no length."""
    unlabelled = UNLABELLED.get(config.objective)
    if unlabelled and (config.mixup or config.cutmix):
        raise InputError(f"{unlabelled} takes its targets from the images: set mixup=0 cutmix=0")
    if config.objective == "lejepa":
        for name, wanted in (("sizes", ""), ("drop_tokens", 0), ("tokens_per_step", None), ("decode", "host")):
            if getattr(config, name) != wanted:
                raise InputError(f"LeJEPA packs the crops of images, and {name} cannot: set {name}={wanted or 'none'}")
        if config.global_crops + config.local_crops < 2:
            raise InputError("LeJEPA compares the crops of an image: global_crops and local_crops must be 2 at least")
        if config.batch_size < LEAST * config.accumulate:
            few = f"batch_size {config.batch_size} over accumulate {config.accumulate} must be at least {LEAST}"
            raise InputError(f"LeJEPA compares the images of a micro-batch: {few}")
    if unlabelled and config.task == "finetune":
        raise InputError(f"fine-tuning learns classes, and {unlabelled} none: vitfast pretrain takes --weights too")
    if unlabelled and config.layer_decay:
        raise InputError(f"layer_decay is for fine-tuning, and not for {unlabelled}")
    if config.probe and not unlabelled:
        raise InputError("probe is for training without labels: leave it out, or set objective=lejepa")
    if config.epochs is None and config.steps is None:
        raise InputError("the run has no length: give --epochs or --steps")
