"""The two layers of a ViT's MLP, their activation in the epilogue of a product, forward and backward.

    linear_gelu    pre = x W^T + b, act = gelu(pre)            x (M, K), W (N, K), b (N,); pre is kept for backward only
    dgelu_matmul   dpre = (g W2) * gelu'(pre), act = gelu(pre), dbias = sum_M(dpre)     g (M, D), W2 (D, F), pre (M, F)
    gelu_bwd       dpre = dy * gelu'(pre), dbias = sum_M(dpre)                          element-wise, as is
    gelu           act = gelu(pre)

gelu stands for any activation of activations.py, given by its name there. It acts on `pre` as it is rounded for
storing, so that training, evaluation and backward agree.
dgelu_matmul writes again the activation that the second layer's weight gradient needs, so forward need not keep it.
Bias gradients are column sums. Every block of rows writes its own to an fp32 workspace, which the launchers return: a
second, small kernel adds up several of them in a fixed order, without atomics (rows.column_sums).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from ..configs import tiles
from ..launch import cdiv, launch
from ..rows import contiguous_or_none
from .activations import activate, activate_and_slope
from .product import (
    DESCRIBED,
    block_offsets,
    count_blocks,
    described,
    load_columns,
    output_block,
    product,
    product_class,
    row_product,
    split_columns,
    unfit,
)


@triton.jit
def store_gelu(pre, bias_ptr, pre_ptr, act_ptr, offs_m, cols, M, N, stride_om, ACT: tl.constexpr):
    """Epilogue of linear_gelu: adds the bias and writes pre (in training) and gelu(pre)."""
    mask = (offs_m[:, None] < M) & (cols[None, :] < N)
    at = offs_m[:, None] * stride_om + cols[None, :]
    if bias_ptr is not None:
        pre += load_columns(bias_ptr, cols, N)
    pre = pre.to(act_ptr.dtype.element_ty)
    if pre_ptr is not None:
        tl.store(pre_ptr + at, pre, mask=mask)
    tl.store(act_ptr + at, activate(pre, ACT), mask=mask)


@triton.jit(do_not_specialize=["M"])
def linear_gelu_kernel(
    a_ptr,  # x (M, K), or its descriptor
    b_ptr,  # W (N, K), or its descriptor
    bias_ptr,  # (N,) or None
    pre_ptr,  # (M, N) or None
    act_ptr,  # (M, N)
    M,
    N,
    K,
    strides,  # of x along M, K and of W along K, N
    stride_om,
    ACT: tl.constexpr,
    LOADS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SUBTILES: tl.constexpr,
    PERSISTENT: tl.constexpr,
):
    blocks = count_blocks(M, N, BLOCK_M, BLOCK_N)
    for pid in tl.range(tl.program_id(0), blocks, tl.num_programs(0), flatten=PERSISTENT):
        _, offs_m, first_n, pieces = output_block(
            pid, a_ptr, b_ptr, (M, N, K), strides, LOADS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SUBTILES
        )
        for i in tl.static_range(SUBTILES):
            cols = first_n + i * (BLOCK_N // SUBTILES) + tl.arange(0, BLOCK_N // SUBTILES)
            store_gelu(pieces[i], bias_ptr, pre_ptr, act_ptr, offs_m, cols, M, N, stride_om, ACT)


@triton.jit
def load_piece(ptr, offs_m, cols, M, N, stride):
    """Some rows and columns of a matrix (M, N), zeros outside."""
    mask = (offs_m[:, None] < M) & (cols[None, :] < N)
    return tl.load(ptr + (offs_m[:, None] * stride + cols[None, :]), mask=mask, other=0.0)


@triton.jit
def store_piece(out, x, offs_m, cols, M, N, stride, first_m, first_n, BOX: tl.constexpr):
    """Writes x to some rows and columns of a matrix (M, N), through its descriptor where it has a BOX."""
    if BOX:
        out.store([first_m, first_n], x.to(out.dtype))
    else:
        mask = (offs_m[:, None] < M) & (cols[None, :] < N)
        tl.store(out + (offs_m[:, None] * stride + cols[None, :]), x.to(out.dtype.element_ty), mask=mask)


@triton.jit
def store_dgelu(
    dact,
    pre,  # the same rows and columns of pre
    dpre_ptr,
    act_ptr,
    sums_ptr,
    index_m,
    first_m,
    first_n,
    offs_m,
    M,
    N,
    stride_om,
    ACT: tl.constexpr,
    BOX: tl.constexpr,
):
    """Epilogue of dgelu_matmul: writes dpre and, where wanted, gelu(pre) and column sums."""
    cols = first_n + tl.arange(0, dact.shape[1])
    act, slope = activate_and_slope(pre, ACT)
    if act_ptr is not None:
        store_piece(act_ptr, act, offs_m, cols, M, N, stride_om, first_m, first_n, BOX)
    dpre = dact * slope
    store_piece(dpre_ptr, dpre, offs_m, cols, M, N, stride_om, first_m, first_n, BOX)
    if sums_ptr is not None:
        tl.store(sums_ptr + index_m.to(tl.int64) * N + cols, tl.sum(dpre, 0), mask=cols < N)


@triton.jit
def dgelu_block(
    pid,
    a_ptr,
    b_ptr,
    pre_ptr,
    outputs,  # dpre_ptr, act_ptr, sums_ptr
    sizes,
    strides,
    stride_pm,
    stride_om,
    ACT: tl.constexpr,
    LOADS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SUBTILES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Block `pid` of dpre, and of act."""
    BOX: tl.constexpr = LOADS == "nn"
    COLS: tl.constexpr = BLOCK_N // SUBTILES
    M, N = sizes[0], sizes[1]
    index_m, first_m, first_n = block_offsets(pid, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    offs_m = first_m + tl.arange(0, BLOCK_M).to(tl.int64)
    pres = ()
    for i in tl.static_range(SUBTILES if EARLY else 0):
        pres = pres + (load_piece(pre_ptr, offs_m, first_n + i * COLS + tl.arange(0, COLS), M, N, stride_pm),)
    acc = product(a_ptr, b_ptr, (first_m, first_n, 0), sizes, strides, LOADS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)
    pieces = split_columns(acc, SUBTILES)
    dpre_ptr, act_ptr, sums_ptr = outputs
    for i in tl.static_range(SUBTILES):
        first = first_n + i * COLS
        if EARLY:
            pre = pres[i]
        else:
            pre = load_piece(pre_ptr, offs_m, first + tl.arange(0, COLS), M, N, stride_pm)
        store_dgelu(
            pieces[i], pre, dpre_ptr, act_ptr, sums_ptr, index_m, first_m, first, offs_m, M, N, stride_om, ACT, BOX
        )


@triton.jit(do_not_specialize=["M"])
def dgelu_matmul_kernel(
    a_ptr,  # g (M, K), or its descriptor
    b_ptr,  # W2 (K, N), or its descriptor
    pre_ptr,  # (M, N)
    dpre_ptr,  # (M, N); its descriptor where a_ptr is one
    act_ptr,  # (M, N) or None; its descriptor where a_ptr is one
    sums_ptr,  # (row blocks, N) or None
    M,
    N,
    K,
    strides,  # of g along M, K and of W2 along K, N
    stride_pm,
    stride_om,
    ACT: tl.constexpr,
    LOADS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SUBTILES: tl.constexpr,
    PERSISTENT: tl.constexpr,
):
    given = (a_ptr, b_ptr, pre_ptr, (dpre_ptr, act_ptr, sums_ptr), (M, N, K), strides, stride_pm, stride_om)
    if PERSISTENT:
        blocks = count_blocks(M, N, BLOCK_M, BLOCK_N)
        for pid in tl.range(tl.program_id(0), blocks, tl.num_programs(0), flatten=True):
            dgelu_block(pid, *given, ACT, LOADS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SUBTILES, EARLY=False)
    else:
        # pre is on its way during the main loop, if that needs no registers for addresses and the epilogue none for act
        EARLY: tl.constexpr = LOADS == "nn" and act_ptr is None
        pid = tl.program_id(0)
        dgelu_block(pid, *given, ACT, LOADS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, SUBTILES, EARLY)


@triton.jit(do_not_specialize=["M"])
def gelu_bwd_kernel(
    dy_ptr,  # (M, N), None for act alone
    pre_ptr,  # (M, N)
    dpre_ptr,  # (M, N), None for act alone
    act_ptr,  # (M, N) or None
    sums_ptr,  # (row blocks, N) or None
    M,
    N,
    stride_ym,
    stride_pm,
    stride_om,
    ACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    index_m, first_n = tl.program_id(0), tl.program_id(1) * BLOCK_N
    offs_m, cols = index_m * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64), first_n + tl.arange(0, BLOCK_N)
    if dy_ptr is None:
        act = activate(load_piece(pre_ptr, offs_m, cols, M, N, stride_pm), ACT)
        store_piece(act_ptr, act, offs_m, cols, M, N, stride_om, index_m * BLOCK_M, first_n, False)
    else:
        dy = load_piece(dy_ptr, offs_m, cols, M, N, stride_ym).to(tl.float32)
        pre, outputs = load_piece(pre_ptr, offs_m, cols, M, N, stride_pm), (dpre_ptr, act_ptr, sums_ptr)
        store_dgelu(dy, pre, *outputs, index_m, index_m * BLOCK_M, first_n, offs_m, M, N, stride_om, ACT, False)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save: bool) -> tuple[Tensor, Tensor]:
    """(gelu(pre), pre), (M, N) in x's dtype, for x (M, K), weight (N, K); pre is (0,) unless `save`."""
    (m, k), n = x.shape, weight.shape[0]
    config = tiles.lookup("linear_gelu_fwd", x, product_class(k, n, m), unfit(x, weight))
    if config.provider == "cublas":
        pre = F.linear(x, weight, bias)
        return gelu(pre, activation), pre if save else x.new_empty(0)
    act = torch.empty((m, n), dtype=x.dtype, device=x.device)
    pre = torch.empty((m, n), dtype=x.dtype, device=x.device) if save else None
    grid, shared = row_product(x, weight, config, "nt")
    pointers = dict(bias_ptr=contiguous_or_none(bias), pre_ptr=pre, act_ptr=act)
    persistent = config.provider == "persistent"
    launch(linear_gelu_kernel, grid, **shared, **pointers, stride_om=n, ACT=activation, PERSISTENT=persistent)
    return act, x.new_empty(0) if pre is None else pre


def dgelu_matmul(
    g: Tensor, weight2: Tensor, pre: Tensor, activation: str, want_bias_grad: bool, want_act: bool = True
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dpre, act, sums): dpre = (g W2) * gelu'(pre), act = gelu(pre), dbias = sum of the rows of `sums`.

    g (M, D), weight2 (D, F) as the second layer stores it, pre (M, F) -> (M, F) each in pre's dtype; sums, the column
    sums of dpre over each block of rows, (row blocks, F) in fp32. act and sums are None where not wanted.
    """
    (m, k), n = g.shape, weight2.shape[1]
    shape = product_class(k, n) + ("a" if want_act else "")
    config = tiles.lookup("dgelu_matmul", g, shape, unfit(g, weight2))
    if config.provider == "cublas":
        return gelu_bwd(torch.mm(g, weight2), pre, activation, want_bias_grad, want_act)
    dpre, act, sums = _dgelu_outputs(pre, cdiv(m, config["BLOCK_M"]), want_act, want_bias_grad)
    grid, shared = row_product(g, weight2, config, "nn")
    outputs = dict(dpre_ptr=dpre, act_ptr=act)
    persistent = config.provider == "persistent"
    if config.provider in DESCRIBED:
        piece = config["BLOCK_M"], config["BLOCK_N"] // config["SUBTILES"]
        outputs = {name: None if x is None else described(x, *piece) for name, x in outputs.items()}
    shared |= dict(pre_ptr=pre, **outputs, sums_ptr=sums, stride_pm=pre.stride(0), stride_om=n)
    launch(dgelu_matmul_kernel, grid, **shared, ACT=activation, PERSISTENT=persistent)
    return dpre, act, sums


def _dgelu_outputs(
    pre: Tensor, row_blocks: int, want_act: bool, want_bias_grad: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dpre, act, column sums of each block of rows), uninitialised; None for what is not wanted."""
    m, n = pre.shape
    dpre, act = pre.new_empty(m, n), pre.new_empty(m, n) if want_act else None
    return dpre, act, pre.new_empty(row_blocks, n, dtype=torch.float32) if want_bias_grad else None


def gelu_bwd(
    dy: Tensor, pre: Tensor, activation: str, want_bias_grad: bool, want_act: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The results of dgelu_matmul from the product dy = g W2 (M, F)."""
    m, n = pre.shape
    config = tiles.lookup("gelu_bwd", pre, f"d{n}")
    dpre, act, sums = _dgelu_outputs(pre, cdiv(m, config["BLOCK_M"]), want_act, want_bias_grad)
    _launch_gelu(dy, pre, dpre, act, sums, activation, config)
    return dpre, act, sums


def gelu(pre: Tensor, activation: str) -> Tensor:
    """act = gelu(pre), in pre's shape (M, F) and dtype; linear_gelu and dgelu_matmul write the same bits."""
    config = tiles.lookup("gelu_bwd", pre, f"d{pre.shape[1]}")
    act = pre.new_empty(pre.shape)
    _launch_gelu(None, pre, None, act, None, activation, config)
    return act


def _launch_gelu(
    dy: Tensor | None,
    pre: Tensor,
    dpre: Tensor | None,
    act: Tensor | None,
    sums: Tensor | None,
    activation: str,
    config: tiles.KernelConfig,
) -> None:
    """Launches the element-wise kernel, which writes dpre, act and sums where they are given."""
    m, n = pre.shape
    grid = cdiv(m, config["BLOCK_M"]), cdiv(n, config["BLOCK_N"])
    pointers = dict(dy_ptr=dy, pre_ptr=pre, dpre_ptr=dpre, act_ptr=act, sums_ptr=sums)
    strides = dict(stride_ym=0 if dy is None else dy.stride(0), stride_pm=pre.stride(0), stride_om=n)
    launch(gelu_bwd_kernel, grid, **pointers, M=m, N=n, **strides, ACT=activation, **config.meta)
