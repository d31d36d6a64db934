"""Gated MLPs (Shazeer, 2020): SwiGLU with "silu", GeGLU with "gelu".

    gated_mlp: down(inner_norm(activation(gate(x)) * up(x)))

Kept for backward: the input, and what `up` and `gate` put out; with an inner norm its input and statistics too. Passes
over memory:

forward     one product reads x and writes up, gate (in training) and h; the last layer reads h. With an inner norm: one
            more reads h and writes what the last layer reads.
backward    one product reads dout, up and gate, and writes dup, dgate, h again and sums for both biases. The weight
            gradients read dout and h, x and dup, x and dgate. dx is one product and, onto it, another. With an inner
            norm: a product from dout to dinner; a pass from dinner and h to dh and the norm's output again; one from
            dh, up and gate to dup, dgate and the sums.
"""

import math
from typing import NamedTuple

from torch import Tensor

from . import reference as ref
from ._dispatch import NO_TRITON, autocasts, kernels_wanted, needs_grad
from ._operation import (
    as_dtype,
    as_matrix,
    check_activation,
    check_eps,
    check_linear,
    check_norm,
    check_same,
    check_shape,
    check_tensors,
    chosen,
    differentiable,
    filled,
    operation,
    shaped,
)
from .layer_norm import fake_statistics
from .layer_norm import unsupported_reason as width_unsupported

if NO_TRITON is None:
    from ..kernels.layer_norm.forward import layer_norm_bwd, layer_norm_fwd
    from ..kernels.matmul.activations import activated
    from ..kernels.matmul.gated import dgated_matmul, gated_bwd, gated_linear
    from ..kernels.matmul.linear import input_grad, linear
    from ..kernels.matmul.weight_grad import weight_grad
    from ..kernels.rows import scale_rows


class Gate(NamedTuple):
    """All that stands before the last layer."""

    up_weight: Tensor  # (F, D)
    up_bias: Tensor | None  # (F,)
    gate_weight: Tensor  # (F, D)
    gate_bias: Tensor | None  # (F,)
    inner_norm_weight: Tensor | None  # (F,), None without an inner norm
    inner_norm_bias: Tensor | None  # (F,)


class Hidden(NamedTuple):
    """Kept for backward: (M, F) each, then (M,). The last three are there with an inner norm alone."""

    up: Tensor
    gate: Tensor
    h: Tensor | None
    inner_mean: Tensor | None
    inner_rstd: Tensor | None


GATE = (
    "Tensor up_weight, Tensor? up_bias, Tensor gate_weight, Tensor? gate_bias, "
    "Tensor? inner_norm_weight, Tensor? inner_norm_bias"
)
HIDDEN = "Tensor up, Tensor gate, Tensor h, Tensor inner_mean, Tensor inner_rstd"


def hidden_fwd(x: Tensor, gate: Gate, activation: str, inner_eps: float, save: bool) -> tuple[Tensor, Hidden]:
    """(what the last layer reads, what backward needs): x (M, D) -> (M, F)."""
    up_weight, gate_weight = as_matrix(gate.up_weight), as_matrix(gate.gate_weight)
    h, *kept = gated_linear(x, up_weight, gate.up_bias, gate_weight, gate.gate_bias, activation, save)
    if gate.inner_norm_weight is None:
        return h, Hidden(*kept, None, None, None)
    inner, mean, rstd = layer_norm_fwd(h, gate.inner_norm_weight, gate.inner_norm_bias, inner_eps)
    return inner, Hidden(*kept, h, mean, rstd)


def fake_hidden(x: Tensor, gate: Gate) -> Hidden:
    """The fake of what backward needs; x: of as many rows."""
    up, pre, h = (gate.up_weight.new_empty(math.prod(x.shape[:-1]), gate.up_weight.shape[0]) for _ in range(3))
    return Hidden(up, pre, *((None,) * 3 if gate.inner_norm_weight is None else (h, *fake_statistics(x))))


def again(gate: Gate, hidden: Hidden, activation: str, inner_eps: float) -> Tensor:
    """The input of the last layer, once more."""
    if gate.inner_norm_weight is None:
        return activated(hidden.gate, activation).mul_(hidden.up)
    return layer_norm_fwd(hidden.h, gate.inner_norm_weight, gate.inner_norm_bias, inner_eps)[0]


class HiddenGradients(NamedTuple):
    """Of up and gate, their biases and the inner norm; `inner`: the last layer's input. None: unwanted."""

    up: Tensor | None
    gate: Tensor | None
    inner: Tensor | None
    up_bias: Tensor | None
    gate_bias: Tensor | None
    inner_norm_weight: Tensor | None
    inner_norm_bias: Tensor | None


def hidden_bwd(
    g: Tensor,
    down_weight: Tensor,
    gate: Gate,
    hidden: Hidden,
    activation: str,
    *,
    want_layers: bool,
    want_sums: bool,
    want_norm: bool,
    want_inner: bool,
) -> HiddenGradients:
    """From g (M, D'), the gradient of what the last layer, down_weight (D', F), puts out."""
    if gate.inner_norm_weight is None:
        found = dgated_matmul(g, down_weight, hidden.up, hidden.gate, activation, want_sums, want_inner)
        return HiddenGradients(*found, None, None)
    parameters = gate.inner_norm_weight, gate.inner_norm_bias
    statistics, wants = (hidden.inner_mean, hidden.inner_rstd), dict(want_dx=want_layers, want_dparams=want_norm)
    inner = layer_norm_bwd(input_grad(g, down_weight), hidden.h, *parameters, *statistics, **wants, want_y=want_inner)
    dup = dgate = dup_bias = dgate_bias = None
    if want_layers:
        dup, dgate, _, dup_bias, dgate_bias = gated_bwd(inner.dres, hidden.up, hidden.gate, activation, want_sums)
    return HiddenGradients(dup, dgate, inner.y, dup_bias, dgate_bias, inner.dweight, inner.dbias)


def wanted(needs, below: bool) -> dict[str, bool]:
    """Arguments of hidden_bwd. below: whether the gradient of its input is needed."""
    sums, norm = needs.up_bias or needs.gate_bias, needs.inner_norm_weight or needs.inner_norm_bias
    layers = below or needs.up_weight or needs.gate_weight or sums
    return dict(want_layers=layers, want_sums=sums, want_norm=norm)


def layers_input_grad(found: HiddenGradients, gate: Gate) -> Tensor:
    """dx (M, D): one product, and onto it the other."""
    return input_grad(found.gate, as_matrix(gate.gate_weight), input_grad(found.up, as_matrix(gate.up_weight)))


class GatedNeeds(NamedTuple):
    """Which gradients of a gated MLP are needed."""

    x: bool
    up_weight: bool
    up_bias: bool
    gate_weight: bool
    gate_bias: bool
    inner_norm_weight: bool
    inner_norm_bias: bool
    down_weight: bool
    down_bias: bool


_TENSORS = f"Tensor x, {GATE}, Tensor down_weight, Tensor? down_bias"


@operation("gated_mlp", f"{_TENSORS}, str activation, float inner_eps, bool save", 6)
def _gated_mlp(x, *arguments):
    """(output (..., D'), Hidden), empty unless `save`; without an inner norm its last three are, always."""
    gate, (down_weight, down_bias, activation, inner_eps, save) = Gate(*arguments[:6]), arguments[6:]
    inner, hidden = hidden_fwd(as_matrix(x), gate, activation, inner_eps, save)
    out = linear(inner, as_matrix(down_weight), down_bias)
    return shaped(out, *x.shape[:-1], down_weight.shape[0]), *filled(x, *(hidden if save else [None] * 5))


@_gated_mlp.register_fake
def _(x, *arguments):
    gate, (down_weight, *_, save) = Gate(*arguments[:6]), arguments[6:]
    hidden = fake_hidden(x, gate) if save else [None] * 5
    return x.new_empty(*x.shape[:-1], down_weight.shape[0]), *filled(x, *hidden)


@operation("gated_mlp_bwd", f"Tensor dout, {_TENSORS}, {HIDDEN}, str activation, float inner_eps, bool[] needs", 9)
def _gated_mlp_bwd(dout, x, *arguments):
    """The gradients that GatedNeeds names; empty where not needed."""
    gate, (down_weight, _), hidden = Gate(*arguments[:6]), arguments[6:8], Hidden(*arguments[8:13])
    activation, inner_eps, needs = arguments[13:]
    needs, g, rows, dtype = GatedNeeds(*needs), as_matrix(dout), as_matrix(x), x.dtype
    wants, grads, inner = wanted(needs, needs.x), {}, None
    if any(wants.values()):
        found = hidden_bwd(g, as_matrix(down_weight), gate, hidden, activation, **wants, want_inner=needs.down_weight)
        inner = found.inner
        grads.update(x=layers_input_grad(found, gate).view(x.shape) if needs.x else None)
        grads.update(up_weight=weight_grad(found.up, rows) if needs.up_weight else None)
        grads.update(gate_weight=weight_grad(found.gate, rows) if needs.gate_weight else None)
        grads.update(up_bias=as_dtype(found.up_bias, dtype), gate_bias=as_dtype(found.gate_bias, dtype))
        grads.update(inner_norm_weight=found.inner_norm_weight, inner_norm_bias=found.inner_norm_bias)
    if needs.down_weight:
        inner = again(gate, hidden, activation, inner_eps) if inner is None else inner
        grads.update(down_weight=weight_grad(g, inner))
    if needs.down_bias:
        grads.update(down_bias=as_dtype(scale_rows(g, None, None, 1, want_scaled=False)[1], dtype))
    return filled(x, *chosen([grads.get(name) for name in needs._fields], needs))


differentiable(_gated_mlp, _gated_mlp_bwd, "gated_mlp", GatedNeeds)


def check_gate(
    op: str,
    hidden: int,
    width: int,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    inner_norm_weight: Tensor | None,
    inner_norm_bias: Tensor | None,
    inner_eps: float,
) -> float:
    """inner_eps, as Python's number. Raises for a gate (F, D) and an inner norm (F,) of other shapes."""
    check_tensors(op, gate_weight=gate_weight)
    check_shape(op, "gate_weight", gate_weight, (hidden, width))
    check_shape(op, "gate_bias", gate_bias, (hidden,))
    check_shape(op, "inner_norm_weight", inner_norm_weight, (hidden,))
    check_shape(op, "inner_norm_bias", inner_norm_bias, (hidden,))
    if inner_norm_weight is None and inner_norm_bias is not None:
        raise ValueError(f"{op}: inner_norm_bias needs an inner_norm_weight, without which there is no inner norm")
    return check_eps(op, inner_eps, "inner_eps")


def inner_unsupported(gate: Gate) -> str | None:
    """Why no kernel computes the inner norm; None where one does, or there is none."""
    reason = None if gate.inner_norm_weight is None else width_unsupported(gate.up_weight.shape[0])
    return reason and f"inner norm: {reason}"


@autocasts
def gated_mlp(
    x: Tensor,
    up_weight: Tensor,
    up_bias: Tensor | None,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None,
    *,
    activation: str = "silu",
    inner_norm_weight: Tensor | None = None,
    inner_norm_bias: Tensor | None = None,
    inner_eps: float = 1e-6,
) -> Tensor:
    """down(inner_norm(activation(gate(x)) * up(x))).

    x (..., D); up_weight, gate_weight (F, D), also halves of one (2F, D); down_weight (D', F); biases may be None.
    activation: "silu" for SwiGLU, "gelu" for GeGLU, or another of linear_gelu's. The inner norm, LayerNorm (EVA-02),
    is there where its weight (F,) is given. Returns (..., D').
    """
    op = "gated_mlp"
    check_linear(op, x, up_weight, up_bias, "up_")
    (hidden, width), inner = up_weight.shape, (inner_norm_weight, inner_norm_bias)
    inner_eps = check_gate(op, hidden, width, gate_weight, gate_bias, *inner, inner_eps)
    check_tensors(op, down_weight=down_weight)
    check_shape(op, "down_weight", down_weight, (None, hidden))
    check_shape(op, "down_bias", down_bias, (down_weight.shape[0],))
    tensors = dict(gate_weight=gate_weight, gate_bias=gate_bias, down_weight=down_weight, down_bias=down_bias)
    check_same(op, "x", x, **tensors)
    check_norm(op, x, inner_norm_weight=inner_norm_weight, inner_norm_bias=inner_norm_bias)
    check_activation(op, activation)
    gate = Gate(up_weight, up_bias, gate_weight, gate_bias, *inner)
    if kernels_wanted(op, x, inner_unsupported(gate)):
        save = needs_grad(x, *gate, down_weight, down_bias)
        return _gated_mlp(x, *gate, down_weight, down_bias, activation, inner_eps, save)[0]
    options = dict(inner_norm_weight=inner_norm_weight, inner_norm_bias=inner_norm_bias, inner_eps=inner_eps)
    return ref.gated_mlp(x, up_weight, up_bias, *tensors.values(), activation=activation, **options)
