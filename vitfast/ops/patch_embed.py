"""Images to tokens: patch projection, prefix tokens and position embeddings in one operation (Eq. 1 of the ViT paper)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import ref
from ._dispatch import autocasts, check_shape, kernels_wanted


@autocasts
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

    images (B, C, Hi, Wi): floats of any dtype, or uint8, of which (images / 255 - mean) / std is taken (mean 0, std 1 unless given;
    a number or one per channel; floats are never normalised here). weight (D, C, P, Q); bias (D,) or None; cls_token (1, T, D), all
    prefix tokens, registers too; pos_embed (1, T+N, D), or (1, N, D) for the patches alone. Hi and Wi must be multiples of P and Q.
    Returns (B, T+N, D), contiguous, in the dtype of weight (under autocast: its dtype).
    """
    check_shape("patch_embed", "weight", weight, (None, None, None, None))
    width, chans, p, q = weight.shape
    check_shape("patch_embed", "images", images, (None, chans, None, None))
    height, length = images.shape[-2:]
    if height % p or length % q or not height or not length:
        raise ValueError(f"patch_embed: images must have sides that are multiples of the patch {p} x {q}, got {height} x {length}")
    if not images.is_floating_point() and images.dtype != torch.uint8:
        raise TypeError(f"patch_embed: images must be floating point or uint8, got {images.dtype}")
    check_shape("patch_embed", "bias", bias, (width,))
    check_shape("patch_embed", "cls_token", cls_token, (1, None, width))
    check_shape("patch_embed", "pos_embed", pos_embed, (1, None, width))
    patches, prefix = (height // p) * (length // q), 0 if cls_token is None else cls_token.shape[1]
    if pos_embed is not None and pos_embed.shape[1] not in (patches, patches + prefix):
        raise ValueError(f"patch_embed: pos_embed must have {patches + prefix} or {patches} positions, got {pos_embed.shape[1]}")
    for name, value in (("mean", mean), ("std", std)):
        if isinstance(value, Sequence) and len(value) not in (1, chans):
            raise ValueError(f"patch_embed: {name} must be one number or {chans}, got {len(value)}")
    for name, tensor in (("images", images), ("bias", bias), ("cls_token", cls_token), ("pos_embed", pos_embed)):
        if tensor is not None and tensor.device != weight.device:
            raise ValueError(f"patch_embed: {name} must be on {weight.device} like weight, got {tensor.device}")
    kernels_wanted("patch_embed", images)
    return ref.patch_embed(images, weight, bias, cls_token, pos_embed, mean=mean, std=std)
