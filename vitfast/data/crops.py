"""LeJEPA's crops of images, and how those of a step become one packed batch."""

import dataclasses

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..ops.packed import PackedImages, pack
from ..run.config import Config, crop_sizes
from .transforms import transforms


class Crops:
    """Draws the crops of an image: the global ones, and then the local ones, which are smaller."""

    def __init__(self, config: Config, img_size: tuple[int, int], patch: tuple[int, int]):
        self.patch, self.parts, self.chains = patch, config.accumulate, []
        kinds = crop_sizes(config, img_size, patch)
        self.sizes = [size for count, size in kinds for _ in range(count)]
        for (count, size), scale in zip(kinds, (config.crop_scale, config.local_scale)):
            self.chains += [transforms(dataclasses.replace(config, crop_scale=scale), size)[0]] * count

    @property
    def patches(self) -> int:
        """The patches of all crops of an image."""
        return sum(height * width for height, width in self.sizes) // (self.patch[0] * self.patch[1])

    def transform(self, image: Image.Image | np.ndarray) -> list[Tensor]:
        """The crops of an image, uint8 (C, H, W) each; of an array, which is not cut again, its corner."""
        if isinstance(image, np.ndarray):
            return [torch.from_numpy(np.ascontiguousarray(image[:, :height, :width])) for height, width in self.sizes]
        return [torch.as_tensor(chain(image)) for chain in self.chains]

    def pack(self, images: tuple[list[Tensor], ...]) -> list[PackedImages]:
        """Packs the crops of each micro-batch: the first of all its images, then the second, and so on.

        images: the results of `transform`.
        """
        parts = np.array_split(np.arange(len(images)), self.parts)
        return [pack([images[i][v] for v in range(len(self.sizes)) for i in part], self.patch) for part in parts]
