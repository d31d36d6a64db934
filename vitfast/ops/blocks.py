"""The two fused blocks of a pre-norm encoder layer (Eq. 2 and 3 of the ViT paper): the unit of speed.

    attention_block: x + drop_path[b] * layer_scale * proj(attention(qkv(layer_norm(x))))
    mlp_block:       x + drop_path[b] * layer_scale * fc2(gelu(fc1(layer_norm(x))))

Kept for backward with keep="least": the input, LayerNorm's statistics, and qkv, lse and the attention output, or the
pre-activation. LayerNorm's output is written again in the pass of its backward, the activation in the epilogue that
applies GELU's derivative; keep="all" keeps these two too, and backward writes 6 of M x D numbers less a layer.
LayerNorm's backward reads dout, the gradient of the output, as the residual's: in the same pass it sums dout's columns
for the output layer's bias.
"""

from numbers import Integral
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ref
from ._dispatch import (
    NO_TRITON,
    autocasts,
    check_approximate,
    check_eps,
    check_factors,
    check_flag,
    check_floating,
    check_norm,
    check_rows,
    check_same,
    check_shape,
    check_tensors,
    kernels_wanted,
    needs_grad,
)
from ._gradients import as_dtype, as_matrix, chosen, differentiable, filled, operation, shaped
from .attention import unsupported_reason as head_unsupported
from .layer_norm import fake_statistics
from .layer_norm import unsupported_reason as width_unsupported
from .linear_residual import ResidualNeeds, branch_gradient, through_scale, vector_gradients, weight_gradients

if NO_TRITON is None:
    from ..kernels.attention import attention_bwd, attention_fwd
    from ..kernels.layer_norm import layer_norm_bwd, layer_norm_fwd
    from ..kernels.linear import input_grad, linear, linear_residual
    from ..kernels.mlp import dgelu_matmul, linear_gelu
    from ..kernels.weight_grad import weight_grad


class Inputs(NamedTuple):
    """The tensors of a block. "in" is the layer qkv or fc1, "out" is proj or fc2; K is D or F."""

    x: Tensor  # (B, N, D)
    norm_weight: Tensor  # (D,)
    norm_bias: Tensor | None  # (D,)
    in_weight: Tensor  # (3K, D) or (K, D)
    in_bias: Tensor | None
    out_weight: Tensor  # (D, K)
    out_bias: Tensor | None  # (D,)
    layer_scale: Tensor | None  # (D,)
    drop_path: Tensor | None  # (B,)


class BlockNeeds(NamedTuple):
    """Which gradients of a block are needed."""

    x: bool
    norm_weight: bool
    norm_bias: bool
    in_weight: bool
    in_bias: bool
    out_weight: bool
    out_bias: bool
    layer_scale: bool

    @property
    def norm(self) -> bool:
        """Whether LayerNorm's backward runs."""
        return self.x or self.norm_weight or self.norm_bias

    @property
    def out(self) -> ResidualNeeds:
        """The output layer's part; that of its input where anything below it is needed."""
        below = self.norm or self.in_weight or self.in_bias
        return ResidualNeeds(below, self.out_weight, self.out_bias, self.layer_scale)


_INPUTS = (
    "Tensor x, Tensor norm_weight, Tensor? norm_bias, Tensor in_weight, Tensor? in_bias, "
    "Tensor out_weight, Tensor? out_bias, Tensor? layer_scale, Tensor? drop_path"
)
_BACKWARD = f"Tensor dout, {_INPUTS}, Tensor mean, Tensor rstd"


def _split(arguments: tuple) -> tuple[Inputs, tuple]:
    """An operation's first nine arguments by name, and the others."""
    count = len(Inputs._fields)
    return Inputs(*arguments[:count]), arguments[count:]


def _kept(keep: str, x: Tensor, least: tuple[Tensor, ...], more: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Forward's outputs beside the first, empty where not kept. keep: "none", "least" or "all"."""
    absent = {"none": len(least) + len(more), "least": len(more), "all": 0}[keep]
    held = (*least, *more)
    return (*held[: len(held) - absent], *filled(x, *[None] * absent))


def _output_gradient(dout: Tensor, t: Inputs, dtype: torch.dtype, needs: BlockNeeds) -> tuple[Tensor, Tensor | None]:
    """(g in `dtype`, its column sum or None) for g = drop_path[b] * dout.

    Where g is dout itself, LayerNorm's backward, which reads dout, sums it in the same pass.
    """
    norm_sums = needs.norm and t.drop_path is None and dout.dtype == dtype
    want_sum = needs.out.column_sum(t.out_bias) and not norm_sums
    return branch_gradient(dout, dtype, t.drop_path, t.x.shape[1], want_sum)


def _gradients(
    t: Inputs,
    needs: BlockNeeds,
    dout: Tensor,
    out: tuple[Tensor | None, Tensor | None, Tensor | None],
    din: tuple[Tensor, Tensor | None] | None,
    kept: tuple[Tensor, Tensor, Tensor | None],
    eps: float,
) -> tuple[Tensor, ...]:
    """A backward operation's outputs: a gradient for each field of BlockNeeds, empty where not needed.

    out: column sum of g, and weight_gradients of the output layer. din: the gradient (M, K) of what `in` put out, and
    its column sum; None where nothing from there down is needed. kept: LayerNorm's mean, rstd and output h. LayerNorm's
    backward adds the residual's gradient dout, sums it unless g's sum is there, and rewrites h, which the weight
    gradient needs, unless it was kept: all in one pass.
    """
    (total, dout_weight, dscale), grads = out, {}
    if din is not None:
        (din, dbias), (mean, rstd, h), x, weight = din, kept, as_matrix(t.x), as_matrix(t.in_weight)
        if needs.norm:
            want_sum = total is None and needs.out.column_sum(t.out_bias)
            norm = layer_norm_bwd(
                input_grad(din, weight),
                x,
                t.norm_weight,
                t.norm_bias,
                mean,
                rstd,
                dz=dout,
                want_dx=needs.x,
                want_dparams=needs.norm_weight or needs.norm_bias,
                want_dz_sum=want_sum,
                want_y=needs.in_weight and h is None,
            )
            dx = norm.dres.view(t.x.shape) if needs.x else None
            grads.update(x=dx, norm_weight=norm.dweight, norm_bias=norm.dbias)
            total, h = norm.dz_sum if want_sum else total, norm.y if h is None else h
        elif needs.in_weight and h is None:
            h = layer_norm_fwd(x, t.norm_weight, t.norm_bias, eps, out_dtype=weight.dtype)[0]
        dweight = weight_grad(din, h, out_dtype=weight.dtype) if needs.in_weight else None
        grads.update(in_weight=dweight, in_bias=as_dtype(dbias, weight.dtype))
    dout_bias, dscale = vector_gradients(total, dscale, t.out_bias, t.layer_scale, needs.out)
    grads.update(out_weight=dout_weight, out_bias=dout_bias, layer_scale=dscale)
    return filled(t.x, *chosen([grads.get(name) for name in needs._fields], needs))


# ---- attention block


@operation("attention_block_fwd", f"{_INPUTS}, SymInt num_heads, float eps, str keep", 7)
def _attention_fwd(*arguments):
    """(out, mean, rstd, qkv, lse, o, LayerNorm's output).

    keep "least": the last is empty, "none": all but the first are.
    """
    t, (num_heads, eps, keep) = _split(arguments)
    (batch, tokens, _), x = t.x.shape, as_matrix(t.x)
    qkv_weight, proj_weight = as_matrix(t.in_weight), as_matrix(t.out_weight)
    inner = proj_weight.shape[1]
    h, mean, rstd = layer_norm_fwd(x, t.norm_weight, t.norm_bias, eps, out_dtype=qkv_weight.dtype)
    qkv = linear(h, qkv_weight, t.in_bias).view(batch, tokens, 3, num_heads, inner // num_heads)
    o, lse = attention_fwd(*qkv.unbind(2), qkv.shape[-1] ** -0.5)
    out = linear_residual(o.view(-1, inner), proj_weight, t.out_bias, x, t.layer_scale, t.drop_path, tokens)
    return shaped(out, *t.x.shape), *_kept(keep, t.x, (mean, rstd, qkv, lse, o), (h,))


@_attention_fwd.register_fake
def _(*arguments):
    t, (num_heads, _, keep) = _split(arguments)
    (batch, tokens, width), new = t.x.shape, t.in_weight.new_empty
    head = t.in_weight.shape[0] // 3 // num_heads
    qkv, o = new(batch, tokens, 3, num_heads, head), new(batch, tokens, num_heads, head)
    lse = t.x.new_empty(batch, num_heads, tokens, dtype=torch.float32)
    least = (*fake_statistics(t.x), qkv, lse, o)
    return t.x.new_empty(t.x.shape), *_kept(keep, t.x, least, (new(batch * tokens, width),))


@operation(
    "attention_block_bwd", f"{_BACKWARD}, Tensor qkv, Tensor lse, Tensor o, Tensor? h, float eps, bool[] needs", 8
)
def _attention_bwd(dout, *arguments):
    """The gradients that BlockNeeds names, empty where not needed. h: LayerNorm's output, if kept."""
    t, (mean, rstd, qkv, lse, o, h, eps, needs) = _split(arguments)
    dout, proj_weight, needs, din = as_matrix(dout), as_matrix(t.out_weight), BlockNeeds(*needs), None
    g, total = _output_gradient(dout, t, qkv.dtype, needs)
    dproj_weight, dscale = weight_gradients(g, as_matrix(o.flatten(2)), proj_weight, t.layer_scale, needs.out)
    if needs.out.x:
        do = input_grad(*through_scale(g, proj_weight, t.layer_scale)).view(o.shape)
        scale = qkv.shape[-1] ** -0.5
        dqkv, dbias = attention_bwd(*qkv.unbind(2), o, lse, do, scale, want_bias_grad=needs.in_bias)
        din = as_matrix(dqkv.flatten(2)), dbias
    return _gradients(t, needs, dout, (total, dproj_weight, dscale), din, (mean, rstd, h), eps)


# ---- MLP block


@operation("mlp_block_fwd", f"{_INPUTS}, str approximate, float eps, str keep", 6)
def _mlp_fwd(*arguments):
    """(out, mean, rstd, pre-activation, LayerNorm's output, activation).

    keep "least": the last two are empty, "none": all but the first are.
    """
    t, (approximate, eps, keep) = _split(arguments)
    x, fc1_weight, fc2_weight = as_matrix(t.x), as_matrix(t.in_weight), as_matrix(t.out_weight)
    h, mean, rstd = layer_norm_fwd(x, t.norm_weight, t.norm_bias, eps, out_dtype=fc1_weight.dtype)
    act, pre = linear_gelu(h, fc1_weight, t.in_bias, approximate, keep != "none")
    out = linear_residual(act, fc2_weight, t.out_bias, x, t.layer_scale, t.drop_path, t.x.shape[1])
    return shaped(out, *t.x.shape), *_kept(keep, t.x, (mean, rstd, pre), (h, act))


@_mlp_fwd.register_fake
def _(*arguments):
    t, (_, _, keep) = _split(arguments)
    rows, hidden = t.x.shape[0] * t.x.shape[1], t.in_weight.shape[0]
    h, pre, act = (t.in_weight.new_empty(rows, n) for n in (t.x.shape[2], hidden, hidden))
    return t.x.new_empty(t.x.shape), *_kept(keep, t.x, (*fake_statistics(t.x), pre), (h, act))


@operation(
    "mlp_block_bwd", f"{_BACKWARD}, Tensor pre, Tensor? h, Tensor? act, str approximate, float eps, bool[] needs", 8
)
def _mlp_bwd(dout, *arguments):
    """The gradients that BlockNeeds names, empty where not needed. h, act: if kept."""
    t, (mean, rstd, pre, h, act, approximate, eps, needs) = _split(arguments)
    dout, fc2_weight, needs, din = as_matrix(dout), as_matrix(t.out_weight), BlockNeeds(*needs), None
    g, total = _output_gradient(dout, t, pre.dtype, needs)
    want_act = act is None and (needs.out_weight or needs.layer_scale)
    if needs.out.x:
        options = pre, approximate, needs.in_bias  # what through_scale makes is freed after the call
        dpre, written, dbias = dgelu_matmul(*through_scale(g, fc2_weight, t.layer_scale), *options, want_act=want_act)
        act, din = written if want_act else act, (dpre, dbias)
    elif want_act:
        act = F.gelu(pre, approximate=approximate)
    dfc2_weight, dscale = weight_gradients(g, act, fc2_weight, t.layer_scale, needs.out)
    act = written = None  # 4 M D numbers, freed before more is allocated
    return _gradients(t, needs, dout, (total, dfc2_weight, dscale), din, (mean, rstd, h), eps)


# keep="least" trades these for time: backward writes them again in passes that it makes anyway.
differentiable(_attention_fwd, _attention_bwd, "attention_block", BlockNeeds, only_all=("h",))
differentiable(_mlp_fwd, _mlp_bwd, "mlp_block", BlockNeeds, only_all=("h", "act"))


# ---- the public operations


def _check(
    op: str, t: Inputs, names: tuple[str, str], rows: int, inner: int, eps: float, residual_in_fp32: bool, keep: str
) -> float:
    """eps, as Python's number. Raises for tensors that do not fit x, and options that mean nothing.

    names: of the layers "in" (rows, D) and "out" (D, inner). The residual stream x is fp32 where it is asked to be,
    else it has the matrices' dtype.
    """
    (first, last), width = names, t.x.shape[-1]
    check_shape(op, f"{first}_bias", t.in_bias, (rows,))
    check_shape(op, f"{last}_weight", t.out_weight, (width, inner))
    check_shape(op, f"{last}_bias", t.out_bias, (width,))
    check_factors(op, t.x, t.layer_scale, t.drop_path, width)
    if t.x.dim() != 3:
        raise ValueError(f"{op}: x must be (B, N, D), got {tuple(t.x.shape)}")
    check_floating(op, "x", t.x)
    check_floating(op, f"{first}_weight", t.in_weight)
    check_flag(op, "residual_in_fp32", residual_in_fp32)
    computed = t.x.new_empty(0, dtype=t.in_weight.dtype) if residual_in_fp32 else t.x
    layers = ((first, t.in_weight, t.in_bias), (last, t.out_weight, t.out_bias))
    for name, weight, bias in layers:
        check_same(op, "x", computed, **{f"{name}_weight": weight, f"{name}_bias": bias})
    check_norm(op, computed, norm_weight=t.norm_weight, norm_bias=t.norm_bias)
    eps = check_eps(op, eps)
    if keep not in ("least", "all"):
        raise ValueError(f"{op}: keep must be 'least' or 'all', got {keep!r}")
    return eps


def _keeps(keep: str, t: Inputs, *weights: Tensor | None) -> str:
    """`keep` of a forward operation; what "all" adds serves the gradients of these weights alone."""
    if not needs_grad(*t):
        return "none"
    return keep if needs_grad(*weights) else "least"


@autocasts
def attention_block(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    proj_weight: Tensor,
    proj_bias: Tensor | None,
    *,
    num_heads: int,
    eps: float = 1e-6,
    layer_scale: Tensor | None = None,
    drop_path: Tensor | None = None,
    residual_in_fp32: bool = False,
    keep: str = "least",
) -> Tensor:
    """x + drop_path[b] * layer_scale * proj(attention(qkv(layer_norm(x)))).

    x (B, N, D); norm_weight, norm_bias (D,), in fp32 too; qkv_weight (3D, D), rows [q; k; v], head-major in each;
    proj_weight (D, D); biases may be None; layer_scale (D,) or None; drop_path (B,) factors or None.
    `residual_in_fp32`: x is fp32 and stays so, whatever the dtype of the parameters (or autocast) that the matrix
    products run in. `keep`: "least", or "all" for more memory and less traffic: LayerNorm's output is then kept for
    backward, not written again. Returns (B, N, D) in x's dtype.
    """
    op, width = "attention_block", check_rows("attention_block", x)
    layers = (norm_weight, norm_bias, qkv_weight, qkv_bias, proj_weight, proj_bias)
    check_tensors(op, norm_weight=norm_weight, qkv_weight=qkv_weight, proj_weight=proj_weight)
    check_shape(op, "norm_weight", norm_weight, (width,))
    check_shape(op, "norm_bias", norm_bias, (width,))
    check_shape(op, "qkv_weight", qkv_weight, (None, width))
    inner, rest = divmod(qkv_weight.shape[0], 3)
    if type(num_heads) is not int and not isinstance(num_heads, torch.SymInt):
        if isinstance(num_heads, bool) or not isinstance(num_heads, Integral):
            raise TypeError(f"{op}: num_heads must be an integer, got {num_heads!r}")
        num_heads = int(num_heads)
    if num_heads < 1 or rest or not inner or inner % num_heads:
        raise ValueError(
            f"{op}: qkv_weight must have 3 * num_heads * head size rows with num_heads {num_heads}, "
            f"got {qkv_weight.shape[0]}"
        )
    t = Inputs(x, *layers, layer_scale, drop_path)
    eps = _check(op, t, ("qkv", "proj"), 3 * inner, inner, eps, residual_in_fp32, keep)
    if kernels_wanted(op, qkv_weight, head_unsupported(inner // num_heads, 1.0) or width_unsupported(width, drop_path)):
        return _attention_fwd(*t, num_heads, eps, _keeps(keep, t, qkv_weight))[0]
    factors = dict(layer_scale=layer_scale, drop_path=drop_path, compute_dtype=qkv_weight.dtype)
    return ref.attention_block(x, *layers, num_heads=num_heads, eps=eps, **factors)


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
    approximate: str = "none",
    layer_scale: Tensor | None = None,
    drop_path: Tensor | None = None,
    residual_in_fp32: bool = False,
    keep: str = "least",
) -> Tensor:
    """x + drop_path[b] * layer_scale * fc2(gelu(fc1(layer_norm(x)))).

    x (B, N, D); norm_weight, norm_bias (D,), in fp32 too; fc1_weight (F, D); fc2_weight (D, F); biases may be None;
    approximate "none" (erf) or "tanh"; layer_scale (D,) or None; drop_path (B,) factors or None; `residual_in_fp32` and
    `keep`, here of the activation too, as in attention_block. Returns (B, N, D) in x's dtype.
    """
    op, width = "mlp_block", check_rows("mlp_block", x)
    layers = (norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias)
    check_tensors(op, norm_weight=norm_weight, fc1_weight=fc1_weight, fc2_weight=fc2_weight)
    check_shape(op, "norm_weight", norm_weight, (width,))
    check_shape(op, "norm_bias", norm_bias, (width,))
    check_shape(op, "fc1_weight", fc1_weight, (None, width))
    check_approximate(op, approximate)
    t, hidden = Inputs(x, *layers, layer_scale, drop_path), fc1_weight.shape[0]
    eps = _check(op, t, ("fc1", "fc2"), hidden, hidden, eps, residual_in_fp32, keep)
    if kernels_wanted(op, fc1_weight, width_unsupported(width, drop_path)):
        return _mlp_fwd(*t, approximate, eps, _keeps(keep, t, fc1_weight, fc2_weight, layer_scale))[0]
    factors = dict(layer_scale=layer_scale, drop_path=drop_path, compute_dtype=fc1_weight.dtype)
    return ref.mlp_block(x, *layers, eps=eps, approximate=approximate, **factors)
