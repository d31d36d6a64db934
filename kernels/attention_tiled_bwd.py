"""Attention backward in blocks: dQ of some queries against every key (which also leaves delta = rowsum(o do)), dK and dV of some keys against every query.

Two kernels, a program for each tile; or, where a head is short enough to stay in the cache, both phases in one program for each head. Seven matrix
products where the whole-row kernel of attention.py has five, but tiles of 64 rows and more, and nothing kept in registers from one to the next.
Blocks as in attention_tiled.py: whole ones without masks, then a short masked one.
"""

import triton
import triton.language as tl

from .attention_parts import add_product, head_of, load_rows, outer, row_dot, store_rows, store_sums, weights, zero_rows


@triton.jit
def _dq_step(dq, q, do, lse, delta, k_head, v_head, start, N, scale, KEYS: tl.constexpr, MASK: tl.constexpr, HEAD: tl.constexpr):
    """dQ / scale += dS K for one block of keys."""
    cols = start + tl.arange(0, KEYS)
    k = load_rows(k_head, cols, N, MASK, HEAD)
    v = load_rows(v_head, cols, N, MASK, HEAD)
    p = weights(outer(q, k, HEAD), lse[:, None], scale, q[0].dtype)
    if MASK:
        p = tl.where((cols < N)[None, :], p, 0.0)
    ds = p * (outer(do, v, HEAD) - delta[:, None])
    return add_product(dq, ds, k, HEAD)


@triton.jit
def queries_bwd(
    q_head,
    k_head,
    v_head,
    o_head,
    do_head,
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
    rows = first + tl.arange(0, BLOCK_M)
    q = load_rows(q_head, rows, N, True, HEAD)
    do = load_rows(do_head, rows, N, True, HEAD)
    delta = row_dot(load_rows(o_head, rows, N, True, HEAD), do)
    tl.store(delta_row + rows, delta, mask=rows < N)
    # +inf past N: those queries weigh nothing
    lse = tl.load(lse_row + rows, mask=rows < N, other=float("inf"))
    dq = zero_rows(BLOCK_M, HEAD)
    whole = N // BLOCK_N * BLOCK_N
    for start in range(0, whole, BLOCK_N):
        dq = _dq_step(dq, q, do, lse, delta, k_head, v_head, start, N, scale, BLOCK_N, False, HEAD)
    if LAST_N > 0:
        dq = _dq_step(dq, q, do, lse, delta, k_head, v_head, whole, N, scale, LAST_N, True, HEAD)
    dq = [part * scale for part in dq]
    store_rows(dq_head, dq, rows, N, HEAD)
    return dq


@triton.jit
def _dkdv_step(dk, dv, k, v, q_head, do_head, lse_row, delta_row, start, in_keys, N, scale, QUERIES: tl.constexpr, MASK: tl.constexpr, HEAD: tl.constexpr):
    """dK / scale += dS^T Q and dV += P^T dO for one block of queries; everything transposed, so that P^T and dS^T are left operands as they come."""
    rows = start + tl.arange(0, QUERIES)
    q = load_rows(q_head, rows, N, MASK, HEAD)
    do = load_rows(do_head, rows, N, MASK, HEAD)
    lse = tl.load(lse_row + rows, mask=rows < N, other=float("inf"))
    delta = tl.load(delta_row + rows, mask=rows < N, other=0.0)
    p = weights(outer(k, q, HEAD), lse[None, :], scale, q[0].dtype)
    p = tl.where(in_keys[:, None], p, 0.0)
    dv = add_product(dv, p, do, HEAD)
    ds = p * (outer(v, do, HEAD) - delta[None, :])
    return add_product(dk, ds, q, HEAD), dv


@triton.jit
def keys_bwd(
    q_head,
    k_head,
    v_head,
    do_head,
    dk_head,
    dv_head,
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
    cols = first + tl.arange(0, BLOCK_N)
    in_keys = cols < N
    k = load_rows(k_head, cols, N, True, HEAD)
    v = load_rows(v_head, cols, N, True, HEAD)
    dk, dv = zero_rows(BLOCK_N, HEAD), zero_rows(BLOCK_N, HEAD)
    whole = N // BLOCK_M * BLOCK_M
    for start in range(0, whole, BLOCK_M):
        dk, dv = _dkdv_step(dk, dv, k, v, q_head, do_head, lse_row, delta_row, start, in_keys, N, scale, BLOCK_M, False, HEAD)
    if LAST_M > 0:
        dk, dv = _dkdv_step(dk, dv, k, v, q_head, do_head, lse_row, delta_row, whole, in_keys, N, scale, LAST_M, True, HEAD)
    dk = [part * scale for part in dk]
    store_rows(dk_head, dk, cols, N, HEAD)
    store_rows(dv_head, dv, cols, N, HEAD)
    return dk, dv


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
    q_strides,  # of B, N, H
    k_strides,
    v_strides,
    o_strides,
    do_strides,
    dq_strides,
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
    bh, tile = pid // tiles_m, pid % tiles_m
    b, h = bh // H, bh % H
    q, k, v = head_of(q_ptr, q_strides, b, h, HEAD), head_of(k_ptr, k_strides, b, h, HEAD), head_of(v_ptr, v_strides, b, h, HEAD)
    o, do, dq = head_of(o_ptr, o_strides, b, h, HEAD), head_of(do_ptr, do_strides, b, h, HEAD), head_of(dq_ptr, dq_strides, b, h, HEAD)
    lse, delta = lse_ptr + bh.to(tl.int64) * N, delta_ptr + bh.to(tl.int64) * N
    dq = queries_bwd(q, k, v, o, do, dq, lse, delta, tile * BLOCK_M, N, scale, HEAD, BLOCK_M, BLOCK_N, LAST_N)
    if SUMS:
        store_sums(sums_ptr, dq, b * tiles_m + tile, h, H, HEAD)


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
    q_strides,  # of B, N, H
    k_strides,
    v_strides,
    do_strides,
    dk_strides,  # dV's too
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
    bh, tile = pid // tiles_n, pid % tiles_n
    b, h = bh // H, bh % H
    q, k, v = head_of(q_ptr, q_strides, b, h, HEAD), head_of(k_ptr, k_strides, b, h, HEAD), head_of(v_ptr, v_strides, b, h, HEAD)
    do, dk, dv = head_of(do_ptr, do_strides, b, h, HEAD), head_of(dk_ptr, dk_strides, b, h, HEAD), head_of(dv_ptr, dk_strides, b, h, HEAD)
    lse, delta = lse_ptr + bh.to(tl.int64) * N, delta_ptr + bh.to(tl.int64) * N
    dk, dv = keys_bwd(q, k, v, do, dk, dv, lse, delta, tile * BLOCK_N, N, scale, HEAD, BLOCK_N, BLOCK_M, LAST_M)
    if SUMS:
        slot = (b * tiles_n + tile) * 2
        store_sums(sums_ptr, dk, slot, h, H, HEAD)
        store_sums(sums_ptr, dv, slot + 1, h, H, HEAD)


@triton.jit
def _attention_bwd_phases_kernel(
    q_ptr,  # (B, N, H, Dh)
    k_ptr,  # (B, N, H, Dh)
    v_ptr,  # (B, N, H, Dh)
    o_ptr,  # (B, N, H, Dh)
    do_ptr,  # (B, N, H, Dh)
    lse_ptr,  # (B, H, N)
    delta_ptr,  # (B, H, N), written and read here
    dq_ptr,  # (B, N, H, Dh)
    dk_ptr,  # (B, N, H, Dh)
    dv_ptr,  # (B, N, H, Dh)
    q_sums_ptr,  # (B * query tiles, H, Dh)
    kv_sums_ptr,  # (B * key tiles, 2, H, Dh)
    N,
    H,
    q_strides,  # of B, N, H
    k_strides,
    v_strides,
    o_strides,
    do_strides,
    dq_strides,  # dK's and dV's too
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
    q, k, v = head_of(q_ptr, q_strides, b, h, HEAD), head_of(k_ptr, k_strides, b, h, HEAD), head_of(v_ptr, v_strides, b, h, HEAD)
    o, do, dq = head_of(o_ptr, o_strides, b, h, HEAD), head_of(do_ptr, do_strides, b, h, HEAD), head_of(dq_ptr, dq_strides, b, h, HEAD)
    dk, dv = head_of(dk_ptr, dq_strides, b, h, HEAD), head_of(dv_ptr, dq_strides, b, h, HEAD)
    lse, delta = lse_ptr + bh.to(tl.int64) * N, delta_ptr + bh.to(tl.int64) * N
    tiles_m, tiles_n = tl.cdiv(N, BLOCK_M1), tl.cdiv(N, BLOCK_N2)
    for tile in range(tiles_m):
        dq_tile = queries_bwd(q, k, v, o, do, dq, lse, delta, tile * BLOCK_M1, N, scale, HEAD, BLOCK_M1, BLOCK_N1, LAST_N1)
        if SUMS:
            store_sums(q_sums_ptr, dq_tile, b * tiles_m + tile, h, H, HEAD)
    # delta was written by other threads of this program
    tl.debug_barrier()
    for tile in range(tiles_n):
        dk_tile, dv_tile = keys_bwd(q, k, v, do, dk, dv, lse, delta, tile * BLOCK_N2, N, scale, HEAD, BLOCK_N2, BLOCK_M2, LAST_M2)
        if SUMS:
            slot = (b * tiles_n + tile) * 2
            store_sums(kv_sums_ptr, dk_tile, slot, h, H, HEAD)
            store_sums(kv_sums_ptr, dv_tile, slot + 1, h, H, HEAD)
