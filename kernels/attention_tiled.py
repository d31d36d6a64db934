"""Attention forward in blocks of keys with an online softmax.

For sequences or head sizes that one program cannot hold. A sequence is one short masked block and whole blocks
without masks: 577 = 16 + 9 x 64, 257 = 16 + 4 x 64 (the tokens of a square grid and a class token). The short one
comes first: after a pipelined loop it would make ptxas wait for every wgmma of the kernel, one by one (its note
C7515).
"""

import triton
import triton.language as tl

from .attention_common import (
    LN2,
    LOG2E,
    add_product,
    head_of,
    load_head_rows,
    outer,
    probabilities,
    store_head_rows,
    zero_head_rows,
)


@triton.jit
def _fwd_step(
    acc, l, m, q, k_head, v_head, start, N, scale, KEYS: tl.constexpr, MASK: tl.constexpr, HEAD: tl.constexpr
):
    """One block of keys of the online softmax; m is the largest scaled logit so far."""
    cols = start + tl.arange(0, KEYS)
    k = load_head_rows(k_head, cols, N, MASK, HEAD)
    s = outer(q, k, HEAD)
    if MASK:
        s = tl.where((cols < N)[None, :], s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    p = probabilities(s, m_new[:, None], scale, q[0].dtype)
    decay = tl.exp2((m - m_new) * LOG2E)
    v = load_head_rows(v_head, cols, N, MASK, HEAD)
    acc = add_product([chunk * decay[:, None] for chunk in acc], p, v, HEAD)
    return acc, l * decay + tl.sum(p, 1), m_new


@triton.jit
def _attention_fwd_tiled_kernel(
    q,  # (pointer, strides of B, N, H) of (B, N, H, Dh), as the next three
    k,
    v,
    o,
    lse_ptr,  # (B, H, N)
    N,
    H,
    scale,
    HEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LAST_N: tl.constexpr,
):
    """BLOCK_M queries of one head against blocks of BLOCK_N keys, the last of LAST_N (0: N divides)."""
    blocks_m = tl.cdiv(N, BLOCK_M)
    pid = tl.program_id(0)
    bh = pid // blocks_m
    b, h = bh // H, bh % H
    k_head, v_head = head_of(k, b, h, HEAD), head_of(v, b, h, HEAD)
    rows = pid % blocks_m * BLOCK_M + tl.arange(0, BLOCK_M)
    q_block = load_head_rows(head_of(q, b, h, HEAD), rows, N, True, HEAD)
    acc = zero_head_rows(BLOCK_M, HEAD)
    l = tl.zeros((BLOCK_M,), tl.float32)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    whole = N // BLOCK_N * BLOCK_N
    if LAST_N > 0:
        acc, l, m = _fwd_step(acc, l, m, q_block, k_head, v_head, whole, N, scale, LAST_N, True, HEAD)
    for start in range(0, whole, BLOCK_N):
        acc, l, m = _fwd_step(acc, l, m, q_block, k_head, v_head, start, N, scale, BLOCK_N, False, HEAD)
    store_head_rows(head_of(o, b, h, HEAD), [chunk * (1 / l)[:, None] for chunk in acc], rows, N, HEAD)
    tl.store(lse_ptr + bh.to(tl.int64) * N + rows, m + tl.log2(l) * LN2, mask=rows < N)
