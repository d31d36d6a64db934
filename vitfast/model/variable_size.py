"""A ViT on images of many sizes: a list of them, the result of `pack`, or a nested tensor."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..ops import packed
from ..ops.packed import PackedImages, pack
from .config import channels_hint
from .drop_path import subsets_of_packed
from .heads import segment_mean
from .positions import Batch, token_layout

ManyImages = list[Tensor] | tuple[Tensor, ...] | PackedImages | Tensor


def of_many_sizes(images) -> bool:
    """Whether images come as a list, packed, or as a nested tensor."""
    return isinstance(images, (list, tuple, PackedImages)) or (isinstance(images, Tensor) and images.is_nested)


@torch._disable_dynamo  # a list of tensors would be compiled anew for each of its lengths; see drop_path.py
def _pack(images: ManyImages, patch: tuple[int, int]) -> PackedImages:
    return pack(list(images.unbind()) if isinstance(images, Tensor) else images, patch)


def part_of_one_size(vit: nn.Module) -> str | None:
    """The part of this model that takes images of one size alone; None if there is none."""
    kind = vit._config["pos_embed"]
    return "a hybrid's CNN" if vit._config["backbone"] else f"pos_embed={kind!r}" if kind == "relative" else None


def packed_images(vit: nn.Module, images: ManyImages) -> PackedImages:
    """The images as patches on the model's device. Raises ValueError for other channels or patch sizes."""
    vit.check_many_sizes()
    patch, one_size = vit.patch_embed.patch_size, isinstance(images, Tensor) and not images.is_nested
    if not isinstance(images, PackedImages):
        images = packed.pack_batch(images, patch) if one_size else _pack(images, patch)
    shape, expected, text = tuple(images.shape[1:]), (vit.in_chans, *patch), "{} channels in patches of {} x {}"
    if shape != expected:
        hint = "" if shape[0] == expected[0] else f"; {channels_hint(shape[0], expected[0], batched=False)}"
        raise ValueError(f"ViT: images must have {text.format(*expected)}, got {text.format(*shape)}{hint}")
    device = vit.patch_embed.proj.weight.device
    return images if images.device == device else images.to(device, non_blocking=True)


def subsets_of_blocks(vit: nn.Module, images: Batch) -> list[tuple]:
    """For each block the packed samples that its two halves run on; None where a half draws them itself."""
    packed, prefix = isinstance(images, PackedImages), vit.num_prefix_tokens
    rates = [block.drop_path_rate if packed and block.training else 0.0 for block in vit.blocks]
    if not any(rates) or vit._config["drop_path_mode"] != "subset":
        return [(None, None)] * len(rates)
    return subsets_of_packed([prefix + count for count in images.counts], token_layout(images, prefix), rates)


def encode(vit: nn.Module, images: ManyImages) -> "Together":
    """All tokens after the last norm, (tokens, D), one image after the other."""
    images = packed_images(vit, images)
    x, inputs = vit._embed(images)
    (_, options, _), counts = inputs[0], [vit.num_prefix_tokens + count for count in images.counts]
    return Together(vit._encode(x, inputs), options["offsets"], counts)


def head(vit: nn.Module, tokens: "Together", pre_logits: bool = False) -> Tensor | list[Tensor]:
    """Logits (S, num_classes); without pooling, the logits of each image's tokens."""
    if vit.global_pool:
        return vit._head(pool(vit, tokens, vit.global_pool), pre_logits)
    return tokens._replace(x=vit._head(tokens.x, pre_logits)).apart()


def pool(vit: nn.Module, tokens: "Together", pool_type: str) -> Tensor:
    """(tokens, D) -> (S, D). An image's tokens are always summed in the same order, to the same bits."""
    (x, offsets, _), prefix = tokens, vit.num_prefix_tokens
    if pool_type == "token":
        return x.index_select(0, offsets[:-1])
    if pool_type == "avg":
        return segment_mean(x, offsets, prefix)
    offsets = offsets - torch.arange(len(offsets), device=x.device, dtype=offsets.dtype) * prefix
    rows, _ = packed.token_rows(offsets, len(x) - (len(offsets) - 1) * prefix, prefix)
    return vit.attn_pool.pool_packed(x.index_select(0, rows) if prefix else x, offsets)


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


def together(tokens: list[Tensor] | Tensor | Together) -> Together:
    """Puts tokens one after the other again, those that `apart` returned or (B, N, D)."""
    if isinstance(tokens, Together):
        return tokens
    if isinstance(tokens, Tensor):
        if tokens.is_nested:
            return Together(tokens.values(), tokens.offsets(), None)
        B, N = tokens.shape[:2]
        return Together(tokens.flatten(0, 1), torch.arange(B + 1, device=tokens.device) * N, [N] * B)
    if not tokens:
        raise ValueError("ViT: the tokens of at least one image are wanted, got an empty list")
    x, counts = torch.cat(list(tokens)), [len(t) for t in tokens]
    return Together(x, torch.tensor([0, *counts]).cumsum(0).to(x.device), counts)
