"""JPEG files decoded, cropped and resized on the device (`--set decode=device`), by nvJPEG on a GPU.

A CPU core decodes some hundreds of photographs a second, a B/16 on a large GPU wants thousands: here the loader reads
bytes alone. The crops are those of the CPU path, drawn from the same (seed, epoch, sample); the pixels differ by the
resampling's rounding. Crop and flip only: other augmentations need the CPU path.
"""

from collections.abc import Iterator

import numpy as np
import torch
import torchvision
from PIL import Image
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from ..config import Config
from ..errors import InputError
from .datasets import ImageFiles, Subset
from .samples import Batch, Samples, seed_everything


def check_decodable(config: Config, source) -> None:
    """Raises InputError where this path cannot do what the settings ask."""
    while isinstance(source, Subset):
        source = source.source
    if not isinstance(source, ImageFiles):
        raise InputError(f"decode=device reads JPEG files from a folder; {config.data!r} is none, leave decode=host")
    other = [name for name in ("auto_augment", "color_jitter", "random_erasing") if getattr(config, name)]
    if other:
        off = "none" if other[0] == "auto_augment" else 0
        raise InputError(f"decode=device crops and flips only; set {other[0]}={off}, or decode=host")
    if not hasattr(torchvision.io, "decode_jpeg"):
        raise InputError(f"torchvision {torchvision.__version__} has no JPEG decoder any more; leave decode=host")


class EncodedSamples(Samples):
    """(epoch, index) -> (bytes (n,) uint8, label, unreadable, crop (top, left, height, width), flip)."""

    def __init__(self, source, config: Config):
        super().__init__(source, None, config.seed)
        self.config = config

    def _get(self, index: int) -> tuple[str, int]:
        return self.source.path(index)

    def __getitem__(self, key: tuple[int, int]):
        epoch, index = key
        try:
            path, label, unreadable = self._read(index)
        except InputError as error:
            return error
        seed_everything(self.seed, epoch, index)
        with Image.open(path) as image:  # its header: the size
            crop = RandomResizedCropAndInterpolation.get_params(image, self.config.crop_scale, self.config.crop_ratio)
        flip = torch.rand(1).item() < self.config.hflip if self.config.hflip else False
        return torch.from_numpy(np.fromfile(path, dtype=np.uint8)), label, unreadable, crop, flip


def collate_encoded(samples: list) -> list | InputError:
    """The samples of a batch as a list, or the first error among them."""
    return next((sample for sample in samples if isinstance(sample, InputError)), samples)


def decode(encoded: list[Tensor], device: torch.device) -> list[Tensor | None]:
    """Encoded images -> uint8 (3, H, W) each, on the device; None for a broken one.

    JPEG files are decoded on the device, all others on the host.
    """
    try:
        return torchvision.io.decode_jpeg(encoded, mode=torchvision.io.ImageReadMode.RGB, device=device)
    except RuntimeError:  # one of them, and it does not say which
        return [_decode_one(content, device) for content in encoded]


def _decode_one(content: Tensor, device: torch.device) -> Tensor | None:
    for function in (torchvision.io.decode_jpeg, torchvision.io.decode_image):
        try:
            return function(content, mode=torchvision.io.ImageReadMode.RGB).to(device)
        except RuntimeError:
            pass
    return None


def batches(loaded, size: tuple[int, int], device: torch.device) -> Iterator[Batch]:
    """Batches of EncodedSamples -> batches of uint8 images (B, 3, H, W) on the device.

    A broken image is replaced by the next whole one of its batch.
    """
    for samples in loaded:
        content, labels, unreadable, crops, flips = zip(*samples)
        messages = [text for texts in unreadable for text in texts]
        images = decode(list(content), device)
        whole = [i for i, image in enumerate(images) if image is not None]
        if not whole:
            raise InputError(f"none of the {len(images)} images of a batch can be decoded")
        chosen = [
            i if image is not None else min(whole, key=lambda j, i=i: (j - i) % len(images))
            for i, image in enumerate(images)
        ]
        broken = [i for i, j in enumerate(chosen) if i != j]
        messages += [f"image {i} of a batch, class {labels[i]}, is a broken JPEG" for i in broken]
        options = dict(interpolation=InterpolationMode.BICUBIC, antialias=True)
        resized = (F.resized_crop(images[i], *crops[i], size, **options) for i in chosen)
        stacked = torch.stack([image.flip(-1) if flips[i] else image for i, image in zip(chosen, resized)])
        yield stacked, torch.tensor([labels[i] for i in chosen]), messages
