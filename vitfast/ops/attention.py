"""Softmax attention, flash-style (Vaswani et al., 2017; Dao et al., 2022)."""

import torch
from torch import Tensor

from .. import ref
from ..kernels import attention as kernels
from ._dispatch import autocasts, check_same, check_shape, kernels_wanted, only_once


def _unit_rows(x: Tensor) -> Tensor:
    """The kernels read rows of a head as they lie in memory, whatever the other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op("vitfast::attention_packed", mutates_args=())
def _packed(qkv: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """qkv (B, N, 3, H, Dh) -> o (B, N, H, Dh), lse (B, H, N)."""
    return kernels.attention_fwd(*_unit_rows(qkv).unbind(2), scale)


@torch.library.custom_op("vitfast::attention_separate", mutates_args=())
def _separate(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q, k, v (B, N, H, Dh) -> o (B, N, H, Dh), lse (B, H, N)."""
    return kernels.attention_fwd(*map(_unit_rows, (q, k, v)), scale)


@_separate.register_fake
def _(q, k, v, scale):
    B, N, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((B, H, N), dtype=torch.float32)


@_packed.register_fake
def _(qkv, scale):
    B, N, _, H, D = qkv.shape
    return qkv.new_empty((B, N, H, D)), qkv.new_empty((B, H, N), dtype=torch.float32)


@torch.library.custom_op("vitfast::attention_packed_backward", mutates_args=())
def _packed_backward(qkv: Tensor, o: Tensor, lse: Tensor, do: Tensor, scale: float) -> Tensor:
    return kernels.attention_bwd(*_unit_rows(qkv).unbind(2), o, lse, _unit_rows(do), scale)[0]


@torch.library.custom_op("vitfast::attention_separate_backward", mutates_args=())
def _separate_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, do = map(_unit_rows, (q, k, v, do))
    return kernels.attention_bwd_separate(q, k, v, o, lse, do, scale)


@_packed_backward.register_fake
def _(qkv, o, lse, do, scale):
    return qkv.new_empty(qkv.shape)


@_separate_backward.register_fake
def _(q, k, v, o, lse, do, scale):
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)


def _save(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    o, lse = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(*tensors, o, lse)


def _packed_grad(ctx, do, _):
    return (None if do is None else _packed_backward(*ctx.saved_tensors, do, ctx.scale)), None


def _separate_grad(ctx, do, _):
    return (None, None, None, None) if do is None else (*_separate_backward(*ctx.saved_tensors, do, ctx.scale), None)


_packed.register_autograd(_packed_grad, setup_context=_save)
_separate.register_autograd(_separate_grad, setup_context=_save)
only_once(_packed_backward, "attention")
only_once(_separate_backward, "attention")


def unsupported_reason(head_size: int, scale: float) -> str | None:
    """Why no kernel attends with this head size and scale; None where one does."""
    if head_size not in kernels.HEAD_SIZES:
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
    scale = qkv.shape[-1] ** -0.5 if scale is None else scale
    if kernels_wanted("attention", qkv, unsupported_reason(qkv.shape[-1], scale)):
        return (_packed(qkv, float(scale)) if packed else _separate(qkv, k, v, float(scale)))[0]
    q, k, v = qkv.unbind(2) if packed else (qkv, k, v)
    return ref.attention(q, k, v, scale=scale)
