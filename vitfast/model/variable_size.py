"""A ViT on images of many sizes: a list of them, what `pack` made of one, or a nested tensor."""

import torch
from torch import Tensor

from ..errors import InputError
from ..ops import packed
from ..ops.packed import PackedImages, TokenLayout, pack
from ..ops.reference import packed_tokens
from . import positions
from .activation_memory import settle_in_training
from .block import Subset, subset_of_packed
from .config import ROPES
from .layers import segment_sum
from .positions import ROPE_LAYOUTS

ManyImages = list[Tensor] | tuple[Tensor, ...] | PackedImages | Tensor


def of_many_sizes(images) -> bool:
    """Whether images come as a list, packed, or as a nested tensor."""
    return isinstance(images, (list, tuple, PackedImages)) or (isinstance(images, Tensor) and images.is_nested)


@torch.compiler.disable  # a list of tensors would be compiled anew for each of its lengths
def _pack(images: ManyImages, patch: tuple[int, int]) -> PackedImages:
    return pack(list(images.unbind()) if isinstance(images, Tensor) else images, patch)


class PackedForward:
    """The methods of a ViT for images of many sizes; x (tokens, D) has one image after the other."""

    def check_many_sizes(self) -> None:
        """Raises InputError where this model takes images of one size alone."""
        kind = self._config["pos_embed"]
        if self._config["backbone"] is not None or kind == "relative":
            what = "a hybrid's CNN" if self._config["backbone"] is not None else f"pos_embed={kind!r}"
            raise InputError(f"ViT: {what} takes images of one size, (B, C, H, W), not of many sizes")

    def _packed(self, images: ManyImages) -> PackedImages:
        """The images as patches on the model's device. Raises ValueError where they are none of this model's."""
        self.check_many_sizes()
        found = images if isinstance(images, PackedImages) else _pack(images, self.patch_embed.patch_size)
        wanted = (self.in_chans, *self.patch_embed.patch_size)
        if tuple(found.shape[1:]) != wanted:
            got = "{} channels in patches of {} x {}".format(*found.shape[1:])
            raise ValueError("ViT: images must have {} channels in patches of {} x {}".format(*wanted) + f", got {got}")
        device = self.patch_embed.proj.weight.device
        return found if found.device == device else found.to(device, non_blocking=True)

    def _embed_packed(self, images: PackedImages) -> tuple[Tensor, list[tuple], TokenLayout]:
        """As `_embed`, and where the tokens of each image lie."""
        c, prefix, depth = self._config, self.num_prefix_tokens, len(self.blocks)
        rows, _ = located = packed.token_rows(images.offsets, len(images.patches), prefix)
        tokens = [t for t in (self.cls_token, self.reg_token) if t is not None]
        first = torch.cat(tokens, dim=1) if tokens else None  # (1, T, D)
        places = positions.packed_places(images)
        tables = {name: getattr(self, name) for name in self._tables}
        table, slots = positions.packed_positions(
            c["pos_embed"], tables, places, self.patch_embed.grid_size, self._pos_prefix
        )
        if slots is not None:
            first = first + slots[:1].to(first.dtype)
        stem = None if table is None else table[0]
        x = self.patch_embed(images.patches, first, stem, self.mean, self.std, images.offsets)
        layers, rope = [None] * depth, None
        if table is not None and c["pos_embed_at"] != "stem":
            slots = table.new_zeros(len(table), prefix, table.shape[2]) if slots is None else slots
            made = [packed_tokens(table[i], slots[i : i + 1], None, *located) for i in range(len(table))]
            layers[1:] = made[1:] if c["pos_embed_at"] == "layers" else made * (depth - 1)
        if c.get("rope") is not None:
            spec = c["rope_temperature"] or ROPES[c["rope"]], c["ref_feat_shape"]
            angle = positions.rope_angles(c["rope"], places, x.dtype, self.blocks[0].attn.head_dim, *spec)
            angle = angle.new_zeros(len(x), angle.shape[1]).index_copy(0, rows, angle)  # prefix tokens are not turned
            rope = dict(rope=(angle.cos(), angle.sin()), rope_layout=ROPE_LAYOUTS[c["rope"]])
        every = torch.arange(len(images) + 1, device=rows.device, dtype=images.offsets.dtype) * prefix
        layout = TokenLayout(images.offsets + every, images.longest + prefix)
        x = self.norm_pre(self.pos_drop(x))
        subsets = self._subsets(images, layout)
        arguments = [(p, None, rope, layout, drawn) for p, drawn in zip(layers, subsets)]
        return x.float() if self.residual_in_fp32 else x, arguments, layout

    def _subsets(self, images: PackedImages, layout: TokenLayout) -> list:
        """For each block the images that its two branches run on, None for all of them."""
        rates = [block.drop_path_rate if block.training else 0.0 for block in self.blocks]
        if self._config["drop_path_mode"] != "subset" or not any(rates):
            return [None] * len(rates)
        return _draw_subsets(images.counts, layout, self.num_prefix_tokens, rates)

    def _run_packed(self, images: ManyImages) -> tuple[Tensor, PackedImages, TokenLayout]:
        """All tokens after the last norm, (tokens, D)."""
        given = self._packed(images)
        x, layers, layout = self._embed_packed(given)
        settle_in_training(self, x)
        for block, layer in zip(self.blocks, layers):
            x = self._run(block, x, *layer)
        return self._final(x), given, layout

    def _features_packed(self, images: ManyImages) -> list[Tensor] | Tensor:
        """The tokens (T+N_i, D) of each image; a jagged tensor of them where the images are a nested one."""
        x, given, layout = self._run_packed(images)
        if isinstance(images, Tensor):
            return torch.nested.nested_tensor_from_jagged(x, layout.offsets)
        return _split(x, given, self.num_prefix_tokens)

    def _forward_packed(self, images: ManyImages) -> Tensor | list[Tensor]:
        """Logits (S, num_classes); without pooling those of each image's tokens."""
        x, given, layout = self._run_packed(images)
        if not self.global_pool:
            return _split(self._head(x, False), given, self.num_prefix_tokens)
        return self._head(self._pool_packed(x, layout.offsets), False)

    def _head_packed(self, tokens: list[Tensor] | Tensor, pre_logits: bool) -> Tensor | list[Tensor]:
        """`forward_head` of what forward_features returned."""
        x, offsets = _together(tokens)
        if self.global_pool:
            return self._head(self._pool_packed(x, offsets), pre_logits)
        y = self._head(x, pre_logits)
        if isinstance(tokens, Tensor):
            return torch.nested.nested_tensor_from_jagged(y, offsets)
        return list(y.split([len(t) for t in tokens]))

    def _pool_many(self, tokens: list[Tensor] | Tensor, pool_type: str) -> Tensor | list[Tensor]:
        """`pool` of what forward_features returned."""
        return self._pool_packed(*_together(tokens), pool_type) if pool_type else tokens

    def _pool_packed(self, x: Tensor, offsets: Tensor, pool_type: str | None = None) -> Tensor:
        """(tokens, D) -> (S, D). Sums of an image's tokens have one order, so the same bits every time."""
        prefix, pool_type = self.num_prefix_tokens, self.global_pool if pool_type is None else pool_type
        if pool_type == "token":
            return x.index_select(0, offsets[:-1])
        if pool_type == "avg":
            return segment_mean(x, offsets, prefix)
        count = len(offsets) - 1
        offsets = offsets - torch.arange(count + 1, device=x.device, dtype=offsets.dtype) * prefix
        rows, _ = packed.token_rows(offsets, len(x) - count * prefix, prefix)
        return self.attn_pool.pool_packed(x.index_select(0, rows) if prefix else x, offsets)


def _together(tokens: list[Tensor] | Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of many images, a list or a jagged tensor, one after the other; and their offsets."""
    if isinstance(tokens, Tensor):
        return tokens.values(), tokens.offsets()
    if not tokens:
        raise ValueError("ViT: the tokens of at least one image are wanted, got an empty list")
    x = torch.cat(list(tokens))
    return x, torch.tensor([0, *(len(t) for t in tokens)]).cumsum(0).to(x.device)


def _split(x: Tensor, images: PackedImages, prefix: int) -> list[Tensor]:
    """(tokens, ...) -> the tokens of each image."""
    return list(x.split([prefix + count for count in images.counts]))


def segment_mean(x: Tensor, offsets: Tensor, prefix: int) -> Tensor:
    """(tokens, D) -> (S, D): the mean of each image's tokens after the first `prefix`, in fp32 at least."""
    if prefix:  # every other segment is an image's prefix
        offsets = torch.stack([offsets, offsets + prefix], 1).flatten()[:-1]
    sums = segment_sum(x.to(torch.promote_types(x.dtype, torch.float32)), offsets)
    return (sums / offsets.diff()[:, None])[bool(prefix) :: 1 + bool(prefix)].to(x.dtype)


@torch.compiler.disable  # it draws on the host, which knows how many tokens an image has
def _draw_subsets(
    counts: tuple[int, ...], layout: TokenLayout, prefix: int, rates: list[float]
) -> list[tuple[Subset, Subset] | None]:
    """Two subsets of images for each block with a rate, the one for attention and the one for the MLP."""
    sizes = torch.tensor(counts) + prefix
    draw = lambda rate: subset_of_packed(sizes, layout, rate)  # noqa: E731
    return [(draw(rate), draw(rate)) if rate else None for rate in rates]
