"""LayerNorm (Ba et al., 2016), RMSNorm (Zhang & Sennrich, 2019), and the residual add before them.

    z = residual + drop_path[b] * layer_scale * x        (M, D); plain LayerNorm: z = x
    y = (z - mean) * rstd * weight + bias                mean, rstd (M,) in fp32; RMSNorm: mean = 0, not written

A row is read once and stays in registers as D / BLOCK_D chunks, such as 768 = 3 x 256, where one warp holds a 16-bit
row and sums it by warp shuffles. The variance is the mean square of the centred row, so a large mean costs no digits.

Backward is one persistent pass. With xhat = (z - mean) * rstd and g = dy * weight:

    dres = rstd * (g - mean_D(g) - xhat * mean_D(g * xhat)) + dz        (M, D); dz: the gradient that reaches z directly
    dx = drop_path[b] * layer_scale * dres
    dweight = sum_M(dy * xhat), dbias = sum_M(dy), dlayer_scale = sum_M(drop_path[b] * dres * x), dz_sum = sum_M(dz)

RMSNorm has neither mean nor mean_D(g). Every program adds up its rows' column sums in registers and writes them once to
an fp32 workspace, which `column_sums` adds in a fixed order. It is the fused backward of Apex and of Triton's tutorial,
without their locks and atomics. While some rows are computed, the next are loaded into shared memory (STAGES).
"""

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tiles
from .launch import cdiv, launch
from .rows import (
    chunk_width,
    column_sums,
    contiguous_or_none,
    load_rows,
    plus_chunk,
    row_alignment,
    row_factor,
    row_mask,
    row_programs,
    row_stride,
    store_chunk,
    times_chunk,
)
from .tiles import KernelConfig, config, configures, first

MAX_WIDTH = 8192


@triton.jit(do_not_specialize=["M", "rows_per_sample"])
def layer_norm_fwd_kernel(
    x_ptr,  # (M, D)
    res_ptr,  # (M, D) or None
    ls_ptr,  # (D,) or None
    dp_ptr,  # (M / rows_per_sample,) or None
    w_ptr,  # (D,) or None
    b_ptr,  # (D,) or None
    y_ptr,  # (M, D)
    z_ptr,  # (M, D), None without res_ptr
    mean_ptr,  # (M,), None for RMSNorm
    rstd_ptr,  # (M,)
    M,
    rows_per_sample,
    stride_x,
    stride_res,
    eps,
    D: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    CHUNKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    x = load_rows(x_ptr, rows, M, stride_x, D, ALIGN, BLOCK_D)
    res = load_rows(res_ptr, rows, M, stride_res, D, ALIGN, BLOCK_D)
    ls = load_rows(ls_ptr, rows, M, 0, D, ALIGN, BLOCK_D)
    if dp_ptr is not None:
        dp = row_factor(dp_ptr, rows, M, rows_per_sample)
    w = load_rows(w_ptr, rows, M, 0, D, ALIGN, BLOCK_D)
    b = load_rows(b_ptr, rows, M, 0, D, ALIGN, BLOCK_D)

    z = ()
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for i in tl.static_range(CHUNKS):
        value = x[i].to(tl.float32)
        if res_ptr is not None:
            value = times_chunk(value, ls, i)
            if dp_ptr is not None:
                value *= dp
            # Normalise what is stored: backward reads the rounded z.
            rounded = (res[i].to(tl.float32) + value).to(z_ptr.dtype.element_ty)
            store_chunk(z_ptr, rounded, rows, M, i, D, BLOCK_D)
            value = rounded.to(tl.float32)
        total += value if mean_ptr is not None else value * value
        z = z + (value,)

    if mean_ptr is not None:
        mean = tl.sum(total, 1, keep_dims=True) / D
        centred = ()
        total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for i in tl.static_range(CHUNKS):
            value = tl.where(row_mask(rows, M, i, D, BLOCK_D), z[i] - mean, 0.0)
            total += value * value
            centred = centred + (value,)
        z = centred
    rstd = tl.rsqrt(tl.sum(total, 1, keep_dims=True) / D + eps)

    for i in tl.static_range(CHUNKS):
        y = plus_chunk(times_chunk(z[i] * rstd, w, i), b, i)
        store_chunk(y_ptr, y, rows, M, i, D, BLOCK_D)
    if mean_ptr is not None:
        tl.store(mean_ptr + rows, mean, mask=rows < M)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)


@triton.jit
def _zeros(CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    chunks = ()
    for _ in tl.static_range(CHUNKS):
        chunks = chunks + (tl.zeros((BLOCK_M, BLOCK_D), tl.float32),)
    return chunks


@triton.jit
def _add(ws_ptr, total, chunks, CHUNKS: tl.constexpr):
    """total + chunks; total itself if ws_ptr, to which the sum would be written, is None."""
    if ws_ptr is None:
        result = total
    else:
        result = ()
        for i in tl.static_range(CHUNKS):
            result = result + (total[i] + chunks[i].to(tl.float32),)
    return result


@triton.jit
def _standardised(z, mean, rstd):
    """xhat = (z - mean) * rstd in fp32, or z * rstd if mean is None (RMSNorm)."""
    return z.to(tl.float32) * rstd if mean is None else (z.to(tl.float32) - mean) * rstd


@triton.jit
def _store_sums(ws_ptr, total, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes this program's row of the workspace: chunks (BLOCK_M, BLOCK_D) summed over their rows."""
    if ws_ptr is not None:
        for i in tl.static_range((D + BLOCK_D - 1) // BLOCK_D):
            offs_d = i * BLOCK_D + tl.arange(0, BLOCK_D)
            tl.store(ws_ptr + tl.program_id(0) * D + offs_d, tl.sum(total[i], 0), mask=offs_d < D)


@triton.jit(do_not_specialize=["M", "rows_per_sample"])
def layer_norm_bwd_kernel(
    in_ptrs,  # dy, z, dz, branch: (M, D); dz and branch may be None
    strides,  # of their rows
    w_ptr,  # (D,) or None
    b_ptr,  # (D,) or None
    mean_ptr,  # (M,), None for RMSNorm
    rstd_ptr,  # (M,)
    ls_ptr,  # (D,) or None
    dp_ptr,  # (M / rows_per_sample,) or None
    out_ptrs,  # dres, dx, y: (M, D) or None
    ws_ptrs,  # dweight, dbias, dlayer_scale, dz_sum: (programs, D) or None
    M,
    rows_per_sample,
    D: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    dy_ptr, z_ptr, dz_ptr, branch_ptr = in_ptrs
    dres_ptr, dx_ptr, y_ptr = out_ptrs
    dw_ptr, db_ptr, dls_ptr, sum_ptr = ws_ptrs
    CHUNKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    DRES: tl.constexpr = dres_ptr is not None or dx_ptr is not None or dls_ptr is not None
    zeros = _zeros(CHUNKS, BLOCK_M, BLOCK_D)
    dw, db, dls, dz_sum = zeros, zeros, zeros, zeros
    block_rows = tl.arange(0, BLOCK_M)[:, None]
    w = load_rows(w_ptr, block_rows, BLOCK_M, 0, D, ALIGN, BLOCK_D)
    b = load_rows(b_ptr, block_rows, BLOCK_M, 0, D, ALIGN, BLOCK_D)
    ls = load_rows(ls_ptr, block_rows, BLOCK_M, 0, D, ALIGN, BLOCK_D)

    for start in tl.range(tl.program_id(0) * BLOCK_M, M, tl.num_programs(0) * BLOCK_M, num_stages=STAGES):
        rows = start + block_rows
        dy = load_rows(dy_ptr, rows, M, strides[0], D, ALIGN, BLOCK_D)
        z = load_rows(z_ptr, rows, M, strides[1], D, ALIGN, BLOCK_D)
        dz = load_rows(dz_ptr, rows, M, strides[2], D, ALIGN, BLOCK_D)
        branch = load_rows(branch_ptr, rows, M, strides[3], D, ALIGN, BLOCK_D)
        if dp_ptr is not None:
            dp = row_factor(dp_ptr, rows, M, rows_per_sample)
        mean = None if mean_ptr is None else tl.load(mean_ptr + rows, mask=rows < M, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)

        # Beyond D and M dy and dz are zero, and so is everything that is summed.
        g_total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        gx_total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        dw_more = ()
        for i in tl.static_range(CHUNKS):
            g = dy[i].to(tl.float32)
            xhat = _standardised(z[i], mean, rstd)
            dw_more = dw_more + (g * xhat,)
            g = times_chunk(g, w, i)
            g_total += g
            gx_total += g * xhat
            y = plus_chunk(times_chunk(xhat, w, i), b, i)
            store_chunk(y_ptr, y, rows, M, i, D, BLOCK_D)
        dw = _add(dw_ptr, dw, dw_more, CHUNKS)
        db = _add(db_ptr, db, dy, CHUNKS)
        dz_sum = _add(sum_ptr, dz_sum, dz, CHUNKS)

        if DRES:
            g_mean = 0.0 if mean_ptr is None else tl.sum(g_total, 1, keep_dims=True) / D
            gx_mean = tl.sum(gx_total, 1, keep_dims=True) / D
            dls_more = ()
            for i in tl.static_range(CHUNKS):
                g = times_chunk(dy[i].to(tl.float32), w, i)
                xhat = _standardised(z[i], mean, rstd)
                dres = plus_chunk((g - g_mean - xhat * gx_mean) * rstd, dz, i)
                store_chunk(dres_ptr, dres, rows, M, i, D, BLOCK_D)
                if dp_ptr is not None:
                    dres *= dp
                dls_more = dls_more + (times_chunk(dres, branch, i),)
                store_chunk(dx_ptr, times_chunk(dres, ls, i), rows, M, i, D, BLOCK_D)
            dls = _add(dls_ptr, dls, dls_more, CHUNKS)

    _store_sums(dw_ptr, dw, D, BLOCK_D)
    _store_sums(db_ptr, db, D, BLOCK_D)
    _store_sums(dls_ptr, dls, D, BLOCK_D)
    _store_sums(sum_ptr, dz_sum, D, BLOCK_D)


@configures("layer_norm_fwd")
def _forward_configs(shape: str, bits: str, sm: int) -> list[KernelConfig]:
    block = int(re.search(r"x(\d+)", shape)[1])
    return [config(8 if block == 2048 else 4, 1, BLOCK_M=min(16, max(1, 1024 // block)))]


@configures("layer_norm_bwd")
def _backward_configs(shape: str, bits: str, sm: int) -> list[KernelConfig]:
    """A program takes several rows at a time; PER_SM programs fit with three column sums in registers.

    Two warps share a row of 768 or 1024 numbers. Loads of dy, z and dz in flight take (STAGES - 1) * BLOCK_M * D * 6
    bytes * PER_SM = 81, 108 and 90 KiB of a multiprocessor's shared memory at D = 768, 1024 and 1280; with 99 KiB, wide
    rows get a stage less. Every program writes a row of each workspace, so many small programs would write more.
    """
    chunks, block = map(int, re.match(r"(\d)x(\d+)", shape).groups())
    fp32, tight = bits == "32", sm in (89, 120) and (block == 512 or shape.startswith("4x256"))
    warps, stages, per_sm, registers, most_rows = first(
        (block == 2048, (8, 1 if fp32 else 2, 1, 0, 1)),
        (block == 1024 and chunks == 3 and not fp32, (8, 3, 2, 128, 1)),
        (block == 1024, (8, 2, 1, 0, 1)),
        (fp32, (4, 2, 2, 0, 8)),
        (chunks == 5, (4, 3 if block == 512 else 4, 2, 0, 2)),
        (True, (4, 3 if tight else 4, 3, 168, 16)),
    )
    rows = min(most_rows, max(1, 512 // block))
    return [config(warps, 1, maxnreg=registers, BLOCK_M=rows, STAGES=stages, PER_SM=per_sm)]


@functools.cache
def _shape_class(width: int, residual: bool = False, layer_scale: bool = False) -> str:
    """The shape class "3x256", chunks x BLOCK_D; "a" follows where a residual or its gradient is added.

    "s" follows where backward sums the gradient of a layer scale.
    """
    return f"{cdiv(width, chunk_width(width))}x{chunk_width(width)}" + "a" * residual + "s" * layer_scale


def layer_norm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    residual: Tensor | None = None,
    layer_scale: Tensor | None = None,
    drop_path: Tensor | None = None,
    rows_per_sample: int = 1,
    out_dtype: torch.dtype | None = None,
    rms: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """(y, z, mean, rstd) of x and residual (M, D) with last stride 1.

    y (M, D) in out_dtype (x's); z (M, D) in residual's dtype, None without one; mean (None if rms), rstd (M,) in fp32.
    """
    M, D = x.shape
    config = tiles.lookup("layer_norm_fwd", x, _shape_class(D, residual is not None))
    y = torch.empty((M, D), dtype=out_dtype or x.dtype, device=x.device)
    z = None if residual is None else torch.empty((M, D), dtype=residual.dtype, device=x.device)
    mean = None if rms else torch.empty(M, dtype=torch.float32, device=x.device)
    rstd = torch.empty(M, dtype=torch.float32, device=x.device)
    vectors = dict(ls_ptr=layer_scale, dp_ptr=drop_path, w_ptr=weight, b_ptr=bias)
    pointers = {name: contiguous_or_none(t) for name, t in vectors.items()}
    pointers |= dict(x_ptr=x, res_ptr=residual, y_ptr=y, z_ptr=z, mean_ptr=mean, rstd_ptr=rstd)
    sizes = dict(M=M, rows_per_sample=rows_per_sample, stride_x=row_stride(x), stride_res=row_stride(residual))
    flags = dict(D=D, ALIGN=row_alignment(x, residual), BLOCK_D=chunk_width(D), **config.meta)
    launch(layer_norm_fwd_kernel, (cdiv(M, config["BLOCK_M"]),), **pointers, **sizes, eps=eps, **flags)
    return y, z, mean, rstd


class Grads(NamedTuple):
    """The gradients, y and sums that `layer_norm_bwd` returns; None for those that are not wanted."""

    dres: Tensor | None
    dx: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None
    dlayer_scale: Tensor | None
    dz_sum: Tensor | None
    y: Tensor | None
    more_sums: tuple[Tensor | None, ...] = ()


def layer_norm_bwd(
    dy: Tensor,
    z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    *,
    dz: Tensor | None = None,
    branch: Tensor | None = None,
    layer_scale: Tensor | None = None,
    drop_path: Tensor | None = None,
    rows_per_sample: int = 1,
    want_dx: bool = True,
    want_dparams: bool = True,
    want_layer_scale: bool = False,
    want_dz_sum: bool = False,
    want_y: bool = False,
    more_sums: Sequence[Tensor | None] = (),
    more_dtype: torch.dtype = torch.float32,
) -> Grads:
    """The gradients, in one pass over dy, z, dz and branch, which are (M, D) with last stride 1.

    dres has z's dtype. dx has dy's dtype, and is None without layer_scale and drop_path, where it would equal dres.
    dweight, dbias and dlayer_scale have the dtype of their parameter. dz_sum, the column sum of dz, is in fp32. y =
    LN(z) has dy's dtype. branch: the forward's x, for dlayer_scale. mean: None for RMSNorm. more_sums: up to two fp32
    workspaces (programs, F) of other kernels; the launch that adds up this one's adds up those too, into more_dtype.
    """
    M, D = z.shape
    config = tiles.lookup("layer_norm_bwd", dy, _shape_class(D, dz is not None, want_layer_scale))
    flags = dict(config.meta)
    programs = row_programs(z.device, flags.pop("PER_SM"), cdiv(M, flags["BLOCK_M"]))

    scaled = layer_scale is not None or drop_path is not None
    dres = z.new_empty(M, D) if want_dx else None
    dx, y = (dy.new_empty(M, D) if wanted else None for wanted in (want_dx and scaled, want_y))
    summed = weight if want_dparams else None, bias if want_dparams else None, layer_scale if want_layer_scale else None
    dtypes = [*(None if t is None else t.dtype for t in summed), torch.float32 if want_dz_sum else None]
    workspaces = tuple(None if t is None else z.new_empty(programs, D, dtype=torch.float32) for t in dtypes)
    inputs = dy, z, dz, branch if want_layer_scale else None
    vectors = dict(w_ptr=weight, b_ptr=bias if want_y else None, ls_ptr=layer_scale, dp_ptr=drop_path)
    pointers = {name: contiguous_or_none(t) for name, t in vectors.items()}
    pointers |= dict(in_ptrs=inputs, mean_ptr=mean, rstd_ptr=rstd, out_ptrs=(dres, dx, y), ws_ptrs=workspaces)
    sizes = dict(strides=tuple(map(row_stride, inputs)), M=M, rows_per_sample=rows_per_sample)
    flags |= dict(D=D, ALIGN=row_alignment(*inputs), BLOCK_D=chunk_width(D))
    launch(layer_norm_bwd_kernel, (programs,), **pointers, **sizes, **flags)
    sums = column_sums(z, (*workspaces, *more_sums), dtypes + [more_dtype] * len(more_sums))
    return Grads(dres, dx, *sums[:4], y, tuple(sums[4:]))
