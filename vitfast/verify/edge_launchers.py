"""Launchers on inputs that a training step of a plain ViT does not give, for edges.py.

Separate tensors of different strides, another scale than 1 / sqrt(Dh), logits in the hundreds, a constant row, every
optional sum at once, images that are not square, several prefix tokens or none, a normalisation for each channel.
"""

from torch import Tensor

from .. import ref
from ..kernels import attention, layer_norm, rows
from .draw import Draw, Sizes
from .launchers import (
    EPS,
    Launcher,
    attention_formula,
    attention_gradients,
    block_norm_backward,
    block_norm_gradients,
    for_attention_backward,
    layer_norm_formula,
    patch_embedding,
    scaled_rows,
    statistics,
    wide,
)

MEAN, STD = (0.48, 0.46, 0.41), (0.23, 0.22, 0.26)


def edge_launchers(s: Sizes) -> dict[str, Launcher]:
    """Name -> launcher, at these sizes."""
    return _attention(s) | _along_rows(s) | _patch_embeddings(s)


def _attention(s: Sizes) -> dict[str, Launcher]:
    scale = 0.7 * s.head**-0.5

    def separate(t: Draw, size: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        q = t.values(s.batch, s.tokens, s.heads, s.head, scale=size)
        k = t.values(s.batch, s.heads, s.tokens, s.head).transpose(1, 2)
        return q, k, t.values(s.tokens, s.batch, s.heads, s.head).transpose(0, 1)

    return {
        "attention, peaked, separate tensors": Launcher(
            lambda t: separate(t, size=64.0),
            lambda q, k, v: attention.attention_fwd(q, k, v, scale),
            lambda q, k, v: attention_formula(q, k, v, scale),
        ),
        "attention backward, separate tensors": Launcher(
            lambda t: for_attention_backward(t, *separate(t), scale),
            lambda *t: attention.attention_bwd_separate(*t, scale),
            lambda q, k, v, o, lse, do: attention_gradients(q, k, v, do, scale),
        ),
    }


def _along_rows(s: Sizes) -> dict[str, Launcher]:
    m, d = s.rows, s.width

    def with_constant_row(t: Draw) -> Tensor:
        x = t.values(m, d)
        x[0] = 1.5
        return x

    def every_input(t: Draw) -> tuple:
        z = with_constant_row(t)
        parameters, factors = (t.values(d), t.values(d)), (t.values(d), t.factors(s.batch))
        return t.values(m, d), z, *parameters, *statistics(z), t.values(m, d), t.values(m, d), *factors

    def every_sum(dy, z, w, b, mean, rstd, dz, *scaled_branch):
        found = block_norm_gradients(dy, z, w, b, mean, rstd, dz, *scaled_branch)
        return *found, dz.sum(0, dtype=wide(dz)), ref.layer_norm(z, w, b, EPS)

    return {
        "scaled rows, layer scale": Launcher(
            lambda t: (t.values(m, d), t.values(d), t.factors(s.batch)),
            lambda x, ls, drop: rows.scale_rows(x, ls, drop, s.tokens),
            lambda x, ls, drop: scaled_rows(x, drop, ls),
        ),
        "layer_norm, a constant row": Launcher(
            lambda t: (with_constant_row(t), t.values(d), t.values(d)),
            lambda x, w, b: layer_norm.layer_norm_fwd(x, w, b, EPS),
            layer_norm_formula,
        ),
        "layer_norm backward, every sum": Launcher(
            every_input, lambda *t: block_norm_backward(s, *t, want_dz_sum=True, want_y=True), every_sum
        ),
    }


def _patch_embeddings(s: Sizes) -> dict[str, Launcher]:
    across = s.image // s.patch + 2
    patches = s.image // s.patch * across
    several, several_backward = patch_embedding(s, across, 4, patches)
    none, none_backward = patch_embedding(s, across, 0, patches, MEAN, STD)
    return {
        "patch embedding, oblong, 4 prefix tokens": several,
        "patch embedding, oblong, 4 prefix tokens, backward": several_backward,
        "patch embedding, uint8, oblong, no prefix": none,
        "patch embedding, uint8, oblong, no prefix, backward": none_backward,
    }
