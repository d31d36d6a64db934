"""Weight gradients of linear layers: the product that sums over all rows of the batch.

    dW = g^T x                                                     g (M, N), x (M, K) -> (N, K)
    with a layer scale s, out = s * (x W^T + b), g the gradient of out (not yet times s) and G = g^T x:
    dW = s[:, None] * G,  ds = rowsum(G * W) + b * colsum(g)       the branch's output need not be kept
    (the caller, who has the column sum, adds b * colsum(g))

An output of 768 x 3072 is 72 to 144 blocks, too few for 132 multiprocessors and M = 50,000 rows. So SPLIT_K programs
share a block: each sums a range of rows into its own slice of an fp32 workspace, and a second kernel adds the slices in
a fixed order, without atomics.

The shape class is "KxN" of the layer, as in product.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import tiles
from ..launch import cdiv, fp32_precision, launch
from ..rows import contiguous_or_none, row_stride
from .product import block_offsets, operands, product, product_class, split_columns, unfit


@triton.jit(do_not_specialize=["M"])
def weight_grad_kernel(
    g_ptr,  # (M, N), or its descriptor
    x_ptr,  # (M, K), or its descriptor
    out_ptr,  # (SPLIT_K, N, K)
    M,
    N,
    K,
    stride_gm,
    stride_xm,
    stride_os,
    stride_on,
    LOADS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    SUBTILES: tl.constexpr,
):
    """One slice of BLOCK_N x BLOCK_K of the output, summed over BLOCK_M rows at a time."""
    _, first_n, first_k = block_offsets(tl.program_id(0), N, K, BLOCK_N, BLOCK_K, GROUP_N)
    split = tl.program_id(1)
    share = tl.cdiv(tl.cdiv(M, SPLIT_K), BLOCK_M) * BLOCK_M
    start = split * share
    rows = tl.minimum(M - start, share)
    first, sizes, strides = (first_n, first_k, start), (N, K, rows), ((1, stride_gm), (stride_xm, 1))
    acc = product(g_ptr, x_ptr, first, sizes, strides, LOADS, PRECISION, BLOCK_N, BLOCK_K, BLOCK_M)
    offs_n = first_n + tl.arange(0, BLOCK_N).to(tl.int64)
    pieces = split_columns(acc, SUBTILES)
    out_ptr += split.to(tl.int64) * stride_os
    for i in tl.static_range(SUBTILES):
        cols = first_k + i * (BLOCK_K // SUBTILES) + tl.arange(0, BLOCK_K // SUBTILES)
        mask = (offs_n[:, None] < N) & (cols[None, :] < K)
        ptrs = out_ptr + (offs_n[:, None] * stride_on + cols[None, :])
        tl.store(ptrs, pieces[i].to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def weight_grad_sum_kernel(
    part_ptr,  # (SPLITS, N, K)
    w_ptr,  # (N, K); None where no dls is wanted
    ls_ptr,  # (N,) or None
    out_ptr,  # (N, K)
    dls_ptr,  # (N,); None where w_ptr is
    N,
    K,
    stride_ps,
    stride_pn,
    stride_wn,
    stride_on,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    mask_n = offs_n < N
    if ls_ptr is not None:
        ls = tl.load(ls_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    dot = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for k in range(0, K, BLOCK_K):
        cols = (k + tl.arange(0, BLOCK_K))[None, :]
        mask = mask_n[:, None] & (cols < K)
        total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        for s in tl.static_range(SPLITS):
            total += tl.load(part_ptr + s * stride_ps + (offs_n[:, None] * stride_pn + cols), mask=mask, other=0.0)
        if w_ptr is not None:
            dot += total * tl.load(w_ptr + (offs_n[:, None] * stride_wn + cols), mask=mask, other=0.0).to(tl.float32)
        if ls_ptr is not None:
            total *= ls
        tl.store(out_ptr + (offs_n[:, None] * stride_on + cols), total.to(out_ptr.dtype.element_ty), mask=mask)
    if w_ptr is not None:
        tl.store(dls_ptr + offs_n, tl.sum(dot, 1), mask=mask_n)


def _slices(g: Tensor, x: Tensor, config: tiles.KernelConfig, dtype: torch.dtype) -> Tensor:
    """(S, N, K) slices that add up to g^T x, in fp32; a single slice of our kernel is in `dtype`."""
    if config.provider == "cublas":  # only CUDA has the product of 16-bit matrices with an fp32 result
        plain = g.dtype == torch.float32 or g.device.type == "cpu"
        return (torch.mm(g.float().t(), x.float()) if plain else torch.mm(g.t(), x, out_dtype=torch.float32))[None]
    (m, n), k = g.shape, x.shape[1]
    flags = config.meta
    splits, blocks = flags["SPLIT_K"], (flags["BLOCK_N"], flags["BLOCK_K"], flags["BLOCK_M"])
    out = torch.empty((splits, n, k), dtype=torch.float32 if splits > 1 else dtype, device=g.device)
    g_ptr, x_ptr, loads = operands(g, x, config.provider, "tn", blocks, even=False)
    launch(
        weight_grad_kernel,
        (cdiv(n, blocks[0]) * cdiv(k, blocks[1]), splits),
        g_ptr=g_ptr,
        x_ptr=x_ptr,
        out_ptr=out,
        M=m,
        N=n,
        K=k,
        stride_gm=g.stride(0),
        stride_xm=x.stride(0),
        stride_os=n * k,
        stride_on=k,
        LOADS=loads,
        PRECISION=fp32_precision(),
        **flags,
    )
    return out


def sum_products(
    part: Tensor, layer_scale: Tensor | None, dtype: torch.dtype, weight: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(dW, dlayer_scale) from slices `part` (S, N, K) of g^T x in fp32.

    dW (N, K) in `dtype`, dlayer_scale (N,) in fp32, None without a weight.
    """
    splits, n, k = part.shape
    config = tiles.lookup("weight_grad_sum", part, product_class(k, n))
    out = torch.empty((n, k), dtype=dtype, device=part.device)
    dls = None if weight is None else torch.empty(n, dtype=torch.float32, device=part.device)
    launch(
        weight_grad_sum_kernel,
        (cdiv(n, config["BLOCK_N"]),),
        part_ptr=part,
        w_ptr=weight,
        ls_ptr=contiguous_or_none(layer_scale),
        out_ptr=out,
        dls_ptr=dls,
        N=n,
        K=k,
        stride_ps=n * k,
        stride_pn=k,
        stride_wn=row_stride(weight),
        stride_on=k,
        SPLITS=splits,
        **config.meta,
    )
    return out, dls


def weight_grad(
    g: Tensor, x: Tensor, *, layer_scale: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """layer_scale[:, None] * g^T x: g (M, N), x (M, K) -> (N, K) in `out_dtype` (g's), summed in fp32."""
    dtype = out_dtype or g.dtype
    config = tiles.lookup("weight_grad", g, product_class(x.shape[1], g.shape[1]), unfit(g, x))
    if config.provider == "cublas" and layer_scale is None and dtype == g.dtype:
        return torch.mm(g.t(), x)
    part = _slices(g, x, config, dtype if layer_scale is None else torch.float32)
    if part.shape[0] == 1 and layer_scale is None and part.dtype == dtype:
        return part[0]
    return sum_products(part, layer_scale, dtype)[0]


def weight_grad_scaled(
    g: Tensor, x: Tensor, weight: Tensor, layer_scale: Tensor, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """(dW, dlayer_scale) of layer_scale * x W^T.

    g (M, N): the gradient of that output, *not* multiplied by the scale; x (M, K), weight (N, K). dW (N, K) is in
    `out_dtype` (g's unless given), dlayer_scale (N,) in fp32; a bias adds b * colsum(g) to the latter.
    """
    config = tiles.lookup("weight_grad", g, product_class(x.shape[1], g.shape[1]), unfit(g, x))
    part = _slices(g, x, config, torch.float32)
    return sum_products(part, layer_scale, out_dtype or g.dtype, weight)
