"""The tensors that the blocks of a ViT keep for backward, by the memory there is.

keep: "least", "all" (see ops/_blocks.py) or "auto": "all" where the memory of the GPU has room for it, found out for
the most tokens seen.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

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


def step_bytes(
    blocks: Sequence[nn.Module], parameters: Iterable[nn.Parameter], rows: int, logits: int, size: int
) -> int:
    """Bytes that training steps with keep="all" will allocate at their peak.

    What blocks and the last norm keep; what comes and goes in the backward of an MLP; logits, as many numbers, and
    their gradients, in fp32 too; copies of the parameters in the dtype of the products, gradients where there are none
    yet, once more in DDP's buckets, and AdamW's two moments.
    """
    d = blocks[0].norm1.normalized_shape[0]
    kept = sum(sum(block_bytes(block, rows, size, "all").values()) for block in blocks) + 2 * rows * d * size
    working = rows * (d * (4 if blocks[0].residual_in_fp32 else size) + max(map(mlp_working, blocks)) * size)
    gradient = 8 if torch.distributed.is_available() and torch.distributed.is_initialized() else 4
    total = kept + working + logits * (2 * size + 12)
    for p in parameters:
        total += p.numel() * (size if size < p.itemsize else 0)
        if p.requires_grad:
            total += p.numel() * (8 + (gradient if p.grad is None else 0))
    return total


def choose(
    blocks: Sequence[nn.Module],
    parameters: Iterable[nn.Parameter],
    rows: int,
    logits: int,
    size: int,
    device: torch.device,
) -> str:
    """ "all" where training steps with it fit into what is free on a GPU, "least" elsewhere."""
    if device.type not in DEVICES:
        return "least"
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return "all" if step_bytes(blocks, parameters, rows, logits, size) <= USABLE * free else "least"


def set_blocks(vit: nn.Module, kept: str) -> None:
    """Every block of a ViT keeps "least" or "all" from now on."""
    for block in vit.blocks:
        block.keep = kept


def settle(vit: nn.Module, rows: int, dtype: torch.dtype | None) -> None:
    """Settles keep="auto" of a ViT for `rows` tokens at a time in `dtype` (the parameters' unless given)."""
    weight = vit.patch_embed.proj.weight
    if vit.keep == "auto" and weight.device.type in DEVICES and not vit.grad_checkpointing:
        vit._keep_rows = rows
        size, tokens = (dtype or weight.dtype).itemsize, vit.num_prefix_tokens + vit.patch_embed.num_patches
        logits = -(-rows // tokens) * vit.num_classes
        set_blocks(vit, choose(vit.blocks, vit.parameters(), rows, logits, size, weight.device))


def settle_in_training(vit: nn.Module, x: Tensor) -> None:
    """The same for tokens x (..., D) of an eager training forward, where they are more than ever before."""
    if vit.keep != "auto" or not vit.training or not torch.is_grad_enabled():
        return
    if torch.compiler.is_compiling() or not isinstance(x, Tensor):
        return
    rows, kind = x.shape[:-1].numel(), x.device.type
    if kind in DEVICES and rows > vit._keep_rows:
        settle(vit, rows, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None)
