"""Attention backward, provider "resident": all queries of a head in one program.

It serves samples of up to 208 tokens and heads of 64 in 16 bits on sm_90. Q, dO, lse and delta = rowsum(o do) of a head
stay in the program, dQ in its registers, so that one loop over blocks of keys reads K and V alone and writes dK and dV
once: 5 products, no scratch, no atomics. For a block of keys, each part of the queries gives S = Q K^T and dP = dO V^T;
over all parts, the sums dV^T = dO^T P and dK^T = Q^T dS each become one product, while dQ += dS K. The queries lie in
parts of falling sizes (197 = 128 + 64 + 5), so that S and dP take few registers, two programs fit a multiprocessor and
few rows are past the end.

The rows of dS sum to zero, so the sum of dK over the keys is zero. The algorithm is FlashAttention-2's (Dao, 2023)
with its loops exchanged.
"""

import functools

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..launch import launch
from .common import LOG2E, describable, head_box, head_of, load_head_rows, row_dot, store_head_rows

MOST_TOKENS = 208


@functools.cache
def query_parts(n: int) -> tuple[int, ...]:
    """The sizes of the parts into which n queries are cut: 197 -> 128, 64, 16; 50 -> 64.

    Two parts of 128 would spill registers.
    """
    parts = [128] if n > 80 else []
    rest = n - sum(parts)
    if rest > 16:
        parts, rest = [*parts, 64], rest - 64
    return (*parts, 16) if rest > 0 else tuple(parts)


@triton.jit
def load_parts(head, N, PARTS: tl.constexpr, HEAD: tl.constexpr):
    """Loads all rows of a head in parts of these sizes, with zeros past N."""
    parts, first = (), 0
    for i in tl.static_range(len(PARTS)):
        parts = parts + (load_head_rows(head, first + tl.arange(0, PARTS[i]), N, True, HEAD)[0],)
        first += PARTS[i]
    return parts


@triton.jit
def fold(x):
    """Adds up the blocks of 64 rows of x; no number moves from one thread to another."""
    if x.shape[0] > 64:
        return tl.sum(x.reshape(x.shape[0] // 64, 64, x.shape[1]), 0)
    else:
        return x


@triton.jit
def column_sums(parts):
    """The sums over the rows of all parts; the first part has at least 64 rows."""
    total, rest = fold(parts[0]), tl.zeros((parts[0].shape[1],), tl.float32)
    for i in tl.static_range(1, len(parts)):
        if parts[i].shape[0] >= 64:
            total += fold(parts[i])
        else:
            rest += tl.sum(parts[i], 0)
    return rest + tl.sum(total, 0)


@triton.jit
def _attention_bwd_resident_kernel(
    inputs,  # q, k, v, o, do (B, N, H, Dh), each its pointer and its strides of B, N, H
    dq,  # (B, N, H, Dh), likewise
    lse_ptr,  # (B, H, N)
    sums_ptr,  # (B, 3, H, Dh)
    qkv_box,  # descriptor of (B, 3 H, N, Dh) in blocks of BLOCK_N rows of a head
    dqkv_box,  # descriptor of (B, 3, H, N, Dh) in blocks of BLOCK_N rows of dk and dv of a head
    N,
    H,
    scale,
    HEAD: tl.constexpr,
    SUMS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Computes dq, dk and dv of one head."""
    D: tl.constexpr = HEAD.first
    DTYPE: tl.constexpr = inputs[0][0].dtype.element_ty
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    lse_row = lse_ptr + tl.program_id(0).to(tl.int64) * N
    dos = load_parts(head_of(inputs[4], b, h, HEAD), N, PARTS, HEAD)
    os = load_parts(head_of(inputs[3], b, h, HEAD), N, PARTS, HEAD)
    qs = load_parts(head_of(inputs[0], b, h, HEAD), N, PARTS, HEAD)
    dv_sums = tl.zeros((D,), tl.float32)
    lses, deltas, dqs, first = (), (), (), 0
    for i in tl.static_range(len(PARTS)):
        rows = first + tl.arange(0, PARTS[i])
        # lse is inf past N, so that those queries have zeros in P
        lses = lses + (tl.load(lse_row + rows, mask=rows < N, other=float("inf")) * LOG2E,)
        deltas = deltas + (row_dot((os[i],), (dos[i],)),)
        dqs = dqs + (tl.zeros(qs[i].shape, tl.float32),)
        first += PARTS[i]
    base2_scale = scale * LOG2E  # computed here, because disable_licm would leave it in the loop
    for start in tl.range(0, N, BLOCK_N, num_stages=STAGES, disable_licm=True):
        k = qkv_box.load([b, H + h, start, 0]).reshape(BLOCK_N, D)
        v = qkv_box.load([b, 2 * H + h, start, 0]).reshape(BLOCK_N, D)
        # a key past N is zero, but exp(-lse) may be inf, and inf times zero is NaN
        counts = (start + tl.arange(0, BLOCK_N) < N)[None, :]
        dv, dk, sums = tl.zeros((D, BLOCK_N), tl.float32), tl.zeros((D, BLOCK_N), tl.float32), ()
        for i in tl.static_range(len(PARTS)):
            s, dp = tl.dot(qs[i], tl.trans(k)), tl.dot(dos[i], tl.trans(v))
            p = tl.where(counts, tl.exp2(tl.fma(s, base2_scale, -lses[i][:, None])), 0.0)
            ds = (p * (dp - deltas[i][:, None])).to(DTYPE)
            sums = sums + (tl.dot(ds, k, dqs[i]),)
            dv = tl.dot(tl.trans(dos[i]), p.to(DTYPE), dv)
            dk = tl.dot(tl.trans(qs[i]), ds, dk)
        dqs = sums
        if SUMS:
            dv_sums += tl.sum(dv, 1)
        both = tl.join((dk * scale).to(DTYPE), dv.to(DTYPE)).permute(2, 1, 0)
        dqkv_box.store([b, 1, h, start, 0], both.reshape(1, 2, 1, BLOCK_N, D))
    dq_head, first = head_of(dq, b, h, HEAD), 0
    for i in tl.static_range(len(PARTS)):
        store_head_rows(dq_head, (dqs[i] * scale,), first + tl.arange(0, PARTS[i]), N, HEAD)
        first += PARTS[i]
    if SUMS:
        row, step = sums_ptr + (b.to(tl.int64) * 3 * H + h) * HEAD.dim + tl.arange(0, D), H * HEAD.dim
        inside = tl.arange(0, D) < HEAD.dim
        tl.store(row, column_sums(dqs) * scale, mask=inside)
        tl.store(row + step, tl.zeros((D,), tl.float32), mask=inside)
        tl.store(row + 2 * step, dv_sums, mask=inside)


def serves(q: Tensor, k: Tensor, v: Tensor, chunks: tuple[int, int]) -> bool:
    """Whether the kernel takes these: few tokens, heads of one chunk, 16-bit slices of one tensor."""
    return q.shape[1] <= MOST_TOKENS and not chunks[1] and describable(q) and are_one_tensor(q, k, v)


def are_one_tensor(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether q, k and v (B, N, H, Dh) are slices of one (B, N, 3, H, Dh) tensor, each after the other."""
    strides, start = q.stride(), q.storage_offset()
    step = q.shape[2] * strides[2]
    if (k.storage_offset(), v.storage_offset()) != (start + step, start + 2 * step):
        return False
    same_strides = strides == k.stride() == v.stride()
    return same_strides and q.untyped_storage()._cdata == k.untyped_storage()._cdata == v.untyped_storage()._cdata


def launch_resident(common: dict, inputs: tuple, dq: tuple, sums: Tensor) -> None:
    """Launches the kernel for q, k, v, o, do and dq, each with its strides.

    dk and dv lie behind dq in one tensor. common: the arguments that all of attention's kernels take.
    """
    (q, _), (grad, _), rows, width = inputs[0], dq, common["BLOCK_N"], common["HEAD"].first
    B, N, H, D = q.shape
    over_b, over_n, over_h, _ = grad.stride()
    shape, strides = [B, 3, H, N, D], [over_b, H * over_h, over_h, over_n, 1]
    dqkv_box = TensorDescriptor(grad.as_strided(shape, strides), shape, strides, [1, 2, 1, rows, width])
    boxes = dict(qkv_box=head_box(q, 3 * H, rows, width), dqkv_box=dqkv_box)
    kernel, sizes = _attention_bwd_resident_kernel, dict(PARTS=query_parts(N))
    launch(kernel, (B * H,), **common, **sizes, inputs=inputs, dq=dq, sums_ptr=sums, **boxes)
