"""Every launcher of kernels/ at a model's shapes, on random inputs, beside the same in plain PyTorch.

The tuner times them one by one, and `make codegen` compiles what they launch. The first of those that share a tile is
the plain case of a training step; the later ones are variants (factors, an fp32 residual stream, tanh, raw pixels) that
only compile to other code.
"""

import torch
from torch import Tensor

from ...kernels import rows
from ...kernels.layer_norm import forward as layer_norm
from ...kernels.matmul import gated, linear, mlp, weight_grad
from ...kernels.patch_embed import forward as patch_embed
from ...ops import packed
from ...ops import reference as ref
from .attention_launchers import acting_attentions, attention_parts, attentions, packed_attentions
from .draw import Draw, Sizes
from .launcher import Launcher, gradients, wide
from .product_launchers import gated_backward, gelu_backward, layers, products

EPS = 1e-6
HALF = (0.5, 0.5, 0.5)
SPLITS = 7  # slices of a weight gradient that are added up


def launchers(s: Sizes) -> dict[str, Launcher]:
    """Name -> launcher, at these sizes, those that matter most in a training step first."""
    return (
        products(s)
        | attentions(s)
        | _along_rows(s)
        | _patch_embeddings(s)
        | _smaller(s)
        | attention_parts(s)
        | acting_attentions(s)
        | packed_attentions(s)
    )


# ---- LayerNorm, and what goes along rows


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """LayerNorm's mean and rstd of every row."""
    work = x.to(wide(x))
    return work.mean(-1), (work.var(-1, unbiased=False) + EPS).rsqrt()


def rms_statistics(x: Tensor) -> Tensor:
    """RMSNorm's rstd of every row."""
    return (x.to(wide(x)).square().mean(-1) + EPS).rsqrt()


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

    def rms_normed(t: Draw) -> tuple:
        """dy, z, w, rstd."""
        z = t.values(m, d)
        return t.values(m, d), z, t.values(d), rms_statistics(z)

    def rms_in_a_block(dy, z, w, rstd, dz):
        dres, dw = gradients(lambda z, w: ref.rms_norm(z, w, EPS), (z, w), dy)
        return dres + dz, dw, dz.sum(0, dtype=wide(dz)), ref.rms_norm(z, w, EPS)

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
        "rms_norm": Launcher(
            lambda t: (t.values(m, d), t.values(d)),
            lambda x, w: layer_norm.layer_norm_fwd(x, w, None, EPS, rms=True)[::2],
            lambda x, w: (ref.rms_norm(x, w, EPS), rms_statistics(x)),
            variant=True,
        ),
        "rms_norm backward in a block": Launcher(
            lambda t: (*rms_normed(t), t.values(m, d)),
            lambda *t: layer_norm.layer_norm_bwd(*t[:3], None, None, t[3], dz=t[4], want_dz_sum=True, want_y=True),
            rms_in_a_block,
            variant=True,
        ),
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


def packed_patch_embedding(s: Sizes) -> tuple[Launcher, Launcher]:
    """Forward and backward, of raw patches of images of many sizes."""
    d, count, shape = s.width, s.batch * (s.image // s.patch) ** 2, (3, s.patch, s.patch)
    wanted = dict(want_images=False, want_weight=True, want_bias=True, want_cls=True, want_pos=True)

    def make(t: Draw) -> tuple:
        parameters = t.weight(d, *shape), t.values(d), t.values(1, 1, d), t.values(count, d)
        return t.pixels(count, *shape), *parameters, t.offsets(2 * s.batch, count)

    def formula(images, w, b, cls, pos, offsets):
        rows = packed.token_rows(offsets, count, 1)
        return ref.patch_embed(images, w, b, cls, pos, mean=HALF, std=HALF, rows=rows)

    def call(images, w, b, cls, pos, offsets):
        rows = packed.token_rows(offsets, count, 1)
        return patch_embed.patch_embed_fwd(images, w, b, cls, pos, HALF, HALF, rows)

    def backward(dy, images, w, b, cls, pos, offsets):
        rows = packed.token_rows(offsets, count, 1)
        options = dict(prefix=1, pos_len=count, packed=rows, **wanted)
        return patch_embed.patch_embed_bwd(dy, images, w, HALF, HALF, **options)

    def backward_formula(dy, images, *tensors):
        *leaves, offsets = tensors
        return gradients(lambda *t: formula(images, *t, offsets), leaves, dy)

    upstream = lambda t: t.values(count + 2 * s.batch, d)  # noqa: E731
    return Launcher(make, call, formula), Launcher(lambda t: (upstream(t), *make(t)), backward, backward_formula)


def _patch_embeddings(s: Sizes) -> dict[str, Launcher]:
    across = s.image // s.patch
    raw, raw_backward = patch_embedding(s, across, 1, 1 + across**2, HALF, HALF)
    forward, backward = patch_embedding(s, across, 1, 1 + across**2)
    together, together_backward = packed_patch_embedding(s)
    return {
        "patch embedding, uint8": raw,
        "patch embedding, uint8, backward": raw_backward,
        "patch embedding": forward,
        "patch embedding backward": backward,
        "patch embedding, packed": together,
        "patch embedding, packed, backward": together_backward,
    }


# ---- what runs where another provider was chosen, and the small kernels that add up


def _smaller(s: Sizes) -> dict[str, Launcher]:
    m, d, f = s.rows, s.width, s.hidden

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
            lambda t: (t.values(m, f), t.values(m, f)), lambda *t: mlp.gelu_bwd(*t, "gelu", True), gelu_backward
        ),
        "gated backward": Launcher(
            lambda t: (t.values(m, f), t.values(m, f), t.values(m, f)),
            lambda *t: gated.gated_bwd(*t, "silu", True),
            lambda *t: gated_backward(*t, "silu", want_h=False),
        ),
        **{f"weight gradient, {layer}, sum": slices(*sizes) for layer, sizes in layers(s).items()},
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
