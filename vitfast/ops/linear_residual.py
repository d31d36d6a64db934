"""The output layer of a residual branch: linear, factors, residual; and its gradient.

    out = residual + drop_path[b] * layer_scale * (x W^T + b)
    g = drop_path[b] * dout,  dx = (layer_scale * g) W

Weight, bias and layer_scale take their gradients from g, so that the branch's output need not be kept (weight_grad.py).
The fused blocks (blocks.py) end in this layer and use its gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import checks as check
from . import reference as ref
from .dispatch import NO_TRITON, autocasts, kernels_wanted, needs_grad, routed
from .operation import Constant, NothingSaved, as_dtype, as_matrix, custom_op, resized, sample_rows

if NO_TRITON is None:
    from ..kernels.matmul.linear import input_grad
    from ..kernels.matmul.linear import linear_residual as linear_residual_fwd
    from ..kernels.matmul.weight_grad import scaled_weight_grad
    from ..kernels.rows import column_sums, scale_rows


def bias_gradients(sums: dict[str, Tensor | None], dtype: torch.dtype) -> dict[str, Tensor | None]:
    """The gradients of biases by name, of workspaces (row blocks, F) in fp32, added up in one launch."""
    found = list(sums.values())
    return dict(zip(sums, column_sums(found[0], found, [dtype] * len(found)))) if found else {}


# The functions below take an operation's arguments t and its needs as NamedTuples, whose fields include x, out_weight,
# out_bias, layer_scale and drop_path.


def output_layer(x: Tensor, t: NamedTuple, residual: Tensor) -> Tensor:
    """The output, in the shape and dtype of `residual` (B, ..., D), for the layer's input x (M, K)."""
    matrices = x, as_matrix(t.out_weight), t.out_bias, as_matrix(residual)
    out = linear_residual_fwd(*matrices, t.layer_scale, t.drop_path, sample_rows(residual))
    return resized(out, *residual.shape)


def branch_gradient(
    dout: Tensor, dtype: torch.dtype, t: NamedTuple, needs: NamedTuple, norm_follows: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(g, its column sum or None) for g = drop_path[b] * dout in `dtype`; g is dout itself where equal.

    norm_follows: whether the backward of a block's norm runs, which sums dout, where that is g, in its pass over it.
    """
    changed = t.drop_path is not None or dout.dtype != dtype
    want_sum = needs_column_sum(t, needs) and (changed or not norm_follows)
    if not (changed or want_sum):
        return dout, None
    g, total = scale_rows(dout, None, t.drop_path, sample_rows(t.x), changed, want_sum, out_dtype=dtype)
    return (g if changed else dout), total


def scale_one(g: Tensor, t: NamedTuple) -> tuple[Tensor, Tensor]:
    """(g, diag(layer_scale) W), whose product is dx.

    Scaling the weight (D, K) moves less memory than scaling g (M, D). In fp16, though, g is scaled, because a layer
    scale near its initial value, such as 1e-5, would push the weight below fp16's smallest numbers.
    """
    weight = as_matrix(t.out_weight)
    if t.layer_scale is None:
        return g, weight
    if g.dtype == torch.float16:
        return scale_rows(g, t.layer_scale, None, 1, want_sum=False)[0], weight
    return g, (weight * t.layer_scale.float()[:, None]).to(weight.dtype)


def needs_column_sum(t: NamedTuple, needs: NamedTuple) -> bool:
    """Whether g's column sum is needed, for the bias's gradient or for the bias's part in layer_scale's."""
    return needs.out_bias or (needs.layer_scale and t.out_bias is not None)


def weight_gradients(g: Tensor, x: Tensor, t: NamedTuple, needs: NamedTuple) -> tuple[Tensor | None, Tensor | None]:
    """(dweight, dlayer_scale without the bias' part) from g (M, D) and x (M, K)."""
    if needs.layer_scale:
        return scaled_weight_grad(g, x, t.layer_scale, as_matrix(t.out_weight))
    if needs.out_weight and t.layer_scale is not None:
        return scaled_weight_grad(g, x, t.layer_scale)
    return torch.mm(g.t(), x) if needs.out_weight else None, None


def output_layer_gradients(
    t: NamedTuple, needs: NamedTuple, total: Tensor | None, dweight: Tensor | None, dscale: Tensor | None
) -> dict[str, Tensor | None]:
    """Gradients of the output layer by name, from g's column sum `total` and weight_gradients' results."""
    dbias = None
    if needs.out_bias:
        dbias = (total if t.layer_scale is None else total * t.layer_scale.float()).to(t.out_bias.dtype)
    if needs.layer_scale and t.out_bias is not None:
        dscale = torch.addcmul(dscale, total, t.out_bias.float())
    dscale = as_dtype(dscale, t.layer_scale.dtype) if needs.layer_scale else None
    return dict(out_weight=dweight, out_bias=dbias, layer_scale=dscale)


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
    g, total = branch_gradient(as_matrix(dout), t.x.dtype, t, needs)
    dx = input_grad(*scale_one(g, t)).view(t.x.shape) if needs.x else None
    grads = output_layer_gradients(t, needs, total, *weight_gradients(g, as_matrix(t.x), t, needs))
    return dict(x=dx, **grads)


_linear_residual = custom_op(
    "linear_residual",
    _Arguments,
    NothingSaved,
    forward=_forward,
    fake=_fake,
    backward=_backward,
    ties=lambda t: dict(residual="out"),
)


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
    Returns (B, ..., D) in x's dtype.
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
