"""LayerNorm and the residual add before it: backward, in one persistent pass over the rows.

With xhat = (z - mean) * rstd and g = dy * weight:

    dres = rstd * (g - mean_D(g) - xhat * mean_D(g * xhat)) + dz        (M, D); dz: the gradient that reaches z directly
    dx = drop_path[b] * layer_scale * dres
    dweight = sum_M(dy * xhat), dbias = sum_M(dy), dlayer_scale = sum_M(drop_path[b] * dres * x), bias_sum = sum_M(dx)

Every program adds up its rows' column sums in registers and writes them once to an fp32 workspace that `column_sums` adds in a fixed order:
the fused backward of Apex and of Triton's tutorial, without their locks and atomics. The next rows are on their way through shared memory
(STAGES) while these are computed.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import layer_norm_torch, tiles
from .launch import launch
from .rows import chunk_width, column_sums, load_rows, row_alignment, row_factor, row_programs, row_stride, shape_class, store_chunk, vector


@triton.jit
def _zeros(CHUNKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    chunks = ()
    for _ in tl.static_range(CHUNKS):
        chunks = chunks + (tl.zeros((BLOCK_M, BLOCK_D), tl.float32),)
    return chunks


@triton.jit
def _add(total, chunks, CHUNKS: tl.constexpr):
    result = ()
    for i in tl.static_range(CHUNKS):
        result = result + (total[i] + chunks[i],)
    return result


@triton.jit
def _store_sums(ws_ptr, total, D: tl.constexpr, BLOCK_D: tl.constexpr):
    # This program's row of the workspace: chunks (BLOCK_M, BLOCK_D) summed over their rows.
    for i in tl.static_range((D + BLOCK_D - 1) // BLOCK_D):
        offs_d = i * BLOCK_D + tl.arange(0, BLOCK_D)
        tl.store(ws_ptr + tl.program_id(0) * D + offs_d, tl.sum(total[i], 0), mask=offs_d < D)


@triton.jit
def layer_norm_bwd_kernel(
    dy_ptr,  # (M, D)
    z_ptr,  # (M, D)
    w_ptr,  # (D,) or None
    b_ptr,  # (D,) or None
    mean_ptr,  # (M,)
    rstd_ptr,  # (M,)
    dz_ptr,  # (M, D) or None
    branch_ptr,  # (M, D) or None
    ls_ptr,  # (D,) or None
    dp_ptr,  # (M / rows_per_sample,) or None
    dres_ptr,  # (M, D) or None
    dx_ptr,  # (M, D) or None
    y_ptr,  # (M, D) or None
    dw_ptr,  # (programs, D) or None
    db_ptr,  # (programs, D) or None
    dls_ptr,  # (programs, D) or None
    sum_ptr,  # (programs, D) or None
    M,
    rows_per_sample,
    stride_dy,
    stride_z,
    stride_dz,
    stride_branch,
    D: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    CHUNKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    DRES: tl.constexpr = dres_ptr is not None or dx_ptr is not None or dls_ptr is not None or sum_ptr is not None
    dw = _zeros(CHUNKS, BLOCK_M, BLOCK_D)
    db = _zeros(CHUNKS, BLOCK_M, BLOCK_D)
    dls = _zeros(CHUNKS, BLOCK_M, BLOCK_D)
    sums = _zeros(CHUNKS, BLOCK_M, BLOCK_D)
    block_rows = tl.arange(0, BLOCK_M)[:, None]
    if w_ptr is not None:
        w = load_rows(w_ptr, block_rows, BLOCK_M, 0, D, ALIGN, BLOCK_D)
    if y_ptr is not None and b_ptr is not None:
        b = load_rows(b_ptr, block_rows, BLOCK_M, 0, D, ALIGN, BLOCK_D)
    if ls_ptr is not None:
        ls = load_rows(ls_ptr, block_rows, BLOCK_M, 0, D, ALIGN, BLOCK_D)

    for start in tl.range(tl.program_id(0) * BLOCK_M, M, tl.num_programs(0) * BLOCK_M, num_stages=STAGES):
        rows = start + block_rows
        dy = load_rows(dy_ptr, rows, M, stride_dy, D, ALIGN, BLOCK_D)
        z = load_rows(z_ptr, rows, M, stride_z, D, ALIGN, BLOCK_D)
        if dz_ptr is not None:
            dz = load_rows(dz_ptr, rows, M, stride_dz, D, ALIGN, BLOCK_D)
        if branch_ptr is not None:
            branch = load_rows(branch_ptr, rows, M, stride_branch, D, ALIGN, BLOCK_D)
        if dp_ptr is not None:
            dp = row_factor(dp_ptr, rows, M, rows_per_sample)
        mean = tl.load(mean_ptr + rows, mask=rows < M, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)

        # Beyond D and M dy is zero, and so is everything that is summed.
        g_total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        gx_total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        dw_more, db_more = (), ()
        for i in tl.static_range(CHUNKS):
            dy_i = dy[i].to(tl.float32)
            xhat = (z[i].to(tl.float32) - mean) * rstd
            dw_more = dw_more + (dy_i * xhat,)
            db_more = db_more + (dy_i,)
            g = dy_i
            y = xhat
            if w_ptr is not None:
                g = dy_i * w[i].to(tl.float32)
                y = xhat * w[i].to(tl.float32)
            g_total += g
            gx_total += g * xhat
            if y_ptr is not None:
                if b_ptr is not None:
                    y += b[i].to(tl.float32)
                store_chunk(y_ptr, y, rows, M, i, D, BLOCK_D)
        if dw_ptr is not None:
            dw = _add(dw, dw_more, CHUNKS)
        if db_ptr is not None:
            db = _add(db, db_more, CHUNKS)

        if DRES:
            g_mean = tl.sum(g_total, 1, keep_dims=True) / D
            gx_mean = tl.sum(gx_total, 1, keep_dims=True) / D
            dls_more, sum_more = (), ()
            for i in tl.static_range(CHUNKS):
                g = dy[i].to(tl.float32)
                if w_ptr is not None:
                    g *= w[i].to(tl.float32)
                xhat = (z[i].to(tl.float32) - mean) * rstd
                dres = (g - g_mean - xhat * gx_mean) * rstd
                if dz_ptr is not None:
                    dres += dz[i].to(tl.float32)
                if dres_ptr is not None:
                    store_chunk(dres_ptr, dres, rows, M, i, D, BLOCK_D)
                if dp_ptr is not None:
                    dres *= dp
                if branch_ptr is not None:
                    dls_more = dls_more + (dres * branch[i].to(tl.float32),)
                if ls_ptr is not None:
                    dres *= ls[i].to(tl.float32)
                if dx_ptr is not None:
                    store_chunk(dx_ptr, dres, rows, M, i, D, BLOCK_D)
                sum_more = sum_more + (dres,)
            if dls_ptr is not None:
                dls = _add(dls, dls_more, CHUNKS)
            if sum_ptr is not None:
                sums = _add(sums, sum_more, CHUNKS)

    if dw_ptr is not None:
        _store_sums(dw_ptr, dw, D, BLOCK_D)
    if db_ptr is not None:
        _store_sums(db_ptr, db, D, BLOCK_D)
    if dls_ptr is not None:
        _store_sums(dls_ptr, dls, D, BLOCK_D)
    if sum_ptr is not None:
        _store_sums(sum_ptr, sums, D, BLOCK_D)


class Grads(NamedTuple):
    """What `layer_norm_bwd` returns; None where it was not asked for."""

    dres: Tensor | None
    dx: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None
    dlayer_scale: Tensor | None
    bias_sum: Tensor | None
    y: Tensor | None


def layer_norm_bwd(
    dy: Tensor,
    z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
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
    want_bias_sum: bool = False,
    want_y: bool = False,
    sum_dtype: torch.dtype = torch.float32,
) -> Grads:
    """One pass over dy, z (and dz, branch), all (M, D) with last stride 1.

    dres in z's dtype; dx in dy's, where layer_scale or drop_path is given (it equals dres otherwise); dweight, dbias and dlayer_scale in the dtype of
    their parameter; bias_sum, the column sum of dx (dres), in sum_dtype; y = LN(z) in dy's dtype. branch: the forward's x, for dlayer_scale.
    """
    M, D = z.shape
    tile = tiles.lookup("layer_norm_bwd", dy, shape_class(D, residual=dz is not None, layer_scale=want_layer_scale))
    if tile.provider == "torch":
        given = dy, z, weight, bias, mean, rstd, dz, branch, layer_scale, drop_path, rows_per_sample
        wanted = want_dx, want_dparams, want_layer_scale, want_bias_sum, want_y
        return Grads(*layer_norm_torch.backward(*given, *wanted, sum_dtype))
    programs = row_programs(z.device, tile["PER_SM"], triton.cdiv(M, tile["BLOCK_M"]))

    def matrix(wanted: bool, dtype: torch.dtype) -> Tensor | None:
        return torch.empty((M, D), dtype=dtype, device=z.device) if wanted else None

    def sums(wanted: bool, dtype: torch.dtype | None) -> tuple[Tensor | None, Tensor | None]:
        if not wanted:
            return None, None
        return torch.empty((programs, D), dtype=torch.float32, device=z.device), torch.empty(D, dtype=dtype, device=z.device)

    scaled = layer_scale is not None or drop_path is not None
    dres = matrix(want_dx, z.dtype)
    dx = matrix(want_dx and scaled, dy.dtype)
    y = matrix(want_y, dy.dtype)
    dw_ws, dweight = sums(want_dparams and weight is not None, weight.dtype if weight is not None else None)
    db_ws, dbias = sums(want_dparams and bias is not None, bias.dtype if bias is not None else None)
    dls_ws, dlayer_scale = sums(want_layer_scale, layer_scale.dtype if layer_scale is not None else None)
    sum_ws, bias_sum = sums(want_bias_sum, sum_dtype)
    branch = branch if want_layer_scale else None
    launch(
        layer_norm_bwd_kernel,
        (programs,),
        dy_ptr=dy,
        z_ptr=z,
        w_ptr=vector(weight),
        b_ptr=vector(bias) if want_y else None,
        mean_ptr=mean,
        rstd_ptr=rstd,
        dz_ptr=dz,
        branch_ptr=branch,
        ls_ptr=vector(layer_scale),
        dp_ptr=vector(drop_path),
        dres_ptr=dres,
        dx_ptr=dx,
        y_ptr=y,
        dw_ptr=dw_ws,
        db_ptr=db_ws,
        dls_ptr=dls_ws,
        sum_ptr=sum_ws,
        M=M,
        rows_per_sample=rows_per_sample,
        stride_dy=row_stride(dy),
        stride_z=row_stride(z),
        stride_dz=row_stride(dz),
        stride_branch=row_stride(branch),
        D=D,
        ALIGN=row_alignment(dy, z, dz, branch),
        BLOCK_D=chunk_width(D),
        **{name: value for name, value in tile.meta.items() if name != "PER_SM"},
    )
    column_sums([(dw_ws, dweight), (db_ws, dbias), (dls_ws, dlayer_scale), (sum_ws, bias_sum)], programs, D, z)
    return Grads(dres, dx, dweight, dbias, dlayer_scale, bias_sum, y)
