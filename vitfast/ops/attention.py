"""Softmax attention, flash-style (Vaswani et al., 2017; Dao et al., 2022)."""

from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.attention.options import PLAIN, Logits
from . import reference as ref
from ._dispatch import NO_TRITON, autocasts, kernels_wanted
from ._operation import (
    FLOAT32,
    as_dtype,
    check_floating,
    check_offsets,
    check_same,
    check_shape,
    check_tensors,
    custom_op,
    is_number,
)

if NO_TRITON is None:
    from ..kernels.attention import launchers as kernels


ROPE_LAYOUTS = ("half", "interleaved")


def checked(
    op: str,
    q: Tensor,
    shape: tuple,
    rope,
    rope_layout: str,
    num_prefix: int,
    bias,
    key_lengths,
    offsets=None,
    longest: int | None = None,
) -> Logits:
    """The options of an attention, checked: shape is its (B, N, H, Dh). Raises for those that do not fit.

    Of packed samples B is 1.
    """
    if offsets is not None:
        return _checked_packed(op, q, shape, rope, rope_layout, num_prefix, bias, key_lengths, offsets, longest)
    if longest is not None:
        raise ValueError(f"{op}: longest is for packed samples, and there are no offsets")
    if rope is None and bias is None and key_lengths is None:
        if num_prefix or rope_layout != "half":
            _check_layout(op, rope_layout, num_prefix, shape)
        return PLAIN
    cos, sin = _check_rope(op, q, shape, rope, rope_layout, num_prefix) if rope is not None else (None, None)
    _check_layout(op, rope_layout, num_prefix, shape)
    B, N, H, _ = shape
    if bias is not None:
        _check_table(op, "bias", bias, q)
        if tuple(bias.shape) not in ((H, N, N), (1, H, N, N), (B, H, N, N)):
            raise ValueError(f"{op}: bias must be ({H}, {N}, {N}) or ({B} or 1, {H}, {N}, {N}), got {_shape(bias)}")
    if key_lengths is not None:
        check_tensors(op, key_lengths=key_lengths)
        if key_lengths.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{op}: key_lengths must be int32 or int64, got {key_lengths.dtype}")
        if key_lengths.device != q.device:
            raise ValueError(f"{op}: key_lengths must be on {q.device} like its input, got {key_lengths.device}")
        if tuple(key_lengths.shape) != (B,):
            raise ValueError(f"{op}: key_lengths must be ({B},), got {_shape(key_lengths)}")
    num_prefix = num_prefix if isinstance(num_prefix, torch.SymInt) else int(num_prefix)
    key_lengths = None if key_lengths is None else key_lengths.contiguous()
    options = dict(interleaved=rope_layout == "interleaved", num_prefix=num_prefix)
    return Logits(cos, sin, bias, key_lengths, **options)


def _checked_packed(
    op, q, shape, rope, rope_layout, num_prefix, bias, key_lengths, offsets, longest: int | None
) -> Logits:
    """The options of packed samples, (1, tokens, H, Dh)."""
    for name, given in (
        ("bias", bias is not None),
        ("key_lengths", key_lengths is not None),
        ("num_prefix", num_prefix),
    ):
        if given:
            raise ValueError(f"{op}: {name} is not for packed samples; leave it out where offsets are given")
    logits = checked(op, q, shape, rope, rope_layout, num_prefix, None, None)
    if longest is not None and (not is_whole(longest) or longest < 0):
        raise ValueError(
            f"{op}: longest must be None or a whole number, the tokens of a sample at most, got {longest!r}"
        )
    most = check_offsets(op, offsets, shape[1], q.device)
    if longest is None:
        longest = shape[1] if most is None else most
    elif most is not None and most > longest:
        raise ValueError(f"{op}: longest must be at least the tokens of the longest sample, {most}, got {longest}")
    longest = longest if isinstance(longest, torch.SymInt) else int(longest)
    return logits._replace(offsets=offsets.contiguous(), longest=longest)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _check_table(op: str, name: str, table: Tensor, q: Tensor) -> None:
    """A tensor on q's device, in its dtype or in fp32."""
    check_tensors(op, **{name: table})
    check_floating(op, name, table)
    if table.device != q.device:
        raise ValueError(f"{op}: {name} must be on {q.device} like its input, got {table.device}")
    if table.dtype not in (q.dtype, torch.float32):
        other = "" if q.dtype == torch.float32 else ", or torch.float32"
        raise TypeError(f"{op}: {name} must be {q.dtype} like its input{other}, got {table.dtype}")


def is_whole(value) -> bool:
    """A whole number, NumPy's and torch's too, and no truth value."""
    return isinstance(value, (torch.SymInt, Integral)) and not isinstance(value, bool)


def _check_layout(op: str, layout: str, num_prefix: int, shape: tuple) -> None:
    if layout not in ROPE_LAYOUTS:
        raise ValueError(f"{op}: rope_layout must be 'half' or 'interleaved', got {layout!r}")
    if not is_whole(num_prefix) or not 0 <= num_prefix <= shape[1]:
        raise ValueError(f"{op}: num_prefix must be a whole number from 0 to the {shape[1]} tokens, got {num_prefix!r}")


def _check_rope(op: str, q: Tensor, shape: tuple, rope, layout: str, num_prefix: int) -> tuple[Tensor, Tensor]:
    if not isinstance(rope, (tuple, list)) or len(rope) != 2:
        raise TypeError(f"{op}: rope must be (cos, sin), got {type(rope).__name__}")
    _check_layout(op, layout, num_prefix, shape)
    (B, N, H, head), (cos, sin) = shape, rope
    if head % 2:
        raise ValueError(f"{op}: rope turns pairs of columns, so the head size must be even, got {head}")
    _check_table(op, "cos", cos, q)
    _check_table(op, "sin", sin, q)
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        both = f"{_shape(cos)} {cos.dtype} and {_shape(sin)} {sin.dtype}"
        raise ValueError(f"{op}: cos and sin must be alike, got {both}")
    rows, columns = (N - num_prefix,), ((head,), (head // 2,))
    leads = ((), (H,), (B, 1), (B, H), (1, 1), (1, H))
    if _shape(cos) not in tuple(lead + rows + last for lead in leads for last in columns):
        want = f"({rows[0]}, {head}), ({H}, {rows[0]}, {head}) or ({B}, 1 or {H}, {rows[0]}, {head})"
        raise ValueError(f"{op}: cos and sin must be {want}, or half as wide, got {_shape(cos)}")
    return cos, sin


def checked_scale(op: str, scale: float | None, head_size: int) -> float:
    """1 / sqrt(Dh) unless given; Python's or torch's own number."""
    scale = head_size**-0.5 if scale is None else scale
    if not is_number(scale) or not -FLOAT32 <= scale <= FLOAT32:
        raise ValueError(f"{op}: scale must be None or a number that float32 holds, got {scale!r}")
    return scale if isinstance(scale, torch.SymFloat) else float(scale)


def _unit_rows(x: Tensor) -> Tensor:
    """The kernels read rows of a head as they lie in memory, whatever the other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _Packed(NamedTuple):
    """The arguments of attention(qkv)."""

    qkv: Tensor  # (B, N, 3, H, Dh)
    options: Logits
    scale: float

    @property
    def heads(self) -> list[Tensor]:
        """q, k and v (B, N, H, Dh)."""
        return list(_unit_rows(self.qkv).unbind(2))


class _Separate(NamedTuple):
    """The arguments of attention(q, k, v)."""

    q: Tensor  # (B, N, H, Dh)
    k: Tensor
    v: Tensor
    options: Logits
    scale: float

    @property
    def heads(self) -> list[Tensor]:
        """q, k and v, as the kernels read them."""
        return [_unit_rows(x) for x in (self.q, self.k, self.v)]


class _Saved(NamedTuple):
    """Kept for backward."""

    out: Tensor | None  # (B, N, H, Dh)
    lse: Tensor | None  # (B, H, N) in fp32


def _forward(t: _Packed | _Separate) -> tuple[Tensor, _Saved]:
    o, lse = kernels.attention_fwd(*t.heads, t.scale, t.options)
    return o, _Saved(o, lse)


def _fake(t: _Packed | _Separate) -> tuple[Tensor, _Saved]:
    q = t.heads[0]
    B, N, H, _ = q.shape
    o = q.new_empty(q.shape)
    return o, _Saved(o, q.new_empty((B, H, N), dtype=torch.float32))


def _backward(do: Tensor, t: _Packed | _Separate, saved: _Saved, needs) -> dict[str, Tensor | None]:
    heads, do = t.heads, _unit_rows(do)
    tensors, turn_back = (*heads, *saved, do, t.scale), not needs_rope(needs)
    if isinstance(t, _Packed):
        grads = dict(qkv=kernels.attention_bwd(*tensors, logits=t.options, turn_back=turn_back)[0])
        dq, dk, _ = grads["qkv"].unbind(2)
    else:
        dq, dk, dv = kernels.attention_bwd_separate(*tensors, logits=t.options, turn_back=turn_back)
        grads = dict(q=dq, k=dk, v=dv)
    return grads | option_gradients(t.options, needs, tensors, dq, dk)


def needs_rope(needs: NamedTuple) -> bool:
    """Whether the rotary tables need a gradient, and with it one that is not turned back."""
    return needs.options.cos or needs.options.sin


def option_gradients(
    options: Logits, needs: NamedTuple, tensors: tuple, dq: Tensor, dk: Tensor
) -> dict[str, Tensor | None]:
    """Gradients of cos, sin and the bias, None where not needed.

    tensors: q, k, v, o, lse, do and the scale. dq, dk: not turned back yet where needs_rope; they are turned back here.
    """
    dcos = dsin = None
    if needs_rope(needs):
        dcos, dsin = (as_dtype(g, options.cos.dtype) for g in kernels.rope_bwd(*tensors[:2], dq, dk, options))
    return dict(cos=dcos, sin=dsin, bias=kernels.bias_bwd(*tensors, options) if needs.options.bias else None)


_attention = dict(forward=_forward, fake=_fake, backward=_backward, public="attention")
_packed = custom_op("attention_packed", _Packed, _Saved, **_attention)
_separate = custom_op("attention_separate", _Separate, _Saved, **_attention)


def unsupported_reason(head_size: int, scale: float) -> str | None:
    """Why no kernel attends with this head size and scale; None where one does."""
    if NO_TRITON is None and head_size not in kernels.HEAD_SIZES:
        return f"head size {head_size} is not one of 16, 24, ..., 128"
    return None if scale > 0 else f"scale {scale} is not positive"


def _attend_nested(qkv: Tensor, k: Tensor | None, v: Tensor | None, offsets: Tensor | None, **options) -> Tensor:
    """`attention` of jagged nested tensors, as one."""
    given = [x for x in (qkv, k, v) if x is not None]
    if offsets is not None or any(not isinstance(x, Tensor) or x.layout != torch.jagged for x in given):
        raise ValueError("attention: nested tensors must be jagged, all of them, and come without offsets")
    if any(x.shape != qkv.shape for x in given):  # the jagged length too, which stands for the offsets
        raise ValueError("attention: jagged q, k and v must be alike, with the same offsets")
    values, offsets = [x.values() for x in given], qkv.offsets()
    if qkv.lengths() is not None:
        raise ValueError("attention: a jagged tensor with gaps cannot be read; make it contiguous()")
    longest = qkv._maybe_max_seqlen  # None where nobody has asked for it
    found = attention(*values, offsets=offsets, longest=longest, **options)
    return torch.nested.nested_tensor_from_jagged(found, offsets)


@autocasts(keep=("bias",))
def attention(
    qkv: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    scale: float | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    rope_layout: str = "half",
    num_prefix: int = 0,
    bias: Tensor | None = None,
    key_lengths: Tensor | None = None,
    offsets: Tensor | None = None,
    longest: int | None = None,
) -> Tensor:
    """softmax(q k^T * scale + bias) v over the tokens, for every head.

    Either packed, `attention(qkv)` with qkv (B, N, 3, H, Dh), or `attention(q, k, v)` with three (B, N, H, Dh); any
    strides with a unit last one. scale: 1/sqrt(Dh) unless given.

    Samples of many sizes: qkv (tokens, 3, H, Dh) or three (tokens, H, Dh), where sample s owns the tokens offsets[s] to
    offsets[s + 1] and attends to itself alone; offsets (S + 1,) int32 or int64, on the device, from 0 to all tokens.
    longest: the tokens of the longest sample or more, a number of Python's (without it plain PyTorch waits for the
    device). rope is then (tokens, Dh) or (H, tokens, Dh), with 1 and 0 for tokens that are not turned; there is no
    num_prefix, bias or key_lengths. Jagged nested tensors (S, j, ...) are taken with their own offsets, and one is
    given back.

    rope: rotary positions (Su et al., 2021), (cos, sin), each (N - num_prefix, Dh), (H, N - num_prefix, Dh) or
    (B, 1 or H, N - num_prefix, Dh), in q's dtype or fp32; or half as wide, with one number for both columns of a pair.
    Of the tokens after the first num_prefix, each pair (a, b) of columns of q and k becomes
    (a cos_a - b sin_a, b cos_b + a sin_b). rope_layout: pairs are columns i and i + Dh/2 ("half") or 2i and 2i + 1
    ("interleaved"). bias: (H, N, N) or (B or 1, H, N, N), added to the logits, in q's dtype or fp32; -inf hides a key.
    key_lengths: (B,) int32 or int64, on the device: the keys from there on do not count; all queries are computed.
    A query that sees no key gives zeros.

    Returns (B, N, H, Dh) or (tokens, H, Dh), contiguous, in the input's dtype.
    """
    if isinstance(qkv, Tensor) and qkv.is_nested:
        return _attend_nested(qkv, k, v, offsets, scale=scale, rope=rope, rope_layout=rope_layout)
    if (k is None) != (v is None):
        raise ValueError("attention: give qkv alone, or q, k and v; got two tensors")
    packed, lead = k is None, ("B", "N") if offsets is None else ("tokens",)
    check_tensors("attention", **{"qkv" if packed else "q": qkv})
    if packed:
        if qkv.dim() != len(lead) + 3 or qkv.shape[-3] != 3:
            raise ValueError(f"attention: qkv must be ({', '.join(lead)}, 3, H, Dh), got {tuple(qkv.shape)}")
        check_same("attention", "qkv", qkv)
        shape = (*qkv.shape[:-3], *qkv.shape[-2:])
    else:
        if qkv.dim() != len(lead) + 2:
            raise ValueError(f"attention: q must be ({', '.join(lead)}, H, Dh), got {tuple(qkv.shape)}")
        shape = tuple(qkv.shape)
        check_shape("attention", "k", k, shape)
        check_shape("attention", "v", v, shape)
        check_same("attention", "q", qkv, k=k, v=v)
    if qkv.shape[-1] == 0:
        raise ValueError(
            f"attention: the head size must be at least 1, got {'qkv' if packed else 'q'} {tuple(qkv.shape)}"
        )
    shape, options = shape if offsets is None else (1, *shape), (rope, rope_layout, num_prefix, bias, key_lengths)
    logits = checked("attention", qkv, shape, *options, offsets, longest)
    scale = checked_scale("attention", scale, qkv.shape[-1])
    if kernels_wanted("attention", qkv, unsupported_reason(qkv.shape[-1], scale)):
        tensors = (qkv,) if packed else (qkv, k, v)
        tensors = tensors if offsets is None else (x[None] for x in tensors)
        kernel, arguments = (_packed, _Packed) if packed else (_separate, _Separate)
        o = kernel(arguments(*tensors, logits, scale))[0]
        return o if offsets is None else o.flatten(0, 1)
    q, k, v = qkv.unbind(-3) if packed else (qkv, k, v)
    options = logits.options | ({} if offsets is None else dict(longest=longest))
    return ref.attention(q, k, v, scale=scale, **options)
