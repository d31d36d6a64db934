"""Heads of the attention kernels: one or two power-of-two chunks of columns, as in 80 = 64 + 16.

The chunks of a head that is turned by rotary positions are the two halves of its pairs (attention_rope.py).

The kernels list their arguments, and find their head, in the same lines each: Triton takes arguments by name.
"""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class Head(NamedTuple):
    """The head that a kernel is compiled for.

    Its fields are plain numbers in Triton 3.6: what goes on to another function is named a constexpr first.
    """

    dim: int
    first: int  # columns of its first chunk
    second: int  # of its second one, or 0
    align: int  # elements that each of its rows starts at a multiple of
    far: bool  # whether its last row may be 2^31 elements past its first
    precision: str  # of products in fp32
    turned: str = ""  # the layout of the pairs that rotary positions turn: see attention_rope.py
    alike: bool = False  # whether one number turns both columns of a pair


@triton.jit
def head_of(x, b, h, HEAD: tl.constexpr, first=0, PACKED: tl.constexpr = False):
    """A head of x = (pointer, strides of B, N, H), (B, N, H, Dh): its row `first`, the stride of rows.

    The hint keeps 16-byte loads where head sizes divide by 8 but not by 16.
    """
    ALIGN: tl.constexpr = HEAD.align
    if PACKED:  # not of 0: the hint would stand on an addition that is folded away
        start = first.to(tl.int64) * x[1][1] + h.to(tl.int64) * x[1][2]
        return x[0] + tl.multiple_of(start, ALIGN), x[1][1]
    else:
        return x[0] + tl.multiple_of(b.to(tl.int64) * x[1][0] + h.to(tl.int64) * x[1][2], ALIGN), x[1][1]


@triton.jit
def chunk_ptrs(head, rows, FIRST: tl.constexpr, SIZE: tl.constexpr, HEAD: tl.constexpr):
    """Columns FIRST..FIRST + SIZE of some rows of a head."""
    ALIGN: tl.constexpr = HEAD.align
    offs_n = rows.to(tl.int64) * head[1] if HEAD.far else rows * head[1]
    return head[0] + (tl.multiple_of(offs_n, ALIGN)[:, None] + (FIRST + tl.arange(0, SIZE))[None, :])


@triton.jit
def chunk_mask(in_rows, FIRST: tl.constexpr, SIZE: tl.constexpr, END: tl.constexpr):
    """Where in_rows is true and a column FIRST.. lies before END."""
    if FIRST + SIZE > END:
        return in_rows[:, None] & (FIRST + tl.arange(0, SIZE) < END)[None, :]
    else:
        return in_rows[:, None]


@triton.jit
def load_head_chunk(
    head,
    rows,
    N,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    MASK_ROWS: tl.constexpr,
    HEAD: tl.constexpr,
    END: tl.constexpr = 0,
):
    """Columns FIRST..FIRST + SIZE of some rows of a head, zeros outside; MASK_ROWS: rows may pass N.

    END: the column that it ends before, 0 for the head's own end.
    """
    LIMIT: tl.constexpr = END if END > 0 else HEAD.dim
    ptrs = chunk_ptrs(head, rows, FIRST, SIZE, HEAD)
    if MASK_ROWS:
        return tl.load(ptrs, mask=chunk_mask(rows < N, FIRST, SIZE, LIMIT), other=0.0)
    elif FIRST + SIZE > LIMIT:
        return tl.load(ptrs, mask=(FIRST + tl.arange(0, SIZE) < LIMIT)[None, :], other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def load_head_rows(head, rows, N, MASK_ROWS: tl.constexpr, HEAD: tl.constexpr):
    """Rows of a head as a tuple of its chunks: ((rows, first),) or ((rows, first), (rows, second))."""
    D0: tl.constexpr = HEAD.first
    D1: tl.constexpr = HEAD.second
    first = load_head_chunk(head, rows, N, 0, D0, MASK_ROWS, HEAD)
    if D1 > 0:
        return (first, load_head_chunk(head, rows, N, D0, D1, MASK_ROWS, HEAD))
    else:
        return (first,)


@triton.jit
def store_head_chunk(head, x, rows, N, FIRST: tl.constexpr, HEAD: tl.constexpr, END: tl.constexpr = 0):
    """Writes columns FIRST.. of rows below N. END: as in load_head_chunk."""
    SIZE: tl.constexpr = x.shape[1]
    LIMIT: tl.constexpr = END if END > 0 else HEAD.dim
    mask = chunk_mask(rows < N, FIRST, SIZE, LIMIT)
    tl.store(chunk_ptrs(head, rows, FIRST, SIZE, HEAD), x.to(head[0].dtype.element_ty), mask=mask)


@triton.jit
def store_head_rows(head, x, rows, N, HEAD: tl.constexpr):
    """Writes some rows of a head, x its chunks."""
    D0: tl.constexpr = HEAD.first
    store_head_chunk(head, x[0], rows, N, 0, HEAD)
    if len(x) > 1:
        store_head_chunk(head, x[1], rows, N, D0, HEAD)


@triton.jit
def store_sums(sums_ptr, x, slot, h, H, HEAD: tl.constexpr):
    """Writes the column sums of the chunks x to sums[slot, h], sums (slots, H, Dh) fp32."""
    HALVES: tl.constexpr = HEAD.turned == "half"
    row = sums_ptr + (slot.to(tl.int64) * H + h) * HEAD.dim
    offs_d = tl.arange(0, x[0].shape[1])
    tl.store(row + offs_d, tl.sum(x[0], 0), mask=offs_d < (HEAD.dim // 2 if HALVES else HEAD.dim))
    if len(x) > 1:
        offs_d = (HEAD.dim // 2 if HALVES else x[0].shape[1]) + tl.arange(0, x[1].shape[1])
        tl.store(row + offs_d, tl.sum(x[1], 0), mask=offs_d < HEAD.dim)


@triton.jit
def zero_head_rows(ROWS: tl.constexpr, HEAD: tl.constexpr):
    """The chunks of ROWS rows, zero, in fp32."""
    D0: tl.constexpr = HEAD.first
    D1: tl.constexpr = HEAD.second
    if D1 > 0:
        return (tl.zeros((ROWS, D0), tl.float32), tl.zeros((ROWS, D1), tl.float32))
    else:
        return (tl.zeros((ROWS, D0), tl.float32),)


@triton.jit
def add_head_rows(a, b):
    """a + b, chunk by chunk, in fp32."""
    if len(a) > 1:
        return (a[0] + b[0].to(tl.float32), a[1] + b[1].to(tl.float32))
    else:
        return (a[0] + b[0].to(tl.float32),)


@triton.jit
def outer(a, b, HEAD: tl.constexpr, acc=None):
    """acc + a b^T over the chunks of the head: (rows of a, rows of b), fp32.

    acc is made for this product and must not be carried by a loop: of two products into one accumulator that a loop
    carries, Triton makes wrong sums on sm_100 (triton-lang/triton#10821).
    """
    acc = tl.dot(a[0], tl.trans(b[0]), acc, input_precision=HEAD.precision)
    if len(a) > 1:
        acc = tl.dot(a[1], tl.trans(b[1]), acc, input_precision=HEAD.precision)
    return acc


@triton.jit
def add_product(acc, w, x, HEAD: tl.constexpr):
    """acc + w x for every chunk of x; w takes x's dtype."""
    w = w.to(x[0].dtype)
    first = tl.dot(w, x[0], acc[0], input_precision=HEAD.precision)
    if len(x) > 1:
        return (first, tl.dot(w, x[1], acc[1], input_precision=HEAD.precision))
    else:
        return (first,)


@triton.jit
def exp_difference(s, m, scale):
    """exp(scale (s - m)), m a column.

    The difference comes first: of logits in the thousands s and m agree to the last bits, which a product of each with
    scale log2(e) would round away, and the weight of a lone key is 1. What that costs, against one multiply-add, issues
    while exp2, an eighth as fast, runs.
    """
    return tl.exp2((s - m) * (scale * LOG2E))


@triton.jit
def row_dot(a, b):
    """Row sums of a * b over the chunks, fp32."""
    total = tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), 1)
    if len(a) > 1:
        total += tl.sum(a[1].to(tl.float32) * b[1].to(tl.float32), 1)
    return total
