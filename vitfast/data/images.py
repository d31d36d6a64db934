"""Reads images of any kind, from any place, as 8-bit RGB, or says why they cannot be read."""

import io
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from ..errors import InputError
from ..run.config import MAX_PIXELS, Config


class Unreadable(InputError):
    """An image that cannot be read; the message says which and why."""


@dataclass(frozen=True)
class Reading:
    """How images are read, the same wherever they come from.

    upright: turn them as their EXIF orientation says, which timm and torchvision ignore. min_size: the least height and
    width, once they are turned. max_pixels: the most pixels; an image with more is refused before it is decoded.
    """

    upright: bool = True
    min_size: tuple[int, int] = (1, 1)
    max_pixels: int = MAX_PIXELS

    @classmethod
    def of(cls, config: Config, patch_size: tuple[int, int]) -> "Reading":
        """The Reading of a run's settings; images that keep their sizes may be smaller than a patch."""
        return cls(config.exif_orientation, (1, 1) if config.sizes == "native" else patch_size, config.max_pixels)

    def check(self, height: int, width: int, name: str) -> None:
        """Raises Unreadable for a turned image of this height and width if it is too small or too large."""
        pixels = f"{name} has {height} x {width} pixels"
        if height * width > self.max_pixels:
            raise Unreadable(f"{pixels}, more than the limit of {self.max_pixels}; {TOO_LARGE}")
        if height < self.min_size[0] or width < self.min_size[1]:
            raise Unreadable(f"{pixels}, less than one patch ({self.min_size[0]} x {self.min_size[1]}); remove it")


DEFAULT = Reading()


class _PillowsLimit(int):
    """The value of PIL.Image.MAX_IMAGE_PIXELS, which acts as another limit inside `pillows_limit`.

    Pillow has one limit for the whole process, and it is the user's. Pillow warns of images with more pixels, and
    refuses those with more than twice as many.
    """

    here: ContextVar[int | None] = ContextVar("here", default=None)

    def __lt__(self, pixels: int) -> bool:
        return self.here.get() is None and int(self) < pixels

    def __rmul__(self, two: int) -> int:
        return self.here.get() or two * int(self)


@contextmanager
def pillows_limit(limit: int) -> Iterator[None]:
    """In this thread Pillow refuses images with more than `limit` pixels, and warns of none."""
    if Image.MAX_IMAGE_PIXELS is not None and not isinstance(Image.MAX_IMAGE_PIXELS, _PillowsLimit):
        Image.MAX_IMAGE_PIXELS = _PillowsLimit(min(Image.MAX_IMAGE_PIXELS, sys.maxsize))
    before = _PillowsLimit.here.set(limit)
    try:
        yield
    finally:
        _PillowsLimit.here.reset(before)


# How Pillow turns an image of each EXIF orientation upright, as PIL.ImageOps.exif_transpose does.
T = Image.Transpose
TURNS = {2: T.FLIP_LEFT_RIGHT, 3: T.ROTATE_180, 4: T.FLIP_TOP_BOTTOM, 5: T.TRANSPOSE}
TURNS |= {6: T.ROTATE_270, 7: T.TRANSVERSE, 8: T.ROTATE_90}
TOO_LARGE = "make it smaller, or raise max_pixels"
ON_ITS_SIDE = range(5, 9)  # the orientations that have height and width change places when they are turned
LARGE = 2**30 // 12  # a JPEG with more pixels is decoded at a fraction of its size; a camera's 50 million stay
AMPLE = 4096  # the pixels that each side of such a JPEG keeps: four times what the largest models take


def orientation(image: Image.Image) -> int:
    """The EXIF orientation of an opened image, a key of TURNS, or 1 where there is nothing to turn.

    Pillow turns TIFF files itself when it reads them. Metadata may be damaged where the pixels are not.
    """
    found = 1
    if image.format != "TIFF":
        with suppress(Exception):
            found = image.getexif().get(ExifTags.Base.Orientation, 1)
    return found if found in TURNS else 1


def sides(image: Image.Image, reading: Reading) -> tuple[int, int]:
    """(height, width) that an image will have once it is turned; its header has been read."""
    width, height = image.size
    turns = reading.upright and width != height and orientation(image) in ON_ITS_SIDE
    return (width, height) if turns else (height, width)


def as_rgb(image: Image.Image, reading: Reading) -> Image.Image:
    """An image from `opened` as 8-bit RGB without alpha; if `reading` turns it, it loses its tags.

    16-bit values keep their high byte: 65535 -> 255, 511 -> 1, 255 -> 0. PIL reads 16-bit RGB in this way, but clips
    16-bit grey to white. A JPEG file with more than LARGE pixels is decoded at 1/2, 1/4 or 1/8 of its size, as long as
    both sides keep AMPLE pixels. Raises ValueError for 32-bit numbers, whose range no file tells.
    """
    turn = TURNS.get(orientation(image)) if reading.upright else None
    if image.width * image.height > LARGE:
        image.draft(None, (AMPLE, AMPLE))
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):  # I: older Pillows
        bits = image.tag_v2.get(258, (16,))[0] if image.format == "TIFF" else 16  # BitsPerSample
        image = Image.fromarray((np.asarray(image) >> (bits - 8)).astype(np.uint8))
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
    """The formats in which images are opened: Pillow's and its plugins', except EPS.

    Pillow tells the format by the content of a file, whatever its suffix, and would start Ghostscript for EPS.
    """
    Image.init()
    return [name for name in Image.ID if name != "EPS"]


@contextmanager
def opened(source, name: str, reading: Reading = DEFAULT) -> Iterator[Image.Image]:
    """Yields an image whose header has been read; a PIL image is loaded whole.

    source: a path, bytes, a binary stream, an object with `read_bytes` (a member of a larger file), or a PIL image.
    Raises Unreadable for what `reading` refuses, and for whatever goes wrong here or in the block: damaged files may
    raise any exception.
    """
    with pillows_limit(reading.max_pixels), unreadable(f"{name} cannot be read as an image"):
        if hasattr(source, "read_bytes") and not isinstance(source, os.PathLike):
            source = source.read_bytes()
        source = io.BytesIO(source) if isinstance(source, (bytes, bytearray, memoryview)) else source
        if isinstance(source, (str, os.PathLike)):
            if stat.S_IFMT(os.stat(source).st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
                raise ValueError("it is no regular file")  # opening a pipe would wait for a writer
        image = source if isinstance(source, Image.Image) else Image.open(source, formats=formats())
    with pillows_limit(reading.max_pixels), unreadable(f"{name} is a broken image"):
        with nullcontext() if image is source else image:
            reading.check(*sides(image, reading), name)
            if image is source:
                image.load()  # whole, since a draft would change the caller's image
            yield image


@contextmanager
def unreadable(what: str) -> Iterator[None]:
    """Raises Unreadable for any error of the block."""
    try:
        yield
    except Unreadable:
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        reason = "of no known format" if isinstance(error, UnidentifiedImageError) else reason
        advice = "remove or replace it"
        if isinstance(error, Image.DecompressionBombError):  # "Image size (N pixels) exceeds limit of M pixels, ..."
            reason, advice = reason.partition(",")[0], TOO_LARGE
        raise Unreadable(f"{what} ({reason}); {advice}") from None


def read_rgb(source, name: str, reading: Reading = DEFAULT) -> Image.Image:
    """Reads whatever `opened` takes as 8-bit RGB; all images come in here. Raises Unreadable."""
    with opened(source, name, reading) as image:
        return as_rgb(image, reading)


def printable(path: str) -> str:
    """A path as one line of text: file names may hold newlines, and bytes that are no text."""
    return path.encode("utf-8", "backslashreplace").decode().replace("\n", "\\n").replace("\r", "\\r")
