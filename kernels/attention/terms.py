"""Terms of the logits of attention: rotary positions, a bias, hidden keys; and their gradients.

Rotary positions (Su et al., 2021): q and k are rotated as they are loaded, and their gradients are rotated back.

For tokens after the first num_prefix, a pair (a, b) of columns becomes (a cos_a - b sin_a, b cos_b + a sin_b), and its
gradient (da, db) comes back as (da cos_a + db sin_b, db cos_b - da sin_a). A head's two chunks are the first and the
second columns of its pairs: its halves ("half"), or its even and odd columns ("interleaved"), which come in one load.
The products sum over a head's columns in any order, so they are the same for all of these.

Rotated q and k are never written to memory: the tables cos and sin are read beside q and k, from L2. The gradient of
learned tables needs the gradients of q and k before they are rotated back. backward_tiled.py then leaves them
rotated, and _rope_bwd_kernel rotates them back in place, in one more pass over q, k, dq and dk.

A bias is added to the logits, and keys are hidden:

    o = softmax(scale q k^T + bias) v over the keys before key_lengths[b]

A query that sees no key (all of its bias is -inf, or no keys are left) gives zeros; its lse is +inf, so that all of its
probabilities in backward are zero. The gradient of a bias that samples share is the sum of P (dP - delta) over them.
_bias_bwd_kernel recomputes both products for each sample, a block of the bias at a time, and adds up in registers: it
needs no atomics, and nothing of (B, H, N, N) in memory unless the bias itself has that shape.
"""

import triton
import triton.language as tl

from .common import LOG2E, dot_nt, head_of, load_head_chunk, load_head_rows, row_dot, store_head_chunk, store_head_rows


@triton.jit
def rope_of(rope, b, h, first=0, PACKED: tl.constexpr = False):
    """A head's tables from row `first` on: pointers to cos and sin, the stride of rows, num_prefix."""
    cos_ptr, sin_ptr, strides, num_prefix = rope
    offset = b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    if PACKED:
        offset += first.to(tl.int64) * strides[2]
    return (cos_ptr + offset, sin_ptr + offset, strides[2], num_prefix)


@triton.jit
def _column_factors(table_ptr, rope, rows, N, still, HEAD: tl.constexpr):
    """Loads a table's numbers for both columns of pairs, in fp32; `still` for tokens not rotated."""
    D0: tl.constexpr = HEAD.first
    HALF: tl.constexpr = HEAD.dim // 2
    rotates = (rows >= rope[3]) & (rows < N)
    row_ptrs = table_ptr + ((rows - rope[3]).to(tl.int64) * rope[2])[:, None]
    if HEAD.shared_pair_angle or HEAD.rope_layout == "half":
        offs_d = tl.arange(0, D0)[None, :]
        mask = rotates[:, None] & (offs_d < HALF)
        first = tl.load(row_ptrs + offs_d, mask=mask, other=still).to(tl.float32)
        if HEAD.shared_pair_angle:
            return first, first
        else:
            return first, tl.load(row_ptrs + (HALF + offs_d), mask=mask, other=still).to(tl.float32)
    else:
        offs_d = tl.arange(0, 2 * D0)[None, :]
        both = tl.load(row_ptrs + offs_d, mask=rotates[:, None] & (offs_d < HEAD.dim), other=still).to(tl.float32)
        return tl.split(both.reshape(rows.shape[0], D0, 2))


@triton.jit
def factors(rope, rows, N, HEAD: tl.constexpr):
    """Loads cos and sin of some rows: (cos_a, cos_b, sin_a, sin_b), each (rows, pairs)."""
    cos_a, cos_b = _column_factors(rope[0], rope, rows, N, 1.0, HEAD)
    sin_a, sin_b = _column_factors(rope[1], rope, rows, N, 0.0, HEAD)
    return cos_a, cos_b, sin_a, sin_b


@triton.jit
def load_pairs(head, rows, N, MASK_ROWS: tl.constexpr, HEAD: tl.constexpr):
    """Loads rows of a head as the first and the second columns of its pairs."""
    D0: tl.constexpr = HEAD.first
    HALF: tl.constexpr = HEAD.dim // 2
    if HEAD.rope_layout == "half":
        first = load_head_chunk(head, rows, N, 0, D0, MASK_ROWS, HEAD, HALF)
        return first, load_head_chunk(head, rows, N, HALF, D0, MASK_ROWS, HEAD)
    else:
        both = load_head_chunk(head, rows, N, 0, 2 * D0, MASK_ROWS, HEAD)
        return tl.split(both.reshape(rows.shape[0], D0, 2))


@triton.jit
def load_rotated_rows(head, rope, rows, N, MASK_ROWS: tl.constexpr, HEAD: tl.constexpr):
    """Loads rows of a head of q or k as its chunks, rotated where there is rope.

    tl.where depends on the row numbers, though the tables leave the other rows as they are anyway. Through a chain of
    loads and element-wise operations alone, Triton would move a change of layout up to the loads, and rotate the rows
    once for every product that takes them, with the tables in fp32. Row numbers are no loads, which prevents this.
    """
    if rope is None:
        return load_head_rows(head, rows, N, MASK_ROWS, HEAD)
    else:
        a, b = load_pairs(head, rows, N, MASK_ROWS, HEAD)
        cos_a, cos_b, sin_a, sin_b = factors(rope, rows, N, HEAD)
        rotates = ((rows >= rope[3]) & (rows < N))[:, None]
        first = tl.where(rotates, a * cos_a - b * sin_a, a.to(tl.float32))
        second = tl.where(rotates, b * cos_b + a * sin_b, b.to(tl.float32))
        return (first.to(a.dtype), second.to(b.dtype))


@triton.jit
def store_pairs(head, a, b, rows, N, HEAD: tl.constexpr):
    """Writes pairs to where load_pairs reads them; returns them as the chunks that store_sums takes."""
    D0: tl.constexpr = HEAD.first
    HALF: tl.constexpr = HEAD.dim // 2
    if HEAD.rope_layout == "half":
        store_head_chunk(head, a, rows, N, 0, HEAD, HALF)
        store_head_chunk(head, b, rows, N, HALF, HEAD)
        return (a, b)
    else:
        both = tl.join(a, b).reshape(rows.shape[0], 2 * D0)
        store_head_chunk(head, both, rows, N, 0, HEAD)
        return (both,)


@triton.jit
def store_unrotated_rows(head, x, rope, rows, N, UNROTATE: tl.constexpr, HEAD: tl.constexpr):
    """Writes x, the chunks of some rows of dq or dk, unrotated where UNROTATE; returns what it writes."""
    if rope is None:
        store_head_rows(head, x, rows, N, HEAD)
        return x
    else:
        a, b = x[0], x[1]
        if UNROTATE:
            cos_a, cos_b, sin_a, sin_b = factors(rope, rows, N, HEAD)
            return store_pairs(head, a * cos_a + b * sin_b, b * cos_b - a * sin_a, rows, N, HEAD)
        else:
            return store_pairs(head, a, b, rows, N, HEAD)


@triton.jit(do_not_specialize=["B", "samples"])
def _rope_bwd_kernel(
    inputs,  # q, k (B, N, H, Dh), each its pointer and its strides of B, N, H
    grads,  # dq, dk, likewise; unrotated here, in place
    rope,  # cos, sin, strides of B, H, rows, num_prefix
    dcos_ptr,  # (groups, H, N - num_prefix, Dh, or Dh / 2 with one number for both columns of a pair), fp32
    dsin_ptr,
    B,
    samples,  # how many a group has
    N,
    H,
    HEAD: tl.constexpr,
    TABLE: tl.constexpr,  # HEAD with the alignment of the rows of dcos and dsin
    BLOCK_M: tl.constexpr,
):
    """Unrotates dq and dk of one head; sums the gradients of BLOCK_M rows of its tables over a group."""
    D0: tl.constexpr = HEAD.first
    HALF: tl.constexpr = HEAD.dim // 2
    WIDTH: tl.constexpr = HALF if HEAD.shared_pair_angle else HEAD.dim
    blocks = tl.cdiv(N - rope[3], BLOCK_M)
    head = tl.program_id(0) // blocks
    group, h = head // H, head % H
    rows = rope[3] + tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    dcos_a, dcos_b = tl.zeros((BLOCK_M, D0), tl.float32), tl.zeros((BLOCK_M, D0), tl.float32)
    dsin_a, dsin_b = tl.zeros((BLOCK_M, D0), tl.float32), tl.zeros((BLOCK_M, D0), tl.float32)
    for i in tl.range(0, tl.minimum(samples, B - group * samples), num_stages=1, disable_licm=True):
        b = group * samples + i
        cos_a, cos_b, sin_a, sin_b = factors(rope_of(rope, b, h), rows, N, HEAD)
        for j in tl.static_range(2):
            grad_head = head_of(grads[j], b, h, HEAD)
            x_a, x_b = load_pairs(head_of(inputs[j], b, h, HEAD), rows, N, True, HEAD)
            d_a, d_b = load_pairs(grad_head, rows, N, True, HEAD)
            x_a, x_b, d_a, d_b = x_a.to(tl.float32), x_b.to(tl.float32), d_a.to(tl.float32), d_b.to(tl.float32)
            dcos_a += d_a * x_a
            dcos_b += d_b * x_b
            dsin_a -= d_a * x_b
            dsin_b += d_b * x_a
            # all threads must have read what is overwritten below
            tl.debug_barrier()
            store_pairs(grad_head, d_a * cos_a + d_b * sin_b, d_b * cos_b - d_a * sin_a, rows, N, HEAD)
    last = N - rope[3]
    offset = (group * H + h).to(tl.int64) * last * WIDTH
    dcos, dsin = (dcos_ptr + offset, WIDTH), (dsin_ptr + offset, WIDTH)
    if HEAD.shared_pair_angle:
        store_head_chunk(dcos, dcos_a + dcos_b, rows - rope[3], last, 0, TABLE, HALF)
        store_head_chunk(dsin, dsin_a + dsin_b, rows - rope[3], last, 0, TABLE, HALF)
    else:
        store_pairs(dcos, dcos_a, dcos_b, rows - rope[3], last, TABLE)
        store_pairs(dsin, dsin_a, dsin_b, rows - rope[3], last, TABLE)


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
    """How many of `count` rows lie in unmasked blocks. VARIES: the last block is masked even if full."""
    if VARIES:
        return tl.maximum(count - 1, 0) // BLOCK * BLOCK
    else:
        return count // BLOCK * BLOCK


@triton.jit
def add_bias(s, bias, rows, cols, N, scale, TRANSPOSED: tl.constexpr):
    """scale s + bias, (queries, keys) or transposed; without a bias s itself, which logit_scale scales."""
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
def logit_scale(bias, scale):
    """The factor that makes logits of what add_bias returns: `scale` without a bias, else 1."""
    if bias is None:
        return scale
    else:
        return 1.0


@triton.jit
def softmax_weights(s, lse, bias, scale, HEAD: tl.constexpr):
    """exp(logit_scale s - lse), where add_bias returned s and lse is a column or a row.

    HEAD.folds: it is computed in base 2 by one multiply-add. lse log2(e) is rounded, as were lse and, before it, the
    maximum in forward, so that the weights of a query have a factor within 2e-7 |lse| of 1, three times what rounding
    lse makes. Otherwise the difference is taken before the change to base 2. So it is 0 where a bias masks all keys of
    a query by the lowest finite number.
    """
    if bias is not None:
        return tl.exp2((s - lse) * LOG2E)
    elif HEAD.folds:
        return tl.exp2(tl.fma(s, scale * LOG2E, -(lse * LOG2E)))
    else:
        return tl.exp2(tl.fma(s, scale, -lse) * LOG2E)


@triton.jit(do_not_specialize=["samples"])
def _bias_bwd_kernel(
    inputs,  # q, k, v, o, do (B, N, H, Dh), each its pointer and its strides of B, N, H
    lse_ptr,  # (B, H, N)
    dbias_ptr,  # (B / samples, H, N, N)
    terms,  # rope, bias, key lengths: as forward_tiled.py takes them
    samples,  # how many share a bias
    N,
    H,
    scale,
    QK: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Computes BLOCK_M x BLOCK_N of the gradient of a head's bias, summed over the samples that share it."""
    blocks_n = tl.cdiv(N, BLOCK_N)
    blocks = tl.cdiv(N, BLOCK_M) * blocks_n
    head, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    group, h = head // H, head % H
    rows = block // blocks_n * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = block % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    tables, biases, lengths_ptr = terms[0], terms[1], terms[2]
    ROTATES: tl.constexpr = tables is not None
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # disable_licm: only the sums are kept in registers from sample to sample
    for i in tl.range(0, samples, num_stages=1, disable_licm=True):
        b = group * samples + i
        q_head, k_head, v_head, o_head, do_head = [head_of(x, b, h, HEAD) for x in inputs]
        rope = rope_of(tables, b, h) if ROTATES else None
        bias = bias_of(biases, b, h)
        keys = keys_of(lengths_ptr, b, N)
        q = load_rotated_rows(q_head, rope, rows, N, True, QK)
        k = load_rotated_rows(k_head, rope, cols, keys, True, QK)
        v = load_head_rows(v_head, cols, keys, True, HEAD)
        do = load_head_rows(do_head, rows, N, True, HEAD)
        delta = row_dot(load_head_rows(o_head, rows, N, True, HEAD), do)
        # lse is +inf past N, so that those queries have zeros in p
        lse = tl.load(lse_ptr + (b.to(tl.int64) * H + h) * N + rows, mask=rows < N, other=float("inf"))
        s = add_bias(dot_nt(q, k, QK), bias, rows, cols, N, scale, False)
        p = softmax_weights(s, lse[:, None], bias, scale, HEAD)
        p = tl.where((cols < keys)[None, :], p, 0.0)
        total += p * (dot_nt(do, v, HEAD) - delta[:, None])
    at = (group.to(tl.int64) * H + h) * N * N + rows.to(tl.int64)[:, None] * N + cols[None, :]
    mask = (rows < N)[:, None] & (cols < N)[None, :]
    tl.store(dbias_ptr + at, total.to(dbias_ptr.dtype.element_ty), mask=mask)
