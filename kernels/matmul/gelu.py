"""Activations element by element, forward and backward, after products that another library makes.

    gelu        act = gelu(pre)                                           pre (M, F)
    gelu_bwd    dpre = dy * gelu'(pre), dbias = sum_M(dpre)               dy (M, F)

gelu stands for any activation of activations.py. Both write the bits that linear_gelu and dgelu_matmul (mlp.py) write.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import tiles
from ..launch import cdiv, launch
from ..rows import row_stride
from ..tiles import KernelConfig
from .activations import activate, dgelu
from .product import load_piece, store_column_sums, store_piece


@triton.jit(do_not_specialize=["M"])
def gelu_bwd_kernel(
    dy_ptr,  # (M, N), or None where only act is computed
    pre_ptr,  # (M, N)
    dpre_ptr,  # (M, N) or None
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
        store_piece(act_ptr, activate(pre, ACT), offs_m, cols, M, N, stride_om, index_m * BLOCK_M, first_n, False)
    else:
        dy = load_piece(dy_ptr, offs_m, cols, M, N, stride_ym).to(tl.float32)
        act, dpre = dgelu(dy, pre, ACT, act_ptr is not None)
        if act_ptr is not None:
            store_piece(act_ptr, act, offs_m, cols, M, N, stride_om, index_m * BLOCK_M, first_n, False)
        store_piece(dpre_ptr, dpre, offs_m, cols, M, N, stride_om, index_m * BLOCK_M, first_n, False)
        if sums_ptr is not None:
            store_column_sums(dpre, sums_ptr, index_m, first_n, N, False)


tiles.configures("gelu_bwd")(lambda *_: [tiles.config(4, 1, BLOCK_M=64, BLOCK_N=64)])


def gelu_bwd(
    dy: Tensor, pre: Tensor, activation: str, want_bias_grad: bool, want_act: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dpre, act, sums) as dgelu_matmul returns them, from the product dy = g W2 (M, F)."""
    m, n = pre.shape
    config = tiles.lookup("gelu_bwd", pre, f"d{n}")
    dpre, act = pre.new_empty(m, n), pre.new_empty(m, n) if want_act else None
    sums = pre.new_empty(cdiv(m, config["BLOCK_M"]), n, dtype=torch.float32) if want_bias_grad else None
    _launch(config, activation, pre, dy_ptr=dy, dpre_ptr=dpre, act_ptr=act, sums_ptr=sums)
    return dpre, act, sums


def gelu(pre: Tensor, activation: str) -> Tensor:
    """gelu(pre) in pre's shape (M, F) and dtype, with the bits of linear_gelu and dgelu_matmul."""
    config, act = tiles.lookup("gelu_bwd", pre, f"d{pre.shape[1]}"), pre.new_empty(pre.shape)
    _launch(config, activation, pre, dy_ptr=None, dpre_ptr=None, act_ptr=act, sums_ptr=None)
    return act


def _launch(config: KernelConfig, activation: str, pre: Tensor, **pointers: Tensor | None) -> None:
    m, n = pre.shape
    grid = cdiv(m, config["BLOCK_M"]), cdiv(n, config["BLOCK_N"])
    strides = dict(stride_ym=row_stride(pointers["dy_ptr"]), stride_pm=pre.stride(0), stride_om=n)
    launch(gelu_bwd_kernel, grid, pre_ptr=pre, **pointers, M=m, N=n, **strides, ACT=activation, **config.meta)
