"""The launchers of products, with their epilogues, for launchers.py."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ...kernels.matmul import gated, linear, mlp, weight_grad
from ...kernels.rows import column_sums
from ...ops import reference as ref
from .draw import Draw, Sizes
from .launcher import Launcher, gradients, wide

SPLITS = 7  # slices of a weight gradient that are added up


def activated(activation: str, *pre: Tensor) -> Tensor:
    """act(pre), or for two, up and gate, act(gate) * up."""
    h = ref.ACTIVATIONS[activation](pre[-1])
    return h if len(pre) == 1 else h * pre[0]


def activation_backward(dh: Tensor, *pre: Tensor, activation: str, want_h: bool = False) -> tuple[Tensor, ...]:
    """The gradients of the pre-activations, h where it is wanted, and the gradients' column sums."""
    found = gradients(lambda *pre: activated(activation, *pre), pre, dh)
    h = activated(activation, *pre) if want_h else None
    return *found, h, *(t.sum(0, dtype=wide(t)) for t in found)


def gelu_and_slope(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """gelu(pre) and gelu'(pre) of pre = x W^T + b."""
    pre = F.linear(x, weight, bias)
    return F.gelu(pre), *gradients(F.gelu, (pre,), torch.ones_like(pre))


def times_slope(dact: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """dact times the slope, and its column sums."""
    dpre = dact * slope
    return dpre, dpre.sum(0, dtype=wide(dpre))


def added_up(found: tuple, count: int = 1) -> tuple:
    """The results of a backward, with the sums of the workspaces that are the last `count` of them."""
    return *found[:-count], *column_sums(found[-1], found[-count:])


def products(s: Sizes) -> dict[str, Launcher]:
    """The linear layers of an encoder layer, forward and backward."""
    m, d, f = s.rows, s.width, s.hidden
    weights = {"fc2": (d, f), "fc1": (f, d), "qkv": (3 * d, d), "proj": (d, d)}  # (outputs, inputs)

    def layer(t: Draw, out: int, inner: int) -> tuple:
        return t.values(m, inner), t.weight(out, inner), t.values(out)

    def with_activation(count: int, activation: str, save: str | bool, variant: bool) -> tuple[Launcher, Launcher]:
        """Forward and backward of one layer and its activation, or of two layers, up and gate."""
        launcher, backward = ((mlp.linear_gelu, mlp.dgelu_matmul), (gated.gated_linear, gated.dgated_matmul))[count - 1]

        def make(t: Draw) -> tuple:
            return t.values(m, d), *(tensor for _ in range(count) for tensor in (t.weight(f, d), t.values(f)))

        def formula(x, *parameters):
            pre = tuple(F.linear(x, w, b) for w, b in zip(parameters[::2], parameters[1::2]))
            return activated(activation, *pre), *(pre if save else ())

        forward = Launcher(make, lambda *t: launcher(*t, activation, save), formula, variant)
        return forward, Launcher(
            lambda t: (t.values(m, d), t.weight(d, f), *(t.values(m, f) for _ in range(count))),
            lambda *t: added_up(backward(*t, activation, True), count),
            lambda g, w, *pre: activation_backward(g @ w, *pre, activation=activation, want_h=True),
            variant,
        )

    found = {}
    for name, backward, count, activation, save in (
        ("linear + gelu", "dgelu", 1, "gelu", "pre"),
        ("linear + gelu, tanh, inference", "dgelu, tanh", 1, "gelu_tanh", ""),
        ("linear + quick_gelu", "dgelu, quick_gelu", 1, "quick_gelu", "pre"),
        ("linear + silu", "dgelu, silu", 1, "silu", "pre"),
        ("gated linear", "dgated", 2, "silu", True),
        ("gated linear, gelu, inference", "dgated, gelu", 2, "gelu", False),
    ):
        variant = backward not in ("dgelu", "dgated")
        found[name], found[backward] = with_activation(count, activation, save, variant)
    found["dgelu, act kept"] = Launcher(
        lambda t: (t.values(m, d), t.weight(d, f), t.values(m, f)),
        lambda *t: added_up(mlp.dgelu_matmul(*t, "gelu", True, want_act=False)),
        lambda g, w, pre: activation_backward(g @ w, pre, activation="gelu", want_h=False),
        variant=True,
    )
    found["linear + gelu, slope kept"] = Launcher(
        lambda t: layer(t, f, d), lambda *t: mlp.linear_gelu(*t, "gelu", "slope"), gelu_and_slope, variant=True
    )
    found["dgelu, from the slope"] = Launcher(
        lambda t: (t.values(m, d), t.weight(d, f), t.values(m, f)),
        lambda *t: added_up(mlp.dgelu_matmul(*t, "slope", True, want_act=False)),
        lambda g, w, slope: times_slope(g @ w, slope),
        variant=True,
    )
    for name, (out, inner) in weights.items():
        found[f"weight gradient, {name}"] = Launcher(
            lambda t, out=out, inner=inner: (t.values(m, out), t.values(m, inner)),
            weight_grad.weight_grad,
            lambda g, x: g.t() @ x,
        )
    for name in ("fc1", "qkv", "proj"):  # fc2's input gradient is part of dgelu
        found[f"input gradient, {name}"] = Launcher(
            lambda t, size=weights[name]: (t.values(m, size[0]), t.weight(*size)), linear.input_grad, lambda g, w: g @ w
        )
    for name in ("fc2", "proj"):
        found[f"linear + residual, {name}"] = Launcher(
            lambda t, size=weights[name]: (*layer(t, *size), t.values(m, size[0])),
            lambda *t: linear.linear_residual(*t, None, None, s.tokens),
            ref.linear_residual,
        )
    found["linear, qkv"] = Launcher(lambda t: layer(t, *weights["qkv"]), linear.linear, F.linear)
    for name, (out, inner) in weights.items():
        found[f"weight gradient, {name}, sum"] = Launcher(
            lambda t, out=out, inner=inner: (t.workspace(SPLITS, out, inner), t.values(0)),
            lambda slices, like: weight_grad.sum_products(slices, None, like.dtype),
            lambda slices, like: slices.sum(0),
        )
    # These run after a product by another provider.
    found["gelu"] = Launcher(lambda t: (t.values(m, f),), lambda pre: mlp.gelu(pre, "gelu"), F.gelu)
    for name, count, launcher, activation in (
        ("gelu backward", 1, mlp.gelu_bwd, "gelu"),
        ("gated backward", 2, gated.gated_bwd, "silu"),
    ):
        found[name] = Launcher(
            lambda t, count=count: tuple(t.values(m, f) for _ in range(1 + count)),
            lambda *t, count=count, launcher=launcher, act=activation: added_up(launcher(*t, act, True), count),
            lambda *t, activation=activation: activation_backward(*t, activation=activation),
        )
    return found | _with_factors(s)


def _with_factors(s: Sizes) -> dict[str, Launcher]:
    """Launchers with a layer scale and drop path."""
    m, d, f = s.rows, s.width, s.hidden

    def weight_gradient(g, x, w, ls):
        product = g.t() @ x
        product = product.to(wide(product))
        return (ls[:, None] * product).to(g.dtype), (product * w).sum(1)

    def fp32_stream(t: Draw) -> tuple:
        layer, res = (t.values(m, d), t.weight(d, d), t.values(d)), t.values(m, d, dtype=torch.float32)
        return *layer, res, t.values(d), t.factors(s.batch)

    def linear_residual(x, w, b, res, ls, drop):
        x, res = (t.view(s.batch, s.tokens, d) for t in (x, res))
        return ref.linear_residual(x, w, b, res, layer_scale=ls, drop_path=drop).view(m, d)

    return {
        "weight gradient, layer scale": Launcher(
            lambda t: (t.values(m, d), t.values(m, f), t.weight(d, f), t.values(d)),
            weight_grad.weight_grad_scaled,
            weight_gradient,
            variant=True,
        ),
        "linear + residual, factors, fp32 stream": Launcher(
            fp32_stream, lambda *t: linear.linear_residual(*t, s.tokens), linear_residual, variant=True
        ),
    }
