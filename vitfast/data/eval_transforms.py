"""Transforms of an evaluation on uint8 tensors, equal to timm's and Hugging Face's in every pixel.

Each resizes as Pillow does (resize.py) and cuts out the middle; of a resized image only what is kept is computed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import InputError, both_ends, unknown
from ..model.checkpoint.hugging_face import PROCESSORS, processor_class, size_field
from ..model.config import CropMode, Interpolation
from .resize import FILTERS, resize


@dataclass(frozen=True)
class EvalTransform:
    """Resizes images and cuts them to one size: uint8 (C, H, W), or a list of them, of any sizes.

    size: (height, width) of the results. edges: (height, width) to which `mode` resizes an image. "squash" resizes to
    exactly these; "shortest" makes the shorter side the first of them; "cover" and "fit" keep the aspect, so that the
    image covers these or fits into them; "keep" does not resize. fill: the value of each channel around an image that
    is too small. round_half: the cut begins at round(half of the excess) as in timm, else at its floor as in
    transformers.
    """

    size: tuple[int, int]
    edges: tuple[int, int]
    mode: Literal["squash", "shortest", "cover", "fit", "keep"]
    resample: Interpolation = "bicubic"
    fill: tuple[int, ...] = (0,)
    round_half: bool = True

    @classmethod
    def timm(
        cls,
        img_size: int | tuple[int, int],
        crop_mode: CropMode = "center",
        crop_pct: float = 1.0,
        interpolation: Interpolation = "bicubic",
        mean: Sequence[float] = (0.5, 0.5, 0.5),
    ) -> "EvalTransform":
        """Returns the transform that gives the pixels of timm's `create_transform(is_training=False)`.

        mean: the colour around the images of crop_mode="border". Raises InputError for an unknown mode or
        interpolation.
        """
        size = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
        edges = tuple(math.floor(side / crop_pct) for side in size)
        modes = dict(center="shortest" if edges[0] == edges[1] else "cover", squash="squash", border="fit")
        if crop_mode not in modes:
            raise unknown("crop_mode", crop_mode, modes)
        if interpolation not in FILTERS:
            raise unknown("interpolation", interpolation, FILTERS)
        fill = tuple(round(255 * value) for value in mean) if crop_mode == "border" else (0,)
        return cls(size, edges, modes[crop_mode], interpolation, fill)

    @classmethod
    def hugging_face(cls, processor: dict) -> "EvalTransform":
        """Returns the transform with the resize and crop of one of transformers' PIL image processors.

        processor: the content of a preprocessor_config.json, or `image_processor.to_dict()`; fields that it lacks are
        those of its class, one of PROCESSORS. Raises InputError for another class, which may do more, and for a size
        other than {"height", "width"} or {"shortest_edge"}.
        """
        kind, named = processor_class(processor), str(processor.get("image_processor_type"))
        if kind not in PROCESSORS:
            raise unknown("image processor", named, (f"{each}ImageProcessor" for each in PROCESSORS))
        told = PROCESSORS[kind] | {field: value for field, value in processor.items() if value is not None}
        mode, edges = size_field(told, "size")
        mode = "keep" if told.get("do_resize") is False else "shortest" if mode == "center" else mode
        cut = size_field(told, "crop_size")[1] if told.get("do_center_crop") else edges if mode == "squash" else None
        both = isinstance(told["size"], dict) and "longest_edge" in told["size"]
        if not edges or not cut or both or (number := told.get("resample", 3)) not in range(len(FILTERS)):
            said = ", ".join(f"{field}={told[field]}" for field in ("size", "crop_size", "resample") if field in told)
            wanted = "size as height and width, or as shortest_edge with a crop_size, and a resample from 0 to 5"
            raise InputError(f"{named}: give {wanted}; got {both_ends(said)}")
        return cls(cut, edges, mode, list(FILTERS)[number], round_half=False)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) to which an image of this height and width is resized."""
        if self.mode == "keep":
            return height, width
        if self.mode == "squash":
            return self.edges
        if self.mode == "shortest":
            long = int(self.edges[0] * max(height, width) / min(height, width))
            return (long, self.edges[0]) if height > width else (self.edges[0], long)
        ratios = height / self.edges[0], width / self.edges[1]
        ratio = max(ratios) if self.mode == "fit" else min(ratios)
        return max(1, round(height / ratio)), max(1, round(width / ratio))

    def _cut(self, length: int, wanted: int) -> tuple[int, int, int]:
        """Along one axis: (first pixel that is kept, how many are kept, how many are filled before them)."""
        over = length - wanted
        if over < 0:
            return 0, length, -over // 2 if self.round_half else -(over // 2)
        return round(over / 2) if self.round_half else over // 2, wanted, 0

    def __call__(self, images: Tensor | Sequence[Tensor]) -> Tensor:
        """Returns uint8 (C, *size), for S images (S, C, *size), on their device; all have C channels."""
        several = [images] if isinstance(images, Tensor) else list(images)
        sizes = [self.resized(*image.shape[-2:]) for image in several]
        cuts = [[self._cut(*axis) for axis in zip(size, self.size)] for size in sizes]
        crops = [(top, left, height, width) for (top, height, _), (left, width, _) in cuts]
        parts = resize(several, sizes, self.resample, crop=crops)
        parts = [self._filled(part, *(before for _, _, before in cut)) for part, cut in zip(parts, cuts)]
        return parts[0] if isinstance(images, Tensor) else torch.stack(parts)

    def _filled(self, part: Tensor, top: int, left: int) -> Tensor:
        """Returns an image of `size` that has `part` at (top, left), and `fill` around it."""
        channels, height, width = part.shape
        if (height, width) == self.size:
            return part
        whole = part.new_tensor(self.fill).view(-1, 1, 1).repeat(channels // len(self.fill), *self.size)
        whole[:, top : top + height, left : left + width] = part
        return whole
