"""The paragraph before the first step of a run, and warnings about its length."""

import logging

import torch
from torch import nn

from ..data.images import printable
from ..data.loader import Data
from ..errors import both_ends
from ..model.vit import ViT
from ..run.config import UNLABELLED, Config, crop_sizes, total_steps
from .expectation import expectation

NAMED_CLASSES = 10  # how many classes are named
MOST_EPOCHS = 1000  # passes over the data above which a run warns
SHOWN = 40  # characters of a class's name
TASKS = dict(pretrain="pre-trains", finetune="fine-tunes")
logger = logging.getLogger("vitfast")


def introduce(config: Config, model: nn.Module, data: Data) -> float | None:
    """Logs, on the first rank, what a run is about to do; returns images/s to be expected, if known."""
    expected, normal = expectation(config, model, data)
    if not data.ranks.first:
        return expected
    steps, images = total_steps(config, len(data.train), data.images_per_step), len(data.train)
    epochs = steps * data.images_per_step / images
    weights = f" of {config.weights}" if config.weights else ""
    side = "x".join(map(str, data.img_size))
    size = f"of sizes {config.sizes} and, in evaluations, {side} pixels" if config.sizes else f"of {side} pixels"
    where = torch.cuda.get_device_name(data.device) if data.device.type == "cuda" else "the CPU"
    ranks = f" on {data.ranks.world} ranks" if data.ranks.world > 1 else ""
    recipe = f"recipe {config.name}" if config.name else "no recipe"
    about, passes = "about " if config.tokens_per_step else "", f"{epochs:,.4g}"
    passes += " epoch" if passes == "1" else " epochs"
    unlabelled, validation = learned(config, data), f" and {len(data.val):,} for validation, in {_classes(data)}"
    if unlabelled and len(data.classes) == 1:
        validation = f"; evaluations look at {len(data.val):,} images"
    logger.info(
        f"This run {TASKS[config.task]} {model_in_words(config, model)}{weights} on images {size}. "
        f"{config.data} has {_count(images, 'image')} for training{validation}. {unlabelled}"
        f"The run takes {_count(steps, 'step')} of {about}"
        f"{_count(round(data.images_per_step), 'image')}, which is {about}{passes}, by {recipe}. It "
        f"computes on {where}{ranks} in {precision(data.dtype)}, and writes to {config.output}.{normal}"
    )
    if data.packing is None and config.batch_size > images:
        logger.warning(
            f"a step takes {config.batch_size:,} images and the data has {images:,}, so each step repeats images: set "
            f"--batch-size, such as {max(1, min(64, images // 4))}, and a learning rate for that size"
        )
    if epochs > MOST_EPOCHS:
        logger.warning("this run passes over its data %s times: set --epochs, such as 50", f"{epochs:,.0f}")
    return expected


def learned(config: Config, data: Data) -> str:
    """A sentence on what a run without labels learns from, and by which labels it is evaluated; else ""."""
    if config.objective not in UNLABELLED:
        return ""
    what = "masked patches"
    if data.crops is not None:
        kinds = crop_sizes(config, data.img_size, data.crops.patch)
        what = " and ".join(f"{count} crops of {height}x{width}" for count, (height, width) in kinds if count)
        what = f"LeJEPA from {what} pixels of each image"
    by = "the effective rank of its features alone, as there is no class for each image"
    if data.probe is not None:
        by = f"a linear probe and nearest neighbours, by the labels of {data.probe.config.data}"
    return f"It learns by {what}, and no classes; it is evaluated by {by}. "


def model_in_words(config: Config, model: nn.Module) -> str:
    """The name and the size of a run's model."""
    vit = getattr(model, "vit", model)  # that of a model without labels
    parameters = f"{sum(p.numel() for p in model.parameters()):,} parameters"
    if not isinstance(vit, ViT):
        return f"{config.model} ({parameters})"
    patch = "x".join(map(str, vit.patch_embed.patch_size))
    name = "a ViT" if config.weights else config.model
    return f"{name} ({len(vit.blocks)} layers of width {vit.embed_dim}, patches of {patch}, {parameters})"


def _classes(data: Data) -> str:
    """How many classes there are, and the names of the first."""
    names, count = [both_ends(printable(name), SHOWN) for name in data.classes[:NAMED_CLASSES]], len(data.classes)
    shown = ", ".join(names) + (", ..." if count > NAMED_CLASSES else "")
    return f"{count:,} classes ({shown})" if count > 1 else f"one class ({shown})"


def _count(number: int, name: str) -> str:
    """ "1 step", "2 steps"."""
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def precision(dtype: torch.dtype | None) -> str:
    """The name of autocast's dtype; None stands for fp32."""
    return str(dtype or torch.float32).removeprefix("torch.")
