"""The models that the paper compares with, BiT ResNets, and any other of timm, trained by the same loop."""

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
    """A model of timm that trains in the same loop: takes raw uint8 images too (`mean`, `std`), and saves itself as timm reads its models.

    arguments: of timm's constructor. A ResNet that timm has no name for (R50x2, R152x1, R200x3) is saved with the name it would have.
    """
    if name in RESNETS:
        layers, width = RESNETS[name]
        model = ResNetV2(
            layers,
            num_classes=num_classes,
            width_factor=width,
            stem_type="fixed",
            conv_layer=partial(StdConv2d, eps=1e-8),
            **arguments,
        )
        architecture = f"resnetv2_{name[1:].lower()}_bit"
    else:
        architecture = name.removeprefix(TIMM)
        try:
            model = timm.create_model(architecture, num_classes=num_classes, **arguments)
        except (RuntimeError, TypeError, ValueError) as error:
            near = timm.list_models(f"*{architecture.split('.')[0][:8]}*")[:3]
            raise InputError(
                f"timm cannot build {architecture!r} ({str(error).splitlines()[0]}){'; near: ' + ', '.join(near) if near else ''}"
            ) from None
    if img_size is not None and hasattr(model, "set_input_size"):
        model.set_input_size(img_size)
    told = getattr(model, "pretrained_cfg", None) or {}
    model.mean, model.std = tuple(told.get("mean", (0.5,) * 3)), tuple(told.get("std", (0.5,) * 3))
    model.register_forward_pre_hook(_normalize_raw)
    model.save_pretrained = partial(_save_baseline, model, architecture)
    return model


def _normalize_raw(model: nn.Module, args: tuple) -> tuple | None:
    images = args[0]
    return (
        (ref.normalize(images, model.mean, model.std, torch.float32), *args[1:])
        if images.dtype == torch.uint8
        else None
    )


def _save_baseline(model: nn.Module, architecture: str, folder) -> None:
    """model.safetensors, and config.json as timm's hub files have it."""
    save_file(
        {k: v.detach().contiguous().cpu() for k, v in model.state_dict().items()}, Path(folder) / "model.safetensors"
    )
    config = dict(
        architecture=architecture, num_classes=model.num_classes, pretrained_cfg=dict(mean=model.mean, std=model.std)
    )
    (Path(folder) / "config.json").write_text(json.dumps(config, indent=2))
