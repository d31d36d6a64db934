"""The network and the data of a run, made from its Config. Nothing is written here."""

import logging
from pathlib import Path

import torch
from torch import nn

from ..data.loader import Data, open_data
from ..data.samples import ONE, seed_everything
from ..errors import InputError
from ..eval.accuracy import check_sizes, cut_as_told
from ..model.baselines import baseline, baseline_of, classifiers, load_baseline, replace_head, sizes
from ..model.checkpoint.files import EXAMPLE
from ..model.preprocessing import CROP
from ..model.presets import is_baseline, pair, preset
from ..model.vit import ViT
from ..run.config import UNLABELLED, Config
from ..run.distributed import Ranks
from .lejepa import LeJEPA
from .masked import MaskedPatches
from .recipes import model_arguments, vit_arguments

logger = logging.getLogger("vitfast")


def set_up(
    config: Config,
    device: torch.device,
    ranks: Ranks = ONE,
    checkpoint: Path | None = None,
    examples: int | None = None,
) -> tuple[nn.Module, Data]:
    """The network and the data of a run, whose inputs are all checked. Raises InputError.

    checkpoint: where the run continues; the network has its architecture, and its weights are still to be loaded.
    examples: train on this many images only.
    """
    seed_everything(config.seed)
    if source := checkpoint or config.weights:
        if name := baseline_of(config.model, source):
            arguments = _baseline_arguments(config, name)
            model = load_baseline(name, source, pair(config.img_size) if config.img_size else None, **arguments)
        else:
            model = ViT.from_pretrained(source, **model_arguments(config, loaded=True))
        config = cut_as_told(config, model)
    elif config.task == "finetune":
        raise InputError(f"finetune starts from weights: add --weights FILE_OR_FOLDER, or --weights {EXAMPLE}")
    elif not config.img_size:
        raise InputError("img_size 0 stands for the size of the weights, and this run has none: give --img-size")
    else:
        with torch.device("meta"):
            _say_what_is_its_own(config)
            model = new_model(config, 1)  # what does not fit or is not known fails here, before the data is read
    keeps = checkpoint or (config.weights and config.task != "finetune")  # its head
    known = tuple(map(str, getattr(model, "class_names", None) or ())) if keeps else ()
    check_sizes(model, config)
    prefix = getattr(model, "num_prefix_tokens", 0)
    data = open_data(config, *sizes(model), device, ranks, examples, prefix, model.mean, known)
    renamed = known and not checkpoint and {*known} != {*data.classes} != {*map(str, range(len(data.classes)))}
    if not source:
        model = new_model(config, len(data.classes))
    elif model.num_classes != len(data.classes) or renamed or (config.task == "finetune" and not checkpoint):
        if keeps and model.num_classes:
            logger.warning("the head of %s is replaced: its classes are not those of %s", source, config.data)
        replace_head(model, len(data.classes))
    model = model.to(device)
    # The checkpoint's config.json keeps these, because a later evaluation needs them.
    for name, default in CROP.items():
        setattr(model, name, getattr(config, name) or default)
    if config.objective == "masked":
        model = MaskedPatches(model, config.mask_target, config.mask_share)
    elif config.objective == "lejepa":
        crops, projector = (config.global_crops, config.local_crops), (config.projector_width, config.projector_dim)
        model = LeJEPA(model, *crops, config.sigreg_lambda, *projector)
    else:
        model.class_names = data.classes
    return model, data


def new_model(config: Config, classes: int) -> nn.Module:
    """The ViT or the baseline that a config trains, from scratch. Raises InputError."""
    if is_baseline(config.model):
        model = baseline(config.model, classes, pair(config.img_size), **_baseline_arguments(config, config.model))
        for layer in classifiers(model) if config.head_init_bias is not None else ():
            nn.init.constant_(layer.bias, config.head_init_bias)
        return model
    return ViT(**vit_arguments(config, classes))


def _say_what_is_its_own(config: Config) -> None:
    """Logs where a preset's own value replaces the recipe's: positions, pooling, the activation."""
    shape, asked = {} if is_baseline(config.model) else preset(config.model), model_arguments(config)
    if own := [f"{name}={shape[name]!r}" for name in asked if name in shape and shape[name] != asked[name]]:
        logger.warning("%s has its own %s; the recipe's values are not used", config.model, ", ".join(own))


def _baseline_arguments(config: Config, name: str) -> dict:
    """timm's arguments that a recipe decides."""
    if config.objective in UNLABELLED:
        own = f"objective={config.objective} trains vitfast's ViTs only"
        raise InputError(f"{own}; take softmax or sigmoid for {name}")
    return dict(drop_path_rate=config.drop_path) if config.drop_path else {}
