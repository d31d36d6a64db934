"""The output layer of a residual branch: linear, factors, residual; and its gradient.

    out = residual + drop_path[b] * layer_scale * (x W^T + b)
    g = drop_path[b] * dout,  dx = (layer_scale * g) W

Weight, bias and layer_scale take their gradients from g, so that the branch's output need not be kept (weight_grad.py).
The fused blocks (blocks.py) end in this layer and use its gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import reference as ref
from ._dispatch import NO_TRITON, autocasts, kernels_wanted, needs_grad
from ._operation import (
    as_dtype,
    as_matrix,
    check_factors,
    check_linear,
    check_same,
    check_shape,
    check_tensors,
    chosen,
    differentiable,
    filled,
    operation,
    sample_rows,
    shaped,
)

if NO_TRITON is None:
    from ..kernels.matmul.linear import input_grad
    from ..kernels.matmul.linear import linear_residual as linear_residual_fwd
    from ..kernels.matmul.weight_grad import weight_grad, weight_grad_scaled
    from ..kernels.rows import scale_rows


class ResidualNeeds(NamedTuple):
    """Which gradients of the output layer are needed."""

    x: bool
    weight: bool
    bias: bool
    layer_scale: bool

    def column_sum(self, bias: Tensor | None) -> bool:
        """Whether the column sum of g is needed, for the bias or for the bias' part of layer_scale."""
        return self.bias or (self.layer_scale and bias is not None)


def branch_gradient(
    dout: Tensor, dtype: torch.dtype, drop_path: Tensor | None, rows_per_sample: int, want_sum: bool
) -> tuple[Tensor, Tensor | None]:
    """(g, column sum of g) for g = drop_path[b] * dout in `dtype`; dout itself where equal."""
    changed = drop_path is not None or dout.dtype != dtype
    if not (changed or want_sum):
        return dout, None
    g, total = scale_rows(dout, None, drop_path, rows_per_sample, changed, want_sum, out_dtype=dtype)
    return (g if changed else dout), total


def through_scale(g: Tensor, weight: Tensor, layer_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """(g, diag(layer_scale) W), whose product is dx.

    Scaling the weight (D, K) moves less than scaling g (M, D). In fp16 g is scaled after all: a layer scale near its
    start, 1e-5 say, would push the weight below fp16's smallest numbers.
    """
    if layer_scale is None:
        return g, weight
    if g.dtype == torch.float16:
        return scale_rows(g, layer_scale, None, 1, want_sum=False)[0], weight
    return g, (weight * layer_scale.float()[:, None]).to(weight.dtype)


def weight_gradients(
    g: Tensor, x: Tensor, weight: Tensor, layer_scale: Tensor | None, needs: ResidualNeeds
) -> tuple[Tensor | None, Tensor | None]:
    """(dweight, dlayer_scale without the bias' part) from g (M, D) and x (M, K)."""
    if needs.layer_scale:
        return weight_grad_scaled(g, x, weight, layer_scale, weight.dtype)
    return weight_grad(g, x, layer_scale=layer_scale, out_dtype=weight.dtype) if needs.weight else None, None


def vector_gradients(
    total: Tensor | None,
    dlayer_scale: Tensor | None,
    bias: Tensor | None,
    layer_scale: Tensor | None,
    needs: ResidualNeeds,
) -> tuple[Tensor | None, Tensor | None]:
    """(dbias, dlayer_scale) from g's column sum and what weight_gradients made of layer_scale."""
    dbias = None
    if needs.bias:
        dbias = (total if layer_scale is None else total * layer_scale.float()).to(bias.dtype)
    if needs.layer_scale and bias is not None:
        dlayer_scale = torch.addcmul(dlayer_scale, total, bias.float())
    return dbias, as_dtype(dlayer_scale, layer_scale.dtype) if needs.layer_scale else None


@operation(
    "linear_residual",
    "Tensor x, Tensor weight, Tensor? bias, Tensor residual, Tensor? layer_scale, Tensor? drop_path",
    1,
)
def _linear_residual(x, weight, bias, residual, layer_scale, drop_path):
    matrices = as_matrix(x), as_matrix(weight), bias, as_matrix(residual)
    return shaped(linear_residual_fwd(*matrices, layer_scale, drop_path, sample_rows(x)), *residual.shape)


@_linear_residual.register_fake
def _(x, weight, bias, residual, *_):
    return torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)


@operation(
    "linear_residual_bwd",
    "Tensor dout, Tensor x, Tensor weight, Tensor? bias, Tensor? layer_scale, Tensor? drop_path, bool[] needs",
    4,
)
def _linear_residual_bwd(dout, x, weight, bias, layer_scale, drop_path, needs):
    """Gradients of x, weight, bias and layer_scale; empty where not needed."""
    needs, w = ResidualNeeds(*needs), as_matrix(weight)
    want_sum = needs.column_sum(bias)
    g, total = branch_gradient(as_matrix(dout), x.dtype, drop_path, sample_rows(x), want_sum)
    dx = input_grad(*through_scale(g, w, layer_scale)).view(x.shape) if needs.x else None
    dweight, dlayer_scale = weight_gradients(g, as_matrix(x), w, layer_scale, needs)
    grads = dx, dweight, *vector_gradients(total, dlayer_scale, bias, layer_scale, needs)
    return filled(x, *chosen(grads, needs))


differentiable(_linear_residual, _linear_residual_bwd, "linear_residual", ResidualNeeds, passed_on="residual")


@autocasts
def linear_residual(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    *,
    layer_scale: Tensor | None = None,
    drop_path: Tensor | None = None,
) -> Tensor:
    """residual + drop_path[b] * layer_scale * (x W^T + b).

    x (B, ..., F); weight (D, F); bias, layer_scale (D,) or None; residual (B, ..., D); drop_path (B,) factors or None.
    Returns (B, ..., D) in x's dtype.
    """
    op = "linear_residual"
    check_linear(op, x, weight, bias)
    check_tensors(op, residual=residual)
    check_shape(op, "residual", residual, (*x.shape[:-1], weight.shape[0]))
    check_same(op, "x", x, residual=residual)
    check_factors(op, x, layer_scale, drop_path, weight.shape[0])
    reason = "drop_path is a constant to the kernel, and it requires a gradient" if needs_grad(drop_path) else None
    if kernels_wanted(op, x, reason):
        return _linear_residual(x, weight, bias, residual, layer_scale, drop_path)
    return ref.linear_residual(x, weight, bias, residual, layer_scale=layer_scale, drop_path=drop_path)
