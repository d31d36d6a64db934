"""Images to tokens (Eq. 1 of the ViT paper): patch projection, prefix tokens, positions."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import ref
from ..kernels.patch_embed import patch_embed_bwd, patch_embed_fwd
from ._dispatch import KERNEL_DTYPES, autocasts, check_shape, kernels_wanted, only_once
from ._gradients import chosen, filled, operation


class EmbedNeeds(NamedTuple):
    """Which gradients of patch_embed are needed."""

    images: bool
    weight: bool
    bias: bool
    cls_token: bool
    pos_embed: bool


@operation(
    "patch_embed",
    "Tensor images, Tensor weight, Tensor? bias, Tensor? cls_token, Tensor? pos_embed, float[] mean, float[] std",
    1,
)
def _forward(images, weight, bias, cls_token, pos_embed, mean, std):
    return patch_embed_fwd(images, weight, bias, cls_token, pos_embed, mean, std)


@_forward.register_fake
def _(images, weight, bias, cls_token, pos_embed, mean, std):
    width, _, p, q = weight.shape
    prefix = 0 if cls_token is None else cls_token.shape[1]
    tokens = prefix + (images.shape[2] // p) * (images.shape[3] // q)
    return weight.new_empty(images.shape[0], tokens, width)


@operation(
    "patch_embed_bwd",
    "Tensor dy, Tensor? images, Tensor weight, float[] mean, float[] std, SymInt prefix, SymInt pos_len, "
    "ScalarType? bias_dtype, ScalarType? cls_dtype, ScalarType? pos_dtype, bool[] needs",
    5,
)
def _backward(dy, images, weight, mean, std, prefix, pos_len, bias_dtype, cls_dtype, pos_dtype, needs):
    """Gradients of the five tensors, those of the last three in the dtypes given; empty where not needed."""
    needs = EmbedNeeds(*needs)
    grads = patch_embed_bwd(
        dy,
        images,
        weight,
        mean,
        std,
        prefix=prefix,
        pos_len=pos_len,
        want_images=needs.images,
        want_weight=needs.weight,
        want_bias=needs.bias,
        want_cls=needs.cls_token,
        want_pos=needs.pos_embed,
        dtypes=(bias_dtype, cls_dtype, pos_dtype),
    )
    return filled(dy, *grads)


@_backward.register_fake
def _(dy, images, weight, mean, std, prefix, pos_len, bias_dtype, cls_dtype, pos_dtype, needs):
    width = weight.shape[0]
    wanted = (
        lambda: torch.empty(images.shape, dtype=images.dtype, device=dy.device),
        lambda: torch.empty(weight.shape, dtype=weight.dtype, device=dy.device),
        lambda: dy.new_empty(width, dtype=bias_dtype),
        lambda: dy.new_empty(1, prefix, width, dtype=cls_dtype),
        lambda: dy.new_empty(1, pos_len, width, dtype=pos_dtype),
    )
    return tuple(make() if need else dy.new_empty(0) for make, need in zip(wanted, needs))


def _setup_context(ctx, inputs, output):
    images, weight, bias, cls_token, pos_embed, ctx.mean, ctx.std = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(images if any(ctx.needs_input_grad[:2]) else None, weight)
    ctx.prefix = 0 if cls_token is None else cls_token.shape[1]
    ctx.pos_len = 0 if pos_embed is None else pos_embed.shape[1]
    ctx.dtypes = [None if t is None else t.dtype for t in (bias, cls_token, pos_embed)]


def _differentiate(ctx, dy):
    needs = list(ctx.needs_input_grad[:5])
    if dy is None or not any(needs):
        return (None,) * 7
    grads = _backward(dy, *ctx.saved_tensors, ctx.mean, ctx.std, ctx.prefix, ctx.pos_len, *ctx.dtypes, needs)
    return *chosen(grads, needs), None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)
only_once(_backward, "patch_embed")


_in_compute_dtype = autocasts(lambda weight: weight)


def _per_channel(value: float | Sequence[float] | None, default: float, chans: int) -> list[float]:
    values = list(value) if isinstance(value, Sequence) else [default if value is None else value]
    return [float(v) for v in (values * chans if len(values) == 1 else values)]


def patch_embed(
    images: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cls_token: Tensor | None = None,
    pos_embed: Tensor | None = None,
    *,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
) -> Tensor:
    """[prefix; patch_1 W; ...; patch_N W] + bias + positions.

    images (B, C, Hi, Wi): floats of any dtype, or uint8, of which (images / 255 - mean) / std is taken (mean 0, std 1
    unless given; a number or one per channel; floats are never normalised here). weight (D, C, P, Q); bias (D,) or
    None; cls_token (1, T, D), all prefix tokens, registers too; pos_embed (1, T+N, D), or (1, N, D) for the patches
    alone. Hi and Wi must be multiples of P and Q. Returns (B, T+N, D), contiguous, in the dtype of weight (under
    autocast: its dtype).
    """
    check_shape("patch_embed", "weight", weight, (None, None, None, None))
    width, chans, p, q = weight.shape
    check_shape("patch_embed", "images", images, (None, chans, None, None))
    height, length = images.shape[-2:]
    if height % p or length % q or not height or not length:
        raise ValueError(
            f"patch_embed: images must have sides that are multiples of the patch {p} x {q}, got {height} x {length}"
        )
    if not images.is_floating_point() and images.dtype != torch.uint8:
        raise TypeError(f"patch_embed: images must be floating point or uint8, got {images.dtype}")
    check_shape("patch_embed", "bias", bias, (width,))
    check_shape("patch_embed", "cls_token", cls_token, (1, None, width))
    check_shape("patch_embed", "pos_embed", pos_embed, (1, None, width))
    patches, prefix = (height // p) * (length // q), 0 if cls_token is None else cls_token.shape[1]
    if pos_embed is not None and pos_embed.shape[1] not in (patches, patches + prefix):
        raise ValueError(
            f"patch_embed: pos_embed must have {patches + prefix} or {patches} positions, got {pos_embed.shape[1]}"
        )
    for name, value in (("mean", mean), ("std", std)):
        if isinstance(value, Sequence) and len(value) not in (1, chans):
            raise ValueError(f"patch_embed: {name} must be one number or {chans}, got {len(value)}")
    for name, tensor in (("images", images), ("bias", bias), ("cls_token", cls_token), ("pos_embed", pos_embed)):
        if tensor is not None and tensor.device != weight.device:
            raise ValueError(f"patch_embed: {name} must be on {weight.device} like weight, got {tensor.device}")
    # Autocast concerns the weight alone, which says what is computed in: the images, the largest tensor, are converted
    # as they are read.
    weight = _in_compute_dtype(weight)
    raw = images.dtype == torch.uint8
    given = (t for t in (images, bias, cls_token, pos_embed) if t is not None and t.is_floating_point())
    reason = next((f"no kernel reads {t.dtype}" for t in given if t.dtype not in KERNEL_DTYPES), None)
    if kernels_wanted("patch_embed", weight, reason):
        normalisation = (_per_channel(mean, 0.0, chans), _per_channel(std, 1.0, chans)) if raw else ([], [])
        return _forward(images, weight, bias, cls_token, pos_embed, *normalisation)
    return ref.patch_embed(images, weight, bias, cls_token, pos_embed, mean=mean, std=std)
