"""An image file as 8-bit RGB, whatever it holds; files that cannot be read."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from PIL import Image, UnidentifiedImageError

from ..errors import InputError


class Unreadable(InputError):
    """An image that cannot be read; the message says which and why."""


def as_rgb(image: Image.Image) -> Image.Image:
    """The image as 8-bit RGB; as in timm and torchvision, without alpha and EXIF orientation.

    16-bit values keep their high byte: 65535 -> 255, 511 -> 1, 255 -> 0. PIL reads 16-bit RGB in this way, but clips
    16-bit grey to white. Raises ValueError for 32-bit numbers, whose range no file tells.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):  # older Pillows use I
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("its pixels are 32-bit numbers, whose range no file tells: save it with 8 or 16 bits")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # the same colours without PIL's warning
    image.load()
    return image if image.mode == "RGB" else image.convert("RGB")


def formats() -> list[str]:
    """The formats that images are opened in: Pillow's and its plugins', but for EPS.

    Pillow goes by what a file holds, whatever its suffix, and starts Ghostscript for EPS.
    """
    Image.init()
    return [name for name in Image.ID if name != "EPS"]


@contextmanager
def opened(file, name: str, min_size: tuple[int, int] = (1, 1)) -> Iterator[Image.Image]:
    """The image in a file (path or binary stream), its header read.

    Raises Unreadable where its sides are less than `min_size`, where it has more pixels than Pillow's limit for
    decompression bombs, and for whatever goes wrong here or in the block: damaged files may raise any exception.
    """
    try:
        if not hasattr(file, "read") and stat.S_IFMT(os.stat(file).st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
            raise ValueError("it is no regular file")  # opening a pipe would wait for a writer
        image = Image.open(file, formats=formats())
    except Exception as error:
        raise Unreadable(f"{name} cannot be read as an image ({_reason(error)}); remove or replace it") from None
    with image:
        if image.height < min_size[0] or image.width < min_size[1]:
            pixels, patch = f"{image.height} x {image.width}", f"{min_size[0]} x {min_size[1]}"
            raise Unreadable(f"{name} has {pixels} pixels, less than one patch ({patch}); remove it")
        if Image.MAX_IMAGE_PIXELS and image.height * image.width > Image.MAX_IMAGE_PIXELS:
            limit = f"more than Pillow's limit of {Image.MAX_IMAGE_PIXELS}"
            raise Unreadable(f"{name} has {image.height} x {image.width} pixels, {limit}; make it smaller")
        try:
            yield image
        except Exception as error:
            raise Unreadable(f"{name} is a broken image ({_reason(error)}); remove or replace it") from None


def read_rgb(file, name: str, min_size: tuple[int, int] = (1, 1)) -> Image.Image:
    """`as_rgb` of the image in a file (path or binary stream). Raises Unreadable."""
    with opened(file, name, min_size) as image:
        return as_rgb(image)


def printable(path: str) -> str:
    """A path as one line of text: file names may hold newlines, and bytes that are no text."""
    return path.encode("utf-8", "backslashreplace").decode().replace("\n", "\\n").replace("\r", "\\r")


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "of no known format"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__
