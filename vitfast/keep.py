"""The tensors that the blocks of a ViT keep for backward, by the memory there is.

keep: "least", "all" (see ops/_blocks.py) or "auto": "all" where the memory of the GPU has room for it, found out for
the most tokens seen.
"""

from collections.abc import Iterable

import torch
from torch import nn

KEEPS = ("auto", "all", "least")
DEVICES = ("cuda",)  # types of devices that say how much memory is free
USABLE = 0.9  # share of the GPU's memory for tensors; the rest: context, workspaces, fragments (assumed)


def block_bytes(block: nn.Module, rows: int, size: int, keep: str) -> dict[str, int]:
    """Bytes that one layer keeps of `rows` tokens, by kind. size: of a number; keep: "least" or "all"."""
    d, f = block.norm1.normalized_shape[0], block.mlp.fc2.in_features
    before, normed = block.mlp.fc1.out_features, hasattr(block.mlp.norm, "weight")  # up and gate of a gated MLP
    statistics = 2 * (2 - (block.norm1.bias is None)) + 2 * normed  # mean and 1/std of each row, fp32
    kept = {
        "residual stream": 2 * rows * d * (4 if block.residual_in_fp32 else size),  # the input of each fused block
        "statistics": statistics * rows * 4,
        "qkv": 3 * rows * d * size,
        "attention output": rows * d * size,
        "lse": rows * block.attn.num_heads * 4,
        "pre-activation": rows * (before + normed * f) * size,
    }
    return kept | {"norms": 2 * rows * d * size, "activation": rows * f * size} if keep == "all" else kept


def mlp_working(block: nn.Module) -> int:
    """Numbers of a row that come and go in the MLP's backward: its activation, and gradients before that."""
    return block.mlp.fc1.out_features + block.mlp.fc2.in_features


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
    working = max(rows * (block.norm1.normalized_shape[0] + mlp_working(block)) * size for block in blocks)
    coming = sum(12 * p.numel() for p in parameters if p.requires_grad and p.grad is None)
    return "all" if kept + working + coming <= USABLE * free else "least"
