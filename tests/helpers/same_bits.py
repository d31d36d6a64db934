"""An image alone, in batches at every place, and in packs of other sizes: how many outputs have other bits."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def floats(output) -> list[Tensor]:
    """The floating tensors in what a model returns."""
    output = dict(output) if hasattr(output, "keys") else output
    return [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]


def unlike(found: list[Tensor], alone: list[Tensor]) -> bool:
    """Whether one of two equally many tensors has other bits than its partner; NaN is like NaN."""
    assert len(found) == len(alone) > 0
    same = lambda a, b: a.dtype == b.dtype and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))  # noqa: E731
    return not all(same(a.squeeze(0), b.squeeze(0)) for a, b in zip(found, alone))


@torch.no_grad()
def differing(run: Callable, images: Tensor, batches: Iterable[int]) -> int:
    """How many images, at how many places of batches of these sizes, have other outputs than alone.

    run: a model of a batch; every tensor that it returns has an axis of images first.
    """
    alone, count = [floats(run(images[i : i + 1])) for i in range(len(images))], 0
    for batch in batches:
        for shift in range(batch if batch <= 4 else 2):  # the first image at every place, or at the ends
            chosen = [(i + (shift if batch <= 4 else shift * (batch - 1))) % len(images) for i in range(batch)]
            found = floats(run(images[chosen]))
            count += sum(unlike([t[i : i + 1] for t in found], alone[j]) for i, j in enumerate(chosen))
    return count


@torch.no_grad()
def differing_in_packs(run: Callable, images: list[Tensor], packs: Iterable[list[int]]) -> int:
    """How many images have other outputs in lists of these images than alone as a batch (1, C, H, W)."""
    alone = [floats(run(image[None])) for image in images]
    return sum(
        unlike([t[i : i + 1] for t in floats(run([images[j] for j in pack]))], alone[j])
        for pack in packs
        for i, j in enumerate(pack)
    )
