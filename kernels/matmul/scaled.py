"""The backward of a linear layer with scaled output: out = drop_path[b] * layer_scale * (x W^T + b).

scale_rows            g = drop_path[b] * layer_scale * dout, each factor only where it is given; and the column sum of g
scaled_weight_grad    with s = layer_scale, g = drop_path[b] * dout (not yet times s) and G = g^T x:
                      dW = s[:, None] * G,  ds = rowsum(G * W) + b * colsum(g)     x W^T need not be kept
                      (the caller, who has the column sum, adds b * colsum(g))

cuBLAS computes G in fp32; one kernel then reads it and the weight once for both gradients. Its shape class is
"KxN" of the layer, as in product.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import tiles
from ..launch import cdiv, launch
from ..rows import column_sums, contiguous_or_none, row_alignment, row_factor, row_programs, row_stride
from ..tiles import config, configures
from .product import product_class


@triton.jit(do_not_specialize=["M", "rows_per_sample"])
def scale_rows_kernel(
    dout_ptr,  # (M, D)
    ls_ptr,  # (D,) or None
    dp_ptr,  # (M / rows_per_sample,) or None
    g_ptr,  # (M, D) or None
    sum_ptr,  # (programs, D) or None
    M,
    rows_per_sample,
    stride_dout,
    D: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
):
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    mask_d = offs_d < D
    if ls_ptr is not None:
        ls = tl.load(ls_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in tl.range(tl.program_id(0) * BLOCK_M, M, tl.num_programs(0) * BLOCK_M, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_M)[:, None]
        mask = (rows < M) & mask_d
        ptrs = dout_ptr + rows.to(tl.int64) * (stride_dout // ALIGN * ALIGN) + offs_d
        g = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        if dp_ptr is not None:
            g *= row_factor(dp_ptr, rows, M, rows_per_sample)
        if ls_ptr is not None:
            g *= ls
        if g_ptr is not None:
            tl.store(g_ptr + rows.to(tl.int64) * D + offs_d, g.to(g_ptr.dtype.element_ty), mask=mask)
        total += g
    if sum_ptr is not None:
        offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        tl.store(sum_ptr + tl.program_id(0) * D + offs_d, tl.sum(total, 0), mask=offs_d < D)


@triton.jit
def scaled_weight_grad_kernel(
    product_ptr,  # (N, K) fp32
    w_ptr,  # (N, K), or None if dls is not wanted
    ls_ptr,  # (N,)
    out_ptr,  # (N, K)
    dls_ptr,  # (N,), or None if w_ptr is
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


configures("scale_rows")(lambda *_: [config(4, 1, BLOCK_M=8, BLOCK_D=256, STAGES=3, PER_SM=6)])
configures("scaled_weight_grad")(lambda *_: [config(4, 1, BLOCK_N=2, BLOCK_K=512)])


def scale_rows(
    dout: Tensor,
    layer_scale: Tensor | None,
    drop_path: Tensor | None,
    rows_per_sample: int,
    want_scaled: bool = True,
    want_sum: bool = True,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """g = drop_path[b] * layer_scale * dout (M, D) in out_dtype (dout's), its column sum (D,) in fp32."""
    M, D = dout.shape
    flags = dict(tiles.lookup("scale_rows", dout, f"d{D}").meta)
    strips = cdiv(D, flags["BLOCK_D"])
    programs = row_programs(dout.device, flags.pop("PER_SM"), cdiv(M, flags["BLOCK_M"]), strips)
    g = torch.empty((M, D), dtype=out_dtype or dout.dtype, device=dout.device) if want_scaled else None
    ws = torch.empty((programs, D), dtype=torch.float32, device=dout.device) if want_sum else None
    factors = dict(ls_ptr=contiguous_or_none(layer_scale), dp_ptr=contiguous_or_none(drop_path))
    sizes = dict(M=M, rows_per_sample=rows_per_sample, stride_dout=row_stride(dout))
    flags |= dict(D=D, ALIGN=row_alignment(dout))
    launch(scale_rows_kernel, (programs, strips), dout_ptr=dout, g_ptr=g, sum_ptr=ws, **factors, **sizes, **flags)
    return g, *column_sums(dout, [ws])


def scaled_weight_grad(
    g: Tensor, x: Tensor, layer_scale: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(dW, dlayer_scale) of layer_scale * x W^T.

    g (M, N): the gradient of that output, *not* multiplied by the scale; x (M, K), weight (N, K). dW (N, K) is in g's
    dtype, dlayer_scale (N,) in fp32, None without a weight; a bias adds b * colsum(g) to it.
    """
    if g.dtype == torch.float32 or g.device.type == "cpu":  # only CUDA multiplies 16-bit matrices into fp32
        product = torch.mm(g.float().t(), x.float())
    else:
        product = torch.mm(g.t(), x, out_dtype=torch.float32)
    n, k = product.shape
    config = tiles.lookup("scaled_weight_grad", product, product_class(k, n))
    out = torch.empty((n, k), dtype=g.dtype, device=g.device)
    dls = None if weight is None else torch.empty(n, dtype=torch.float32, device=g.device)
    inputs = dict(product_ptr=product, w_ptr=weight, ls_ptr=contiguous_or_none(layer_scale))
    sizes = dict(N=n, K=k, stride_wn=row_stride(weight))
    grid = (cdiv(n, config["BLOCK_N"]),)
    launch(scaled_weight_grad_kernel, grid, **inputs, out_ptr=out, dls_ptr=dls, **sizes, **config.meta)
    return out, dls
