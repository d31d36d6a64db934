"""Attention backward in blocks: dQ of some queries, dK and dV of some keys, against all others.

The kernel for dQ also writes delta = rowsum(o do), which the other reads. They compute seven matrix products where
backward_resident.py has five, but carry nothing from one block to the next, and take samples of any length. The inner
loop has blocks as in forward_tiled.py: first a short masked one, then whole ones without masks. The outer blocks too
end with a short one of 16 rows where that is enough, as for 197 = 3 x 64 + 5: a whole one would cost as much as 64.
"""

import triton
import triton.language as tl

from .common import (
    accumulate,
    dot_nt,
    head_of,
    load_head_rows,
    program_coords,
    row_dot,
    store_head_rows,
    store_sums,
    tile_index,
    zero_head_rows,
)
from .terms import (
    add_bias,
    bias_of,
    keys_of,
    load_rotated_rows,
    rope_of,
    softmax_weights,
    store_unrotated_rows,
    whole_blocks,
)


@triton.jit
def _dq_step(
    dq,
    q,
    do,
    lse,
    delta,
    k_head,
    v_head,
    rope,
    bias,
    keys,
    rows,
    start,
    N,
    scale,
    KEYS: tl.constexpr,
    MASK: tl.constexpr,
    QK: tl.constexpr,
    HEAD: tl.constexpr,
):
    """dQ / scale += dS K for one block of keys."""
    cols = start + tl.arange(0, KEYS)
    k = load_rotated_rows(k_head, rope, cols, keys, MASK, QK)
    v = load_head_rows(v_head, cols, keys, MASK, HEAD)
    s = add_bias(dot_nt(q, k, QK), bias, rows, cols, N, scale, False)
    p = softmax_weights(s, lse[:, None], bias, scale, HEAD)
    if MASK:
        p = tl.where((cols < keys)[None, :], p, 0.0)
    ds = p * (dot_nt(do, v, HEAD) - delta[:, None])
    return accumulate(dq, ds, k, QK)


@triton.jit
def queries_bwd(
    heads,  # of q, k, v, o, do
    dq_head,
    rope,  # this head's, or None
    bias,  # this head's, or None
    keys,  # how many keys count
    lse_row,  # (N,)
    delta_row,  # (N,)
    first,
    N,
    scale,
    UNROTATE: tl.constexpr,
    QK: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LAST_N: tl.constexpr,
    VARIES: tl.constexpr,
    MASK: tl.constexpr = True,  # whether some queries may lie past N
):
    """Writes dQ and delta of BLOCK_M queries from `first` on, by blocks of BLOCK_N keys; returns dQ."""
    q_head, k_head, v_head, o_head, do_head = heads
    ROTATES: tl.constexpr = rope is not None  # if so, addresses computed before the loop would spill
    rows = first + tl.arange(0, BLOCK_M)
    q = load_rotated_rows(q_head, rope, rows, N, MASK, QK)
    do = load_head_rows(do_head, rows, N, MASK, HEAD)
    delta = row_dot(load_head_rows(o_head, rows, N, MASK, HEAD), do)
    tl.store(delta_row + rows, delta, mask=rows < N)
    # lse is +inf past N, so that those queries have zeros in P
    lse = tl.load(lse_row + rows, mask=rows < N, other=float("inf"))
    dq = zero_head_rows(BLOCK_M, QK)
    whole = whole_blocks(keys, BLOCK_N, VARIES)
    if LAST_N > 0:
        dq = _dq_step(
            dq, q, do, lse, delta, k_head, v_head, rope, bias, keys, rows, whole, N, scale, LAST_N, True, QK, HEAD
        )
    for start in tl.range(0, whole, BLOCK_N, disable_licm=ROTATES):
        dq = _dq_step(
            dq, q, do, lse, delta, k_head, v_head, rope, bias, keys, rows, start, N, scale, BLOCK_N, False, QK, HEAD
        )
    return store_unrotated_rows(dq_head, [chunk * scale for chunk in dq], rope, rows, N, UNROTATE, QK)


@triton.jit
def _dkdv_step(
    dk,
    dv,
    k,
    v,
    q_head,
    do_head,
    rope,
    bias,
    lse_row,
    delta_row,
    cols,
    start,
    N,
    scale,
    QUERIES: tl.constexpr,
    MASK: tl.constexpr,
    QK: tl.constexpr,
    HEAD: tl.constexpr,
):
    """dK / scale += dS^T Q and dV += P^T dO for one block of queries.

    Everything is transposed, so that P^T and dS^T are left operands as they are computed.
    """
    rows = start + tl.arange(0, QUERIES)
    q = load_rotated_rows(q_head, rope, rows, N, MASK, QK)
    do = load_head_rows(do_head, rows, N, MASK, HEAD)
    # q and do are zero past N, and so is what they add. With rotary positions, masks prevent spills in every block.
    if MASK or rope is not None:
        lse = tl.load(lse_row + rows, mask=rows < N, other=0.0)
        delta = tl.load(delta_row + rows, mask=rows < N, other=0.0)
    else:
        lse, delta = tl.load(lse_row + rows), tl.load(delta_row + rows)
    s = add_bias(dot_nt(k, q, QK), bias, rows, cols, N, scale, True)
    p = softmax_weights(s, lse[None, :], bias, scale, HEAD)
    dv = accumulate(dv, p, do, HEAD)
    ds = p * (dot_nt(v, do, HEAD) - delta[None, :])
    return accumulate(dk, ds, q, QK), dv


@triton.jit
def keys_bwd(
    heads,  # of q, k, v, do
    grad_heads,  # of dk, dv
    rope,  # this head's, or None
    bias,  # this head's, or None
    keys,  # how many keys count
    lse_row,  # (N,)
    delta_row,  # (N,)
    first,
    N,
    scale,
    UNROTATE: tl.constexpr,
    QK: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LAST_M: tl.constexpr,
    VARIES: tl.constexpr,
    MASK: tl.constexpr = True,  # whether some keys may not count
):
    """Writes and returns dK and dV of BLOCK_N keys from `first` on, by blocks of BLOCK_M queries."""
    q_head, k_head, v_head, do_head = heads
    cols = first + tl.arange(0, BLOCK_N)
    k = load_rotated_rows(k_head, rope, cols, keys, MASK, QK)
    v = load_head_rows(v_head, cols, keys, MASK, HEAD)
    dk, dv = zero_head_rows(BLOCK_N, QK), zero_head_rows(BLOCK_N, HEAD)
    whole = whole_blocks(N, BLOCK_M, VARIES)
    loads, rest = (q_head, do_head), (lse_row, delta_row, cols)
    if LAST_M > 0:
        dk, dv = _dkdv_step(dk, dv, k, v, *loads, rope, bias, *rest, whole, N, scale, LAST_M, True, QK, HEAD)
    for start in tl.range(0, whole, BLOCK_M, disable_licm=True):
        dk, dv = _dkdv_step(dk, dv, k, v, *loads, rope, bias, *rest, start, N, scale, BLOCK_M, False, QK, HEAD)
    dk = [chunk * scale for chunk in dk]
    if MASK:  # hidden keys have gathered gradients like the others, each in its own row; these are set to zero here
        dk = [tl.where((cols < keys)[:, None], chunk, 0.0) for chunk in dk]
        dv = [tl.where((cols < keys)[:, None], chunk, 0.0) for chunk in dv]
    if rope is not None:
        # Without it the tables loaded for k would stay in registers until here; for dQ the store of delta does this.
        tl.debug_barrier()
    dk = store_unrotated_rows(grad_heads[0], dk, rope, cols, N, UNROTATE, QK)
    store_head_rows(grad_heads[1], dv, cols, N, HEAD)
    return dk, dv


@triton.jit
def store_key_sums(sums_ptr, dkdv, block, h, H, QK: tl.constexpr, HEAD: tl.constexpr):
    """Writes the column sums of dK and dV to sums[block, :, h], sums (blocks, 2, H, Dh) fp32.

    The rows of dS sum to zero, so dK sums to zero over all keys, unless it is rotated back.
    """
    dk = zero_head_rows(1, QK) if QK.rope_layout == "" else dkdv[0]
    store_sums(sums_ptr, dk, block * 2, h, H, QK)
    store_sums(sums_ptr, dkdv[1], block * 2 + 1, h, H, HEAD)


@triton.jit(do_not_specialize=["tokens"])
def _attention_bwd_dq_kernel(
    inputs,  # q, k, v, o, do (B, N, H, Dh), each its pointer and its strides of B, N, H
    dq,  # likewise
    lse_ptr,  # (B, H, N)
    delta_ptr,  # (B, H, N), written here
    sums_ptr,  # (B * blocks, H, Dh)
    terms,  # rope, bias, key lengths, each may be None: as forward_tiled.py takes them
    table_ptr,  # as forward_tiled.py takes it, or None
    tokens,  # of all packed samples
    N,
    H,
    scale,
    UNROTATE: tl.constexpr,
    QK: tl.constexpr,
    HEAD: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LAST_N: tl.constexpr,
    SHORT_M: tl.constexpr,
):
    """Computes dQ and delta of BLOCK_M queries of a head; SHORT_M, if not 0, is the last block's size."""
    PACKED: tl.constexpr = table_ptr is not None
    VARIES: tl.constexpr = terms[2] is not None or PACKED
    b, h, index, first, n, lse_at = program_coords(table_ptr, tokens, N, H, BLOCK_M)
    if PACKED:
        if n == 0:  # this program has no tile
            if SUMS:
                store_sums(sums_ptr, zero_head_rows(16, QK), tile_index(b, index, N, H, BLOCK_M, PACKED), h, H, QK)
            return
    heads = [head_of(x, b, h, HEAD, first, PACKED) for x in inputs]
    dq_head = head_of(dq, b, h, HEAD, first, PACKED)
    rope = rope_of(terms[0], b, h, first, PACKED) if terms[0] is not None else None
    bias = bias_of(terms[1], b, h) if terms[1] is not None else None
    rows = (keys_of(terms[2], b, n), lse_ptr + lse_at, delta_ptr + lse_at, index * BLOCK_M, n, scale)
    if SHORT_M > 0:
        if index == n // BLOCK_M:
            dq_block = queries_bwd(
                heads, dq_head, rope, bias, *rows, UNROTATE, QK, HEAD, SHORT_M, BLOCK_N, LAST_N, VARIES
            )
            if SUMS:
                store_sums(sums_ptr, dq_block, tile_index(b, index, N, H, BLOCK_M, PACKED), h, H, QK)
            return
    dq_block = queries_bwd(
        heads, dq_head, rope, bias, *rows, UNROTATE, QK, HEAD, BLOCK_M, BLOCK_N, LAST_N, VARIES, SHORT_M == 0
    )
    if SUMS:
        store_sums(sums_ptr, dq_block, tile_index(b, index, N, H, BLOCK_M, PACKED), h, H, QK)


@triton.jit(do_not_specialize=["tokens"])
def _attention_bwd_dkdv_kernel(
    inputs,  # q, k, v, do (B, N, H, Dh), each its pointer and its strides of B, N, H
    grads,  # dk and dv, likewise
    lse_ptr,  # (B, H, N)
    delta_ptr,  # (B, H, N)
    sums_ptr,  # (B * blocks, 2, H, Dh)
    terms,  # rope, bias, key lengths, each may be None: as forward_tiled.py takes them
    table_ptr,  # as forward_tiled.py takes it, or None
    tokens,  # of all packed samples
    N,
    H,
    scale,
    UNROTATE: tl.constexpr,
    QK: tl.constexpr,
    HEAD: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LAST_M: tl.constexpr,
    SHORT_N: tl.constexpr,
):
    """Computes dK and dV of BLOCK_N keys of a head; SHORT_N, if not 0, is the last block's size."""
    PACKED: tl.constexpr = table_ptr is not None
    b, h, index, first, n, lse_at = program_coords(table_ptr, tokens, N, H, BLOCK_N)
    if PACKED:
        if n == 0:  # this program has no tile
            if SUMS:
                zeros = (zero_head_rows(16, QK), zero_head_rows(16, HEAD))
                store_key_sums(sums_ptr, zeros, tile_index(b, index, N, H, BLOCK_N, PACKED), h, H, QK, HEAD)
            return
    heads = [head_of(x, b, h, HEAD, first, PACKED) for x in inputs]
    grad_heads = [head_of(x, b, h, HEAD, first, PACKED) for x in grads]
    rope = rope_of(terms[0], b, h, first, PACKED) if terms[0] is not None else None
    bias = bias_of(terms[1], b, h) if terms[1] is not None else None
    rows = (keys_of(terms[2], b, n), lse_ptr + lse_at, delta_ptr + lse_at, index * BLOCK_N, n, scale)
    if SHORT_N > 0:
        if index == n // BLOCK_N:
            dkdv = keys_bwd(heads, grad_heads, rope, bias, *rows, UNROTATE, QK, HEAD, SHORT_N, BLOCK_M, LAST_M, PACKED)
            if SUMS:
                store_key_sums(sums_ptr, dkdv, tile_index(b, index, N, H, BLOCK_N, PACKED), h, H, QK, HEAD)
            return
    dkdv = keys_bwd(
        heads, grad_heads, rope, bias, *rows, UNROTATE, QK, HEAD, BLOCK_N, BLOCK_M, LAST_M, PACKED, SHORT_N == 0
    )
    if SUMS:
        store_key_sums(sums_ptr, dkdv, tile_index(b, index, N, H, BLOCK_N, PACKED), h, H, QK, HEAD)
