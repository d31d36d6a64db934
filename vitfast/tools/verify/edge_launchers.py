"""Launchers on inputs that a training step of a plain ViT does not give, for edges.py.

Separate tensors of different strides, another scale than 1 / sqrt(Dh), logits in the hundreds, a constant row, every
optional sum at once, an fp32 stream, oblong images, several prefix tokens or none, a normalisation for each channel.
"""

import torch
from torch import Tensor

from ...kernels import rows
from ...kernels.attention import launchers as attention
from ...kernels.layer_norm import forward as layer_norm
from ...ops import reference as ref
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

    def with_constant_row(t: Draw, **kind) -> Tensor:
        x = t.values(m, d, **kind)
        x[0] = 1.5
        return x

    def every_input(t: Draw, **kind) -> tuple:
        """kind: dtype=torch.float32 for a stream and parameters in fp32 around a branch in 16 bit."""
        z = with_constant_row(t, **kind)
        parameters = t.values(d, **kind), t.values(d, **kind)
        factors = t.values(d, **kind), t.factors(s.batch)
        branch = t.values(m, d, **kind), t.values(m, d)
        return t.values(m, d), z, *parameters, *launchers.statistics(z), *branch, *factors

    def every_sum(dy, z, w, b, mean, rstd, dz, *scaled_branch):
        found = launchers.block_norm_gradients(dy, z, w, b, mean, rstd, dz, *scaled_branch)
        return *found, dz.sum(0, dtype=wide(dz)), ref.layer_norm(z, w, b, EPS).to(dy.dtype)

    def every_result(*t) -> tuple:
        return launchers.block_norm_backward(s, *t, want_dz_sum=True, want_y=True)

    def add_norm(x, res, w, b, ls, drop):
        return layer_norm.add_layer_norm_fwd(x, res, w, b, EPS, ls, drop, s.tokens, x.dtype)

    def add_norm_formula(x, res, w, b, ls, drop):
        z = res + launchers.scaled_rows(x.to(wide(x)), drop, ls)[0]
        return ref.layer_norm(z, w, b, EPS).to(x.dtype), z, *launchers.statistics(z)

    fp32 = dict(dtype=torch.float32)
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
        "layer_norm backward, every sum": Launcher(every_input, every_result, every_sum),
        "layer_norm backward, every sum, fp32 stream": Launcher(
            lambda t: every_input(t, **fp32), every_result, every_sum
        ),
        "add + layer_norm, fp32 stream": Launcher(
            lambda t: (
                t.values(m, d),
                *(t.values(*shape, **fp32) for shape in ((m, d), (d,), (d,), (d,))),
                t.factors(s.batch),
            ),
            add_norm,
            add_norm_formula,
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
