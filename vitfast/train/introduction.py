"""The paragraph before the first step of a run, and warnings about its length."""

import logging
import os

import torch
from torch import nn

from ..data.loader import Data
from ..model.vit import ViT
from ..run.config import Config, total_steps

NAMED_CLASSES = 10  # how many classes are named
MOST_EPOCHS = 1000  # passes over the data above which a run warns
TASKS = dict(pretrain="pre-trains", finetune="fine-tunes")
logger = logging.getLogger("vitfast")


def introduce(config: Config, model: nn.Module, data: Data, device: torch.device, dtype: torch.dtype | None) -> None:
    """Logs the model, data, length, device and folder of a run; warns of lengths that mislead."""
    steps, images = total_steps(config, len(data.train), data.images_per_step), len(data.train)
    epochs = steps * data.images_per_step / images
    weights = f" of {config.weights}" if config.weights else ""
    size = "x".join(map(str, data.img_size))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    ranks = f" on {data.ranks.world} ranks" if data.ranks.world > 1 else ""
    recipe = f"recipe {config.name}" if config.name else "no recipe"
    logger.info(
        f"This run {TASKS[config.task]} {model_in_words(config, model)}{weights} on images of {size} pixels. "
        f"{config.data} has {images:,} images for training and {len(data.val):,} for validation, in {_classes(data)}. "
        f"The run takes {steps:,} steps of {data.images_per_step:,.0f} images, which is {epochs:,.4g} epochs, "
        f"by {recipe}. It computes on {where}{ranks} in {_name(dtype)}, with {torch.get_num_threads()} threads "
        f"and {data.workers} loader processes, and writes to {os.fspath(config.output)}."
    )
    if data.packing is None and config.batch_size > images:
        fitting = max(1, min(64, images // 4))
        logger.warning(
            "a step takes %s images and the data has %s, so each step repeats images: set --batch-size, such as "
            "%d, and a learning rate for that size",
            f"{config.batch_size:,}",
            f"{images:,}",
            fitting,
        )
    if epochs > MOST_EPOCHS:
        logger.warning("this run passes over its data %s times: set --epochs, such as 50", f"{epochs:,.0f}")


def model_in_words(config: Config, model: nn.Module) -> str:
    """The name and the size of a run's model."""
    vit = getattr(model, "vit", model)  # of masked patch prediction
    parameters = f"{sum(p.numel() for p in model.parameters()):,} parameters"
    if not isinstance(vit, ViT):
        return f"{config.model} ({parameters})"
    patch = "x".join(map(str, vit.patch_embed.patch_size))
    name = "a ViT" if config.weights else config.model
    return f"{name} ({len(vit.blocks)} layers of width {vit.embed_dim}, patches of {patch}, {parameters})"


def _classes(data: Data) -> str:
    """How many classes there are, and the names of the first."""
    names = data.classes
    shown = ", ".join(names[:NAMED_CLASSES]) + (", ..." if len(names) > NAMED_CLASSES else "")
    return f"{len(names):,} classes ({shown})" if len(names) > 1 else f"one class ({shown})"


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype or torch.float32).removeprefix("torch.")
