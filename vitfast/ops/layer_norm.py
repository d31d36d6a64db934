"""LayerNorm (Ba et al., 2016), alone and after a residual add (the ViT paper, Eq. 2 and 3)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import reference as ref
from ._dispatch import NO_TRITON, autocasts, kernels_wanted
from ._operation import (
    Needs,
    as_matrix,
    check_eps,
    check_factors,
    check_norm,
    check_rows,
    check_same,
    check_shape,
    check_tensors,
    chosen,
    differentiable,
    fake_gradients,
    filled,
    only_once,
    operation,
    sample_rows,
    shaped,
)

if NO_TRITON is None:
    from ..kernels.layer_norm import forward as kernels


def fake_statistics(x: Tensor, norm: str = "layer") -> tuple[Tensor | None, Tensor]:
    """The fakes' mean (None of RMSNorm) and rstd: (M,) in fp32."""
    mean, rstd = (x.new_empty(math.prod(x.shape[:-1]), dtype=torch.float32) for _ in range(2))
    return None if norm == "rms" else mean, rstd


@operation("layer_norm")
def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x (..., D) -> y like x, mean and rstd (M,) in fp32."""
    y, mean, rstd = kernels.layer_norm_fwd(as_matrix(x), weight, bias, eps)
    return shaped(y, *x.shape), mean, rstd


@_layer_norm.register_fake
def _(x, weight, bias, eps):
    return x.new_empty(x.shape), *fake_statistics(x)


@operation("layer_norm_backward")
def _layer_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight, dbias; empty where not needed."""
    needs = Needs(*needs)
    inputs = as_matrix(dy), as_matrix(x), weight, bias if needs.bias else None, mean, rstd
    grads = kernels.layer_norm_bwd(*inputs, want_dx=needs.x, want_dparams=needs.weight or needs.bias)
    dx = None if grads.dres is None else grads.dres.view(x.shape)
    return filled(x, *chosen((dx, grads.dweight, grads.dbias), needs))


differentiable(_layer_norm, _layer_norm_backward, "layer_norm", Needs)


class AddNeeds(NamedTuple):
    """Which gradients of add_layer_norm are made; that of x where it is not the residual's."""

    x: bool
    residual: bool
    weight: bool
    bias: bool
    layer_scale: bool


@operation(
    "add_layer_norm",
    "Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, Tensor? layer_scale, Tensor? drop_path",
    4,
)
def _add_layer_norm(x, residual, weight, bias, eps, layer_scale, drop_path):
    """x, residual (B, ..., D) -> y and z like x, mean and rstd (M,) in fp32."""
    factors = layer_scale, drop_path, sample_rows(x)
    y, z, mean, rstd = kernels.add_layer_norm_fwd(as_matrix(x), as_matrix(residual), weight, bias, eps, *factors)
    return shaped(y, *x.shape), shaped(z, *x.shape), mean, rstd


@_add_layer_norm.register_fake
def _(x, residual, weight, bias, eps, layer_scale, drop_path):
    return x.new_empty(x.shape), x.new_empty(x.shape), *fake_statistics(x)


@operation(
    "add_layer_norm_backward",
    "Tensor dy, Tensor? dz, Tensor z, Tensor mean, Tensor rstd, Tensor? x, Tensor? weight, Tensor? bias, "
    "Tensor? layer_scale, Tensor? drop_path, bool[] needs",
    5,
)
def _add_layer_norm_backward(dy, dz, z, mean, rstd, x, weight, bias, layer_scale, drop_path, needs):
    """dx, dresidual, dweight, dbias, dlayer_scale; empty where not needed. x: for dlayer_scale."""
    needs = AddNeeds(*needs)
    grads = kernels.layer_norm_bwd(
        as_matrix(dy),
        as_matrix(z),
        weight,
        bias if needs.bias else None,
        mean,
        rstd,
        dz=as_matrix(dz),
        branch=as_matrix(x),
        layer_scale=layer_scale,
        drop_path=drop_path,
        rows_per_sample=sample_rows(z),
        want_dx=needs.x or needs.residual,
        want_dparams=needs.weight or needs.bias,
        want_layer_scale=needs.layer_scale,
    )
    dx, dres = (None if g is None else g.view(z.shape) for g in (grads.dx, grads.dres))
    return filled(z, *chosen((dx, dres, grads.dweight, grads.dbias, grads.dlayer_scale), needs))


@_add_layer_norm_backward.register_fake
def _(dy, dz, z, mean, rstd, x, weight, bias, layer_scale, drop_path, needs):
    return fake_gradients(needs, z, z, weight, bias, layer_scale)


# By hand: two outputs have gradients, and x takes the residual's where nothing scales it.
def _save_add(ctx, inputs, output):
    x, _, weight, bias, _, layer_scale, drop_path = inputs
    _, z, mean, rstd = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(mean, rstd)
    branch = x if layer_scale is not None and layer_scale.requires_grad else None
    ctx.save_for_backward(z, mean, rstd, branch, weight, bias, layer_scale, drop_path)


def _grad_add(ctx, dy, dz, *_):
    x, residual, weight, bias, _, layer_scale, _ = ctx.needs_input_grad
    if dy is None and dz is None:
        return (None,) * 7
    *saved, scale, drop_path = ctx.saved_tensors
    scaled = scale is not None or drop_path is not None
    needs = AddNeeds(x and scaled, residual or (x and not scaled), weight, bias, layer_scale)
    dy = torch.zeros_like(dz) if dy is None else dy
    grads = _add_layer_norm_backward(dy, dz, *saved, scale, drop_path, list(needs))
    dx, dres, dw, db, dls = chosen(grads, needs)
    return dx if scaled else dres, dres if residual else None, dw, db, None, dls, None


_add_layer_norm.register_autograd(_grad_add, setup_context=_save_add)
only_once(_add_layer_norm_backward, "add_layer_norm")


def unsupported_reason(width: int, drop_path: Tensor | None = None) -> str | None:
    """Why no kernel normalises rows of this width, or takes this drop_path; None where one does."""
    if NO_TRITON is None and width > kernels.MAX_WIDTH:
        return f"width above {kernels.MAX_WIDTH}"
    if width == 0:
        return "width 0"
    return "drop_path needs a gradient" if drop_path is not None and drop_path.requires_grad else None


@autocasts(keep=("weight", "bias"))
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-6) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis; statistics in fp32.

    x (..., D); weight, bias (D,) or None, in x's dtype or fp32 (autocast leaves them as they are). Returns (..., D) in
    x's dtype (under autocast: its dtype).
    """
    width = check_rows("layer_norm", x)
    check_shape("layer_norm", "weight", weight, (width,))
    check_shape("layer_norm", "bias", bias, (width,))
    check_same("layer_norm", "x", x)
    check_norm("layer_norm", x, weight=weight, bias=bias)
    eps = check_eps("layer_norm", eps)
    if kernels_wanted("layer_norm", x, unsupported_reason(width)):
        return _layer_norm(x, weight, bias, eps)[0]
    return ref.layer_norm(x, weight, bias, eps)


@autocasts(keep=("weight", "bias"))
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-6,
    *,
    layer_scale: Tensor | None = None,
    drop_path: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(layer_norm(z), z) with z = residual + drop_path[b] * layer_scale * x.

    x, residual (B, ..., D); weight, bias (as in layer_norm), layer_scale (D,) or None; drop_path (B,) factors, 0 or
    1/keep, or None. Returns two tensors shaped and typed like x.
    """
    width = check_rows("add_layer_norm", x)
    check_tensors("add_layer_norm", residual=residual)
    check_shape("add_layer_norm", "residual", residual, tuple(x.shape))
    check_shape("add_layer_norm", "weight", weight, (width,))
    check_shape("add_layer_norm", "bias", bias, (width,))
    check_same("add_layer_norm", "x", x, residual=residual)
    check_norm("add_layer_norm", x, weight=weight, bias=bias)
    eps = check_eps("add_layer_norm", eps)
    check_factors("add_layer_norm", x, layer_scale, drop_path, width)
    if kernels_wanted("add_layer_norm", x, unsupported_reason(width, drop_path)):
        return _add_layer_norm(x, residual, weight, bias, eps, layer_scale, drop_path)[:2]
    return ref.add_layer_norm(x, residual, weight, bias, eps, layer_scale=layer_scale, drop_path=drop_path)
