"""What a training step of a plain ViT does not ask of the launchers, for the plan of edges.py.

Separate tensors of different strides, another scale than 1 / sqrt(Dh), logits in the hundreds, a constant row, every
optional sum at once, images that are not square, several prefix tokens or none, a normalisation for each channel.
"""

import torch
from torch import Tensor

from .. import ref
from ..kernels import attention, layer_norm, patch_embed, rows
from .launchers import EPS, Draw, Launcher, Sizes, gradients, statistics, wide

RAW = dict(mean=(0.48, 0.46, 0.41), std=(0.23, 0.22, 0.26))
PREFIX = 4


def more_launchers(s: Sizes) -> dict[str, Launcher]:
    """Name -> launcher, at these sizes."""
    return _attention(s) | _along_rows(s) | _patches(s)


def _attention(s: Sizes) -> dict[str, Launcher]:
    head = s.width // s.heads
    scale = 0.7 * head**-0.5

    def separate(t: Draw, size: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        q = t.values(s.batch, s.tokens, s.heads, head, scale=size)
        k = t.values(s.batch, s.heads, s.tokens, head).transpose(1, 2)
        return q, k, t.values(s.tokens, s.batch, s.heads, head).transpose(0, 1)

    def forward(q, k, v):
        logits = torch.einsum("bnhd,bmhd->bhnm", q.to(wide(q)), k.to(wide(k))) * scale
        return ref.attention(q, k, v, scale=scale), logits.logsumexp(-1)

    def for_backward(t: Draw) -> tuple:
        q, k, v = separate(t)
        return q, k, v, *forward(q, k, v), t.values(s.batch, s.tokens, s.heads, head)

    return {
        "attention, peaked, separate tensors": Launcher(
            lambda t: separate(t, size=64.0), lambda q, k, v: attention.attention_fwd(q, k, v, scale), forward
        ),
        "attention backward, separate tensors": Launcher(
            for_backward,
            lambda *t: attention.attention_bwd_separate(*t, scale),
            lambda q, k, v, o, lse, do: gradients(lambda *t: ref.attention(*t, scale=scale), (q, k, v), do),
        ),
    }


def _along_rows(s: Sizes) -> dict[str, Launcher]:
    m, d = s.batch * s.tokens, s.width

    def with_constant_row(t: Draw) -> Tensor:
        x = t.values(m, d)
        x[0] = 1.5
        return x

    def every_input(t: Draw) -> tuple:
        z = with_constant_row(t)
        parameters, factors = (t.values(d), t.values(d)), (t.values(d), t.factors(s.batch))
        return t.values(m, d), z, *parameters, *statistics(z), t.values(m, d), t.values(m, d), *factors

    def every_sum(dy, z, w, b, mean, rstd, dz, branch, ls, drop):
        given = dict(dz=dz, branch=branch, layer_scale=ls, drop_path=drop, rows_per_sample=s.tokens)
        wanted = dict(want_layer_scale=True, want_dz_sum=True, want_y=True)
        return layer_norm.layer_norm_bwd(dy, z, w, b, mean, rstd, **given, **wanted)

    def every_sum_formula(dy, z, w, b, mean, rstd, dz, branch, ls, drop):
        dres, dw, db = gradients(lambda z, w, b: ref.layer_norm(z, w, b, EPS), (z, w, b), dy)
        dres = dres + dz
        dropped = dres.to(wide(dres)) * drop.repeat_interleave(s.tokens)[:, None]
        dls, dz_sum = (dropped * branch).sum(0), dz.sum(0, dtype=wide(dz))
        return dres, (dropped * ls).to(dy.dtype), dw, db, dls, dz_sum, ref.layer_norm(z, w, b, EPS)

    def scaled(x, ls, drop):
        result = x.to(wide(x)) * drop.repeat_interleave(s.tokens)[:, None] * ls
        return result.to(x.dtype), result.sum(0)

    return {
        "scaled rows, layer scale": Launcher(
            lambda t: (t.values(m, d), t.values(d), t.factors(s.batch)),
            lambda x, ls, drop: rows.scale_rows(x, ls, drop, s.tokens),
            scaled,
        ),
        "layer_norm, a constant row": Launcher(
            lambda t: (with_constant_row(t), t.values(d), t.values(d)),
            lambda x, w, b: layer_norm.layer_norm_fwd(x, w, b, EPS),
            lambda x, w, b: (ref.layer_norm(x, w, b, EPS), *statistics(x)),
        ),
        "layer_norm backward, every sum": Launcher(every_input, every_sum, every_sum_formula),
    }


def _patches(s: Sizes) -> dict[str, Launcher]:
    d, across = s.width, s.image // s.patch + 2
    patches, pixels = (s.image // s.patch) * across, (s.batch, 3, s.image, across * s.patch)
    wanted = dict(want_weight=True, want_bias=True, want_pos=True, pos_len=patches)

    def weight_and_bias(t: Draw) -> tuple[Tensor, Tensor]:
        return t.weight(d, 3, s.patch, s.patch), t.values(d)

    def tensors(t: Draw) -> tuple:
        return t.values(*pixels), *weight_and_bias(t), t.values(1, PREFIX, d), t.values(1, patches, d)

    def backward(dy, images, w, *_):
        images_too = dict(want_images=True, want_cls=True)
        return patch_embed.patch_embed_bwd(dy, images, w, None, None, prefix=PREFIX, **images_too, **wanted)

    def raw_tensors(t: Draw) -> tuple:
        return t.pixels(*pixels), *weight_and_bias(t), t.values(1, patches, d)

    def raw(images, w, b, pos):
        return ref.patch_embed(images, w, b, None, pos, **RAW)

    def raw_backward(dy, images, w, *_):
        parameters_alone = dict(want_images=False, want_cls=False)
        return patch_embed.patch_embed_bwd(dy, images, w, *RAW.values(), prefix=0, **parameters_alone, **wanted)

    return {
        "patch embedding, oblong, 4 prefix tokens": Launcher(
            tensors, lambda *t: patch_embed.patch_embed_fwd(*t, None, None), ref.patch_embed
        ),
        "patch embedding, oblong, 4 prefix tokens, backward": Launcher(
            lambda t: (t.values(s.batch, PREFIX + patches, d), *tensors(t)),
            backward,
            lambda dy, *t: gradients(ref.patch_embed, t, dy),
        ),
        "patch embedding, uint8, oblong, no prefix": Launcher(
            raw_tensors,
            lambda images, w, b, pos: patch_embed.patch_embed_fwd(images, w, b, None, pos, *RAW.values()),
            raw,
        ),
        "patch embedding, uint8, oblong, no prefix, backward": Launcher(
            lambda t: (t.values(s.batch, patches, d), *raw_tensors(t)),
            raw_backward,
            lambda dy, images, *t: gradients(lambda *t: raw(images, *t), t, dy),
        ),
    }
