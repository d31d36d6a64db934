"""All launchers of kernels/: those of vitfast.tools.verify.launchers, their variants, and those with rare inputs.

`make codegen` compiles what launchers and variants launch, and edges.py runs all of them at the edges of tiles.
"""

import dataclasses
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from vitfast.kernels import tiles
from vitfast.kernels.attention import launchers as attention
from vitfast.kernels.attention.options import PLAIN, AttentionOptions
from vitfast.kernels.layer_norm import layer_norm_fwd
from vitfast.kernels.matmul import linear, mlp, scaled
from vitfast.kernels.tiles import KernelConfig
from vitfast.ops import reference as ref
from vitfast.tools.verify.attention_launchers import (
    attention_formula,
    attention_gradients,
    for_backward,
    pair,
    qkv,
)
from vitfast.tools.verify.draw import Draw, Sizes
from vitfast.tools.verify.launcher import Launcher, gradients, wide
from vitfast.tools.verify.launchers import (
    EPS,
    added,
    launchers,
    norm_backward,
    of_activation,
    of_norm,
    patch_embedding,
    statistics,
    workspaces,
)
from vitfast.tools.verify.product_launchers import (
    activation_backward,
    added_up,
    layer,
    norm_linear,
    split_linear,
    with_activation,
)

LIBRARIES = ("cublas", "cublaslt")  # these providers launch no kernel of ours
MEAN, STD = (0.48, 0.46, 0.41), (0.23, 0.22, 0.26)

Override = tuple[str, KernelConfig, str]  # an operation, its tile, a shape class


def candidates(used: Iterable[tuple[str, str, str]], dtype: torch.dtype, device: torch.device) -> Iterator[Override]:
    """Yields every other tile for the operations that were used.

    used: their (operation, bits, shape class), as tiles.using yields them.
    """
    for op, bits, shape in used:
        like = torch.empty(0, dtype=torch.float32 if bits == "32" else dtype, device=device)
        yield from ((op, config, shape) for config in tiles.candidates(op, like, shape))


def in_training(s: Sizes) -> dict[str, Launcher]:
    """Name -> launcher: those whose inputs occur in a training step."""
    return launchers(s) | variants(s)


def every_launcher(s: Sizes) -> dict[str, Launcher]:
    return in_training(s) | rare(s)


# ---- variants: they have the tile of a plainer launcher, and compile to other code


def variants(s: Sizes) -> dict[str, Launcher]:
    """Other activations, what is saved otherwise, a bias of attention, factors, an fp32 residual stream."""
    return _activations(s) | _factors(s) | _attentions(s) | _rows(s) | _few_rows(s)


def gelu_and_slope(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """gelu(pre) and gelu'(pre) of pre = x W^T + b."""
    pre = F.linear(x, weight, bias)
    return F.gelu(pre), *gradients(F.gelu, (pre,), torch.ones_like(pre))


def times_slope(dact: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    """dact times the slope, and its column sums."""
    dpre = dact * slope
    return dpre, dpre.sum(0, dtype=wide(dpre))


def _activations(s: Sizes) -> dict[str, Launcher]:
    m, d, f = s.rows, s.width, s.hidden
    found = {}
    for name, backward, count, activation, save in (
        ("linear + gelu, tanh, inference", "dgelu, tanh", 1, "gelu_tanh", ""),
        ("linear + quick_gelu", "dgelu, quick_gelu", 1, "quick_gelu", "pre"),
        ("linear + silu", "dgelu, silu", 1, "silu", "pre"),
        ("gated linear, gelu, inference", "dgated, gelu", 2, "gelu", False),
    ):
        found[name], found[backward] = with_activation(s, count, activation, save)
    found["dgelu, act kept"] = Launcher(
        lambda t: (t.values(m, d), t.weight(d, f), t.values(m, f)),
        lambda *t: added_up(mlp.dgelu_matmul(*t, "gelu", True, want_act=False)),
        lambda g, w, pre: activation_backward(g @ w, pre, activation="gelu", want_h=False),
    )
    found["linear + gelu, slope kept"] = Launcher(
        lambda t: layer(t, m, f, d), lambda *t: mlp.linear_gelu(*t, "gelu", "slope"), gelu_and_slope
    )
    found["dgelu, from the slope"] = Launcher(
        lambda t: (t.values(m, d), t.weight(d, f), t.values(m, f)),
        lambda *t: added_up(mlp.dgelu_matmul(*t, "slope", True, want_act=False)),
        lambda g, w, slope: times_slope(g @ w, slope),
    )
    return found


def _factors(s: Sizes) -> dict[str, Launcher]:
    """A product with a layer scale and drop path."""
    m, d = s.rows, s.width

    def linear_residual(x, w, b, res, ls, drop):
        x, res = (t.view(s.batch, s.tokens, d) for t in (x, res))
        return ref.linear_residual(x, w, b, res, layer_scale=ls, drop_path=drop).view(m, d)

    return {
        "linear + residual, factors, fp32 stream": Launcher(
            lambda t: (*layer(t, m, d, d), t.values(m, d, dtype=torch.float32), t.values(d), t.factors(s.batch)),
            lambda *t: linear.linear_residual(*t, s.tokens),
            linear_residual,
        ),
    }


def _attentions(s: Sizes) -> dict[str, Launcher]:
    def bias(t: Draw) -> AttentionOptions:
        return AttentionOptions(bias=t.values(s.heads, s.tokens, s.tokens))

    def key_lengths(t: Draw) -> AttentionOptions:
        """From 0 to all keys, of the first image all."""
        drawn = torch.randint(0, s.tokens + 1, (s.batch,), generator=t.generator, device=t.device, dtype=torch.int32)
        drawn[:1] = s.tokens
        return AttentionOptions(key_lengths=drawn)

    found = {}
    for name, options in (("bias", bias), ("key lengths", key_lengths)):
        both = pair(lambda t: qkv(t, s), s.head**-0.5, options)
        found[f"attention, {name}"], found[f"attention backward, {name}"] = both
    return found


def scaled_rows(x: Tensor, drop: Tensor, layer_scale: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """(x with each sample's rows times its factor and the layer scale, its column sums)."""
    scaled = x.to(wide(x)) * drop.repeat_interleave(len(x) // len(drop))[:, None] * layer_scale
    return scaled.to(x.dtype), scaled.sum(0)


def _added_with_factors(t: Draw, s: Sizes, **stream) -> tuple:
    """What `added` gives, the layer scale and the drop path."""
    return *added(t, s, **stream), t.values(s.width, **stream), t.factors(s.batch)


def _rows(s: Sizes) -> dict[str, Launcher]:
    m, d = s.rows, s.width
    return {
        "rms_norm": Launcher(
            lambda t: (t.values(m, d), t.values(d)),
            lambda x, w: layer_norm_fwd(x, w, None, EPS, rms=True),
            lambda x, w: (ref.rms_norm(x, w, EPS), *statistics(x, rms=True)),
        ),
        "add + layer_norm, factors": dataclasses.replace(
            launchers(s)["add + layer_norm"], make=lambda t: _added_with_factors(t, s)
        ),
        "rms_norm backward in a block": norm_backward(s, rms=True, sums=True),
        "scaled rows": Launcher(
            lambda t: (t.values(m, d), t.factors(s.batch)),
            lambda x, drop: scaled.scale_rows(x, None, drop, s.tokens),
            scaled_rows,
        ),
        "column sums, gated MLP's block": workspaces(*[of_norm(s)] * 3, *[of_activation(s)] * 2),
    }


def _few_rows(s: Sizes) -> dict[str, Launcher]:
    """Of one image: norms and gates of another kind; what has blocks of its own where few rows lie."""
    one, scale = dataclasses.replace(s, batch=1), s.head**-0.5
    found = {
        "norm + linear, rms": norm_linear(s, rms=True),
        "norm + linear, rms, quick_gelu": norm_linear(s, 1, "quick_gelu", rms=True),
        "norm + gated linear, rms, gelu": norm_linear(s, 2, "gelu", rms=True),
        "split linear, plain": dataclasses.replace(split := split_linear(s), make=lambda t: _plain(*split.make(t))),
        "attention, few rows": Launcher(
            lambda t: qkv(t, one),
            lambda q, k, v: attention.attention_fwd(q, k, v, scale, few_rows=True),
            lambda q, k, v: attention_formula(q, k, v, scale, PLAIN),
        ),
    }
    for name, options in ((", uint8", (1, MEAN, STD)), ("", (1,))):
        found[f"patch embedding{name}, few rows"] = patch_embedding(one, *options)[0]
    return found


def _plain(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, scale: Tensor) -> tuple:
    return x, weight, None, residual, None


# ---- rare inputs: they do not occur in a training step of a plain ViT, and edges.py alone runs them


def rare(s: Sizes) -> dict[str, Launcher]:
    """Another scale, logits in the hundreds, a constant row, every optional sum, oblong images, other prefix tokens."""
    plain, across = launchers(s), s.image // s.patch + 2
    found = _separate_tensors(s)
    found["layer_norm, a constant row"] = dataclasses.replace(
        plain["layer_norm"], make=lambda t: _with_constant_row(*plain["layer_norm"].make(t))
    )
    found["add + layer_norm, fp32 stream"] = dataclasses.replace(
        plain["add + layer_norm"], make=lambda t: _added_with_factors(t, s, dtype=torch.float32)
    )
    found["layer_norm backward, every sum"] = _every_sum(s)
    found["layer_norm backward, every sum, fp32 stream"] = _every_sum(s, dtype=torch.float32)
    found["scaled rows, layer scale"] = Launcher(
        lambda t: (t.values(s.rows, s.width), t.values(s.width), t.factors(s.batch)),
        lambda *t: scaled.scale_rows(*t, s.tokens),
        lambda x, ls, drop: scaled_rows(x, drop, ls),
    )
    for name, both in {
        ", oblong, 4 prefix tokens": patch_embedding(s, 4, across=across),
        ", uint8, oblong, no prefix": patch_embedding(s, 0, MEAN, STD, across=across),
    }.items():
        found[f"patch embedding{name}"], found[f"patch embedding{name}, backward"] = both
    return found


def _with_constant_row(x: Tensor, *rest) -> tuple:
    x[0] = 1.5
    return x, *rest


def _every_sum(s: Sizes, **stream) -> Launcher:
    """LayerNorm's backward with factors, every sum and a constant row."""
    plain = norm_backward(s, factors=True, sums=True, **stream)

    def make(t: Draw) -> tuple:
        dy, z, w, b, _, _, *rest = plain.make(t)
        _with_constant_row(z)
        return dy, z, w, b, *statistics(z), *rest

    return dataclasses.replace(plain, make=make)


def _separate_tensors(s: Sizes) -> dict[str, Launcher]:
    """Attention of separate tensors of different strides, by another scale than 1 / sqrt(Dh)."""
    scale = 0.7 * s.head**-0.5

    def separate(t: Draw, size: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        q = t.values(s.batch, s.tokens, s.heads, s.head, scale=size)
        k = t.values(s.batch, s.heads, s.tokens, s.head).transpose(1, 2)
        return q, k, t.values(s.tokens, s.batch, s.heads, s.head).transpose(0, 1)

    return {
        "attention, peaked, separate tensors": Launcher(
            lambda t: separate(t, size=64.0),
            lambda q, k, v: attention.attention_fwd(q, k, v, scale, PLAIN),
            lambda q, k, v: attention_formula(q, k, v, scale, PLAIN),
        ),
        "attention backward, separate tensors": Launcher(
            lambda t: for_backward(t, *separate(t), scale),
            lambda *t: attention.attention_bwd(*t, scale, False, PLAIN, as_qkv=False)[0],
            lambda *t: attention_gradients(*t, scale),
        ),
    }
