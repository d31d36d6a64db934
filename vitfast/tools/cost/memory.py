"""The memory of a training step on vitfast's kernels under autocast.

It consists of fp32 parameters, gradients and optimiser state, 16-bit copies of the linear layers, and the tensors that
vitfast.ops keeps for backward. Everything is in bytes; size: bytes of a number in the products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...model.config import ViTConfig
from ...model.presets import pair
from ...model.sizes import Sizes, block_bytes, row_working_bytes
from .steps import arguments_of, dropout, resnet, tokens_of

if TYPE_CHECKING:
    from torch import nn

    from ...model.vit import ViT


def kept_bytes(model: ViT | ViTConfig, batch: int, size: int = 2, keep: str = "least") -> dict[str, int]:
    """The bytes that vitfast.ops keeps for backward, by kind, on uint8 images, without the parameters.

    keep: "least" or "all". Where dropout is on, the blocks run on the smaller operations, which keep more: the norms'
    outputs, the activation, and masks.
    """
    c, m = arguments_of(model), batch * tokens_of(model)
    sizes, depth, d, image = Sizes(c), c.depth, c.embed_dim, (c.in_chans, *pair(c.img_size))
    block, f, norm = sizes.block, sizes.block.before, not sizes.after_pooling
    read = batch if c.global_pool else m  # rows that the head reads
    dropped, hybrid = dropout(c) > 0, c.backbone is not None
    kept = {
        "images": 0 if hybrid else batch * math.prod(image),
        "ResNet": resnet(model.patch_embed.backbone, batch, image, size)[1] if hybrid else 0,
    }
    kept |= {kind: depth * held for kind, held in block_bytes(block, m, size, "least" if dropped else keep).items()}
    each = 4 * (1 + block.norm_biases)
    kept["statistics"] += each * (m if norm else read)  # the last norm's
    if c.pre_norm:
        kept["norm before the blocks"] = m * (d * size + each)
    if c.rope is not None:  # cos and sin, fp32
        kept["rotary positions"] = sizes.patches * (d // block.heads) * 4
    if c.global_pool == "map":
        kept["MAP head"] = _map_head(sizes, batch, size) + batch * each
    if dropped:
        kept["norms and activations (dropout)"] = depth * m * (2 * d + f) * size
        kept["masks (dropout)"] = depth * m * (2 * d + f) + (m * d if c.pos_drop_rate > 0 else 0)  # one byte each
    # The last norm's input, and its output, which the head reads; a mean keeps neither.
    pooled = read * d if c.global_pool == "avg" else m * d
    hidden = read * sizes.head_width if c.representation_size else 0
    kept["head"] = size * ((m * d if norm else pooled) + pooled + hidden)
    return kept


def _map_head(sizes: Sizes, batch: int, size: int) -> int:
    """Bytes of keys, values, the query, the inputs of all later layers, and lse."""
    d, f = sizes.block.width, sizes.block.hidden
    numbers = 2 * batch * sizes.patches * d + batch * (5 * d + 2 * f)
    return numbers * size + batch * sizes.block.heads * 4


def weights(model: nn.Module | ViTConfig, projector: Sequence[int] = ()) -> tuple[int, int]:
    """How many numbers the parameters of linear layers and convolutions hold, and all others.

    projector: the widths of LeJEPA's projector, the encoder's first; its hidden layers have norms.
    """
    if isinstance(model, ViTConfig):
        products, others = Sizes(model).parameters()
    else:
        from torch import nn

        layers = [layer for layer in model.modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
        products = sum(p.numel() for layer in layers for p in layer.parameters())
        others = sum(p.numel() for p in model.parameters()) - products
    products += sum((inputs + 1) * outputs for inputs, outputs in zip(projector, projector[1:]))
    return products, others + 2 * sum(projector[1:-1])


def state_bytes(
    model: nn.Module | ViTConfig,
    size: int = 2,
    optimizer: str = "adamw",
    averaged: bool = False,
    projector: Sequence[int] = (),
) -> dict[str, int]:
    """Bytes that stay from step to step, by kind; projector: as for `weights`."""
    copied, others = weights(model, projector)
    total = copied + others
    return {
        "parameters": 4 * total,
        "gradients": 4 * total,
        "optimiser state": (8 if optimizer == "adamw" else 4) * total,
        "16-bit copies": size * copied if size < 4 else 0,
        "running average": 4 * total if averaged else 0,
    }


def working_bytes(model: ViT | ViTConfig, batch: int, size: int = 2) -> int:
    """Bytes that are allocated only at the peak, the backward of the last MLP; an estimate, not measured.

    They are the gradients of its output and pre-activation, the activation, and the logits with their gradients.
    """
    c, m = arguments_of(model), batch * tokens_of(model)
    return m * row_working_bytes(Sizes(c).block, size) + batch * c.num_classes * (2 * size + 2 * 4)
