"""Linear layers with bias and an activation, one or two.

Kept for backward: the inputs and the pre-activation; the activation is computed again where it is needed.
"""

from typing import NamedTuple

from torch import Tensor

from . import reference as ref
from ._dispatch import NO_TRITON, autocasts, kernels_wanted, needs_grad
from ._operation import (
    Needs,
    as_dtype,
    as_matrix,
    check_linear,
    check_same,
    check_shape,
    check_tensors,
    differentiable,
    filled,
    one_activation,
    operation,
    shaped,
)

if NO_TRITON is None:
    from ..kernels.matmul.activations import activated
    from ..kernels.matmul.linear import input_grad, linear
    from ..kernels.matmul.mlp import dgelu_matmul, gelu_bwd
    from ..kernels.matmul.mlp import linear_gelu as linear_gelu_fwd
    from ..kernels.matmul.weight_grad import weight_grad
    from ..kernels.rows import scale_rows

# activation(x W^T + b)


@operation("linear_gelu")
def _linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save: bool) -> tuple[Tensor, Tensor]:
    """(activation (..., F), pre-activation (M, F)); the second is empty unless `save`."""
    act, pre = linear_gelu_fwd(as_matrix(x), as_matrix(weight), bias, activation, save)
    return shaped(act, *x.shape[:-1], weight.shape[0]), pre


@_linear_gelu.register_fake
def _(x, weight, bias, activation, save):
    return x.new_empty(*x.shape[:-1], weight.shape[0]), _fake_pre(x, weight, save)


def _fake_pre(x: Tensor, weight: Tensor, save: bool) -> Tensor:
    return x.new_empty(x.numel() // x.shape[-1], weight.shape[0]) if save else x.new_empty(0)


@operation("linear_gelu_bwd")
def _linear_gelu_bwd(
    dact: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, pre: Tensor, activation: str, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias; empty where not needed."""
    needs = Needs(*needs)
    dpre, dbias = gelu_bwd(as_matrix(dact), pre, activation, needs.bias)
    dx = input_grad(dpre, as_matrix(weight)).view(x.shape) if needs.x else None
    dweight = weight_grad(dpre, as_matrix(x)) if needs.weight else None
    return filled(x, dx, dweight, as_dtype(dbias, x.dtype))


differentiable(_linear_gelu, _linear_gelu_bwd, "linear_gelu", Needs)


# activation(x W1^T + b1) W2^T + b2


class MlpNeeds(NamedTuple):
    """Which gradients of an MLP are needed."""

    x: bool
    fc1_weight: bool
    fc1_bias: bool
    fc2_weight: bool
    fc2_bias: bool


_LAYERS = "Tensor x, Tensor fc1_weight, Tensor? fc1_bias, Tensor fc2_weight, Tensor? fc2_bias"


@operation("mlp", f"{_LAYERS}, str activation, bool save", 2)
def _mlp(x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, activation, save):
    """(output (..., D'), pre-activation (M, F)); the second is empty unless `save`."""
    act, pre = linear_gelu_fwd(as_matrix(x), as_matrix(fc1_weight), fc1_bias, activation, save)
    return shaped(linear(act, as_matrix(fc2_weight), fc2_bias), *x.shape[:-1], fc2_weight.shape[0]), pre


@_mlp.register_fake
def _(x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, activation, save):
    return x.new_empty(*x.shape[:-1], fc2_weight.shape[0]), _fake_pre(x, fc1_weight, save)


@operation("mlp_bwd", f"Tensor dout, {_LAYERS}, Tensor pre, str activation, bool[] needs", 5)
def _mlp_bwd(dout, x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, pre, activation, needs):
    """Gradients of the five tensors; empty where not needed."""
    needs, g = MlpNeeds(*needs), as_matrix(dout)
    dx = dfc1_weight = dfc1_bias = act = None
    if needs.x or needs.fc1_weight or needs.fc1_bias:
        dpre, act, dfc1_bias = dgelu_matmul(
            g, as_matrix(fc2_weight), pre, activation, needs.fc1_bias, want_act=needs.fc2_weight
        )
        dx = input_grad(dpre, as_matrix(fc1_weight)).view(x.shape) if needs.x else None
        dfc1_weight = weight_grad(dpre, as_matrix(x)) if needs.fc1_weight else None
    elif needs.fc2_weight:
        act = activated(pre, activation)
    dfc2_weight = weight_grad(g, act) if needs.fc2_weight else None
    dfc2_bias = scale_rows(g, None, None, 1, want_scaled=False)[1] if needs.fc2_bias else None
    return filled(x, dx, dfc1_weight, as_dtype(dfc1_bias, x.dtype), dfc2_weight, as_dtype(dfc2_bias, x.dtype))


differentiable(_mlp, _mlp_bwd, "mlp", MlpNeeds)


# The public operations


@autocasts
def linear_gelu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None = None,
    approximate: str | None = None,
) -> Tensor:
    """activation(x W^T + b), GELU unless another is named.

    x (..., D); weight (F, D); bias (F,) or None. Returns (..., F). activation: "gelu" (by erf; the default),
    "gelu_tanh", "quick_gelu" (x sigmoid(1.702 x)) or "silu" (x sigmoid(x)). approximate: torch's word for the first
    two, "none" or "tanh"; a ValueError where it contradicts activation.
    """
    check_linear("linear_gelu", x, weight, bias)
    activation = one_activation("linear_gelu", activation, approximate)
    if kernels_wanted("linear_gelu", x):
        return _linear_gelu(x, weight, bias, activation, needs_grad(x, weight, bias))[0]
    return ref.linear_gelu(x, weight, bias, activation=activation)


@autocasts
def mlp(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    *,
    activation: str | None = None,
    approximate: str | None = None,
) -> Tensor:
    """activation(x W1^T + b1) W2^T + b2, activation and approximate as in linear_gelu.

    x (..., D); fc1_weight (F, D); fc2_weight (D', F). Returns (..., D').
    """
    check_linear("mlp", x, fc1_weight, fc1_bias, "fc1_")
    check_tensors("mlp", fc2_weight=fc2_weight)
    check_shape("mlp", "fc2_weight", fc2_weight, (None, fc1_weight.shape[0]))
    check_shape("mlp", "fc2_bias", fc2_bias, (fc2_weight.shape[0],))
    check_same("mlp", "x", x, fc2_weight=fc2_weight, fc2_bias=fc2_bias)
    activation = one_activation("mlp", activation, approximate)
    tensors = (x, fc1_weight, fc1_bias, fc2_weight, fc2_bias)
    if kernels_wanted("mlp", x):
        return _mlp(*tensors, activation, needs_grad(*tensors))[0]
    return ref.mlp(*tensors, activation=activation)
