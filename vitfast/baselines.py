"""Baselines trained by the same loop: the paper's BiT ResNets, and any model of timm."""

import json
from functools import partial
from pathlib import Path

import timm
import torch
from safetensors.torch import save_file
from timm.layers import StdConv2d
from timm.models.resnetv2 import ResNetV2
from torch import nn

from . import ref
from .errors import InputError
from .files import write_text

# BiT ResNets of the scaling study: units per stage, width factor.
RESNETS = {
    "R50x1": ((3, 4, 6, 3), 1),
    "R50x2": ((3, 4, 6, 3), 2),
    "R101x1": ((3, 4, 23, 3), 1),
    "R152x1": ((3, 8, 36, 3), 1),
    "R152x2": ((3, 8, 36, 3), 2),
    "R200x3": ((3, 24, 36, 3), 3),
}
TIMM = "timm:"


def is_baseline(name: str) -> bool:
    """Whether a model's name is not one of our ViTs: a BiT ResNet, or timm:NAME."""
    return name in RESNETS or name.startswith(TIMM)


def baseline(name: str, num_classes: int, img_size: tuple[int, int] | None = None, **arguments) -> nn.Module:
    """A model of timm that takes raw uint8 images too (`mean`, `std`) and has `save_pretrained`.

    arguments: of timm's constructor. A ResNet that timm has no name for (R50x2, R152x1, R200x3) is saved with the name
    that it would have; `class_names`, where they are set, as timm's `label_names`. Raises InputError for a name that
    timm does not know.
    """
    if name in RESNETS:
        layers, width = RESNETS[name]
        options = dict(width_factor=width, stem_type="fixed", conv_layer=partial(StdConv2d, eps=1e-8))
        model = ResNetV2(layers, num_classes=num_classes, **options, **arguments)
        architecture = f"resnetv2_{name[1:].lower()}_bit"
    else:
        architecture = name.removeprefix(TIMM)
        try:
            model = timm.create_model(architecture, num_classes=num_classes, **arguments)
        except (RuntimeError, TypeError, ValueError) as error:
            near = timm.list_models(f"*{architecture.split('.')[0][:8]}*")[:3]
            hint = f"; near: {', '.join(near)}" if near else ""
            raise InputError(f"timm cannot build {architecture!r} ({str(error).splitlines()[0]}){hint}") from None
    if img_size is not None and hasattr(model, "set_input_size"):
        model.set_input_size(img_size)
    cfg = getattr(model, "pretrained_cfg", None) or {}
    model.mean, model.std = tuple(cfg.get("mean", (0.5,) * 3)), tuple(cfg.get("std", (0.5,) * 3))
    model.register_forward_pre_hook(_normalize_raw)
    model.save_pretrained = partial(_save_baseline, model, architecture)
    return model


def _normalize_raw(model: nn.Module, args: tuple) -> tuple | None:
    if args[0].dtype != torch.uint8:
        return None
    return ref.normalize(args[0], model.mean, model.std, torch.float32), *args[1:]


def _save_baseline(model: nn.Module, architecture: str, folder) -> None:
    """model.safetensors, and config.json as timm's hub files have it."""
    tensors = {k: v.detach().contiguous().cpu() for k, v in model.state_dict().items()}
    save_file(tensors, Path(folder) / "model.safetensors")
    cfg = dict(mean=model.mean, std=model.std)
    config = dict(architecture=architecture, num_classes=model.num_classes, pretrained_cfg=cfg)
    if getattr(model, "class_names", None):
        config["label_names"] = list(model.class_names)
    write_text(Path(folder) / "config.json", json.dumps(config, indent=2))
