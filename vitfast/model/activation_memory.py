"""Chooses which tensors the blocks of a ViT keep for backward, by the memory that is free.

keep: "least", "all" (see ops/_blocks.py) or "auto", which is "all" if the memory of the GPU has room for it, as
`ViT.decide_keep` finds out.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from .sizes import USABLE, BlockSizes, block_bytes, mlp_working

DEVICES = ("cuda",)  # types of devices that say how much memory is free


def sizes_of(block: nn.Module) -> BlockSizes:
    """The sizes of a layer as it is now."""
    d, f, mlp = block.norm1.normalized_shape[0], block.mlp.fc2.in_features, block.mlp
    norms = hasattr(mlp.norm, "weight"), block.norm1.bias is not None
    return BlockSizes(d, block.attn.num_heads, f, mlp.fc1.out_features, *norms, block.residual_in_fp32)


def choose(
    blocks: Sequence[nn.Module],
    parameters: Iterable[nn.Parameter],
    rows: int,
    logits: int,
    size: int,
    device: torch.device,
) -> str:
    """ "all" if training steps that keep all fit into the free memory of a GPU, else "least".

    At its peak a step holds the tensors that the blocks and the last norm keep; those that only the backward of an MLP
    holds; `logits` elements and their gradients, in fp32 too; copies of the parameters in the dtype of the products;
    gradients that do not exist yet, also in DDP's buckets; and AdamW's two moments.
    """
    if device.type not in DEVICES:
        return "least"
    layers = [sizes_of(block) for block in blocks]
    d, stream = layers[0].width, 4 if layers[0].residual_in_fp32 else size
    kept = sum(sum(block_bytes(layer, rows, size, "all").values()) for layer in layers) + 2 * rows * d * size
    working = rows * (d * stream + max(map(mlp_working, layers)) * size)
    gradient = 8 if torch.distributed.is_available() and torch.distributed.is_initialized() else 4
    total = kept + working + logits * (2 * size + 12)
    for p in parameters:
        total += p.numel() * (size if size < p.itemsize else 0)
        if p.requires_grad:
            total += p.numel() * (8 + (gradient if p.grad is None else 0))
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return "all" if total <= USABLE * free else "least"


def choose_saved_activations(vit: nn.Module, rows: int, dtype: torch.dtype | None = None) -> str:
    """Sets what the blocks of a ViT keep from now on, as its `keep` says, and returns it.

    "auto" is decided for `rows` tokens at a time in `dtype` (by default the parameters'); rows 0: not known yet.
    """
    weight = next(vit.patch_embed.proj.parameters())
    kept = vit.keep if vit.keep != "auto" else "least"
    if vit.keep == "auto" and rows and weight.device.type in DEVICES and not vit.grad_checkpointing:
        size, tokens = (dtype or weight.dtype).itemsize, vit.num_prefix_tokens + vit.patch_embed.num_patches
        logits = -(-rows // tokens) * vit.num_classes
        kept = choose(vit.blocks, vit.parameters(), rows, logits, size, weight.device)
    for block in vit.blocks:
        block.keep = kept
    return kept
