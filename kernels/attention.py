"""Softmax attention: o = softmax(scale q k^T) v and lse = log sum exp(scale q k^T), with its backward. q, k, v, o are (B, N, H, Dh).

Flash style (Dao et al., 2022; the softmax in base 2 and the logits never in memory), made for vision sequences, short and odd (50, 197, 257, 577, 1370):
- forward, whole rows (attention_rows.py): every key and value of a head in one program, one softmax without rescaling, several query tiles one after
  the other; forward, tiled (attention_tiled.py): online softmax over blocks of keys;
- backward, one program for a head (attention_head_bwd.py): 5 matrix products; backward, tiled (attention_tiled_bwd.py): one kernel for dQ (which also
  leaves delta = rowsum(o do)), one for dK and dV; or both in one program per head, one after the other ("phases"): 7 matrix products.
  No atomics: dQ's fp32 sums, where keys are the outer loop, lie in a scratch of the one program that adds to them.
A head is one or two power-of-two parts (80 = 64 + 16), so that it is never padded to 128. Which path runs is data, in tile_rules.py.
"""

import functools

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import attention_libraries, tiles
from .attention_head_bwd import _attention_bwd_head_kernel
from .attention_parts import Head
from .attention_rows import _attention_fwd_rows_kernel
from .attention_tiled import _attention_fwd_tiled_kernel
from .attention_tiled_bwd import _attention_bwd_dkdv_kernel, _attention_bwd_dq_kernel, _attention_bwd_phases_kernel
from .launch import cdiv, fp32_precision, launch
from .rows import row_programs, scale_rows

HEAD_SIZES = tuple(range(16, 129, 8))
# (batch, head) pairs from which one program takes every query of its head: about two programs for each of ~132 multiprocessors, twice.
MANY_HEADS = 512


@functools.cache
def head_parts(head_dim: int) -> tuple[int, int]:
    """The power-of-two parts that hold a head: 64 -> (64, 0), 72 and 80 -> (64, 16), 88 and 96 -> (64, 32), 56 -> (64, 0) with 8 columns masked."""
    size = triton.next_power_of_2(head_dim)
    half, rest = size // 2, max(16, triton.next_power_of_2(head_dim - size // 2))
    return (half, rest) if head_dim < size and half + rest < size else (size, 0)


@functools.cache
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


@functools.cache
def last_block(n: int, block: int) -> int:
    """Size of the masked block after the whole ones: 577 tokens in blocks of 64 -> 16."""
    rest = n % block
    return max(16, triton.next_power_of_2(rest)) if rest else 0


def _common(scale: float, **tensors: Tensor) -> dict:
    """What every kernel takes: the (B, N, H, Dh) tensors, each with its strides, sizes, scale, the head. Heads that all start at multiples of 8
    elements are said to: Triton would see multiples of 16 only, and load heads of 72 or 88 one element at a time."""
    _, N, H, D = tensors["q"].shape
    common, misaligned, farthest = {}, 0, 0
    for name, x in tensors.items():
        strides = x.stride()[:3]
        common[name] = x, strides
        misaligned |= strides[0] | strides[1] | strides[2]
        farthest = max(farthest, N * strides[1])
    head = Head(D, *head_parts(D), 1 if misaligned % 8 else 8, farthest >= 2**31, fp32_precision())
    return common | dict(N=N, H=H, scale=scale, HEAD=head)


def _shape_class(q: Tensor) -> str:
    """ "d80n256": the padded head size and the sequence, up to 64, 128, 256, 320 or "long"."""
    return _class_of(q.shape[-1], q.shape[1])


@functools.cache
def _class_of(head_dim: int, tokens: int) -> str:
    longest = next((n for n in (64, 128, 256, 320) if tokens <= n), "long")
    return f"d{sum(head_parts(head_dim))}n{longest}"


def attention_fwd(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q, k, v (B, N, H, Dh), unit last stride; scale > 0 -> o (B, N, H, Dh), lse (B, H, N) fp32, natural logarithm."""
    B, N, H, _ = q.shape
    tile = tiles.lookup("attention_fwd", q, _shape_class(q))
    if tile.provider in attention_libraries.PROVIDERS:
        return attention_libraries.forward(tile.provider, q, k, v, scale)
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((B, H, N), dtype=torch.float32, device=q.device)
    common = _common(scale, q=q, k=k, v=v, o=o) | dict(lse_ptr=lse)
    tiles_m = cdiv(N, tile["BLOCK_M"])
    if tile.provider == "rows":
        per_program = tiles_m if B * H >= MANY_HEADS else 1
        groups = cdiv(tiles_m, max(1, per_program))
        launch(
            _attention_fwd_rows_kernel,
            (B * H * groups,),
            **common,
            **key_parts(N),
            query_tiles=per_program,
            **tile.meta,
        )
    else:
        launch(
            _attention_fwd_tiled_kernel,
            (B * H * tiles_m,),
            **common,
            LAST_N=last_block(N, tile["BLOCK_N"]),
            **tile.meta,
        )
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


def attention_bwd_separate(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
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
    tiles_m = cdiv(N, tile["BLOCK_M"])
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
    tiles_n = cdiv(N, tile["BLOCK_N"])
    partial = _sums(q, want_sums, B * tiles_n, 2)
    common = _common(scale, q=q, k=k, v=v, do=do, dk=dk, dv=dv)
    common |= dict(lse_ptr=lse, delta_ptr=delta, sums_ptr=partial, SUMS=want_sums)
    launch(_attention_bwd_dkdv_kernel, (B * H * tiles_n,), **common, LAST_M=last_block(N, tile["BLOCK_M"]), **tile.meta)
    return dk, dv, partial.sum(0).flatten() if want_sums else None


def _packed(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether q, k and v (B, N, H, Dh) are parts of one (B, N, 3, H, Dh) tensor, each after the other."""
    strides, start = q.stride(), q.storage_offset()
    step = q.shape[2] * strides[2]
    if (
        k.storage_offset() != start + step
        or v.storage_offset() != start + 2 * step
        or not strides == k.stride() == v.stride()
    ):
        return False
    return q.untyped_storage()._cdata == k.untyped_storage()._cdata == v.untyped_storage()._cdata


_BOXES = dict.fromkeys(("qkv_box", "qkv_rest", "do_box", "do_rest", "dqkv_box", "dqkv_rest"))


def _head_boxes(q, k, v, do, dq, dk, dv, tile: tiles.Tile) -> dict[str, TensorDescriptor | None]:
    """Descriptors, for the copy engine, of what attention_head_bwd.py reads and writes by tiles: (B, heads, N, Dh) in blocks of rows of a head's
    first and second part. All None, and the kernel goes by pointers, where rows of a head do not start at multiples of 16 bytes, where q, k and v
    are not one tensor, or tiles of queries and keys differ."""
    (B, N, H, D), rows, step = q.shape, tile["BLOCK_M"], 16 // q.element_size()
    if rows != tile["BLOCK_N"] or not q.numel() or not _packed(q, k, v) or not _packed(dq, dk, dv):
        return _BOXES
    first, second = head_parts(D)
    boxes = dict(_BOXES)
    for name, x, heads in (("qkv", q, 3 * H), ("do", do, H), ("dqkv", dq, 3 * H)):
        over_b, over_n, over_h, _ = x.stride()
        if x.data_ptr() % 16 or (over_b | over_n | over_h) % step or not (over_b > 0 and over_n > 0 and over_h > 0):
            return _BOXES
        shape, strides = [B, heads, N, D], [over_b, over_h, over_n, 1]
        x = x.as_strided(shape, strides)
        boxes[f"{name}_box"] = TensorDescriptor(x, shape, strides, [1, 1, rows, first])
        if second:
            boxes[f"{name}_rest"] = TensorDescriptor(x, shape, strides, [1, 1, rows, second])
    return boxes


def _backward(tile, q, k, v, o, lse, do, scale, dq, dk, dv, want_sums) -> Tensor | None:
    """Our kernels: fills dq, dk, dv (equal strides); -> their sums over B and N, (3 H Dh,) fp32, where wanted."""
    B, N, H, D = q.shape
    if tile.provider == "head":
        block_m, block_n = tile["BLOCK_M"], tile["BLOCK_N"]
        programs, padded = row_programs(q.device, tile["PER_SM"], B * H), cdiv(N, block_m) * block_m
        partial, scratch = _sums(q, want_sums, B, 3), dict(dtype=torch.float32, device=q.device)
        common = _common(scale, q=q, k=k, v=v, o=o, do=do, dq=dq, dk=dk, dv=dv)
        common |= dict(lse_ptr=lse, sums_ptr=partial, heads=B * H, padded=padded, SUMS=want_sums)
        common |= dict(
            stat_ptr=torch.empty((programs, 2, padded), **scratch), dq_acc_ptr=torch.empty((programs, N, D), **scratch)
        )
        last = 16 if N > block_n and 0 < N % block_n <= 16 else 0
        flags = {name: value for name, value in tile.meta.items() if name != "PER_SM"}
        launch(
            _attention_bwd_head_kernel,
            (programs,),
            **common,
            **_head_boxes(q, k, v, do, dq, dk, dv, tile),
            LAST_N=last,
            **flags,
        )
        return partial.sum(0).flatten() if want_sums else None

    delta = torch.empty_like(lse)
    if tile.provider == "phases":
        q_sums = _sums(q, want_sums, B * cdiv(N, tile["BLOCK_M1"]))
        kv_sums = _sums(q, want_sums, B * cdiv(N, tile["BLOCK_N2"]), 2)
        common = _common(scale, q=q, k=k, v=v, o=o, do=do, dq=dq, dk=dk, dv=dv) | dict(
            lse_ptr=lse, delta_ptr=delta, SUMS=want_sums
        )
        blocks = dict(LAST_N1=last_block(N, tile["BLOCK_N1"]), LAST_M2=last_block(N, tile["BLOCK_M2"]), **tile.meta)
        launch(_attention_bwd_phases_kernel, (B * H,), **common, q_sums_ptr=q_sums, kv_sums_ptr=kv_sums, **blocks)
        return torch.cat([q_sums.sum(0).flatten(), kv_sums.sum(0).flatten()]) if want_sums else None

    _, q_sums = attention_bwd_dq(q, k, v, o, lse, do, scale, dq, delta, want_sums)
    *_, kv_sums = attention_bwd_dkdv(q, k, v, lse, delta, do, scale, dk, dv, want_sums)
    return torch.cat([q_sums, kv_sums]) if want_sums else None
