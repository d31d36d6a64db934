"""LayerNorm (Ba et al., 2016), RMSNorm (Zhang & Sennrich, 2019), and the residual add before them.

    z = residual + drop_path[b] * layer_scale * x        (M, D); plain LayerNorm: z = x
    y = (z - mean) * rstd * weight + bias                mean, rstd (M,) in fp32; RMSNorm: mean = 0, not written

A row is read once and stays in registers as D / BLOCK_D chunks, such as 768 = 3 x 256, where one warp holds a 16-bit
row and sums it by warp shuffles. The variance is the mean square of the centred row, so a large mean costs no digits.
The backward is in backward.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import tiles
from ..launch import cdiv, launch
from ..rows import (
    chunk_width,
    contiguous_or_none,
    layer_norm_class,
    load_rows,
    row_alignment,
    row_factor,
    row_mask,
    row_stride,
    store_chunk,
    times_chunk,
)

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
        y = times_chunk(z[i] * rstd, w, i)
        if b_ptr is not None:
            y += b[i].to(tl.float32)
        store_chunk(y_ptr, y, rows, M, i, D, BLOCK_D)
    if mean_ptr is not None:
        tl.store(mean_ptr + rows, mean, mask=rows < M)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)


def layer_norm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None = None,
    rms: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """x (M, D), last stride 1 -> y (M, D) in out_dtype (x's), mean (None for RMSNorm), rstd (M,) fp32."""
    y, _, mean, rstd = add_layer_norm_fwd(x, None, weight, bias, eps, None, None, 1, out_dtype, rms)
    return y, mean, rstd


def add_layer_norm_fwd(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    layer_scale: Tensor | None,
    drop_path: Tensor | None,
    rows_per_sample: int,
    out_dtype: torch.dtype | None = None,
    rms: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """(y, z, mean, rstd) of x, residual (M, D), last stride 1; z is None without one, mean with rms.

    y (M, D) in out_dtype (x's), z (M, D) in residual's dtype, mean and rstd (M,) in fp32.
    """
    M, D = x.shape
    config = tiles.lookup("layer_norm_fwd", x, layer_norm_class(D, residual is not None))
    y = torch.empty((M, D), dtype=out_dtype or x.dtype, device=x.device)
    z = None if residual is None else torch.empty((M, D), dtype=residual.dtype, device=x.device)
    mean = None if rms else torch.empty(M, dtype=torch.float32, device=x.device)
    rstd = torch.empty(M, dtype=torch.float32, device=x.device)
    launch(
        layer_norm_fwd_kernel,
        (cdiv(M, config["BLOCK_M"]),),
        x_ptr=x,
        res_ptr=residual,
        ls_ptr=contiguous_or_none(layer_scale),
        dp_ptr=contiguous_or_none(drop_path),
        w_ptr=contiguous_or_none(weight),
        b_ptr=contiguous_or_none(bias),
        y_ptr=y,
        z_ptr=z,
        mean_ptr=mean,
        rstd_ptr=rstd,
        M=M,
        rows_per_sample=rows_per_sample,
        stride_x=row_stride(x),
        stride_res=row_stride(residual),
        eps=eps,
        D=D,
        ALIGN=row_alignment(x, residual),
        BLOCK_D=chunk_width(D),
        **config.meta,
    )
    return y, z, mean, rstd
