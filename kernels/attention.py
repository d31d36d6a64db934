"""Softmax attention: o = softmax(scale q k^T) v and lse = log sum exp(scale q k^T), with its backward. q, k, v, o are (B, N, H, Dh).

Flash style (Dao et al., 2022; the softmax in base 2 and the logits never in memory), made for vision sequences, short and odd (50, 197, 257, 577, 1370):
- forward, whole rows: every key and value of a head in one program, in parts of falling powers of two (197 -> 128 + 64 + 16), one softmax without
  rescaling, several query tiles one after the other; forward, tiled: online softmax over full key blocks and a short masked last one (577 -> 9 x 64 + 16);
- backward, whole rows: one program per (batch, head) keeps keys, values, dK and dV and writes dQ of one query tile after the other, 5 matrix products;
  backward, tiled: one kernel for dQ (which also leaves delta = rowsum(o do)), one for dK and dV; or both in one program per head, one after the other
  ("phases"): 7 matrix products. No atomics and no fp32 dQ.
A head is one or two power-of-two parts (80 = 64 + 16), so that it is never padded to 128. Which path runs is data, in tiles.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import attention_libraries, tiles
from .attention_parts import LN2, Head, add_product, add_rows, head_of, load_rows, outer, row_dot, store_rows, store_sums, weights, zero_rows
from .attention_tiled import _attention_fwd_tiled_kernel
from .attention_tiled_bwd import _attention_bwd_dkdv_kernel, _attention_bwd_dq_kernel, _attention_bwd_phases_kernel
from .launch import fp32_precision, launch
from .rows import scale_rows

HEAD_SIZES = tuple(range(16, 129, 8))
# (batch, head) pairs from which one program takes every query of its head: about two programs for each of ~132 multiprocessors, twice.
MANY_HEADS = 512


@triton.jit
def load_keys(head, N, KEYS0: tl.constexpr, KEYS1: tl.constexpr, KEYS2: tl.constexpr, HEAD: tl.constexpr):
    """Every row of a head in one to three blocks of rows; only the last reaches past N."""
    first = load_rows(head, tl.arange(0, KEYS0), N, KEYS1 == 0, HEAD)
    if KEYS1 > 0:
        second = load_rows(head, KEYS0 + tl.arange(0, KEYS1), N, KEYS2 == 0, HEAD)
        if KEYS2 > 0:
            return (first, second, load_rows(head, KEYS0 + KEYS1 + tl.arange(0, KEYS2), N, True, HEAD))
        else:
            return (first, second)
    else:
        return (first,)


@triton.jit
def _attention_fwd_rows_kernel(
    q_ptr,  # (B, N, H, Dh)
    k_ptr,  # (B, N, H, Dh)
    v_ptr,  # (B, N, H, Dh)
    o_ptr,  # (B, N, H, Dh)
    lse_ptr,  # (B, H, N)
    N,
    H,
    q_strides,  # of B, N, H
    k_strides,
    v_strides,
    o_strides,
    scale,
    HEAD: tl.constexpr,
    KEYS0: tl.constexpr,
    KEYS1: tl.constexpr,
    KEYS2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    QUERY_TILES: tl.constexpr,
):
    """QUERY_TILES x BLOCK_M queries of one head against all of its keys."""
    groups = tl.cdiv(N, BLOCK_M * QUERY_TILES)
    pid = tl.program_id(0)
    bh = pid // groups
    b, h = bh // H, bh % H
    q_head, o_head = head_of(q_ptr, q_strides, b, h, HEAD), head_of(o_ptr, o_strides, b, h, HEAD)
    k = load_keys(head_of(k_ptr, k_strides, b, h, HEAD), N, KEYS0, KEYS1, KEYS2, HEAD)
    v = load_keys(head_of(v_ptr, v_strides, b, h, HEAD), N, KEYS0, KEYS1, KEYS2, HEAD)
    for tile in range(QUERY_TILES):
        rows = (pid % groups * QUERY_TILES + tile) * BLOCK_M + tl.arange(0, BLOCK_M)
        q = load_rows(q_head, rows, N, True, HEAD)
        s = [outer(q, part, HEAD) for part in k]
        if KEYS2 > 0:
            s = (s[0], s[1], tl.where((KEYS0 + KEYS1 + tl.arange(0, KEYS2) < N)[None, :], s[2], float("-inf")))
            m = tl.maximum(tl.maximum(tl.max(s[0], 1), tl.max(s[1], 1)), tl.max(s[2], 1))
        elif KEYS1 > 0:
            s = (s[0], tl.where((KEYS0 + tl.arange(0, KEYS1) < N)[None, :], s[1], float("-inf")))
            m = tl.maximum(tl.max(s[0], 1), tl.max(s[1], 1))
        else:
            s = (tl.where((tl.arange(0, KEYS0) < N)[None, :], s[0], float("-inf")),)
            m = tl.max(s[0], 1)
        m = m * scale
        p = [weights(part, m[:, None], scale, q[0].dtype) for part in s]
        l = tl.sum(p[0], 1)
        acc = add_product(zero_rows(BLOCK_M, HEAD), p[0], v[0], HEAD)
        if KEYS1 > 0:
            l += tl.sum(p[1], 1)
            acc = add_product(acc, p[1], v[1], HEAD)
        if KEYS2 > 0:
            l += tl.sum(p[2], 1)
            acc = add_product(acc, p[2], v[2], HEAD)
        store_rows(o_head, [part * (1 / l)[:, None] for part in acc], rows, N, HEAD)
        tl.store(lse_ptr + bh.to(tl.int64) * N + rows, m + tl.log2(l) * LN2, mask=rows < N)


@triton.jit
def _attention_bwd_rows_kernel(
    q_ptr,  # (B, N, H, Dh)
    k_ptr,  # (B, N, H, Dh)
    v_ptr,  # (B, N, H, Dh)
    o_ptr,  # (B, N, H, Dh)
    do_ptr,  # (B, N, H, Dh)
    lse_ptr,  # (B, H, N)
    dq_ptr,  # (B, N, H, Dh)
    dk_ptr,  # (B, N, H, Dh)
    dv_ptr,  # (B, N, H, Dh)
    sums_ptr,  # (B, 3, H, Dh)
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
):
    """One head, its N <= BLOCK_N keys all at once: dK and dV stay in registers, dQ of BLOCK_M queries is complete at once. dq, dk, dv share strides."""
    bh = tl.program_id(0)
    b, h = bh // H, bh % H
    cols = tl.arange(0, BLOCK_N)
    in_keys = cols < N
    k = load_rows(head_of(k_ptr, k_strides, b, h, HEAD), cols, N, True, HEAD)
    v = load_rows(head_of(v_ptr, v_strides, b, h, HEAD), cols, N, True, HEAD)
    q_head, o_head = head_of(q_ptr, q_strides, b, h, HEAD), head_of(o_ptr, o_strides, b, h, HEAD)
    do_head, dq_head = head_of(do_ptr, do_strides, b, h, HEAD), head_of(dq_ptr, dq_strides, b, h, HEAD)
    dk, dv = zero_rows(BLOCK_N, HEAD), zero_rows(BLOCK_N, HEAD)
    dq_sums = zero_rows(BLOCK_M, HEAD)
    for start in range(0, N, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        q = load_rows(q_head, rows, N, True, HEAD)
        do = load_rows(do_head, rows, N, True, HEAD)
        delta = row_dot(load_rows(o_head, rows, N, True, HEAD), do)
        # +inf past N: those queries weigh nothing
        lse = tl.load(lse_ptr + bh.to(tl.int64) * N + rows, mask=rows < N, other=float("inf"))
        # keys x queries: P^T and dS^T are left operands of dV and dK as they come
        p = weights(outer(k, q, HEAD), lse[None, :], scale, q[0].dtype)
        p = tl.where(in_keys[:, None], p, 0.0)
        dv = add_product(dv, p, do, HEAD)
        ds = (p * (outer(v, do, HEAD) - delta[None, :])).to(k[0].dtype)
        dk = add_product(dk, ds, q, HEAD)
        dq = [part * scale for part in add_product(zero_rows(BLOCK_M, HEAD), tl.trans(ds), k, HEAD)]
        store_rows(dq_head, dq, rows, N, HEAD)
        if SUMS:
            dq_sums = add_rows(dq_sums, dq)
    dk = [part * scale for part in dk]
    store_rows(head_of(dk_ptr, dq_strides, b, h, HEAD), dk, cols, N, HEAD)
    store_rows(head_of(dv_ptr, dq_strides, b, h, HEAD), dv, cols, N, HEAD)
    if SUMS:
        store_sums(sums_ptr, dq_sums, b * 3, h, H, HEAD)
        store_sums(sums_ptr, dk, b * 3 + 1, h, H, HEAD)
        store_sums(sums_ptr, dv, b * 3 + 2, h, H, HEAD)


def head_parts(head_dim: int) -> tuple[int, int]:
    """The power-of-two parts that hold a head: 64 -> (64, 0), 72 and 80 -> (64, 16), 88 and 96 -> (64, 32), 56 -> (64, 0) with 8 columns masked."""
    size = triton.next_power_of_2(head_dim)
    half, rest = size // 2, max(16, triton.next_power_of_2(head_dim - size // 2))
    return (half, rest) if head_dim < size and half + rest < size else (size, 0)


def key_parts(n: int) -> dict[str, int]:
    """N <= 256 keys as one to three falling powers of two: 197 -> 128, 64, 16; 145 -> 128, 32, 0; 250 -> 256, 0, 0."""
    parts, rest = [], n
    while rest > 0:
        size = max(16, triton.next_power_of_2(rest))
        if size > 16 and size != rest and len(parts) < 2:
            size //= 2
        parts.append(size)
        rest -= size
    whole = max(16, triton.next_power_of_2(n))
    parts = [whole] if sum(parts) >= whole else parts
    return {f"KEYS{i}": parts[i] if i < len(parts) else 0 for i in range(3)}


def last_block(n: int, block: int) -> int:
    """Size of the masked block after the whole ones: 577 tokens in blocks of 64 -> 16."""
    rest = n % block
    return max(16, triton.next_power_of_2(rest)) if rest else 0


def _common(scale: float, **tensors: Tensor) -> dict:
    """What every kernel takes: the (B, N, H, Dh) tensors with their strides, sizes, scale, the head. Heads that all start at multiples of 8 elements
    are said to: Triton would see multiples of 16 only, and load heads of 72 or 88 one element at a time."""
    q = tensors["q"]
    strides = {f"{name}_strides": x.stride()[:3] for name, x in tensors.items()}
    align = 8 if all(stride % 8 == 0 for axes in strides.values() for stride in axes) else 1
    head = Head(q.shape[-1], *head_parts(q.shape[-1]), align, fp32_precision())
    return {f"{name}_ptr": x for name, x in tensors.items()} | strides | dict(N=q.shape[1], H=q.shape[2], scale=scale, HEAD=head)


def _shape_class(q: Tensor) -> str:
    """ "d80n256": the padded head size and the sequence, up to 64, 128, 256, 320 or "long"."""
    longest = next((n for n in (64, 128, 256, 320) if q.shape[1] <= n), "long")
    return f"d{sum(head_parts(q.shape[-1]))}n{longest}"


def attention_fwd(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q, k, v (B, N, H, Dh), unit last stride; scale > 0 -> o (B, N, H, Dh), lse (B, H, N) fp32, natural logarithm."""
    B, N, H, _ = q.shape
    tile = tiles.lookup("attention_fwd", q, _shape_class(q))
    if tile.provider in attention_libraries.PROVIDERS:
        return attention_libraries.forward(tile.provider, q, k, v, scale)
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((B, H, N), dtype=torch.float32, device=q.device)
    common = _common(scale, q=q, k=k, v=v, o=o) | dict(lse_ptr=lse)
    tiles_m = triton.cdiv(N, tile["BLOCK_M"])
    if tile.provider == "rows":
        per_program = tiles_m if B * H >= MANY_HEADS else 1
        groups = triton.cdiv(tiles_m, max(1, per_program))
        launch(_attention_fwd_rows_kernel, (B * H * groups,), **common, **key_parts(N), QUERY_TILES=per_program, **tile.meta)
    else:
        launch(_attention_fwd_tiled_kernel, (B * H * tiles_m,), **common, LAST_N=last_block(N, tile["BLOCK_N"]), **tile.meta)
    return o, lse


def attention_bwd(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, scale: float, want_bias_grad: bool = False
) -> tuple[Tensor, Tensor | None]:
    """-> packed dqkv (B, N, 3, H, Dh) and, where wanted, its sums over B and N in fp32, (3 H Dh,): the gradient of the QKV bias. Unit last strides."""
    B, N, H, D = q.shape
    tile = tiles.lookup("attention_bwd", q, _shape_class(q))
    if tile.provider in attention_libraries.PROVIDERS:
        dqkv = attention_libraries.backward(tile.provider, q, k, v, o, lse, do, scale, packed=True)
        rows = dqkv.view(B * N, 3 * H * D)
        return dqkv, scale_rows(rows, None, None, 1, want_scaled=False)[1] if want_bias_grad else None
    dqkv = torch.empty((B, N, 3, H, D), dtype=q.dtype, device=q.device)
    return dqkv, _backward(tile, q, k, v, o, lse, do, scale, *dqkv.unbind(2), want_bias_grad)


def attention_bwd_separate(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv, each (B, N, H, Dh) and contiguous."""
    tile = tiles.lookup("attention_bwd", q, _shape_class(q))
    if tile.provider in attention_libraries.PROVIDERS:
        return attention_libraries.backward(tile.provider, q, k, v, o, lse, do, scale, packed=False)
    grads = tuple(torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3))
    _backward(tile, q, k, v, o, lse, do, scale, *grads, False)
    return grads


def _sums(q: Tensor, wanted: bool, *slots: int) -> Tensor:
    """(*slots, H, Dh) in fp32, to be written: the sums that each program makes; empty where not wanted."""
    return torch.empty((*slots, *q.shape[2:]) if wanted else (0,), dtype=torch.float32, device=q.device)


def attention_bwd_dq(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    scale: float,
    dq: Tensor | None = None,
    delta: Tensor | None = None,
    want_sums: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """First half of the tiled backward: dq and, where wanted, its sums over B and N, (H Dh,) in fp32.

    Where they are given it writes into `dq` (B, N, H, Dh) and, what attention_bwd_dkdv reads, the row sums of o * do into
    `delta` (B, H, N) in fp32.
    """
    B, N, H, _ = q.shape
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device) if dq is None else dq
    delta = torch.empty_like(lse) if delta is None else delta
    tile = tiles.lookup("attention_bwd_dq", q, _shape_class(q))
    tiles_m = triton.cdiv(N, tile["BLOCK_M"])
    partial = _sums(q, want_sums, B * tiles_m)
    common = _common(scale, q=q, k=k, v=v, o=o, do=do, dq=dq)
    common |= dict(lse_ptr=lse, delta_ptr=delta, sums_ptr=partial, SUMS=want_sums)
    launch(_attention_bwd_dq_kernel, (B * H * tiles_m,), **common, LAST_N=last_block(N, tile["BLOCK_N"]), **tile.meta)
    return dq, partial.sum(0).flatten() if want_sums else None


def attention_bwd_dkdv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    do: Tensor,
    scale: float,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    want_sums: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Second half of the tiled backward: dk, dv and, where wanted, their sums over B and N, (2 H Dh,) in fp32.

    delta (B, H, N): as attention_bwd_dq leaves it. Writes into `dk` and `dv` (B, N, H, Dh; equal strides) where given.
    """
    B, N, H, _ = q.shape
    dk, dv = (torch.empty(q.shape, dtype=q.dtype, device=q.device) if grad is None else grad for grad in (dk, dv))
    tile = tiles.lookup("attention_bwd_dkdv", q, _shape_class(q))
    tiles_n = triton.cdiv(N, tile["BLOCK_N"])
    partial = _sums(q, want_sums, B * tiles_n, 2)
    common = _common(scale, q=q, k=k, v=v, do=do, dk=dk)
    common |= dict(dv_ptr=dv, lse_ptr=lse, delta_ptr=delta, sums_ptr=partial, SUMS=want_sums)
    launch(_attention_bwd_dkdv_kernel, (B * H * tiles_n,), **common, LAST_M=last_block(N, tile["BLOCK_M"]), **tile.meta)
    return dk, dv, partial.sum(0).flatten() if want_sums else None


def _backward(tile, q, k, v, o, lse, do, scale, dq, dk, dv, want_sums) -> Tensor | None:
    """Our kernels: fills dq, dk, dv (equal strides); -> their sums over B and N, (3 H Dh,) fp32, where wanted."""
    B, N, H, _ = q.shape
    if tile.provider == "rows":
        partial = _sums(q, want_sums, B, 3)
        common = _common(scale, q=q, k=k, v=v, o=o, do=do, dq=dq) | dict(dk_ptr=dk, dv_ptr=dv, lse_ptr=lse, sums_ptr=partial, SUMS=want_sums)
        launch(_attention_bwd_rows_kernel, (B * H,), **common, BLOCK_N=max(16, triton.next_power_of_2(N)), **tile.meta)
        return partial.sum(0).flatten() if want_sums else None

    delta = torch.empty_like(lse)
    if tile.provider == "phases":
        q_sums = _sums(q, want_sums, B * triton.cdiv(N, tile["BLOCK_M1"]))
        kv_sums = _sums(q, want_sums, B * triton.cdiv(N, tile["BLOCK_N2"]), 2)
        common = _common(scale, q=q, k=k, v=v, o=o, do=do, dq=dq) | dict(dk_ptr=dk, dv_ptr=dv, lse_ptr=lse, delta_ptr=delta, SUMS=want_sums)
        blocks = dict(LAST_N1=last_block(N, tile["BLOCK_N1"]), LAST_M2=last_block(N, tile["BLOCK_M2"]), **tile.meta)
        launch(_attention_bwd_phases_kernel, (B * H,), **common, q_sums_ptr=q_sums, kv_sums_ptr=kv_sums, **blocks)
        return torch.cat([q_sums.sum(0).flatten(), kv_sums.sum(0).flatten()]) if want_sums else None

    _, q_sums = attention_bwd_dq(q, k, v, o, lse, do, scale, dq, delta, want_sums)
    *_, kv_sums = attention_bwd_dkdv(q, k, v, lse, delta, do, scale, dk, dv, want_sums)
    return torch.cat([q_sums, kv_sums]) if want_sums else None
