"""An image in any of the forms that people have it in: a path, bytes, a PIL image, pixels."""

import io
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .images import Unreadable, as_rgb, opened, printable, read_rgb
from .jpeg import Encoded, encoded

ImageLike = str | os.PathLike | bytes | Image.Image | Tensor | np.ndarray


def name_of(index: int | None, image: ImageLike) -> str:
    """An image's name in messages: its path, or its place in the list; index None: of a single image."""
    if isinstance(image, (str, os.PathLike)):
        return printable(os.fsdecode(image))
    return "the image" if index is None else f"images[{index}]"


def own(image: ImageLike, upright: bool = True) -> ImageLike:
    """A copy of an image in memory, since its iterator may change it before a thread reads it."""
    if isinstance(image, Image.Image):
        with suppress(Exception):  # of a broken file, which `content` meets again
            image = as_rgb(image, upright).copy()
    elif isinstance(image, (Tensor, np.ndarray)):
        image = image.clone() if isinstance(image, Tensor) else image.copy()
    return image


def content(image: ImageLike, name: str, encode: bool = False, upright: bool = True) -> Encoded:
    """The pixels (3, H, W) uint8 of an image, its height and its width. Raises Unreadable.

    Pixels are (3, H, W), (1, H, W) or (H, W); an array may be (H, W, 3) too, or (H, W, 4), whose alpha is left out.
    encode: of a grey or RGB JPEG file, its bytes in place of the pixels (jpeg.encoded). upright: turn files and PIL
    images as their EXIF orientation says.
    """
    if isinstance(image, (Tensor, np.ndarray)):
        shape = tuple(image.shape)
        last = isinstance(image, np.ndarray) and len(shape) == 3 and shape[0] not in (1, 3) and shape[2] in (3, 4)
        first = len(shape) == 2 or (len(shape) == 3 and shape[0] in (1, 3))
        if image.dtype not in (torch.uint8, np.uint8) or not (first or last) or 0 in shape:
            forms = "(3, H, W) or (1, H, W), channels first, (H, W) or, as an array, (H, W, 3)"
            raise Unreadable(f"{name} must be uint8 pixels {forms}; got {image.dtype} {shape}")
        pixels = image if isinstance(image, Tensor) else torch.from_numpy(np.array(image))
        pixels = pixels[..., :3].permute(2, 0, 1) if last else pixels[None] if len(shape) == 2 else pixels
        return Encoded(pixels.expand(3, -1, -1), *pixels.shape[1:])
    try:
        if isinstance(image, Image.Image):
            image = as_rgb(image, upright)
            return Encoded(torch.from_numpy(np.array(image)).permute(2, 0, 1), image.height, image.width)
    except Exception as error:  # it may be read from its file only now
        raise Unreadable(f"{name} is a broken image ({' '.join(str(error).split())})") from None
    if hasattr(image, "read_bytes") and not isinstance(image, os.PathLike):  # a member of a larger file
        image = read_bytes(image, name)
    if isinstance(image, (bytes, bytearray, memoryview)):
        image = io.BytesIO(image)
    elif not isinstance(image, (str, os.PathLike)):
        raise Unreadable(f"{name} must be a path, bytes, a PIL image or uint8 pixels, got {type(image)}")
    if encode:
        read = image.getvalue if isinstance(image, io.BytesIO) else Path(image).read_bytes
        with opened(image, name) as header:
            return encoded(header, read, upright)
    return content(read_rgb(image, name, upright=upright), name, upright=False)


def read_bytes(image, name: str) -> bytes:
    """The bytes of a member of a larger file. Raises Unreadable."""
    try:
        return image.read_bytes()
    except (OSError, ValueError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise Unreadable(f"{name} cannot be read ({reason})") from None
