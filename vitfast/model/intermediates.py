"""The outputs and the attention matrices of a ViT's blocks, in the forms in which timm returns them."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from .config import block_indices


def intermediate_outputs(
    vit, images, indices, return_prefix_tokens, norm, stop_early, output_fmt, intermediates_only, output_dict
):
    """See ViT.forward_intermediates."""
    if output_fmt not in ("NCHW", "NLC"):
        raise ValueError(f"forward_intermediates: output_fmt must be 'NCHW' or 'NLC', got {output_fmt!r}")
    take = block_indices(indices, len(vit.blocks))
    (x, inputs), outputs = vit._embed(vit._checked(images)), []
    for i, block in enumerate(vit.blocks[: max(take) + 1] if stop_early else vit.blocks):
        x = vit._run(block, x, *inputs[i])
        if i in take:
            outputs.append(vit._last_norm(x) if norm else x)
    grid, prefix = vit.patch_embed.dynamic_feat_size(images.shape[-2:]), vit.num_prefix_tokens
    tokens = [y[:, :prefix] for y in outputs] if prefix and return_prefix_tokens else None
    maps = [y[:, prefix:] for y in outputs]
    if output_fmt == "NCHW":
        maps = [y.transpose(1, 2).unflatten(2, grid).contiguous() for y in maps]
    if output_dict:
        features = {} if intermediates_only else {"image_features": vit._last_norm(x)}
        prefixes = {"image_intermediates_prefix": tokens} if tokens else {}
        return {"image_intermediates": maps, **prefixes, **features}
    intermediates = list(zip(maps, tokens)) if tokens else maps
    return intermediates if intermediates_only else (vit._last_norm(x), intermediates)


@torch.no_grad()
def attention_maps(vit: nn.Module, images: Tensor, indices: int | Sequence[int] | None) -> Iterator[Tensor]:
    """See ViT.each_attention_map."""
    take = block_indices(indices, len(vit.blocks))
    x, inputs = vit._embed(vit._checked(images))
    for i, (block, arguments) in enumerate(zip(vit.blocks[: max(take) + 1], inputs)):
        if i in take:
            yield block.attention_map(x, *arguments)
        x = block(x, *arguments)
