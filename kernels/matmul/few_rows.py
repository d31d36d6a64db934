"""Products of few rows, without a backward: with a norm in front, or with the sum over K in parts.

    norm_linear     act(norm(x) W^T + b), or with a gate act(norm(x) Wg^T + bg) * (norm(x) Wu^T + bu)
                                                                            x (M, D), weights (N, D) -> (M, N)
    split_linear    residual + layer_scale * (x W^T + b)                    x (M, K), W (N, K) -> (M, N)

With 197 rows a launch takes as long as the work in it, and the blocks of product.py leave most multiprocessors idle.

norm_linear has at most one program for each multiprocessor. It normalises its rows once and keeps them in shared memory
for all its columns, whose weights are on their way while the columns before are multiplied.

In split_linear `split` programs share a block of the output. Each writes its part of the sums to an fp32 workspace and
adds 1 to the block's counter; the one that finds all others there adds up the parts in their order, so that the bits do
not depend on the order of arrival. norm_linear, which an encoder block runs before it, sets the counters to 0. Parts
and counters come from PyTorch's allocator, so no two streams and no two CUDA graphs share any, and a run that was
aborted leaves none.

On GPUs with programmatic dependent launch both begin while the kernel before them ends (kernels/dependent.py).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import tiles
from ..dependent import MOST_ROWS, ask_for_rows, dependent_launch, wait_for_kernel_before
from ..launch import cdiv, launch
from ..rows import chunk_width, contiguous_or_none, load_rows, multiprocessors, row_alignment, row_mask, row_stride
from ..tiles import KernelConfig, batch_invariant, config, configures
from .activations import activate, wide_activate

COUNTERS = 1024  # at least one for each block of split_linear
NONE = config(provider="none")  # these kernels do not take the shape


@triton.jit
def load_vector(ptr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """A vector (D,) -> chunks (BLOCK_D,), zeros past D."""
    chunks = ()
    for i in tl.static_range((D + BLOCK_D - 1) // BLOCK_D):
        offs_d = i * BLOCK_D + tl.arange(0, BLOCK_D)
        chunks = chunks + (tl.load(ptr + offs_d, mask=offs_d < D, other=0.0),)
    return chunks


@triton.jit
def normalised_rows(
    x_ptr,
    weight_ptr,  # (D,) or None
    bias_ptr,  # (D,) or None
    rows,
    M,
    stride_x,
    eps,
    dtype: tl.constexpr,
    D: tl.constexpr,
    ALIGN: tl.constexpr,
    RMS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The norm of some rows (BLOCK_M, 1) of x, as chunks (BLOCK_M, BLOCK_D) in `dtype`, zeros past D."""
    CHUNKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    x = load_rows(x_ptr, rows, M, stride_x, D, ALIGN, BLOCK_D)
    weight = load_vector(weight_ptr, D, BLOCK_D) if weight_ptr is not None else None
    bias = load_vector(bias_ptr, D, BLOCK_D) if bias_ptr is not None else None
    mean = 0.0
    if not RMS:
        total = tl.zeros(x[0].shape, tl.float32)
        for i in tl.static_range(CHUNKS):
            total += x[i].to(tl.float32)
        mean = tl.sum(total, 1, keep_dims=True) / D
    total = tl.zeros(x[0].shape, tl.float32)
    for i in tl.static_range(CHUNKS):
        centred = tl.where(row_mask(rows, M, i, D, BLOCK_D), x[i].to(tl.float32) - mean, 0.0)
        total += centred * centred
    rstd = tl.rsqrt(tl.sum(total, 1, keep_dims=True) / D + eps)
    chunks = ()
    for i in tl.static_range(CHUNKS):
        # x - mean again: keeping it in fp32 would take twice the registers
        h = (x[i].to(tl.float32) - mean) * rstd
        if weight is not None:
            h *= weight[i].to(tl.float32)[None, :]
        if bias is not None:
            h += bias[i].to(tl.float32)[None, :]
        chunks = chunks + (tl.where(row_mask(rows, M, i, D, BLOCK_D), h, 0.0).to(dtype),)
    return chunks


@triton.jit
def times_weight(h, ptr, bias_ptr, cols, N, stride, D: tl.constexpr, ALIGN: tl.constexpr, BLOCK_D: tl.constexpr):
    """h W^T + b for some columns, rounded; h: chunks of rows."""
    acc = tl.zeros((h[0].shape[0], cols.shape[0]), tl.float32)
    start = ptr + cols[:, None].to(tl.int64) * (stride // ALIGN * ALIGN)
    for i in tl.static_range((D + BLOCK_D - 1) // BLOCK_D):
        mask = row_mask(cols[:, None], N, i, D, BLOCK_D)
        weight = tl.load(start + (i * BLOCK_D + tl.arange(0, BLOCK_D))[None, :], mask=mask, other=0.0)
        acc = tl.dot(h[i], tl.trans(weight), acc)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    return acc.to(ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["M", "columns"])
def norm_linear_kernel(
    x_ptr,  # (M, D)
    norm_weight_ptr,  # (D,) or None
    norm_bias_ptr,  # (D,) or None
    weight_ptr,  # (N, D)
    bias_ptr,  # (N,) or None
    up_weight_ptr,  # (N, D), None without a gate
    up_bias_ptr,  # (N,) or None
    out_ptr,  # (M, N)
    counters_ptr,  # (COUNTERS,) int32 or None
    M,
    N,
    columns,  # of a program, a multiple of BLOCK_N
    stride_x,
    stride_w,
    stride_up,
    eps,
    D: tl.constexpr,
    ALIGN: tl.constexpr,
    RMS: tl.constexpr,
    ACT: tl.constexpr,  # an activation, or None
    COUNTERS: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    WIDTH: tl.constexpr = triton.next_power_of_2(D)
    groups = tl.cdiv(N, columns)
    first_n = tl.program_id(0) % groups * columns
    rows = tl.program_id(0) // groups * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    for start in range(first_n, first_n + columns, BLOCK_N):
        ask_for_rows(weight_ptr, start, BLOCK_N, N, stride_w, 0, WIDTH, D, PDL)
        if up_weight_ptr is not None:
            ask_for_rows(up_weight_ptr, start, BLOCK_N, N, stride_up, 0, WIDTH, D, PDL)
    wait_for_kernel_before(PDL)
    if counters_ptr is not None:
        if tl.program_id(0) == 0:
            tl.store(counters_ptr + tl.arange(0, COUNTERS), tl.zeros((COUNTERS,), tl.int32))
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    norm = norm_weight_ptr, norm_bias_ptr
    h = normalised_rows(x_ptr, *norm, rows, M, stride_x, eps, dtype, D, ALIGN, RMS, BLOCK_D)
    for start in tl.range(first_n, min(first_n + columns, N), BLOCK_N, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_N)
        out = times_weight(h, weight_ptr, bias_ptr, cols, N, stride_w, D, ALIGN, BLOCK_D)
        if up_weight_ptr is not None:
            up = times_weight(h, up_weight_ptr, up_bias_ptr, cols, N, stride_up, D, ALIGN, BLOCK_D)
            out = (wide_activate(out, ACT) * up.to(tl.float32)).to(dtype)
        elif ACT is not None:
            out = activate(out, ACT)
        mask = (rows < M) & (cols < N)[None, :]
        tl.store(out_ptr + rows.to(tl.int64) * N + cols[None, :], out, mask=mask)


@triton.jit(do_not_specialize=["M", "split", "steps"])
def split_linear_kernel(
    x_ptr,  # (M, K)
    weight_ptr,  # (N, K)
    bias_ptr,  # (N,) or None
    res_ptr,  # (M, N)
    ls_ptr,  # (N,) or None
    parts_ptr,  # (split, M, N) in fp32
    counters_ptr,  # one int32 for each block, 0
    out_ptr,  # (M, N)
    M,
    N,
    K,
    split,
    steps,  # of BLOCK_K in a part
    stride_x,
    stride_w,
    stride_res,
    EVEN: tl.constexpr,  # whether BLOCK_K divides K
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    part, block = tl.program_id(0) % split, tl.program_id(0) // split
    blocks_n = tl.cdiv(N, BLOCK_N)
    first_n, first_k = block % blocks_n * BLOCK_N, part * steps * BLOCK_K
    end_k = min(first_k + steps * BLOCK_K, K)
    for k in range(first_k, end_k, BLOCK_K):
        ask_for_rows(weight_ptr, first_n, BLOCK_N, N, stride_w, k, BLOCK_K, K, PDL)
    wait_for_kernel_before(PDL)
    rows = block // blocks_n * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    cols = first_n + tl.arange(0, BLOCK_N).to(tl.int64)
    mask_m, mask_n = (rows < M)[:, None], (cols < N)[None, :]
    offs_k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(first_k, end_k, BLOCK_K):
        inside = k + offs_k < K
        x_mask, w_mask = mask_m if EVEN else mask_m & inside[None, :], mask_n if EVEN else mask_n & inside[:, None]
        x = tl.load(x_ptr + rows[:, None] * stride_x + (k + offs_k)[None, :], mask=x_mask, other=0.0)
        w = tl.load(weight_ptr + cols[None, :] * stride_w + (k + offs_k)[:, None], mask=w_mask, other=0.0)
        acc = tl.dot(x, w, acc)
    at, mask = rows[:, None] * N + cols[None, :], mask_m & mask_n
    tl.store(parts_ptr + (part * M * N + at), acc, mask=mask)
    tl.debug_barrier()  # every thread has written before one of them says so, and none reads before it has asked
    arrived = tl.atomic_add(counters_ptr + block, 1, sem="acq_rel")
    tl.debug_barrier()
    if arrived == split - 1:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for i in range(split):
            # .cg: not from L1, which may hold what lay there before
            total += tl.load(parts_ptr + (i * M * N + at), mask=mask, other=0.0, cache_modifier=".cg")
        if bias_ptr is not None:
            total += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
        if ls_ptr is not None:
            total *= tl.load(ls_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
        total += tl.load(res_ptr + rows[:, None] * stride_res + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)


def _norm_config(rows: int, columns: int, chunk: int, stages: int, warps: int = 8) -> KernelConfig:
    return config(warps, 1, BLOCK_M=rows, BLOCK_N=columns, BLOCK_D=chunk, STAGES=stages)


@configures("norm_linear_fwd")
def _norm_linear_configs(shape: str, bits: str, sm: int) -> list[KernelConfig]:
    """Compiled, not timed. Shape classes: "768r256", the width and the most rows; "g" for a gate.

    The normalised rows and two blocks of weights must fit the shared memory, which is 99 KiB on sm_89 and sm_120. 64
    rows at least take wgmma. Above 1280 columns, and with a gate above 768, all tiles that were tried spill.
    """
    width, _, rows = shape.removesuffix("g").partition("r")
    width, gated, large = int(width), shape.endswith("g"), sm in (90, 100)
    chunk = chunk_width(width)
    if bits == "32" or width > (768 if gated else 1280):
        return [NONE]
    if rows == "16":
        best = _norm_config(16, 8, chunk, 2, 8 if width > 1024 else 4)  # so that 1,000 classes make 125 programs
    elif width <= 512:
        best = _norm_config(64, 16 if gated else 32, chunk, 3 if large and not gated else 2)
    elif width <= 768:
        warps = 4 if gated and sm in (80, 89) else 8  # 8 spill there with Triton 3.6
        best = _norm_config(64 if sm == 90 else 32, 16 if gated else 32, chunk, 2, warps)
    elif large:
        best = _norm_config(32, 32, chunk, 2)
    else:
        best = _norm_config(32, 16, chunk, 2 if width <= 1024 else 1)
    return [best]


@configures("split_linear_fwd")
def _split_configs(shape: str, bits: str, sm: int) -> list[KernelConfig]:
    """Compiled, not timed. Shape classes: "3072x768r256", as of norm_linear."""
    if shape.endswith("r1024"):
        return [config(8, 3, BLOCK_M=128, BLOCK_N=64, BLOCK_K=64), config(8, 3, BLOCK_M=128, BLOCK_N=128, BLOCK_K=64)]
    return [config(4, 3, BLOCK_M=64, BLOCK_N=64, BLOCK_K=64), config(4, 2, BLOCK_M=64, BLOCK_N=64, BLOCK_K=128)]


def _rows_class(rows: int) -> str:
    return next(f"r{most}" for most in (16, 256, MOST_ROWS) if rows <= most)


def _norm_linear_config(x: Tensor, gated: bool) -> KernelConfig:
    rows, width = x.shape
    return tiles.lookup("norm_linear_fwd", x, f"{width}{_rows_class(rows)}{'g' * gated}")


def takes(x: Tensor, *weights: Tensor, gated: bool = False) -> bool:
    """Whether these kernels take the rows x (M, D) of a norm and the weights of the layers behind it.

    They do not where batch invariance forbids a choice by the number of rows.
    """
    if not 0 < len(x) <= MOST_ROWS or x.itemsize != 2 or batch_invariant():
        return False
    fits = all(w.dtype == x.dtype and w.shape[1] % 16 == 0 for w in weights)
    return fits and _norm_linear_config(x, gated).provider != "none"


def new_counters(x: Tensor) -> Tensor:
    """Counters for split_linear, which norm_linear sets to 0."""
    return torch.empty(COUNTERS, dtype=torch.int32, device=x.device)


def norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    up_weight: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    rms: bool = False,
    activation: str | None = None,
    counters: Tensor | None = None,
) -> Tensor:
    """act(norm(x) W^T + b), times norm(x) Wu^T + bu where there is up_weight.

    x (M, D), weights (N, D) -> (M, N) in the weights' dtype; norm_weight, norm_bias (D,) or None; rms: RMSNorm. The
    norm and the sums are computed in fp32, and rounded where layer_norm and linear round. counters: new_counters, which
    are set to 0.
    """
    (rows, width), columns, settings = x.shape, weight.shape[0], _norm_linear_config(x, up_weight is not None)
    blocks = cdiv(columns, settings["BLOCK_N"])
    # One program for each multiprocessor at most.
    row_blocks = cdiv(rows, settings["BLOCK_M"])
    groups = max(1, multiprocessors(x.device) // row_blocks)
    each = cdiv(blocks, groups)
    out = torch.empty((rows, columns), dtype=weight.dtype, device=x.device)
    pointers = dict(x_ptr=x, weight_ptr=weight, up_weight_ptr=up_weight, out_ptr=out, counters_ptr=counters)
    vectors = dict(norm_weight_ptr=norm_weight, norm_bias_ptr=norm_bias, bias_ptr=bias, up_bias_ptr=up_bias)
    pointers |= {name: contiguous_or_none(vector) for name, vector in vectors.items()}
    sizes = dict(M=rows, N=columns, columns=each * settings["BLOCK_N"], eps=eps, D=width, COUNTERS=COUNTERS)
    sizes |= dict(stride_x=x.stride(0), stride_w=weight.stride(0), stride_up=row_stride(up_weight))
    flags = dict(ALIGN=row_alignment(x, weight, up_weight), RMS=rms, ACT=activation)
    grid = (row_blocks * cdiv(blocks, each),)
    launch(norm_linear_kernel, grid, **pointers, **sizes, **flags, **settings.meta, **dependent_launch(x))
    return out


def split_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, layer_scale: Tensor | None, counters: Tensor
) -> Tensor:
    """residual + layer_scale * (x W^T + b), with the sum in parts.

    x (M, K), weight (N, K), residual (M, N) -> (M, N) in residual's dtype; bias, layer_scale (N,) or None. The kernel
    computes in fp32 and rounds once. counters: new_counters, all 0, which no other run shares.
    """
    (rows, k), columns = x.shape, weight.shape[0]
    settings = tiles.lookup("split_linear_fwd", x, f"{k}x{columns}{_rows_class(max(17, rows))}")
    blocks = cdiv(rows, settings["BLOCK_M"]) * cdiv(columns, settings["BLOCK_N"])
    if blocks > COUNTERS:
        raise ValueError(f"split_linear: {blocks} blocks are more than {COUNTERS} counters")
    all_steps = cdiv(k, settings["BLOCK_K"])
    steps = max(2, cdiv(all_steps, max(1, 2 * multiprocessors(x.device) // blocks)))
    split = cdiv(all_steps, steps)
    out = torch.empty((rows, columns), dtype=residual.dtype, device=x.device)
    parts = torch.empty((split, rows, columns), dtype=torch.float32, device=x.device)
    pointers = dict(x_ptr=x, weight_ptr=weight, bias_ptr=contiguous_or_none(bias), res_ptr=residual, parts_ptr=parts)
    pointers |= dict(ls_ptr=contiguous_or_none(layer_scale), counters_ptr=counters, out_ptr=out)
    sizes = dict(M=rows, N=columns, K=k, split=split, steps=steps, EVEN=k % settings["BLOCK_K"] == 0)
    sizes |= dict(stride_x=x.stride(0), stride_w=weight.stride(0), stride_res=residual.stride(0))
    launch(split_linear_kernel, (blocks * split,), **pointers, **sizes, **settings.meta, **dependent_launch(x))
    return out
