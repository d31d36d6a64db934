"""The two layers before a gated MLP's last (Shazeer, 2020), in one product; forward and backward.

    gated_linear    up = x Wu^T + bu, gate = x Wg^T + bg, h = act(gate) * up        x (M, K), both weights (N, K)
    dgated_matmul   dh = g W, dup = dh * act(gate), dgate = dh * up * act'(gate)    g (M, D), W (D, F), up, gate (M, F)
    gated_bwd       dup and dgate from dh (M, F), if a norm comes before the last layer     element-wise

act is any activation of activations.py; it acts on `gate`, and the product takes `up`, as they are rounded for storing.
Forward reads x once for both products: each program has an accumulator for the columns of `up` and one for the same
columns of `gate`. Its epilogue writes h and, in training only, `up` and `gate`. The two weights are read where they
lie, halves of one tensor or not. Backward is like mlp.py's: the epilogue of the product of g and the last layer's
weight reads up and gate. It writes dup, dgate, h again (for the last layer's weight gradient, so that forward need not
keep it) and, into a workspace, the column sums for the gradients of the two biases.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import tiles
from ..launch import cdiv, launch
from ..rows import contiguous_or_none
from ..tiles import KernelConfig, configures
from .activations import wide_activate, wide_activate_and_slope
from .product import (
    CUBLAS,
    DESCRIBED,
    block_offsets,
    described,
    divides_k,
    load_columns,
    output_block,
    pointer_config,
    product_class,
    product_config,
    row_product,
    split_columns,
    unfit,
)


@triton.jit
def two_products(
    a,  # (M, K): a pointer or a descriptor
    up,  # (N, K): a pointer or a descriptor
    gate,  # as `up`
    first_m,
    first_n,
    sizes,  # M, N, K
    strides,  # of the rows of a, up and gate
    LOADS: tl.constexpr,  # as `row_product` says
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Computes BLOCK_M rows and BLOCK_N columns of A Up^T and of A Gate^T in fp32; zeros outside."""
    K = sizes[2]
    up_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    gate_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if LOADS == "nt":
        for k in range(0, K, BLOCK_K):
            a_block = a.load([first_m, k])
            up_acc = tl.dot(a_block, tl.trans(up.load([first_n, k])), up_acc, input_precision=PRECISION)
            gate_acc = tl.dot(a_block, tl.trans(gate.load([first_n, k])), gate_acc, input_precision=PRECISION)
    else:
        offs_m = first_m + tl.arange(0, BLOCK_M).to(tl.int64)
        offs_n = first_n + tl.arange(0, BLOCK_N).to(tl.int64)
        offs_k = tl.arange(0, BLOCK_K)
        a_ptrs = a + (offs_m[:, None] * strides[0] + offs_k[None, :])
        up_ptrs = up + (offs_k[:, None] + offs_n[None, :] * strides[1])
        gate_ptrs = gate + (offs_k[:, None] + offs_n[None, :] * strides[2])
        mask_m, mask_n = offs_m[:, None] < sizes[0], offs_n[None, :] < sizes[1]
        for k in range(0, K, BLOCK_K):
            if LOADS == "even":
                a_block = tl.load(a_ptrs, mask=mask_m, other=0.0)
                up_block = tl.load(up_ptrs, mask=mask_n, other=0.0)
                gate_block = tl.load(gate_ptrs, mask=mask_n, other=0.0)
            else:
                a_block = tl.load(a_ptrs, mask=mask_m & (offs_k[None, :] < K - k), other=0.0)
                up_block = tl.load(up_ptrs, mask=mask_n & (offs_k[:, None] < K - k), other=0.0)
                gate_block = tl.load(gate_ptrs, mask=mask_n & (offs_k[:, None] < K - k), other=0.0)
            up_acc = tl.dot(a_block, up_block, up_acc, input_precision=PRECISION)
            gate_acc = tl.dot(a_block, gate_block, gate_acc, input_precision=PRECISION)
            a_ptrs += BLOCK_K
            up_ptrs += BLOCK_K
            gate_ptrs += BLOCK_K
    return up_acc, gate_acc


@triton.jit(do_not_specialize=["M"])
def gated_linear_kernel(
    a_ptr,  # x (M, K), or its descriptor
    up_weight_ptr,  # (N, K), or its descriptor
    gate_weight_ptr,  # (N, K), or its descriptor
    up_bias_ptr,  # (N,) or None
    gate_bias_ptr,  # (N,) or None
    up_ptr,  # (M, N) or None
    gate_ptr,  # (M, N), None if up_ptr is
    h_ptr,  # (M, N)
    M,
    N,
    K,
    strides,  # of the rows of x and of both weights
    stride_om,
    ACT: tl.constexpr,
    LOADS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SUBTILES: tl.constexpr,
):
    _, first_m, first_n = block_offsets(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    matrices = a_ptr, up_weight_ptr, gate_weight_ptr
    sums = two_products(*matrices, first_m, first_n, (M, N, K), strides, LOADS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)
    ups, gates = split_columns(sums[0], SUBTILES), split_columns(sums[1], SUBTILES)
    offs_m = first_m + tl.arange(0, BLOCK_M).to(tl.int64)
    dtype = h_ptr.dtype.element_ty
    for i in tl.static_range(SUBTILES):
        cols = first_n + i * (BLOCK_N // SUBTILES) + tl.arange(0, BLOCK_N // SUBTILES)
        mask = (offs_m[:, None] < M) & (cols[None, :] < N)
        at = offs_m[:, None] * stride_om + cols[None, :]
        up, gate = ups[i], gates[i]
        if up_bias_ptr is not None:
            up += load_columns(up_bias_ptr, cols, N)
        if gate_bias_ptr is not None:
            gate += load_columns(gate_bias_ptr, cols, N)
        up, gate = up.to(dtype), gate.to(dtype)
        if up_ptr is not None:
            tl.store(up_ptr + at, up, mask=mask)
            tl.store(gate_ptr + at, gate, mask=mask)
        h = wide_activate(gate, ACT) * up.to(tl.float32)
        tl.store(h_ptr + at, h.to(dtype), mask=mask)


@triton.jit
def store_dgated(
    dh, in_ptrs, out_ptrs, sum_ptrs, index_m, offs_m, cols, M, N, in_strides, stride_om, ACT: tl.constexpr
):
    """Writes dup, dgate, h and column sums for a piece dh of g W; pointers as in dgated_matmul_kernel."""
    mask = (offs_m[:, None] < M) & (cols[None, :] < N)
    at = offs_m[:, None] * stride_om + cols[None, :]
    dtype = out_ptrs[0].dtype.element_ty
    gate = tl.load(in_ptrs[1] + (offs_m[:, None] * in_strides[1] + cols[None, :]), mask=mask, other=0.0)
    act, slope = wide_activate_and_slope(gate, ACT)
    up = tl.load(in_ptrs[0] + (offs_m[:, None] * in_strides[0] + cols[None, :]), mask=mask, other=0.0).to(tl.float32)
    if out_ptrs[2] is not None:
        tl.store(out_ptrs[2] + at, (act * up).to(dtype), mask=mask)
    dup = dh * act
    tl.store(out_ptrs[0] + at, dup.to(dtype), mask=mask)
    if sum_ptrs[0] is not None:
        tl.store(sum_ptrs[0] + index_m.to(tl.int64) * N + cols, tl.sum(dup, 0), mask=cols < N)
    dgate = dh * up * slope
    tl.store(out_ptrs[1] + at, dgate.to(dtype), mask=mask)
    if sum_ptrs[1] is not None:
        tl.store(sum_ptrs[1] + index_m.to(tl.int64) * N + cols, tl.sum(dgate, 0), mask=cols < N)


@triton.jit(do_not_specialize=["M"])
def dgated_matmul_kernel(
    a_ptr,  # g (M, K), or its descriptor
    b_ptr,  # W (K, N), or its descriptor
    in_ptrs,  # up and gate (M, N)
    out_ptrs,  # dup, dgate, and h or None: (M, N)
    sum_ptrs,  # of dup and of dgate: (row blocks, N) or None
    M,
    N,
    K,
    strides,  # of g along M, K and of W along K, N
    in_strides,  # of the rows of up and gate
    stride_om,
    ACT: tl.constexpr,
    LOADS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SUBTILES: tl.constexpr,
):
    operands, pid = (a_ptr, b_ptr, (M, N, K), strides), tl.program_id(0)
    index_m, offs_m, first_n, pieces = output_block(
        pid, *operands, LOADS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SUBTILES
    )
    pointers = in_ptrs, out_ptrs, sum_ptrs
    for i in tl.static_range(SUBTILES):
        cols = first_n + i * (BLOCK_N // SUBTILES) + tl.arange(0, BLOCK_N // SUBTILES)
        store_dgated(pieces[i], *pointers, index_m, offs_m, cols, M, N, in_strides, stride_om, ACT)


@triton.jit(do_not_specialize=["M"])
def gated_bwd_kernel(
    dh_ptr,  # (M, N)
    in_ptrs,  # up and gate (M, N)
    out_ptrs,  # dup, dgate, and h or None: (M, N)
    sum_ptrs,  # of dup and of dgate: (row blocks, N) or None
    M,
    N,
    stride_hm,
    in_strides,  # of the rows of up and gate
    stride_om,
    ACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    index_m = tl.program_id(0)
    offs_m = index_m * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (offs_m[:, None] < M) & (cols[None, :] < N)
    dh = tl.load(dh_ptr + (offs_m[:, None] * stride_hm + cols[None, :]), mask=mask, other=0.0).to(tl.float32)
    store_dgated(dh, in_ptrs, out_ptrs, sum_ptrs, index_m, offs_m, cols, M, N, in_strides, stride_om, ACT)


def _gated(best: KernelConfig, widest: KernelConfig, bits: str, sm: int) -> list[KernelConfig]:
    """`best`, and `widest` by descriptors, which need no masks, so that it suits every shape."""
    return [best, *([replace(widest, provider="tma")] if bits == "16" and sm in (90, 100) else [])]


@configures("gated_linear_fwd")
def _gated_linear_configs(shape: str, bits: str, sm: int) -> list[KernelConfig]:
    """Two products at once have blocks like one product's, with half the columns for each."""
    widest = product_config(8, 3, 128, 64, 64, 2)
    half = widest if sm in (90, 100) and divides_k(shape) else product_config(4, 3, 64, 64, 32, 2)
    # In fp32 each of these two spills on the GPUs of the other one, with Triton 3.6 or with 3.9.
    return _gated(half if bits == "16" else product_config(4, 3, 64, 32, 32, 1 if sm == 120 else 2), widest, bits, sm)


@configures("dgated_matmul")
def _dgated_configs(shape: str, bits: str, sm: int) -> list[KernelConfig]:
    """The epilogue reads and writes pairs of matrices, so blocks are narrower or cut into more pieces."""
    half = product_config(8, 3, 128, 128, 64, 8) if sm in (90, 100) else product_config(4, 3, 128, 64, 32, 4)
    return [*_gated(half if bits == "16" else pointer_config(bits, sm), half, bits, sm), CUBLAS]


configures("gated_bwd")(lambda *_: [tiles.config(4, 1, BLOCK_M=64, BLOCK_N=32)])


def gated_linear(
    x: Tensor,
    up_weight: Tensor,
    up_bias: Tensor | None,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    activation: str,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(h, up, gate), (M, N) in x's dtype, for x (M, K), weights (N, K); up, gate are (0,) unless `save`."""
    (m, k), n, empty = x.shape, up_weight.shape[0], x.new_empty(0)
    config = tiles.lookup("gated_linear_fwd", x, product_class(k, n), unfit(x, up_weight, gate_weight))
    grid, shared = row_product(x, up_weight, config, "nt")
    up_ptr = shared.pop("b_ptr")
    gate_ptr = described(gate_weight, *up_ptr.block_shape) if config.provider in DESCRIBED else gate_weight
    shared |= dict(strides=(x.stride(0), up_weight.stride(0), gate_weight.stride(0)))
    h, *saved = (torch.empty((m, n), dtype=x.dtype, device=x.device) for _ in range(3 if save else 1))
    up, gate = saved or (None, None)
    shared |= dict(up_weight_ptr=up_ptr, gate_weight_ptr=gate_ptr, stride_om=n, ACT=activation)
    biases = dict(up_bias_ptr=contiguous_or_none(up_bias), gate_bias_ptr=contiguous_or_none(gate_bias))
    launch(gated_linear_kernel, grid, **shared, **biases, up_ptr=up, gate_ptr=gate, h_ptr=h)
    return h, *(saved or (empty, empty))


# (dup, dgate, h, workspaces of the column sums of dup and of dgate): h and both sums are None where not wanted.
Gradients = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def _outputs(up: Tensor, row_blocks: int, want_h: bool, want_sums: bool) -> dict:
    """A launch's arguments for its outputs: new tensors, None for those not wanted, and their stride."""
    m, n = up.shape
    out = up.new_empty(m, n), up.new_empty(m, n), up.new_empty(m, n) if want_h else None
    sums = tuple(up.new_empty(row_blocks, n, dtype=torch.float32) if want_sums else None for _ in range(2))
    return dict(out_ptrs=out, sum_ptrs=sums, stride_om=n)


def dgated_matmul(
    g: Tensor, weight: Tensor, up: Tensor, gate: Tensor, activation: str, want_sums: bool, want_h: bool = True
) -> Gradients:
    """(dup, dgate, h, two workspaces), as at the top; h and workspaces are None where not wanted.

    g (M, D), weight (D, F) as the last layer stores it, up and gate (M, F) -> (M, F) each in up's dtype. Workspaces
    (row blocks, F) are in fp32; the sums of their rows are the gradients of the biases.
    """
    (m, k), n = g.shape, weight.shape[1]
    config = tiles.lookup("dgated_matmul", g, product_class(k, n), unfit(g, weight))
    if config.provider == "cublas":
        return gated_bwd(torch.mm(g, weight), up, gate, activation, want_sums, want_h)
    pointers = _outputs(up, cdiv(m, config["BLOCK_M"]), want_h, want_sums)
    grid, shared = row_product(g, weight, config, "nn")
    inputs = dict(in_ptrs=(up, gate), in_strides=(up.stride(0), gate.stride(0)))
    launch(dgated_matmul_kernel, grid, **shared, **pointers, **inputs, ACT=activation)
    return *pointers["out_ptrs"], *pointers["sum_ptrs"]


def gated_bwd(
    dh: Tensor, up: Tensor, gate: Tensor, activation: str, want_sums: bool, want_h: bool = False
) -> Gradients:
    """The results of dgated_matmul, from the gradient dh (M, F) of h in place of g and W."""
    m, n = up.shape
    config = tiles.lookup("gated_bwd", up, f"d{n}")
    blocks = cdiv(m, config["BLOCK_M"])
    pointers = _outputs(up, blocks, want_h, want_sums)
    strides = dict(stride_hm=dh.stride(0), in_strides=(up.stride(0), gate.stride(0)))
    grid = blocks, cdiv(n, config["BLOCK_N"])
    flags = dict(ACT=activation, **config.meta)
    launch(gated_bwd_kernel, grid, dh_ptr=dh, in_ptrs=(up, gate), **pointers, **strides, M=m, N=n, **flags)
    return *pointers["out_ptrs"], *pointers["sum_ptrs"]
