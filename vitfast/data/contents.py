"""An image in any of the forms that people have it in: a path, bytes, a PIL image, pixels."""

import os
from contextlib import suppress

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .images import DEFAULT, Reading, Unreadable, opened, printable, read_rgb, sides
from .jpeg import Encoded, encoded

ImageLike = str | os.PathLike | bytes | Image.Image | Tensor | np.ndarray


def name_of(index: int | None, image: ImageLike) -> str:
    """The name of an image in messages: its path, else its index in the list (None: a single image)."""
    if isinstance(image, (str, os.PathLike)):
        return printable(os.fsdecode(image))
    return "the image" if index is None else f"images[{index}]"


def own(image: ImageLike, reading: Reading) -> ImageLike:
    """A copy of an image in memory, since its iterator may change it before a thread reads it."""
    if isinstance(image, Image.Image):
        with suppress(Unreadable):  # `content` meets the same error again
            image = read_rgb(image, "", reading).copy()
    elif isinstance(image, (Tensor, np.ndarray)):
        image = image.clone() if isinstance(image, Tensor) else image.copy()
    return image


def content(image: ImageLike, name: str, reading: Reading = DEFAULT, encode: bool = False) -> Encoded:
    """An image as Encoded: its pixels (3, H, W) uint8, its height and its width. Raises Unreadable.

    Pixels may be (3, H, W), (1, H, W) or (H, W); an array also (H, W, 3), or (H, W, 4), whose alpha is left out.
    encode: a grey or RGB JPEG file gives its bytes in place of its pixels (jpeg.encoded).
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
        reading.check(*pixels.shape[1:], name)
        return Encoded(pixels.expand(3, -1, -1), *pixels.shape[1:])
    if not isinstance(image, (str, os.PathLike, bytes, bytearray, memoryview, Image.Image)):
        if not hasattr(image, "read_bytes"):
            raise Unreadable(f"{name} must be a path, bytes, a PIL image or uint8 pixels, got {type(image)}")
    with opened(image, name, reading) as header:
        height, width = sides(header, reading)
        found = encoded(header, reading, decode=not encode or header is image)
        return found._replace(height=height, width=width)
