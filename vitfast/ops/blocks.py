"""The steps that fused blocks of an encoder layer share; linear_residual takes its layer's from here.

    out = residual + drop_path[b] * layer_scale * (x W^T + b)
    g = drop_path[b] * dout,  dx = (layer_scale * g) W

Weight, bias and layer_scale take their gradients from g, so that the branch's output need not be kept (scaled.py).

The fused blocks of a pre-norm encoder layer begin with a norm and end in this layer. With keep="least", a block keeps
for backward its input, the norm's statistics and the tensors that its own file names. With keep="all" the norm's output
is kept too, and for an encoder layer, of two blocks, backward writes 2 M D numbers less.

The functions take an operation's arguments t, its needs and what it saved as NamedTuples, in which these names mean the
same: x, out_weight, out_bias, layer_scale and drop_path; in blocks also norm_weight, norm_bias, eps, norm and keep;
mean, rstd and h. "out" is the layer proj, fc2 or down, and all layers of a block have one dtype.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from . import checks as check
from .dispatch import NO_TRITON
from .operation import as_matrix, flat, needs_grad, resized, sample_rows

if NO_TRITON is None:
    from ..kernels.layer_norm import layer_norm_bwd, layer_norm_fwd
    from ..kernels.matmul import few_rows
    from ..kernels.matmul.linear import linear_residual as linear_residual_fwd
    from ..kernels.matmul.scaled import scale_rows, scaled_weight_grad
    from ..kernels.rows import column_sums

Keep = Literal["least", "all"]
Norm = Literal["layer", "rms"]


# ---- forward


def apply_norm(t: NamedTuple) -> tuple[Tensor, Tensor | None, Tensor]:
    """The norm's output (M, D) in the layers' dtype, mean (None for RMSNorm) and rstd (M,) in fp32."""
    options = dict(out_dtype=t.out_weight.dtype, rms=t.norm == "rms")
    h, _, mean, rstd = layer_norm_fwd(as_matrix(t.x), t.norm_weight, t.norm_bias, t.eps, **options)
    return h, mean, rstd


def output_layer(x: Tensor, t: NamedTuple, residual: Tensor) -> Tensor:
    """The output, in the shape and dtype of `residual` (B, ..., D), for the layer's input x (M, K)."""
    matrices = x, as_matrix(t.out_weight), t.out_bias, as_matrix(residual)
    out = linear_residual_fwd(*matrices, t.layer_scale, t.drop_path, sample_rows(residual))
    return resized(out, *residual.shape)


def has_few_rows(t: NamedTuple, *weights: Tensor | None, gated: bool = False) -> bool:
    """Whether a block takes first_layer and last_layer; weights: those that first_layer gets."""
    matrices = map(as_matrix, (t.x, *weights, t.out_weight))
    return t.keep == "none" and t.drop_path is None and few_rows.takes(*matrices, gated=gated)


def first_layer(t: NamedTuple, activation: str | None, *layer: Tensor | None) -> tuple[Tensor, Tensor]:
    """(few_rows.norm_linear (M, N), counters for last_layer); layer: weight, bias, those of `up`."""
    norm, counters = (t.norm_weight, t.norm_bias, t.eps), few_rows.new_counters(t.x)
    options = dict(rms=t.norm == "rms", activation=activation, counters=counters)
    return few_rows.norm_linear(as_matrix(t.x), *norm, *map(as_matrix, layer), **options), counters


def last_layer(x: Tensor, counters: Tensor, t: NamedTuple) -> Tensor:
    """output_layer of few rows x (M, K) in evaluation, with the sum in parts."""
    matrices = x, as_matrix(t.out_weight), t.out_bias, as_matrix(t.x)
    return resized(few_rows.split_linear(*matrices, t.layer_scale, counters), *t.x.shape)


def saved_outputs(t: NamedTuple, saved: NamedTuple) -> NamedTuple:
    """`saved` with None for what t.keep does not keep.

    "none" keeps nothing, "least" all but h and inner, which backward writes again in passes that it makes anyway, and
    "all" or "slope" everything.
    """
    if t.keep == "none":
        return type(saved)()
    dropped = [name for name in saved._fields if name in ("h", "inner")]
    return saved._replace(**dict.fromkeys(dropped)) if t.keep == "least" else saved


# ---- backward, in the order in which a block takes the steps


def needs_norm(needs: NamedTuple) -> bool:
    """Whether x or the norm's parameters need gradients, for which the norm's backward runs."""
    return needs.x or needs.norm_weight or needs.norm_bias


def needs_column_sum(t: NamedTuple, needs: NamedTuple) -> bool:
    """Whether g's column sum is needed, for the bias's gradient or for the bias's part in layer_scale's."""
    return needs.out_bias or (needs.layer_scale and t.out_bias is not None)


def branch_gradient(
    dout: Tensor, t: NamedTuple, needs: NamedTuple, norm_follows: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(g, its column sum or None): g = drop_path[b] * dout in the layer's dtype, or dout itself.

    norm_follows: whether `norm_backward` runs later, which sums dout in its pass; then no sum is made here of a g that
    is dout.
    """
    dtype = t.out_weight.dtype
    changed = t.drop_path is not None or dout.dtype != dtype
    want_sum = needs_column_sum(t, needs) and (changed or not norm_follows)
    if not (changed or want_sum):
        return dout, None
    g, g_sum = scale_rows(dout, None, t.drop_path, sample_rows(t.x), changed, want_sum, out_dtype=dtype)
    return (g if changed else dout), g_sum


def through_layer_scale(g: Tensor, t: NamedTuple) -> tuple[Tensor, Tensor]:
    """(g, diag(layer_scale) W), or in fp16 (layer_scale * g, W): two matrices whose product is dx.

    Scaling the weight (D, K) moves less memory than scaling g (M, D). In fp16, though, g is scaled, because a layer
    scale near its initial value, such as 1e-5, would push the weight below fp16's smallest numbers.
    """
    weight = as_matrix(t.out_weight)
    if t.layer_scale is None:
        return g, weight
    if g.dtype == torch.float16:
        return scale_rows(g, t.layer_scale, None, 1, want_sum=False)[0], weight
    return g, (weight * t.layer_scale.float()[:, None]).to(weight.dtype)


def weight_gradients(g: Tensor, x: Tensor, t: NamedTuple, needs: NamedTuple) -> tuple[Tensor | None, Tensor | None]:
    """(dweight, dlayer_scale without the bias' part) from g (M, D) and x (M, K)."""
    if needs.layer_scale:
        return scaled_weight_grad(g, x, t.layer_scale, as_matrix(t.out_weight))
    if needs.out_weight and t.layer_scale is not None:
        return scaled_weight_grad(g, x, t.layer_scale)
    return torch.mm(g.t(), x) if needs.out_weight else None, None


class NormBackward(NamedTuple):
    """The results of `norm_backward`."""

    grads: dict[str, Tensor | None]  # of x, norm_weight and norm_bias, by name
    g_sum: Tensor | None  # (D,), the column sum of g
    h: Tensor | None  # (M, D), the norm's output
    sums: tuple[Tensor | None, ...]  # (F,), the column sums of the workspaces


def norm_backward(
    t: NamedTuple,
    needs: NamedTuple,
    saved: NamedTuple,
    dh: Tensor | None,
    dout: Tensor,
    g_sum: Tensor | None,
    want_h: bool,
    workspaces: tuple[Tensor | None, ...] = (),
) -> NormBackward:
    """The norm's backward, which in one pass also adds the residual's gradient, and all missing sums.

    dh (M, D): the gradient of the norm's output; None where neither x nor the norm's parameters need one. dout (M, D):
    that of the block's output, which is added to dx; its column sum is g_sum unless that is given. want_h: the norm's
    output is written again unless it was kept. workspaces (row blocks, F): sums of other kernels, which the launch that
    adds up the norm's adds up too.
    """
    dtype, want_h = t.out_weight.dtype, want_h and saved.h is None
    if dh is None:
        sums = column_sums(workspaces[0], workspaces, [dtype] * len(workspaces)) if workspaces else ()
        return NormBackward({}, g_sum, apply_norm(t)[0] if want_h else saved.h, tuple(sums))
    want_sum = g_sum is None and needs_column_sum(t, needs)
    inputs = as_matrix(t.x), t.norm_weight, t.norm_bias, saved.mean, saved.rstd
    wants = dict(want_dx=needs.x, want_dparams=needs.norm_weight or needs.norm_bias, want_dz_sum=want_sum)
    more = dict(want_y=want_h, more_sums=workspaces, more_dtype=dtype)
    norm = layer_norm_bwd(dh, *inputs, dz=dout, **wants, **more)
    dx = norm.dres.view(t.x.shape) if needs.x else None
    grads = dict(x=dx, norm_weight=norm.dweight, norm_bias=norm.dbias)
    g_sum, h = norm.dz_sum if want_sum else g_sum, norm.y if want_h else saved.h
    return NormBackward(grads, g_sum, h, norm.more_sums)


def output_layer_gradients(
    t: NamedTuple, needs: NamedTuple, g_sum: Tensor | None, dweight: Tensor | None, dscale: Tensor | None
) -> dict[str, Tensor | None]:
    """Gradients of the output layer by name, from g's column sum and the results of weight_gradients."""
    dbias = None
    if needs.out_bias:
        dbias = (g_sum if t.layer_scale is None else g_sum * t.layer_scale.float()).to(t.out_bias.dtype)
    if needs.layer_scale and t.out_bias is not None:
        dscale = torch.addcmul(dscale, g_sum, t.out_bias.float())
    dscale = dscale.to(t.layer_scale.dtype) if needs.layer_scale else None
    return dict(out_weight=dweight, out_bias=dbias, layer_scale=dscale)


# ---- arguments


def check_block(op: str, t: NamedTuple, layers: dict[str, tuple], residual_in_fp32: bool) -> float:
    """Checks a block's arguments and returns eps as a Python number.

    layers: (weight, bias, the weight's shape) of each layer, by the prefix of its arguments' public names. x has the
    layers' dtype, or any with residual_in_fp32. Raises ValueError or TypeError for tensors that do not fit x and for
    unknown options.
    """
    if residual_in_fp32 is not True and residual_in_fp32 is not False:
        raise TypeError(f"{op}: residual_in_fp32 must be True or False, got {residual_in_fp32!r}")
    if t.x.dim() not in (2, 3):
        raise ValueError(f"{op}: x must be (B, N, D) or (tokens, D), got {tuple(t.x.shape)}")
    (first, (weight, *_)), width = next(iter(layers.items())), t.x.shape[-1]
    check.floating(op, x=t.x, **{f"{first}weight": weight})
    computed = t.x.new_empty(0, dtype=weight.dtype) if residual_in_fp32 else t.x
    for prefix, (weight, bias, shape) in layers.items():
        check.linear(op, computed, weight, bias, prefix, shape)
    check.tensors(op, norm_weight=t.norm_weight)
    check.norm(op, computed, width, norm_weight=t.norm_weight, norm_bias=t.norm_bias)
    check.factors(op, t.x, t.layer_scale, t.drop_path, width)
    if t.norm not in ("layer", "rms"):
        raise ValueError(f"{op}: norm must be 'layer' or 'rms', got {t.norm!r}")
    if t.norm == "rms" and t.norm_bias is not None:
        raise ValueError(f"{op}: norm_bias must be None where norm is 'rms', which has no bias")
    if t.keep not in ("least", "all"):
        raise ValueError(f"{op}: keep must be 'least' or 'all', got {t.keep!r}")
    return check.number(op, "eps", t.eps)


def keywords(t: NamedTuple) -> dict:
    """The keyword arguments, from t, that every block in reference.py takes."""
    factors = dict(layer_scale=t.layer_scale, drop_path=t.drop_path)
    return dict(eps=t.eps, norm=t.norm, compute_dtype=t.out_weight.dtype, **factors)


def choose_keep(t: NamedTuple, *weights: Tensor | None) -> str:
    """The `keep` that a forward operation on t runs with: "none" if there will be no backward.

    "all" becomes "least" unless one of `weights` needs a gradient, the only use of what "all" adds.
    """
    if not needs_grad(*flat(t)):
        return "none"
    return t.keep if needs_grad(*weights) else "least"
