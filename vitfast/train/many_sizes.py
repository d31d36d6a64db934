"""Counts of a run on images of many sizes, which its checkpoints and its summary hold."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..data.loader import Data
from ..data.packing import Progress
from ..ops.packed import PackedImages
from .resume import unreadable


@dataclass
class PackedTotals:
    """Counts of the steps taken, on all ranks: the stream of images, and how many patches they had.

    padded: how many patches they would have had if each batch had been padded to its longest image.
    """

    progress: Progress = field(default_factory=Progress)
    patches: int = 0
    padded: int = 0


def counts(images: Tensor | list[PackedImages], count: int) -> Tensor:
    """(3,) on the CPU: this rank's images, patches and patches with padding, the last two 0 for a tensor.

    count: how many images there are, of which each may have several crops.
    """
    packed = [] if isinstance(images, Tensor) else images
    patches, padded = sum(len(some.patches) for some in packed), sum(len(some) * some.longest for some in packed)
    return torch.tensor([count, patches, padded], dtype=torch.float32)


def read_totals(record: dict, data: Data, checkpoint: Path) -> PackedTotals:
    """The totals in a checkpoint's record; zeros for a run of one size.

    Raises InputError where the record is damaged.
    """
    if data.packing is None:
        return PackedTotals()
    try:
        saved = record["packing"]
        return PackedTotals(Progress.of(saved["progress"]), int(saved["patches"]), int(saved["padded"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise unreadable(checkpoint, f"not told where its images of many sizes are: {error!r}") from None


def packed_summary(data: Data, totals: PackedTotals, steps: int) -> dict:
    """The summary's entries on images of many sizes, such as the share that padding would have been."""
    images = max(1, totals.progress.images)
    return dict(
        expected_images_per_step=data.images_per_step,
        images_per_step=round(images / max(1, steps), 2),
        tokens_per_step=round((totals.patches + images * data.packing.prefix) / max(1, steps), 1),
        patches_per_image=round(totals.patches / images, 2),
        padding_not_computed=round(1 - totals.patches / max(1, totals.padded), 4),
        sizes={str(side): count for side, count in totals.progress.sizes.items()},
    )
