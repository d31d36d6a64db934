"""A ViT on images of many sizes: a list of them, the result of `pack`, or a nested tensor."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..kernels.tiles import batch_invariant
from ..ops import packed
from ..ops.packed import PackedImages, pack
from .config import channels_hint
from .drop_path import subsets_of_packed
from .heads import segment_mean
from .positions import token_layout

ManyImages = list[Tensor] | tuple[Tensor, ...] | PackedImages | Tensor


def of_many_sizes(images) -> bool:
    """Whether images come as a list, packed, or as a nested tensor."""
    return isinstance(images, (list, tuple, PackedImages)) or (isinstance(images, Tensor) and images.is_nested)


@torch._disable_dynamo  # a list of tensors would be compiled anew for each of its lengths; see drop_path.py
def _pack(images: ManyImages, patch: tuple[int, int]) -> PackedImages:
    return pack(list(images.unbind()) if isinstance(images, Tensor) else images, patch)


class PackedForward:
    """The methods of a ViT for images of many sizes; x (tokens, D) has one image after the other."""

    def _of_one_size(self) -> str | None:
        """The part of this model that takes images of one size alone; None if there is none."""
        kind = self._config["pos_embed"]
        return "a hybrid's CNN" if self._config["backbone"] else f"pos_embed={kind!r}" if kind == "relative" else None

    def check_many_sizes(self) -> None:
        """Raises InputError where this model takes images of one size alone."""
        if what := self._of_one_size():
            raise InputError(f"ViT: {what} takes images of one size, (B, C, H, W), not of many sizes")

    def packs(self, x: Tensor) -> bool:
        """Whether a batch, of images or their tokens, is computed as a list: to the same bits."""
        return batch_invariant() and self._of_one_size() is None and len(x) > 0

    def _packed(self, images: ManyImages) -> PackedImages:
        """The images as patches on the model's device. Raises ValueError for other channels or patch sizes."""
        self.check_many_sizes()
        patch, batch = self.patch_embed.patch_size, isinstance(images, Tensor) and not images.is_nested
        pack_images = packed.pack_batch if batch else _pack
        found = images if isinstance(images, PackedImages) else pack_images(images, patch)
        got, wanted, text = found.shape[1:], (self.in_chans, *patch), "{} channels in patches of {} x {}"
        if tuple(got) != wanted:
            hint = "" if got[0] == wanted[0] else f"; {channels_hint(got[0], wanted[0], batched=False)}"
            raise ValueError(f"ViT: images must have {text.format(*wanted)}, got {text.format(*got)}{hint}")
        device = self.patch_embed.proj.weight.device
        return found if found.device == device else found.to(device, non_blocking=True)

    def _subsets(self, images: Tensor | PackedImages) -> list[tuple]:
        """For each block the packed samples that its two branches run on; None where it draws them."""
        packed, prefix = isinstance(images, PackedImages), self.num_prefix_tokens
        rates = [block.drop_path_rate if packed and block.training else 0.0 for block in self.blocks]
        if not any(rates) or self._config["drop_path_mode"] != "subset":
            return [(None, None)] * len(rates)
        return subsets_of_packed([prefix + count for count in images.counts], token_layout(images, prefix), rates)

    def _encode_many(self, images: ManyImages) -> "Together":
        """All tokens after the last norm."""
        given = self._packed(images)
        x, layers = self._encode(given)
        _, options, _ = layers[0]
        return Together(x, options["offsets"], [self.num_prefix_tokens + count for count in given.counts])

    def _head_packed(self, tokens: "Together", pre_logits: bool = False) -> Tensor | list[Tensor]:
        """Logits (S, num_classes); without pooling, the logits of each image's tokens."""
        if self.global_pool:
            return self._head(self._pool_packed(tokens, self.global_pool), pre_logits)
        return tokens._replace(x=self._head(tokens.x, pre_logits)).apart()

    def _pool_packed(self, tokens: "Together", pool_type: str) -> Tensor:
        """(tokens, D) -> (S, D). An image's tokens are always summed in the same order, to the same bits."""
        (x, offsets, _), prefix = tokens, self.num_prefix_tokens
        if pool_type == "token":
            return x.index_select(0, offsets[:-1])
        if pool_type == "avg":
            return segment_mean(x, offsets, prefix)
        offsets = offsets - torch.arange(len(offsets), device=x.device, dtype=offsets.dtype) * prefix
        rows, _ = packed.token_rows(offsets, len(x) - (len(offsets) - 1) * prefix, prefix)
        return self.attn_pool.pool_packed(x.index_select(0, rows) if prefix else x, offsets)


class Together(NamedTuple):
    """The tokens of many images, one after the other."""

    x: Tensor  # (tokens, ...)
    offsets: Tensor  # (S + 1,): image s owns the tokens offsets[s] to offsets[s + 1]
    counts: list[int] | None  # the tokens of each image; None if they come from a jagged tensor

    def apart(self, jagged: bool = False) -> list[Tensor] | Tensor:
        """The tokens (T+N_i, ...) of each image, as a list or a jagged tensor."""
        if jagged or self.counts is None:
            return torch.nested.nested_tensor_from_jagged(self.x, self.offsets)
        return list(self.x.split(self.counts))


def together(tokens: list[Tensor] | Tensor) -> Together:
    """Puts tokens one after the other again, those that `apart` returned or (B, N, D)."""
    if isinstance(tokens, Tensor):
        if tokens.is_nested:
            return Together(tokens.values(), tokens.offsets(), None)
        B, N = tokens.shape[:2]
        return Together(tokens.flatten(0, 1), torch.arange(B + 1, device=tokens.device) * N, [N] * B)
    if not tokens:
        raise ValueError("ViT: the tokens of at least one image are wanted, got an empty list")
    x, counts = torch.cat(list(tokens)), [len(t) for t in tokens]
    return Together(x, torch.tensor([0, *counts]).cumsum(0).to(x.device), counts)
