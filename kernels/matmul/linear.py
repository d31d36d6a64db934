"""Linear layers: the product of product.py with a bias, factors and a residual in its epilogue.

linear            out = x W^T + b                                        x (M, K), W (N, K), b (N,) -> (M, N)
linear_residual   out = res + drop_path[row // rows_per_sample] * layer_scale * (x W^T + b)
input_grad        dx = g W (+ the gradient by another layer of x)        g (M, N), W (N, K) -> (M, K)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from .. import tiles
from ..launch import launch
from ..libraries import cublaslt
from ..rows import contiguous_or_none, row_stride
from ..tiles import KernelConfig, batch_invariant, configures
from .persistent import launch_persistent, linear_epilogue
from .product import (
    CUBLAS,
    count_blocks,
    linear_configs,
    load_columns,
    load_piece,
    output_block,
    persistent_config,
    pointer_config,
    product_class,
    readable_early,
    row_product,
    times_factors,
    unfit,
)


@triton.jit
def linear_block(
    pid,
    a,  # as in linear_kernel, as is the rest
    b,
    pointers,  # bias, residual, layer scale, drop path, output
    sizes,  # M, N, K
    strides,
    rows_per_sample,
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
    """Computes and writes block `pid` of the output of linear_kernel."""
    bias_ptr, res_ptr, ls_ptr, dp_ptr, out_ptr = pointers
    M, N = sizes[0], sizes[1]
    _, offs_m, first_n, pieces = output_block(
        pid, a, b, sizes, strides, LOADS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SUBTILES
    )
    for i in tl.static_range(SUBTILES):
        cols = first_n + i * (BLOCK_N // SUBTILES) + tl.arange(0, BLOCK_N // SUBTILES)
        mask = (offs_m[:, None] < M) & (cols[None, :] < N)
        out = pieces[i]
        if bias_ptr is not None:
            out += load_columns(bias_ptr, cols, N)
        out = times_factors(out, ls_ptr, dp_ptr, rows_per_sample, offs_m, cols, M, N)
        if res_ptr is not None:
            out += load_piece(res_ptr, offs_m, cols, M, N, stride_rm).to(tl.float32)
        tl.store(out_ptr + (offs_m[:, None] * stride_om + cols[None, :]), out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def linear_kernel(
    a_ptr,  # (M, K), or its descriptor
    b_ptr,  # (K, N), or its descriptor or its transpose's
    bias_ptr,  # (N,) or None
    res_ptr,  # (M, N) or None
    ls_ptr,  # (N,) or None
    dp_ptr,  # (M / rows_per_sample,) or None
    out_ptr,  # (M, N)
    M,
    N,
    K,
    rows_per_sample,
    strides,  # of a along M, K and of b along K, N
    stride_rm,
    stride_om,
    LOADS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SUBTILES: tl.constexpr,
    PERSISTENT: tl.constexpr,
):
    pointers = (bias_ptr, res_ptr, ls_ptr, dp_ptr, out_ptr)
    operands = (a_ptr, b_ptr, pointers, (M, N, K), strides, rows_per_sample, stride_rm, stride_om)
    if PERSISTENT:  # the loop costs registers, which masked operands do not leave
        blocks = count_blocks(M, N, BLOCK_M, BLOCK_N)
        for pid in tl.range(tl.program_id(0), blocks, tl.num_programs(0), flatten=True):
            linear_block(pid, *operands, LOADS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SUBTILES)
    else:
        linear_block(tl.program_id(0), *operands, LOADS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SUBTILES)


FEW_ROWS = 4096  # linear_residual has few rows below it: "768x3072f"
configures("linear_fwd")(linear_configs)
configures("input_grad")(linear_configs)


@configures("linear_residual_fwd")
def _residual_configs(shape: str, bits: str, sm: int) -> list[KernelConfig]:
    """fc2 and its residual: flattened 329 us, measured as linear_gelu in mlp.py was; cuBLASLt 320.

    Descriptors and a program for each block took 415. proj and its residual took 132 (by descriptors 139, by cuBLASLt
    116). Blocks of 128 x 128 run two programs on a multiprocessor, one's epilogue under the other's product. Flattened,
    they were faster only where 256 columns do not fit, as in S/16: fc2 and its residual 271 us (in blocks of 256 305),
    proj 105 (113). A residual read ahead would leave room for one program.
    Few rows have too few blocks: one image took B/16 850 us, 544 with cuBLAS here (bench/results/h200/few_rows.json).
    """
    best = persistent_config(4, columns=128, ahead=0) if shape.endswith("x384") else persistent_config(4)
    best = CUBLAS if shape.endswith("f") else best
    return linear_configs(shape, bits, sm, best if sm == 90 and bits == "16" else pointer_config(bits, sm), pieces=4)


def _launch_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    config: KernelConfig,
    kind: str,
    residual: Tensor | None = None,
    layer_scale: Tensor | None = None,
    drop_path: Tensor | None = None,
    rows_per_sample: int = 1,
) -> Tensor:
    """x (M, K) times weight, (K, N) for kind "nn" or (N, K) for "nt", and the epilogue -> (M, N)."""
    m, n = x.shape[0], weight.shape[0 if kind == "nt" else 1]
    out = torch.empty((m, n), dtype=(x if residual is None else residual).dtype, device=x.device)
    factors = contiguous_or_none(layer_scale), contiguous_or_none(drop_path)
    stride_rm = row_stride(residual)
    if config.provider == "persistent":
        # Dividing rows into samples takes the registers that a residual read early would lie in.
        early = residual if config["AHEAD"] and drop_path is None and readable_early(residual) else None
        # Triton compiles anew for what divides these numbers, so those that nothing reads are 0.
        late = (residual, stride_rm) if early is None else (None, 0)
        others = late[0], *factors, 0 if drop_path is None else rows_per_sample, late[1]
        launch_persistent(x, weight, config, kind, linear_epilogue, out, None, bias, early, others)
        return out
    grid, shared = row_product(x, weight, config, kind)
    shared |= dict(bias_ptr=contiguous_or_none(bias), res_ptr=residual, ls_ptr=factors[0], dp_ptr=factors[1])
    sizes = dict(rows_per_sample=rows_per_sample, stride_rm=stride_rm, stride_om=n)
    launch(linear_kernel, grid, **shared, out_ptr=out, **sizes, PERSISTENT=config.provider == "flattened")
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: x (M, K), weight (N, K) -> (M, N) in x's dtype."""
    n, k = weight.shape
    config = tiles.lookup("linear_fwd", x, product_class(k, n), unfit(x, weight, columns=n))
    if config.provider == "cublas":
        return F.linear(x, weight, bias)
    return _launch_linear(x, weight, bias, config, "nt")


def input_grad(g: Tensor, weight: Tensor, onto: Tensor | None = None) -> Tensor:
    """g W (+ onto (M, K), which it may overwrite): g (M, N), weight (N, K) -> (M, K) in g's dtype."""
    config = tiles.lookup("input_grad", g, product_class(*weight.shape), unfit(g, weight))
    if config.provider == "cublas":
        return torch.mm(g, weight) if onto is None else onto.addmm_(g, weight)
    return _launch_linear(g, weight, None, config, "nn", onto)


def linear_residual(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    layer_scale: Tensor | None,
    drop_path: Tensor | None,
    rows_per_sample: int,
) -> Tensor:
    """residual + drop_path[row // rows_per_sample] * layer_scale * (x W^T + b): x (M, K) -> (M, N).

    weight (N, K), residual (M, N), layer_scale (N,) or None, drop_path (M / rows_per_sample,) or None. The kernel
    computes in fp32 and rounds once, to residual's dtype (fp32, or x's).
    """
    factors = layer_scale is not None or drop_path is not None
    shape = product_class(x.shape[1], weight.shape[0]) + "f" * (len(x) < FEW_ROWS and not batch_invariant())
    without = unfit(x, weight, columns=weight.shape[0]) + (("cublaslt",) if factors else ())
    config = tiles.lookup("linear_residual_fwd", x, shape, without)
    if config.provider == "cublaslt":
        return cublaslt.linear_residual(x, weight, bias, residual)
    if config.provider == "cublas":
        branch = F.linear(x, weight, bias)
        if layer_scale is not None:
            branch = branch * layer_scale.float()
        if drop_path is not None:
            branch = branch * drop_path.float().repeat_interleave(rows_per_sample, output_size=len(x))[:, None]
        return (residual + branch).to(residual.dtype)
    return _launch_linear(x, weight, bias, config, "nt", residual, layer_scale, drop_path, rows_per_sample)
