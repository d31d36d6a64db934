"""Every launcher of kernels/ at a model's shapes, on random inputs, beside the same in plain PyTorch.

The tuner times them one by one, and `make codegen` compiles what they launch. The first of those that share a tile is
the plain case of a training step; the later ones are variants (factors, an fp32 residual stream, tanh, raw pixels) that
only compile to other code.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ref
from ..kernels import attention, layer_norm, linear, mlp, patch_embed, rows, weight_grad
from .draw import Draw, Sizes

EPS = 1e-6
HALF = (0.5, 0.5, 0.5)
SPLITS = 7  # slices of a weight gradient that are added up


@dataclass(frozen=True)
class Launcher:
    """`call(*make(draw))` runs kernels; `formula` takes the same inputs, in any dtype.

    variant: a plainer case has the same tile.
    """

    make: Callable[[Draw], tuple]
    call: Callable
    formula: Callable
    variant: bool = False


def outputs(result) -> list[Tensor]:
    """The tensors of what a launcher or a formula returns, without those that were not asked for."""
    found = result if isinstance(result, tuple) else (result,)
    return [t for t in found if t is not None and t.numel()]


def launchers(s: Sizes) -> dict[str, Launcher]:
    """Name -> launcher, at these sizes, those that matter most in a training step first."""
    return _products(s) | _attention(s) | _along_rows(s) | _patch_embeddings(s) | _smaller(s)


def wide(x: Tensor) -> torch.dtype:
    """fp32, or float64 where x is."""
    return torch.promote_types(x.dtype, torch.float32)


def gradients(function: Callable, leaves: tuple, upstream: Tensor | tuple) -> tuple[Tensor, ...]:
    """Of every leaf, by autograd."""
    leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)
    with torch.enable_grad():
        return torch.autograd.grad(function(*leaves), leaves, upstream)


# ---- products


def _layers(s: Sizes) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of each weight of an encoder layer."""
    d, f = s.width, s.hidden
    return {"fc2": (d, f), "fc1": (f, d), "qkv": (3 * d, d), "proj": (d, d)}


def _gelu_backward(dy: Tensor, pre: Tensor, approximate: str = "none") -> tuple[Tensor, Tensor]:
    (dpre,) = gradients(lambda p: F.gelu(p, approximate=approximate), (pre,), dy)
    return dpre, dpre.sum(0, dtype=wide(dpre))


def _products(s: Sizes) -> dict[str, Launcher]:
    m, d, f, layers = s.rows, s.width, s.hidden, _layers(s)

    def linear_inputs(t: Draw, out: int, inner: int) -> tuple:
        return t.values(m, inner), t.weight(out, inner), t.values(out)

    def linear_gelu(approximate: str, save: bool) -> Launcher:
        def formula(x, w, b):
            pre = F.linear(x, w, b)
            return F.gelu(pre, approximate=approximate), *((pre,) if save else ())

        return Launcher(
            lambda t: linear_inputs(t, f, d),
            lambda *t: mlp.linear_gelu(*t, approximate, save),
            formula,
            variant=not save,
        )

    def dgelu(approximate: str, variant: bool) -> Launcher:
        def formula(g, w2, pre):
            dpre, dbias = _gelu_backward(g @ w2, pre, approximate)
            return dpre, F.gelu(pre, approximate=approximate), dbias

        return Launcher(
            lambda t: (t.values(m, d), t.weight(d, f), t.values(m, f)),
            lambda *t: mlp.dgelu_matmul(*t, approximate, True),
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

    return {
        "linear + gelu": linear_gelu("none", save=True),
        "dgelu": dgelu("none", variant=False),
        "linear + gelu, tanh, inference": linear_gelu("tanh", save=False),
        "dgelu, tanh": dgelu("tanh", variant=True),
        **{f"weight gradient, {layer}": weight_gradient(*sizes) for layer, sizes in layers.items()},
        # fc2's is dgelu.
        **{f"input gradient, {layer}": input_gradient(*layers[layer]) for layer in ("fc1", "qkv", "proj")},
        **{f"linear + residual, {layer}": linear_residual(*layers[layer]) for layer in ("fc2", "proj")},
        "linear, qkv": Launcher(lambda t: linear_inputs(t, 3 * d, d), linear.linear, F.linear),
    }


# ---- attention


def attention_formula(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(o, lse)."""
    logits = torch.einsum("bnhd,bmhd->bhnm", q.to(wide(q)), k.to(wide(k))) * scale
    return ref.attention(q, k, v, scale=scale), logits.logsumexp(-1)


def attention_gradients(q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv."""
    return gradients(lambda *t: ref.attention(*t, scale=scale), (q, k, v), do)


def _qkv(t: Draw, s: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    return t.values(s.batch, s.tokens, 3, s.heads, s.head).unbind(2)


def for_attention_backward(t: Draw, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, ...]:
    """q, k, v, o, lse, do."""
    return q, k, v, *attention_formula(q, k, v, scale), t.values(*q.shape)


def _attention(s: Sizes) -> dict[str, Launcher]:
    scale = s.head**-0.5

    def backward(q, k, v, o, lse, do):
        dqkv = torch.stack(attention_gradients(q, k, v, do, scale), 2)
        return dqkv, dqkv.sum((0, 1), dtype=wide(dqkv)).flatten()

    return {
        "attention": Launcher(
            lambda t: _qkv(t, s), lambda *t: attention.attention_fwd(*t, scale), lambda *t: attention_formula(*t, scale)
        ),
        "attention backward": Launcher(
            lambda t: for_attention_backward(t, *_qkv(t, s), scale),
            lambda *t: attention.attention_bwd(*t, scale, want_bias_grad=True),
            backward,
        ),
    }


# ---- LayerNorm, and what goes along rows


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """LayerNorm's mean and rstd of every row."""
    work = x.to(wide(x))
    return work.mean(-1), (work.var(-1, unbiased=False) + EPS).rsqrt()


def layer_norm_formula(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """(y, mean, rstd)."""
    return ref.layer_norm(x, w, b, EPS), *statistics(x)


def scaled_rows(x: Tensor, drop: Tensor, layer_scale: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """(x with each sample's rows times its factor and the layer scale, its column sums)."""
    scaled = x.to(wide(x)) * drop.repeat_interleave(len(x) // len(drop))[:, None] * layer_scale
    return scaled.to(x.dtype), scaled.sum(0)


def layer_norm_gradients(dy, z, w, b, mean, rstd) -> tuple[Tensor, Tensor, Tensor]:
    """(dz, dw, db)."""
    return gradients(lambda z, w, b: ref.layer_norm(z, w, b, EPS), (z, w, b), dy)


def block_norm_gradients(dy, z, w, b, mean, rstd, dz, branch, ls, drop) -> tuple[Tensor, ...]:
    """(dres, dbranch, dw, db, d layer_scale) of LayerNorm of z = res + scaled branch; dz: z's gradient."""
    dres, dw, db = layer_norm_gradients(dy, z, w, b, mean, rstd)
    dres = dres + dz
    dropped = dres.to(wide(dres)) * drop.repeat_interleave(len(dres) // len(drop))[:, None]
    return dres, (dropped * ls).to(dy.dtype), dw, db, (dropped * branch).sum(0)


def _along_rows(s: Sizes) -> dict[str, Launcher]:
    m, d, shape = s.rows, s.width, (s.batch, s.tokens, s.width)

    def normed(t: Draw) -> tuple:
        """dy, z, w, b, mean, rstd."""
        z = t.values(m, d)
        return t.values(m, d), z, t.values(d), t.values(d), *statistics(z)

    def in_a_block(dy, z, w, b, mean, rstd, dz):
        dres, dw, db = layer_norm_gradients(dy, z, w, b, mean, rstd)
        return dres + dz, dw, db, dz.sum(0, dtype=wide(dz)), ref.layer_norm(z, w, b, EPS)

    def rows_and_parameters(t: Draw) -> tuple:
        return t.values(m, d), t.values(m, d), t.values(d), t.values(d)

    def add_norm(x, res, w, b, ls=None, drop=None):
        return layer_norm.add_layer_norm_fwd(x, res, w, b, EPS, ls, drop, s.tokens)

    def add_norm_formula(x, res, w, b, ls=None, drop=None):
        x, res = x.view(shape), res.view(shape)
        y, z = ref.add_layer_norm(x, res, w, b, EPS, layer_scale=ls, drop_path=drop)
        return y.view(m, d), z.view(m, d), *statistics(z.view(m, d))

    return {
        "layer_norm backward in a block": Launcher(
            lambda t: (*normed(t), t.values(m, d)),
            lambda *t: layer_norm.layer_norm_bwd(*t[:-1], dz=t[-1], want_dz_sum=True, want_y=True),
            in_a_block,
        ),
        "layer_norm": Launcher(
            lambda t: (t.values(m, d), t.values(d), t.values(d)),
            lambda *t: layer_norm.layer_norm_fwd(*t, EPS),
            layer_norm_formula,
        ),
        "layer_norm backward": Launcher(normed, layer_norm.layer_norm_bwd, layer_norm_gradients),
        "add + layer_norm": Launcher(rows_and_parameters, add_norm, add_norm_formula),
        "add + layer_norm, factors": Launcher(
            lambda t: (*rows_and_parameters(t), t.values(d), t.factors(s.batch)),
            add_norm,
            add_norm_formula,
            variant=True,
        ),
        "add + layer_norm backward, factors": Launcher(
            lambda t: (*normed(t), t.values(m, d), t.values(m, d), t.values(d), t.factors(s.batch)),
            lambda *t: block_norm_backward(s, *t),
            block_norm_gradients,
        ),
        "sum of rows": Launcher(
            lambda t: (t.values(m, d),),
            lambda x: rows.scale_rows(x, None, None, s.tokens, want_scaled=False),
            lambda x: x.sum(0, dtype=wide(x)),
        ),
        "scaled rows": Launcher(
            lambda t: (t.values(m, d), t.factors(s.batch)),
            lambda x, drop: rows.scale_rows(x, None, drop, s.tokens),
            scaled_rows,
            variant=True,
        ),
    }


def block_norm_backward(s: Sizes, dy, z, w, b, mean, rstd, dz, branch, ls, drop, **wanted: bool) -> tuple:
    """The launcher of `block_norm_gradients`; wanted: further sums."""
    given = dict(dz=dz, branch=branch, layer_scale=ls, drop_path=drop, rows_per_sample=s.tokens)
    return layer_norm.layer_norm_bwd(dy, z, w, b, mean, rstd, **given, want_layer_scale=True, **wanted)


# ---- from images to tokens and back


def patch_embedding(
    s: Sizes, across: int, prefix: int, positions: int, mean: tuple | None = None, std: tuple | None = None
) -> tuple[Launcher, Launcher]:
    """Forward and backward, on images `across` patches wide; of raw pixels where they have a mean."""
    d, patches = s.width, s.image // s.patch * across
    pixels = s.batch, 3, s.image, across * s.patch
    wanted = dict(want_images=mean is None, want_weight=True, want_bias=True, want_cls=prefix > 0, want_pos=True)

    def make(t: Draw) -> tuple:
        images = t.values(*pixels) if mean is None else t.pixels(*pixels)
        weight_and_bias = t.weight(d, 3, s.patch, s.patch), t.values(d)
        prefix_tokens = (t.values(1, prefix, d),) if prefix else ()
        return images, *weight_and_bias, *prefix_tokens, t.values(1, positions, d)

    def split(w, b, *tokens) -> tuple:
        return (w, b, *tokens) if prefix else (w, b, None, *tokens)

    def formula(images, *tensors):
        return ref.patch_embed(images, *split(*tensors), mean=mean, std=std)

    def backward_formula(dy, images, *tensors):
        if mean is None:
            return gradients(formula, (images, *tensors), dy)
        return gradients(lambda *t: formula(images, *t), tensors, dy)

    forward = Launcher(make, lambda images, *t: patch_embed.patch_embed_fwd(images, *split(*t), mean, std), formula)
    backward = Launcher(
        lambda t: (t.values(s.batch, prefix + patches, d), *make(t)),
        lambda dy, images, w, *_: patch_embed.patch_embed_bwd(
            dy, images, w, mean, std, prefix=prefix, pos_len=positions, **wanted
        ),
        backward_formula,
    )
    return forward, backward


def _patch_embeddings(s: Sizes) -> dict[str, Launcher]:
    across = s.image // s.patch
    raw, raw_backward = patch_embedding(s, across, 1, 1 + across**2, HALF, HALF)
    forward, backward = patch_embedding(s, across, 1, 1 + across**2)
    return {
        "patch embedding, uint8": raw,
        "patch embedding, uint8, backward": raw_backward,
        "patch embedding": forward,
        "patch embedding backward": backward,
    }


# ---- what runs where another provider was chosen, and the small kernels that add up


def _smaller(s: Sizes) -> dict[str, Launcher]:
    m, d, f, scale = s.rows, s.width, s.hidden, s.head**-0.5

    def with_delta(t: Draw) -> tuple:
        q, k, v, o, lse, do = for_attention_backward(t, *_qkv(t, s), scale)
        delta = (o.to(wide(o)) * do.to(wide(o))).sum(-1).transpose(1, 2).contiguous()
        return q, k, v, lse, delta, do

    def slices(out: int, inner: int) -> Launcher:
        return Launcher(
            lambda t: (t.workspace(SPLITS, out, inner), t.values(0)),
            lambda slices, like: weight_grad.sum_products(slices, None, like.dtype),
            lambda slices, like: slices.sum(0),
        )

    def column_sums(count: int, width: int, dtype: torch.dtype | None) -> Launcher:
        def call(sums, like):
            total = torch.empty(width, dtype=torch.float32, device=sums.device)
            rows.column_sums([(sums, total)], count, width, like)
            return total

        make = lambda t: (t.workspace(count, width), t.values(0, dtype=dtype))  # noqa: E731
        return Launcher(make, call, lambda sums, like: sums.sum(0))

    def scaled_weight_gradient(g, x, w, ls):
        product = g.t() @ x
        product = product.to(wide(product))
        return (ls[:, None] * product).to(g.dtype), (product * w).sum(1)

    def linear_residual(x, w, b, res, ls, drop):
        x, res = (t.view(s.batch, s.tokens, d) for t in (x, res))
        return ref.linear_residual(x, w, b, res, layer_scale=ls, drop_path=drop).view(m, d)

    fp32 = torch.float32
    return {
        "gelu backward": Launcher(
            lambda t: (t.values(m, f), t.values(m, f)), lambda *t: mlp.gelu_bwd(*t, "none", True), _gelu_backward
        ),
        "attention backward, dq": Launcher(
            lambda t: for_attention_backward(t, *_qkv(t, s), scale),
            lambda *t: attention.attention_bwd_dq(*t, scale),
            lambda q, k, v, o, lse, do: attention_gradients(q, k, v, do, scale)[0],
        ),
        "attention backward, dk and dv": Launcher(
            with_delta,
            lambda *t: attention.attention_bwd_dkdv(*t, scale),
            lambda q, k, v, lse, delta, do: attention_gradients(q, k, v, do, scale)[1:],
        ),
        **{f"weight gradient, {layer}, sum": slices(*sizes) for layer, sizes in _layers(s).items()},
        "column sums, layer_norm": column_sums(396, d, None),
        "column sums, gelu": column_sums(-(-m // 128), f, fp32),
        "weight gradient, layer scale": Launcher(
            lambda t: (t.values(m, d), t.values(m, f), t.weight(d, f), t.values(d)),
            weight_grad.weight_grad_scaled,
            scaled_weight_gradient,
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
