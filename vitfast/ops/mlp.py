"""MLPs, plain and gated, and the first layer of a plain one: here an MLP without a last layer.

    linear_gelu: activation(fc1(x))
    mlp:         fc2(activation(fc1(x)))
    gated_mlp:   down(inner_norm(activation(gate(x)) * up(x)))

Gated MLPs (Shazeer, 2020) are SwiGLU with "silu" and GeGLU with "gelu". A plain MLP is one without `up`. "in" is fc1 or
gate, whose output is the pre-activation `pre`; "out" is fc2 or down. Kept for backward are the inputs and the outputs
of `in` and `up`; with an inner norm its input and statistics too. The activation is computed again where it is needed.
Passes over memory:

forward     One product reads x and writes up and pre (in training) and the last layer's input. With an inner norm, that
            product writes the norm's input h, and one more pass writes the last layer's input.
backward    One product reads dout, up and pre, and writes dup, dpre, the last layer's input again and sums for both
            biases. The weight gradients read dout and that input, x and dup, x and dpre. dx is one product, and a
            second is added onto it. With an inner norm, a product makes dinner from dout; a pass makes dh and the
            norm's output again from dinner and h; and one makes dup, dpre and the sums from dh, up and pre.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import Activation
from . import checks as check
from . import reference as ref
from .blocks import bias_gradients
from .dispatch import NO_TRITON, autocasts, kernels_wanted, routed
from .layer_norm import fake_statistics, width_unsupported
from .operation import as_matrix, custom_op, flat, needs_grad, resized

if NO_TRITON is None:
    from ..kernels.layer_norm.backward import layer_norm_bwd
    from ..kernels.layer_norm.forward import layer_norm_fwd
    from ..kernels.matmul.gated import dgated_matmul, gated_bwd, gated_linear
    from ..kernels.matmul.linear import input_grad, linear
    from ..kernels.matmul.mlp import dgelu_matmul, gelu, gelu_bwd
    from ..kernels.matmul.mlp import linear_gelu as linear_gelu_fwd
    from ..kernels.rows import scale_rows

Approximate = Literal["none", "tanh"]  # the kinds of GELU, in torch's words


class HiddenSaved(NamedTuple):
    """Kept for backward."""

    pre: Tensor | None = None  # (M, F); or the activation's slope there, as a fused block may choose
    up: Tensor | None = None  # (M, F), for a gated MLP only
    inner_h: Tensor | None = None  # (M, F); this and the next two are for an inner norm only
    inner_mean: Tensor | None = None  # (M,) in fp32
    inner_rstd: Tensor | None = None  # (M,) in fp32


Slopes = tuple[Tensor | None, Tensor | None]  # the gradients of pre and up, (M, F), None if not wanted


class Hidden(NamedTuple):
    """The parameters and options of all before the last layer, and what kernels compute of them."""

    in_weight: Tensor  # (F, D), fc1 or gate
    in_bias: Tensor | None  # (F,)
    up_weight: Tensor | None = None  # (F, D); this and the next three are for a gated MLP only
    up_bias: Tensor | None = None  # (F,)
    inner_norm_weight: Tensor | None = None  # (F,)
    inner_norm_bias: Tensor | None = None  # (F,)
    activation: str = "gelu"
    inner_eps: float = 0.0

    @property
    def options(self) -> dict:
        """Keyword arguments of ref.mlp and ref.gated_mlp."""
        if self.up_weight is None:
            return dict(activation=self.activation)
        inner = dict(inner_norm_weight=self.inner_norm_weight, inner_norm_bias=self.inner_norm_bias)
        return dict(activation=self.activation, inner_eps=self.inner_eps, **inner)

    @property
    def unsupported(self) -> str | None:
        """Why no kernel computes the inner norm; None where one does, or there is none."""
        reason = None if self.inner_norm_weight is None else width_unsupported(self.in_weight.shape[0])
        return reason and f"inner norm: {reason}"

    def forward(self, x: Tensor, save: str) -> tuple[Tensor, HiddenSaved]:
        """(the last layer's input (M, F), the tensors kept for backward) for x (M, D).

        save: "pre"; of a plain MLP "slope", which keeps the activation's slope in place of `pre`; or "" for nothing.
        """
        in_weight, up_weight = as_matrix(self.in_weight), as_matrix(self.up_weight)
        if up_weight is None:
            act, pre = linear_gelu_fwd(x, in_weight, self.in_bias, self.activation, save)
            return act, HiddenSaved(pre) if save else HiddenSaved()
        h, up, pre = gated_linear(x, up_weight, self.up_bias, in_weight, self.in_bias, self.activation, bool(save))
        saved = HiddenSaved(pre, up) if save else HiddenSaved()
        if self.inner_norm_weight is None:
            return h, saved
        inner, mean, rstd = layer_norm_fwd(h, self.inner_norm_weight, self.inner_norm_bias, self.inner_eps)
        return inner, HiddenSaved(pre, up, h, mean, rstd) if save else saved

    def fake(self, x: Tensor) -> HiddenSaved:
        """The fake of the tensors kept for backward; x gives the number of rows."""
        pre, up, h = (self.in_weight.new_empty(math.prod(x.shape[:-1]), self.in_weight.shape[0]) for _ in range(3))
        norm = (None,) * 3 if self.inner_norm_weight is None else (h, *fake_statistics(x))
        return HiddenSaved(pre, None if self.up_weight is None else up, *norm)

    def recompute(self, saved: HiddenSaved) -> Tensor:
        """The input of the last layer, once more."""
        if self.inner_norm_weight is not None:
            return layer_norm_fwd(saved.inner_h, self.inner_norm_weight, self.inner_norm_bias, self.inner_eps)[0]
        act = gelu(saved.pre, self.activation)
        return act if saved.up is None else act.mul_(saved.up)

    def backward(
        self, g: Tensor, out_weight: Tensor | None, saved: HiddenSaved, needs: "Hidden", below: bool, want_inner: bool
    ) -> tuple[Slopes, Tensor | None, dict[str, Tensor | None], dict[str, Tensor | None]]:
        """((dpre, dup), last layer's input (M, F), sums for bias_gradients, the norm's gradients by name).

        They are None if not wanted. g: the gradient (M, D') of the last layer's output; out_weight (D', F). Without a
        last layer out_weight is None, and g (M, F) is the gradient of what it would read. below: whether the gradient
        of the hidden layers' input is needed. want_inner: whether the last layer's input is.
        """
        want_sums = needs.in_bias or needs.up_bias
        options = self.activation, want_sums, want_inner
        if self.up_weight is None:
            if out_weight is None:
                dpre, inner, sums = gelu_bwd(g, saved.pre, *options)
            else:
                dpre, inner, sums = dgelu_matmul(g, out_weight, saved.pre, *options)
            return (dpre, None), inner, dict(in_bias=sums), {}
        if self.inner_norm_weight is None:
            dup, dpre, inner, *sums = dgated_matmul(g, out_weight, saved.up, saved.pre, *options)
            return (dpre, dup), inner, dict(zip(("up_bias", "in_bias"), sums)), {}
        want_layers = below or needs.in_weight or needs.in_bias or needs.up_weight or needs.up_bias
        want_norm = needs.inner_norm_weight or needs.inner_norm_bias
        norm = self.inner_norm_weight, self.inner_norm_bias, saved.inner_mean, saved.inner_rstd
        wants = dict(want_dx=want_layers, want_dparams=want_norm, want_y=want_inner)
        inner = layer_norm_bwd(input_grad(g, out_weight), saved.inner_h, *norm, **wants)
        dup, dpre, sums = None, None, ()
        if want_layers:
            dup, dpre, _, *sums = gated_bwd(inner.dres, saved.up, saved.pre, self.activation, want_sums)
        vectors = dict(inner_norm_weight=inner.dweight, inner_norm_bias=inner.dbias)
        return (dpre, dup), inner.y, dict(zip(("up_bias", "in_bias"), sums)), vectors

    def input_gradient(self, slopes: Slopes) -> Tensor:
        """dx (M, D): one product; for a gated MLP, a second one is added onto it."""
        dpre, dup = slopes
        dx = None if dup is None else input_grad(dup, as_matrix(self.up_weight))
        return input_grad(dpre, as_matrix(self.in_weight), dx)

    def weight_gradients(self, slopes: Slopes, x: Tensor | None, needs: "Hidden") -> dict[str, Tensor | None]:
        """Gradients of the weights by name; x (M, D) is the layers' input."""
        dpre, dup = slopes
        return dict(
            up_weight=torch.mm(dup.t(), x) if needs.up_weight else None,
            in_weight=torch.mm(dpre.t(), x) if needs.in_weight else None,
        )


class _Mlp(NamedTuple):
    """The arguments of linear_gelu, mlp and gated_mlp."""

    x: Tensor  # (..., D)
    hidden: Hidden
    out_weight: Tensor | None = None  # (D', F), not of linear_gelu
    out_bias: Tensor | None = None  # (D',)
    save: bool = True


def _forward(t: _Mlp) -> tuple[Tensor, HiddenSaved]:
    out, saved = t.hidden.forward(as_matrix(t.x), "pre" if t.save else "")
    if t.out_weight is not None:
        out = linear(out, as_matrix(t.out_weight), t.out_bias)
    return resized(out, *t.x.shape[:-1], out.shape[1]), saved


def _fake(t: _Mlp) -> tuple[Tensor, HiddenSaved]:
    last = t.hidden.in_weight if t.out_weight is None else t.out_weight
    return t.x.new_empty(*t.x.shape[:-1], last.shape[0]), t.hidden.fake(t.x) if t.save else HiddenSaved()


def _backward(dout: Tensor, t: _Mlp, saved: HiddenSaved, needs: _Mlp) -> dict[str, Tensor | None]:
    g, grads, inner = as_matrix(dout), {}, None
    if needs.x or any(needs.hidden):
        wants = needs.hidden, needs.x, needs.out_weight
        slopes, inner, sums, grads = t.hidden.backward(g, as_matrix(t.out_weight), saved, *wants)
        grads |= bias_gradients(sums, t.hidden.in_weight.dtype)
        if needs.x:
            grads |= dict(x=t.hidden.input_gradient(slopes).view(t.x.shape))
        grads |= t.hidden.weight_gradients(slopes, as_matrix(t.x), needs.hidden)
    if needs.out_weight:
        inner = t.hidden.recompute(saved) if inner is None else inner
        grads |= dict(out_weight=torch.mm(g.t(), inner))
    if needs.out_bias:
        grads |= dict(out_bias=scale_rows(g, None, None, 1, want_scaled=False)[1].to(t.x.dtype))
    return grads


_operations = {
    name: custom_op(name, _Mlp, HiddenSaved, forward=_forward, fake=_fake, backward=_backward)
    for name in ("linear_gelu", "mlp", "gated_mlp")
}


def _by_kernels(op: str, t: _Mlp) -> Tensor:
    return _operations[op](t._replace(save=needs_grad(*flat(t))))


def check_inner(op: str, t: Hidden) -> Hidden:
    """Checks the activation and the inner norm; returns t with inner_eps as a Python number."""
    parameters = dict(inner_norm_weight=t.inner_norm_weight, inner_norm_bias=t.inner_norm_bias)
    check.norm(op, t.in_weight, t.in_weight.shape[0], **parameters)
    if t.inner_norm_weight is None and t.inner_norm_bias is not None:
        raise ValueError(f"{op}: inner_norm_bias needs an inner_norm_weight, without which there is no inner norm")
    check.activation(op, t.activation)
    return t._replace(inner_eps=check.number(op, "inner_eps", t.inner_eps))


def one_activation(op: str, activation: str | None, approximate: str | None) -> str:
    """The activation's name, "gelu" unless given; approximate: torch's word for the kind of GELU."""
    if approximate not in (None, "none", "tanh"):
        raise ValueError(f"{op}: approximate must be 'none' (erf) or 'tanh', got {approximate!r}")
    named = "gelu_tanh" if approximate == "tanh" else "gelu"
    if activation is None:
        return named
    check.activation(op, activation)
    if approximate is not None and activation != named:
        clash = f"approximate={approximate!r} means activation={named!r}, and activation={activation!r} is given too"
        raise ValueError(f"{op}: {clash}; give one of the two")
    return activation


@autocasts()
@routed
def linear_gelu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: Activation | None = None,
    approximate: Approximate | None = None,
) -> Tensor:
    """A linear layer and an activation: activation(x W^T + b), by default GELU.

    x (..., D); weight (F, D); bias (F,) or None. Returns (..., F). activation: "gelu" (by erf; the default),
    "gelu_tanh", "quick_gelu" (x sigmoid(1.702 x)) or "silu" (x sigmoid(x)). approximate: PyTorch's name for the first
    two, "none" or "tanh". Raises ValueError if it contradicts activation.
    """
    check.linear("linear_gelu", x, weight, bias)
    activation = one_activation("linear_gelu", activation, approximate)
    if kernels_wanted("linear_gelu", x):
        return _by_kernels("linear_gelu", _Mlp(x, Hidden(weight, bias, activation=activation)))
    return ref.linear_gelu(x, weight, bias, activation=activation)


@autocasts()
@routed
def mlp(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    *,
    activation: Activation | None = None,
    approximate: Approximate | None = None,
) -> Tensor:
    """An MLP of two layers: activation(x W1^T + b1) W2^T + b2.

    x (..., D); fc1_weight (F, D); fc2_weight (D', F); biases may be None. activation and approximate are as in
    linear_gelu. Returns (..., D').
    """
    check.linear("mlp", x, fc1_weight, fc1_bias, "fc1_")
    check.linear("mlp", x, fc2_weight, fc2_bias, "fc2_", ("*", fc1_weight.shape[0]))
    activation = one_activation("mlp", activation, approximate)
    if kernels_wanted("mlp", x):
        return _by_kernels("mlp", _Mlp(x, Hidden(fc1_weight, fc1_bias, activation=activation), fc2_weight, fc2_bias))
    return ref.mlp(x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, activation=activation)


@autocasts()
@routed
def gated_mlp(
    x: Tensor,
    up_weight: Tensor,
    up_bias: Tensor | None,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None,
    *,
    activation: Activation = "silu",
    inner_norm_weight: Tensor | None = None,
    inner_norm_bias: Tensor | None = None,
    inner_eps: float = 1e-6,
) -> Tensor:
    """A gated MLP (Shazeer, 2020): down(inner_norm(activation(gate(x)) * up(x))).

    x (..., D); up_weight, gate_weight (F, D), also halves of one (2F, D); down_weight (D', F); biases may be None.
    activation: "silu" for SwiGLU, "gelu" for GeGLU, or another one of linear_gelu's. The inner norm is a LayerNorm
    (EVA-02); there is none unless its weight (F,) is given. Returns (..., D').
    """
    op, inner_norm = "gated_mlp", (inner_norm_weight, inner_norm_bias)
    check.linear(op, x, up_weight, up_bias, "up_")
    check.linear(op, x, gate_weight, gate_bias, "gate_", tuple(up_weight.shape))
    check.linear(op, x, down_weight, down_bias, "down_", ("*", up_weight.shape[0]))
    t = check_inner(op, Hidden(gate_weight, gate_bias, up_weight, up_bias, *inner_norm, activation, inner_eps))
    if kernels_wanted(op, x, t.unsupported):
        return _by_kernels(op, _Mlp(x, t, down_weight, down_bias))
    return ref.gated_mlp(x, up_weight, up_bias, gate_weight, gate_bias, down_weight, down_bias, **t.options)
