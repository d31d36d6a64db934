"""From a Config to the network and the data of a run. Nothing is written here."""

from pathlib import Path

import torch
from torch import nn

from ..baselines import baseline, is_baseline
from ..config import Config
from ..data.loader import Data, open_data
from ..data.samples import ONE, seed_everything
from ..distributed import Ranks
from ..errors import InputError
from ..model import ViT
from ..presets import pair, preset
from .masked import MaskedPatches


def model_arguments(config: Config, loaded: bool = False) -> dict:
    """ViT arguments that a recipe decides; `loaded`: those that it may change on loaded weights."""
    arguments = dict(
        img_size=config.img_size,
        pos_drop_rate=config.dropout,
        proj_drop_rate=config.dropout,
        drop_path_rate=config.drop_path,
        residual_in_fp32=config.residual_in_fp32,
    )
    if loaded:
        return arguments
    return arguments | dict(
        init_values=config.init_values,
        global_pool=config.global_pool,
        class_token=config.global_pool == "token",
        pos_embed=config.pos_embed,
        **({} if config.pos_embed_at == "stem" else dict(pos_embed_at=config.pos_embed_at)),
        head_init_bias=config.head_init_bias,
        weight_init=config.weight_init,
    )


def set_up(
    config: Config,
    device: torch.device,
    ranks: Ranks = ONE,
    checkpoint: Path | None = None,
    examples: int | None = None,
) -> tuple[nn.Module, Data]:
    """The network and the data of a run, every input checked. Raises InputError.

    checkpoint: where the run continues; the network has its architecture, and its weights are still to be loaded.
    examples: train on this many images alone.
    """
    seed_everything(config.seed)
    from_timm = is_baseline(config.model)
    if config.weights and from_timm:
        raise InputError(f"--weights are read for ViTs only; {config.model} starts from scratch")
    if config.objective == "masked" and from_timm:
        raise InputError(f"objective=masked trains vitfast's ViTs only; take softmax or sigmoid for {config.model}")
    if (checkpoint or config.weights) and not from_timm:
        model = ViT.from_pretrained(checkpoint or config.weights, **model_arguments(config, loaded=True))
        size, patch_size = model.patch_embed.img_size, model.patch_embed.patch_size
        data = open_data(config, size, patch_size, device, ranks, examples)
        if model.num_classes != len(data.classes) or (config.task == "finetune" and not checkpoint):
            model.reset_classifier(len(data.classes))
    elif config.task == "finetune" and not from_timm:
        raise InputError("finetune starts from weights: add --weights FILE_OR_FOLDER")
    else:
        with torch.device("meta"):
            _new_model(config, 1)  # what does not fit or is not known fails here, before the data is read
        patch_size = (1, 1) if from_timm else pair(preset(config.model)["patch_size"])
        data = open_data(config, pair(config.img_size), patch_size, device, ranks, examples)
        model = _new_model(config, len(data.classes))
    model = model.to(device)
    if config.objective == "masked":
        model = MaskedPatches(model, config.mask_target, config.mask_share)
    else:
        model.class_names = data.classes  # kept in the checkpoint's config.json
    return model, data


def _new_model(config: Config, classes: int) -> nn.Module:
    if is_baseline(config.model):
        arguments = dict(drop_path_rate=config.drop_path) if config.drop_path else {}
        return baseline(config.model, classes, pair(config.img_size), **arguments)
    shape = preset(config.model)
    hidden = shape["embed_dim"] if config.hidden_head else None
    return ViT(**{**shape, **model_arguments(config)}, num_classes=classes, representation_size=hidden)
