"""Chooses which tensors the blocks of a ViT keep for backward, by the memory that is free.

keep: "least", "all" (see ops/blocks.py) or "auto", which is "all" if the memory of the GPU has room for it, as
`ViT.decide_keep` finds out.
"""

import torch
from torch import nn

from .config import ViTConfig
from .sizes import USABLE, Sizes, block_bytes, row_working_bytes

DEVICES = ("cuda",)  # types of devices that say how much memory is free


def choose(vit: nn.Module, rows: int, size: int) -> str:
    """Returns "all" if a step that keeps everything fits into the GPU's free memory, else "least".

    rows: tokens at a time. size: bytes of an element of the matrix products. At its peak a step holds the tensors that
    the blocks and the last norm keep; those that only the backward of an MLP holds; logits and their gradients, in fp32
    too; copies of the parameters in the dtype of the products; gradients that do not exist yet, also in DDP's buckets;
    and AdamW's two moments.
    """
    device = next(vit.patch_embed.proj.parameters()).device
    if device.type not in DEVICES:
        return "least"
    sizes = Sizes(ViTConfig(**vit.config))
    block, d = sizes.block, sizes.block.width
    kept = len(vit.blocks) * sum(block_bytes(block, rows, size, "all").values()) + 2 * rows * d * size
    working = rows * row_working_bytes(block, size)
    logits = -(-rows // (sizes.prefix + sizes.patches)) * vit.num_classes
    gradient = 8 if torch.distributed.is_available() and torch.distributed.is_initialized() else 4
    total = kept + working + logits * (2 * size + 12)
    for p in vit.parameters():
        total += p.numel() * (size if size < p.itemsize else 0)
        if p.requires_grad:
            total += p.numel() * (8 + (gradient if p.grad is None else 0))
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return "all" if total <= USABLE * free else "least"


def choose_saved_activations(vit: nn.Module, rows: int, dtype: torch.dtype | None = None) -> str:
    """Sets what the blocks of a ViT keep from now on, as its `keep` says, and returns it.

    "auto" is decided for `rows` tokens at a time in `dtype` (by default the parameters'); with 0 rows it is "least".
    """
    kept = vit.keep if vit.keep != "auto" else "least"
    if vit.keep == "auto" and rows and not vit.grad_checkpointing:
        kept = choose(vit, rows, (dtype or next(vit.patch_embed.proj.parameters()).dtype).itemsize)
    for block in vit.blocks:
        block.keep = kept
    return kept
