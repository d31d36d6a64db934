"""From a Config to the things a run is made of: device, model, data. Nothing is written here."""

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


def model_arguments(config: Config) -> dict:
    """Constructor arguments that the recipe decides, apart from the preset's own."""
    arguments = dict(
        img_size=config.img_size,
        pos_drop_rate=config.dropout,
        proj_drop_rate=config.dropout,
        drop_path_rate=config.drop_path,
        residual_in_fp32=config.residual_in_fp32,
    )
    if config.weights:
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


def build(config: Config, device: torch.device, ranks: Ranks = ONE) -> tuple[nn.Module, Data]:
    """The network at its start and the data, every input checked. Raises InputError."""
    seed_everything(config.seed)
    if is_baseline(config.model):
        return _build_baseline(config, device, ranks)
    model, data = _build_vit(config, device, ranks)
    if config.objective == "masked":
        model = MaskedPatches(model, config.mask_target, config.mask_share).to(device)
    return model, data


def _build_baseline(config: Config, device: torch.device, ranks: Ranks) -> tuple[nn.Module, Data]:
    if config.weights:
        raise InputError(f"--weights are read for ViTs only; {config.model} starts from scratch")
    size, arguments = pair(config.img_size), dict(drop_path_rate=config.drop_path) if config.drop_path else {}
    with torch.device("meta"):
        baseline(config.model, 1, size, **arguments)  # what timm cannot build fails here, before the data is read
    data = open_data(config, size, (1, 1), device, ranks)
    return baseline(config.model, len(data.classes), size, **arguments).to(device), data


def _build_vit(config: Config, device: torch.device, ranks: Ranks) -> tuple[ViT, Data]:
    if config.weights:
        model = ViT.from_pretrained(config.weights, **model_arguments(config))
        data = open_data(config, model.patch_embed.img_size, model.patch_embed.patch_size, device, ranks)
        if config.task == "finetune" or model.num_classes != len(data.classes):
            model.reset_classifier(len(data.classes))
        return model.to(device), data
    if config.task == "finetune":
        raise InputError("finetune starts from weights: add --weights FILE_OR_FOLDER")
    shape = preset(config.model)
    with torch.device("meta"):
        ViT(**{**shape, **model_arguments(config)})  # sizes that do not fit fail here, before the data is read
    data = open_data(config, pair(config.img_size), pair(shape["patch_size"]), device, ranks)
    hidden = shape["embed_dim"] if config.hidden_head else None
    model = ViT(**{**shape, **model_arguments(config)}, num_classes=len(data.classes), representation_size=hidden)
    return model.to(device), data
