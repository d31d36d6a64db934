"""From a Config to the things a run is made of: device, model, data. Nothing is written here."""

import json
from functools import partial
from pathlib import Path

import timm
import torch
from safetensors.torch import save_file
from timm.layers import StdConv2d
from timm.models.resnetv2 import ResNetV2
from torch import nn

from .. import ref
from ..errors import InputError
from ..layers import pair
from ..model import ViT, preset
from .data import ONE, Data, open_data, seed_everything
from .masked import MaskedPatches
from .parallel import Ranks
from .settings import Config


def choose_device(name: str) -> torch.device:
    """The named device, or CUDA where there is one; InputError where it is not there."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise InputError(f"unknown device {name!r}; use cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("no CUDA device here; use --device cpu")
    return device


def autocast_dtype(config: Config, device: torch.device) -> torch.dtype | None:
    """The dtype of the matrix products under autocast, None for plain fp32."""
    name = config.amp if config.amp != "auto" else "bf16" if device.type == "cuda" else "none"
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "none": None}[name]


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
