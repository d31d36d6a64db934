"""Attention forward in blocks of keys with an online softmax.

It serves sequences or head sizes that one program cannot hold. The keys are one short masked block and whole blocks
without masks: 577 = 16 + 9 x 64, 257 = 16 + 4 x 64 (the tokens of a square grid and a class token, padded to 16). The
short block comes first: after a pipelined loop it would make ptxas wait for every wgmma of the kernel, one by one
(ptxas note C7515).
"""

import triton
import triton.language as tl

from ..dependent import wait_for_kernel_before
from .common import (
    accumulate,
    dot_nt,
    exp_difference,
    head_of,
    load_head_rows,
    lse_of,
    program_coords,
    shift_of,
    store_head_rows,
    zero_head_rows,
)
from .terms import add_bias, bias_of, keys_of, load_rotated_rows, logit_scale, rope_of, whole_blocks


@triton.jit
def _fwd_step(
    acc,
    l,
    m,
    q,
    k_head,
    v_head,
    rope,  # this head's, or None
    bias,  # this head's, or None
    rows,
    start,
    keys,  # how many keys count
    N,
    scale,
    KEYS: tl.constexpr,
    MASK: tl.constexpr,
    HIDES: tl.constexpr,
    QK: tl.constexpr,
    HEAD: tl.constexpr,
):
    """Adds a block of keys to the online softmax; m: the largest logit so far, -inf only with HIDES."""
    cols = start + tl.arange(0, KEYS)
    k = load_rotated_rows(k_head, rope, cols, keys, MASK, QK)
    s = add_bias(dot_nt(q, k, QK), bias, rows, cols, N, scale, False)
    if MASK:
        s = tl.where((cols < keys)[None, :], s, float("-inf"))
    m_new = tl.maximum(m, shift_of(tl.max(s, 1), scale, HEAD))
    # where every key so far is hidden, nothing is subtracted: -inf - -inf is NaN
    shift = tl.where(m_new == float("-inf"), 0.0, m_new) if HIDES else m_new
    p = exp_difference(s, shift[:, None], logit_scale(bias, scale), HEAD)
    decay = tl.exp2(m - shift) if HEAD.folds else exp_difference(m, shift, logit_scale(bias, scale), HEAD)
    v = load_head_rows(v_head, cols, keys, MASK, HEAD)
    acc = accumulate([chunk * decay[:, None] for chunk in acc], p, v, HEAD)
    return acc, l * decay + tl.sum(p, 1), m_new


@triton.jit(do_not_specialize=["tokens"])
def _attention_fwd_tiled_kernel(
    q,  # (pointer, strides of B, N, H) of (B, N, H, Dh); so are the next three
    k,
    v,
    o,
    lse_ptr,  # (B, H, N)
    terms,  # rope: cos, sin, strides of B, H, rows, num_prefix; bias (B, H, N, N): pointer, strides of B, H, queries;
    # key lengths (B,); each or None
    table_ptr,  # of the tiles of packed samples (common.py), or None
    tokens,  # of all packed samples
    N,
    H,
    scale,
    QK: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LAST_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attends with BLOCK_M queries of a head to blocks of BLOCK_N keys and, if not 0, one of LAST_N."""
    ROTATES: tl.constexpr = terms[0] is not None  # if so, addresses computed before the loop would spill
    HIDES: tl.constexpr = terms[1] is not None or terms[2] is not None
    PACKED: tl.constexpr = table_ptr is not None
    VARIES: tl.constexpr = terms[2] is not None or PACKED
    wait_for_kernel_before(PDL)
    b, h, index, first, n, lse_at = program_coords(table_ptr, tokens, N, H, BLOCK_M)
    if PACKED:
        if n == 0:  # this program has no tile
            return
    heads = head_of(k, b, h, HEAD, first, PACKED), head_of(v, b, h, HEAD, first, PACKED)
    rope = rope_of(terms[0], b, h, first, PACKED) if terms[0] is not None else None
    bias = bias_of(terms[1], b, h) if terms[1] is not None else None
    keys = keys_of(terms[2], b, n)
    rows = index * BLOCK_M + tl.arange(0, BLOCK_M)
    q_block = load_rotated_rows(head_of(q, b, h, HEAD, first, PACKED), rope, rows, n, True, QK)
    acc = zero_head_rows(BLOCK_M, HEAD)
    l = tl.zeros((BLOCK_M,), tl.float32)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    whole = whole_blocks(keys, BLOCK_N, VARIES)
    if LAST_N > 0:
        acc, l, m = _fwd_step(
            acc, l, m, q_block, *heads, rope, bias, rows, whole, keys, n, scale, LAST_N, True, HIDES, QK, HEAD
        )
    for start in tl.range(0, whole, BLOCK_N, disable_licm=ROTATES):
        acc, l, m = _fwd_step(
            acc, l, m, q_block, *heads, rope, bias, rows, start, keys, n, scale, BLOCK_N, False, HIDES, QK, HEAD
        )
    if HIDES:
        m = tl.where(l == 0, float("inf"), m)
        l = tl.where(l == 0, 1.0, l)
    store_head_rows(head_of(o, b, h, HEAD, first, PACKED), [chunk * (1 / l)[:, None] for chunk in acc], rows, n, HEAD)
    tl.store(lse_ptr + lse_at + rows, lse_of(m, l, logit_scale(bias, scale), HEAD), mask=rows < n)
