"""Settles what the blocks of a ViT keep for backward, where it is left to the memory there is."""

import torch
from torch import Tensor, nn

from . import keep


def set_blocks(vit: nn.Module, kept: str) -> None:
    """Every block of a ViT keeps "least" or "all" from now on."""
    for block in vit.blocks:
        block.keep = kept


def settle(vit: nn.Module, rows: int, dtype: torch.dtype | None) -> None:
    """Settles keep="auto" of a ViT for `rows` tokens at a time in `dtype` (the parameters' unless given)."""
    weight = vit.patch_embed.proj.weight
    if vit.keep == "auto" and weight.device.type in keep.DEVICES and not vit.grad_checkpointing:
        vit._keep_rows = rows
        size, tokens = (dtype or weight.dtype).itemsize, vit.num_prefix_tokens + vit.patch_embed.num_patches
        logits = -(-rows // tokens) * vit.num_classes
        set_blocks(vit, keep.choose(vit.blocks, vit.parameters(), rows, logits, size, weight.device))


def settle_in_training(vit: nn.Module, x: Tensor) -> None:
    """The same for tokens x (..., D) of an eager training forward, where they are more than ever before."""
    if vit.keep != "auto" or not vit.training or not torch.is_grad_enabled():
        return
    if torch.compiler.is_compiling() or not isinstance(x, Tensor):
        return
    rows, kind = x.shape[:-1].numel(), x.device.type
    if kind in keep.DEVICES and rows > vit._keep_rows:
        settle(vit, rows, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None)
