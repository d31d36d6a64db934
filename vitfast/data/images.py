"""An image file as 8-bit RGB, whatever it holds; files that cannot be read."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from ..errors import InputError


class Unreadable(InputError):
    """An image that cannot be read; the message says which and why."""


# EXIF's orientations and how Pillow turns an image upright that is stored so, as PIL.ImageOps.exif_transpose does.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
ON_ITS_SIDE = range(5, 9)  # the orientations whose height is the width of the image once it is upright


def orientation(image: Image.Image) -> int:
    """The EXIF orientation of an opened image, a key of TURNS, or 1 where there is nothing to turn.

    Pillow turns TIFF files itself when it reads them. Metadata may be damaged where the pixels are not.
    """
    found = 1
    if image.format != "TIFF":
        with suppress(Exception):
            found = image.getexif().get(ExifTags.Base.Orientation, 1)
    return found if found in TURNS else 1


def as_rgb(image: Image.Image, upright: bool = False) -> Image.Image:
    """The image as 8-bit RGB without alpha.

    upright: turn it as its EXIF orientation says, which timm and torchvision ignore; the result has no tags any more,
    so that nothing turns it twice.

    16-bit values keep their high byte: 65535 -> 255, 511 -> 1, 255 -> 0. PIL reads 16-bit RGB in this way, but clips
    16-bit grey to white. Raises ValueError for 32-bit numbers, whose range no file tells.
    """
    turn = TURNS.get(orientation(image)) if upright else None
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):  # older Pillows use I
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("its pixels are 32-bit numbers, whose range no file tells: save it with 8 or 16 bits")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # the same colours without PIL's warning
    image.load()
    image = image if image.mode == "RGB" else image.convert("RGB")
    if turn is not None:
        image = image.transpose(turn)
        image.info = {}
    return image


def formats() -> list[str]:
    """The formats that images are opened in: Pillow's and its plugins', but for EPS.

    Pillow goes by what a file holds, whatever its suffix, and starts Ghostscript for EPS.
    """
    Image.init()
    return [name for name in Image.ID if name != "EPS"]


@contextmanager
def opened(file, name: str, min_size: tuple[int, int] = (1, 1), upright: bool = False) -> Iterator[Image.Image]:
    """The image in a file (path or binary stream), its header read.

    upright: its sides are those that it has once it is turned. Raises Unreadable where they are less than `min_size`,
    where it has more pixels than Pillow's limit for decompression bombs, and for whatever goes wrong here or in the
    block: damaged files may raise any exception.
    """
    try:
        if not hasattr(file, "read") and stat.S_IFMT(os.stat(file).st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
            raise ValueError("it is no regular file")  # opening a pipe would wait for a writer
        image = Image.open(file, formats=formats())
    except Exception as error:
        raise Unreadable(f"{name} cannot be read as an image ({_reason(error)}); remove or replace it") from None
    with image:
        least = min_size
        if upright and min_size[0] != min_size[1] and orientation(image) in ON_ITS_SIDE:
            least = min_size[::-1]
        if image.height < least[0] or image.width < least[1]:
            pixels, patch = f"{image.height} x {image.width}", f"{min_size[0]} x {min_size[1]}"
            raise Unreadable(f"{name} has {pixels} pixels, less than one patch ({patch}); remove it")
        if Image.MAX_IMAGE_PIXELS and image.height * image.width > Image.MAX_IMAGE_PIXELS:
            limit = f"more than Pillow's limit of {Image.MAX_IMAGE_PIXELS}"
            raise Unreadable(f"{name} has {image.height} x {image.width} pixels, {limit}; make it smaller")
        try:
            yield image
        except Exception as error:
            raise Unreadable(f"{name} is a broken image ({_reason(error)}); remove or replace it") from None


def read_rgb(file, name: str, min_size: tuple[int, int] = (1, 1), upright: bool = False) -> Image.Image:
    """`as_rgb` of the image in a file (path or binary stream). Raises Unreadable."""
    with opened(file, name, min_size, upright) as image:
        return as_rgb(image, upright)


def printable(path: str) -> str:
    """A path as one line of text: file names may hold newlines, and bytes that are no text."""
    return path.encode("utf-8", "backslashreplace").decode().replace("\n", "\\n").replace("\r", "\\r")


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "of no known format"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__
