"""Attention over samples of many sizes, one after the other: where the tiles of packed tensors lie.

Packed q, k, v and o are (tokens, H, Dh), to the kernels (1, tokens, H, Dh); sample s owns the tokens offsets[s] to
offsets[s + 1], attends to itself alone, and no padding lies between two samples. The programs of a kernel are the tiles
of BLOCK rows of every sample, times the heads. Their number is known on the device only; tokens // BLOCK + samples is
never less, and the programs that are left over return at once. A table tells each program its sample and its block
there: samples with more blocks, whose programs also take longer, come first, so that none of them is left at the end
with most of the GPU idle. The table is made on the device by _tiles_kernel, without a sort or a scan: a sample counts
the tiles of all samples before it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import cdiv, launch


@triton.jit
def bounds(offsets_ptr, samples, tokens):
    """First token and number of tokens of samples, within the tokens there are whatever the offsets say."""
    first = tl.minimum(tl.maximum(tl.load(offsets_ptr + samples).to(tl.int32), 0), tokens)
    end = tl.minimum(tl.maximum(tl.load(offsets_ptr + samples + 1).to(tl.int32), first), tokens)
    return first, end - first


@triton.jit
def place(table_ptr, tokens, N, H, BLOCK: tl.constexpr):
    """Of a program: (b, h, block in its sample, first token, tokens of it, start of its lse).

    table_ptr: what `tile_table` makes for all `tokens`, or None for tensors (B, N, H, Dh) of one size. A program that
    is left over has a sample without tokens.
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
def tile_of(b, index, N, H, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """The number of a program's tile, found when it is needed: it would hold a register all along."""
    if PACKED:
        return tl.program_id(0) // H
    else:
        return b * tl.cdiv(N, BLOCK) + index


@triton.jit
def _store_tiles(table_ptr, slots, mask, first, n, index):
    """Rows of the table."""
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
    """The tiles of one sample: after those of all with more blocks, and of earlier ones with as many."""
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
    if sample == samples - 1:  # who fills what is left over
        for start in range(total, tiles, CHUNK):
            left = start + tl.arange(0, CHUNK)
            _store_tiles(table_ptr, left, left < tiles, 0, 0, 0)


def tile_table(offsets: Tensor, tokens: int, block: int) -> Tensor:
    """(tiles, 3) int32: the first token of a tile's sample, how many it has, the tile's number there.

    Of a tile that is left over the sample has no tokens.
    """
    samples = len(offsets) - 1
    tiles = tokens // block + samples
    table = torch.empty((tiles, 3), dtype=torch.int32, device=offsets.device)
    sizes = dict(samples=samples, tokens=tokens, tiles=tiles, BLOCK=block, CHUNK=1024)
    launch(_tiles_kernel, (samples,), offsets_ptr=offsets, table_ptr=table, **sizes, num_warps=4)
    return table


def tiles_of(q: Tensor, offsets: Tensor | None, block: int) -> tuple[int, dict]:
    """How many tiles of `block` rows q (B, N, H, Dh) has, and the kernels' arguments for packed samples."""
    batch, tokens = q.shape[:2]
    if offsets is None:
        return batch * cdiv(tokens, block), dict(table_ptr=None, tokens=0)
    table = tile_table(offsets, tokens, block)
    return len(table), dict(table_ptr=table, tokens=tokens)
