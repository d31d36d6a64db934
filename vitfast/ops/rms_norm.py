"""RMSNorm (Zhang & Sennrich, 2019)."""

from typing import NamedTuple

from torch import Tensor

from . import reference as ref
from ._dispatch import NO_TRITON, autocasts, kernels_wanted
from ._operation import (
    as_matrix,
    check_eps,
    check_norm,
    check_rows,
    check_same,
    check_shape,
    chosen,
    differentiable,
    filled,
    operation,
    shaped,
)
from .layer_norm import fake_statistics, unsupported_reason

if NO_TRITON is None:
    from ..kernels.layer_norm.forward import layer_norm_bwd, layer_norm_fwd


class Needs(NamedTuple):
    """Which gradients are needed."""

    x: bool
    weight: bool


@operation("rms_norm")
def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """x (..., D) -> y like x, rstd (M,) in fp32."""
    y, _, rstd = layer_norm_fwd(as_matrix(x), weight, None, eps, rms=True)
    return shaped(y, *x.shape), rstd


@_rms_norm.register_fake
def _(x, weight, eps):
    return x.new_empty(x.shape), fake_statistics(x)[1]


@operation("rms_norm_backward")
def _rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor]:
    """dx, dweight; empty where not needed."""
    needs, inputs = Needs(*needs), (as_matrix(dy), as_matrix(x), weight, None, None, rstd)
    grads = layer_norm_bwd(*inputs, want_dx=needs.x, want_dparams=needs.weight)
    return filled(x, *chosen((grads.dres.view(x.shape) if needs.x else None, grads.dweight), needs))


differentiable(_rms_norm, _rms_norm_backward, "rms_norm", Needs)


@autocasts(keep=("weight",))
def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis; statistics in fp32.

    x (..., D); weight (D,) or None, in x's dtype or fp32 (autocast leaves it as it is). Returns (..., D) in x's dtype
    (under autocast: its dtype).
    """
    width = check_rows("rms_norm", x)
    check_shape("rms_norm", "weight", weight, (width,))
    check_same("rms_norm", "x", x)
    check_norm("rms_norm", x, weight=weight)
    eps = check_eps("rms_norm", eps)
    if kernels_wanted("rms_norm", x, unsupported_reason(width)):
        return _rms_norm(x, weight, eps)[0]
    return ref.rms_norm(x, weight, eps)
