"""The MLP block of a pre-norm encoder layer (Eq. 3 of the ViT paper), fused.

    mlp_block: x + drop_path[b] * layer_scale * fc2(activation(fc1(norm(x))))

Kept for backward besides what _blocks.py says: the pre-activation. The activation is written again in the epilogue that
applies its derivative; keep="all" keeps it too, and backward writes 4 of M x D numbers less a layer.
"""

import math

from torch import Tensor

from . import reference as ref
from ._blocks import BACKWARD, INPUTS, BlockNeeds, Inputs, check, gradients, keeps, kept, normed, output_gradient, split
from ._dispatch import NO_TRITON, autocasts, kernels_wanted
from ._operation import (
    as_matrix,
    check_norm_kind,
    check_rows,
    check_shape,
    check_tensors,
    differentiable,
    one_activation,
    operation,
    sample_rows,
    shaped,
)
from .layer_norm import fake_statistics
from .layer_norm import unsupported_reason as width_unsupported
from .linear_residual import through_scale, weight_gradients

if NO_TRITON is None:
    from ..kernels.matmul.activations import activated
    from ..kernels.matmul.linear import linear_residual
    from ..kernels.matmul.mlp import dgelu_matmul, linear_gelu


@operation("mlp_block_fwd", f"{INPUTS}, str activation, float eps, str norm, str keep", 6)
def _mlp_fwd(*arguments):
    """(out, mean, rstd, pre-activation, the norm's output, activation).

    keep "least": the last two are empty, "none": all but the first are.
    """
    t, (activation, eps, norm, keep) = split(arguments)
    x, fc1_weight, fc2_weight = as_matrix(t.x), as_matrix(t.in_weight), as_matrix(t.out_weight)
    h, mean, rstd = normed(t, eps, norm)
    act, pre = linear_gelu(h, fc1_weight, t.in_bias, activation, keep != "none")
    out = linear_residual(act, fc2_weight, t.out_bias, x, t.layer_scale, t.drop_path, sample_rows(t.x))
    return shaped(out, *t.x.shape), *kept(keep, t.x, (mean, rstd, pre), (h, act))


@_mlp_fwd.register_fake
def _(*arguments):
    t, (_, _, norm, keep) = split(arguments)
    rows, hidden = math.prod(t.x.shape[:-1]), t.in_weight.shape[0]
    h, pre, act = (t.in_weight.new_empty(rows, n) for n in (t.x.shape[-1], hidden, hidden))
    return t.x.new_empty(t.x.shape), *kept(keep, t.x, (*fake_statistics(t.x, norm), pre), (h, act))


@operation(
    "mlp_block_bwd",
    f"{BACKWARD}, Tensor pre, Tensor? h, Tensor? act, str activation, float eps, str norm, bool[] needs",
    8,
)
def _mlp_bwd(dout, *arguments):
    """The gradients that BlockNeeds names, empty where not needed. h, act: if kept."""
    t, (mean, rstd, pre, h, act, activation, eps, norm, needs) = split(arguments)
    dout, fc2_weight, needs, din = as_matrix(dout), as_matrix(t.out_weight), BlockNeeds(*needs), None
    g, total = output_gradient(dout, t, pre.dtype, needs)
    want_act = act is None and (needs.out_weight or needs.layer_scale)
    if needs.out.x:
        options = pre, activation, needs.in_bias  # what through_scale makes is freed after the call
        dpre, written, dbias = dgelu_matmul(*through_scale(g, fc2_weight, t.layer_scale), *options, want_act=want_act)
        act, din = written if want_act else act, (dpre, dbias)
    elif want_act:
        act = activated(pre, activation)
    dfc2_weight, dscale = weight_gradients(g, act, fc2_weight, t.layer_scale, needs.out)
    act = written = None  # 4 M D numbers, freed before more is allocated
    return gradients(t, needs, dout, (total, dfc2_weight, dscale), din, (mean, rstd, h), eps, norm)


# keep="least" trades these for time: backward writes them again in passes that it makes anyway.
differentiable(_mlp_fwd, _mlp_bwd, "mlp_block", BlockNeeds, only_all=("h", "act"))


@autocasts
def mlp_block(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    *,
    eps: float = 1e-6,
    activation: str | None = None,
    approximate: str | None = None,
    norm: str = "layer",
    layer_scale: Tensor | None = None,
    drop_path: Tensor | None = None,
    residual_in_fp32: bool = False,
    keep: str = "least",
) -> Tensor:
    """x + drop_path[b] * layer_scale * fc2(activation(fc1(norm(x)))).

    x (B, N, D); norm_weight, norm_bias (D,), in fp32 too; fc1_weight (F, D); fc2_weight (D, F); biases may be None;
    activation and approximate as in linear_gelu; layer_scale (D,) or None; drop_path (B,) factors or None; norm,
    `residual_in_fp32` and `keep`, here of the activation too, as in attention_block. Returns (B, N, D) in x's dtype.
    """
    op, width = "mlp_block", check_rows("mlp_block", x)
    layers = (norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias)
    check_tensors(op, norm_weight=norm_weight, fc1_weight=fc1_weight, fc2_weight=fc2_weight)
    check_shape(op, "norm_weight", norm_weight, (width,))
    check_shape(op, "norm_bias", norm_bias, (width,))
    check_shape(op, "fc1_weight", fc1_weight, (None, width))
    activation = one_activation(op, activation, approximate)
    check_norm_kind(op, norm, norm_bias)
    t, hidden = Inputs(x, *layers, layer_scale, drop_path), fc1_weight.shape[0]
    eps = check(op, t, ("fc1", "fc2"), hidden, hidden, eps, residual_in_fp32, keep)
    if kernels_wanted(op, fc1_weight, width_unsupported(width, drop_path)):
        return _mlp_fwd(*t, activation, eps, norm, keeps(keep, t, fc1_weight, fc2_weight, layer_scale))[0]
    factors = dict(layer_scale=layer_scale, drop_path=drop_path, compute_dtype=fc1_weight.dtype)
    return ref.mlp_block(x, *layers, eps=eps, activation=activation, norm=norm, **factors)
