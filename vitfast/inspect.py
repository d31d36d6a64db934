"""Looking inside a model (the ViT paper, 4.5 and D.7): what its positions and its attention learned."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import InputError
from .model import ViT


@torch.no_grad()
def position_similarity(model: ViT) -> Tensor:
    """Cosine similarity of each patch's position embedding to all others: (h, w, h, w) over the patch grid. Figure 7, middle."""
    if model.pos_embed is None:
        raise InputError("position_similarity: the model has no position embeddings")
    prefix = 0 if model.no_embed_class else model.num_prefix_tokens
    table = F.normalize(model.pos_embed[0, prefix:].float(), dim=-1)
    return (table @ table.T).unflatten(0, model.patch_embed.grid_size).unflatten(-1, model.patch_embed.grid_size)


@torch.no_grad()
def attention_rollout(model: ViT, images: Tensor) -> Tensor:
    """How much each patch reaches the output, (B, h, w), each map summing to 1. Figure 6; Abnar & Zuidema, 2020.

    Attention averaged over the heads, plus the identity, rows renormalised, multiplied through the layers; then the class token's row,
    or the mean over the patches' rows in a model without one.
    """
    rollout = None
    for attention in model.attention_maps(images):
        mixed = attention.mean(1) + torch.eye(attention.shape[-1], device=attention.device)
        mixed = mixed / mixed.sum(-1, keepdim=True)
        rollout = mixed if rollout is None else mixed @ rollout
    prefix = model.num_prefix_tokens
    row = rollout[:, 0, prefix:] if model.has_class_token else rollout[:, prefix:, prefix:].mean(1)
    grid = model.patch_embed.dynamic_feat_size(images.shape[-2:])
    return (row / row.sum(-1, keepdim=True)).unflatten(-1, grid)
