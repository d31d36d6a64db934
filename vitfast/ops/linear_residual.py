"""The output layer of a residual branch, residual + drop_path[b] * layer_scale * (x W^T + b).

The functions that it shares with fused blocks are in blocks.py.
"""

from typing import NamedTuple

from torch import Tensor

from . import checks as check
from . import reference as ref
from .blocks import branch_gradient, output_layer, output_layer_gradients, through_layer_scale, weight_gradients
from .dispatch import NO_TRITON, autocasts, kernels_wanted, routed
from .operation import Constant, NothingSaved, as_matrix, custom_op, needs_grad

if NO_TRITON is None:
    from ..kernels.matmul.linear import input_grad


class _Arguments(NamedTuple):
    """The arguments of linear_residual."""

    x: Tensor  # (B, ..., K)
    out_weight: Tensor  # (D, K)
    out_bias: Tensor | None  # (D,)
    residual: Tensor  # (B, ..., D)
    layer_scale: Tensor | None  # (D,)
    drop_path: Constant | None  # (B,)


def _forward(t: _Arguments) -> tuple[Tensor, NothingSaved]:
    return output_layer(as_matrix(t.x), t, t.residual), NothingSaved()


def _fake(t: _Arguments) -> tuple[Tensor, NothingSaved]:
    return t.residual.new_empty(t.residual.shape), NothingSaved()


def _backward(dout: Tensor, t: _Arguments, _, needs: _Arguments) -> dict[str, Tensor | None]:
    g, g_sum = branch_gradient(as_matrix(dout), t, needs)
    dx = input_grad(*through_layer_scale(g, t)).view(t.x.shape) if needs.x else None
    dweight, dscale = weight_gradients(g, as_matrix(t.x), t, needs)
    return dict(x=dx, **output_layer_gradients(t, needs, g_sum, dweight, dscale))


_functions = dict(forward=_forward, fake=_fake, backward=_backward, ties=lambda t: dict(residual="out"))
_linear_residual = custom_op("linear_residual", _Arguments, NothingSaved, **_functions)


@autocasts()
@routed
def linear_residual(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    *,
    layer_scale: Tensor | None = None,
    drop_path: Tensor | None = None,
) -> Tensor:
    """A linear layer that adds a residual: residual + drop_path[b] * layer_scale * (x W^T + b).

    x (B, ..., F); weight (D, F); bias, layer_scale (D,) or None; residual (B, ..., D); drop_path (B,) factors or None.
    Returns (B, ..., D) in x's dtype, or under autocast in its dtype.
    """
    op = "linear_residual"
    check.linear(op, x, weight, bias)
    check.shape(op, "residual", residual, (*x.shape[:-1], weight.shape[0]), required=True)
    check.same(op, "x", x, residual=residual)
    check.factors(op, x, layer_scale, drop_path, weight.shape[0])
    reason = "drop_path is a constant to the kernel, and it requires a gradient" if needs_grad(drop_path) else None
    if kernels_wanted(op, x, reason):
        return _linear_residual(_Arguments(x, weight, bias, residual, layer_scale, drop_path))
    return ref.linear_residual(x, weight, bias, residual, layer_scale=layer_scale, drop_path=drop_path)
