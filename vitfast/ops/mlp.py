"""Linear layers with what surrounds them in a ViT: bias and GELU (Hendrycks & Gimpel, 2016), or bias, factors and residual.

Kept for backward: the inputs and, of linear_gelu and mlp, the pre-activation; the activation is computed again where it is needed.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import ref
from ..kernels import mlp as kernels
from ..kernels.rows import scale_rows
from ..kernels.weight_grad import weight_grad, weight_grad_scaled
from ._dispatch import (
    autocasts,
    check_approximate,
    check_factors,
    check_same,
    check_shape,
    kernels_wanted,
    needs_grad,
    only_once,
)
from ._gradients import as_dtype, chosen, fake_gradients, filled, rows, shaped

# gelu(x W^T + b)


@torch.library.custom_op("vitfast::linear_gelu", mutates_args=())
def _linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str, save: bool) -> tuple[Tensor, Tensor]:
    """(activation (..., F), pre-activation (M, F)); the second is empty unless `save`."""
    act, pre = kernels.linear_gelu(rows(x), rows(weight), bias, approximate, save)
    return shaped(act, *x.shape[:-1], weight.shape[0]), pre


@_linear_gelu.register_fake
def _(x, weight, bias, approximate, save):
    act = x.new_empty(*x.shape[:-1], weight.shape[0])
    return act, x.new_empty(x.numel() // x.shape[-1], weight.shape[0]) if save else x.new_empty(0)


@torch.library.custom_op("vitfast::linear_gelu_bwd", mutates_args=())
def _linear_gelu_bwd(
    dact: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, pre: Tensor, approximate: str, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias; empty where not needed."""
    need_x, need_weight, need_bias = needs
    dpre, dbias = kernels.gelu_bwd(rows(dact), pre, approximate, need_bias)
    dx = kernels.input_grad(dpre, rows(weight)).view(x.shape) if need_x else None
    dweight = weight_grad(dpre, rows(x)) if need_weight else None
    return filled(x, dx, dweight, as_dtype(dbias, x.dtype))


@_linear_gelu_bwd.register_fake
def _(dact, x, weight, bias, pre, approximate, needs):
    return fake_gradients(needs, x, weight, bias)


def _linear_gelu_setup(ctx, inputs, output):
    x, weight, bias, ctx.approximate, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, bias, output[1])


def _linear_gelu_backward(ctx, dact, _):
    if dact is None:
        return (None,) * 5
    needs = list(ctx.needs_input_grad[:3])
    grads = _linear_gelu_bwd(dact, *ctx.saved_tensors, ctx.approximate, needs)
    return *chosen(grads, needs), None, None


_linear_gelu.register_autograd(_linear_gelu_backward, setup_context=_linear_gelu_setup)
only_once(_linear_gelu_bwd, "linear_gelu")


# residual + drop_path[b] * layer_scale * (x W^T + b)


@torch.library.custom_op("vitfast::linear_residual", mutates_args=())
def _linear_residual(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    layer_scale: Tensor | None,
    drop_path: Tensor | None,
) -> Tensor:
    out = kernels.linear_residual(
        rows(x), rows(weight), bias, rows(residual), layer_scale, drop_path, _rows_per_sample(x)
    )
    return shaped(out, *residual.shape)


@_linear_residual.register_fake
def _(x, weight, bias, residual, layer_scale, drop_path):
    return torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)


def _rows_per_sample(x: Tensor) -> int:
    """Rows that share a drop path factor."""
    return x.shape[1:-1].numel()


@torch.library.custom_op("vitfast::linear_residual_bwd", mutates_args=())
def _linear_residual_bwd(
    dout: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layer_scale: Tensor | None,
    drop_path: Tensor | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, bias and layer_scale; empty where not needed.

    With g = drop_path[b] * dout: dx = (layer_scale * g) W, and weight, bias and layer_scale take theirs from g, so that the branch's
    output need not be kept (weight_grad.py).
    """
    need_x, need_weight, need_bias, need_scale = needs
    dout, rows_per_sample = rows(dout), _rows_per_sample(x)
    g, dx, dweight, dbias, dscale, colsum = dout, None, None, None, None, None
    want_g = drop_path is not None and (need_weight or need_scale or (need_x and layer_scale is None))
    want_sum = need_bias or (need_scale and bias is not None)
    if want_g or want_sum:
        scaled, colsum = scale_rows(dout, None, drop_path, rows_per_sample, want_g, want_sum)
        g = scaled if want_g else dout
    if need_x:
        h = g if layer_scale is None else scale_rows(dout, layer_scale, drop_path, rows_per_sample, want_sum=False)[0]
        dx = kernels.input_grad(h, rows(weight)).view(x.shape)
    if need_scale:
        dweight, dscale = weight_grad_scaled(g, rows(x), rows(weight), bias, layer_scale, colsum)
    elif need_weight:
        dweight = weight_grad(g, rows(x), layer_scale=layer_scale)
    if need_bias:
        dbias = colsum if layer_scale is None else colsum * layer_scale.float()
    return filled(
        x,
        dx,
        dweight if need_weight else None,
        as_dtype(dbias, x.dtype),
        None if dscale is None else dscale.to(layer_scale.dtype),
    )


@_linear_residual_bwd.register_fake
def _(dout, x, weight, bias, layer_scale, drop_path, needs):
    return fake_gradients(needs, x, weight, bias, layer_scale)


def _linear_residual_setup(ctx, inputs, output):
    x, weight, bias, residual, layer_scale, drop_path = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, bias, layer_scale, drop_path)


def _linear_residual_backward(ctx, dout):
    if dout is None:
        return (None,) * 6
    need_x, need_weight, need_bias, need_residual, need_scale, _ = ctx.needs_input_grad
    needs = [need_x, need_weight, need_bias, need_scale]
    grads = [None] * 4
    if any(needs):
        grads = chosen(_linear_residual_bwd(dout, *ctx.saved_tensors, needs), needs)
    return *grads[:3], dout if need_residual else None, grads[3], None


_linear_residual.register_autograd(_linear_residual_backward, setup_context=_linear_residual_setup)
only_once(_linear_residual_bwd, "linear_residual")


# gelu(x W1^T + b1) W2^T + b2


@torch.library.custom_op("vitfast::mlp", mutates_args=())
def _mlp(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    approximate: str,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """(output (..., D'), pre-activation (M, F)); the second is empty unless `save`."""
    act, pre = kernels.linear_gelu(rows(x), rows(fc1_weight), fc1_bias, approximate, save)
    return shaped(kernels.linear(act, rows(fc2_weight), fc2_bias), *x.shape[:-1], fc2_weight.shape[0]), pre


@_mlp.register_fake
def _(x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, approximate, save):
    out = x.new_empty(*x.shape[:-1], fc2_weight.shape[0])
    return out, x.new_empty(x.numel() // x.shape[-1], fc1_weight.shape[0]) if save else x.new_empty(0)


@torch.library.custom_op("vitfast::mlp_bwd", mutates_args=())
def _mlp_bwd(
    dout: Tensor,
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    pre: Tensor,
    approximate: str,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the five tensors; empty where not needed."""
    need_x, need_fc1_weight, need_fc1_bias, need_fc2_weight, need_fc2_bias = needs
    g = rows(dout)
    dx = dfc1_weight = dfc1_bias = dfc2_weight = dfc2_bias = None
    if need_x or need_fc1_weight or need_fc1_bias:
        dpre, act, dfc1_bias = kernels.dgelu_matmul(
            g, rows(fc2_weight), pre, approximate, need_fc1_bias, want_act=need_fc2_weight
        )
        dx = kernels.input_grad(dpre, rows(fc1_weight)).view(x.shape) if need_x else None
        dfc1_weight = weight_grad(dpre, rows(x)) if need_fc1_weight else None
    else:
        act = F.gelu(pre, approximate=approximate) if need_fc2_weight else None
    if need_fc2_weight:
        dfc2_weight = weight_grad(g, act)
    if need_fc2_bias:
        dfc2_bias = scale_rows(g, None, None, 1, want_scaled=False)[1]
    return filled(x, dx, dfc1_weight, as_dtype(dfc1_bias, x.dtype), dfc2_weight, as_dtype(dfc2_bias, x.dtype))


@_mlp_bwd.register_fake
def _(dout, x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, pre, approximate, needs):
    return fake_gradients(needs, x, fc1_weight, fc1_bias, fc2_weight, fc2_bias)


def _mlp_setup(ctx, inputs, output):
    *tensors, ctx.approximate, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, output[1])


def _mlp_backward(ctx, dout, _):
    if dout is None:
        return (None,) * 7
    needs = list(ctx.needs_input_grad[:5])
    grads = _mlp_bwd(dout, *ctx.saved_tensors, ctx.approximate, needs)
    return *chosen(grads, needs), None, None


_mlp.register_autograd(_mlp_backward, setup_context=_mlp_setup)
only_once(_mlp_bwd, "mlp")


# The public operations


def _check_linear(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, prefix: str = "") -> None:
    check_shape(op, f"{prefix}weight", weight, (None, x.shape[-1]))
    check_shape(op, f"{prefix}bias", bias, (weight.shape[0],))
    check_same(op, "x", x, **{f"{prefix}weight": weight, f"{prefix}bias": bias})


@autocasts
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, *, approximate: str = "none") -> Tensor:
    """gelu(x W^T + b). x (..., D); weight (F, D); bias (F,) or None; approximate "none" (erf) or "tanh". Returns (..., F)."""
    _check_linear("linear_gelu", x, weight, bias)
    check_approximate("linear_gelu", approximate)
    if kernels_wanted("linear_gelu", x):
        return _linear_gelu(x, weight, bias, approximate, needs_grad(x, weight, bias))[0]
    return ref.linear_gelu(x, weight, bias, approximate=approximate)


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
    _check_linear("linear_residual", x, weight, bias)
    check_shape("linear_residual", "residual", residual, (*x.shape[:-1], weight.shape[0]))
    check_same("linear_residual", "x", x, residual=residual)
    check_factors("linear_residual", x, layer_scale, drop_path, weight.shape[0])
    obstacle = "drop_path is a constant to the kernel, and it requires a gradient" if needs_grad(drop_path) else None
    if kernels_wanted("linear_residual", x, obstacle):
        return _linear_residual(x, weight, bias, residual, layer_scale, drop_path)
    return ref.linear_residual(x, weight, bias, residual, layer_scale=layer_scale, drop_path=drop_path)


@autocasts
def mlp(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    *,
    approximate: str = "none",
) -> Tensor:
    """gelu(x W1^T + b1) W2^T + b2. x (..., D); fc1_weight (F, D); fc2_weight (D', F). Returns (..., D')."""
    _check_linear("mlp", x, fc1_weight, fc1_bias, "fc1_")
    check_shape("mlp", "fc2_weight", fc2_weight, (None, fc1_weight.shape[0]))
    check_shape("mlp", "fc2_bias", fc2_bias, (fc2_weight.shape[0],))
    check_same("mlp", "x", x, fc2_weight=fc2_weight, fc2_bias=fc2_bias)
    check_approximate("mlp", approximate)
    if kernels_wanted("mlp", x):
        return _mlp(
            x,
            fc1_weight,
            fc1_bias,
            fc2_weight,
            fc2_bias,
            approximate,
            needs_grad(x, fc1_weight, fc1_bias, fc2_weight, fc2_bias),
        )[0]
    return ref.mlp(x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, approximate=approximate)
