"""How images are prepared for a model: our ViT, a model of timm or one of transformers.

`transform(model)` is public, as vitfast.transform.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from ..data.contents import ImageLike, content, name_of
from ..data.eval_transforms import EvalTransform
from ..errors import InputError
from ..model.checkpoint import hugging_face
from ..model.checkpoint.files import COMPANIONS
from ..model.preprocessing import CROP
from ..model.vit import ViT
from ..ops import reference as ref

logger = logging.getLogger("vitfast")


@dataclass(frozen=True)
class Transform:
    """Turns one image into the input of a model, a float32 tensor (3, height, width); see `transform`."""

    prepare: EvalTransform
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, image: ImageLike) -> Tensor:
        """The normalised pixels (3, *prepare.size), float32, on the image's device.

        image: a PIL image, a path, the bytes of an image file, or uint8 pixels: an array (H, W, 3) or (H, W), or a
        tensor or array (3, H, W) or (1, H, W). Files and PIL images are turned as their EXIF orientation says. Raises
        InputError for an image that cannot be read.
        """
        pixels = content(image, name_of(None, image)).content
        return ref.normalize(self.prepare(pixels), self.mean, self.std, torch.float32)


def transform(model: nn.Module, processor=None) -> Transform:
    """Returns a function that turns an image into the input of a model, as `vitfast predict` does.

        logits = model(vitfast.transform(model)(image)[None])
        dataset = torchvision.datasets.ImageFolder("photos", transform=vitfast.transform(model))

    model: a ViT, or a model of timm or transformers, also accelerated, compiled or in DDP. processor: transformers'
    image processor for a model of transformers, or the folder of its preprocessor_config.json; None: the one in the
    model's own folder or in the hub's cache.

    The function takes a PIL image, a path, the bytes of a file, or uint8 pixels. It resizes and cuts images as the
    model says now, with Pillow's pixels, and can be pickled. Raises InputError if nothing says how images are prepared,
    if the model sees each image at a size of its own, and if it has other than 3 channels.
    """
    inner = model
    while isinstance(within := getattr(inner, "_orig_mod", getattr(inner, "module", None)), nn.Module):
        inner = within  # the model in the wrapper of torch.compile, DDP or AveragedModel
    if (chans := getattr(inner, "in_chans", 3)) != 3:
        raise InputError(f"transform: images have 3 channels, and the model takes {chans}")
    config = getattr(inner, "config", None)
    if hasattr(inner, "_forward_embeds") or own_sizes(getattr(config, "vision_config", config)):
        raise InputError(f"{type(inner).__name__} sees each image at a size of its own, which vitfast.Embedder does")
    return at_one_size(inner, processor)


def at_one_size(model: nn.Module, processor) -> Transform:
    """The Transform of a model whose images have one size; `transform` says more."""
    library = library_of(model)
    if library == "transformers":
        told, mean, std = processor_of(model, processor)
        return Transform(of_processor(told), tuple(mean), tuple(std))
    size, crop, mean, std = timm_pixels(model)
    prepare = EvalTransform.timm(size, **crop, mean=mean)
    if library == "vitfast" and processor:
        prepare = of_processor(_processor(model, processor)[0])
        if prepare.size != size:
            raise InputError(f"the processor makes images of {prepare.size} pixels, the ViT takes {size}")
    return Transform(prepare, tuple(mean), tuple(std))


def library_of(model: nn.Module) -> Literal["vitfast", "timm", "transformers"]:
    """The library that a model is from. Raises InputError for a model of any other."""
    if isinstance(model, ViT):
        return "vitfast"
    if hasattr(model, "forward_head") and hasattr(model, "forward_features"):
        return "timm"
    if hasattr(model, "config") and hasattr(model.config, "model_type"):
        return "transformers"
    known = "a ViT of vitfast, a model of timm or one of transformers"
    raise InputError(f"the model must be {known}, got {type(model).__module__}.{type(model).__qualname__}")


# ---- timm


def timm_pixels(model: nn.Module) -> tuple[tuple[int, int], dict, tuple, tuple]:
    """Size, crop, mean and std of a ViT, a model of timm or a baseline, as timm resolves them."""
    from timm.data import resolve_model_data_config

    told = resolve_model_data_config(model)
    patches = getattr(model, "patch_embed", None)  # img_size= and set_input_size leave the configuration as it is
    fixed = patches.img_size if getattr(patches, "strict_img_size", False) else None
    size = tuple(getattr(model, "image_size", fixed or told["input_size"][1:]))  # image_size of a baseline
    mean, std = (vars(model).get(name, told[name]) for name in ("mean", "std"))  # a baseline has its own configuration
    return size, {name: vars(model).get(name) or told[name] for name in CROP}, mean, std


# ---- transformers


def own_sizes(config) -> bool:
    """Whether transformers' model of this vision config is SigLIP 2 at each image's own aspect."""
    return getattr(config, "model_type", "").startswith("siglip2") and bool(getattr(config, "num_patches", None))


def processor_of(model: nn.Module, processor) -> tuple[dict, Sequence[float], Sequence[float]]:
    """(the dict of the processor of a model of transformers, mean, std).

    Raises InputError where one of them cannot be found.
    """
    told, where = _processor(model, processor)
    found = hugging_face.statistics(told)
    mean, std = (value if isinstance(value, Sequence) else (value,) for value in (found["mean"], found["std"]))
    if None in (*mean, *std):
        raise InputError(f"{where} says no image_mean and image_std; give processor=")
    return told, mean, std


def of_processor(told: dict) -> EvalTransform:
    """The transform of a processor. DINOv3's resizes as torchvision does; here it is as Pillow does."""
    kind = told.get("image_processor_type") or told.get("feature_extractor_type")
    if kind and not kind.startswith("DINOv3ViT"):
        return EvalTransform.hugging_face(told)
    if kind:
        logger.warning("%s resizes by torchvision; here Pillow's pixels are taken, which differ by rounding", kind)
    return EvalTransform.hugging_face(told | dict(image_processor_type="ViTImageProcessor"))  # old files name no class


def _processor(model: nn.Module, given) -> tuple[dict, str]:
    """(preprocessor_config.json of `given`, the model's folder or the hub's cache; the place of it)."""
    if given is not None and not isinstance(given, (str, Path)):
        given = getattr(given, "image_processor", given)  # a processor of images and texts
        return (given if isinstance(given, dict) else given.to_dict()), "processor"
    name = str(given or getattr(getattr(model, "config", None), "_name_or_path", ""))
    for file in COMPANIONS[:0:-1]:
        path = _found(name, file) if name else None
        try:
            content = json.loads(path.read_text()) if path else None
        except (OSError, ValueError) as error:
            raise InputError(f"{path} is damaged ({error})") from None
        if isinstance(content, dict):  # a processor of images and texts has that of images in it
            return content.get("image_processor") or content, f"{name}/{file}"
    advice = "give processor=, transformers' image processor or the folder of its preprocessor_config.json"
    raise InputError(f"nothing says how images for {type(model).__name__} are prepared; {advice}")


def _found(name: str, file: str) -> Path | None:
    """A file of a folder, or of a repository if the hub's cache has it; else None."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if (Path(name) / file).is_file():
        return Path(name) / file
    try:
        path = try_to_load_from_cache(name, file)
    except HFValidationError:
        return None
    return Path(path) if isinstance(path, str) else None
