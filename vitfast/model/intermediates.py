"""The outputs and the attention matrices of a ViT's blocks, in the forms in which timm returns them."""

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from .config import block_indices


class Intermediates:
    """The methods of a ViT that look at its blocks one by one."""

    def forward_intermediates(
        self,
        images: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: Literal["NCHW", "NLC"] = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
    ):
        """The outputs of chosen blocks, as timm's method of the same name.

        indices: the last n blocks (int), these blocks (negative from the end), or all (None). Maps are (B, D, H/P, W/Q)
        with "NCHW" and (B, N, D) with "NLC". Returns (final tokens, list), the list alone with `intermediates_only`, or
        a dictionary with `output_dict`.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"forward_intermediates: output_fmt must be 'NCHW' or 'NLC', got {output_fmt!r}")
        take = block_indices(indices, len(self.blocks))
        (x, layers), outputs = self._embed(self._checked(images)), []
        for i, block in enumerate(self.blocks[: max(take) + 1] if stop_early else self.blocks):
            x = self._run(block, x, *layers[i])
            if i in take:
                outputs.append(self._final(x) if norm else x)
        grid, prefix = self.patch_embed.dynamic_feat_size(images.shape[-2:]), self.num_prefix_tokens
        tokens = [y[:, :prefix] for y in outputs] if prefix and return_prefix_tokens else None
        maps = [y[:, prefix:] for y in outputs]
        if output_fmt == "NCHW":
            maps = [y.transpose(1, 2).unflatten(2, grid).contiguous() for y in maps]
        if output_dict:
            found = {"image_intermediates": maps} | ({"image_intermediates_prefix": tokens} if tokens else {})
            return found if intermediates_only else found | {"image_features": self._final(x)}
        found = list(zip(maps, tokens)) if tokens else maps
        return found if intermediates_only else (self._final(x), found)

    def get_intermediate_layers(
        self,
        images: Tensor,
        n: int | Sequence[int] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = False,
    ) -> list:
        """DINO's name for forward_intermediates: (B, N, D) each, or (B, D, H/P, W/Q) with `reshape`."""
        output = dict(output_fmt="NCHW" if reshape else "NLC", intermediates_only=True)
        return self.forward_intermediates(images, n, return_prefix_tokens, norm, **output)

    def attention_maps(self, images: Tensor, indices: int | Sequence[int] | None = None) -> list[Tensor]:
        """The exact attention matrices, one (B, H, N, N) per layer, prefix tokens first; rows sum to 1.

        indices: as in forward_intermediates. Each map, in fp32 at least, is computed from q and k beside the fused
        attention of its own layer, so training keeps nothing for it. The maps have no gradients.
        """
        return list(self.each_attention_map(images, indices))

    @torch.no_grad()
    def each_attention_map(self, images: Tensor, indices: int | Sequence[int] | None = None) -> Iterator[Tensor]:
        """`attention_maps` one after another: each is made when it is asked for, and none is held here."""
        take = block_indices(indices, len(self.blocks))
        x, layers = self._embed(self._checked(images))
        for i, (block, layer) in enumerate(zip(self.blocks[: max(take) + 1], layers)):
            if i in take:
                yield block.attention_map(x, *layer)
            x = block(x, *layer)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drops the blocks after the last of `indices`, and norm and head if asked; returns the indices."""
        take = block_indices(indices, len(self.blocks))
        self.blocks = self.blocks[: max(take) + 1]
        self._change_tables(lambda name, table: table if len(table) == 1 else table[: len(self.blocks)])
        self._config["depth"] = len(self.blocks)
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.fc_norm, self.attn_pool = nn.Identity(), None
            self.reset_classifier(0, "")
        return take
