"""The tensors that the blocks of a ViT keep for backward, by the memory there is.

keep: "least", "all" (see ops/blocks.py) or "auto": "all" where the memory of the GPU has room for it, found out for the
most tokens seen.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

KEEPS = ("auto", "all", "least")
DEVICES = ("cuda",)  # types of devices that say how much memory is free
USABLE = 0.9  # share of the GPU's memory for tensors; the rest: context, workspaces, fragments (assumed)


def block_bytes(block: nn.Module, rows: int, size: int, keep: str) -> dict[str, int]:
    """Bytes that one layer keeps of `rows` tokens, by kind. size: of a number; keep: "least" or "all"."""
    d, f = block.norm1.normalized_shape[0], block.mlp.fc1.out_features
    kept = {
        "residual stream": 2 * rows * d * (4 if block.residual_in_fp32 else size),  # the input of each fused block
        "statistics": 2 * 2 * rows * 4,  # mean and 1/std of each row, fp32
        "qkv": 3 * rows * d * size,
        "attention output": rows * d * size,
        "lse": rows * block.attn.num_heads * 4,
        "pre-activation": rows * f * size,
    }
    return kept | {"norms": 2 * rows * d * size, "activation": rows * f * size} if keep == "all" else kept


def choose(
    blocks: Iterable[nn.Module], parameters: Iterable[nn.Parameter], rows: int, size: int, device: torch.device
) -> str:
    """ "all" where it fits into what is free on a GPU, "least" elsewhere.

    Parameters without a gradient are taken to get one, and AdamW's two moments, later: 12 bytes each.
    """
    if device.type not in DEVICES:
        return "least"
    blocks = list(blocks)
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    kept = sum(sum(block_bytes(block, rows, size, "all").values()) for block in blocks)
    working = max(rows * (block.norm1.normalized_shape[0] + 2 * block.mlp.fc1.out_features) * size for block in blocks)
    coming = sum(12 * p.numel() for p in parameters if p.requires_grad and p.grad is None)
    return "all" if kept + working + coming <= USABLE * free else "least"


def set_blocks(vit: nn.Module, keep: str) -> None:
    """Every block of a ViT keeps "least" or "all" from now on."""
    for block in vit.blocks:
        block.keep = keep


def settle(vit: nn.Module, rows: int, dtype: torch.dtype | None) -> None:
    """Settles keep="auto" of a ViT for `rows` tokens at a time in `dtype` (the parameters' unless given)."""
    weight = vit.patch_embed.proj.weight
    if vit.keep == "auto" and weight.device.type in DEVICES and not vit.grad_checkpointing:
        vit._keep_rows = rows
        size = (dtype or weight.dtype).itemsize
        set_blocks(vit, choose(vit.blocks, vit.parameters(), rows, size, weight.device))


def settle_in_training(vit: nn.Module, x: Tensor) -> None:
    """The same for tokens x (B, N, D) of an eager training forward, where they are more than ever before."""
    if vit.keep != "auto" or not vit.training or not torch.is_grad_enabled():
        return
    if torch.compiler.is_compiling() or not isinstance(x, Tensor):
        return
    rows, kind = x.shape[0] * x.shape[1], x.device.type
    if kind in DEVICES and rows > vit._keep_rows:
        settle(vit, rows, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None)
