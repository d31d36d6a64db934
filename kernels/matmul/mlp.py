"""The two layers of a ViT's MLP, their activation in the epilogue of a product, forward and backward.

    linear_gelu    pre = x W^T + b, act = gelu(pre)            x (M, K), W (N, K), b (N,); pre is kept for backward only
    dgelu_matmul   dpre = (g W2) * gelu'(pre), act = gelu(pre), dbias = sum_M(dpre)     g (M, D), W2 (D, F), pre (M, F)
    gelu_bwd       dpre = dy * gelu'(pre), dbias = sum_M(dpre)                          element-wise, as is
    gelu           act = gelu(pre)

gelu stands for any activation of activations.py, given by its name there. It acts on `pre` as it is rounded for
storing, so that training, evaluation and backward agree.
In place of `pre`, forward may keep gelu'(pre), rounded, for backward: its "activation" is then "slope", which
multiplies by what was kept. Neither the activation nor `pre` can be computed from that again.
dgelu_matmul writes again the activation that the second layer's weight gradient needs, so forward need not keep it.
Bias gradients are column sums. Every block of rows writes its own to an fp32 workspace, which the launchers return: a
second, small kernel adds up several of them in a fixed order, without atomics (rows.column_sums).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from .. import tiles
from ..launch import cdiv, launch
from ..rows import contiguous_or_none, row_stride
from .activations import activate, activate_and_kept_slope, activate_and_slope, times_slope
from .persistent import launch_persistent, readable_early, together
from .product import (
    DESCRIBED,
    block_offsets,
    count_blocks,
    described,
    load_columns,
    load_piece,
    output_block,
    product,
    product_class,
    row_product,
    split_columns,
    unfit,
)


@triton.jit
def store_gelu(pre, bias_ptr, kept_ptr, act_ptr, offs_m, cols, M, N, stride_om, ACT: tl.constexpr, SLOPE: tl.constexpr):
    """Epilogue of linear_gelu: adds the bias; writes gelu(pre) and, in training, pre or the SLOPE."""
    mask = (offs_m[:, None] < M) & (cols[None, :] < N)
    at = offs_m[:, None] * stride_om + cols[None, :]
    if bias_ptr is not None:
        pre += load_columns(bias_ptr, cols, N)
    pre = pre.to(act_ptr.dtype.element_ty)
    if SLOPE:
        act, slope = activate_and_kept_slope(pre, ACT)
        tl.store(kept_ptr + at, slope, mask=mask)
    else:
        act = activate(pre, ACT)
        if kept_ptr is not None:
            tl.store(kept_ptr + at, pre, mask=mask)
    tl.store(act_ptr + at, act, mask=mask)


@triton.jit
def gelu_epilogue(acc, early, out, kept, others, at, ACT: tl.constexpr):
    """Epilogue of the persistent kernel for linear_gelu: writes gelu(pre) and, where it is kept, pre."""
    _, first_m, first_n, _, _ = at
    pre = acc.to(out.dtype)
    if kept is not None:
        kept.store([first_m, first_n], pre)
    out.store([first_m, first_n], activate(pre, ACT))


@triton.jit
def gelu_slope_epilogue(acc, early, out, kept, others, at, ACT: tl.constexpr):
    """The same, which keeps the activation's slope."""
    _, first_m, first_n, _, _ = at
    act, slope = activate_and_kept_slope(acc.to(out.dtype), ACT)
    kept.store([first_m, first_n], slope)
    out.store([first_m, first_n], act)


@triton.jit(do_not_specialize=["M"])
def linear_gelu_kernel(
    a_ptr,  # x (M, K), or its descriptor
    b_ptr,  # W (N, K), or its descriptor
    bias_ptr,  # (N,) or None
    kept_ptr,  # (M, N) or None
    act_ptr,  # (M, N)
    M,
    N,
    K,
    strides,  # of x along M, K and of W along K, N
    stride_om,
    ACT: tl.constexpr,
    SLOPE: tl.constexpr,
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
            store_gelu(pieces[i], bias_ptr, kept_ptr, act_ptr, offs_m, cols, M, N, stride_om, ACT, SLOPE)


@triton.jit
def store_piece(out, x, offs_m, cols, M, N, stride, first_m, first_n, BOX: tl.constexpr):
    """Writes x to some rows and columns of a matrix (M, N), through its descriptor where it has a BOX."""
    if BOX:
        out.store([first_m, first_n], x.to(out.dtype))
    else:
        mask = (offs_m[:, None] < M) & (cols[None, :] < N)
        tl.store(out + (offs_m[:, None] * stride + cols[None, :]), x.to(out.dtype.element_ty), mask=mask)


@triton.jit
def dgelu(dact, pre, ACT: tl.constexpr, WITH_ACT: tl.constexpr):
    """(gelu(pre), dpre) in pre's dtype, of dact in fp32; for "slope", `pre` is the slope."""
    if ACT == "slope":
        return pre, times_slope(dact, pre)
    else:
        act, slope = activate_and_slope(pre, ACT, ALONE=not WITH_ACT)
        return act, (dact * slope).to(pre.dtype)


@triton.jit
def store_column_sums(x, sums_ptr, index_m, first_n, N, BOX: tl.constexpr):
    """Writes the column sums of x, as it was rounded, to row `index_m` of the workspace.

    Where x has left by a descriptor (BOX), they are a product with ones, whose 16 rows are equal. This takes a quarter
    of an instruction an element in place of six of shuffles and additions (counted on sm_90); elsewhere it spills.
    """
    cols = first_n + tl.arange(0, x.shape[1])
    row_ptr = sums_ptr + index_m.to(tl.int64) * N
    if BOX:
        total, row = tl.dot(tl.full((16, x.shape[0]), 1.0, x.dtype), x), tl.arange(0, 16)[:, None]
        tl.store(row_ptr + (cols[None, :] + 0 * row), total, mask=(row == 0) & (cols[None, :] < N))
    else:
        tl.store(row_ptr + cols, tl.sum(x.to(tl.float32), 0), mask=cols < N)


@triton.jit
def dgelu_epilogue(dact, pre, dpre_out, act_out, others, at, ACT: tl.constexpr):
    """Epilogue of dgelu_matmul's persistent loop: writes dpre, its column sums and, if wanted, act."""
    index_m, first_m, first_n, _, N = at
    act, dpre = dgelu(dact, pre, ACT, act_out is not None)
    if act_out is not None:
        act, dpre = together(act, dpre)
        act_out.store([first_m, first_n], act)
    dpre_out.store([first_m, first_n], dpre)
    store_column_sums(dpre, others[0], index_m, first_n, N, True)


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
    act, dpre = dgelu(dact, pre, ACT, act_ptr is not None)
    if act_ptr is not None:
        store_piece(act_ptr, act, offs_m, cols, M, N, stride_om, first_m, first_n, BOX)
    store_piece(dpre_ptr, dpre, offs_m, cols, M, N, stride_om, first_m, first_n, BOX)
    if sums_ptr is not None:
        store_column_sums(dpre, sums_ptr, index_m, first_n, N, BOX)


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
):
    BOX: tl.constexpr = LOADS == "nn"
    COLS: tl.constexpr = BLOCK_N // SUBTILES
    # pre is on its way during the main loop, if that needs no registers for addresses and the epilogue none for act
    EARLY: tl.constexpr = BOX and act_ptr is None
    sizes = M, N, K
    index_m, first_m, first_n = block_offsets(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    offs_m = first_m + tl.arange(0, BLOCK_M).to(tl.int64)
    pres = ()
    for i in tl.static_range(SUBTILES if EARLY else 0):
        pres = pres + (load_piece(pre_ptr, offs_m, first_n + i * COLS + tl.arange(0, COLS), M, N, stride_pm),)
    acc = product(a_ptr, b_ptr, (first_m, first_n), sizes, strides, LOADS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)
    pieces = split_columns(acc, SUBTILES)
    for i in tl.static_range(SUBTILES):
        first = first_n + i * COLS
        if EARLY:
            pre = pres[i]
        else:
            pre = load_piece(pre_ptr, offs_m, first + tl.arange(0, COLS), M, N, stride_pm)
        outputs = dpre_ptr, act_ptr, sums_ptr
        store_dgelu(pieces[i], pre, *outputs, index_m, first_m, first, offs_m, M, N, stride_om, ACT, BOX)


@triton.jit(do_not_specialize=["M"])
def gelu_bwd_kernel(
    dy_ptr,  # (M, N), None for act, and gelu'(pre), alone
    pre_ptr,  # (M, N)
    dpre_ptr,  # (M, N), of gelu'(pre) where dy_ptr is None; None for act alone
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
    pre = load_piece(pre_ptr, offs_m, cols, M, N, stride_pm)
    if dy_ptr is None:
        act, slope = activate_and_kept_slope(pre, ACT)
        store_piece(act_ptr, act, offs_m, cols, M, N, stride_om, index_m * BLOCK_M, first_n, False)
        if dpre_ptr is not None:
            store_piece(dpre_ptr, slope, offs_m, cols, M, N, stride_om, index_m * BLOCK_M, first_n, False)
    else:
        dy = load_piece(dy_ptr, offs_m, cols, M, N, stride_ym).to(tl.float32)
        outputs = dpre_ptr, act_ptr, sums_ptr
        store_dgelu(dy, pre, *outputs, index_m, index_m * BLOCK_M, first_n, offs_m, M, N, stride_om, ACT, False)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save: str) -> tuple[Tensor, Tensor]:
    """(gelu(pre), what is kept), (M, N) in x's dtype, for x (M, K), weight (N, K).

    save: "pre", "slope" for gelu'(pre), or "" for nothing, which is (0,).
    """
    (m, k), n = x.shape, weight.shape[0]
    config = tiles.lookup("linear_gelu_fwd", x, product_class(k, n, m), unfit(x, weight, columns=n))
    if config.provider == "cublas":
        pre = F.linear(x, weight, bias)
        slope = torch.empty_like(pre) if save == "slope" else None
        return gelu(pre, activation, slope), slope if save == "slope" else pre if save else x.new_empty(0)
    act = torch.empty((m, n), dtype=x.dtype, device=x.device)
    kept = torch.empty((m, n), dtype=x.dtype, device=x.device) if save else None
    if config.provider == "persistent":
        epilogue = gelu_slope_epilogue if save == "slope" else gelu_epilogue
        launch_persistent(x, weight, config, "nt", epilogue, act, kept, bias, activation=activation)
    else:
        grid, shared = row_product(x, weight, config, "nt")
        shared |= dict(bias_ptr=contiguous_or_none(bias), kept_ptr=kept, act_ptr=act, stride_om=n)
        flags = dict(ACT=activation, SLOPE=save == "slope", PERSISTENT=config.provider == "flattened")
        launch(linear_gelu_kernel, grid, **shared, **flags)
    return act, x.new_empty(0) if kept is None else kept


def dgelu_matmul(
    g: Tensor, weight2: Tensor, pre: Tensor, activation: str, want_bias_grad: bool, want_act: bool = True
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dpre, act, sums): dpre = (g W2) * gelu'(pre), act = gelu(pre), dbias = sum of the rows of `sums`.

    g (M, D), weight2 (D, F) as the second layer stores it, pre (M, F) -> (M, F) each in pre's dtype; sums, the column
    sums of dpre over each block of rows, (row blocks, F) in fp32. act and sums are None where not wanted.
    """
    (m, k), n = g.shape, weight2.shape[1]
    shape = product_class(k, n) + ("s" if activation == "slope" else "a" if want_act else "")
    without = unfit(g, weight2) or (() if readable_early(pre) else ("persistent",))
    config = tiles.lookup("dgelu_matmul", g, shape, without)
    if config.provider == "cublas":
        return gelu_bwd(torch.mm(g, weight2), pre, activation, want_bias_grad, want_act)
    persistent = config.provider == "persistent"
    dpre, act, sums = _dgelu_outputs(pre, cdiv(m, config["BLOCK_M"]), want_act, want_bias_grad or persistent)
    if persistent:  # without sums, which cost little, the loop spills (Triton 3.6 and 3.9)
        launch_persistent(g, weight2, config, "nn", dgelu_epilogue, dpre, act, None, pre, (sums,), activation)
        return dpre, act, sums if want_bias_grad else None
    grid, shared = row_product(g, weight2, config, "nn")
    outputs = dict(dpre_ptr=dpre, act_ptr=act)
    if config.provider in DESCRIBED:
        piece = config["BLOCK_M"], config["BLOCK_N"] // config["SUBTILES"]
        outputs = {name: None if x is None else described(x, *piece) for name, x in outputs.items()}
    shared |= dict(pre_ptr=pre, **outputs, sums_ptr=sums, stride_pm=pre.stride(0), stride_om=n)
    launch(dgelu_matmul_kernel, grid, **shared, ACT=activation)
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
    _launch_gelu(config, activation, pre, dy_ptr=dy, dpre_ptr=dpre, act_ptr=act, sums_ptr=sums)
    return dpre, act, sums


def gelu(pre: Tensor, activation: str, slope: Tensor | None = None) -> Tensor:
    """act = gelu(pre), in pre's shape (M, F) and dtype; linear_gelu and dgelu_matmul write the same bits.

    slope (M, F): where it is given, gelu'(pre) is written into it.
    """
    config = tiles.lookup("gelu_bwd", pre, f"d{pre.shape[1]}")
    act = pre.new_empty(pre.shape)
    _launch_gelu(config, activation, pre, dy_ptr=None, dpre_ptr=slope, act_ptr=act, sums_ptr=None)
    return act


def _launch_gelu(config: tiles.KernelConfig, activation: str, pre: Tensor, **pointers: Tensor | None) -> None:
    """Launches the element-wise kernel, which writes dpre, act and sums where they are given."""
    m, n = pre.shape
    grid = cdiv(m, config["BLOCK_M"]), cdiv(n, config["BLOCK_N"])
    strides = dict(stride_ym=row_stride(pointers["dy_ptr"]), stride_pm=pre.stride(0), stride_om=n)
    launch(gelu_bwd_kernel, grid, pre_ptr=pre, **pointers, M=m, N=n, **strides, ACT=activation, **config.meta)
