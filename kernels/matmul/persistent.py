"""The persistent product: a program per multiprocessor computes its blocks of the output in one loop.

    out = epilogue(bias + A B)      A (M, K), B (K, N) or its transpose, bias (N,) or None

The loop runs over the steps of k of all its blocks, so that the loads of a block's first operands do not wait for the
epilogue of the block before. Three things keep instructions out of that epilogue (counted on sm_90, Triton 3.6, B/16 in
bf16; an element is a number of the output):

- The accumulator starts at the bias of the next block's columns, set where a block ends. Where Triton flattens two
  loops, two instructions per element set it to zero, and one more adds the bias.
- Results leave by descriptors (TMA), without addresses and masks.
- A matrix that the epilogue reads (the residual, or what the MLP kept) is loaded by TMA AHEAD steps before its use.
  The warps wait for it there, under one product in flight. Registers then hold it in pairs: the loop would
  carry single 16-bit numbers in a register each. AHEAD = 0: the epilogue loads it.

With these, fc1 + GELU takes 14 instructions per element in place of 19, fc2 + residual 6 in place of 11.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from .. import tiles
from ..launch import INTERPRETED, launch
from ..rows import contiguous_or_none
from .activations import activate, activate_and_kept_slope, dgelu
from .product import (
    block_offsets,
    count_blocks,
    described,
    load_columns,
    load_piece,
    row_product,
    split_columns,
    store_column_sums,
    times_factors,
)

PLAIN = tl.constexpr(INTERPRETED)  # the interpreter cannot run assembly


@triton.jit
def first_sums(
    bias_ptr, pid, zero, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr, TAKEN: tl.constexpr
):
    """The initial sums of block `pid`, (BLOCK_M, BLOCK_N) in fp32; past the last block, any block's.

    TAKEN: whether they are the bias, else zero. zero: 0.0; for a constant, ptxas spends two instructions per element.
    """
    if TAKEN:
        _, _, first_n = block_offsets(
            min(pid, count_blocks(M, N, BLOCK_M, BLOCK_N) - 1), M, N, BLOCK_M, BLOCK_N, GROUP_M
        )
        return tl.broadcast_to(load_columns(bias_ptr, first_n + tl.arange(0, BLOCK_N), N), (BLOCK_M, BLOCK_N))
    else:
        return tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32) + zero


@triton.jit
def join_pairs(x):
    """16-bit numbers (rows, columns) -> pairs (rows, columns / 2) in int32, the even column low."""
    low, high = tl.split(x.to(tl.int16, bitcast=True).reshape(x.shape[0], x.shape[1] // 2, 2))
    return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def split_pairs(pairs, dtype: tl.constexpr):
    """Pairs of 16-bit numbers, (rows, columns / 2) in int32 -> (rows, columns)."""
    low, high = (pairs & 0xFFFF).to(tl.int16), (pairs >> 16).to(tl.int16)
    return tl.join(low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)).reshape(
        pairs.shape[0], 2 * pairs.shape[1]
    )


@triton.jit
def together(a, b):
    """Returns a and b (16 bits) in the same layout of registers.

    If only one of two results depends on the accumulator, Triton gives them different layouts and computes what both
    need twice: 30 instructions an element in place of 22 where dGELU writes the activation too.
    """
    if PLAIN:
        return a, b
    else:
        asm: tl.constexpr = "mov.b32 $0, $2; mov.b32 $1, $3;"
        return tl.inline_asm_elementwise(asm, "=r,=r,r,r", [a, b], (a.dtype, b.dtype), is_pure=True, pack=2)


@triton.jit(do_not_specialize=["M", "zero"])
def persistent_kernel(
    a_ptr,  # descriptor of A (M, K)
    b_ptr,  # descriptor of B (K, N), or of its transpose
    bias_ptr,  # (N,) or None
    early_ptr,  # descriptor of (M, N) in 16 bits, which the epilogue reads; or None
    out_ptr,  # descriptor of (M, N)
    more_ptr,  # as out_ptr, or None
    others,  # pointers and sizes that only the epilogue reads
    M,
    zero,
    N: tl.constexpr,  # N and K are constants: as arguments, they spill registers
    K: tl.constexpr,
    ACT: tl.constexpr,
    EPILOGUE: tl.constexpr,
    LOADS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SUBTILES: tl.constexpr,
    AHEAD: tl.constexpr,
):
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    EARLY: tl.constexpr = max(STEPS - 1 - AHEAD, 0)
    COLS: tl.constexpr = BLOCK_N // SUBTILES
    BIASED: tl.constexpr = bias_ptr is not None
    programs, pid = tl.num_programs(0), tl.program_id(0)
    blocks = (count_blocks(M, N, BLOCK_M, BLOCK_N) - pid + programs - 1) // programs
    acc = first_sums(bias_ptr, pid, zero, M, N, BLOCK_M, BLOCK_N, GROUP_M, BIASED)
    pid -= programs
    index_m, first_m, first_n, step = 0, 0, 0, -1
    if early_ptr is not None:
        early = tl.zeros((BLOCK_M, BLOCK_N // 2), tl.int32)
    for _ in tl.range(0, blocks * STEPS):
        step = tl.where(step == STEPS - 1, 0, step + 1)
        if step == 0:
            pid += programs
            index_m, first_m, first_n = block_offsets(pid, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        k = step * BLOCK_K
        if LOADS == "nt":
            acc = tl.dot(a_ptr.load([first_m, k]), tl.trans(b_ptr.load([first_n, k])), acc, input_precision=PRECISION)
        else:
            acc = tl.dot(a_ptr.load([first_m, k]), b_ptr.load([k, first_n]), acc, input_precision=PRECISION)
        if early_ptr is not None:
            if step == EARLY:
                early = join_pairs(early_ptr.load([first_m, first_n]))
        if step == STEPS - 1:
            pieces = split_columns(acc, SUBTILES)
            if early_ptr is not None:
                read = split_columns(split_pairs(early, out_ptr.dtype), SUBTILES)
            for i in tl.static_range(SUBTILES):
                early_piece = read[i] if early_ptr is not None else None
                at = index_m, first_m, first_n + i * COLS, M, N
                EPILOGUE(pieces[i], early_piece, out_ptr, more_ptr, others, at, ACT)
            acc = first_sums(bias_ptr, pid + programs, zero, M, N, BLOCK_M, BLOCK_N, GROUP_M, BIASED)


@triton.jit
def linear_epilogue(acc, residual, out, more, others, at, ACT: tl.constexpr):
    """Multiplies acc by the factors, adds the residual, read ahead or here, and writes a piece of `out`."""
    res_ptr, ls_ptr, dp_ptr, rows_per_sample, stride_rm = others
    _, first_m, first_n, M, N = at
    offs_m = first_m + tl.arange(0, acc.shape[0]).to(tl.int64)
    cols = first_n + tl.arange(0, acc.shape[1])
    acc = times_factors(acc, ls_ptr, dp_ptr, rows_per_sample, offs_m, cols, M, N)
    if residual is not None:
        acc += residual.to(tl.float32)
    elif res_ptr is not None:
        acc += load_piece(res_ptr, offs_m, cols, M, N, stride_rm).to(tl.float32)
    out.store([first_m, first_n], acc.to(out.dtype))


@triton.jit
def gelu_epilogue(acc, early, out, kept, others, at, ACT: tl.constexpr):
    """Writes a piece of gelu(pre) and, where it is kept, of pre; acc is pre before it is rounded."""
    _, first_m, first_n, _, _ = at
    pre = acc.to(out.dtype)
    if kept is not None:
        kept.store([first_m, first_n], pre)
    out.store([first_m, first_n], activate(pre, ACT))


@triton.jit
def gelu_slope_epilogue(acc, early, out, kept, others, at, ACT: tl.constexpr):
    """Writes a piece of gelu(pre) and, in place of pre, of gelu'(pre), the slope."""
    _, first_m, first_n, _, _ = at
    act, slope = activate_and_kept_slope(acc.to(out.dtype), ACT)
    kept.store([first_m, first_n], slope)
    out.store([first_m, first_n], act)


@triton.jit
def dgelu_epilogue(dact, pre, dpre_out, act_out, others, at, ACT: tl.constexpr):
    """Writes a piece of dpre, its column sums and, if act_out is given, act, for dgelu_matmul."""
    index_m, first_m, first_n, _, N = at
    act, dpre = dgelu(dact, pre, ACT, act_out is not None)
    if act_out is not None:
        act, dpre = together(act, dpre)
        act_out.store([first_m, first_n], act)
    dpre_out.store([first_m, first_n], dpre)
    store_column_sums(dpre, others[0], index_m, first_n, N, True)


def launch_persistent(
    a: Tensor,
    b: Tensor,
    config: tiles.KernelConfig,
    kind: str,
    epilogue: Callable,
    out: Tensor,
    more: Tensor | None = None,
    bias: Tensor | None = None,
    early: Tensor | None = None,
    others: tuple = (),
    activation: str = "",
) -> None:
    """Writes `out` (M, N), and `more` (M, N) where it is given, by epilogue(bias + A B).

    a (M, K); b (K, N) for kind "nn" or (N, K) for "nt"; early (M, N): 16-bit numbers that the epilogue reads.
    """
    rows, columns = config["BLOCK_M"], config["BLOCK_N"]
    piece = rows, columns // config["SUBTILES"]
    grid, shared = row_product(a, b, config, kind)
    del shared["strides"]  # descriptors have them
    outputs = dict(out_ptr=described(out, *piece), more_ptr=None if more is None else described(more, *piece))
    early = None if early is None else described(early, rows, columns)
    shared |= dict(bias_ptr=contiguous_or_none(bias), early_ptr=early, others=others, zero=0.0)
    launch(persistent_kernel, grid, **shared, **outputs, ACT=activation, EPILOGUE=epilogue)
