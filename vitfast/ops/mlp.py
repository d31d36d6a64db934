"""The MLP, and its first layer with the activation.

    linear_gelu: activation(fc1(x))
    mlp:         fc2(activation(fc1(x)))

Kept for backward are the input and the pre-activation `pre`. Backward computes the activation again, in the pass that
applies its derivative. "in" is fc1, "out" is fc2, which linear_gelu does not have.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import Activation
from . import checks as check
from . import reference as ref
from .dispatch import NO_TRITON, autocasts, kernels_wanted, routed
from .operation import as_matrix, custom_op, needs_grad, resized

if NO_TRITON is None:
    from ..kernels.matmul.gelu import gelu, gelu_bwd
    from ..kernels.matmul.linear import input_grad, linear
    from ..kernels.matmul.mlp import dgelu_matmul
    from ..kernels.matmul.mlp import linear_gelu as linear_gelu_fwd
    from ..kernels.matmul.scaled import scale_rows
    from ..kernels.rows import column_sums


class _Arguments(NamedTuple):
    """The arguments of linear_gelu and mlp."""

    x: Tensor  # (..., D)
    in_weight: Tensor  # (F, D)
    in_bias: Tensor | None  # (F,)
    out_weight: Tensor | None  # (D', F)
    out_bias: Tensor | None  # (D',)
    activation: str
    save: bool


class _Saved(NamedTuple):
    """The tensors kept for backward."""

    pre: Tensor | None = None  # (M, F)


def _forward(t: _Arguments) -> tuple[Tensor, _Saved]:
    save = "pre" if t.save else ""
    out, pre = linear_gelu_fwd(as_matrix(t.x), as_matrix(t.in_weight), t.in_bias, t.activation, save)
    if t.out_weight is not None:
        out = linear(out, as_matrix(t.out_weight), t.out_bias)
    return resized(out, *t.x.shape[:-1], out.shape[1]), _Saved(pre if t.save else None)


def _fake(t: _Arguments) -> tuple[Tensor, _Saved]:
    last = t.in_weight if t.out_weight is None else t.out_weight
    pre = t.in_weight.new_empty(math.prod(t.x.shape[:-1]), t.in_weight.shape[0])
    return t.x.new_empty(*t.x.shape[:-1], last.shape[0]), _Saved(pre if t.save else None)


def _backward(dout: Tensor, t: _Arguments, saved: _Saved, needs: _Arguments) -> dict[str, Tensor | None]:
    g, act, grads = as_matrix(dout), None, {}
    if needs.x or needs.in_weight or needs.in_bias:
        if t.out_weight is None:
            dpre, act, in_sums = gelu_bwd(g, saved.pre, t.activation, needs.in_bias)
        else:
            options = t.activation, needs.in_bias, needs.out_weight
            dpre, act, in_sums = dgelu_matmul(g, as_matrix(t.out_weight), saved.pre, *options)
        (grads["in_bias"],) = column_sums(in_sums, [in_sums], [t.in_weight.dtype])
        grads["x"] = input_grad(dpre, as_matrix(t.in_weight)).view(t.x.shape) if needs.x else None
        grads["in_weight"] = torch.mm(dpre.t(), as_matrix(t.x)) if needs.in_weight else None
    if needs.out_weight:
        grads["out_weight"] = torch.mm(g.t(), gelu(saved.pre, t.activation) if act is None else act)
    if needs.out_bias:
        grads["out_bias"] = scale_rows(g, None, None, 1, want_scaled=False)[1].to(t.x.dtype)
    return grads


_linear_gelu, _mlp = (
    custom_op(name, _Arguments, _Saved, forward=_forward, fake=_fake, backward=_backward)
    for name in ("linear_gelu", "mlp")
)


@autocasts()
@routed
def linear_gelu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: Activation | None = None,
    approximate: check.Approximate | None = None,
) -> Tensor:
    """A linear layer and an activation: activation(x W^T + b), by default GELU.

    x (..., D); weight (F, D); bias (F,) or None. Returns (..., F). activation: "gelu" (by erf; the default),
    "gelu_tanh", "quick_gelu" (x sigmoid(1.702 x)) or "silu" (x sigmoid(x)). approximate: PyTorch's name for the first
    two, "none" or "tanh". Raises ValueError if it contradicts activation.
    """
    check.linear("linear_gelu", x, weight, bias)
    activation = check.one_activation("linear_gelu", activation, approximate)
    if kernels_wanted("linear_gelu", x):
        layers = weight, bias, None, None
        return _linear_gelu(_Arguments(x, *layers, activation, save=needs_grad(x, *layers)))
    return ref.linear_gelu(x, weight, bias, activation=activation)


@autocasts()
@routed
def mlp(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    *,
    activation: Activation | None = None,
    approximate: check.Approximate | None = None,
) -> Tensor:
    """An MLP of two layers: activation(x W1^T + b1) W2^T + b2.

    x (..., D); fc1_weight (F, D); fc2_weight (D', F); biases may be None. activation and approximate are as in
    linear_gelu. Returns (..., D').
    """
    check.linear("mlp", x, fc1_weight, fc1_bias, "fc1_")
    check.linear("mlp", x, fc2_weight, fc2_bias, "fc2_", ("*", fc1_weight.shape[0]))
    activation = check.one_activation("mlp", activation, approximate)
    layers = fc1_weight, fc1_bias, fc2_weight, fc2_bias
    if kernels_wanted("mlp", x):
        return _mlp(_Arguments(x, *layers, activation, save=needs_grad(x, *layers)))
    return ref.mlp(x, *layers, activation=activation)
