"""The launchers of products, with their epilogues, for launchers.py."""

from torch import Tensor
from torch.nn import functional as F

from ...kernels.matmul import gated, linear, mlp, weight_grad
from ...ops import reference as ref
from .draw import Draw, Sizes
from .launcher import Launcher, gradients, wide


def layers(s: Sizes) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of each weight of an encoder layer."""
    d, f = s.width, s.hidden
    return {"fc2": (d, f), "fc1": (f, d), "qkv": (3 * d, d), "proj": (d, d)}


def gelu_backward(dy: Tensor, pre: Tensor, activation: str = "gelu") -> tuple[Tensor, Tensor]:
    (dpre,) = gradients(ref.ACTIVATIONS[activation], (pre,), dy)
    return dpre, dpre.sum(0, dtype=wide(dpre))


def gated_backward(dh: Tensor, up: Tensor, gate: Tensor, activation: str, want_h: bool = True) -> tuple[Tensor, ...]:
    """(dup, dgate, h, the sums of both)."""

    def product(up, gate):
        return ref.ACTIVATIONS[activation](gate) * up

    found = gradients(product, (up, gate), dh)
    return *found, *((product(up, gate),) if want_h else ()), *(t.sum(0, dtype=wide(t)) for t in found)


def products(s: Sizes) -> dict[str, Launcher]:
    m, d, f, sizes = s.rows, s.width, s.hidden, layers(s)

    def linear_inputs(t: Draw, out: int, inner: int) -> tuple:
        return t.values(m, inner), t.weight(out, inner), t.values(out)

    def linear_gelu(activation: str, save: bool, variant: bool) -> Launcher:
        def formula(x, w, b):
            pre = F.linear(x, w, b)
            return ref.ACTIVATIONS[activation](pre), *((pre,) if save else ())

        return Launcher(
            lambda t: linear_inputs(t, f, d),
            lambda *t: mlp.linear_gelu(*t, activation, save),
            formula,
            variant,
        )

    def dgelu(activation: str, variant: bool) -> Launcher:
        def formula(g, w2, pre):
            dpre, dbias = gelu_backward(g @ w2, pre, activation)
            return dpre, ref.ACTIVATIONS[activation](pre), dbias

        return Launcher(
            lambda t: (t.values(m, d), t.weight(d, f), t.values(m, f)),
            lambda *t: mlp.dgelu_matmul(*t, activation, True),
            formula,
            variant,
        )

    def weight_gradient(out: int, inner: int) -> Launcher:
        make = lambda t: (t.values(m, out), t.values(m, inner))  # noqa: E731
        return Launcher(make, weight_grad.weight_grad, lambda g, x: g.t() @ x)

    def input_gradient(out: int, inner: int) -> Launcher:
        return Launcher(lambda t: (t.values(m, out), t.weight(out, inner)), linear.input_grad, lambda g, w: g @ w)

    def linear_residual(out: int, inner: int) -> Launcher:
        return Launcher(
            lambda t: (*linear_inputs(t, out, inner), t.values(m, out)),
            lambda *t: linear.linear_residual(*t, None, None, s.tokens),
            ref.linear_residual,
        )

    def gated_linear(activation: str, save: bool, variant: bool) -> Launcher:
        def formula(x, up_weight, up_bias, gate_weight, gate_bias):
            up, gate = F.linear(x, up_weight, up_bias), F.linear(x, gate_weight, gate_bias)
            return ref.ACTIVATIONS[activation](gate) * up, *((up, gate) if save else ())

        return Launcher(
            lambda t: (*linear_inputs(t, f, d), *linear_inputs(t, f, d)[1:]),
            lambda *t: gated.gated_linear(*t, activation, save),
            formula,
            variant,
        )

    def dgated(activation: str, variant: bool) -> Launcher:
        return Launcher(
            lambda t: (t.values(m, d), t.weight(d, f), t.values(m, f), t.values(m, f)),
            lambda *t: gated.dgated_matmul(*t, activation, True),
            lambda g, w, up, gate: gated_backward(g @ w, up, gate, activation),
            variant,
        )

    return {
        "linear + gelu": linear_gelu("gelu", save=True, variant=False),
        "dgelu": dgelu("gelu", variant=False),
        "linear + gelu, tanh, inference": linear_gelu("gelu_tanh", save=False, variant=True),
        "dgelu, tanh": dgelu("gelu_tanh", variant=True),
        "linear + quick_gelu": linear_gelu("quick_gelu", save=True, variant=True),
        "dgelu, quick_gelu": dgelu("quick_gelu", variant=True),
        "linear + silu": linear_gelu("silu", save=True, variant=True),
        "dgelu, silu": dgelu("silu", variant=True),
        "gated linear": gated_linear("silu", save=True, variant=False),
        "dgated": dgated("silu", variant=False),
        "gated linear, gelu, inference": gated_linear("gelu", save=False, variant=True),
        "dgated, gelu": dgated("gelu", variant=True),
        **{f"weight gradient, {layer}": weight_gradient(*size) for layer, size in sizes.items()},
        # fc2's is dgelu.
        **{f"input gradient, {layer}": input_gradient(*sizes[layer]) for layer in ("fc1", "qkv", "proj")},
        **{f"linear + residual, {layer}": linear_residual(*sizes[layer]) for layer in ("fc2", "proj")},
        "linear, qkv": Launcher(lambda t: linear_inputs(t, 3 * d, d), linear.linear, F.linear),
    }
