"""JPEG files decoded, cropped and resized on the device (`--set decode=device`), by nvJPEG on a GPU.

A CPU core decodes some hundreds of photographs a second, and a B/16 on a large GPU takes thousands. On this path the
loader only reads bytes, and decodes only files that are not grey or RGB JPEG. The crops are those of the CPU path,
drawn from the same (seed, epoch, sample); the pixels differ by the resampling's rounding. This path crops and flips
only: other augmentations need the CPU path.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torchvision
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from ..errors import InputError
from ..run.config import Config
from .folders import ImageFiles
from .images import LARGE, ON_ITS_SIDE, Reading, Unreadable, as_rgb, orientation, read_rgb, sides
from .samples import Batch
from .sources import Source, Subset
from .transforms import CROPS

# The axes along which each EXIF orientation is mirrored, after rows and columns have changed places for ON_ITS_SIDE.
FLIPS = {2: (-1,), 3: (-2, -1), 4: (-2,), 6: (-1,), 7: (-2, -1), 8: (-2,)}
START, END = b"\xff\xda", b"\xff\xd9"  # JPEG's markers before and after the pixels


def check_decodable(config: Config, source: Source) -> None:
    """Raises InputError where this path cannot do what the settings ask."""
    if not isinstance(source.source if isinstance(source, Subset) else source, ImageFiles):
        raise InputError(f"decode=device reads JPEG files from a folder; {config.data!r} is none, leave decode=host")
    other = [name for name in ("auto_augment", "color_jitter", "random_erasing") if getattr(config, name)]
    if other:
        off = "none" if other[0] == "auto_augment" else 0
        raise InputError(f"decode=device crops and flips only; set {other[0]}={off}, or decode=host")
    if not hasattr(torchvision.io, "decode_jpeg"):
        raise InputError(f"torchvision {torchvision.__version__} has no JPEG decoder any more; leave decode=host")


class EncodedFiles(Subset):
    """index -> ((Encoded, name), label) of chosen ImageFiles."""

    def __getitem__(self, index: int) -> tuple[tuple["Encoded", str], int | np.ndarray]:
        files, index = self.source, self.indices[index]
        with files.opened(index) as image:
            found = encoded(image, files.reading)
        return (found, files.name(index)), files.label(index)


class Encoded(NamedTuple):
    """The bytes of a file that the device decodes, or the pixels of one that it cannot decode."""

    content: Tensor  # uint8: bytes (n,) of a JPEG file, or pixels (3, H, W)
    height: int  # this and the width are those of the turned image
    width: int
    turn: int = 1  # the EXIF orientation of what is decoded from `content`, as `turned` takes it


def encoded(image: Image.Image, reading: Reading, decode: bool = False) -> Encoded:
    """The bytes of an opened grey or RGB JPEG file.

    Any other file (16 bits, CMYK, PNG, a huge JPEG) is decoded here, by the host path's `as_rgb`; with `decode`,
    every file is. Raises ValueError for a truncated file.
    """
    if decode or image.width * image.height > LARGE or image.format != "JPEG" or image.mode not in ("L", "RGB"):
        image = as_rgb(image, reading)
        return Encoded(torch.from_numpy(np.array(image)).permute(2, 0, 1), image.height, image.width)
    image.fp.seek(0)
    content = bytearray(image.fp.read())
    if content.rfind(END) < content.rfind(START):
        raise ValueError("image file is truncated")  # a decoder may fill up what is missing
    turn = orientation(image) if reading.upright else 1
    return Encoded(torch.frombuffer(content, dtype=torch.uint8), *sides(image, reading), turn)


def turned(pixels: Tensor, orientation: int) -> Tensor:
    """Turns pixels (..., H, W) upright; `orientation` is the EXIF orientation they have, 1 to 8."""
    pixels = pixels.transpose(-1, -2) if orientation in ON_ITS_SIDE else pixels
    return pixels.flip(FLIPS[orientation]) if orientation in FLIPS else pixels


def draw(config: Config, file: tuple[Encoded, str]) -> tuple:
    """(Encoded, name, crop (top, left, height, width), whether to flip): the transform of EncodedFiles."""
    found, name = file
    image = torch.empty(3, found.height, found.width, device="meta")
    crop = CROPS[config.train_crop_mode].get_params(image, config.crop_scale, config.crop_ratio)
    return found, name, crop, bool(config.hflip) and torch.rand(1).item() < config.hflip


def decode(files: Sequence[Encoded], names: Sequence[str], device: torch.device) -> list[Tensor | Unreadable]:
    """Decodes files to uint8 (3, H, W) on the device, turned upright; a broken one becomes its error."""
    jpegs = [(file.content, name) for file, name in zip(files, names) if file.content.dim() == 1]
    try:
        decoded = iter(_decode_all([content for content, _ in jpegs], device) if jpegs else ())
    except RuntimeError:  # one of them is broken, and the error does not say which
        decoded = (_decode_one(content, name, device) for content, name in jpegs)
    images = [next(decoded) if file.content.dim() == 1 else file.content.to(device) for file in files]
    return [image if isinstance(image, Unreadable) else turned(image, file.turn) for image, file in zip(images, files)]


def _decode_all(files: list[Tensor], device: torch.device) -> list[Tensor]:
    """Decodes whole JPEG files to uint8 (3, H, W) on the device. Raises RuntimeError if one is broken.

    On a GPU torchvision allocates the images on the current stream, and nvJPEG fills them on another one, which does
    not wait for it: queued kernels may still use that memory. So the images come from a stream that runs no kernels.
    """
    if device.type != "cuda":
        return torchvision.io.decode_jpeg(files, mode="RGB", device=device)
    stream, consumer = _allocating_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        images = torchvision.io.decode_jpeg(files, mode="RGB", device=device)  # makes `stream` wait for nvJPEG
    consumer.wait_stream(stream)
    for image in images:
        image.record_stream(consumer)  # the memory is free again once the consumer is done with it
    return images


@functools.cache
def _allocating_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _decode_one(content: Tensor, name: str, device: torch.device) -> Tensor | Unreadable:
    with contextlib.suppress(RuntimeError):
        return torchvision.io.decode_jpeg(content, mode="RGB").to(device)
    try:  # PIL reads more kinds of JPEG
        pixels = np.asarray(read_rgb(content.numpy().tobytes(), name, Reading(upright=False)))
    except Unreadable as error:
        return error
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy()).to(device)


def batches(loaded, size: tuple[int, int], device: torch.device) -> Iterator[Batch]:
    """Decodes, crops and resizes batches of what `draw` returns to uint8 (B, 3, H, W) on the device.

    A broken image is replaced by the next whole one of its batch. Raises InputError where all are broken.
    """
    for drawn, labels, messages in loaded:
        found, names, crops, flips = zip(*drawn)
        images = decode(found, names, device)
        broken = [i for i, image in enumerate(images) if isinstance(image, Unreadable)]
        if len(broken) == len(images):
            raise InputError(f"none of the {len(images)} images of a batch can be decoded, the first: {images[0]}")
        chosen = [
            next(j % len(images) for j in range(i, i + len(images)) if j % len(images) not in broken)
            for i in range(len(images))
        ]
        options = dict(interpolation=InterpolationMode.BICUBIC, antialias=True)
        resized = (F.resized_crop(images[i], *crops[i], size, **options) for i in chosen)
        stacked = torch.stack([image.flip(-1) if flips[i] else image for i, image in zip(chosen, resized)])
        yield stacked, labels[chosen], messages + [str(images[i]) for i in broken]
