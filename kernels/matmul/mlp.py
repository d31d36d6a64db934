"""The two layers of a ViT's MLP, their activation in the epilogue of a product, forward and backward.

    linear_gelu    pre = x W^T + b, act = gelu(pre)            x (M, K), W (N, K), b (N,); pre is kept for backward only
    dgelu_matmul   dpre = (g W2) * gelu'(pre), act = gelu(pre), dbias = sum_M(dpre)     g (M, D), W2 (D, F), pre (M, F)

gelu stands for any activation of activations.py, given by its name there. It acts on `pre` as it is rounded for
storing, so that training, evaluation and backward agree.
In place of `pre`, forward may keep gelu'(pre), rounded, for backward: its ACT is then "slope", which
multiplies by what was kept. Neither the activation nor `pre` can be computed from that again.
dgelu_matmul writes again the activation that the second layer's weight gradient needs, so forward need not keep it.
Bias gradients are column sums. Every block of rows writes its own to an fp32 workspace, which the launchers return: a
second, small kernel adds up several of them in a fixed order, without atomics (rows.column_sums). Where cuBLAS makes
the product, the element-wise kernels of gelu.py do the rest.
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
from .activations import activate, activate_and_kept_slope, dgelu
from .gelu import gelu_bwd
from .persistent import dgelu_epilogue, gelu_epilogue, gelu_slope_epilogue, launch_persistent
from .product import (
    CUBLAS,
    DESCRIBED,
    WIDE,
    block_offsets,
    count_blocks,
    described,
    divides_k,
    linear_configs,
    load_columns,
    load_piece,
    output_block,
    persistent_config,
    pointer_config,
    product,
    product_class,
    product_config,
    readable_early,
    row_product,
    split_columns,
    store_column_sums,
    store_piece,
    unfit,
)


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
            mask = (offs_m[:, None] < M) & (cols[None, :] < N)
            at = offs_m[:, None] * stride_om + cols[None, :]
            pre = pieces[i]
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
        cols = first + tl.arange(0, COLS)
        act, dpre = dgelu(pieces[i], pre, ACT, act_ptr is not None)
        if act_ptr is not None:
            store_piece(act_ptr, act, offs_m, cols, M, N, stride_om, first_m, first, BOX)
        store_piece(dpre_ptr, dpre, offs_m, cols, M, N, stride_om, first_m, first, BOX)
        if sums_ptr is not None:
            store_column_sums(dpre, sums_ptr, index_m, first, N, BOX)


@configures("linear_gelu_fwd")
def _linear_gelu_configs(shape: str, bits: str, sm: int) -> list[KernelConfig]:
    """fc1 + GELU: 482 us in two loops that Triton flattens, on an H100 at ViT-B/16, batch 256.

    The pointers took 563, descriptors 517, cuBLAS and a GELU 560. One loop ("persistent") issues a third to a half
    fewer instructions outside the product (counted, not timed; persistent.py).
    """
    best = persistent_config(2, stages=4) if sm == 90 and bits == "16" else pointer_config(bits, sm)
    return [config for config in linear_configs(shape, bits, sm, best, pieces=2) if config != CUBLAS]


@configures("dgelu_matmul")
def _dgelu_configs(shape: str, bits: str, sm: int) -> list[KernelConfig]:
    """dGELU by descriptors took 569 us where fc1 + GELU was timed, in one piece and without writing act.

    In two pieces it was 573 and in four 611; the pointers 726, cuBLAS and a second kernel 704, the flattened loop,
    which read pre in its epilogue, at least 645. The 569 us are a program for each block, with 33
    instructions an element outside the product; one loop that reads pre ahead issues 19 (counted, not timed), and from
    the slope ("s") 5. Where act is written ("a"), fewer pieces than eight spill, and so do descriptors without a loop;
    flattened blocks of 128 x 128 took 754.
    """
    pointers, act = pointer_config(bits, sm), shape.endswith("a")
    if bits == "32" or sm not in (90, 100):
        # A wider tile takes all 255 registers on sm_89 and sm_120, and spills with one of Triton 3.6 and 3.9.
        return [product_config(4, 3, 128, 64, 32, 2) if bits == "16" and sm != 80 else pointers, CUBLAS]
    if sm == 100:
        return [pointers, CUBLAS, WIDE]
    # With 128 registers two programs fit; left to itself, ptxas takes up to 134 (Triton 3.6).
    pointers = replace(pointers, maxnreg=128) if divides_k(shape) else pointers
    described = [] if act else [product_config(8, 3, 128, 128, 64, 2, "tma", maxnreg=128)]
    return [persistent_config(8 if act else 4), pointers, CUBLAS, WIDE, *described]


@configures("mlp_kept")
def _kept_configs(shape: str, bits: str, sm: int) -> list[KernelConfig]:
    """No launch: the providers "pre" and "slope" are what a plain MLP keeps with keep="all".

    With the slope, fc1 + GELU takes 20 instructions an element in place of 14, and dGELU 5 in place of 19 (counted, not
    timed).
    """
    return [tiles.config(provider=kept) for kept in (("pre", "slope") if bits == "16" else ("pre",))]


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save: str) -> tuple[Tensor, Tensor]:
    """(gelu(pre), what is kept), (M, N) in x's dtype, for x (M, K), weight (N, K).

    save: "pre", "slope" for gelu'(pre), or "" for nothing, which is (0,).
    """
    (m, k), n = x.shape, weight.shape[0]
    config = tiles.lookup("linear_gelu_fwd", x, product_class(k, n), unfit(x, weight, columns=n))
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
    dpre, act = pre.new_empty(m, n), pre.new_empty(m, n) if want_act else None
    want_sums = want_bias_grad or persistent
    sums = pre.new_empty(cdiv(m, config["BLOCK_M"]), n, dtype=torch.float32) if want_sums else None
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
