"""Softmax attention, flash-style (Vaswani et al., 2017; Dao et al., 2022)."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..kernels.attention.options import AttentionOptions
from . import checks as check
from . import reference as ref
from .dispatch import NO_TRITON, autocasts, kernels_wanted, routed
from .operation import custom_op
from .packed import check_counts, check_offsets

if NO_TRITON is None:
    from ..kernels.attention import launchers as kernels


RopeLayout = Literal["half", "interleaved"]


def checked(
    op: str, q: Tensor, shape: tuple, rope, rope_layout, num_prefix, bias, key_lengths, offsets, longest
) -> AttentionOptions:
    """Checks the options of attention of `shape` (B, N, H, Dh) and returns them as AttentionOptions.

    For packed samples, B is 1 and N counts all tokens.
    """
    (B, N, H, _), most = shape, 0
    if offsets is not None:
        masks = dict(bias=bias is not None, key_lengths=key_lengths is not None, num_prefix=num_prefix)
        for name, is_set in masks.items():
            if is_set:
                raise ValueError(f"{op}: {name} is not for packed samples; leave it out where offsets are given")
        most, offsets = _checked_longest(op, offsets, longest, N, q.device), offsets.contiguous()
    elif longest is not None:
        raise ValueError(f"{op}: longest is for packed samples, and there are no offsets")
    if rope_layout not in ("half", "interleaved"):
        raise ValueError(f"{op}: rope_layout must be 'half' or 'interleaved', got {rope_layout!r}")
    prefix = check.as_whole(num_prefix)
    if prefix is None or not 0 <= prefix <= N:
        raise ValueError(f"{op}: num_prefix must be a whole number from 0 to the {N} tokens, got {num_prefix!r}")
    tables = (None, None) if rope is None else _check_rope(op, q, shape, rope, prefix)
    if bias is not None:
        _check_table(op, "bias", bias, q)
        if tuple(bias.shape) not in ((H, N, N), (1, H, N, N), (B, H, N, N)):
            want = f"({H}, {N}, {N}) or ({B} or 1, {H}, {N}, {N})"
            raise ValueError(f"{op}: bias must be {want}, got {tuple(bias.shape)}")
    if key_lengths is not None:
        check_counts(op, "key_lengths", key_lengths, q.device)
        check.shape(op, "key_lengths", key_lengths, (B,))
        key_lengths = key_lengths.contiguous()
    return AttentionOptions(*tables, bias, key_lengths, offsets, rope_layout == "interleaved", prefix, most)


def _checked_longest(op: str, offsets: Tensor, longest: int | None, tokens: int, device: torch.device) -> int:
    """Checks offsets and `longest`; returns the tokens of the longest packed sample, or more."""
    limit = check.as_whole(longest)
    if longest is not None and (limit is None or limit < 0):
        want = "None or a whole number, the tokens of a sample at most"
        raise ValueError(f"{op}: longest must be {want}, got {longest!r}")
    most = check_offsets(op, offsets, tokens, device)
    if longest is None:
        return tokens if most is None else most
    if most is not None and most > longest:
        raise ValueError(f"{op}: longest must be at least the tokens of the longest sample, {most}, got {longest}")
    return limit


def _check_table(op: str, name: str, table: Tensor, q: Tensor) -> None:
    """Checks that a tensor lies on q's device, in q's dtype or in fp32."""
    check.tensors(op, **{name: table})
    check.floating(op, **{name: table})
    check.device(op, "its input", q.device, **{name: table})
    if table.dtype not in (q.dtype, torch.float32):
        other = "" if q.dtype == torch.float32 else ", or torch.float32"
        raise TypeError(f"{op}: {name} must be {q.dtype} like its input{other}, got {table.dtype}")


def _check_rope(op: str, q: Tensor, shape: tuple, rope, num_prefix: int) -> tuple[Tensor, Tensor]:
    if not isinstance(rope, (tuple, list)) or len(rope) != 2:
        raise TypeError(f"{op}: rope must be (cos, sin), got {type(rope).__name__}")
    (B, N, H, head), (cos, sin) = shape, rope
    if head % 2:
        raise ValueError(f"{op}: rope turns pairs of columns, so the head size must be even, got {head}")
    _check_table(op, "cos", cos, q)
    _check_table(op, "sin", sin, q)
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        both = f"{tuple(cos.shape)} {cos.dtype} and {tuple(sin.shape)} {sin.dtype}"
        raise ValueError(f"{op}: cos and sin must be alike, got {both}")
    rows, columns = (N - num_prefix,), ((head,), (head // 2,))
    leads = ((), (H,), (B, 1), (B, H), (1, 1), (1, H))
    if tuple(cos.shape) not in tuple(lead + rows + last for lead in leads for last in columns):
        want = f"({rows[0]}, {head}), ({H}, {rows[0]}, {head}) or ({B}, 1 or {H}, {rows[0]}, {head})"
        raise ValueError(f"{op}: cos and sin must be {want}, or half as wide, got {tuple(cos.shape)}")
    return cos, sin


def _unit_rows(x: Tensor) -> Tensor:
    """x, copied unless its last stride is 1; the kernels take any other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _Arguments(NamedTuple):
    """The arguments of attention."""

    q: Tensor  # (B, N, H, Dh); where k and v are None it holds all three, (B, N, 3, H, Dh)
    k: Tensor | None
    v: Tensor | None
    options: AttentionOptions
    scale: float

    @property
    def heads(self) -> tuple[Tensor, ...]:
        """q, k and v (B, N, H, Dh), as the kernels read them."""
        if self.k is None:
            return _unit_rows(self.q).unbind(2)
        return tuple(map(_unit_rows, (self.q, self.k, self.v)))


class _Saved(NamedTuple):
    """The tensors kept for backward."""

    out: Tensor | None  # (B, N, H, Dh)
    lse: Tensor | None  # (B, H, N) in fp32


def _forward(t: _Arguments) -> tuple[Tensor, _Saved]:
    o, lse = kernels.attention_fwd(*t.heads, t.scale, t.options)
    return o, _Saved(o, lse)


def _fake(t: _Arguments) -> tuple[Tensor, _Saved]:
    q = t.heads[0]
    B, N, H, _ = q.shape
    o = q.new_empty(q.shape)
    return o, _Saved(o, q.new_empty((B, H, N), dtype=torch.float32))


def _backward(do: Tensor, t: _Arguments, saved: _Saved, needs: _Arguments) -> dict[str, Tensor | None]:
    tensors, as_qkv = (*t.heads, *saved, _unit_rows(do), t.scale), t.k is None
    grads, _ = kernels.attention_bwd(*tensors, options=t.options, unrotate=not needs_rope(needs), as_qkv=as_qkv)
    dq, dk, dv = grads.unbind(2) if as_qkv else grads
    qkv_grads = dict(q=grads) if as_qkv else dict(q=dq, k=dk, v=dv)
    return qkv_grads | option_gradients(t.options, needs, tensors, dq, dk)


def needs_rope(needs: NamedTuple) -> bool:
    """Whether cos or sin needs a gradient; attention's backward then leaves dq and dk rotated."""
    return needs.options.cos or needs.options.sin


def option_gradients(
    options: AttentionOptions, needs: NamedTuple, tensors: tuple, dq: Tensor, dk: Tensor
) -> dict[str, Tensor | None]:
    """Gradients of cos, sin and the bias, None where not needed.

    tensors: q, k, v, o, lse, do and the scale. dq, dk: still rotated where needs_rope; they are unrotated in place.
    """
    dcos = dsin = None
    if needs_rope(needs):
        dcos, dsin = (g.to(options.cos.dtype) for g in kernels.rope_bwd(*tensors[:2], dq, dk, options))
    return dict(cos=dcos, sin=dsin, bias=kernels.bias_bwd(*tensors, options) if needs.options.bias else None)


_attention = custom_op("attention", _Arguments, _Saved, forward=_forward, fake=_fake, backward=_backward)


def head_unsupported(head_size: int, scale: float) -> str | None:
    """Why no kernel attends with this head size and scale; None where one does."""
    if NO_TRITON is None and head_size not in kernels.HEAD_SIZES:
        return f"head size {head_size} is not one of 16, 24, ..., 128"
    return None if scale > 0 else f"scale {scale} is not positive"


def _attend_nested(qkv: Tensor, k: Tensor | None, v: Tensor | None, offsets: Tensor | None, **options) -> Tensor:
    """`attention` of jagged nested tensors; returns a jagged nested tensor."""
    tensors = [x for x in (qkv, k, v) if x is not None]
    if offsets is not None or any(not isinstance(x, Tensor) or x.layout != torch.jagged for x in tensors):
        raise ValueError("attention: nested tensors must be jagged, all of them, and come without offsets")
    if any(x.shape != qkv.shape for x in tensors):  # this also compares the jagged lengths, which identify the offsets
        raise ValueError("attention: jagged q, k and v must be alike, with the same offsets")
    values, offsets = [x.values() for x in tensors], qkv.offsets()
    if qkv.lengths() is not None:
        raise ValueError("attention: a jagged tensor with gaps cannot be read; make it contiguous()")
    if options["longest"] is None:
        options["longest"] = qkv._maybe_max_seqlen  # None unless it was computed before
    return torch.nested.nested_tensor_from_jagged(attention(*values, offsets=offsets, **options), offsets)


@autocasts("bias")
@routed
def attention(
    qkv: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    scale: float | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    rope_layout: RopeLayout = "half",
    num_prefix: int = 0,
    bias: Tensor | None = None,
    key_lengths: Tensor | None = None,
    offsets: Tensor | None = None,
    longest: int | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Multi-head attention: softmax(q k^T * scale + bias) v over the tokens, for every head.

    Call `attention(qkv)` with qkv (B, N, 3, H, Dh), or `attention(q, k, v)` with three (B, N, H, Dh). Strides may be
    any; a last stride other than 1 costs a copy. scale: by default 1/sqrt(Dh).

    Samples of many sizes are packed: qkv is (tokens, 3, H, Dh), or q, k and v are (tokens, H, Dh) each. Sample s owns
    the tokens offsets[s] to offsets[s + 1] and attends only to itself. offsets (S + 1,) is int32 or int64, on the
    device, and rises from 0 to the number of tokens. longest is a Python number: the tokens of the longest sample, or
    more. (Without it, plain PyTorch waits for the device.) flash-attention's names, cu_seqlens and max_seqlen, work
    too. rope is then (tokens, Dh) or (H, tokens, Dh), with cos 1 and sin 0 for tokens that are not rotated; num_prefix,
    bias and key_lengths are refused. Jagged nested tensors (S, j, ...) have their own offsets, and the result is one.

    rope: rotary positions (Su et al., 2021), (cos, sin), each (N - num_prefix, Dh), (H, N - num_prefix, Dh) or
    (B, 1 or H, N - num_prefix, Dh), in q's dtype or fp32; or half as wide, with one number for both columns of a pair.
    In tokens after the first num_prefix, each pair (a, b) of columns of q and k becomes
    (a cos_a - b sin_a, b cos_b + a sin_b). rope_layout: pairs are columns i and i + Dh/2 ("half") or 2i and 2i + 1
    ("interleaved"). bias: (H, N, N) or (B or 1, H, N, N) in q's dtype or fp32, added to the logits; -inf hides a key.
    key_lengths: (B,) int32 or int64, on the device; sample b attends only to its first key_lengths[b] keys. All queries
    are computed. A query that sees no key gives zeros.

    Returns (B, N, H, Dh) or (tokens, H, Dh), contiguous, in the input's dtype.
    """
    if isinstance(qkv, Tensor) and qkv.is_nested:
        options = dict(num_prefix=num_prefix, bias=bias, key_lengths=key_lengths, longest=longest)
        return _attend_nested(qkv, k, v, offsets, scale=scale, rope=rope, rope_layout=rope_layout, **options)
    if (k is None) != (v is None):
        raise ValueError("attention: give qkv alone, or q, k and v; got two tensors")
    name, three = ("qkv", (3,)) if k is None else ("q", ())
    lead = ("B", "N") if offsets is None else ("tokens",)
    check.shape("attention", name, qkv, (*lead, *three, "H", "Dh"), required=True)
    check.shape("attention", "k", k, tuple(qkv.shape))
    check.shape("attention", "v", v, tuple(qkv.shape))
    check.same("attention", name, qkv, k=k, v=v)
    if qkv.shape[-1] == 0:
        raise ValueError(f"attention: the head size must be at least 1, got {name} {tuple(qkv.shape)}")
    shape, terms = (*qkv.shape[: len(lead)], *qkv.shape[-2:]), (rope, rope_layout, num_prefix, bias, key_lengths)
    shape = shape if offsets is None else (1, *shape)
    options = checked("attention", qkv, shape, *terms, offsets, longest)
    scale = qkv.shape[-1] ** -0.5 if scale is None else scale
    scale = check.number("attention", "scale", scale, -check.FLOAT32, "None or a number that float32 holds")
    if kernels_wanted("attention", qkv, head_unsupported(qkv.shape[-1], scale)):
        tensors = (qkv, k, v) if offsets is None else (None if x is None else x[None] for x in (qkv, k, v))
        call = _attention(_Arguments(*tensors, options, scale))
        return call if offsets is None else call.run().flatten(0, 1)
    q, k, v = qkv.unbind(-3) if k is None else (qkv, k, v)
    return ref.attention(q, k, v, scale=scale, longest=longest, **options.keywords)
