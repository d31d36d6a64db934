"""The memory of a training step on vitfast's kernels under autocast.

It consists of fp32 parameters, gradients and optimiser state, 16-bit copies of the linear layers, and the tensors that
vitfast.ops keeps for backward. Everything is in bytes; size: bytes of a number in the products.
"""

import math

import torch

from ...model.activation_memory import block_bytes, mlp_working
from ...model.hybrid import HybridEmbed
from ...model.layers import OF_NORMS
from ...model.vit import ViT
from .steps import dropout, resnet, tokens_of


def kept_bytes(model: ViT, batch: int, size: int = 2, pixel_size: int = 1, keep: str = "least") -> dict[str, int]:
    """Bytes that vitfast.ops saves in a forward pass for its backward, by kind, without the parameters.

    keep: "least" or "all". Where dropout is on, the blocks run on the smaller operations, which keep more: the norms'
    outputs, the activation, and masks.
    """
    m, block, depth, d = batch * tokens_of(model), model.blocks[0], len(model.blocks), model.embed_dim
    f, stem, image = block.mlp.fc1.out_features, model.patch_embed, (model.in_chans, *model.patch_embed.img_size)
    norm, read = type(model.norm) in OF_NORMS, batch if model.global_pool else m  # read: rows that the head reads
    dropped, hybrid = dropout(model) > 0, isinstance(stem, HybridEmbed)
    kept = {
        "images": 0 if hybrid else batch * math.prod(image) * pixel_size,
        "ResNet": resnet(stem.backbone, batch, image, size)[1] if hybrid else 0,
    }
    kept |= {kind: depth * held for kind, held in block_bytes(block, m, size, "least" if dropped else keep).items()}
    each = 4 * (2 - (block.norm1.bias is None))
    kept["statistics"] += each * (m if norm else read)  # of the last norm
    if type(model.norm_pre) in OF_NORMS:
        kept["norm before the blocks"] = m * (d * size + each)
    if model.config["rope"] is not None:  # cos and sin, fp32
        kept["rotary positions"] = stem.num_patches * block.attn.head_dim * 4
    if model.attn_pool is not None:
        kept["MAP head"] = _map_head(model, batch, size) + batch * each
    if dropped:
        kept["norms and activations (dropout)"] = depth * m * (2 * d + f) * size
        kept["masks (dropout)"] = depth * m * (2 * d + f) + (m * d if model.pos_drop.p > 0 else 0)  # one byte each
    # The last norm's input, and its output, which the head reads; a mean keeps neither.
    pooled = read * d if model.global_pool == "avg" else m * d
    hidden = read * model.head_hidden_size if hasattr(model.pre_logits, "fc") else 0
    kept["head"] = size * ((m * d if norm else pooled) + pooled + hidden)
    return kept


def _map_head(model: ViT, batch: int, size: int) -> int:
    """Bytes of keys, values, the query, the inputs of all later layers, and lse."""
    d, f = model.embed_dim, model.attn_pool.mlp.fc1.out_features
    numbers = 2 * batch * model.patch_embed.num_patches * d + batch * (5 * d + 2 * f)
    return numbers * size + batch * model.attn_pool.num_heads * 4


def state_bytes(
    model: torch.nn.Module, size: int = 2, optimizer: str = "adamw", averaged: bool = False
) -> dict[str, int]:
    """Bytes that stay from step to step, by kind."""
    total = sum(p.numel() for p in model.parameters())
    layers = [layer for layer in model.modules() if isinstance(layer, (torch.nn.Linear, torch.nn.Conv2d))]
    copied = sum(p.numel() for layer in layers for p in layer.parameters())
    return {
        "parameters": 4 * total,
        "gradients": 4 * total,
        "optimiser state": (8 if optimizer == "adamw" else 4) * total,
        "16-bit copies": size * copied if size < 4 else 0,
        "running average": 4 * total if averaged else 0,
    }


def working_bytes(model: ViT, batch: int, size: int = 2) -> int:
    """Bytes that are allocated only at the peak, the backward of the last MLP; an estimate, not measured.

    They are the gradients of its output and pre-activation, the activation, and the logits with their gradients.
    """
    m, working = batch * tokens_of(model), mlp_working(model.blocks[0])
    numbers = model.embed_dim * (4 if model.residual_in_fp32 else size) + working * size
    return m * numbers + batch * model.num_classes * (2 * size + 2 * 4)
