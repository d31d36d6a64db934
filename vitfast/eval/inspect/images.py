"""The images that `inspect` looks at, out of a folder or a named data set."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from ...data.image_files import image_files
from ...data.images import Unreadable, printable, read_rgb
from ...errors import InputError

logger = logging.getLogger("vitfast")


def read_images(spec: str, count: int, size: tuple[int, int], chans: int = 3) -> tuple[Tensor, int]:
    """At most `count` images, evenly spread over what there is, as uint8 (B, chans, *size).

    They are scaled to cover the size and cut at the centre. Those that cannot be read are left out, with a warning; the
    second result is their number. spec: a folder with image files at any depth, or what `vitfast eval --data` takes by
    name ("digits", "torch/..."; validation split). Raises InputError where there are none, or none that can be read,
    and for `chans` other than 1 and 3.
    """
    if chans not in (1, 3):
        raise InputError(f"--data {spec}: the model reads {chans} channels; images have 1 or 3")
    if count < 1:
        raise InputError(f"--images must be at least 1, got {count}")
    if not spec:
        raise InputError("no data given: --data takes a folder of images, 'digits', or a name such as torch/cifar10")
    length, opened = _folder(Path(spec)) if Path(spec).exists() else _named(spec, size)
    chosen = np.unique(np.linspace(0, length - 1, min(count, length)).round().astype(int))
    fitted, unreadable = [], []
    for i in chosen:
        try:
            image = opened(i).convert("RGB" if chans == 3 else "L")
        except Unreadable as error:
            unreadable.append(error)
            continue
        fitted.append(ImageOps.fit(image, size[::-1], Image.Resampling.BICUBIC))
    if not fitted:
        raise InputError(f"none of {len(unreadable)} images of {spec!r} could be read; the first: {unreadable[0]}")
    for error in unreadable:
        logger.warning("left out: %s", error)
    pixels = np.stack([np.asarray(image).reshape(*size, chans) for image in fitted])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), len(unreadable)


def _folder(root: Path) -> tuple[int, Callable[[int], Image.Image]]:
    if not root.is_dir():
        raise InputError(f"--data {root} is a file; give a folder of images")
    files = list(image_files(root))

    def opened(index: int) -> Image.Image:
        return read_rgb(files[index], printable(files[index]))

    return len(files), opened


def _named(spec: str, size: tuple[int, int]) -> tuple[int, Callable[[int], Image.Image]]:
    from ...data.datasets import open_sources

    source = open_sources(spec, "", size, (1, 1), 1, 0)[1]
    if not hasattr(source, "__getitem__"):
        raise InputError(
            f"--data {spec} is read in order only; give a folder of images, 'digits', torch/... or hfds/..."
        )

    def opened(index: int) -> Image.Image:
        image = source[int(index)][0]
        return image if isinstance(image, Image.Image) else Image.fromarray(image.transpose(1, 2, 0))

    return len(source), opened
