"""The list of all launchers of kernels/ at a model's shapes, with their formulas in plain PyTorch.

The tuner times them one by one, `make codegen` compiles what they launch, and edges.py runs them at the edges of tiles.
Among launchers that share a tile, the first is the plain case of a training step; the later ones are variants (factors,
an fp32 residual stream, tanh) that only compile to other code. Those for edges.py alone have another scale, logits in
the hundreds, a constant row, every optional sum at once, oblong images, several prefix tokens or none.
"""

import torch
from torch import Tensor

from ...kernels import rows
from ...kernels.layer_norm import forward as layer_norm
from ...kernels.layer_norm.backward import layer_norm_bwd
from ...kernels.patch_embed import forward as patch_embed
from ...kernels.patch_embed.backward import Gradients, patch_embed_bwd
from ...ops import packed
from ...ops import reference as ref
from .attention_launchers import attentions
from .draw import Draw, Sizes
from .launcher import Launcher, gradients, wide
from .product_launchers import products

EPS = 1e-6
HALF = (0.5, 0.5, 0.5)
MEAN, STD = (0.48, 0.46, 0.41), (0.23, 0.22, 0.26)


def every_launcher(s: Sizes) -> dict[str, Launcher]:
    """Name -> launcher, at these sizes, those that matter most in a training step first."""
    return products(s) | attentions(s) | _norms(s) | _norm_backwards(s) | _sums(s) | _patch_embeddings(s)


def launchers(s: Sizes) -> dict[str, Launcher]:
    """The launchers whose inputs occur in a training step."""
    return {name: launcher for name, launcher in every_launcher(s).items() if not launcher.edge}


# ---- LayerNorm, and what goes along rows


def statistics(x: Tensor, rms: bool = False) -> tuple[Tensor | None, Tensor]:
    """LayerNorm's mean and rstd of every row; None and RMSNorm's rstd."""
    work = x.to(wide(x))
    if rms:
        return None, (work.square().mean(-1) + EPS).rsqrt()
    return work.mean(-1), (work.var(-1, unbiased=False) + EPS).rsqrt()


def scaled_rows(x: Tensor, drop: Tensor, layer_scale: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """(x with each sample's rows times its factor and the layer scale, its column sums)."""
    scaled = x.to(wide(x)) * drop.repeat_interleave(len(x) // len(drop))[:, None] * layer_scale
    return scaled.to(x.dtype), scaled.sum(0)


def _with_constant_row(x: Tensor) -> Tensor:
    x[0] = 1.5
    return x


def _norms(s: Sizes) -> dict[str, Launcher]:
    m, d, shape = s.rows, s.width, (s.batch, s.tokens, s.width)

    def norm(t: Draw, constant: bool = False) -> tuple:
        x = t.values(m, d)
        return _with_constant_row(x) if constant else x, t.values(d), t.values(d)

    def norm_formula(x, w, b):
        return ref.layer_norm(x, w, b, EPS), *statistics(x)

    def added(t: Draw, factors: bool = False, **stream) -> tuple:
        """x, the residual, weight and bias; with factors the layer scale and the drop path.

        stream: dtype= for the residual and the parameters.
        """
        rows_and_parameters = t.values(m, d), *(t.values(*size, **stream) for size in ((m, d), (d,), (d,)))
        return *rows_and_parameters, *((t.values(d, **stream), t.factors(s.batch)) if factors else ())

    def add_norm(x, res, w, b, ls=None, drop=None):
        return layer_norm.add_layer_norm_fwd(x, res, w, b, EPS, ls, drop, s.tokens, x.dtype)

    def add_norm_formula(x, res, w, b, ls=None, drop=None):
        y, z = ref.add_layer_norm(x.view(shape), res.view(shape), w, b, EPS, layer_scale=ls, drop_path=drop)
        return y.view(m, d).to(x.dtype), z.view(m, d), *statistics(z.view(m, d))

    return {
        "layer_norm": Launcher(norm, lambda *t: layer_norm.layer_norm_fwd(*t, EPS), norm_formula),
        "layer_norm, a constant row": Launcher(
            lambda t: norm(t, constant=True), lambda *t: layer_norm.layer_norm_fwd(*t, EPS), norm_formula, edge=True
        ),
        "rms_norm": Launcher(
            lambda t: (t.values(m, d), t.values(d)),
            lambda x, w: layer_norm.layer_norm_fwd(x, w, None, EPS, rms=True)[::2],
            lambda x, w: (ref.rms_norm(x, w, EPS), *statistics(x, rms=True)),
            variant=True,
        ),
        "add + layer_norm": Launcher(added, add_norm, add_norm_formula),
        "add + layer_norm, factors": Launcher(
            lambda t: added(t, factors=True), add_norm, add_norm_formula, variant=True
        ),
        "add + layer_norm, fp32 stream": Launcher(
            lambda t: added(t, factors=True, dtype=torch.float32), add_norm, add_norm_formula, edge=True
        ),
    }


def _norm_backwards(s: Sizes) -> dict[str, Launcher]:
    m, d = s.rows, s.width

    def backward(
        rms: bool = False, factors: bool = False, sums: bool = False, variant: bool = False, edge: bool = False, **kind
    ) -> Launcher:
        """A backward of LayerNorm or RMSNorm.

        factors: z is res + a scaled branch. sums: dz is given and summed too, and the norm's output is written again.
        kind: dtype=torch.float32 for a stream and parameters in fp32 around a branch in 16 bit.
        """

        def make(t: Draw) -> tuple:
            z = _with_constant_row(t.values(m, d, **kind)) if edge else t.values(m, d, **kind)
            w, b = t.values(d, **kind), None if rms else t.values(d, **kind)
            dz = t.values(m, d, **kind) if factors or sums else None
            branch = (t.values(m, d), t.values(d, **kind), t.factors(s.batch)) if factors else (None,) * 3
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

        return Launcher(make, call, formula, variant, edge)

    return {
        "layer_norm backward in a block": backward(sums=True),
        "layer_norm backward": backward(),
        "rms_norm backward in a block": backward(rms=True, sums=True, variant=True),
        "add + layer_norm backward, factors": backward(factors=True),
        "layer_norm backward, every sum": backward(factors=True, sums=True, edge=True),
        "layer_norm backward, every sum, fp32 stream": backward(
            factors=True, sums=True, edge=True, dtype=torch.float32
        ),
    }


def _sums(s: Sizes) -> dict[str, Launcher]:
    m, d = s.rows, s.width

    def column_sums(*shapes: tuple[int, int], dtype: torch.dtype | None = None, variant: bool = False) -> Launcher:
        def make(t: Draw) -> tuple:
            return t.values(0, dtype=dtype), *(t.workspace(*shape) for shape in shapes)

        def call(like, *sums):
            return tuple(rows.column_sums(like, sums))

        return Launcher(make, call, lambda like, *sums: tuple(ws.sum(0) for ws in sums), variant)

    of_norm, of_activation = (396, d), (-(-m // 128), s.hidden)

    return {
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
        "scaled rows, layer scale": Launcher(
            lambda t: (t.values(m, d), t.values(d), t.factors(s.batch)),
            lambda *t: rows.scale_rows(*t, s.tokens),
            lambda x, ls, drop: scaled_rows(x, drop, ls),
            edge=True,
        ),
        "column sums, layer_norm": column_sums(of_norm),
        "column sums, gelu": column_sums(of_activation, dtype=torch.float32),
        "column sums, gated MLP's block": column_sums(*[of_norm] * 3, *[of_activation] * 2, variant=True),
    }


# ---- from images to tokens and back


def _patch_embedding(
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
    d, edge, tall = s.width, across > 0, s.image // s.patch
    patches = tall * (across or tall)
    count = s.batch * patches  # of patches of all images
    positions = (count, d) if together else (1, patches if edge else prefix + patches, d)
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

    return Launcher(make, call, formula, edge=edge), Launcher(
        lambda t: (t.values(*upstream), *make(t)),
        backward,
        lambda dy, *inputs: gradients(formula, inputs, dy),
        edge=edge,
    )


def _patch_embeddings(s: Sizes) -> dict[str, Launcher]:
    across = s.image // s.patch + 2
    found = {}
    for name, both in {
        ", uint8": _patch_embedding(s, 1, HALF, HALF),
        "": _patch_embedding(s),
        ", fp32 images": _patch_embedding(s, floats=torch.float32),
        ", packed": _patch_embedding(s, 1, HALF, HALF, together=True),
        ", oblong, 4 prefix tokens": _patch_embedding(s, 4, across=across),
        ", uint8, oblong, no prefix": _patch_embedding(s, 0, MEAN, STD, across=across),
    }.items():
        backward = f"patch embedding{name}, backward" if name else "patch embedding backward"
        found[f"patch embedding{name}"], found[backward] = both
    return found
