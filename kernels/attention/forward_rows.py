"""Attention forward, provider "single_pass": every key and value of a head in one program.

It takes up to 256 tokens, with one softmax over whole rows of logits and no rescaling. The keys are cut into blocks of
falling powers of two (197 -> 128 + 64 + 16), so that little is padded; a program loops over blocks of queries.
"""

import triton
import triton.language as tl

from ..dependent import wait_for_kernel_before
from .common import accumulate, dot_nt, exp_difference, head_of, lse_of, shift_of, store_head_rows, zero_head_rows
from .terms import load_rotated_rows, rope_of


@triton.jit
def load_keys(head, rope, N, KEYS0: tl.constexpr, KEYS1: tl.constexpr, KEYS2: tl.constexpr, HEAD: tl.constexpr):
    """Loads every row of a head in one to three blocks of rows; only the last reaches past N."""
    first = load_rotated_rows(head, rope, tl.arange(0, KEYS0), N, KEYS1 == 0, HEAD)
    if KEYS1 > 0:
        second = load_rotated_rows(head, rope, KEYS0 + tl.arange(0, KEYS1), N, KEYS2 == 0, HEAD)
        if KEYS2 > 0:
            third = load_rotated_rows(head, rope, KEYS0 + KEYS1 + tl.arange(0, KEYS2), N, True, HEAD)
            return (first, second, third)
        else:
            return (first, second)
    else:
        return (first,)


@triton.jit(do_not_specialize=["query_blocks"])
def _attention_fwd_short_kernel(
    q,  # (pointer, strides of B, N, H) of (B, N, H, Dh); so are the next three
    k,
    v,
    o,
    lse_ptr,  # (B, H, N)
    rope,  # (cos, sin, strides of B, H, rows, num_prefix) or None
    q_box,  # descriptors of (B, H, N, Dh) in blocks of BLOCK_M rows of a head, or None, where pointers are used
    o_box,
    N,
    H,
    query_blocks,
    scale,
    QK: tl.constexpr,
    HEAD: tl.constexpr,
    KEYS0: tl.constexpr,
    KEYS1: tl.constexpr,
    KEYS2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes o and lse of query_blocks x BLOCK_M queries of one head over all of its keys."""
    wait_for_kernel_before(PDL)
    groups = tl.cdiv(N, BLOCK_M * query_blocks)
    pid = tl.program_id(0)
    bh = pid // groups
    b, h = bh // H, bh % H
    q_head, o_head = head_of(q, b, h, HEAD), head_of(o, b, h, HEAD)
    rope = rope_of(rope, b, h) if rope is not None else None
    k_blocks = load_keys(head_of(k, b, h, HEAD), rope, N, KEYS0, KEYS1, KEYS2, QK)
    v_blocks = load_keys(head_of(v, b, h, HEAD), None, N, KEYS0, KEYS1, KEYS2, HEAD)
    # disable_licm: addresses are computed again for every block of queries, which leaves the registers for a third
    # program on a multiprocessor
    for i in tl.range(0, query_blocks, num_stages=1, disable_licm=True):
        start = (pid % groups * query_blocks + i) * BLOCK_M
        rows = start + tl.arange(0, BLOCK_M)
        if q_box is None:
            q_block = load_rotated_rows(q_head, rope, rows, N, True, QK)
        else:
            q_block = (q_box.load([b, h, start, 0]).reshape(BLOCK_M, HEAD.first),)
        s = [dot_nt(q_block, k_block, QK) for k_block in k_blocks]
        if KEYS2 > 0:
            s = (s[0], s[1], tl.where((KEYS0 + KEYS1 + tl.arange(0, KEYS2) < N)[None, :], s[2], float("-inf")))
            m = tl.maximum(tl.maximum(tl.max(s[0], 1), tl.max(s[1], 1)), tl.max(s[2], 1))
        elif KEYS1 > 0:
            s = (s[0], tl.where((KEYS0 + tl.arange(0, KEYS1) < N)[None, :], s[1], float("-inf")))
            m = tl.maximum(tl.max(s[0], 1), tl.max(s[1], 1))
        else:
            s = (tl.where((tl.arange(0, KEYS0) < N)[None, :], s[0], float("-inf")),)
            m = tl.max(s[0], 1)
        shift = shift_of(m, scale, HEAD)
        p = [exp_difference(logits, shift[:, None], scale, HEAD) for logits in s]
        l = tl.sum(p[0], 1)
        acc = accumulate(zero_head_rows(BLOCK_M, HEAD), p[0], v_blocks[0], HEAD)
        if KEYS1 > 0:
            l += tl.sum(p[1], 1)
            acc = accumulate(acc, p[1], v_blocks[1], HEAD)
        if KEYS2 > 0:
            l += tl.sum(p[2], 1)
            acc = accumulate(acc, p[2], v_blocks[2], HEAD)
        o_block = [chunk * (1 / l)[:, None] for chunk in acc]
        if o_box is None:
            store_head_rows(o_head, o_block, rows, N, HEAD)
        else:
            o_box.store([b, h, start, 0], o_block[0].to(o_box.dtype).reshape(1, 1, BLOCK_M, HEAD.first))
        tl.store(lse_ptr + bh.to(tl.int64) * N + rows, lse_of(shift, l, scale, HEAD), mask=rows < N)
