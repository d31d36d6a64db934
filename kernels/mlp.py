"""The two layers of a ViT's MLP around their GELU, which acts in the epilogue of a product, forward and backward.

    linear_gelu    pre = x W^T + b, act = gelu(pre)                         x (M, K), W (N, K), b (N,); pre is kept for backward only
    dgelu_matmul   dpre = (g W2) * gelu'(pre), act = gelu(pre), dbias = sum_M(dpre)           g (M, D), W2 (D, F), pre (M, F)
    gelu_bwd       dpre = dy * gelu'(pre), dbias = sum_M(dpre)              element-wise

"none": gelu(p) = p Phi(p) = max(p, 0) - |p| Q(|p|), Phi the normal distribution function and Q = 1 - Phi its upper tail,
computed as two to the power of a polynomial of |p|: two fifths fewer instructions in fc1's kernel than with erf (sm_90,
Triton 3.9), and digits in the negative tail, where 1 + erf cancels (tests/kernels/test_gelu.py): fp32 gelu's relative error is
2e-4 at -4, 1.6e-3 at -5, 1e-2 at -6, 0.15 at -7 (with erf 6e-3 at -4, 0.2 at -5, 1 from -6 on); below -9, where |gelu| is
1e-18 and less, no digit is left.
"tanh": p times the logistic function of 2 sqrt(2/pi) (p + 0.044715 p^3) (Hendrycks & Gimpel, 2016).
GELU acts on `pre` as it is rounded for storing, so that training, evaluation and backward agree.
dgelu_matmul rewrites the activation that the second layer's weight gradient needs, so that forward need not keep it. Bias gradients are
column sums that every row tile writes to an fp32 workspace, added up in a fixed order by a second, small kernel. No atomics.

The shape class of a product is "KxN", as in product.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from . import tiles
from .launch import cdiv, launch
from .linear import input_grad, linear, linear_residual
from .product import column_parts, describable, load_columns, product, row_product, shape_class, tile_offsets
from .product_gluon import launch_product, row_tiles
from .rows import column_sums, vector

__all__ = ["dgelu_matmul", "gelu_bwd", "input_grad", "linear", "linear_gelu", "linear_residual"]


# log2 Q(z) = c0 + c1 z + ..., lowest power first: the minimax fit of tests/helpers/gelu_polynomial.py.
UPPER_TAIL = tl.constexpr(
    (
        -0.999999922,
        -1.15110917,
        -0.459172229,
        -0.0526167539,
        0.00725389419,
        -0.000293898503,
        -0.000117135696,
        2.40945069e-05,
        -1.50350067e-06,
    )
)
LARGE = tl.constexpr(16.0)  # where Q, 2^-190, and the normal density, 2^-186, are zero in fp32


@triton.jit
def upper_tail(z):
    """Q(z) = 1 - Phi(z) for 0 <= z <= LARGE, Phi being the normal distribution function."""
    exponent = UPPER_TAIL[8] * z + UPPER_TAIL[7]
    for i in tl.static_range(6, -1, -1):
        exponent = exponent * z + UPPER_TAIL[i]
    return tl.exp2(exponent)


@triton.jit
def tanh_gate(p):
    # 1 / (1 + exp(-2 u)), u = sqrt(2/pi) (p + 0.044715 p^3); 2 sqrt(2/pi) log2(e) = 2.3022082
    return 1.0 / (1.0 + tl.exp2(-2.302208198 * p * (1.0 + 0.044715 * p * p)))


@triton.jit
def magnitude(p):
    return tl.minimum(tl.abs(p), LARGE, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def gelu(p, TANH: tl.constexpr):
    if TANH:
        return p * tanh_gate(p)
    else:
        # p Phi(p) = max(p, 0) - |p| Q(|p|) loses no digits to 1 - Q, and has no branch.
        z = magnitude(p)
        return tl.maximum(p, 0.0, propagate_nan=tl.PropagateNan.ALL) - z * upper_tail(z)


@triton.jit
def gelu_and_slope(p, TANH: tl.constexpr):
    """(gelu(p), its derivative)."""
    if TANH:
        # gate' = gate (1 - gate) 2 u', 2 u' = 2 sqrt(2/pi) (1 + 3 * 0.044715 p^2)
        gate = tanh_gate(p)
        return p * gate, gate + p * gate * (1.0 - gate) * 1.5957691216 * (1.0 + 0.134145 * p * p)
    else:
        # Phi(p) + p density(p); of -|p| it is Q - |p| density, of |p| 1 minus that.
        z = magnitude(p)
        q = upper_tail(z)
        density = tl.exp2(-0.7213475204444817 * z * z - 1.3257480647361593)  # log2(e) / 2, log2(2 pi) / 2
        slope = q - z * density
        return tl.maximum(p, 0.0, propagate_nan=tl.PropagateNan.ALL) - z * q, tl.where(p < 0, slope, 1.0 - slope)


@triton.jit
def store_gelu(pre, bias_ptr, pre_ptr, act_ptr, pid_m, offs_m, cols, M, N, stride_om, TANH: tl.constexpr):
    # pid_m is for the other epilogue, store_dgelu
    mask = (offs_m[:, None] < M) & (cols[None, :] < N)
    at = offs_m[:, None] * stride_om + cols[None, :]
    if bias_ptr is not None:
        pre += load_columns(bias_ptr, cols, N)
    pre = pre.to(act_ptr.dtype.element_ty)
    if pre_ptr is not None:
        tl.store(pre_ptr + at, pre, mask=mask)
    tl.store(act_ptr + at, gelu(pre.to(tl.float32), TANH).to(act_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def linear_gelu_kernel(
    x_ptr,  # (M, K), or its descriptor
    w_ptr,  # (N, K), or its descriptor
    bias_ptr,  # (N,) or None
    pre_ptr,  # (M, N) or None
    act_ptr,  # (M, N)
    M,
    N,
    K,
    stride_xm,
    stride_wn,
    stride_om,
    TANH: tl.constexpr,
    LOADS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SUBTILES: tl.constexpr,
):
    pid_m, first_m, first_n = tile_offsets(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    first, sizes, strides = (first_m, first_n, 0), (M, N, K), ((stride_xm, 1), (1, stride_wn))
    acc = product(x_ptr, w_ptr, first, sizes, strides, LOADS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)
    offs_m = first_m + tl.arange(0, BLOCK_M).to(tl.int64)
    parts = column_parts(acc, SUBTILES)
    for i in tl.static_range(SUBTILES):
        cols = first_n + i * (BLOCK_N // SUBTILES) + tl.arange(0, BLOCK_N // SUBTILES)
        store_gelu(parts[i], bias_ptr, pre_ptr, act_ptr, pid_m, offs_m, cols, M, N, stride_om, TANH)


@triton.jit
def store_dgelu(
    dact, pre_ptr, dpre_ptr, act_ptr, part_ptr, pid_m, offs_m, cols, M, N, stride_pm, stride_om, TANH: tl.constexpr
):
    mask = (offs_m[:, None] < M) & (cols[None, :] < N)
    at = offs_m[:, None] * stride_om + cols[None, :]
    p = tl.load(pre_ptr + (offs_m[:, None] * stride_pm + cols[None, :]), mask=mask, other=0.0).to(tl.float32)
    act, slope = gelu_and_slope(p, TANH)
    if act_ptr is not None:
        tl.store(act_ptr + at, act.to(act_ptr.dtype.element_ty), mask=mask)
    dpre = dact * slope
    tl.store(dpre_ptr + at, dpre.to(dpre_ptr.dtype.element_ty), mask=mask)
    if part_ptr is not None:
        tl.store(part_ptr + pid_m.to(tl.int64) * N + cols, tl.sum(dpre, 0), mask=cols < N)


@triton.jit(do_not_specialize=["M"])
def dgelu_matmul_kernel(
    g_ptr,  # (M, K), or its descriptor
    w_ptr,  # (K, N), or its descriptor
    pre_ptr,  # (M, N)
    dpre_ptr,  # (M, N)
    act_ptr,  # (M, N) or None
    part_ptr,  # (row tiles, N) or None
    M,
    N,
    K,
    stride_gm,
    stride_wk,
    stride_pm,
    stride_om,
    TANH: tl.constexpr,
    LOADS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SUBTILES: tl.constexpr,
):
    pid_m, first_m, first_n = tile_offsets(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    first, sizes, strides = (first_m, first_n, 0), (M, N, K), ((stride_gm, 1), (stride_wk, 1))
    acc = product(g_ptr, w_ptr, first, sizes, strides, LOADS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)
    offs_m = first_m + tl.arange(0, BLOCK_M).to(tl.int64)
    parts = column_parts(acc, SUBTILES)
    for i in tl.static_range(SUBTILES):
        cols = first_n + i * (BLOCK_N // SUBTILES) + tl.arange(0, BLOCK_N // SUBTILES)
        store_dgelu(
            parts[i], pre_ptr, dpre_ptr, act_ptr, part_ptr, pid_m, offs_m, cols, M, N, stride_pm, stride_om, TANH
        )


@triton.jit(do_not_specialize=["M"])
def gelu_bwd_kernel(
    dy_ptr,  # (M, N)
    pre_ptr,  # (M, N)
    dpre_ptr,  # (M, N)
    act_ptr,  # (M, N) or None
    part_ptr,  # (row tiles, N) or None
    M,
    N,
    stride_ym,
    stride_pm,
    stride_om,
    TANH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    pid_m = tl.program_id(0)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (offs_m[:, None] < M) & (cols[None, :] < N)
    dy = tl.load(dy_ptr + (offs_m[:, None] * stride_ym + cols[None, :]), mask=mask, other=0.0).to(tl.float32)
    store_dgelu(dy, pre_ptr, dpre_ptr, act_ptr, part_ptr, pid_m, offs_m, cols, M, N, stride_pm, stride_om, TANH)


def _product_tile(op: str, a: Tensor, b: Tensor, shape: str) -> tiles.Tile:
    """The tile of a product; the shipped one where Gluon is to do it and the operands allow no descriptors."""
    tile = tiles.lookup(op, a, shape)
    if tile.provider == "gluon" and not (describable(a) and describable(b)):
        return tiles.shipped(op, a, shape)
    return tile


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str, save: bool) -> tuple[Tensor, Tensor]:
    """(gelu(pre), pre) with pre = x W^T + b: x (M, K), weight (N, K) -> (M, N) each in x's dtype; pre is an empty (0,) unless `save`."""
    (m, k), n = x.shape, weight.shape[0]
    tile = _product_tile("linear_gelu_fwd", x, weight, shape_class(k, n))
    if tile.provider == "cublas":
        pre = F.linear(x, weight, bias)
        return F.gelu(pre, approximate=approximate), pre if save else x.new_empty(0)
    act = torch.empty((m, n), dtype=x.dtype, device=x.device)
    pre = torch.empty((m, n), dtype=x.dtype, device=x.device) if save else None
    if tile.provider == "gluon":
        launch_product(x, weight, "nt", tile, store_gelu, (vector(bias), pre, act), (n,), approximate == "tanh")
        return act, pre if save else x.new_empty(0)
    x_ptr, w_ptr, grid, flags = row_product(x, weight, tile, "nt")
    launch(
        linear_gelu_kernel,
        grid,
        x_ptr=x_ptr,
        w_ptr=w_ptr,
        bias_ptr=vector(bias),
        pre_ptr=pre,
        act_ptr=act,
        M=m,
        N=n,
        K=k,
        stride_xm=x.stride(0),
        stride_wn=weight.stride(0),
        stride_om=n,
        TANH=approximate == "tanh",
        **flags,
    )
    return act, pre if save else x.new_empty(0)


def _sum(part: Tensor | None) -> Tensor | None:
    """(row tiles, N) -> (N,): column sums in a fixed order."""
    if part is None:
        return None
    total = torch.empty(part.shape[1], dtype=torch.float32, device=part.device)
    column_sums([(part, total)], *part.shape, part)
    return total


def _dgelu_outputs(
    pre: Tensor, row_tiles: int, want_act: bool, want_bias_grad: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dpre, act, partial column sums), uninitialised; None for what is not wanted."""
    m, n = pre.shape
    dpre = torch.empty((m, n), dtype=pre.dtype, device=pre.device)
    part = torch.empty((row_tiles, n), dtype=torch.float32, device=pre.device) if want_bias_grad else None
    act = torch.empty((m, n), dtype=pre.dtype, device=pre.device) if want_act else None
    return dpre, act, part


def dgelu_matmul(
    g: Tensor, weight2: Tensor, pre: Tensor, approximate: str, want_bias_grad: bool, want_act: bool = True
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dpre, act, dbias): dpre = (g W2) * gelu'(pre), act = gelu(pre), dbias (F,) fp32, the column sum of dpre; None for what is not wanted.

    g (M, D), weight2 (D, F) as the second layer stores it, pre (M, F) -> (M, F) each in pre's dtype.
    """
    (m, k), n = g.shape, weight2.shape[1]
    tile = _product_tile("dgelu_matmul", g, weight2, shape_class(k, n))
    if tile.provider == "cublas":
        return _gelu_bwd(torch.mm(g, weight2), pre, approximate, want_bias_grad, want_act)
    if tile.provider == "gluon":
        dpre, act, part = _dgelu_outputs(pre, row_tiles(m), want_act, want_bias_grad)
        pointers, strides = (pre, dpre, act, part), (pre.stride(0), n)
        launch_product(g, weight2, "nn", tile, store_dgelu, pointers, strides, approximate == "tanh")
        return dpre, act, _sum(part)
    dpre, act, part = _dgelu_outputs(pre, cdiv(m, tile["BLOCK_M"]), want_act, want_bias_grad)
    g_ptr, w_ptr, grid, flags = row_product(g, weight2, tile, "nn")
    launch(
        dgelu_matmul_kernel,
        grid,
        g_ptr=g_ptr,
        w_ptr=w_ptr,
        pre_ptr=pre,
        dpre_ptr=dpre,
        act_ptr=act,
        part_ptr=part,
        M=m,
        N=n,
        K=k,
        stride_gm=g.stride(0),
        stride_wk=weight2.stride(0),
        stride_pm=pre.stride(0),
        stride_om=n,
        TANH=approximate == "tanh",
        **flags,
    )
    return dpre, act, _sum(part)


def _gelu_bwd(
    dy: Tensor, pre: Tensor, approximate: str, want_bias_grad: bool, want_act: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    m, n = pre.shape
    tile = tiles.lookup("gelu_bwd", pre, f"d{n}")
    if tile.provider == "torch":
        dpre = torch.ops.aten.gelu_backward(dy, pre, approximate=approximate).contiguous()
        dbias = dpre.sum(0, dtype=torch.float32) if want_bias_grad else None
        return dpre, F.gelu(pre, approximate=approximate) if want_act else None, dbias
    dpre, act, part = _dgelu_outputs(pre, cdiv(m, tile["BLOCK_M"]), want_act, want_bias_grad)
    launch(
        gelu_bwd_kernel,
        (cdiv(m, tile["BLOCK_M"]), cdiv(n, tile["BLOCK_N"])),
        dy_ptr=dy,
        pre_ptr=pre,
        dpre_ptr=dpre,
        act_ptr=act,
        part_ptr=part,
        M=m,
        N=n,
        stride_ym=dy.stride(0),
        stride_pm=pre.stride(0),
        stride_om=n,
        TANH=approximate == "tanh",
        **tile.meta,
    )
    return dpre, act, _sum(part)


def gelu_bwd(dy: Tensor, pre: Tensor, approximate: str, want_bias_grad: bool) -> tuple[Tensor, Tensor | None]:
    """(dpre, dbias): dpre = dy * gelu'(pre) (M, N) in pre's dtype; dbias (N,) fp32, its column sum, or None where not wanted."""
    dpre, _, dbias = _gelu_bwd(dy, pre, approximate, want_bias_grad, want_act=False)
    return dpre, dbias
