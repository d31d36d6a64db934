"""Attention in blocks of keys, for sequences or head sizes that one program cannot hold: online softmax forward, backward as dQ, then dK and dV.

A sequence is whole blocks without masks and one short masked block: 577 = 9 x 64 + 16, 257 = 4 x 64 + 16 (the tokens of a square grid and a class token).
"""

import triton
import triton.language as tl

from .attention_parts import LN2, LOG2E, add_product, head_of, load_rows, outer, row_dot, store_rows, store_sums, weights, zero_rows


@triton.jit
def _fwd_step(
    acc,
    l,
    m,
    q,
    k_head,
    v_head,
    k_n,
    v_n,
    start,
    N,
    scale,
    KEYS: tl.constexpr,
    MASK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One block of keys of the online softmax; m is the largest scaled logit so far."""
    cols = start + tl.arange(0, KEYS)
    k = load_rows(k_head, cols, k_n, N, MASK, HEAD_DIM, D0, D1, ALIGN)
    s = outer(q, k, PRECISION)
    if MASK:
        s = tl.where((cols < N)[None, :], s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    p = weights(s, m_new[:, None], scale, q[0].dtype)
    decay = tl.exp2((m - m_new) * LOG2E)
    v = load_rows(v_head, cols, v_n, N, MASK, HEAD_DIM, D0, D1, ALIGN)
    acc = add_product([part * decay[:, None] for part in acc], p, v, PRECISION)
    return acc, l * decay + tl.sum(p, 1), m_new


@triton.jit
def _attention_fwd_tiled_kernel(
    q_ptr,  # (B, N, H, Dh)
    k_ptr,  # (B, N, H, Dh)
    v_ptr,  # (B, N, H, Dh)
    o_ptr,  # (B, N, H, Dh)
    lse_ptr,  # (B, H, N)
    N,
    H,
    q_b,
    q_n,
    q_h,
    k_b,
    k_n,
    k_h,
    v_b,
    v_n,
    v_h,
    o_b,
    o_n,
    o_h,
    scale,
    HEAD_DIM: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LAST_N: tl.constexpr,
):
    """BLOCK_M queries of one head against blocks of BLOCK_N keys; the last block has LAST_N (0: N divides)."""
    tiles_m = tl.cdiv(N, BLOCK_M)
    pid = tl.program_id(0)
    bh = pid // tiles_m
    b, h = bh // H, bh % H
    k_head, v_head = head_of(k_ptr, b, h, k_b, k_h, ALIGN), head_of(v_ptr, b, h, v_b, v_h, ALIGN)
    rows = pid % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    q = load_rows(head_of(q_ptr, b, h, q_b, q_h, ALIGN), rows, q_n, N, True, HEAD_DIM, D0, D1, ALIGN)
    acc = zero_rows(BLOCK_M, D0, D1)
    l = tl.zeros((BLOCK_M,), tl.float32)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    whole = N // BLOCK_N * BLOCK_N
    for start in range(0, whole, BLOCK_N):
        acc, l, m = _fwd_step(acc, l, m, q, k_head, v_head, k_n, v_n, start, N, scale, BLOCK_N, False, HEAD_DIM, D0, D1, ALIGN, PRECISION)
    if LAST_N > 0:
        acc, l, m = _fwd_step(acc, l, m, q, k_head, v_head, k_n, v_n, whole, N, scale, LAST_N, True, HEAD_DIM, D0, D1, ALIGN, PRECISION)
    store_rows(head_of(o_ptr, b, h, o_b, o_h, ALIGN), [part * (1 / l)[:, None] for part in acc], rows, o_n, N, HEAD_DIM, ALIGN)
    tl.store(lse_ptr + bh.to(tl.int64) * N + rows, m + tl.log2(l) * LN2, mask=rows < N)


@triton.jit
def _dq_step(
    dq,
    q,
    do,
    lse,
    delta,
    k_head,
    v_head,
    k_n,
    v_n,
    start,
    N,
    scale,
    KEYS: tl.constexpr,
    MASK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dQ / scale += dS K for one block of keys."""
    cols = start + tl.arange(0, KEYS)
    k = load_rows(k_head, cols, k_n, N, MASK, HEAD_DIM, D0, D1, ALIGN)
    v = load_rows(v_head, cols, v_n, N, MASK, HEAD_DIM, D0, D1, ALIGN)
    p = weights(outer(q, k, PRECISION), lse[:, None], scale, q[0].dtype)
    if MASK:
        p = tl.where((cols < N)[None, :], p, 0.0)
    ds = p * (outer(do, v, PRECISION) - delta[:, None])
    return add_product(dq, ds, k, PRECISION)


@triton.jit
def _attention_bwd_dq_kernel(
    q_ptr,  # (B, N, H, Dh)
    k_ptr,  # (B, N, H, Dh)
    v_ptr,  # (B, N, H, Dh)
    o_ptr,  # (B, N, H, Dh)
    do_ptr,  # (B, N, H, Dh)
    lse_ptr,  # (B, H, N)
    delta_ptr,  # (B, H, N), written here
    dq_ptr,  # (B, N, H, Dh)
    sums_ptr,  # (B * tiles, H, Dh)
    N,
    H,
    q_b,
    q_n,
    q_h,
    k_b,
    k_n,
    k_h,
    v_b,
    v_n,
    v_h,
    o_b,
    o_n,
    o_h,
    do_b,
    do_n,
    do_h,
    dq_b,
    dq_n,
    dq_h,
    scale,
    HEAD_DIM: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LAST_N: tl.constexpr,
):
    """dQ and delta of BLOCK_M queries of one head."""
    tiles_m = tl.cdiv(N, BLOCK_M)
    pid = tl.program_id(0)
    bh = pid // tiles_m
    b, h = bh // H, bh % H
    rows = pid % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = rows < N
    stats = bh.to(tl.int64) * N + rows
    q = load_rows(head_of(q_ptr, b, h, q_b, q_h, ALIGN), rows, q_n, N, True, HEAD_DIM, D0, D1, ALIGN)
    o = load_rows(head_of(o_ptr, b, h, o_b, o_h, ALIGN), rows, o_n, N, True, HEAD_DIM, D0, D1, ALIGN)
    do = load_rows(head_of(do_ptr, b, h, do_b, do_h, ALIGN), rows, do_n, N, True, HEAD_DIM, D0, D1, ALIGN)
    delta = row_dot(o, do)
    tl.store(delta_ptr + stats, delta, mask=in_rows)
    lse = tl.load(lse_ptr + stats, mask=in_rows, other=float("inf"))
    k_head, v_head = head_of(k_ptr, b, h, k_b, k_h, ALIGN), head_of(v_ptr, b, h, v_b, v_h, ALIGN)
    dq = zero_rows(BLOCK_M, D0, D1)
    whole = N // BLOCK_N * BLOCK_N
    for start in range(0, whole, BLOCK_N):
        dq = _dq_step(dq, q, do, lse, delta, k_head, v_head, k_n, v_n, start, N, scale, BLOCK_N, False, HEAD_DIM, D0, D1, ALIGN, PRECISION)
    if LAST_N > 0:
        dq = _dq_step(dq, q, do, lse, delta, k_head, v_head, k_n, v_n, whole, N, scale, LAST_N, True, HEAD_DIM, D0, D1, ALIGN, PRECISION)
    dq = [part * scale for part in dq]
    store_rows(head_of(dq_ptr, b, h, dq_b, dq_h, ALIGN), dq, rows, dq_n, N, HEAD_DIM, ALIGN)
    if SUMS:
        store_sums(sums_ptr, dq, b * tiles_m + pid % tiles_m, h, H, HEAD_DIM)


@triton.jit
def _dkdv_step(
    dk,
    dv,
    k,
    v,
    q_head,
    do_head,
    lse_ptr,
    delta_ptr,
    q_n,
    do_n,
    start,
    in_keys,
    N,
    scale,
    QUERIES: tl.constexpr,
    MASK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dK / scale += dS^T Q and dV += P^T dO for one block of queries; everything transposed, so that P^T and dS^T are left operands as they come."""
    rows = start + tl.arange(0, QUERIES)
    q = load_rows(q_head, rows, q_n, N, MASK, HEAD_DIM, D0, D1, ALIGN)
    do = load_rows(do_head, rows, do_n, N, MASK, HEAD_DIM, D0, D1, ALIGN)
    lse = tl.load(lse_ptr + rows, mask=rows < N, other=float("inf"))
    delta = tl.load(delta_ptr + rows, mask=rows < N, other=0.0)
    p = weights(outer(k, q, PRECISION), lse[None, :], scale, q[0].dtype)
    p = tl.where(in_keys[:, None], p, 0.0)
    dv = add_product(dv, p, do, PRECISION)
    ds = p * (outer(v, do, PRECISION) - delta[None, :])
    return add_product(dk, ds, q, PRECISION), dv


@triton.jit
def _attention_bwd_dkdv_kernel(
    q_ptr,  # (B, N, H, Dh)
    k_ptr,  # (B, N, H, Dh)
    v_ptr,  # (B, N, H, Dh)
    do_ptr,  # (B, N, H, Dh)
    lse_ptr,  # (B, H, N)
    delta_ptr,  # (B, H, N)
    dk_ptr,  # (B, N, H, Dh)
    dv_ptr,  # (B, N, H, Dh)
    sums_ptr,  # (B * tiles, 2, H, Dh)
    N,
    H,
    q_b,
    q_n,
    q_h,
    k_b,
    k_n,
    k_h,
    v_b,
    v_n,
    v_h,
    do_b,
    do_n,
    do_h,
    dk_b,
    dk_n,
    dk_h,
    scale,
    HEAD_DIM: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LAST_M: tl.constexpr,
):
    """dK and dV (same strides) of BLOCK_N keys of one head against blocks of BLOCK_M queries; the last block has LAST_M (0: N divides)."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    bh = pid // tiles_n
    b, h = bh // H, bh % H
    cols = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    in_keys = cols < N
    k = load_rows(head_of(k_ptr, b, h, k_b, k_h, ALIGN), cols, k_n, N, True, HEAD_DIM, D0, D1, ALIGN)
    v = load_rows(head_of(v_ptr, b, h, v_b, v_h, ALIGN), cols, v_n, N, True, HEAD_DIM, D0, D1, ALIGN)
    q_head, do_head = head_of(q_ptr, b, h, q_b, q_h, ALIGN), head_of(do_ptr, b, h, do_b, do_h, ALIGN)
    lse_row, delta_row = lse_ptr + bh.to(tl.int64) * N, delta_ptr + bh.to(tl.int64) * N
    dk, dv = zero_rows(BLOCK_N, D0, D1), zero_rows(BLOCK_N, D0, D1)
    whole = N // BLOCK_M * BLOCK_M
    for start in range(0, whole, BLOCK_M):
        dk, dv = _dkdv_step(
            dk, dv, k, v, q_head, do_head, lse_row, delta_row, q_n, do_n, start, in_keys, N, scale, BLOCK_M, False, HEAD_DIM, D0, D1, ALIGN, PRECISION
        )
    if LAST_M > 0:
        dk, dv = _dkdv_step(
            dk, dv, k, v, q_head, do_head, lse_row, delta_row, q_n, do_n, whole, in_keys, N, scale, LAST_M, True, HEAD_DIM, D0, D1, ALIGN, PRECISION
        )
    dk = [part * scale for part in dk]
    store_rows(head_of(dk_ptr, b, h, dk_b, dk_h, ALIGN), dk, cols, dk_n, N, HEAD_DIM, ALIGN)
    store_rows(head_of(dv_ptr, b, h, dk_b, dk_h, ALIGN), dv, cols, dk_n, N, HEAD_DIM, ALIGN)
    if SUMS:
        slot = (b * tiles_n + pid % tiles_n) * 2
        store_sums(sums_ptr, dk, slot, h, H, HEAD_DIM)
        store_sums(sums_ptr, dv, slot + 1, h, H, HEAD_DIM)
