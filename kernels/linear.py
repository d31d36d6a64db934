"""Linear layers, and the tiled product with an epilogue that mlp.py and weight_grad.py build on.

    linear            out = x W^T + b                                        x (M, K), W (N, K), b (N,) -> (M, N)
    linear_residual   out = res + drop_path[row // rows_per_sample] * layer_scale * (x W^T + b)
    input_grad        dx = g W                                               g (M, N), W (N, K) -> (M, K)

Programs run in groups of row tiles that share W's columns in L2 (Triton's tutorial 03). The epilogue takes the tile in SUBTILES pieces of
its columns, one after the other, with a fraction of the registers (tutorial 09): in quarters, 128 x 128 leaves room for two programs per
multiprocessor on sm_90, one's epilogue under the other's main loop.

The shape class of a product is "KxN": the length it sums over and the columns it writes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from . import tiles
from .launch import fp32_precision, launch
from .rows import vector


@triton.jit
def tile_offsets(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    # Row tile, its rows and the first column of this program: column by column within GROUP_M row tiles.
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = pid // (GROUP_M * tiles_n) * GROUP_M
    height = min(tiles_m - first, GROUP_M)
    within = pid % (GROUP_M * tiles_n)
    pid_m = (first + within % height).to(tl.int64)
    return pid_m, pid_m * BLOCK_M + tl.arange(0, BLOCK_M), within // height * BLOCK_N


@triton.jit
def product(
    a_ptr,  # (M, K)
    b_ptr,  # (K, N)
    offs_m,
    offs_n,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Rows offs_m and columns offs_n of A B in fp32; zeros outside.
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + (offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak)
    b_ptrs = b_ptr + (offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn)
    mask_m, mask_n = offs_m[:, None] < M, offs_n[None, :] < N
    acc = tl.zeros((offs_m.shape[0], offs_n.shape[0]), tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=mask_m, other=0.0)
            b = tl.load(b_ptrs, mask=mask_n, other=0.0)
        else:
            a = tl.load(a_ptrs, mask=mask_m & (offs_k[None, :] < K - k), other=0.0)
            b = tl.load(b_ptrs, mask=mask_n & (offs_k[:, None] < K - k), other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    return acc


@triton.jit
def _halves(acc):
    return tl.split(tl.permute(tl.reshape(acc, (acc.shape[0], 2, acc.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def column_parts(acc, SUBTILES: tl.constexpr):
    # acc cut into 1, 2 or 4 pieces of equally many columns, from left to right
    if SUBTILES == 1:
        return (acc,)
    elif SUBTILES == 2:
        return _halves(acc)
    else:
        left, right = _halves(acc)
        return _halves(left) + _halves(right)


@triton.jit
def load_columns(ptr, offs_n, N):
    # (N,) in fp32 -> (1, columns)
    return tl.load(ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]


@triton.jit
def linear_kernel(
    x_ptr,  # (M, K)
    w_ptr,  # (K, N)
    bias_ptr,  # (N,) or None
    out_ptr,  # (M, N)
    M,
    N,
    K,
    stride_xm,
    stride_wk,
    stride_wn,
    stride_om,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SUBTILES: tl.constexpr,
):
    _, offs_m, first_n = tile_offsets(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    offs_n = first_n + tl.arange(0, BLOCK_N).to(tl.int64)
    acc = product(x_ptr, w_ptr, offs_m, offs_n, M, N, K, stride_xm, 1, stride_wk, stride_wn, EVEN_K, PRECISION, BLOCK_K)
    parts = column_parts(acc, SUBTILES)
    for i in tl.static_range(SUBTILES):
        cols = first_n + i * (BLOCK_N // SUBTILES) + tl.arange(0, BLOCK_N // SUBTILES)
        mask = (offs_m[:, None] < M) & (cols[None, :] < N)
        out = parts[i]
        if bias_ptr is not None:
            out += load_columns(bias_ptr, cols, N)
        tl.store(out_ptr + (offs_m[:, None] * stride_om + cols[None, :]), out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def linear_residual_kernel(
    x_ptr,  # (M, K)
    w_ptr,  # (N, K)
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
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SUBTILES: tl.constexpr,
):
    _, offs_m, first_n = tile_offsets(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    offs_n = first_n + tl.arange(0, BLOCK_N).to(tl.int64)
    acc = product(x_ptr, w_ptr, offs_m, offs_n, M, N, K, stride_xm, 1, 1, stride_wn, EVEN_K, PRECISION, BLOCK_K)
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


def shape_class(k: int, n: int) -> str:
    """ "768x3072": a product that sums over 768 and writes 3072 columns."""
    return f"{k}x{n}"


def product_grid(m: int, n: int, tile: tiles.Tile) -> tuple[int]:
    return (triton.cdiv(m, tile["BLOCK_M"]) * triton.cdiv(n, tile["BLOCK_N"]),)


def product_flags(k: int, tile: tiles.Tile) -> dict:
    return dict(EVEN_K=k % tile["BLOCK_K"] == 0, PRECISION=fp32_precision(), **tile.meta)


def _launch_linear(x: Tensor, weight: Tensor, bias: Tensor | None, tile: tiles.Tile) -> Tensor:
    """x (M, K) @ weight (K, N) + bias, weight with any strides."""
    (m, k), n = x.shape, weight.shape[1]
    out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    launch(
        linear_kernel,
        product_grid(m, n, tile),
        x_ptr=x,
        w_ptr=weight,
        bias_ptr=vector(bias),
        out_ptr=out,
        M=m,
        N=n,
        K=k,
        stride_xm=x.stride(0),
        stride_wk=weight.stride(0),
        stride_wn=weight.stride(1),
        stride_om=n,
        **product_flags(k, tile),
    )
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: x (M, K), weight (N, K) -> (M, N) in x's dtype."""
    tile = tiles.lookup("linear_fwd", x, shape_class(x.shape[1], weight.shape[0]))
    if tile.provider == "cublas":
        return F.linear(x, weight, bias)
    return _launch_linear(x, weight.t(), bias, tile)


def input_grad(g: Tensor, weight: Tensor) -> Tensor:
    """g W: g (M, N), weight (N, K) -> (M, K) in g's dtype."""
    tile = tiles.lookup("input_grad", g, shape_class(*weight.shape))
    if tile.provider == "cublas":
        return torch.mm(g, weight)
    return _launch_linear(g, weight, None, tile)


def linear_residual(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, layer_scale: Tensor | None, drop_path: Tensor | None, rows_per_sample: int
) -> Tensor:
    """residual + drop_path[row // rows_per_sample] * layer_scale * (x W^T + b): x (M, K), weight (N, K), residual (M, N) -> (M, N).

    In fp32 up to the result, which has residual's dtype (fp32, or x's). layer_scale (N,), drop_path (M / rows_per_sample,), or None.
    """
    (m, k), n = x.shape, weight.shape[0]
    tile = tiles.lookup("linear_residual_fwd", x, shape_class(k, n))
    if tile.provider == "cublas":
        branch = F.linear(x, weight, bias)
        branch = branch if layer_scale is None else branch * layer_scale.float()
        branch = branch if drop_path is None else branch * drop_path.float().repeat_interleave(rows_per_sample, output_size=m)[:, None]
        return (residual + branch).to(residual.dtype)
    out = torch.empty((m, n), dtype=residual.dtype, device=x.device)
    launch(
        linear_residual_kernel,
        product_grid(m, n, tile),
        x_ptr=x,
        w_ptr=weight,
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
        **product_flags(k, tile),
    )
    return out
