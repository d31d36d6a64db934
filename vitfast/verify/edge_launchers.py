"""Launchers on inputs that a training step of a plain ViT does not give, for edges.py.

Separate tensors of different strides, another scale than 1 / sqrt(Dh), logits in the hundreds, a constant row, every
optional sum at once, images that are not square, several prefix tokens or none, a normalisation for each channel.
"""

from torch import Tensor

from .. import ref
from ..kernels import attention, layer_norm, rows
from . import attention_launchers, launchers
from .draw import Draw, Sizes
from .launcher import Launcher, wide
from .launchers import EPS

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
            lambda *t: attention.attention_fwd(*t, scale),
            lambda *t: attention_launchers.attention_formula(*t, scale),
        ),
        "attention backward, separate tensors": Launcher(
            lambda t: attention_launchers.for_attention_backward(t, *separate(t), scale),
            lambda *t: attention.attention_bwd_separate(*t, scale),
            lambda q, k, v, o, lse, do: attention_launchers.attention_gradients(q, k, v, do, scale),
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
        return t.values(m, d), z, *parameters, *launchers.statistics(z), t.values(m, d), t.values(m, d), *factors

    def every_sum(dy, z, w, b, mean, rstd, dz, *scaled_branch):
        found = launchers.block_norm_gradients(dy, z, w, b, mean, rstd, dz, *scaled_branch)
        return *found, dz.sum(0, dtype=wide(dz)), ref.layer_norm(z, w, b, EPS)

    return {
        "scaled rows, layer scale": Launcher(
            lambda t: (t.values(m, d), t.values(d), t.factors(s.batch)),
            lambda *t: rows.scale_rows(*t, s.tokens),
            lambda x, ls, drop: launchers.scaled_rows(x, drop, ls),
        ),
        "layer_norm, a constant row": Launcher(
            lambda t: (with_constant_row(t), t.values(d), t.values(d)),
            lambda *t: layer_norm.layer_norm_fwd(*t, EPS),
            launchers.layer_norm_formula,
        ),
        "layer_norm backward, every sum": Launcher(
            every_input, lambda *t: launchers.block_norm_backward(s, *t, want_dz_sum=True, want_y=True), every_sum
        ),
    }


def _patch_embeddings(s: Sizes) -> dict[str, Launcher]:
    across = s.image // s.patch + 2
    patches = s.image // s.patch * across
    several, several_backward = launchers.patch_embedding(s, across, 4, patches)
    none, none_backward = launchers.patch_embedding(s, across, 0, patches, MEAN, STD)
    return {
        "patch embedding, oblong, 4 prefix tokens": several,
        "patch embedding, oblong, 4 prefix tokens, backward": several_backward,
        "patch embedding, uint8, oblong, no prefix": none,
        "patch embedding, uint8, oblong, no prefix, backward": none_backward,
    }
