"""Checks of the options of attention: rotary positions, a bias, lengths of the keys, packed samples."""

from numbers import Integral

import torch
from torch import Tensor

from .. import packed
from ..errors import both_ends
from ..kernels.logits import PLAIN, Logits
from ._dispatch import FLOAT32, check_floating, check_tensors, is_number

ROPE_LAYOUTS = ("half", "interleaved")
SCHEMA = (
    "Tensor? cos, Tensor? sin, Tensor? bias, Tensor? key_lengths, Tensor? offsets, "
    "bool interleaved, SymInt num_prefix, SymInt longest"
)


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


def check_offsets(op: str, offsets: Tensor, tokens: int, device: torch.device) -> int | None:
    """Tokens of the longest sample of offsets (S + 1,); None where the host would have to wait for that.

    Their values are checked on the CPU alone.
    """
    check_tensors(op, offsets=offsets)
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: offsets must be int32 or int64, got {offsets.dtype}")
    if offsets.device != device:
        raise ValueError(f"{op}: offsets must be on {device} like its input, got {offsets.device}")
    if offsets.dim() != 1 or not len(offsets):
        raise ValueError(f"{op}: offsets must be (S + 1,), got {_shape(offsets)}")
    if not packed.at_hand(offsets):
        return None
    if offsets[0] != 0 or offsets[-1] != tokens or bool((offsets.diff() < 0).any()):
        text = f"must rise from 0 to the {tokens} tokens, got {both_ends(str(offsets.tolist()), 80)}"
        raise ValueError(f"{op}: offsets {text}")
    return int(offsets.diff().max()) if len(offsets) > 1 else 0


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
