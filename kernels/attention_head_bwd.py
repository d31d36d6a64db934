"""Attention backward, one program for each head: key parts outside, query tiles inside, every product by wgmma where there is one (sm_90).

For sequences of a few tiles (N up to 320), in 16 bits. Four warps and 64 x 64 tiles leave room for three programs on a multiprocessor:

1. Over tiles of queries: -lse / scale and -delta = -rowsum(o do) go to an fp32 scratch; they are where the accumulators of S and dP start, so
   that P = exp(scale S) and dS = P dP need no subtraction. Where 16 or fewer keys follow the last whole part (197 = 3 x 64 + 5, 257 = 4 x 64 + 1),
   they are done here, queries x keys: dV^T = dO^T P, dK^T = Q^T dS, dQ = dS K.
2. Over parts of keys, and within over tiles of queries, keys x queries: P^T and dS^T feed dV and dK from registers as they come; dQ^T = K^T dS^T is
   added up from part to part in an fp32 scratch: what keys have in common cancels in the sum over all of them alone, and 16 bits would lose the rest.
3. dQ is written from the scratch. One program has the head: no atomics.

A program goes from head to head, so that its scratch stays in L2 (396 programs x 52 KB at N = 197) and need not reach memory.

disable_licm: addresses are made anew in each loop rather than before it, which saves the registers that a third program needs.

Rows of softmax sum to one: the sum of dV over the keys is that of dO over the queries. Those of dS sum to zero: so does dK. Only dQ is summed up.
The layout is FlashAttention-3's (Shah et al., 2024) for a sequence that one program holds, dQ as in FlashAttention-2 (Dao, 2023).
"""

import triton
import triton.language as tl

from .attention_parts import (
    LOG2E,
    add_product,
    add_rows,
    head_of,
    load_part,
    load_rows,
    outer,
    row_dot,
    store_part,
    store_rows,
    store_sums,
    zero_rows,
)


@triton.jit
def load_tile(head, box, rest, b, h, rows, first, N, HEAD: tl.constexpr):
    """Rows of a head as its parts, zeros past N: head h of the descriptors, or by pointers where there are none."""
    D0: tl.constexpr = HEAD.first
    D1: tl.constexpr = HEAD.second
    if box is None:
        return load_rows(head, rows, N, True, HEAD)
    else:
        tile = box.load([b, h, first, 0]).reshape(rows.shape[0], D0)
        if D1 > 0:
            return (tile, rest.load([b, h, first, D0]).reshape(rows.shape[0], D1))
        else:
            return (tile,)


@triton.jit
def store_tile(head, box, rest, b, h, x, rows, first, N, HEAD: tl.constexpr):
    """Writes the parts x of some rows of a head, as load_tile reads them."""
    D0: tl.constexpr = HEAD.first
    D1: tl.constexpr = HEAD.second
    if box is None:
        store_rows(head, x, rows, N, HEAD)
    else:
        box.store([b, h, first, 0], x[0].to(box.dtype).reshape(1, 1, rows.shape[0], D0))
        if D1 > 0:
            rest.store([b, h, first, D0], x[1].to(box.dtype).reshape(1, 1, rows.shape[0], D1))


@triton.jit
def times(p, dp, dtype: tl.constexpr, EXACT: tl.constexpr):
    """P dP in 16 bits. In fp32 where EXACT; in fp16 from the rounded P, since dP may be past its largest number; in bf16 from both rounded."""
    if EXACT:
        return (p * dp).to(dtype)
    elif dtype == tl.float16:
        return (p.to(dtype).to(tl.float32) * dp).to(dtype)
    else:
        return p.to(dtype) * dp.to(dtype)


@triton.jit
def add_dq(acc, ds, k, rows, N, scale, before, FIRST: tl.constexpr, HEAD: tl.constexpr):
    """scale dS K for one part of the head, ds (keys, queries), onto what acc has where there was a part before.

    wgmma has 64 rows: they are the head's columns where there are that many, else the queries.
    """
    SIZE: tl.constexpr = k.shape[1]
    if SIZE % 64 == 0:
        dq = tl.trans(tl.dot(tl.trans(k), ds, input_precision=HEAD.precision)) * scale
    else:
        dq = tl.dot(tl.trans(ds), k, input_precision=HEAD.precision) * scale
    # under `if`: a load that is always made would be pipelined, with registers for its addresses
    if before:
        dq += load_part(acc, rows, N, FIRST, SIZE, True, HEAD)
    store_part(acc, dq, rows, N, FIRST, HEAD)


@triton.jit
def statistics(o, do, rows, lse_row, stat, N, scale, HEAD: tl.constexpr):
    """-lse / scale and -delta of some queries, written to both rows of stat, and dO's parts."""
    do_tile = load_rows(do, rows, N, True, HEAD)
    ndelta = -row_dot(load_rows(o, rows, N, True, HEAD), do_tile)
    # -inf past N: those queries weigh nothing
    nlse = tl.load(lse_row + rows, mask=rows < N, other=float("inf")) * (-1 / scale)
    tl.store(stat[0] + rows, nlse)
    tl.store(stat[1] + rows, ndelta)
    return nlse, ndelta, do_tile


@triton.jit
def before_parts(
    inputs,
    grads,
    lse_row,
    stat,
    N,
    scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LAST_N: tl.constexpr,
    HEAD: tl.constexpr,
):
    """Step 1: the statistics of every query, the gradients of the last LAST_N keys and what they add to dQ. grads: dQ's scratch, heads of dK and dV.

    The last keys see a head padded to 64 or 128 columns: no product is too narrow for wgmma.
    """
    D0: tl.constexpr = HEAD.first
    WIDE: tl.constexpr = 64 if HEAD.first + HEAD.second <= 64 else 128
    q, k, v, o, do = inputs
    dq_acc, dk, dv = grads
    if LAST_N > 0:
        keys = N // BLOCK_N * BLOCK_N + tl.arange(0, LAST_N)
        k_tile, v_tile = load_part(k, keys, N, 0, WIDE, True, HEAD), load_part(v, keys, N, 0, WIDE, True, HEAD)
        dk_tile, dv_tile = tl.zeros((WIDE, LAST_N), tl.float32), tl.zeros((WIDE, LAST_N), tl.float32)
        bias = tl.where(keys < N, 0.0, float("-inf"))
    for start in tl.range(0, N, BLOCK_M, num_stages=1, disable_licm=True):
        rows = start + tl.arange(0, BLOCK_M)
        nlse, ndelta, do_parts = statistics(o, do, rows, lse_row, stat, N, scale, HEAD)
        if LAST_N > 0:
            q_tile = load_part(q, rows, N, 0, WIDE, True, HEAD)
            do_tile = do_parts[0] if WIDE == D0 else load_part(do, rows, N, 0, WIDE, True, HEAD)
            p = tl.exp2(outer((q_tile,), (k_tile,), HEAD, nlse[:, None] + bias[None, :]) * (scale * LOG2E))
            dp = outer((do_tile,), (v_tile,), HEAD, tl.broadcast_to(ndelta[:, None], (BLOCK_M, LAST_N)))
            ds = (p * dp).to(q_tile.dtype)
            dv_tile = tl.dot(tl.trans(do_tile), p.to(do_tile.dtype), dv_tile, input_precision=HEAD.precision)
            dk_tile = tl.dot(tl.trans(q_tile), ds, dk_tile, input_precision=HEAD.precision)
            store_part(dq_acc, tl.dot(ds, k_tile, input_precision=HEAD.precision) * scale, rows, N, 0, HEAD)
    if LAST_N > 0:
        store_part(dk, tl.trans(dk_tile * scale), keys, N, 0, HEAD)
        store_part(dv, tl.trans(dv_tile), keys, N, 0, HEAD)


@triton.jit(do_not_specialize=["heads"])
def _attention_bwd_head_kernel(
    q,  # (pointer, strides of B, N, H) of (B, N, H, Dh), as the next seven
    k,
    v,
    o,
    do,
    dq,
    dk,
    dv,
    lse_ptr,  # (B, H, N)
    stat_ptr,  # (programs, 2, padded: whole tiles of queries), written and read here: -lse / scale and -delta
    dq_acc_ptr,  # (programs, N, Dh), written and read here
    sums_ptr,  # (B, 3, H, Dh)
    qkv_box,  # descriptor of (B, 3 H, N, Dh), its blocks BLOCK_M rows of the first part of a head; None: by pointers
    qkv_rest,  # of the second part, where there is one
    do_box,  # of (B, H, N, Dh)
    do_rest,
    dqkv_box,  # of (B, 3 H, N, Dh)
    dqkv_rest,
    heads,  # B H
    N,
    H,
    padded,
    scale,
    HEAD: tl.constexpr,
    SUMS: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LAST_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dq, dk, dv of every so-many-th head, in BLOCK_N keys by BLOCK_M queries; LAST_N keys apart (0: N divides, or the last part is masked)."""
    D0: tl.constexpr = HEAD.first
    DTYPE: tl.constexpr = q[0].dtype.element_ty
    pid = tl.program_id(0).to(tl.int64)
    stat = (stat_ptr + pid * (2 * padded), stat_ptr + (pid * (2 * padded) + padded))
    dq_acc = (dq_acc_ptr + pid * (N * HEAD.dim), HEAD.dim)
    for turn in tl.range(0, tl.cdiv(heads - tl.program_id(0), tl.num_programs(0)), num_stages=1, disable_licm=True):
        bh = tl.program_id(0) + turn * tl.num_programs(0)
        b, h = bh // H, bh % H
        q_head, k_head, v_head, o_head, do_head = [head_of(x, b, h, HEAD) for x in (q, k, v, o, do)]
        dq_head, dk_head, dv_head = [head_of(x, b, h, HEAD) for x in (dq, dk, dv)]
        inputs, grads = (q_head, k_head, v_head, o_head, do_head), (dq_acc, dk_head, dv_head)
        lse_row = lse_ptr + bh.to(tl.int64) * N
        before_parts(inputs, grads, lse_row, stat, N, scale, BLOCK_M, BLOCK_N, LAST_N, HEAD)
        # the statistics, and what dq has so far, were written by other threads of this program
        tl.debug_barrier()

        for first in tl.range(0, N // BLOCK_N * BLOCK_N if LAST_N > 0 else N, BLOCK_N, num_stages=1, disable_licm=True):
            keys = first + tl.arange(0, BLOCK_N)
            k_tile = load_tile(k_head, qkv_box, qkv_rest, b, H + h, keys, first, N, HEAD)
            v_tile = load_tile(v_head, qkv_box, qkv_rest, b, 2 * H + h, keys, first, N, HEAD)
            dk_tile, dv_tile = zero_rows(BLOCK_N, HEAD), zero_rows(BLOCK_N, HEAD)
            for start in tl.range(0, padded, BLOCK_M, num_stages=STAGES, disable_licm=True):
                rows = start + tl.arange(0, BLOCK_M)
                q_tile = load_tile(q_head, qkv_box, qkv_rest, b, h, rows, start, N, HEAD)
                do_tile = load_tile(do_head, do_box, do_rest, b, h, rows, start, N, HEAD)
                nlse = tl.load(stat[0] + rows)[None, :]
                if LAST_N > 0:
                    nlse = tl.broadcast_to(nlse, (BLOCK_N, BLOCK_M))
                else:
                    nlse = tl.where(keys < N, 0.0, float("-inf"))[:, None] + nlse
                p = tl.exp2(outer(k_tile, q_tile, HEAD, nlse) * (scale * LOG2E))
                dv_tile = add_product(dv_tile, p, do_tile, HEAD)
                dp = outer(v_tile, do_tile, HEAD, tl.broadcast_to(tl.load(stat[1] + rows)[None, :], (BLOCK_N, BLOCK_M)))
                ds = times(p, dp, DTYPE, EXACT)
                dk_tile = add_product(dk_tile, ds, q_tile, HEAD)
                # what the part before left, or the last keys
                before = N > 0 if LAST_N > 0 else first > 0
                add_dq(dq_acc, ds, k_tile[0], rows, N, scale, before, 0, HEAD)
                if len(k_tile) > 1:
                    add_dq(dq_acc, ds, k_tile[1], rows, N, scale, before, D0, HEAD)
            store_tile(dk_head, dqkv_box, dqkv_rest, b, H + h, [part * scale for part in dk_tile], keys, first, N, HEAD)
            store_tile(dv_head, dqkv_box, dqkv_rest, b, 2 * H + h, dv_tile, keys, first, N, HEAD)
            # the scratch was written by other threads than will read it
            tl.debug_barrier()

        dq_sums, do_sums = zero_rows(16, HEAD), zero_rows(16, HEAD)
        for start in tl.range(0, N, 16, num_stages=1, disable_licm=True):
            rows = start + tl.arange(0, 16)
            dq_tile = load_rows(dq_acc, rows, N, True, HEAD)
            store_rows(dq_head, dq_tile, rows, N, HEAD)
            if SUMS:
                dq_sums = add_rows(dq_sums, dq_tile)
                do_sums = add_rows(do_sums, load_rows(do_head, rows, N, True, HEAD))
        if SUMS:
            store_sums(sums_ptr, dq_sums, b * 3, h, H, HEAD)
            store_sums(sums_ptr, zero_rows(1, HEAD), b * 3 + 1, h, H, HEAD)
            store_sums(sums_ptr, do_sums, b * 3 + 2, h, H, HEAD)
        # the next head writes the scratch that other threads have read
        tl.debug_barrier()
