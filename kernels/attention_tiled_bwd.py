"""Attention backward in blocks: dQ of some queries against every key (which also leaves delta = rowsum(o do)), dK and dV of some keys against every query.

Two kernels, a program for each tile; or, where a head is short enough to stay in the cache, both phases in one program for each head. Seven matrix
products where attention_head_bwd.py has five, but nothing is kept from one tile to the next.
Blocks as in attention_tiled.py: a short masked one, then whole ones without masks.
"""

import triton
import triton.language as tl

from .attention_parts import (
    add_product,
    head_of,
    load_rows,
    outer,
    probabilities,
    row_dot,
    store_rows,
    store_sums,
    zero_rows,
)


@triton.jit
def _dq_step(
    dq, q, do, lse, delta, k_head, v_head, start, N, scale, KEYS: tl.constexpr, MASK: tl.constexpr, HEAD: tl.constexpr
):
    """dQ / scale += dS K for one block of keys."""
    cols = start + tl.arange(0, KEYS)
    k = load_rows(k_head, cols, N, MASK, HEAD)
    v = load_rows(v_head, cols, N, MASK, HEAD)
    p = probabilities(outer(q, k, HEAD), lse[:, None], scale, q[0].dtype)
    if MASK:
        p = tl.where((cols < N)[None, :], p, 0.0)
    ds = p * (outer(do, v, HEAD) - delta[:, None])
    return add_product(dq, ds, k, HEAD)


@triton.jit
def queries_bwd(
    heads,  # of q, k, v, o, do
    dq_head,
    lse_row,  # (N,)
    delta_row,  # (N,)
    first,
    N,
    scale,
    HEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LAST_N: tl.constexpr,
):
    """dQ and delta of BLOCK_M queries of a head from `first` on, against blocks of BLOCK_N keys; writes both and returns dQ."""
    q_head, k_head, v_head, o_head, do_head = heads
    rows = first + tl.arange(0, BLOCK_M)
    q = load_rows(q_head, rows, N, True, HEAD)
    do = load_rows(do_head, rows, N, True, HEAD)
    delta = row_dot(load_rows(o_head, rows, N, True, HEAD), do)
    tl.store(delta_row + rows, delta, mask=rows < N)
    # +inf past N: those queries weigh nothing
    lse = tl.load(lse_row + rows, mask=rows < N, other=float("inf"))
    dq = zero_rows(BLOCK_M, HEAD)
    whole = N // BLOCK_N * BLOCK_N
    if LAST_N > 0:
        dq = _dq_step(dq, q, do, lse, delta, k_head, v_head, whole, N, scale, LAST_N, True, HEAD)
    for start in range(0, whole, BLOCK_N):
        dq = _dq_step(dq, q, do, lse, delta, k_head, v_head, start, N, scale, BLOCK_N, False, HEAD)
    dq = [part * scale for part in dq]
    store_rows(dq_head, dq, rows, N, HEAD)
    return dq


@triton.jit
def _dkdv_step(
    dk,
    dv,
    k,
    v,
    q_head,
    do_head,
    lse_row,
    delta_row,
    start,
    N,
    scale,
    QUERIES: tl.constexpr,
    MASK: tl.constexpr,
    HEAD: tl.constexpr,
):
    """dK / scale += dS^T Q and dV += P^T dO for one block of queries; everything transposed, so that P^T and dS^T are left operands as they come."""
    rows = start + tl.arange(0, QUERIES)
    q = load_rows(q_head, rows, N, MASK, HEAD)
    do = load_rows(do_head, rows, N, MASK, HEAD)
    lse = tl.load(lse_row + rows, mask=rows < N, other=float("inf"))
    delta = tl.load(delta_row + rows, mask=rows < N, other=0.0)
    p = probabilities(outer(k, q, HEAD), lse[None, :], scale, q[0].dtype)
    dv = add_product(dv, p, do, HEAD)
    ds = p * (outer(v, do, HEAD) - delta[None, :])
    return add_product(dk, ds, q, HEAD), dv


@triton.jit
def keys_bwd(
    heads,  # of q, k, v, do
    grad_heads,  # of dk, dv
    lse_row,  # (N,)
    delta_row,  # (N,)
    first,
    N,
    scale,
    HEAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LAST_M: tl.constexpr,
):
    """dK and dV of BLOCK_N keys of a head from `first` on, against blocks of BLOCK_M queries; writes and returns both."""
    q_head, k_head, v_head, do_head = heads
    cols = first + tl.arange(0, BLOCK_N)
    k = load_rows(k_head, cols, N, True, HEAD)
    v = load_rows(v_head, cols, N, True, HEAD)
    dk, dv = zero_rows(BLOCK_N, HEAD), zero_rows(BLOCK_N, HEAD)
    whole = N // BLOCK_M * BLOCK_M
    if LAST_M > 0:
        dk, dv = _dkdv_step(dk, dv, k, v, q_head, do_head, lse_row, delta_row, whole, N, scale, LAST_M, True, HEAD)
    for start in tl.range(0, whole, BLOCK_M, disable_licm=True):
        dk, dv = _dkdv_step(dk, dv, k, v, q_head, do_head, lse_row, delta_row, start, N, scale, BLOCK_M, False, HEAD)
    # keys past N have had their share of every query, in rows of their own: nothing for the sums
    dk = [tl.where((cols < N)[:, None], part * scale, 0.0) for part in dk]
    dv = [tl.where((cols < N)[:, None], part, 0.0) for part in dv]
    store_rows(grad_heads[0], dk, cols, N, HEAD)
    store_rows(grad_heads[1], dv, cols, N, HEAD)
    return dk, dv


@triton.jit
def _attention_bwd_dq_kernel(
    q,  # (pointer, strides of B, N, H) of (B, N, H, Dh), as the next five
    k,
    v,
    o,
    do,
    dq,
    lse_ptr,  # (B, H, N)
    delta_ptr,  # (B, H, N), written here
    sums_ptr,  # (B * tiles, H, Dh)
    N,
    H,
    scale,
    HEAD: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LAST_N: tl.constexpr,
):
    """dQ and delta of BLOCK_M queries of one head."""
    tiles_m = tl.cdiv(N, BLOCK_M)
    pid = tl.program_id(0)
    bh, place = pid // tiles_m, pid % tiles_m
    b, h = bh // H, bh % H
    inputs = [head_of(x, b, h, HEAD) for x in (q, k, v, o, do)]
    lse_row, delta_row = lse_ptr + bh.to(tl.int64) * N, delta_ptr + bh.to(tl.int64) * N
    dq_tile = queries_bwd(
        inputs, head_of(dq, b, h, HEAD), lse_row, delta_row, place * BLOCK_M, N, scale, HEAD, BLOCK_M, BLOCK_N, LAST_N
    )
    if SUMS:
        store_sums(sums_ptr, dq_tile, b * tiles_m + place, h, H, HEAD)


@triton.jit
def _attention_bwd_dkdv_kernel(
    q,  # (pointer, strides of B, N, H) of (B, N, H, Dh), as the next five
    k,
    v,
    do,
    dk,
    dv,
    lse_ptr,  # (B, H, N)
    delta_ptr,  # (B, H, N)
    sums_ptr,  # (B * tiles, 2, H, Dh)
    N,
    H,
    scale,
    HEAD: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LAST_M: tl.constexpr,
):
    """dK and dV of BLOCK_N keys of one head."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    bh, place = pid // tiles_n, pid % tiles_n
    b, h = bh // H, bh % H
    inputs = [head_of(x, b, h, HEAD) for x in (q, k, v, do)]
    grads = [head_of(x, b, h, HEAD) for x in (dk, dv)]
    lse_row, delta_row = lse_ptr + bh.to(tl.int64) * N, delta_ptr + bh.to(tl.int64) * N
    dk_tile, dv_tile = keys_bwd(
        inputs, grads, lse_row, delta_row, place * BLOCK_N, N, scale, HEAD, BLOCK_N, BLOCK_M, LAST_M
    )
    if SUMS:
        slot = (b * tiles_n + place) * 2
        store_sums(sums_ptr, dk_tile, slot, h, H, HEAD)
        store_sums(sums_ptr, dv_tile, slot + 1, h, H, HEAD)


@triton.jit
def _attention_bwd_phases_kernel(
    q,  # (pointer, strides of B, N, H) of (B, N, H, Dh), as the next seven
    k,
    v,
    o,
    do,
    dq,
    dk,
    dv,
    lse_ptr,  # (B, H, N)
    delta_ptr,  # (B, H, N), written and read here
    q_sums_ptr,  # (B * query tiles, H, Dh)
    kv_sums_ptr,  # (B * key tiles, 2, H, Dh)
    N,
    H,
    scale,
    HEAD: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_M1: tl.constexpr,
    BLOCK_N1: tl.constexpr,
    LAST_N1: tl.constexpr,
    BLOCK_M2: tl.constexpr,
    BLOCK_N2: tl.constexpr,
    LAST_M2: tl.constexpr,
):
    """One head: first dQ, tile after tile (BLOCK_M1 queries against blocks of BLOCK_N1 keys), then dK and dV (BLOCK_N2 keys, BLOCK_M2 queries)."""
    bh = tl.program_id(0)
    b, h = bh // H, bh % H
    inputs = [head_of(x, b, h, HEAD) for x in (q, k, v, o, do)]
    dq_head, kv_grads = head_of(dq, b, h, HEAD), [head_of(x, b, h, HEAD) for x in (dk, dv)]
    lse_row, delta_row = lse_ptr + bh.to(tl.int64) * N, delta_ptr + bh.to(tl.int64) * N
    tiles_m, tiles_n = tl.cdiv(N, BLOCK_M1), tl.cdiv(N, BLOCK_N2)
    for place in tl.range(0, tiles_m, num_stages=1, disable_licm=True):
        dq_tile = queries_bwd(
            inputs, dq_head, lse_row, delta_row, place * BLOCK_M1, N, scale, HEAD, BLOCK_M1, BLOCK_N1, LAST_N1
        )
        if SUMS:
            store_sums(q_sums_ptr, dq_tile, b * tiles_m + place, h, H, HEAD)
    # delta was written by other threads of this program
    tl.debug_barrier()
    for place in tl.range(0, tiles_n, num_stages=1, disable_licm=True):
        without_o = (inputs[0], inputs[1], inputs[2], inputs[4])
        dk_tile, dv_tile = keys_bwd(
            without_o, kv_grads, lse_row, delta_row, place * BLOCK_N2, N, scale, HEAD, BLOCK_N2, BLOCK_M2, LAST_M2
        )
        if SUMS:
            slot = (b * tiles_n + place) * 2
            store_sums(kv_sums_ptr, dk_tile, slot, h, H, HEAD)
            store_sums(kv_sums_ptr, dv_tile, slot + 1, h, H, HEAD)
