"""Finds the patches of images where they lie in memory, for the kernels of the patch embedding.

K = C*P*Q is walked in the image's own order: (c, p, q) in general, (p, q, c) where the channels of a pixel lie
together, so that a run of Q or Q*C numbers is contiguous. Images may have any strides.

Raw uint8 images u become (u / 255 - mean) / std = x a + c, where x = u - 128 is exact in every dtype, a = 1 / (255 std)
and c = (128 / 255 - mean) / std. a is folded into W and c into the bias; the weight's gradient is multiplied by a, and
c times the bias's gradient is added. Kernels list `geometry_of`'s arguments since Triton takes them by name.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import INTERPRETED as _INTERPRETED
from ..launch import fp32_precision
from ..tiles import batch_invariant
from . import configs  # noqa: F401 (it registers them)

INTERPRETED = tl.constexpr(_INTERPRETED)


class Axes(NamedTuple):
    """The K axis of a patch as three nested axes, (k // (k1 * k2), k1, k2); a constexpr.

    unit: the strides of images and of the first two axes are given to kernels as multiples of it.
    """

    k: int
    k1: int
    k2: int
    unit: int = 1


class Layout(NamedTuple):
    """How many patches an image has and how many lie side by side, with the numbers of `_magic` for both."""

    patches: int
    columns: int
    patches_magic: int
    patches_shift: int
    columns_magic: int
    columns_shift: int


@triton.jit
def divide(x, magic, shift):
    """x // d with the numbers of `_magic(d)`: in the inner loop a division costs as much as the product."""
    return ((x.to(tl.int64) * magic) >> shift).to(tl.int32)


@triton.jit
def k_offsets(k, strides, AXES: tl.constexpr):
    """Offsets of the K axis; strides: that of a patch or an image, then those of its three axes."""
    outer = (k // (AXES.k1 * AXES.k2)).to(tl.int64) * strides[1] * AXES.unit
    middle = (k // AXES.k2 % AXES.k1).to(tl.int64) * strides[2] * AXES.unit
    return outer + middle + (k % AXES.k2).to(tl.int64) * strides[3]


@triton.jit
def locate(row, layout, strides, AXES: tl.constexpr):
    """For each row, one patch of the batch: its image, its index there, the offset of its first pixel."""
    image = divide(row, layout.patches_magic, layout.patches_shift)
    patch = row - image * layout.patches
    y = divide(patch, layout.columns_magic, layout.columns_shift)
    x = patch - y * layout.columns
    down = (y * AXES.k1).to(tl.int64) * strides[2] * AXES.unit
    return image, patch, image.to(tl.int64) * strides[0] * AXES.unit + down + (x * AXES.k2).to(tl.int64) * strides[3]


@triton.jit
def token_row(row, image, prefix, packed, mask):
    """The row of a patch among all tokens (B, T+N, D), where each image begins with `prefix` tokens.

    packed: (rows, starts) of images of many sizes, see geometry_of, or None.
    """
    if packed is None:
        return (row + (image + 1) * prefix).to(tl.int64)
    else:
        return tl.load(packed[0] + row, mask=mask, other=0).to(tl.int64)


@triton.jit
def centred_bytes(u):
    """u - 128 in fp16 of bytes u: the bits of 1024 + u are the upper byte of 1024, then u.

    This takes one instruction per byte; a conversion by way of fp32 takes three and a half.
    """
    if INTERPRETED:
        return (u.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1152
    else:
        return tl.inline_asm_elementwise(
            """
            { .reg .b32 less;
            mov.b32 less, 0xE480E480;
            prmt.b32 $0, $2, 0x64646464, 0x4140;
            prmt.b32 $1, $2, 0x64646464, 0x4342;
            add.rn.f16x2 $0, $0, less;
            add.rn.f16x2 $1, $1, less; }
            """,
            "=&r,=&r,r",
            [u],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )


@triton.jit
def load_patches(ptrs, mask, dtype: tl.constexpr, SHORT: tl.constexpr = False):
    """Loads image values as `dtype`, finite where masked; uint8 becomes u - 128.

    SHORT: whether bytes become fp16 by one instruction per pixel.
    """
    x = tl.load(ptrs, mask=mask, other=0)
    if x.dtype == tl.uint8:
        x = centred_bytes(x) if SHORT and dtype == tl.float16 else x.to(tl.float32) - 128
    return x.to(dtype)


@triton.jit
def channel_values(channel, VALUES: tl.constexpr):
    """VALUES[channel], where VALUES are constants of the kernel."""
    value = tl.zeros_like(channel).to(tl.float32)
    for i in tl.static_range(len(VALUES)):
        value = tl.where(channel == i, VALUES[i], value)
    return value


def _magic(divisor: int) -> tuple[int, int]:
    """(m, s) with x // divisor == x * m >> s for all 0 <= x < 2^31 (Granlund and Montgomery, 1994)."""
    shift = 31 + (divisor - 1).bit_length()
    return -(-(1 << shift) // divisor), shift


def channels_last(images: Tensor) -> bool:
    """Whether the channels of a pixel lie together, and the pixels of a row side by side."""
    chans = images.shape[1]
    return chans > 1 and images.stride(1) == 1 and images.stride(3) == chans


@functools.lru_cache
def _geometry(shape: tuple[int, ...], image_strides: tuple[int, ...], patch: tuple[int, int], last: bool) -> dict:
    (batch, chans, height, width), (p, q) = shape, patch
    columns = width // q
    patches = height // p * columns
    strides, runs = ((0, image_strides[2], 1), (p, q * chans)) if last else (image_strides[1:], (p, q))
    # Triton sees whether 16 divides an integer argument, but no smaller divisor. In 14 x 14 patches of 518-pixel rows
    # it can load pairs of pixels only if it sees that 2 divides the strides.
    unit = math.gcd(16, image_strides[0], strides[0], strides[1])
    return dict(
        rows=batch * patches,
        layout=Layout(patches, columns, *_magic(patches), *_magic(columns)),
        strides=(image_strides[0] // unit, strides[0] // unit, strides[1] // unit, strides[2]),
        AXES=Axes(chans * p * q, *runs, unit),
    )


Packed = tuple[Tensor, Tensor]


def geometry_of(images: Tensor, patch: tuple[int, int], prefix: int, packed: Packed | None = None) -> dict:
    """The arguments by which all kernels find a patch's pixels and its row among the tokens.

    packed: (rows (N,), starts (S,)) for images of many sizes, which are cut into patches (N, C, P, Q): the row of each
    patch among the tokens, and the row of each image's first token.
    """
    if packed is not None:  # a patch is an image of one row
        images, patch = images.view(len(images), 1, 1, -1), (1, images.shape[1:].numel())
    geometry = _geometry(images.shape, images.stride(), patch, channels_last(images))
    return dict(geometry, prefix=prefix, packed=packed, PRECISION=fp32_precision())


def in_image_order(weight: Tensor, images: Tensor) -> Tensor:
    """`weight` (D, C, P, Q) with its axes in the order in which the image's K axis is walked."""
    return weight.permute(0, 2, 3, 1) if channels_last(images) else weight


def folding(weight: Tensor, images: Tensor, mean: Sequence[float], std: Sequence[float]) -> dict:
    """Arguments of the kernels that go through `weight` (D, C, P, Q) in the image's order.

    SCALES and SHIFTS: a and c of each channel; C_INNER: how many k lie between one channel and the next.
    """
    ordered, (_, chans, p, q) = in_image_order(weight, images), weight.shape
    scales, shifts = tuple(1 / (255 * s) for s in std), tuple((128 / 255 - m) / s for m, s in zip(mean, std))
    axes = dict(C_INNER=1 if channels_last(images) else p * q, AXES=Axes(chans * p * q, *ordered.shape[2:]))
    return dict(strides=ordered.stride(), SCALES=scales, SHIFTS=shifts, **axes, BLOCK_K=512, num_warps=4)


def patch_class(images: Tensor, geometry: dict, width: int) -> str:
    """ "u8-even-large": the dtype, whether 8 divides contiguous runs, which tiles fill a GPU.

    With ops.batch_invariant(True) it is the dtype alone, since packed patches have other runs and any number of rows.
    """
    kind = "u8" if images.dtype == torch.uint8 else f"f{8 * images.element_size()}"
    if batch_invariant():
        return f"{kind}-odd-small"
    runs, size = geometry["AXES"].k2, geometry["rows"] * width
    tiles = "large" if size >= 1 << 22 else "small" if size >= 1 << 19 else "few"
    return f"{kind}-{'odd' if runs % 8 else 'even'}-{tiles}"


def patch_matrix(
    images: Tensor, patch: tuple[int, int], dtype: torch.dtype, mean: Sequence[float], std: Sequence[float]
) -> Tensor:
    """(M, C*P*Q) for a library's product: every patch, c before p before q, raw images normalised."""
    if images.dtype == torch.uint8:
        mean, std = (torch.tensor(x, dtype=torch.float32, device=images.device).view(-1, 1, 1) for x in (mean, std))
        images = (images.float() / 255 - mean) / std
    (p, q), (batch, chans, height, width) = patch, images.shape
    rows, columns = height // p, width // q
    grid = images.to(dtype).unflatten(3, (columns, q)).unflatten(2, (rows, p)).permute(0, 2, 4, 1, 3, 5)
    return grid.reshape(batch * rows * columns, chans * p * q)
