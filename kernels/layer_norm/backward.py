"""LayerNorm, RMSNorm, and the residual add before them: backward, in one persistent pass.

With xhat = (z - mean) * rstd and g = dy * weight:

    dres = rstd * (g - mean_D(g) - xhat * mean_D(g * xhat)) + dz        (M, D); dz: the gradient that reaches z directly
    dx = drop_path[b] * layer_scale * dres
    dweight = sum_M(dy * xhat), dbias = sum_M(dy), dlayer_scale = sum_M(drop_path[b] * dres * x), dz_sum = sum_M(dz)

RMSNorm has neither mean nor mean_D(g). Every program adds up its rows' column sums in registers and writes them once to
an fp32 workspace, which `column_sums` adds in a fixed order. It is the fused backward of Apex and of Triton's tutorial,
without their locks and atomics. While some rows are computed, the next are loaded into shared memory (STAGES).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import tiles
from ..launch import cdiv, launch
from ..rows import (
    chunk_width,
    column_sums,
    contiguous_or_none,
    layer_norm_class,
    load_rows,
    row_alignment,
    row_factor,
    row_programs,
    row_stride,
    store_chunk,
    times_chunk,
)


@triton.jit
def _zeros(CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    chunks = ()
    for _ in tl.static_range(CHUNKS):
        chunks = chunks + (tl.zeros((BLOCK_M, BLOCK_D), tl.float32),)
    return chunks


@triton.jit
def _add(ws_ptr, total, chunks, CHUNKS: tl.constexpr):
    """total + chunks, for sums that are written to ws_ptr; total where it is None."""
    if ws_ptr is None:
        result = total
    else:
        result = ()
        for i in tl.static_range(CHUNKS):
            result = result + (total[i] + chunks[i].to(tl.float32),)
    return result


@triton.jit
def _standardised(z, mean, rstd):
    """xhat = (z - mean) * rstd, or z * rstd (RMSNorm) where mean is None."""
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
    in_ptrs,  # dy, z, dz, branch: (M, D), the last two or None
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
    dw = _zeros(CHUNKS, BLOCK_M, BLOCK_D)
    db = _zeros(CHUNKS, BLOCK_M, BLOCK_D)
    dls = _zeros(CHUNKS, BLOCK_M, BLOCK_D)
    dz_sum = _zeros(CHUNKS, BLOCK_M, BLOCK_D)
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
            y = times_chunk(xhat, w, i)
            g_total += g
            gx_total += g * xhat
            if b_ptr is not None:
                y += b[i].to(tl.float32)
            store_chunk(y_ptr, y, rows, M, i, D, BLOCK_D)
        dw = _add(dw_ptr, dw, dw_more, CHUNKS)
        db = _add(db_ptr, db, dy, CHUNKS)
        dz_sum = _add(sum_ptr, dz_sum, dz, CHUNKS)

        if DRES:
            if mean_ptr is not None:
                g_mean = tl.sum(g_total, 1, keep_dims=True) / D
            gx_mean = tl.sum(gx_total, 1, keep_dims=True) / D
            dls_more = ()
            for i in tl.static_range(CHUNKS):
                g = times_chunk(dy[i].to(tl.float32), w, i)
                xhat = _standardised(z[i], mean, rstd)
                dres = (g - g_mean - xhat * gx_mean) * rstd if mean_ptr is not None else (g - xhat * gx_mean) * rstd
                if dz_ptr is not None:
                    dres += dz[i].to(tl.float32)
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


class Grads(NamedTuple):
    """Gradients of `layer_norm_bwd`, and y; None where not asked for."""

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
    """One pass over dy, z (and dz, branch), all (M, D) with last stride 1.

    dres has z's dtype. dx has dy's dtype, and is None without layer_scale and drop_path, where it would equal dres.
    dweight, dbias and dlayer_scale have the dtype of their parameter. dz_sum, the column sum of dz, is in fp32. y =
    LN(z) has dy's dtype. branch: the forward's x, for dlayer_scale. mean: None for RMSNorm. more_sums: up to two fp32
    workspaces (programs, F) of other kernels; the launch that adds up this one's adds up those too, into more_dtype.
    """
    M, D = z.shape
    config = tiles.lookup("layer_norm_bwd", dy, layer_norm_class(D, dz is not None, want_layer_scale))
    flags = dict(config.meta)
    programs = row_programs(z.device, flags.pop("PER_SM"), cdiv(M, flags["BLOCK_M"]))

    scaled = layer_scale is not None or drop_path is not None
    dres = z.new_empty(M, D) if want_dx else None
    dx, y = (dy.new_empty(M, D) if wanted else None for wanted in (want_dx and scaled, want_y))
    summed = weight if want_dparams else None, bias if want_dparams else None, layer_scale if want_layer_scale else None
    dtypes = [*(None if t is None else t.dtype for t in summed), torch.float32 if want_dz_sum else None]
    workspaces = tuple(None if t is None else z.new_empty(programs, D, dtype=torch.float32) for t in dtypes)
    inputs = dy, z, dz, branch if want_layer_scale else None
    launch(
        layer_norm_bwd_kernel,
        (programs,),
        in_ptrs=inputs,
        strides=tuple(map(row_stride, inputs)),
        w_ptr=contiguous_or_none(weight),
        b_ptr=contiguous_or_none(bias) if want_y else None,
        mean_ptr=mean,
        rstd_ptr=rstd,
        ls_ptr=contiguous_or_none(layer_scale),
        dp_ptr=contiguous_or_none(drop_path),
        out_ptrs=(dres, dx, y),
        ws_ptrs=workspaces,
        M=M,
        rows_per_sample=rows_per_sample,
        D=D,
        ALIGN=row_alignment(*inputs),
        BLOCK_D=chunk_width(D),
        **flags,
    )
    sums = column_sums(z, (*workspaces, *more_sums), dtypes + [more_dtype] * len(more_sums))
    return Grads(dres, dx, *sums[:4], y, tuple(sums[4:]))
