"""Softmax attention, flash-style (Vaswani et al., 2017; Dao et al., 2022)."""

import torch
from torch import Tensor

from .. import ref
from ._dispatch import (
    FLOAT32,
    NO_TRITON,
    autocasts,
    check_same,
    check_shape,
    check_tensors,
    is_number,
    kernels_wanted,
    only_once,
)
from ._gradients import operation

if NO_TRITON is None:
    from ..kernels import attention as kernels


def _unit_rows(x: Tensor) -> Tensor:
    """The kernels read rows of a head as they lie in memory, whatever the other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _heads(inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """q, k and v (B, N, H, Dh) of qkv (B, N, 3, H, Dh), or as they are given."""
    return list(_unit_rows(inputs[0]).unbind(2)) if len(inputs) == 1 else [_unit_rows(x) for x in inputs]


def _declare(kind: str, *names: str):
    """(*inputs, scale) -> (o (B, N, H, Dh), lse (B, H, N)) as an operation with its derivative."""
    count, packed, tensors = len(names), len(names) == 1, ", ".join(f"Tensor {name}" for name in names)

    @operation(f"attention_{kind}", f"{tensors}, float scale", 2)
    def forward(*arguments):
        return kernels.attention_fwd(*_heads(arguments[:-1]), arguments[-1])

    @forward.register_fake
    def _(*arguments):
        q = arguments[0].select(2, 0) if packed else arguments[0]
        B, N, H, _ = q.shape
        return q.new_empty(q.shape), q.new_empty((B, H, N), dtype=torch.float32)

    @operation(f"attention_{kind}_backward", f"{tensors}, Tensor o, Tensor lse, Tensor do, float scale", count)
    def backward(*arguments):
        *inputs, o, lse, do, scale = arguments
        arguments = *_heads(inputs), o, lse, _unit_rows(do), scale
        return kernels.attention_bwd(*arguments)[0] if packed else kernels.attention_bwd_separate(*arguments)

    @backward.register_fake
    def _(*arguments):
        made = tuple(x.new_empty(x.shape) for x in arguments[:count])
        return made[0] if packed else made

    def save(ctx, inputs, output):
        *tensors, ctx.scale = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors, *output)

    def differentiate(ctx, do, _):
        if do is None:
            return (None,) * (count + 1)
        grads = backward(*ctx.saved_tensors, do, ctx.scale)
        return (grads, None) if packed else (*grads, None)

    forward.register_autograd(differentiate, setup_context=save)
    only_once(backward, "attention")
    return forward


_packed, _separate = _declare("packed", "qkv"), _declare("separate", "q", "k", "v")


def unsupported_reason(head_size: int, scale: float) -> str | None:
    """Why no kernel attends with this head size and scale; None where one does."""
    if NO_TRITON is None and head_size not in kernels.HEAD_SIZES:
        return f"head size {head_size} is not one of 16, 24, ..., 128"
    return None if scale > 0 else f"scale {scale} is not positive"


@autocasts
def attention(qkv: Tensor, k: Tensor | None = None, v: Tensor | None = None, *, scale: float | None = None) -> Tensor:
    """softmax(q k^T * scale) v over the tokens, for every head.

    Either packed, `attention(qkv)` with qkv (B, N, 3, H, Dh), or `attention(q, k, v)` with three (B, N, H, Dh); any
    strides with a unit last one. scale: 1/sqrt(Dh) unless given. Returns (B, N, H, Dh), contiguous, in the input's
    dtype.
    """
    if (k is None) != (v is None):
        raise ValueError("attention: give qkv alone, or q, k and v; got two tensors")
    packed = k is None
    check_tensors("attention", **{"qkv" if packed else "q": qkv})
    if packed:
        if qkv.dim() != 5 or qkv.shape[2] != 3:
            raise ValueError(f"attention: qkv must be (B, N, 3, H, Dh), got {tuple(qkv.shape)}")
        check_same("attention", "qkv", qkv)
    else:
        if qkv.dim() != 4:
            raise ValueError(f"attention: q must be (B, N, H, Dh), got {tuple(qkv.shape)}")
        check_shape("attention", "k", k, tuple(qkv.shape))
        check_shape("attention", "v", v, tuple(qkv.shape))
        check_same("attention", "q", qkv, k=k, v=v)
    if qkv.shape[-1] == 0:
        raise ValueError(
            f"attention: the head size must be at least 1, got {'qkv' if packed else 'q'} {tuple(qkv.shape)}"
        )
    scale = qkv.shape[-1] ** -0.5 if scale is None else scale
    if not is_number(scale) or not -FLOAT32 <= scale <= FLOAT32:
        raise ValueError(f"attention: scale must be None or a number that float32 holds, got {scale!r}")
    if kernels_wanted("attention", qkv, unsupported_reason(qkv.shape[-1], scale)):
        return (_packed(qkv, float(scale)) if packed else _separate(qkv, k, v, float(scale)))[0]
    q, k, v = qkv.unbind(2) if packed else (qkv, k, v)
    return ref.attention(q, k, v, scale=scale if isinstance(scale, torch.SymFloat) else float(scale))
