"""Shared by the fused blocks of a pre-norm encoder layer: the unit of speed.

Kept for backward with keep="least": the input, the norm's statistics, and what each block says. The norm's output is
written again in the pass of its backward; keep="all" keeps it too, and backward writes 2 of M x D numbers less a layer.
The norm's backward reads dout, the gradient of the output, as the residual's: in the same pass it sums dout's columns
for the output layer's bias.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ._dispatch import NO_TRITON, needs_grad
from ._operation import (
    as_dtype,
    as_matrix,
    check_eps,
    check_factors,
    check_flag,
    check_floating,
    check_norm,
    check_same,
    check_shape,
    chosen,
    filled,
    sample_rows,
)
from .linear_residual import ResidualNeeds, branch_gradient, vector_gradients

if NO_TRITON is None:
    from ..kernels.layer_norm.forward import layer_norm_bwd, layer_norm_fwd
    from ..kernels.matmul.linear import input_grad
    from ..kernels.matmul.weight_grad import weight_grad


class Inputs(NamedTuple):
    """The tensors of a block. "in" is the layer qkv or fc1, "out" is proj or fc2; K is D or F."""

    x: Tensor  # (B, N, D) or (tokens, D)
    norm_weight: Tensor  # (D,)
    norm_bias: Tensor | None  # (D,)
    in_weight: Tensor  # (3K, D) or (K, D)
    in_bias: Tensor | None
    out_weight: Tensor  # (D, K)
    out_bias: Tensor | None  # (D,)
    layer_scale: Tensor | None  # (D,)
    drop_path: Tensor | None  # (B,) or (tokens,)


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


# Those with gradients first: BlockNeeds names them.
TRAINED = (
    "Tensor x, Tensor norm_weight, Tensor? norm_bias, Tensor in_weight, Tensor? in_bias, "
    "Tensor out_weight, Tensor? out_bias, Tensor? layer_scale"
)
INPUTS = f"{TRAINED}, Tensor? drop_path"
BACKWARD = f"Tensor dout, {INPUTS}, Tensor mean, Tensor rstd"


def normed(t: Inputs, eps: float, norm: str) -> tuple[Tensor, Tensor | None, Tensor]:
    """The norm's output (M, D) in the dtype of `in`, mean (None of RMSNorm) and rstd (M,) in fp32."""
    return layer_norm_fwd(as_matrix(t.x), t.norm_weight, t.norm_bias, eps, t.in_weight.dtype, norm == "rms")


def split(arguments: tuple, inputs: type = Inputs) -> tuple[Inputs, tuple]:
    """An operation's first arguments by name, and the others."""
    count = len(inputs._fields)
    return inputs(*arguments[:count]), arguments[count:]


def kept(keep: str, x: Tensor, least: tuple[Tensor | None, ...], more: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Forward's outputs beside the first, empty where None or not kept. keep: "none", "least" or "all"."""
    absent = {"none": len(least) + len(more), "least": len(more), "all": 0}[keep]
    held = (*least, *more)
    return filled(x, *held[: len(held) - absent], *[None] * absent)


def output_gradient(dout: Tensor, t: Inputs, dtype: torch.dtype, needs: BlockNeeds) -> tuple[Tensor, Tensor | None]:
    """(g in `dtype`, its column sum or None) for g = drop_path[b] * dout.

    Where g is dout itself, LayerNorm's backward, which reads dout, sums it in the same pass.
    """
    norm_sums = needs.norm and t.drop_path is None and dout.dtype == dtype
    want_sum = needs.out.column_sum(t.out_bias) and not norm_sums
    return branch_gradient(dout, dtype, t.drop_path, sample_rows(t.x), want_sum)


def through_norm(
    t: Inputs,
    needs: BlockNeeds,
    dout: Tensor,
    total: Tensor | None,
    dh: Tensor | None,
    kept: tuple[Tensor, Tensor, Tensor | None],
    eps: float,
    norm: str,
    want_h: bool,
) -> tuple[dict[str, Tensor | None], Tensor | None, Tensor | None]:
    """(gradients of x and of the norm's parameters, column sum of g, the norm's output h where wanted).

    dh: the gradient of h, None where none of these is needed. kept: the norm's mean, rstd and h. The norm's backward
    adds the residual's gradient dout, sums it unless g's sum, `total`, is there, and rewrites h unless it was kept: all
    in one pass.
    """
    (mean, rstd, h), x = kept, as_matrix(t.x)
    if dh is None:
        return {}, total, normed(t, eps, norm)[0] if want_h and h is None else h
    want_sum = total is None and needs.out.column_sum(t.out_bias)
    grads = layer_norm_bwd(
        dh,
        x,
        t.norm_weight,
        t.norm_bias,
        None if norm == "rms" else mean,
        rstd,
        dz=dout,
        want_dx=needs.x,
        want_dparams=needs.norm_weight or needs.norm_bias,
        want_dz_sum=want_sum,
        want_y=want_h and h is None,
    )
    dx = grads.dres.view(t.x.shape) if needs.x else None
    found = dict(x=dx, norm_weight=grads.dweight, norm_bias=grads.dbias)
    return found, grads.dz_sum if want_sum else total, grads.y if h is None else h


def gradients(
    t: Inputs,
    needs: BlockNeeds,
    dout: Tensor,
    out: tuple[Tensor | None, Tensor | None, Tensor | None],
    din: tuple[Tensor, Tensor | None] | None,
    kept: tuple[Tensor, Tensor, Tensor | None],
    eps: float,
    norm: str,
) -> tuple[Tensor, ...]:
    """A backward operation's outputs: a gradient for each field of BlockNeeds, empty where not needed.

    out: column sum of g, and weight_gradients of the output layer. din: the gradient (M, K) of what `in` put out, and
    its column sum; None where nothing from there down is needed. kept: as through_norm takes it.
    """
    (total, dout_weight, dscale), grads = out, {}
    if din is not None:
        (din, dbias), weight = din, as_matrix(t.in_weight)
        dh = input_grad(din, weight) if needs.norm else None
        grads, total, h = through_norm(t, needs, dout, total, dh, kept, eps, norm, needs.in_weight)
        dh = None  # freed before more is allocated
        dweight = weight_grad(din, h, out_dtype=weight.dtype) if needs.in_weight else None
        grads.update(in_weight=dweight, in_bias=as_dtype(dbias, weight.dtype))
    return with_output(t, needs, grads, total, dout_weight, dscale)


def with_output(
    t: Inputs,
    needs: BlockNeeds,
    grads: dict[str, Tensor | None],
    total: Tensor | None,
    dout_weight: Tensor | None,
    dscale: Tensor | None,
) -> tuple[Tensor, ...]:
    """A backward operation's outputs, in the order of needs. grads: by name, without the output layer's."""
    dout_bias, dscale = vector_gradients(total, dscale, t.out_bias, t.layer_scale, needs.out)
    grads.update(out_weight=dout_weight, out_bias=dout_bias, layer_scale=dscale)
    return filled(t.x, *chosen([grads.get(name) for name in needs._fields], needs))


def check(
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
    if t.x.dim() not in (2, 3):
        raise ValueError(f"{op}: x must be (B, N, D) or (tokens, D), got {tuple(t.x.shape)}")
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


def keeps(keep: str, tensors: tuple[Tensor | None, ...], *weights: Tensor | None) -> str:
    """`keep` of a forward operation on these tensors.

    What "all" adds serves the gradients of these weights alone.
    """
    if not needs_grad(*tensors):
        return "none"
    return keep if needs_grad(*weights) else "least"
