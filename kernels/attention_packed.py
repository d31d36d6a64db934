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
def place(packed, N, H, BLOCK: tl.constexpr):
    """Of a program: (b, h, block in its sample, first token, tokens of it, start of its lse).

    packed: (offsets, table, tokens), or None for tensors (B, N, H, Dh) of one size. A program that is left over has a
    sample without tokens.
    """
    pid = tl.program_id(0)
    if packed is None:
        blocks = tl.cdiv(N, BLOCK)
        bh = pid // blocks
        return bh // H, bh % H, pid % blocks, tl.full((), 0, tl.int32), N, bh.to(tl.int64) * N
    else:
        offsets_ptr, table_ptr, tokens = packed
        slot, h = pid // H, pid % H
        sample, index = tl.load(table_ptr + 2 * slot), tl.load(table_ptr + 2 * slot + 1)
        first, n = bounds(offsets_ptr, tl.maximum(sample, 0), tokens)
        n = tl.where(sample < 0, 0, n)
        return tl.full((), 0, tl.int32), h, index, first, n, h.to(tl.int64) * tokens + first


@triton.jit
def tile_of(b, index, N, H, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """The number of a program's tile, found when it is needed: it would hold a register all along."""
    if PACKED:
        return tl.program_id(0) // H
    else:
        return b * tl.cdiv(N, BLOCK) + index


@triton.jit(do_not_specialize=["samples", "tokens", "tiles"])
def _tiles_kernel(
    offsets_ptr,  # (samples + 1,)
    table_ptr,  # (tiles, 2)
    samples,
    tokens,
    tiles,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The tiles of one sample: after those of all with more blocks, and of earlier ones with as many."""
    sample = tl.program_id(0)
    blocks = tl.cdiv(bounds(offsets_ptr, sample, tokens)[1], BLOCK)
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
        ptrs, mask = table_ptr + 2 * (before + index), (index < blocks) & (before + index < tiles)
        tl.store(ptrs, sample, mask=mask)
        tl.store(ptrs + 1, index, mask=mask)
    if sample == samples - 1:  # who fills what is left over
        for start in range(total, tiles, CHUNK):
            left = start + tl.arange(0, CHUNK)
            tl.store(table_ptr + 2 * left, -1, mask=left < tiles)
            tl.store(table_ptr + 2 * left + 1, 0, mask=left < tiles)


def tile_table(offsets: Tensor, tokens: int, block: int) -> Tensor:
    """(tiles, 2) int32: the sample of each tile of `block` rows, or -1, and the tile's number in it."""
    samples = len(offsets) - 1
    tiles = tokens // block + samples
    table = torch.empty((tiles, 2), dtype=torch.int32, device=offsets.device)
    sizes = dict(samples=samples, tokens=tokens, tiles=tiles, BLOCK=block, CHUNK=1024)
    launch(_tiles_kernel, (samples,), offsets_ptr=offsets, table_ptr=table, **sizes, num_warps=4)
    return table


def tiles_of(q: Tensor, offsets: Tensor | None, block: int) -> tuple[int, tuple[Tensor, Tensor, int] | None]:
    """How many tiles of `block` rows q (B, N, H, Dh) has, and the argument `packed` of the kernels."""
    batch, tokens = q.shape[:2]
    if offsets is None:
        return batch * cdiv(tokens, block), None
    table = tile_table(offsets, tokens, block)
    return len(table), (offsets, table, tokens)
