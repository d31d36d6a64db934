"""Linear layers: the product of product.py and what their epilogues add.

linear            out = x W^T + b                                        x (M, K), W (N, K), b (N,) -> (M, N)
linear_residual   out = res + drop_path[row // rows_per_sample] * layer_scale * (x W^T + b)
input_grad        dx = g W                                               g (M, N), W (N, K) -> (M, K)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from . import cublaslt, tiles
from .launch import launch
from .product import column_parts, load_columns, product, row_product, shape_class, tile_offsets
from .rows import vector


@triton.jit(do_not_specialize=["M"])
def linear_kernel(
    x_ptr,  # (M, K), or its descriptor
    w_ptr,  # (K, N), or its descriptor or its transpose's
    bias_ptr,  # (N,) or None
    out_ptr,  # (M, N)
    M,
    N,
    K,
    stride_xm,
    w_strides,  # of K, N
    stride_om,
    LOADS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SUBTILES: tl.constexpr,
):
    _, first_m, first_n = tile_offsets(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    first, sizes, strides = (first_m, first_n, 0), (M, N, K), ((stride_xm, 1), w_strides)
    acc = product(x_ptr, w_ptr, first, sizes, strides, LOADS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)
    offs_m = first_m + tl.arange(0, BLOCK_M).to(tl.int64)
    parts = column_parts(acc, SUBTILES)
    for i in tl.static_range(SUBTILES):
        cols = first_n + i * (BLOCK_N // SUBTILES) + tl.arange(0, BLOCK_N // SUBTILES)
        mask = (offs_m[:, None] < M) & (cols[None, :] < N)
        out = parts[i]
        if bias_ptr is not None:
            out += load_columns(bias_ptr, cols, N)
        tl.store(out_ptr + (offs_m[:, None] * stride_om + cols[None, :]), out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def linear_residual_kernel(
    x_ptr,  # (M, K), or its descriptor
    w_ptr,  # (N, K), or its descriptor
    bias_ptr,  # (N,) or None
    res_ptr,  # (M, N)
    ls_ptr,  # (N,) or None
    dp_ptr,  # (M / rows_per_sample,) or None
    out_ptr,  # (M, N)
    M,
    N,
    K,
    rows_per_sample,
    stride_xm,
    stride_wn,
    stride_rm,
    stride_om,
    LOADS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SUBTILES: tl.constexpr,
):
    _, first_m, first_n = tile_offsets(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    first, sizes, strides = (first_m, first_n, 0), (M, N, K), ((stride_xm, 1), (1, stride_wn))
    acc = product(x_ptr, w_ptr, first, sizes, strides, LOADS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)
    offs_m = first_m + tl.arange(0, BLOCK_M).to(tl.int64)
    parts = column_parts(acc, SUBTILES)
    for i in tl.static_range(SUBTILES):
        cols = first_n + i * (BLOCK_N // SUBTILES) + tl.arange(0, BLOCK_N // SUBTILES)
        mask = (offs_m[:, None] < M) & (cols[None, :] < N)
        out = parts[i]
        if bias_ptr is not None:
            out += load_columns(bias_ptr, cols, N)
        if ls_ptr is not None:
            out *= load_columns(ls_ptr, cols, N)
        if dp_ptr is not None:
            out *= tl.load(dp_ptr + offs_m // rows_per_sample, mask=offs_m < M, other=0.0).to(tl.float32)[:, None]
        out += tl.load(res_ptr + (offs_m[:, None] * stride_rm + cols[None, :]), mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + (offs_m[:, None] * stride_om + cols[None, :]), out.to(out_ptr.dtype.element_ty), mask=mask)


def _launch_linear(x: Tensor, weight: Tensor, bias: Tensor | None, tile: tiles.Tile, transposed: bool) -> Tensor:
    """x (M, K) times weight (K, N), or times the transpose of weight (N, K); + bias."""
    (m, k), n = x.shape, weight.shape[0 if transposed else 1]
    x_ptr, w_ptr, grid, flags = row_product(x, weight, tile, "nt" if transposed else "nn")
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    launch(
        linear_kernel,
        grid,
        x_ptr=x_ptr,
        w_ptr=w_ptr,
        bias_ptr=vector(bias),
        out_ptr=out,
        M=m,
        N=n,
        K=k,
        stride_xm=x.stride(0),
        w_strides=weight.stride()[::-1] if transposed else weight.stride(),
        stride_om=n,
        **flags,
    )
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: x (M, K), weight (N, K) -> (M, N) in x's dtype."""
    tile = tiles.lookup("linear_fwd", x, shape_class(x.shape[1], weight.shape[0]))
    if tile.provider == "cublas":
        return F.linear(x, weight, bias)
    return _launch_linear(x, weight, bias, tile, transposed=True)


def input_grad(g: Tensor, weight: Tensor) -> Tensor:
    """g W: g (M, N), weight (N, K) -> (M, K) in g's dtype."""
    tile = tiles.lookup("input_grad", g, shape_class(*weight.shape))
    if tile.provider == "cublas":
        return torch.mm(g, weight)
    return _launch_linear(g, weight, None, tile, transposed=False)


def linear_residual(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    layer_scale: Tensor | None,
    drop_path: Tensor | None,
    rows_per_sample: int,
) -> Tensor:
    """residual + drop_path[row // rows_per_sample] * layer_scale * (x W^T + b): x (M, K), weight (N, K), residual (M, N) -> (M, N).

    In fp32 up to the result, which has residual's dtype (fp32, or x's). layer_scale (N,), drop_path (M / rows_per_sample,), or None.
    """
    (m, k), n = x.shape, weight.shape[0]
    factors = layer_scale is not None or drop_path is not None
    tile = tiles.lookup("linear_residual_fwd", x, shape_class(k, n), without=("cublaslt",) if factors else ())
    if tile.provider == "cublaslt":
        return cublaslt.linear_residual(x, weight, bias, residual)
    if tile.provider == "cublas":
        branch = F.linear(x, weight, bias)
        branch = branch if layer_scale is None else branch * layer_scale.float()
        branch = (
            branch
            if drop_path is None
            else branch * drop_path.float().repeat_interleave(rows_per_sample, output_size=m)[:, None]
        )
        return (residual + branch).to(residual.dtype)
    out = torch.empty((m, n), dtype=residual.dtype, device=x.device)
    x_ptr, w_ptr, grid, flags = row_product(x, weight, tile, "nt")
    launch(
        linear_residual_kernel,
        grid,
        x_ptr=x_ptr,
        w_ptr=w_ptr,
        bias_ptr=vector(bias),
        res_ptr=residual,
        ls_ptr=vector(layer_scale),
        dp_ptr=vector(drop_path),
        out_ptr=out,
        M=m,
        N=n,
        K=k,
        rows_per_sample=rows_per_sample,
        stride_xm=x.stride(0),
        stride_wn=weight.stride(0),
        stride_rm=residual.stride(0),
        stride_om=n,
        **flags,
    )
    return out
