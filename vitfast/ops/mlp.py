"""MLPs, plain and gated, and their first layer alone.

    linear_gelu: activation(fc1(x))
    mlp:         fc2(activation(fc1(x)))
    gated_mlp:   down(inner_norm(activation(gate(x)) * up(x)))

Gated MLPs (Shazeer, 2020) are SwiGLU with "silu" and GeGLU with "gelu". A plain MLP is one without `up`: "in" is fc1 or
gate, whose output, the pre-activation, the activation takes; "out" is fc2 or down. Kept for backward: the inputs, and
what `in` and `up` put out; with an inner norm its input and statistics too. The activation is computed again where it
is needed. Passes over memory:

forward     one product reads x and writes up, pre (in training) and the last layer's input. With an inner norm: one
            more reads its input h and writes what the last layer reads.
backward    one product reads dout, up and pre, and writes dup, dpre, the last layer's input again and sums for both
            biases. The weight gradients read dout and that input, x and dup, x and dpre. dx is one product and, onto
            it, another. With an inner norm: a product from dout to dinner; a pass from dinner and h to dh and the
            norm's output again; one from dh, up and pre to dup, dpre and the sums.
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
    custom_op,
    one_activation,
    resized,
    tensors_of,
)
from .layer_norm import fake_statistics
from .layer_norm import unsupported_reason as width_unsupported

if NO_TRITON is None:
    from ..kernels.layer_norm.forward import layer_norm_bwd, layer_norm_fwd
    from ..kernels.matmul.activations import activated
    from ..kernels.matmul.gated import dgated_matmul, gated_bwd, gated_linear
    from ..kernels.matmul.linear import input_grad, linear
    from ..kernels.matmul.mlp import dgelu_matmul, gelu_bwd
    from ..kernels.matmul.mlp import linear_gelu as linear_gelu_fwd
    from ..kernels.matmul.weight_grad import weight_grad
    from ..kernels.rows import scale_rows

# activation(x W^T + b)


class _Linear(NamedTuple):
    """The arguments of linear_gelu."""

    x: Tensor  # (..., D)
    weight: Tensor  # (F, D)
    bias: Tensor | None  # (F,)
    activation: str
    save: bool


class _Pre(NamedTuple):
    """Kept for backward."""

    pre: Tensor | None  # (M, F)


def _linear_forward(t: _Linear) -> tuple[Tensor, _Pre]:
    act, pre = linear_gelu_fwd(as_matrix(t.x), as_matrix(t.weight), t.bias, t.activation, t.save)
    return resized(act, *t.x.shape[:-1], t.weight.shape[0]), _Pre(pre if t.save else None)


def _linear_fake(t: _Linear) -> tuple[Tensor, _Pre]:
    width = t.weight.shape[0]
    pre = t.x.new_empty(math.prod(t.x.shape[:-1]), width) if t.save else None
    return t.x.new_empty(*t.x.shape[:-1], width), _Pre(pre)


def _linear_backward(dact: Tensor, t: _Linear, saved: _Pre, needs: _Linear) -> dict[str, Tensor | None]:
    dpre, dbias = gelu_bwd(as_matrix(dact), saved.pre, t.activation, needs.bias)
    dx = input_grad(dpre, as_matrix(t.weight)).view(t.x.shape) if needs.x else None
    dweight = weight_grad(dpre, as_matrix(t.x)) if needs.weight else None
    return dict(x=dx, weight=dweight, bias=as_dtype(dbias, t.x.dtype))


_linear_gelu = custom_op(
    "linear_gelu", _Linear, _Pre, forward=_linear_forward, fake=_linear_fake, backward=_linear_backward
)


# All that stands before the last layer of an MLP


class Hidden(NamedTuple):
    """The layers before the last one, and what is between them."""

    in_weight: Tensor  # (F, D), fc1 or gate
    in_bias: Tensor | None  # (F,)
    up_weight: Tensor | None = None  # (F, D), as the rest of a gated MLP alone
    up_bias: Tensor | None = None  # (F,)
    inner_norm_weight: Tensor | None = None  # (F,)
    inner_norm_bias: Tensor | None = None  # (F,)
    activation: str = "gelu"
    inner_eps: float = 0.0

    @property
    def unsupported(self) -> str | None:
        """Why no kernel computes the inner norm; None where one does, or there is none."""
        reason = None if self.inner_norm_weight is None else width_unsupported(self.in_weight.shape[0])
        return reason and f"inner norm: {reason}"


class HiddenSaved(NamedTuple):
    """Kept for backward."""

    pre: Tensor | None = None  # (M, F)
    up: Tensor | None = None  # (M, F), of a gated MLP
    inner_h: Tensor | None = None  # (M, F), as the rest with an inner norm alone
    inner_mean: Tensor | None = None  # (M,) in fp32
    inner_rstd: Tensor | None = None  # (M,) in fp32


def hidden_fwd(x: Tensor, t: Hidden, save: bool) -> tuple[Tensor, HiddenSaved]:
    """(what the last layer reads, (M, F); what backward needs): x (M, D)."""
    in_weight, up_weight = as_matrix(t.in_weight), as_matrix(t.up_weight)
    if up_weight is None:
        act, pre = linear_gelu_fwd(x, in_weight, t.in_bias, t.activation, save)
        return act, HiddenSaved(pre) if save else HiddenSaved()
    h, up, pre = gated_linear(x, up_weight, t.up_bias, in_weight, t.in_bias, t.activation, save)
    saved = HiddenSaved(pre, up) if save else HiddenSaved()
    if t.inner_norm_weight is None:
        return h, saved
    inner, mean, rstd = layer_norm_fwd(h, t.inner_norm_weight, t.inner_norm_bias, t.inner_eps)
    return inner, HiddenSaved(pre, up, h, mean, rstd) if save else saved


def fake_hidden(x: Tensor, t: Hidden) -> HiddenSaved:
    """The fake of what backward needs; x: of as many rows."""
    pre, up, h = (t.in_weight.new_empty(math.prod(x.shape[:-1]), t.in_weight.shape[0]) for _ in range(3))
    norm = (None,) * 3 if t.inner_norm_weight is None else (h, *fake_statistics(x))
    return HiddenSaved(pre, None if t.up_weight is None else up, *norm)


def recompute_inner(t: Hidden, saved: HiddenSaved) -> Tensor:
    """The input of the last layer, once more."""
    if t.inner_norm_weight is not None:
        return layer_norm_fwd(saved.inner_h, t.inner_norm_weight, t.inner_norm_bias, t.inner_eps)[0]
    act = activated(saved.pre, t.activation)
    return act if saved.up is None else act.mul_(saved.up)


class HiddenGradients(NamedTuple):
    """Gradients of the layers' outputs and of vectors; the last layer's input. None: not wanted."""

    pre: Tensor | None = None  # (M, F)
    up: Tensor | None = None  # (M, F)
    inner: Tensor | None = None  # (M, F), the last layer's input
    in_bias: Tensor | None = None
    up_bias: Tensor | None = None
    inner_norm_weight: Tensor | None = None
    inner_norm_bias: Tensor | None = None


def needs_layers(needs: Hidden) -> bool:
    """Whether a gradient of the layers themselves is needed."""
    return needs.in_weight or needs.in_bias or needs.up_weight or needs.up_bias


def needs_hidden(needs: Hidden) -> bool:
    """Whether any gradient of what stands before the last layer is needed."""
    return needs_layers(needs) or needs.inner_norm_weight or needs.inner_norm_bias


def hidden_bwd(
    g: Tensor, out_weight: Tensor, t: Hidden, saved: HiddenSaved, needs: Hidden, below: bool, want_inner: bool
) -> HiddenGradients:
    """From g (M, D'), the gradient of what the last layer, out_weight (D', F), puts out.

    below: whether the gradient of the layers' input is needed.
    """
    want_sums = needs.in_bias or needs.up_bias
    if t.up_weight is None:
        dpre, inner, dbias = dgelu_matmul(g, out_weight, saved.pre, t.activation, want_sums, want_act=want_inner)
        return HiddenGradients(dpre, None, inner if want_inner else None, dbias)
    if t.inner_norm_weight is None:
        dup, dpre, inner, up_bias, in_bias = dgated_matmul(
            g, out_weight, saved.up, saved.pre, t.activation, want_sums, want_inner
        )
        return HiddenGradients(dpre, dup, inner, in_bias, up_bias)
    want_layers, want_norm = below or needs_layers(needs), needs.inner_norm_weight or needs.inner_norm_bias
    inner = layer_norm_bwd(
        input_grad(g, out_weight),
        saved.inner_h,
        t.inner_norm_weight,
        t.inner_norm_bias,
        saved.inner_mean,
        saved.inner_rstd,
        want_dx=want_layers,
        want_dparams=want_norm,
        want_y=want_inner,
    )
    dup = dpre = up_bias = in_bias = None
    if want_layers:
        dup, dpre, _, up_bias, in_bias = gated_bwd(inner.dres, saved.up, saved.pre, t.activation, want_sums)
    return HiddenGradients(dpre, dup, inner.y, in_bias, up_bias, inner.dweight, inner.dbias)


def hidden_input_grad(found: HiddenGradients, t: Hidden) -> Tensor:
    """dx (M, D): one product, and of a gated MLP another before it, which it is added onto."""
    dx = None if found.up is None else input_grad(found.up, as_matrix(t.up_weight))
    return input_grad(found.pre, as_matrix(t.in_weight), dx)


def hidden_gradients(found: HiddenGradients, x: Tensor | None, t: Hidden, needs: Hidden) -> dict[str, Tensor | None]:
    """Gradients of Hidden's tensors by name; x (M, D): what the layers read, for their weights."""
    dtype = t.in_weight.dtype
    return dict(
        up_weight=weight_grad(found.up, x, out_dtype=dtype) if needs.up_weight else None,
        in_weight=weight_grad(found.pre, x, out_dtype=dtype) if needs.in_weight else None,
        in_bias=as_dtype(found.in_bias, dtype),
        up_bias=as_dtype(found.up_bias, dtype),
        inner_norm_weight=found.inner_norm_weight,
        inner_norm_bias=found.inner_norm_bias,
    )


# out(hidden(x))


class _Mlp(NamedTuple):
    """The arguments of mlp and gated_mlp."""

    x: Tensor  # (..., D)
    hidden: Hidden
    out_weight: Tensor  # (D', F)
    out_bias: Tensor | None  # (D',)
    save: bool


def _mlp_forward(t: _Mlp) -> tuple[Tensor, HiddenSaved]:
    inner, saved = hidden_fwd(as_matrix(t.x), t.hidden, t.save)
    out = linear(inner, as_matrix(t.out_weight), t.out_bias)
    return resized(out, *t.x.shape[:-1], t.out_weight.shape[0]), saved


def _mlp_fake(t: _Mlp) -> tuple[Tensor, HiddenSaved]:
    saved = fake_hidden(t.x, t.hidden) if t.save else HiddenSaved()
    return t.x.new_empty(*t.x.shape[:-1], t.out_weight.shape[0]), saved


def _mlp_backward(dout: Tensor, t: _Mlp, saved: HiddenSaved, needs: _Mlp) -> dict[str, Tensor | None]:
    g, grads, inner = as_matrix(dout), {}, None
    if needs.x or needs_hidden(needs.hidden):
        wants = needs.hidden, needs.x, needs.out_weight
        found = hidden_bwd(g, as_matrix(t.out_weight), t.hidden, saved, *wants)
        inner = found.inner
        grads = dict(x=hidden_input_grad(found, t.hidden).view(t.x.shape) if needs.x else None)
        grads |= hidden_gradients(found, as_matrix(t.x), t.hidden, needs.hidden)
    if needs.out_weight:
        inner = recompute_inner(t.hidden, saved) if inner is None else inner
        grads |= dict(out_weight=weight_grad(g, inner))
    if needs.out_bias:
        grads |= dict(out_bias=as_dtype(scale_rows(g, None, None, 1, want_scaled=False)[1], t.x.dtype))
    return grads


_mlp, _gated_mlp = (
    custom_op(name, _Mlp, HiddenSaved, forward=_mlp_forward, fake=_mlp_fake, backward=_mlp_backward)
    for name in ("mlp", "gated_mlp")
)


def check_gate(op: str, t: Hidden) -> Hidden:
    """t with inner_eps as Python's number. Raises for a gate or an inner norm of other shapes than up's."""
    hidden = t.up_weight.shape[0]
    check_tensors(op, gate_weight=t.in_weight)
    check_shape(op, "gate_weight", t.in_weight, tuple(t.up_weight.shape))
    check_shape(op, "gate_bias", t.in_bias, (hidden,))
    check_shape(op, "inner_norm_weight", t.inner_norm_weight, (hidden,))
    check_shape(op, "inner_norm_bias", t.inner_norm_bias, (hidden,))
    if t.inner_norm_weight is None and t.inner_norm_bias is not None:
        raise ValueError(f"{op}: inner_norm_bias needs an inner_norm_weight, without which there is no inner norm")
    check_activation(op, t.activation)
    return t._replace(inner_eps=check_eps(op, t.inner_eps, "inner_eps"))


# The public operations


@autocasts
def linear_gelu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None = None,
    approximate: str | None = None,
) -> Tensor:
    """activation(x W^T + b), GELU unless another is named.

    x (..., D); weight (F, D); bias (F,) or None. Returns (..., F). activation: "gelu" (by erf; the default),
    "gelu_tanh", "quick_gelu" (x sigmoid(1.702 x)) or "silu" (x sigmoid(x)). approximate: torch's word for the first
    two, "none" or "tanh"; a ValueError where it contradicts activation.
    """
    check_linear("linear_gelu", x, weight, bias)
    activation = one_activation("linear_gelu", activation, approximate)
    if kernels_wanted("linear_gelu", x):
        return _linear_gelu(_Linear(x, weight, bias, activation, needs_grad(x, weight, bias)))[0]
    return ref.linear_gelu(x, weight, bias, activation=activation)


@autocasts
def mlp(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    *,
    activation: str | None = None,
    approximate: str | None = None,
) -> Tensor:
    """activation(x W1^T + b1) W2^T + b2, activation and approximate as in linear_gelu.

    x (..., D); fc1_weight (F, D); fc2_weight (D', F). Returns (..., D').
    """
    check_linear("mlp", x, fc1_weight, fc1_bias, "fc1_")
    check_tensors("mlp", fc2_weight=fc2_weight)
    check_shape("mlp", "fc2_weight", fc2_weight, (None, fc1_weight.shape[0]))
    check_shape("mlp", "fc2_bias", fc2_bias, (fc2_weight.shape[0],))
    check_same("mlp", "x", x, fc2_weight=fc2_weight, fc2_bias=fc2_bias)
    activation = one_activation("mlp", activation, approximate)
    if kernels_wanted("mlp", x):
        t = _Mlp(x, Hidden(fc1_weight, fc1_bias, activation=activation), fc2_weight, fc2_bias, save=True)
        return _mlp(t._replace(save=needs_grad(*tensors_of(t))))[0]
    return ref.mlp(x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, activation=activation)


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
    inner = inner_norm_weight, inner_norm_bias
    hidden = check_gate(op, Hidden(gate_weight, gate_bias, up_weight, up_bias, *inner, activation, inner_eps))
    check_tensors(op, down_weight=down_weight)
    check_shape(op, "down_weight", down_weight, (None, up_weight.shape[0]))
    check_shape(op, "down_bias", down_bias, (down_weight.shape[0],))
    tensors = dict(gate_weight=gate_weight, gate_bias=gate_bias, down_weight=down_weight, down_bias=down_bias)
    check_same(op, "x", x, **tensors)
    check_norm(op, x, inner_norm_weight=inner_norm_weight, inner_norm_bias=inner_norm_bias)
    if kernels_wanted(op, x, hidden.unsupported):
        t = _Mlp(x, hidden, down_weight, down_bias, save=True)
        return _gated_mlp(t._replace(save=needs_grad(*tensors_of(t))))[0]
    options = dict(inner_norm_weight=inner_norm_weight, inner_norm_bias=inner_norm_bias, inner_eps=hidden.inner_eps)
    return ref.gated_mlp(x, up_weight, up_bias, *tensors.values(), activation=activation, **options)
