"""From a Config to the things a run is made of: device, model, data. Nothing is written here."""

import torch

from ..errors import InputError
from ..layers import pair
from ..model import ViT, preset
from .data import ONE, Data, open_data, seed_everything
from .parallel import Ranks
from .recipes import Config


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
        head_init_bias=config.head_init_bias,
        weight_init=config.weight_init,
    )


def build(config: Config, device: torch.device, ranks: Ranks = ONE) -> tuple[ViT, Data]:
    """The model at its start and the data, every input checked. Raises InputError."""
    seed_everything(config.seed)
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
