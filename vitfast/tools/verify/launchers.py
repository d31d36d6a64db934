"""The list of all launchers of kernels/ at a model's shapes, with their formulas in plain PyTorch.

The tuner times them one by one: the first launcher of a tile is the plain case of a training step.
tests/tools/verify/every_launcher.py adds variants, which compile to other code, and inputs that are rare.
"""

import torch
from torch import Tensor

from ...kernels import rows
from ...kernels.layer_norm import layer_norm_bwd, layer_norm_fwd
from ...kernels.matmul import scaled
from ...kernels.patch_embed import forward as patch_embed
from ...kernels.patch_embed.backward import Gradients, patch_embed_bwd
from ...ops import packed
from ...ops import reference as ref
from .attention_launchers import attentions
from .draw import Draw, Sizes
from .launcher import EPS, Launcher, gradients, wide
from .product_launchers import products, products_of_few_rows

HALF = (0.5, 0.5, 0.5)


def launchers(s: Sizes) -> dict[str, Launcher]:
    """Name -> launcher, at these sizes, those that matter most in a training step first."""
    plain = products(s) | attentions(s) | _norms(s) | _norm_backwards(s) | _sums(s) | _patch_embeddings(s)
    return plain | products_of_few_rows(s)


# ---- LayerNorm, and what goes along rows


def statistics(x: Tensor, rms: bool = False) -> tuple[Tensor | None, Tensor]:
    """LayerNorm's mean and rstd of every row; None and RMSNorm's rstd."""
    work = x.to(wide(x))
    if rms:
        return None, (work.square().mean(-1) + EPS).rsqrt()
    return work.mean(-1), (work.var(-1, unbiased=False) + EPS).rsqrt()


def added(t: Draw, s: Sizes, **stream) -> tuple[Tensor, ...]:
    """x, the residual, weight and bias. stream: dtype= for the residual and the parameters."""
    sizes = (s.rows, s.width), (s.width,), (s.width,)
    return t.values(s.rows, s.width), *(t.values(*size, **stream) for size in sizes)


def _norms(s: Sizes) -> dict[str, Launcher]:
    m, d, shape = s.rows, s.width, (s.batch, s.tokens, s.width)

    def add_norm(x, res, w, b, ls=None, drop=None):
        factors = dict(layer_scale=ls, drop_path=drop, rows_per_sample=s.tokens)
        return layer_norm_fwd(x, w, b, EPS, residual=res, **factors, out_dtype=x.dtype)

    def add_norm_formula(x, res, w, b, ls=None, drop=None):
        y, z = ref.add_layer_norm(x.view(shape), res.view(shape), w, b, EPS, layer_scale=ls, drop_path=drop)
        return y.view(m, d).to(x.dtype), z.view(m, d), *statistics(z.view(m, d))

    return {
        "layer_norm": Launcher(
            lambda t: (t.values(m, d), t.values(d), t.values(d)),
            lambda *t: layer_norm_fwd(*t, EPS),
            lambda x, w, b: (ref.layer_norm(x, w, b, EPS), *statistics(x)),
        ),
        "add + layer_norm": Launcher(lambda t: added(t, s), add_norm, add_norm_formula),
    }


def norm_backward(s: Sizes, rms: bool = False, factors: bool = False, sums: bool = False, **stream) -> Launcher:
    """A backward of LayerNorm or RMSNorm.

    factors: z is res + a scaled branch. sums: dz is given and summed too, and the norm's output is written again.
    stream: dtype=torch.float32 for a stream and parameters in fp32 around a branch in 16 bit.
    """
    m, d = s.rows, s.width

    def make(t: Draw) -> tuple:
        z, w, b = t.values(m, d, **stream), t.values(d, **stream), None if rms else t.values(d, **stream)
        dz = t.values(m, d, **stream) if factors or sums else None
        branch = (t.values(m, d), t.values(d, **stream), t.factors(s.batch)) if factors else (None,) * 3
        return t.values(m, d), z, w, b, *statistics(z, rms), dz, *branch

    def call(dy, z, w, b, mean, rstd, dz, branch, ls, drop):
        given = dict(dz=dz, branch=branch, layer_scale=ls, drop_path=drop)
        given |= dict(rows_per_sample=s.tokens, want_layer_scale=True) if factors else {}
        return layer_norm_bwd(dy, z, w, b, mean, rstd, **given, want_dz_sum=sums, want_y=sums)[:-1]

    def formula(dy, z, w, b, mean, rstd, dz, branch, ls, drop):
        leaves, norm = ((z, w), ref.rms_norm) if rms else ((z, w, b), ref.layer_norm)
        dres, *dparameters = gradients(lambda *leaves: norm(*leaves, EPS), leaves, dy)
        dres = dres if dz is None else dres + dz
        dbranch = dscale = dz_sum = y = None
        if factors:
            dropped = dres.to(wide(dres)) * drop.repeat_interleave(len(dres) // len(drop))[:, None]
            dbranch, dscale = (dropped * ls).to(dy.dtype), (dropped * branch).sum(0)
        if sums:
            dz_sum, y = dz.sum(0, dtype=wide(dres)), norm(*leaves, EPS).to(dy.dtype)
        return dres, dbranch, *dparameters, dscale, dz_sum, y

    return Launcher(make, call, formula)


def _norm_backwards(s: Sizes) -> dict[str, Launcher]:
    return {
        "layer_norm backward in a block": norm_backward(s, sums=True),
        "layer_norm backward": norm_backward(s),
        "add + layer_norm backward, factors": norm_backward(s, factors=True),
    }


def workspaces(*shapes: tuple[int, int], dtype: torch.dtype | None = None) -> Launcher:
    """The sums of workspaces' rows. dtype: that of the sums; None: that of the products."""

    def make(t: Draw) -> tuple:
        return t.values(0, dtype=dtype), *(t.workspace(*shape) for shape in shapes)

    def call(like, *sums):
        return tuple(rows.column_sums(like, sums))

    return Launcher(make, call, lambda like, *sums: tuple(ws.sum(0) for ws in sums))


def of_norm(s: Sizes) -> tuple[int, int]:
    """The shape of LayerNorm's workspace."""
    return 396, s.width


def of_activation(s: Sizes) -> tuple[int, int]:
    """The shape of an activation's workspace."""
    return -(-s.rows // 128), s.hidden


def _sums(s: Sizes) -> dict[str, Launcher]:
    return {
        "sum of rows": Launcher(
            lambda t: (t.values(s.rows, s.width),),
            lambda x: scaled.scale_rows(x, None, None, s.tokens, want_scaled=False),
            lambda x: x.sum(0, dtype=wide(x)),
        ),
        "column sums, layer_norm": workspaces(of_norm(s)),
        "column sums, gelu": workspaces(of_activation(s), dtype=torch.float32),
    }


# ---- from images to tokens and back


def patch_embedding(
    s: Sizes,
    prefix: int = 1,
    mean: tuple | None = None,
    std: tuple | None = None,
    across: int = 0,
    together: bool = False,
    floats: torch.dtype | None = None,
) -> tuple[Launcher, Launcher]:
    """Forward and backward; the images are raw pixels where a mean is given.

    floats: the dtype of other images, by default that of the products. across: patches in a row of an oblong image,
    whose prefix tokens have no position. together: the images have many sizes and come as patches.
    """
    d, tall = s.width, s.image // s.patch
    patches = tall * (across or tall)
    count = s.batch * patches  # the patches of all images
    positions = (count, d) if together else (1, patches if across else prefix + patches, d)
    pixels = (count, 3, s.patch, s.patch) if together else (s.batch, 3, s.image, patches // tall * s.patch)
    upstream = (count + 2 * s.batch, d) if together else (s.batch, prefix + patches, d)

    def make(t: Draw) -> tuple:
        images = t.values(*pixels, dtype=floats) if mean is None else t.pixels(*pixels)
        parameters = t.weight(d, 3, s.patch, s.patch), t.values(d), t.values(1, prefix, d) if prefix else None
        return images, *parameters, t.values(*positions), t.offsets(2 * s.batch, count) if together else None

    def token_rows(ends: Tensor | None):
        return None if ends is None else packed.token_rows(ends, count, 1)

    def call(images, w, b, cls, pos, ends):
        return patch_embed.patch_embed_fwd(images, w, b, cls, pos, mean, std, token_rows(ends))

    def formula(images, w, b, cls, pos, ends):
        return ref.patch_embed(images, w, b, cls, pos, mean=mean, std=std, rows=token_rows(ends))

    def backward(dy, images, w, b, cls, pos, ends):
        prefixes, of_images = w.dtype if prefix else None, images.dtype if mean is None else None
        wanted = Gradients(of_images, w.dtype, w.dtype, prefixes, w.dtype)
        options = dict(prefix=prefix, pos_len=positions[-2], packed=token_rows(ends))
        return patch_embed_bwd(dy, images, w, mean, std, wanted, **options)

    return Launcher(make, call, formula), Launcher(
        lambda t: (t.values(*upstream), *make(t)), backward, lambda dy, *inputs: gradients(formula, inputs, dy)
    )


def _patch_embeddings(s: Sizes) -> dict[str, Launcher]:
    found = {}
    for name, both in {
        ", uint8": patch_embedding(s, 1, HALF, HALF),
        "": patch_embedding(s),
        ", fp32 images": patch_embedding(s, floats=torch.float32),
        ", packed": patch_embedding(s, 1, HALF, HALF, together=True),
    }.items():
        backward = f"patch embedding{name}, backward" if name else "patch embedding backward"
        found[f"patch embedding{name}"], found[backward] = both
    return found
