"""The functions that the fused blocks of a pre-norm encoder layer share.

With keep="least", a block keeps for backward its input, the norm's statistics and the tensors that its own file names.
The norm's backward then writes the norm's output again in its own pass. With keep="all" that output is kept too, and
for each layer backward writes 2 M D numbers less. The norm's backward reads dout, the gradient of the block's output,
as that of the residual; in the same pass it sums dout's columns for the output layer's bias.

The functions take a block's arguments t, its needs and what it saved as NamedTuples, in which these names mean the
same: x, norm_weight, norm_bias, in_weight, out_weight, out_bias, layer_scale, drop_path, eps, norm and keep; mean, rstd
and h. "in" is the layer qkv, fc1 or gate, "out" is proj, fc2 or down.
"""

from typing import Literal, NamedTuple

from torch import Tensor

from . import checks as check
from .dispatch import NO_TRITON, needs_grad
from .linear_residual import bias_gradients, needs_column_sum
from .operation import as_matrix, tensors_of

if NO_TRITON is None:
    from ..kernels.layer_norm.backward import layer_norm_bwd
    from ..kernels.layer_norm.forward import layer_norm_fwd

Keep = Literal["least", "all"]
Norm = Literal["layer", "rms"]


def apply_norm(t: NamedTuple) -> tuple[Tensor, Tensor | None, Tensor]:
    """The norm's output (M, D) in in_weight's dtype, mean (None for RMSNorm) and rstd (M,) in fp32."""
    return layer_norm_fwd(as_matrix(t.x), t.norm_weight, t.norm_bias, t.eps, t.in_weight.dtype, t.norm == "rms")


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
    sums, dtype = sums or {}, t.in_weight.dtype
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
    return dict(eps=t.eps, norm=t.norm, compute_dtype=t.in_weight.dtype, **factors)


def choose_keep(t: NamedTuple, *weights: Tensor | None) -> str:
    """The `keep` that a forward operation on t runs with: "none" if there will be no backward.

    "all" becomes "least" unless one of `weights` needs a gradient, the only use of what "all" adds.
    """
    if not needs_grad(*tensors_of(t)):
        return "none"
    return t.keep if needs_grad(*weights) else "least"
