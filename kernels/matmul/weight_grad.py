"""Gradients of the weight and the layer scale of a linear layer whose output is scaled.

    out = s * (x W^T + b),  g (M, N) the gradient of out (not yet times s),  G = g^T x
    dW = s[:, None] * G,  ds = rowsum(G * W) + b * colsum(g)       the branch's output need not be kept
    (the caller, who has the column sum, adds b * colsum(g))

cuBLAS has the product, in fp32; one kernel then reads it and the weight once for both gradients. The shape class is
"KxN" of the layer, as in product.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import tiles
from ..launch import cdiv, launch
from ..rows import contiguous_or_none, row_stride
from .product import product_class


@triton.jit
def scaled_weight_grad_kernel(
    product_ptr,  # (N, K) fp32
    w_ptr,  # (N, K); None where no dls is wanted
    ls_ptr,  # (N,)
    out_ptr,  # (N, K)
    dls_ptr,  # (N,); None where w_ptr is
    N,
    K,
    stride_wn,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)
    mask_n = offs_n < N
    ls = tl.load(ls_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    dot = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for k in range(0, K, BLOCK_K):
        cols = (k + tl.arange(0, BLOCK_K))[None, :]
        mask = mask_n[:, None] & (cols < K)
        product = tl.load(product_ptr + (offs_n[:, None] * K + cols), mask=mask, other=0.0)
        if w_ptr is not None:
            dot += product * tl.load(w_ptr + (offs_n[:, None] * stride_wn + cols), mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + (offs_n[:, None] * K + cols), (ls * product).to(out_ptr.dtype.element_ty), mask=mask)
    if w_ptr is not None:
        tl.store(dls_ptr + offs_n, tl.sum(dot, 1), mask=mask_n)


def scaled_weight_grad(
    g: Tensor, x: Tensor, layer_scale: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(dW, dlayer_scale) of layer_scale * x W^T.

    g (M, N): the gradient of that output, *not* multiplied by the scale; x (M, K), weight (N, K). dW (N, K) is in g's
    dtype, dlayer_scale (N,) in fp32, None without a weight; a bias adds b * colsum(g) to it.
    """
    if g.dtype == torch.float32 or g.device.type == "cpu":  # CUDA alone has products of 16-bit matrices in fp32
        product = torch.mm(g.float().t(), x.float())
    else:
        product = torch.mm(g.t(), x, out_dtype=torch.float32)
    n, k = product.shape
    config = tiles.lookup("scaled_weight_grad", product, product_class(k, n))
    out = torch.empty((n, k), dtype=g.dtype, device=g.device)
    dls = None if weight is None else torch.empty(n, dtype=torch.float32, device=g.device)
    launch(
        scaled_weight_grad_kernel,
        (cdiv(n, config["BLOCK_N"]),),
        product_ptr=product,
        w_ptr=weight,
        ls_ptr=contiguous_or_none(layer_scale),
        out_ptr=out,
        dls_ptr=dls,
        N=n,
        K=k,
        stride_wn=row_stride(weight),
        **config.meta,
    )
    return out, dls
