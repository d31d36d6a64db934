"""Rows of matrices: how kernels load and store them, and column sums.

A block of rows of width D is held in registers as a tuple of chunks (BLOCK_M, BLOCK_D), so that 768 is 3 x 256 and is
not padded to 1024.

Column sums (bias gradients, dweight, ...) need no atomics: each of a fixed number of programs adds up its rows in
registers and writes one fp32 row of a workspace (programs, D); `column_sums_kernel` adds these in a fixed order.
"""

import functools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tiles
from .launch import cdiv, launch


@triton.jit
def row_mask(rows, M, i: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The mask of chunk i of some rows of (M, D); only the last chunk can reach past D."""
    if (i + 1) * BLOCK_D <= D:
        return rows < M
    else:
        return (rows < M) & (i * BLOCK_D + tl.arange(0, BLOCK_D)[None, :] < D)


@triton.jit
def load_rows(ptr, rows, M, stride, D: tl.constexpr, ALIGN: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows (BLOCK_M, 1) of an (M, D) matrix -> chunks (BLOCK_M, BLOCK_D), zeros outside; None for None.

    Stride 0 gives a vector (D,) to every row: in this layout each warp loads what it needs by itself, where a
    (1, BLOCK_D) load would be exchanged through shared memory.
    """
    if ptr is None:
        chunks = None
    else:
        # This shows the compiler that ALIGN = 8 divides strides such as 1000; tl.multiple_of crashes it for BLOCK_M 1.
        start = ptr + rows.to(tl.int64) * (stride // ALIGN * ALIGN)
        chunks = ()
        for i in tl.static_range((D + BLOCK_D - 1) // BLOCK_D):
            offs_d = i * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
            chunks = chunks + (tl.load(start + offs_d, mask=row_mask(rows, M, i, D, BLOCK_D), other=0.0),)
    return chunks


@triton.jit
def times_chunk(x, chunks, i: tl.constexpr):
    """x * chunks[i] in fp32, or x itself if chunks is None."""
    return x if chunks is None else x * chunks[i].to(tl.float32)


@triton.jit
def plus_chunk(x, chunks, i: tl.constexpr):
    """x + chunks[i] in fp32, or x itself if chunks is None."""
    return x if chunks is None else x + chunks[i].to(tl.float32)


@triton.jit
def store_chunk(ptr, value, rows, M, i: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes chunk i of rows of a contiguous (M, D) matrix, if ptr is not None."""
    if ptr is not None:
        offs_d = i * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
        mask = row_mask(rows, M, i, D, BLOCK_D)
        tl.store(ptr + rows.to(tl.int64) * D + offs_d, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def row_factor(dp_ptr, rows, M, rows_per_sample):  # the drop path's factors of rows, in fp32
    return tl.load(dp_ptr + rows // rows_per_sample, mask=rows < M, other=0.0).to(tl.float32)


@triton.jit
def _add_programs(ws_ptr, out_ptr, block, P, D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr):
    offs_d = block * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for start in range(0, P, BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)[:, None]
        total += tl.load(ws_ptr + offs_p * D + offs_d[None, :], mask=(offs_p < P) & (offs_d[None, :] < D), other=0.0)
    tl.store(out_ptr + offs_d, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=offs_d < D)


@triton.jit(do_not_specialize=["P", "MORE_P"])  # in no tuple: Triton specialises the numbers in one all the same
def column_sums_kernel(
    ws_ptrs,  # FIRST (P, D), and up to two (MORE_P, MORE_D)
    out_ptrs,  # as many (D,) and (MORE_D,)
    P,
    MORE_P,
    D: tl.constexpr,
    MORE_D: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    MORE_BLOCKS: tl.constexpr = (MORE_D + BLOCK_D - 1) // BLOCK_D
    pid = tl.program_id(0)
    for i in tl.static_range(FIRST):
        if pid // BLOCKS == i:
            _add_programs(ws_ptrs[i], out_ptrs[i], pid % BLOCKS, P, D, BLOCK_P, BLOCK_D)
    pid -= FIRST * BLOCKS
    for i in tl.static_range(len(ws_ptrs) - FIRST):
        if (pid >= 0) & (pid // MORE_BLOCKS == i):
            more, out = ws_ptrs[FIRST + i], out_ptrs[FIRST + i]
            _add_programs(more, out, pid % MORE_BLOCKS, MORE_P, MORE_D, BLOCK_P, BLOCK_D)


@functools.cache
def chunk_width(width: int) -> int:
    """BLOCK_D, at least 16: 3 to 5 chunks cover a row and a quarter more at most (1280 = 5 x 256)."""
    power = 1 << (width - 1).bit_length()
    return max(16, power // 8 if 8 * width <= 5 * power else power // 4)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """The number of a GPU's multiprocessors; 132, an H100's, for the CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def row_programs(device: torch.device, per_sm: int, blocks: int, strips: int = 1) -> int:
    """Persistent programs of a strip: at most `blocks`, and `per_sm` a multiprocessor over all strips."""
    return min(blocks, max(1, multiprocessors(device) * per_sm // strips))


def contiguous_or_none(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def row_stride(t: Tensor | None) -> int:
    return 0 if t is None else t.stride(0)


def row_alignment(*matrices: Tensor | None) -> int:
    """The power of 2, up to 16, that divides all row strides: 8 for 1000, which Triton overlooks."""
    return math.gcd(16, *(row_stride(t) for t in matrices))


def column_sums(
    x: Tensor, workspaces: Sequence[Tensor | None], dtypes: Sequence[torch.dtype | None] | None = None
) -> list[Tensor | None]:
    """The sums (D,) of workspaces (programs, D) over their programs, in one launch; None for None.

    Workspaces have one shape, or two: all of the first, then all of the second. dtypes of the sums: fp32 by default.
    x: the tensor whose device and dtype choose the configuration.
    """
    dtypes = [torch.float32] * len(workspaces) if dtypes is None else dtypes
    outs = [None if ws is None else ws.new_empty(ws.shape[1], dtype=dtype) for ws, dtype in zip(workspaces, dtypes)]
    present = [ws for ws in workspaces if ws is not None]
    if present:
        (P, D), (MORE_P, MORE_D) = present[0].shape, present[-1].shape
        config, FIRST = tiles.lookup("column_sums", x, f"d{D}"), sum(ws.shape == (P, D) for ws in present)
        blocks = sum(cdiv(ws.shape[1], config["BLOCK_D"]) for ws in present)
        pointers = dict(ws_ptrs=tuple(present), out_ptrs=tuple(out for out in outs if out is not None))
        sizes = dict(P=P, MORE_P=MORE_P, D=D, MORE_D=MORE_D, FIRST=FIRST)
        launch(column_sums_kernel, (blocks,), **pointers, **sizes, **config.meta)
    return outs


tiles.configures("column_sums")(lambda *_: [tiles.config(8, 1, BLOCK_P=256, BLOCK_D=16)])
