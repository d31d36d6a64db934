"""The launchers of products, with their epilogues, for launchers.py."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ...kernels.matmul import gated, linear, mlp, weight_grad
from ...ops import reference as ref
from .draw import Draw, Sizes
from .launcher import Launcher, gradients, wide

SPLITS = 7  # slices of a weight gradient that are added up


def gelu_backward(dy: Tensor, pre: Tensor, activation: str = "gelu") -> tuple[Tensor, Tensor]:
    """(dpre, its column sums)."""
    (dpre,) = gradients(ref.ACTIVATIONS[activation], (pre,), dy)
    return dpre, dpre.sum(0, dtype=wide(dpre))


def gated_backward(dh: Tensor, up: Tensor, gate: Tensor, activation: str, want_h: bool = True) -> tuple[Tensor, ...]:
    """(dup, dgate, h, the column sums of both)."""

    def product(up, gate):
        return ref.ACTIVATIONS[activation](gate) * up

    found = gradients(product, (up, gate), dh)
    return *found, *((product(up, gate),) if want_h else ()), *(t.sum(0, dtype=wide(t)) for t in found)


def products(s: Sizes) -> dict[str, Launcher]:
    """The linear layers of an encoder layer, forward and backward."""
    m, d, f = s.rows, s.width, s.hidden
    weights = {"fc2": (d, f), "fc1": (f, d), "qkv": (3 * d, d), "proj": (d, d)}  # (outputs, inputs)

    def layer(t: Draw, out: int, inner: int) -> tuple:
        return t.values(m, inner), t.weight(out, inner), t.values(out)

    def activated(activation: str, save: bool, variant: bool) -> tuple[Launcher, Launcher]:
        def formula(x, w, b):
            pre = F.linear(x, w, b)
            return ref.ACTIVATIONS[activation](pre), *((pre,) if save else ())

        def backward_formula(g, w2, pre):
            dpre, dbias = gelu_backward(g @ w2, pre, activation)
            return dpre, ref.ACTIVATIONS[activation](pre), dbias

        forward = Launcher(lambda t: layer(t, f, d), lambda *t: mlp.linear_gelu(*t, activation, save), formula, variant)
        return forward, Launcher(
            lambda t: (t.values(m, d), t.weight(d, f), t.values(m, f)),
            lambda *t: mlp.dgelu_matmul(*t, activation, True),
            backward_formula,
            variant,
        )

    def gated_by(activation: str, save: bool, variant: bool) -> tuple[Launcher, Launcher]:
        def formula(x, up_weight, up_bias, gate_weight, gate_bias):
            up, gate = F.linear(x, up_weight, up_bias), F.linear(x, gate_weight, gate_bias)
            return ref.ACTIVATIONS[activation](gate) * up, *((up, gate) if save else ())

        forward = Launcher(
            lambda t: (*layer(t, f, d), *layer(t, f, d)[1:]),
            lambda *t: gated.gated_linear(*t, activation, save),
            formula,
            variant,
        )
        return forward, Launcher(
            lambda t: (t.values(m, d), t.weight(d, f), t.values(m, f), t.values(m, f)),
            lambda *t: gated.dgated_matmul(*t, activation, True),
            lambda g, w, up, gate: gated_backward(g @ w, up, gate, activation),
            variant,
        )

    found = {}
    for name, backward, build, activation, save in (
        ("linear + gelu", "dgelu", activated, "gelu", True),
        ("linear + gelu, tanh, inference", "dgelu, tanh", activated, "gelu_tanh", False),
        ("linear + quick_gelu", "dgelu, quick_gelu", activated, "quick_gelu", True),
        ("linear + silu", "dgelu, silu", activated, "silu", True),
        ("gated linear", "dgated", gated_by, "silu", True),
        ("gated linear, gelu, inference", "dgated, gelu", gated_by, "gelu", False),
    ):
        found[name], found[backward] = build(activation, save, variant=backward not in ("dgelu", "dgated"))
    for name, (out, inner) in weights.items():
        found[f"weight gradient, {name}"] = Launcher(
            lambda t, out=out, inner=inner: (t.values(m, out), t.values(m, inner)),
            weight_grad.weight_grad,
            lambda g, x: g.t() @ x,
        )
    for name in ("fc1", "qkv", "proj"):  # fc2's is dgelu
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
    return found | _with_factors(s)


def _with_factors(s: Sizes) -> dict[str, Launcher]:
    """Launchers with a layer scale and drop path, and those that run where another provider multiplies."""
    m, d, f, fp32 = s.rows, s.width, s.hidden, torch.float32

    def weight_gradient(g, x, w, ls):
        product = g.t() @ x
        product = product.to(wide(product))
        return (ls[:, None] * product).to(g.dtype), (product * w).sum(1)

    def linear_residual(x, w, b, res, ls, drop):
        x, res = (t.view(s.batch, s.tokens, d) for t in (x, res))
        return ref.linear_residual(x, w, b, res, layer_scale=ls, drop_path=drop).view(m, d)

    return {
        "gelu backward": Launcher(
            lambda t: (t.values(m, f), t.values(m, f)), lambda *t: mlp.gelu_bwd(*t, "gelu", True), gelu_backward
        ),
        "gated backward": Launcher(
            lambda t: (t.values(m, f), t.values(m, f), t.values(m, f)),
            lambda *t: gated.gated_bwd(*t, "silu", True),
            lambda *t: gated_backward(*t, "silu", want_h=False),
        ),
        "weight gradient, layer scale": Launcher(
            lambda t: (t.values(m, d), t.values(m, f), t.weight(d, f), t.values(d)),
            weight_grad.weight_grad_scaled,
            weight_gradient,
            variant=True,
        ),
        "linear + residual, factors, fp32 stream": Launcher(
            lambda t: (
                *(t.values(m, d), t.weight(d, d), t.values(d)),
                *(t.values(m, d, dtype=fp32), t.values(d), t.factors(s.batch)),
            ),
            lambda *t: linear.linear_residual(*t, s.tokens),
            linear_residual,
            variant=True,
        ),
    }
