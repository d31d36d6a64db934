"""Logits of attention with a bias added and keys hidden, and the bias's gradient.

    o = softmax(scale q k^T + bias) v over the keys before key_lengths[b]

A query that sees no key (all of its bias -inf, or no keys left) gives zeros: its lse is +inf, so that no weight comes
back. The gradient of a bias that the samples share is the sum of P (dP - delta) over them. _bias_bwd_kernel makes both
products again for each sample, a block of the bias at a time, and adds up in registers: no atomics, and nothing of
(B, H, N, N) in memory where the bias is not.
"""

import triton
import triton.language as tl

from .attention_common import LOG2E, head_of, load_head_rows, outer, row_dot
from .attention_rope import load_turned_rows, rope_of


@triton.jit
def bias_of(bias, b, h):
    """The bias of a head: a pointer to its (N, N), the stride of its rows."""
    ptr, strides = bias
    return (ptr + (b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]), strides[2])


@triton.jit
def keys_of(lengths_ptr, b, N):
    """How many keys of a sample count."""
    if lengths_ptr is None:
        return N
    else:
        return tl.minimum(tl.maximum(tl.load(lengths_ptr + b).to(tl.int32), 0), N)


@triton.jit
def whole_blocks(count, BLOCK: tl.constexpr, VARIES: tl.constexpr):
    """How many of `count` rows lie in blocks without masks. VARIES: the last block has one, always."""
    if VARIES:
        return tl.maximum(count - 1, 0) // BLOCK * BLOCK
    else:
        return count // BLOCK * BLOCK


@triton.jit
def add_bias(s, bias, rows, cols, N, scale, TRANSPOSED: tl.constexpr):
    """scale s + bias, of (queries, keys) or transposed; without a bias s, which `unit` scales."""
    if bias is None:
        return s
    else:
        ptrs = bias[0] + (rows.to(tl.int64) * bias[1])
        if TRANSPOSED:
            tile = tl.load(ptrs[None, :] + cols[:, None], mask=(rows < N)[None, :] & (cols < N)[:, None], other=0.0)
        else:
            tile = tl.load(ptrs[:, None] + cols[None, :], mask=(rows < N)[:, None] & (cols < N)[None, :], other=0.0)
        return tl.fma(s, scale, tile.to(tl.float32))


@triton.jit
def unit(bias, scale):
    """The scale of what add_bias returns."""
    if bias is None:
        return scale
    else:
        return 1.0


@triton.jit
def weights(s, lse, bias, scale):
    """exp(unit s - lse) of what add_bias returns, lse a column or a row.

    The difference comes before base 2, as in exp_difference; with a bias it is 0 where a mask has the least number
    there is for all keys of a query.
    """
    if bias is None:
        return tl.exp2(tl.fma(s, scale, -lse) * LOG2E)
    else:
        return tl.exp2((s - lse) * LOG2E)


@triton.jit(do_not_specialize=["samples"])
def _bias_bwd_kernel(
    inputs,  # q, k, v, o, do (B, N, H, Dh), each its pointer and its strides of B, N, H
    lse_ptr,  # (B, H, N)
    dbias_ptr,  # (B / samples, H, N, N)
    terms,  # rope, bias, key lengths: as attention_tiled.py takes them
    samples,  # that share a bias
    N,
    H,
    scale,
    QK: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_M x BLOCK_N of one head's gradient, over the samples that share it."""
    blocks_n = tl.cdiv(N, BLOCK_N)
    blocks = tl.cdiv(N, BLOCK_M) * blocks_n
    head, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    group, h = head // H, head % H
    rows = block // blocks_n * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = block % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    tables, biases, lengths_ptr = terms[0], terms[1], terms[2]
    TURNS: tl.constexpr = tables is not None
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # disable_licm: nothing is kept from sample to sample but the sums
    for i in tl.range(0, samples, num_stages=1, disable_licm=True):
        b = group * samples + i
        q_head, k_head, v_head, o_head, do_head = [head_of(x, b, h, HEAD) for x in inputs]
        rope = rope_of(tables, b, h) if TURNS else None
        bias = bias_of(biases, b, h)
        keys = keys_of(lengths_ptr, b, N)
        q = load_turned_rows(q_head, rope, rows, N, True, QK)
        k = load_turned_rows(k_head, rope, cols, keys, True, QK)
        v = load_head_rows(v_head, cols, keys, True, HEAD)
        do = load_head_rows(do_head, rows, N, True, HEAD)
        delta = row_dot(load_head_rows(o_head, rows, N, True, HEAD), do)
        # +inf past N: those queries weigh nothing
        lse = tl.load(lse_ptr + (b.to(tl.int64) * H + h) * N + rows, mask=rows < N, other=float("inf"))
        s = add_bias(outer(q, k, QK), bias, rows, cols, N, scale, False)
        p = weights(s, lse[:, None], bias, scale)
        p = tl.where((cols < keys)[None, :], p, 0.0)
        total += p * (outer(do, v, HEAD) - delta[:, None])
    at = (group.to(tl.int64) * H + h) * N * N + rows.to(tl.int64)[:, None] * N + cols[None, :]
    mask = (rows < N)[:, None] & (cols < N)[None, :]
    tl.store(dbias_ptr + at, total.to(dbias_ptr.dtype.element_ty), mask=mask)
