"""Attention over images of many sizes: packed, padded, one size at a time, and other libraries'.

The mixes are those of mixes.py; q, k and v come apart, each way in the layout that it wants, so that no way pays for
another's. "vitfast": packed, ops.attention with offsets. "vitfast padded": (S, longest, H, Dh) with key_lengths, all
queries computed. "vitfast one size at a time": a call for each group of images of equal height and width. The peers
take packed tensors (packed_peers.py). FLOPs and bytes are of what is needed, without padding, for everybody;
`padded_share` is the share of the pairs of a query and a key that an implementation computes for padding (padding.py),
None where its tiles are not known. Truth is plain attention in float64 of each image alone, compared image by image.
"""

import functools

import clock
import harness
import padding
import pytest
import torch
from harness import Case, bench, values
from mixes import MIXES, Mix
from packed_peers import FLASH_VARLEN, PEERS, offsets_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vitfast import ops, ref

LAYOUTS = {  # implementations of ours -> their layout
    "vitfast": "packed",
    "vitfast padded": "padded",
    "vitfast one size at a time": "one size at a time",
}
ON_CPU = (*LAYOUTS, "torch nested")  # the others are for GPUs alone
DIRECTIONS = ("forward", "backward", "both")


def alone(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """Plain attention of (B, N, H, Dh), whose logits are made again for backward: not all would fit."""
    return checkpoint(functools.partial(ref.attention, **options), q, k, v, use_reentrant=False)


def plain_packed(mix: Mix, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    images = zip(*(x.split(mix.lengths) for x in (q, k, v)))
    return torch.cat([alone(*(x[None] for x in image))[0] for image in images])


def plain_padded(lengths: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    images = zip(*(x.split(1) for x in (q, k, v)), lengths.split(1))
    return torch.cat([alone(*image, key_lengths=n) for *image, n in images])


def by_group(attention, *tensors: Tensor) -> tuple[Tensor, ...]:
    """tensors: q, k and v of the first group of images, then of the next."""
    return tuple(attention(*tensors[i : i + 3]) for i in range(0, len(tensors), 3))


def case_of(mix: Mix, layout: str) -> Case:
    """A mix in a layout; its shape's name is the same in all."""
    heads, head = mix.sizes["heads"], mix.sizes["head"]
    if layout == "packed":
        formula, cut, shapes = functools.partial(plain_packed, mix), lambda x: x.split(mix.lengths), [(mix.tokens,)] * 3
    elif layout == "padded":
        formula = functools.partial(plain_padded, offsets_of(mix).diff())
        cut, shapes = lambda x: x.unbind(0), [(len(mix.lengths), mix.longest)] * 3
    else:
        formula, cut = functools.partial(by_group, alone), lambda x: x.unbind(0)
        shapes = [shape for shape in mix.uniform for _ in "qkv"]
    make = lambda: [values(*shape, heads, head) for shape in shapes]  # noqa: E731
    return Case("packed attention", mix.shape, formula, make, 0, mix.attention_work(harness.DTYPE.itemsize), cut)


def function_of(impl: str, mix: Mix):
    """The function of a name; skips the case where it is somebody's who is not installed."""
    if impl in PEERS:
        return PEERS[impl](mix)
    offsets = offsets_of(mix)
    if impl == "vitfast":
        return functools.partial(ops.attention, offsets=offsets, longest=mix.longest)
    if impl == "vitfast padded":
        return functools.partial(ops.attention, key_lengths=offsets.diff())
    return functools.partial(by_group, ops.attention)


def padded_share(impl: str, mix: Mix, direction: str) -> float | None:
    if impl in LAYOUTS:
        return padding.attention_share(mix, LAYOUTS[impl], direction)
    return padding.flex_share(mix) if impl.startswith("flex") else None


def wanted() -> list:
    """(mix, direction, impl) of the cases; on a CPU both directions at once, and forward of ours."""
    names = (*LAYOUTS, *FLASH_VARLEN, *(name for name in PEERS if name not in FLASH_VARLEN))
    found = [
        (mix, direction, impl)
        for mix in MIXES
        for direction in DIRECTIONS
        for impl in names
        if clock.GPU or (impl in ON_CPU and direction != "backward")
    ]
    return [pytest.param(*case, id="-".join(case)) for case in found]


@pytest.mark.parametrize("mix, direction, impl", wanted())
def test_attention_packed(benchmark, mix, direction, impl):
    mix = MIXES[mix]
    case, function = case_of(mix, LAYOUTS.get(impl, "packed")), function_of(impl, mix)
    facts = dict(padded_share=padded_share(impl, mix, direction), images=len(mix.images), tokens=mix.tokens)
    bench(benchmark, case, impl, function, direction, **facts)
