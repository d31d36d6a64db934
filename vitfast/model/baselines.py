"""Baselines in the same loop: the paper's BiT ResNets, and any model of timm, new or with weights."""

import json
from functools import partial
from pathlib import Path

import timm
import torch
from timm.layers import StdConv2d
from timm.models import is_model_in_modules
from timm.models.resnetv2 import ResNetV2
from torch import Tensor, nn

from ..errors import InputError, both_ends
from ..ops import reference as ref
from ..run.files import write_text
from .checkpoint.config import infer
from .checkpoint.files import CheckpointFiles, locate, read_tensors
from .checkpoint.formats import listing, to_timm_names
from .checkpoint.writers import write_safetensors
from .checks import enforce
from .config import ARGUMENTS, ViTConfig
from .preprocessing import CROP
from .presets import RESNETS, TIMM, is_baseline, pair
from .vit import ViT

# A ResNet that timm has no name for (R50x2, R152x1, R200x3) is saved with the name that it would have.
ARCHITECTURES = {name: f"resnetv2_{name[1:].lower()}_bit" for name in RESNETS}
VITS = ("vision_transformer", "vision_transformer_hybrid", "deit")  # timm's files of models that ViT reads


def baseline(name: str, num_classes: int, img_size: tuple[int, int] | None = None, **arguments) -> nn.Module:
    """A model of timm that takes raw uint8 images too (`mean`, `std`) and has `save_pretrained`.

    img_size: the size of its images, which becomes `image_size` of the model; by default timm's. arguments: those of
    timm's constructor. `class_names` that are set on the model are saved as timm's `label_names`. Raises InputError for
    a name that timm does not know.
    """
    if name in RESNETS:
        layers, width = RESNETS[name]
        options = dict(width_factor=width, stem_type="fixed", conv_layer=partial(StdConv2d, eps=1e-8))
        model, architecture = ResNetV2(layers, num_classes=num_classes, **options, **arguments), ARCHITECTURES[name]
    else:
        architecture = name.removeprefix(TIMM)
        try:
            model = timm.create_model(architecture, num_classes=num_classes, **arguments)
        except (RuntimeError, TypeError, ValueError) as error:
            near = timm.list_models(f"*{architecture.split('.')[0][:8]}*")[:3]
            hint = f"; near: {', '.join(near)}" if near else ""
            raise InputError(f"timm cannot build {architecture!r} ({str(error).splitlines()[0]}){hint}") from None
    cfg = getattr(model, "pretrained_cfg", None) or {}
    model.mean, model.std = tuple(cfg.get("mean", (0.5,) * 3)), tuple(cfg.get("std", (0.5,) * 3))
    model.image_size, model.class_names = tuple(cfg.get("input_size", (3, 224, 224)))[1:], None
    vars(model).update(dict.fromkeys(CROP))  # load_baseline sets them if the weights' config.json has them
    if img_size is not None:
        _set_size(model, img_size)
    model.register_forward_pre_hook(_normalize_raw)
    model.save_pretrained = partial(_save_baseline, model, architecture)
    return model


def as_vit(model: nn.Module, name: str) -> ViTConfig | None:
    """The arguments of the ViT that computes what a baseline, "timm:NAME", does, if there is one."""
    architecture = name.removeprefix(TIMM).partition(".")[0]
    cfg = dict(input_size=[3, *model.image_size])
    config = dict(architecture=architecture, num_classes=model.num_classes, pretrained_cfg=cfg)
    try:  # only shapes are read: one number, expanded, stands for a tensor of the model, which may be on meta
        tensors = {name: torch.zeros(()).expand(value.shape) for name, value in model.state_dict().items()}
        arguments, _ = infer(to_timm_names(tensors), CheckpointFiles(Path(architecture), config), {})
    except InputError:
        return None
    return ViTConfig(**arguments)


def _set_size(model: nn.Module, img_size: tuple[int, int]) -> None:
    size_before, model.image_size = model.image_size, img_size
    try:
        if hasattr(model, "set_input_size"):
            model.set_input_size(img_size)
        elif img_size != size_before:  # models of any size lack the method, as some of one size do: an image tells
            with torch.no_grad():
                model.eval()(torch.zeros(1, 3, *img_size, device=next(model.parameters()).device))
            model.train()
    except (AssertionError, RuntimeError, ValueError) as error:
        size = " x ".join(map(str, img_size))
        raise InputError(f"timm's {type(model).__name__} takes no images of {size} pixels ({error})") from None


def _normalize_raw(model: nn.Module, args: tuple) -> tuple:
    return normalized(model, args[0]), *args[1:]


def normalized(model: nn.Module, images: Tensor) -> Tensor:
    """Normalises raw images for the layers of a baseline; a ViT does it itself."""
    raw = images.dtype == torch.uint8 and not isinstance(model, ViT)
    return ref.normalize(images, model.mean, model.std, torch.float32) if raw else images


def _save_baseline(model: nn.Module, architecture: str, folder) -> None:
    """Writes model.safetensors, and a config.json like that of timm's hub files."""
    tensors = {k: v.detach().contiguous().cpu() for k, v in model.state_dict().items()}
    write_safetensors(tensors, Path(folder) / "model.safetensors", {})
    cfg = dict(mean=model.mean, std=model.std, input_size=(3, *model.image_size))
    cfg |= {name: getattr(model, name) for name in CROP if getattr(model, name)}
    config = dict(architecture=architecture, num_classes=model.num_classes, pretrained_cfg=cfg)
    if model.class_names:
        config["label_names"] = list(model.class_names)
    write_text(Path(folder) / "config.json", json.dumps(config, indent=2))


# ---- with weights


def baseline_of(name: str, source: str | Path) -> str:
    """Returns the name of the baseline whose weights `source` holds; "" if they are a ViT's.

    That is `name` if it names a baseline, else the architecture in config.json, unless our ViT can read its weights.
    """
    if is_baseline(name):
        return name
    architecture = str(locate(source).config.get("architecture", "")).partition(".")[0]
    resnets = {timm_name: resnet for resnet, timm_name in ARCHITECTURES.items()}
    if architecture in resnets:
        return resnets[architecture]
    is_timms = bool(architecture) and timm.is_model(architecture)
    return TIMM + architecture if is_timms and not is_model_in_modules(architecture, VITS) else ""


def load_baseline(name: str, source: str | Path, img_size: tuple[int, int] | None = None, **arguments) -> nn.Module:
    """`baseline(name)` with the weights and the head of a file, a folder or `hf-hub:owner/name`.

    The weights have timm's names, or are a BiT ResNet's in Google's npz, which timm reads. config.json beside them says
    mean, std, image size and timm's arguments. Raises InputError if they are not weights of that model.
    """
    files = locate(source)
    tensors = read_tensors(files.weights)
    try:
        cfg = files.config.get("pretrained_cfg", {})
        classes = files.config.get("num_classes", cfg.get("num_classes"))
        saved_size = tuple(cfg.get("input_size", ()))[1:] or None
        options = {k: v for k, v in files.config.get("model_args", {}).items() if k not in ("num_classes", "img_size")}
        classes = _classes(name, tensors) if classes is None else classes
        model = baseline(name, classes, saved_size, **options | arguments)
        if files.weights.suffix == ".npz":
            model.load_pretrained(str(files.weights))
        elif model.state_dict().keys() != tensors.keys():
            raise InputError(f"{source}: no weights of {name}: {listing(model.state_dict(), tensors)}")
        else:
            model.load_state_dict(tensors)
        model.mean, model.std = (tuple(cfg.get(key, getattr(model, key))) for key in ("mean", "std"))
        for key in CROP:
            setattr(model, key, enforce(ARGUMENTS[key], cfg.get(key), f"{source}: config.json: {key}"))
        names = files.config.get("label_names", cfg.get("label_names"))
        model.class_names = tuple(map(str, names)) if names and len(names) == classes else None
    except InputError:
        raise
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        why = both_ends(str(error))
        raise InputError(f"{source}: no weights of {name}, or no config.json of timm's: {why}") from None
    if img_size is not None:
        _set_size(model, pair(img_size))
    return model


def _classes(name: str, tensors: dict[str, Tensor]) -> int:
    """The number of classes of a baseline's weights, in timm's names or Google's; 0 without a head."""
    with torch.device("meta"):
        model = baseline(name, 1)
    classifier = next((key for key, module in model.named_modules() if module is classifiers(model)[0]), "")
    bias = tensors.get(f"{classifier}.bias", tensors.get("resnet/head/conv2d/bias"))
    return 0 if bias is None else len(bias)


def load_any(name: str, source: str | Path, img_size: int | tuple[int, int] | None = None) -> nn.Module:
    """Makes the ViT or baseline that has these weights; img_size replaces the saved one."""
    if architecture := baseline_of(name, source):
        return load_baseline(architecture, source, img_size)
    return ViT.from_pretrained(source, **({} if img_size is None else dict(img_size=img_size)))


def sizes(model: nn.Module) -> tuple[tuple[int, int], tuple[int, int]]:
    """The size of a model's images, and of its patches; a baseline has none, (1, 1)."""
    if isinstance(model, ViT):
        return model.patch_embed.img_size, model.patch_embed.patch_size
    return model.image_size, (1, 1)


def classifiers(model: nn.Module) -> tuple[nn.Module, ...]:
    """The last linear layers of a ViT or a baseline: one, or two of a distilled model."""
    heads = model.get_classifier()
    return tuple(heads) if isinstance(heads, (tuple, list)) else (heads,)


def replace_head(model: nn.Module, classes: int) -> None:
    """Puts a zero linear layer in the place of a ViT's or baseline's whole head (the paper, 3.2)."""
    model.reset_classifier(classes)
    for layer in classifiers(model):
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)
