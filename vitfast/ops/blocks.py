"""The functions of the fused blocks of an encoder layer; linear_residual shares some of them.

    out = residual + drop_path[b] * layer_scale * (x W^T + b)
    g = drop_path[b] * dout,  dx = (layer_scale * g) W

Weight, bias and layer_scale take their gradients from g, so that the branch's output need not be kept (weight_grad.py).

The fused blocks of a pre-norm encoder layer begin with a norm and end in this layer. With keep="least", a block keeps
for backward its input, the norm's statistics and the tensors that its own file names. With keep="all" the norm's output
is kept too, and for each layer backward writes 2 M D numbers less.

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
    from ..kernels.layer_norm.backward import layer_norm_bwd
    from ..kernels.layer_norm.forward import layer_norm_fwd
    from ..kernels.matmul.linear import linear_residual as linear_residual_fwd
    from ..kernels.matmul.weight_grad import scaled_weight_grad
    from ..kernels.rows import column_sums, scale_rows

Keep = Literal["least", "all"]
Norm = Literal["layer", "rms"]


def bias_gradients(sums: dict[str, Tensor | None], dtype: torch.dtype) -> dict[str, Tensor | None]:
    """The gradients of biases by name, of workspaces (row blocks, F) in fp32, added up in one launch."""
    found = list(sums.values())
    return dict(zip(sums, column_sums(found[0], found, [dtype] * len(found)))) if found else {}


def output_layer(x: Tensor, t: NamedTuple, residual: Tensor) -> Tensor:
    """The output, in the shape and dtype of `residual` (B, ..., D), for the layer's input x (M, K)."""
    matrices = x, as_matrix(t.out_weight), t.out_bias, as_matrix(residual)
    out = linear_residual_fwd(*matrices, t.layer_scale, t.drop_path, sample_rows(residual))
    return resized(out, *residual.shape)


def branch_gradient(
    dout: Tensor, t: NamedTuple, needs: NamedTuple, norm_follows: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(g, its column sum or None): g = drop_path[b] * dout in the layer's dtype, dout itself where equal.

    norm_follows: whether the backward of a block's norm runs, which sums dout, where that is g, in its pass over it.
    """
    dtype = t.out_weight.dtype
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
    dscale = dscale.to(t.layer_scale.dtype) if needs.layer_scale else None
    return dict(out_weight=dweight, out_bias=dbias, layer_scale=dscale)


def apply_norm(t: NamedTuple) -> tuple[Tensor, Tensor | None, Tensor]:
    """The norm's output (M, D) in the layers' dtype, mean (None for RMSNorm) and rstd (M,) in fp32."""
    return layer_norm_fwd(as_matrix(t.x), t.norm_weight, t.norm_bias, t.eps, t.out_weight.dtype, t.norm == "rms")


def saved_outputs(t: NamedTuple, saved: NamedTuple) -> NamedTuple:
    """`saved` with None for what t.keep does not keep.

    "none" keeps nothing, "least" all but h and inner, which backward writes again in passes that it makes anyway, and
    "all" or "slope" everything.
    """
    if t.keep == "none":
        return type(saved)()
    dropped = [name for name in saved._fields if name in ("h", "inner")]
    return saved._replace(**dict.fromkeys(dropped)) if t.keep == "least" else saved


def needs_norm(needs: NamedTuple) -> bool:
    """Whether the backward of the block's norm runs."""
    return needs.x or needs.norm_weight or needs.norm_bias


def norm_gradients(
    t: NamedTuple,
    needs: NamedTuple,
    saved: NamedTuple,
    dout: Tensor,
    total: Tensor | None,
    dh: Tensor | None,
    want_h: bool,
    sums: dict[str, Tensor | None] | None = None,
) -> tuple[dict[str, Tensor | None], Tensor | None, Tensor | None]:
    """(gradients of x, the norm's parameters and `sums`, column sum of g, the norm's output h if wanted).

    dh: the gradient of h, None where none of these gradients is needed. In one pass, the norm's backward adds the
    residual's gradient dout, sums dout unless g's sum is given as `total`, and writes h again unless it was kept.
    sums: workspaces of biases' gradients by name, which the launch that adds up the norm's adds up too.
    """
    sums, dtype = sums or {}, t.out_weight.dtype
    want_h = want_h and saved.h is None
    if dh is None:
        return bias_gradients(sums, dtype), total, apply_norm(t)[0] if want_h else saved.h
    want_sum = total is None and needs_column_sum(t, needs)
    inputs = as_matrix(t.x), t.norm_weight, t.norm_bias, saved.mean, saved.rstd
    wants = dict(want_dx=needs.x, want_dparams=needs.norm_weight or needs.norm_bias, want_dz_sum=want_sum)
    more = dict(want_y=want_h, more_sums=tuple(sums.values()), more_dtype=dtype)
    grads = layer_norm_bwd(dh, *inputs, dz=dout, **wants, **more)
    dx = grads.dres.view(t.x.shape) if needs.x else None
    found = dict(zip(sums, grads.more_sums), x=dx, norm_weight=grads.dweight, norm_bias=grads.dbias)
    return found, grads.dz_sum if want_sum else total, grads.y if saved.h is None else saved.h


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
    """The keyword arguments that every block in reference.py has."""
    factors = dict(layer_scale=t.layer_scale, drop_path=t.drop_path)
    return dict(eps=t.eps, norm=t.norm, compute_dtype=t.out_weight.dtype, **factors)


def choose_keep(t: NamedTuple, *weights: Tensor | None) -> str:
    """The `keep` that a forward operation on t runs with: "none" if there will be no backward.

    "all" becomes "least" unless one of `weights` needs a gradient, the only use of what "all" adds.
    """
    if not needs_grad(*flat(t)):
        return "none"
    return t.keep if needs_grad(*weights) else "least"
