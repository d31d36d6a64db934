"""Attention backward, one program for each head: blocks of keys outside, blocks of queries inside.

It serves sequences of a few blocks (N up to 320) in 16 bits; on sm_90 every product is a wgmma. Four warps and 64 x 64
blocks leave room for three programs on a multiprocessor. For each head, a program takes three steps:

1. It loops over blocks of queries and writes -lse / scale and -delta = -rowsum(o do) to an fp32 scratch. The
   accumulators of S and dP start from these, so that P = exp(scale S) and dS = P dP need no subtraction. Where 16 or
   fewer keys follow the last whole block (197 = 3 x 64 + 5, 257 = 4 x 64 + 1), this step also does those keys, with
   queries as rows and keys as columns: dV^T = dO^T P, dK^T = Q^T dS, dQ = dS K.
2. It loops over blocks of keys, and inside over blocks of queries, with keys as rows and queries as columns. P^T and
   dS^T feed dV and dK straight from registers. dQ^T = K^T dS^T is added up over the blocks in an fp32 scratch, because
   a component that all keys share cancels only in the sum over all of them, and 16 bits would lose the rest.
3. It writes dQ from the scratch. One program owns the whole head, so no atomics are needed.

A program goes from head to head, so that its scratch stays in L2 (396 programs x 52 KB at N = 197) and need not reach
memory.

With disable_licm, addresses are computed in each loop rather than before it, which saves the registers that a third
program needs.

The rows of P sum to one, so the sum of dV over the keys is that of dO over the queries. The rows of dS sum to zero, so
the sum of dK is zero. Only dQ has to be summed. The layout is FlashAttention-3's (Shah et al., 2024) for a sequence
that one program holds; dQ is added up as in FlashAttention-2 (Dao, 2023).
"""

import triton
import triton.language as tl

from .common import (
    LOG2E,
    accumulate,
    add_head_rows,
    dot_nt,
    head_of,
    load_head_chunk,
    load_head_rows,
    row_dot,
    store_head_chunk,
    store_head_rows,
    store_sums,
    zero_head_rows,
)


@triton.jit
def load_block(head, box, rest, b, h, rows, first, N, HEAD: tl.constexpr):
    """Loads rows of a head as its chunks, zeros past N; through pointers where `box` is None."""
    D0: tl.constexpr = HEAD.first
    D1: tl.constexpr = HEAD.second
    if box is None:
        return load_head_rows(head, rows, N, True, HEAD)
    else:
        chunk = box.load([b, h, first, 0]).reshape(rows.shape[0], D0)
        if D1 > 0:
            return (chunk, rest.load([b, h, first, D0]).reshape(rows.shape[0], D1))
        else:
            return (chunk,)


@triton.jit
def store_block(head, box, rest, b, h, x, rows, first, N, HEAD: tl.constexpr):
    """Writes x, the chunks of some rows of a head, to where load_block reads them."""
    D0: tl.constexpr = HEAD.first
    D1: tl.constexpr = HEAD.second
    if box is None:
        store_head_rows(head, x, rows, N, HEAD)
    else:
        box.store([b, h, first, 0], x[0].to(box.dtype).reshape(1, 1, rows.shape[0], D0))
        if D1 > 0:
            rest.store([b, h, first, D0], x[1].to(box.dtype).reshape(1, 1, rows.shape[0], D1))


@triton.jit
def times(p, dp, dtype: tl.constexpr, EXACT: tl.constexpr):
    """P dP in 16 bits, computed in fp32 where EXACT.

    Otherwise fp16 rounds P alone, since dP may exceed fp16's largest number, and bf16 rounds both before the product.
    """
    if EXACT:
        return (p * dp).to(dtype)
    elif dtype == tl.float16:
        return (p.to(dtype).to(tl.float32) * dp).to(dtype)
    else:
        return p.to(dtype) * dp.to(dtype)


@triton.jit
def add_dq(acc, ds, k, rows, N, scale, before, FIRST: tl.constexpr, HEAD: tl.constexpr):
    """Adds scale dS K for one chunk of the head to acc, or overwrites acc where not `before`.

    ds is (keys, queries). A wgmma has 64 rows: the chunk's columns where 64 divides their number, else the queries.
    """
    SIZE: tl.constexpr = k.shape[1]
    if SIZE % 64 == 0:
        dq = tl.trans(tl.dot(tl.trans(k), ds, input_precision=HEAD.precision)) * scale
    else:
        dq = tl.dot(tl.trans(ds), k, input_precision=HEAD.precision) * scale
    # This is under `if` because an unconditional load would be pipelined, and its addresses would take registers.
    if before:
        dq += load_head_chunk(acc, rows, N, FIRST, SIZE, True, HEAD)
    store_head_chunk(acc, dq, rows, N, FIRST, HEAD)


@triton.jit
def statistics(o, do, rows, lse_row, stat, N, scale, HEAD: tl.constexpr):
    """Writes -lse / scale and -delta of some queries to both rows of stat; returns them and dO's chunks."""
    do_block = load_head_rows(do, rows, N, True, HEAD)
    ndelta = -row_dot(load_head_rows(o, rows, N, True, HEAD), do_block)
    # -inf past N: those queries weigh nothing
    nlse = tl.load(lse_row + rows, mask=rows < N, other=float("inf")) * (-1 / scale)
    tl.store(stat[0] + rows, nlse)
    tl.store(stat[1] + rows, ndelta)
    return nlse, ndelta, do_block


@triton.jit
def before_key_blocks(
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
    """Step 1: the statistics of every query, the gradients of the last LAST_N keys, their share of dQ.

    grads: dQ's scratch and the heads of dK and dV. For the last keys the head is padded to 64 or 128 columns, so that
    no product is too narrow for wgmma.
    """
    D0: tl.constexpr = HEAD.first
    WIDE: tl.constexpr = 64 if HEAD.first + HEAD.second <= 64 else 128
    q, k, v, o, do = inputs
    dq_acc, dk, dv = grads
    if LAST_N > 0:
        keys = N // BLOCK_N * BLOCK_N + tl.arange(0, LAST_N)
        k_block, v_block = (
            load_head_chunk(k, keys, N, 0, WIDE, True, HEAD),
            load_head_chunk(v, keys, N, 0, WIDE, True, HEAD),
        )
        dk_block, dv_block = tl.zeros((WIDE, LAST_N), tl.float32), tl.zeros((WIDE, LAST_N), tl.float32)
        bias = tl.where(keys < N, 0.0, float("-inf"))
    for start in tl.range(0, N, BLOCK_M, num_stages=1, disable_licm=True):
        rows = start + tl.arange(0, BLOCK_M)
        nlse, ndelta, do_chunks = statistics(o, do, rows, lse_row, stat, N, scale, HEAD)
        if LAST_N > 0:
            q_block = load_head_chunk(q, rows, N, 0, WIDE, True, HEAD)
            do_block = do_chunks[0] if WIDE == D0 else load_head_chunk(do, rows, N, 0, WIDE, True, HEAD)
            p = tl.exp2(dot_nt((q_block,), (k_block,), HEAD, nlse[:, None] + bias[None, :]) * (scale * LOG2E))
            dp = dot_nt((do_block,), (v_block,), HEAD, tl.broadcast_to(ndelta[:, None], (BLOCK_M, LAST_N)))
            ds = (p * dp).to(q_block.dtype)
            dv_block = tl.dot(tl.trans(do_block), p.to(do_block.dtype), dv_block, input_precision=HEAD.precision)
            dk_block = tl.dot(tl.trans(q_block), ds, dk_block, input_precision=HEAD.precision)
            store_head_chunk(dq_acc, tl.dot(ds, k_block, input_precision=HEAD.precision) * scale, rows, N, 0, HEAD)
    if LAST_N > 0:
        store_head_chunk(dk, tl.trans(dk_block * scale), keys, N, 0, HEAD)
        store_head_chunk(dv, tl.trans(dv_block), keys, N, 0, HEAD)


@triton.jit(do_not_specialize=["heads"])
def _attention_bwd_head_kernel(
    inputs,  # q, k, v, o, do (B, N, H, Dh), each its pointer and its strides of B, N, H
    grads,  # dq, dk, dv, likewise
    lse_ptr,  # (B, H, N)
    stat_ptr,  # (programs, 2, padded: whole blocks of queries), written and read here: -lse / scale and -delta
    dq_acc_ptr,  # (programs, N, Dh), written and read here
    sums_ptr,  # (B, 3, H, Dh)
    qkv_box,  # descriptor of (B, 3 H, N, Dh) in blocks of BLOCK_M rows of a head's first chunk; None: pointers are used
    qkv_rest,  # the same for the second chunk, where there is one
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
    """dq, dk, dv of the heads of a program, in BLOCK_N keys by BLOCK_M queries.

    LAST_N: how many keys step 1 does; 0 where BLOCK_N divides N or where the last block of keys is masked instead.
    """
    D0: tl.constexpr = HEAD.first
    DTYPE: tl.constexpr = inputs[0][0].dtype.element_ty
    pid = tl.program_id(0).to(tl.int64)
    stat = (stat_ptr + pid * (2 * padded), stat_ptr + (pid * (2 * padded) + padded))
    dq_acc = (dq_acc_ptr + pid * (N * HEAD.dim), HEAD.dim)
    for turn in tl.range(0, tl.cdiv(heads - tl.program_id(0), tl.num_programs(0)), num_stages=1, disable_licm=True):
        bh = tl.program_id(0) + turn * tl.num_programs(0)
        b, h = bh // H, bh % H
        q_head, k_head, v_head, o_head, do_head = [head_of(x, b, h, HEAD) for x in inputs]
        dq_head, dk_head, dv_head = [head_of(x, b, h, HEAD) for x in grads]
        read, written = (q_head, k_head, v_head, o_head, do_head), (dq_acc, dk_head, dv_head)
        lse_row = lse_ptr + bh.to(tl.int64) * N
        before_key_blocks(read, written, lse_row, stat, N, scale, BLOCK_M, BLOCK_N, LAST_N, HEAD)
        # the statistics and the last keys' share of dq were written by other threads of this program
        tl.debug_barrier()

        for first in tl.range(0, N // BLOCK_N * BLOCK_N if LAST_N > 0 else N, BLOCK_N, num_stages=1, disable_licm=True):
            keys = first + tl.arange(0, BLOCK_N)
            k_block = load_block(k_head, qkv_box, qkv_rest, b, H + h, keys, first, N, HEAD)
            v_block = load_block(v_head, qkv_box, qkv_rest, b, 2 * H + h, keys, first, N, HEAD)
            dk_block, dv_block = zero_head_rows(BLOCK_N, HEAD), zero_head_rows(BLOCK_N, HEAD)
            for start in tl.range(0, padded, BLOCK_M, num_stages=STAGES, disable_licm=True):
                rows = start + tl.arange(0, BLOCK_M)
                q_block = load_block(q_head, qkv_box, qkv_rest, b, h, rows, start, N, HEAD)
                do_block = load_block(do_head, do_box, do_rest, b, h, rows, start, N, HEAD)
                nlse = tl.load(stat[0] + rows)[None, :]
                if LAST_N > 0:
                    nlse = tl.broadcast_to(nlse, (BLOCK_N, BLOCK_M))
                else:
                    nlse = tl.where(keys < N, 0.0, float("-inf"))[:, None] + nlse
                p = tl.exp2(dot_nt(k_block, q_block, HEAD, nlse) * (scale * LOG2E))
                dv_block = accumulate(dv_block, p, do_block, HEAD)
                ndelta = tl.broadcast_to(tl.load(stat[1] + rows)[None, :], (BLOCK_N, BLOCK_M))
                dp = dot_nt(v_block, do_block, HEAD, ndelta)
                ds = times(p, dp, DTYPE, EXACT)
                dk_block = accumulate(dk_block, ds, q_block, HEAD)
                # whether the scratch already holds a sum: of earlier blocks of keys, or of the last keys
                before = N > 0 if LAST_N > 0 else first > 0
                add_dq(dq_acc, ds, k_block[0], rows, N, scale, before, 0, HEAD)
                if len(k_block) > 1:
                    add_dq(dq_acc, ds, k_block[1], rows, N, scale, before, D0, HEAD)
            dk_block = [chunk * scale for chunk in dk_block]
            store_block(dk_head, dqkv_box, dqkv_rest, b, H + h, dk_block, keys, first, N, HEAD)
            store_block(dv_head, dqkv_box, dqkv_rest, b, 2 * H + h, dv_block, keys, first, N, HEAD)
            # the threads that read the scratch next are not those that wrote it
            tl.debug_barrier()

        dq_sums, do_sums = zero_head_rows(16, HEAD), zero_head_rows(16, HEAD)
        for start in tl.range(0, N, 16, num_stages=1, disable_licm=True):
            rows = start + tl.arange(0, 16)
            dq_block = load_head_rows(dq_acc, rows, N, True, HEAD)
            store_head_rows(dq_head, dq_block, rows, N, HEAD)
            if SUMS:
                dq_sums = add_head_rows(dq_sums, dq_block)
                do_sums = add_head_rows(do_sums, load_head_rows(do_head, rows, N, True, HEAD))
        if SUMS:
            store_sums(sums_ptr, dq_sums, b * 3, h, H, HEAD)
            store_sums(sums_ptr, zero_head_rows(1, HEAD), b * 3 + 1, h, H, HEAD)
            store_sums(sums_ptr, do_sums, b * 3 + 2, h, H, HEAD)
        # the next head writes the scratch that other threads have read
        tl.debug_barrier()
