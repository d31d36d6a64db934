"""Heads of the attention kernels: one or two power-of-two chunks of columns, as in 80 = 64 + 16.

In a head that rotary positions turn, the two chunks are the two columns of its pairs (terms.py).

Packed q, k, v and o, of samples of many sizes, are (tokens, H, Dh), which the kernels see as (1, tokens, H, Dh). Sample
s owns the tokens offsets[s] to offsets[s + 1] and attends to itself alone; no padding lies between two samples. Every
sample is cut into tiles of BLOCK rows, and a kernel has a program for each tile and head. The number of tiles is known
on the device only; tokens // BLOCK + samples is never less, and the programs without a tile return at once. A table
tells each program its sample and its block there. Samples with more blocks, whose programs also take longer, come
first, so that none of them is left at the end with most of the GPU idle. _tiles_kernel makes the table on the device,
without a sort or a scan: for each sample it counts the tiles of all samples that come before it.

The kernels repeat the same lines to list their arguments and find their head: Triton takes arguments by name.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..launch import cdiv, launch

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class Head(NamedTuple):
    """The head that a kernel is compiled for.

    Triton 3.6 reads its fields as plain numbers: to pass one to another function, first name it as a constexpr.
    """

    dim: int
    first: int  # columns of its first chunk
    second: int  # columns of its second chunk, or 0
    align: int  # each of its rows starts at a multiple of this many elements
    needs_int64: bool  # whether its last row may be 2^31 elements past its first
    precision: str  # the input precision of fp32 products
    folds: bool = False  # whether one multiply-add scales logits into base 2: see exp_difference
    rope_layout: str = ""  # the layout of the pairs that rotary positions turn: see terms.py
    shared_pair_angle: bool = False  # whether one number turns both columns of a pair


@triton.jit
def head_of(x, b, h, HEAD: tl.constexpr, first=0, PACKED: tl.constexpr = False):
    """(pointer to row `first`, stride of rows) of a head of x = (pointer, strides of B, N, H).

    x is (B, N, H, Dh). The hint tl.multiple_of keeps 16-byte loads where 8 but not 16 divides Dh.
    """
    ALIGN: tl.constexpr = HEAD.align
    if PACKED:  # not with first = 0: the compiler would fold the addition that carries the hint away
        start = first.to(tl.int64) * x[1][1] + h.to(tl.int64) * x[1][2]
        return x[0] + tl.multiple_of(start, ALIGN), x[1][1]
    else:
        return x[0] + tl.multiple_of(b.to(tl.int64) * x[1][0] + h.to(tl.int64) * x[1][2], ALIGN), x[1][1]


@triton.jit
def chunk_ptrs(head, rows, FIRST: tl.constexpr, SIZE: tl.constexpr, HEAD: tl.constexpr):
    """Pointers to columns FIRST..FIRST + SIZE of some rows of a head."""
    ALIGN: tl.constexpr = HEAD.align
    offs_n = rows.to(tl.int64) * head[1] if HEAD.needs_int64 else rows * head[1]
    return head[0] + (tl.multiple_of(offs_n, ALIGN)[:, None] + (FIRST + tl.arange(0, SIZE))[None, :])


@triton.jit
def chunk_mask(in_rows, FIRST: tl.constexpr, SIZE: tl.constexpr, END: tl.constexpr):
    """The mask of columns FIRST..FIRST + SIZE: true where in_rows is and the column lies before END."""
    if FIRST + SIZE > END:
        return in_rows[:, None] & (FIRST + tl.arange(0, SIZE) < END)[None, :]
    else:
        return in_rows[:, None]


@triton.jit
def load_head_chunk(
    head,
    rows,
    N,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    HEAD: tl.constexpr,
    END: tl.constexpr = 0,
):
    """Loads columns FIRST..FIRST + SIZE of some rows of a head; numbers outside are zero.

    MASK_ROWS: some rows may lie past N. END: the first column outside; 0 stands for the end of the head.
    """
    LIMIT: tl.constexpr = END if END > 0 else HEAD.dim
    ptrs = chunk_ptrs(head, rows, FIRST, SIZE, HEAD)
    if MASK_ROWS:
        return tl.load(ptrs, mask=chunk_mask(rows < N, FIRST, SIZE, LIMIT), other=0.0)
    elif FIRST + SIZE > LIMIT:
        return tl.load(ptrs, mask=(FIRST + tl.arange(0, SIZE) < LIMIT)[None, :], other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def load_head_rows(head, rows, N, MASK_ROWS: tl.constexpr, HEAD: tl.constexpr):
    """Loads rows of a head as a tuple of its chunks: ((rows, first),) or ((rows, first), (rows, second))."""
    D0: tl.constexpr = HEAD.first
    D1: tl.constexpr = HEAD.second
    first = load_head_chunk(head, rows, N, 0, D0, MASK_ROWS, HEAD)
    if D1 > 0:
        return (first, load_head_chunk(head, rows, N, D0, D1, MASK_ROWS, HEAD))
    else:
        return (first,)


@triton.jit
def store_head_chunk(head, x, rows, N, FIRST: tl.constexpr, HEAD: tl.constexpr, END: tl.constexpr = 0):
    """Writes x to columns FIRST.. of the rows below N. END is as in load_head_chunk."""
    SIZE: tl.constexpr = x.shape[1]
    LIMIT: tl.constexpr = END if END > 0 else HEAD.dim
    mask = chunk_mask(rows < N, FIRST, SIZE, LIMIT)
    tl.store(chunk_ptrs(head, rows, FIRST, SIZE, HEAD), x.to(head[0].dtype.element_ty), mask=mask)


@triton.jit
def store_head_rows(head, x, rows, N, HEAD: tl.constexpr):
    """Writes x, the chunks of some rows of a head."""
    D0: tl.constexpr = HEAD.first
    store_head_chunk(head, x[0], rows, N, 0, HEAD)
    if len(x) > 1:
        store_head_chunk(head, x[1], rows, N, D0, HEAD)


@triton.jit
def store_sums(sums_ptr, x, slot, h, H, HEAD: tl.constexpr):
    """Writes the column sums of the chunks x to sums[slot, h], sums (slots, H, Dh) fp32."""
    HALVES: tl.constexpr = HEAD.rope_layout == "half"
    row = sums_ptr + (slot.to(tl.int64) * H + h) * HEAD.dim
    offs_d = tl.arange(0, x[0].shape[1])
    tl.store(row + offs_d, tl.sum(x[0], 0), mask=offs_d < (HEAD.dim // 2 if HALVES else HEAD.dim))
    if len(x) > 1:
        offs_d = (HEAD.dim // 2 if HALVES else x[0].shape[1]) + tl.arange(0, x[1].shape[1])
        tl.store(row + offs_d, tl.sum(x[1], 0), mask=offs_d < HEAD.dim)


@triton.jit
def zero_head_rows(ROWS: tl.constexpr, HEAD: tl.constexpr):
    """The chunks of ROWS rows of zeros, in fp32."""
    D0: tl.constexpr = HEAD.first
    D1: tl.constexpr = HEAD.second
    if D1 > 0:
        return (tl.zeros((ROWS, D0), tl.float32), tl.zeros((ROWS, D1), tl.float32))
    else:
        return (tl.zeros((ROWS, D0), tl.float32),)


@triton.jit
def dot_nt(a, b, HEAD: tl.constexpr, acc=None):
    """acc + a b^T over the chunks of the head: (rows of a, rows of b), fp32.

    acc must be computed for this product and not be carried by a loop: Triton adds wrongly on sm_100 where two products
    go into one accumulator that a loop carries (triton-lang/triton#10821).
    """
    acc = tl.dot(a[0], tl.trans(b[0]), acc, input_precision=HEAD.precision)
    if len(a) > 1:
        acc = tl.dot(a[1], tl.trans(b[1]), acc, input_precision=HEAD.precision)
    return acc


@triton.jit
def accumulate(acc, w, x, HEAD: tl.constexpr):
    """acc + w x for every chunk of x; w takes x's dtype."""
    w = w.to(x[0].dtype)
    first = tl.dot(w, x[0], acc[0], input_precision=HEAD.precision)
    if len(x) > 1:
        return (first, tl.dot(w, x[1], acc[1], input_precision=HEAD.precision))
    else:
        return (first,)


@triton.jit
def shift_of(m, scale, HEAD: tl.constexpr):
    """The number that exp_difference subtracts, for the largest logit, scale m."""
    if HEAD.folds:
        return m * (scale * LOG2E)
    else:
        return m


@triton.jit
def exp_difference(s, shift, scale, HEAD: tl.constexpr):
    """exp(scale (s - m)), where shift, a column, is shift_of m.

    In fp32, with a bias and in packed samples, the difference is taken first, so that the weight of a lone key is 1.
    HEAD.folds: one multiply-add gives s c - shift for c = scale log2(e). shift is m c rounded, so that all weights of a
    row, and their sum l, have one factor too many, 2^(m c - shift), which is within 6e-8 |logit| of 1 (6e-4 at logits
    of 1e4). It cancels in o = acc / l and in lse = ln(2) (shift + log2(l)), except where acc's weights are rounded to
    16 bits. Only logits beyond 1e8 make a factor that does not fit 16 bits.
    """
    if HEAD.folds:
        return tl.exp2(tl.fma(s, scale * LOG2E, -shift))
    else:
        return tl.exp2((s - shift) * (scale * LOG2E))


@triton.jit
def lse_of(shift, l, scale, HEAD: tl.constexpr):
    """log sum exp(scale s) of rows whose exp_difference sums to l."""
    if HEAD.folds:
        return tl.fma(shift, LN2, tl.log2(l) * LN2)
    else:
        return tl.fma(shift, scale, tl.log2(l) * LN2)


@triton.jit
def row_dot(a, b):
    """Row sums of a * b over the chunks, fp32."""
    total = tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), 1)
    if len(a) > 1:
        total += tl.sum(a[1].to(tl.float32) * b[1].to(tl.float32), 1)
    return total


@triton.jit
def bounds(offsets_ptr, samples, tokens):
    """First token and number of tokens of samples, clamped to the tokens that exist."""
    first = tl.minimum(tl.maximum(tl.load(offsets_ptr + samples).to(tl.int32), 0), tokens)
    end = tl.minimum(tl.maximum(tl.load(offsets_ptr + samples + 1).to(tl.int32), first), tokens)
    return first, end - first


@triton.jit
def program_coords(table_ptr, tokens, N, H, BLOCK: tl.constexpr):
    """A program's b, h, block in its sample, the sample's first token, its tokens, start of its lse.

    table_ptr: the `tile_table` of all `tokens`, or None for tensors (B, N, H, Dh) whose samples have one size. For a
    program without a tile, the sample has 0 tokens.
    """
    pid = tl.program_id(0)
    if table_ptr is None:
        blocks = tl.cdiv(N, BLOCK)
        bh = pid // blocks
        return bh // H, bh % H, pid % blocks, tl.full((), 0, tl.int32), N, bh.to(tl.int64) * N
    else:
        h, row = pid % H, table_ptr + pid // H * 3
        first, n, index = tl.load(row), tl.load(row + 1), tl.load(row + 2)
        return tl.full((), 0, tl.int32), h, index, first, n, h.to(tl.int64) * tokens + first


@triton.jit
def tile_index(b, index, N, H, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """The number of a program's tile; callers compute it late, since it would hold a register until then."""
    if PACKED:
        return tl.program_id(0) // H
    else:
        return b * tl.cdiv(N, BLOCK) + index


@triton.jit
def _store_tiles(table_ptr, slots, mask, first, n, index):
    """Writes rows of the table."""
    ptrs = table_ptr + 3 * slots
    tl.store(ptrs, first, mask=mask)
    tl.store(ptrs + 1, n, mask=mask)
    tl.store(ptrs + 2, index, mask=mask)


@triton.jit(do_not_specialize=["samples", "tokens", "tiles"])
def _tiles_kernel(
    offsets_ptr,  # (samples + 1,)
    table_ptr,  # (tiles, 3)
    samples,
    tokens,
    tiles,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Writes one sample's tiles, after those of samples with more blocks, or as many and a lower index."""
    sample = tl.program_id(0)
    first, n = bounds(offsets_ptr, sample, tokens)
    blocks = tl.cdiv(n, BLOCK)
    before, total = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for start in range(0, samples, CHUNK):
        others = start + tl.arange(0, CHUNK)
        lengths = bounds(offsets_ptr, tl.minimum(others, samples - 1), tokens)[1]
        theirs = tl.where(others < samples, tl.cdiv(lengths, BLOCK), 0)
        ahead = (theirs > blocks) | ((theirs == blocks) & (others < sample))
        before += tl.sum(tl.where(ahead, theirs, 0), 0)
        total += tl.sum(theirs, 0)
    for start in range(0, blocks, CHUNK):
        index = start + tl.arange(0, CHUNK)
        _store_tiles(table_ptr, before + index, (index < blocks) & (before + index < tiles), first, n, index)
    if sample == samples - 1:  # this program also fills the rows without a tile
        for start in range(total, tiles, CHUNK):
            left = start + tl.arange(0, CHUNK)
            _store_tiles(table_ptr, left, left < tiles, 0, 0, 0)


def tile_table(offsets: Tensor, tokens: int, block: int) -> Tensor:
    """(tiles, 3) int32, a row per tile: its sample's first token and number of tokens, its index there.

    Rows without a tile are all zeros, which stand for a sample without tokens.
    """
    samples = len(offsets) - 1
    tiles = tokens // block + samples
    table = torch.empty((tiles, 3), dtype=torch.int32, device=offsets.device)
    sizes = dict(samples=samples, tokens=tokens, tiles=tiles, BLOCK=block, CHUNK=1024)
    launch(_tiles_kernel, (samples,), offsets_ptr=offsets, table_ptr=table, **sizes, num_warps=4)
    return table


def describable(x: Tensor) -> bool:
    """Whether TMA can read x (B, N, H, Dh): 16 bits, rows that start at multiples of 16 bytes."""
    over_b, over_n, over_h, _ = x.stride()
    aligned = not (x.data_ptr() % 16 or (over_b | over_n | over_h) % 8)
    return aligned and x.element_size() == 2 and x.numel() > 0 and min(over_b, over_n, over_h) > 0


def head_box(x: Tensor, heads: int, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of x (B, N, H, Dh) and the memory after it, as (B, heads, N, Dh) in blocks of rows."""
    (B, N, _, D), (over_b, over_n, over_h, _) = x.shape, x.stride()
    shape, strides = [B, heads, N, D], [over_b, over_h, over_n, 1]
    return TensorDescriptor(x.as_strided(shape, strides), shape, strides, [1, 1, rows, columns])


def tiles_of(q: Tensor, offsets: Tensor | None, block: int) -> tuple[int, dict]:
    """How many tiles of `block` rows q (B, N, H, Dh) has, and the kernels' arguments for packed samples."""
    batch, tokens = q.shape[:2]
    if offsets is None:
        return batch * cdiv(tokens, block), dict(table_ptr=None, tokens=0)
    table = tile_table(offsets, tokens, block)
    return len(table), dict(table_ptr=table, tokens=tokens)
