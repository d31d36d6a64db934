"""One pass of a separable resampling of 8-bit images, along their rows or their columns, in integers.

    y[i] = clip((2^21 + sum_k weights[k, i] x[first[i] + k]) >> 22, 0, 255)

Several images of different sizes share a launch: their bytes lie in one buffer, and a table says for each image where
it begins, how it is laid out and which coefficients it uses. vitfast/data/resize.py computes the coefficients; every
output pixel of an image has equally many, and they all stand for pixels inside the image.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch

BITS = 22  # of a weight's fraction: of 32, they leave 8 for the pixel and 2 for sums beyond white
BLOCK_R, BLOCK_C = 8, 128


class Source(NamedTuple):
    """An image in a buffer of bytes, and the shape and the coefficients of the result of one pass.

    The pixels of a row lie side by side. first (n,) and weights (K, n), int32, are for the n rows of the result where
    the pass is vertical, else for its n columns.
    """

    start: int  # the image's first byte
    channel_stride: int
    row_stride: int
    channels: int
    height: int
    width: int
    first: np.ndarray
    weights: np.ndarray


@triton.jit(do_not_specialize=["blocks"])
def resize_pass_kernel(
    x_ptr,  # bytes of all images
    y_ptr,  # bytes of all results
    first_ptr,  # coefficients of all images, int32
    weights_ptr,  # (K, n) of each image, one after the other, int32
    table_ptr,  # (S, 10), int64
    blocks,
    VERTICAL: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Each image has `blocks` programs of BLOCK_R x BLOCK_C pixels; a small image leaves some idle.

    Row r of a result is channel * height + y.
    """
    image, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    entry = table_ptr + image * 10
    x_start, channel_stride, row_stride = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    y_start, first_start, weights_start = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
    # Rows and columns are counted in 32 bits, bytes in 64.
    rows, height = tl.load(entry + 6).to(tl.int32), tl.load(entry + 7).to(tl.int32)
    width, taps = tl.load(entry + 8).to(tl.int32), tl.load(entry + 9).to(tl.int32)
    across = (width + BLOCK_C - 1) // BLOCK_C
    if block < (rows + BLOCK_R - 1) // BLOCK_R * across:
        r = block // across * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
        c = block % across * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
        mask = (r < rows) & (c < width)
        channel = r // height
        y = r - channel * height
        x_ptrs = x_ptr + x_start + channel * channel_stride
        if VERTICAL:
            i, n, inside = y, height, r < rows
            first = tl.load(first_ptr + first_start + i, mask=inside, other=0)
            x_ptrs += first * row_stride + c
        else:
            i, n, inside = c, width, c < width
            first = tl.load(first_ptr + first_start + i, mask=inside, other=0)
            x_ptrs += y * row_stride + first
        w_ptrs = weights_ptr + weights_start + i
        acc = tl.full((BLOCK_R, BLOCK_C), 1 << (BITS - 1), tl.int32)
        for _ in range(taps):
            x = tl.load(x_ptrs, mask=mask, other=0).to(tl.int32)
            acc += x * tl.load(w_ptrs, mask=inside, other=0)
            x_ptrs += row_stride if VERTICAL else 1
            w_ptrs += n
        value = tl.minimum(tl.maximum(acc >> BITS, 0), 255)
        tl.store(y_ptr + y_start + r.to(tl.int64) * width + c, value.to(tl.uint8), mask=mask)


def resize_pass(x: Tensor, sources: Sequence[Source], vertical: bool) -> Tensor:
    """Returns the bytes of the results, (C, height, width) of one image after the other.

    x: the bytes of all images. vertical: whether the pass runs along columns.
    """
    coefficients = {id(s.weights): (s.first, s.weights) for s in sources}  # images of one size share theirs
    counts = np.array([(len(first), weights.size) for first, weights in coefficients.values()], np.int64)
    places = dict(zip(coefficients, np.cumsum(counts, 0) - counts))
    numbers = [(*s[:3], *places[id(s.weights)], s.channels * s.height, *s[4:6], len(s.weights)) for s in sources]
    table = np.array(numbers, np.int64)
    rows, width = table[:, 5], table[:, 7]
    sizes = rows * width
    table = np.insert(table, 3, np.cumsum(sizes) - sizes, axis=1)
    first = np.concatenate([first for first, _ in coefficients.values()])
    weights = np.concatenate([weights.ravel() for _, weights in coefficients.values()])
    blocks = int((-(-rows // BLOCK_R) * -(-width // BLOCK_C)).max())
    y = torch.empty(int(sizes.sum()), dtype=torch.uint8, device=x.device)
    launch(
        resize_pass_kernel,
        (len(sources) * blocks,),
        x_ptr=x,
        y_ptr=y,
        first_ptr=torch.from_numpy(first).to(x.device),
        weights_ptr=torch.from_numpy(weights).to(x.device),
        table_ptr=torch.from_numpy(table).to(x.device),
        blocks=blocks,
        VERTICAL=vertical,
        BITS=BITS,
        BLOCK_R=BLOCK_R,
        BLOCK_C=BLOCK_C,
        num_warps=8,  # with 4, Triton 3.9 spills for sm_90
    )
    return y
