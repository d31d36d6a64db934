"""The launchers of products, with their epilogues, for launchers.py."""

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional as F

from ...kernels.dependent import MOST_ROWS
from ...kernels.matmul import few_rows, gated, gelu, linear, mlp, scaled
from ...kernels.rows import column_sums
from ...ops import reference as ref
from .draw import Draw, Sizes
from .launcher import EPS, Launcher, gradients, wide


def activated(activation: str, *pre: Tensor) -> Tensor:
    """act(pre), or for two, up and gate, act(gate) * up."""
    h = ref.ACTIVATIONS[activation](pre[-1])
    return h if len(pre) == 1 else h * pre[0]


def activation_backward(dh: Tensor, *pre: Tensor, activation: str, want_h: bool = False) -> tuple[Tensor, ...]:
    """The gradients of the pre-activations, h where it is wanted, and the gradients' column sums."""
    found = gradients(lambda *pre: activated(activation, *pre), pre, dh)
    h = activated(activation, *pre) if want_h else None
    return *found, h, *(t.sum(0, dtype=wide(t)) for t in found)


def added_up(found: tuple, count: int = 1) -> tuple:
    """The results of a backward, the last `count` of which, workspaces, are replaced by their sums."""
    return *found[:-count], *column_sums(found[-1], found[-count:])


def layer(t: Draw, rows: int, out: int, inner: int) -> tuple[Tensor, ...]:
    """The input, the weight and the bias of a linear layer."""
    return t.values(rows, inner), t.weight(out, inner), t.values(out)


def with_activation(s: Sizes, count: int, activation: str, save: str | bool) -> tuple[Launcher, Launcher]:
    """Forward and backward of one layer and its activation, or of two layers, up and gate."""
    m, d, f = s.rows, s.width, s.hidden
    launcher, backward = ((mlp.linear_gelu, mlp.dgelu_matmul), (gated.gated_linear, gated.dgated_matmul))[count - 1]

    def make(t: Draw) -> tuple:
        return t.values(m, d), *(tensor for _ in range(count) for tensor in (t.weight(f, d), t.values(f)))

    def formula(x, *parameters):
        pre = tuple(F.linear(x, w, b) for w, b in zip(parameters[::2], parameters[1::2]))
        return activated(activation, *pre), *(pre if save else ())

    return Launcher(make, lambda *t: launcher(*t, activation, save), formula), Launcher(
        lambda t: (t.values(m, d), t.weight(d, f), *(t.values(m, f) for _ in range(count))),
        lambda *t: added_up(backward(*t, activation, True), count),
        lambda g, w, *pre: activation_backward(g @ w, *pre, activation=activation, want_h=True),
    )


def scaled_weight_gradient(g: Tensor, x: Tensor, scale: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """dW and dscale of scale * x W^T, of which the product is not rounded."""
    product = g.t() @ x
    product = product.to(wide(product))
    return (scale[:, None] * product).to(g.dtype), (product * w).sum(1)


def products(s: Sizes) -> dict[str, Launcher]:
    """The linear layers of an encoder layer, forward and backward."""
    m, d, f = s.rows, s.width, s.hidden
    weights = {"fc2": (d, f), "fc1": (f, d), "qkv": (3 * d, d), "proj": (d, d)}  # (outputs, inputs)
    found = {}
    found["linear + gelu"], found["dgelu"] = with_activation(s, 1, "gelu", "pre")
    found["gated linear"], found["dgated"] = with_activation(s, 2, "silu", True)
    for name in ("fc1", "qkv", "proj"):  # fc2's input gradient is part of dgelu
        found[f"input gradient, {name}"] = Launcher(
            lambda t, size=weights[name]: (t.values(m, size[0]), t.weight(*size)), linear.input_grad, lambda g, w: g @ w
        )
    for name in ("fc2", "proj"):
        found[f"linear + residual, {name}"] = Launcher(
            lambda t, size=weights[name]: (*layer(t, m, *size), t.values(m, size[0])),
            lambda *t: linear.linear_residual(*t, None, None, s.tokens),
            ref.linear_residual,
        )
    found["linear, qkv"] = Launcher(lambda t: layer(t, m, *weights["qkv"]), linear.linear, F.linear)
    found["weight gradient, layer scale"] = Launcher(
        lambda t: (t.values(m, d), t.values(m, f), t.values(d), t.weight(d, f)),
        scaled.scaled_weight_grad,
        scaled_weight_gradient,
    )
    # These run after a product by another provider.
    found["gelu"] = Launcher(lambda t: (t.values(m, f),), lambda pre: gelu.gelu(pre, "gelu"), F.gelu)
    for name, count, launcher, activation in (
        ("gelu backward", 1, gelu.gelu_bwd, "gelu"),
        ("gated backward", 2, gated.gated_bwd, "silu"),
    ):
        found[name] = Launcher(
            lambda t, count=count: tuple(t.values(m, f) for _ in range(1 + count)),
            lambda *t, count=count, launcher=launcher, act=activation: added_up(launcher(*t, act, True), count),
            lambda *t, activation=activation: activation_backward(*t, activation=activation),
        )
    return found


def norm_linear(s: Sizes, count: int = 1, activation: str | None = None, rms: bool = False) -> Launcher:
    """A norm and one layer, or two, up and gate, of one image in evaluation.

    It has 16 bits, 1024 rows and a width of 1280, or for two layers 768, at most: the kernel takes no more.
    """
    m, d, f = min(s.tokens, MOST_ROWS), min(s.width, (1280, 768)[count - 1]), s.hidden if activation else 3 * s.width

    def make(t: Draw) -> tuple:
        t = _halves(t)
        layers = (tensor for _ in range(count) for tensor in (t.weight(f, d), t.values(f)))
        return t.values(m, d), t.values(d), None if rms else t.values(d), *layers

    def call(x, norm_weight, norm_bias, *layers):  # up, then gate, which the launcher takes first
        layers = *layers[-2:], *layers[:-2]
        return few_rows.norm_linear(x, norm_weight, norm_bias, EPS, *layers, rms=rms, activation=activation)

    def formula(x, norm_weight, norm_bias, *layers):
        h = ref.rms_norm(x, norm_weight, EPS) if rms else ref.layer_norm(x, norm_weight, norm_bias, EPS)
        pre = [F.linear(h, *layers[i : i + 2]) for i in range(0, len(layers), 2)]
        return activated(activation, *pre) if activation else pre[0]

    return Launcher(make, call, formula)


def _halves(t: Draw) -> Draw:
    return t if t.dtype.itemsize == 2 else dataclasses.replace(t, dtype=torch.bfloat16)


def split_linear(s: Sizes) -> Launcher:
    """A block's last layer, with layer scale, of one image in evaluation: 16 bits and 1024 rows at most."""
    m, d, f = min(s.tokens, MOST_ROWS), s.width, s.hidden

    def call(*tensors: Tensor) -> Tensor:
        return few_rows.split_linear(*tensors, few_rows.new_counters(tensors[0]).zero_())

    return Launcher(
        lambda t: (*layer(_halves(t), m, d, f), _halves(t).values(m, d), _halves(t).values(d)),
        call,
        lambda x, w, b, residual, scale: ref.linear_residual(x, w, b, residual, layer_scale=scale),
    )


def products_of_few_rows(s: Sizes) -> dict[str, Launcher]:
    """The products of an encoder layer and a head in evaluation, of one image."""
    return {
        "norm + linear": norm_linear(s),
        "norm + linear, gelu": norm_linear(s, 1, "gelu"),
        "norm + gated linear": norm_linear(s, 2, "silu"),
        "split linear": split_linear(s),
    }
