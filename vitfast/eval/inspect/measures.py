"""Measures of learned filters, positions and attention (the ViT paper, 4.5, D.7, D.8).

Images are (B, C, H, W), raw uint8 or normalised floats, on any device. One layer's attention over a few images is held
at a time.
"""

import math
from collections.abc import Iterator
from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import InputError
from ...model import positions
from ...model.vit import ViT

HELD = 2**28  # bytes of one layer's attention matrices


@torch.no_grad()
def filter_components(model: ViT, count: int = 28) -> tuple[Tensor, Tensor]:
    """Principal components of the patch filters, (n, C, P, Q), and their shares of the variance, (n,).

    Components have unit length; the largest share comes first. Their sign, which is free, makes the entry of largest
    size positive. n is `count` or, if smaller, the rank of the centred filters. Computed in float64. Figure 7, left.
    """
    weight = model.patch_embed.proj.weight
    filters = weight.double().flatten(1)
    _, lengths, components = torch.linalg.svd(filters - filters.mean(0), full_matrices=False)
    noise = filters.abs().max() * filters.numel() ** 0.5 * torch.finfo(weight.dtype).eps
    rank = int((lengths > noise).sum())
    components, share = components[: min(count, rank)], lengths.square() / lengths.square().sum()
    largest = components.gather(1, components.abs().argmax(1, keepdim=True))
    return (components * largest.sign()).unflatten(1, weight.shape[1:]), share[: len(components)]


@torch.no_grad()
def position_similarity(model: ViT) -> Tensor:
    """Cosine similarity of each patch's position embedding to all others: (h, w, h, w) over the grid.

    If every layer has a table of its own, the first one is taken. Raises InputError if the model adds no positions to
    its patches. Figure 7, middle; Figure 10.
    """
    table = positions.absolute(model.config["pos_embed"], model.state_dict())
    if table is None:
        raise InputError("position_similarity: the model has no position embeddings")
    grid = model.patch_embed.grid_size
    table = F.normalize(table[0, -math.prod(grid) :].float(), dim=-1)
    return (table @ table.T).unflatten(0, grid).unflatten(-1, grid)


def patch_distances(image: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """Pixels between the centres of any two patches, (N, N) in float64; image (H, W), grid (h, w)."""
    y, x = (torch.arange(n, dtype=torch.float64) * side / n for side, n in zip(image, grid))
    centres = torch.cartesian_prod(y, x)
    return (centres[:, None] - centres).norm(dim=-1)


@torch.no_grad()
def attention_distance(model: ViT, images: Tensor) -> Tensor:
    """Mean attention distance of each head of each layer, (L, H) in pixels. Figure 7, right; Figure 11.

    That is the distance from query to key patch, averaged with the attention as weights, then over all query patches
    and images. A class token and registers have no place in the image: they are left out as queries and as keys, and
    what remains of each query's attention is renormalised to 1. (A query whose attention goes to them alone, to the
    last bit, counts as 0.)
    """
    grid, prefix = model.patch_embed.dynamic_feat_size(images.shape[-2:]), model.num_prefix_tokens
    total = 0.0
    for batch in _batches(model, images):
        layers = []
        for attention in model.each_attention_map(batch):
            attention = attention[:, :, prefix:, prefix:]
            distances = patch_distances(images.shape[-2:], grid).to(attention)
            reached = torch.einsum("bhqk,qk->bhq", attention, distances)
            kept = attention.sum(-1).clamp_min(torch.finfo(attention.dtype).tiny)
            layers.append((reached / kept).mean(-1).sum(0).double())
        total = total + torch.stack(layers)
    return total / len(images)


@torch.no_grad()
def attention_rollout(model: ViT, images: Tensor) -> Tensor:
    """How much of each patch reaches the output, (B, h, w), each map summing to 1.

    In each layer the attention is averaged over the heads, the identity is added, and rows are renormalised; the
    matrices of all layers are multiplied. The map is the row of the class token, or the mean of the patches' rows if
    `reads_class_token` is False. Figure 6; Abnar & Zuidema, 2020.
    """
    grid, prefix = model.patch_embed.dynamic_feat_size(images.shape[-2:]), model.num_prefix_tokens
    maps = []
    for batch in _batches(model, images):
        rollout = None
        for attention in model.each_attention_map(batch):
            mixed = attention.mean(1) + torch.eye(attention.shape[-1], device=attention.device)
            mixed = mixed / mixed.sum(-1, keepdim=True)
            rollout = mixed if rollout is None else mixed @ rollout
        maps.append(rollout[:, 0, prefix:] if reads_class_token(model) else rollout[:, prefix:, prefix:].mean(1))
    row = torch.cat(maps)
    return (row / row.sum(-1, keepdim=True)).unflatten(-1, grid)


def reads_class_token(model: ViT) -> bool:
    """Whether the rollout is of the class token: the model has one and does not pool its patches."""
    return model.has_class_token and model.global_pool not in ("avg", "map")


def examine(model: ViT, images: Tensor) -> dict[str, Tensor]:
    """All measures: "distance", "rollout", and where the model has them "filters", "share", "positions".

    Filters of one or three channels are pictures; others (a hybrid's, which read a feature map) are not.
    """
    found = dict(distance=attention_distance(model, images), rollout=attention_rollout(model, images))
    components, share = filter_components(model)
    if len(components) and components.shape[1] in (1, 3):
        found.update(filters=components, share=share)
    with suppress(InputError):  # it adds no positions to its patches
        found["positions"] = position_similarity(model)
    return found


def _batches(model: ViT, images: Tensor) -> Iterator[Tensor]:
    """The images on the model's device, as many at a time as keep a layer's attention in HELD bytes."""
    height, width = model.patch_embed.dynamic_feat_size(images.shape[-2:])
    tokens = model.num_prefix_tokens + height * width
    at_once = max(1, HELD // (4 * model.blocks[0].attn.num_heads * tokens**2))
    for batch in images.split(at_once):
        yield batch.to(model.patch_embed.proj.weight.device)
