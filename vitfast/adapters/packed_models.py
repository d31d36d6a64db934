"""Models around layers that vitfast runs: they pack the tokens of batches of images of many sizes.

timm's NaFlexVit and SigLIP 2 pad a batch to its longest image. Here the padding is removed once, before the layers, for
which the host waits for a GPU once a forward, and added again as zeros after them. Pixtral lays images in one row and
writes a mask of all pairs of tokens; here its layers are told where each image begins, and no mask is written. None of
that happens if a hook would see it, if some layers are the library's, or in compiled code, whose shapes would change
with every batch: these run as the library does, padded, by operations that take masks.
"""

import functools
import sys
from collections.abc import Callable, Iterable
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ..kernels.launch import batch_invariant
from ..ops.fusable import own_forward
from .fallback_log import PACKING, library_runs, operation_runs
from .fused_blocks import has_hooks, input_unsupported
from .hugging_face import only_captures
from .masks import PackedTokens, UnpaddedTokens, may_wait
from .subclasses import subclass


def _unsupported(
    layers: Iterable[nn.Module], seen: Iterable[nn.Module], idle: Callable[[nn.Module], bool]
) -> str | None:
    """Why the layers must get padded tokens and masks, as the library passes them; None if they need not.

    seen: the modules that get packed tokens instead. idle(module): whether the module's hooks do nothing now.
    """
    if not all(hasattr(layer, "vitfast_layer") and layer.vitfast_layer.unsupported(layer) is None for layer in layers):
        return "some of its layers are the library's"
    if _has_any_global_hook():
        return "a hook on all modules is set"
    hooked = any(own_forward(module) or (has_hooks(module) and not idle(module)) for module in seen)
    return "its layers have hooks" if hooked else None


def _runs(tower: nn.Module, reason: str | None) -> bool:
    if reason is None:
        operation_runs(tower, PACKING)
    else:
        library_runs(tower, PACKING, reason, of_this_call=True)
    return reason is None


def _unpadded(
    tower: nn.Module, valid: Tensor, fits: Tensor | None, mask: Callable[[], Tensor]
) -> UnpaddedTokens | None:
    """The tokens of a batch without padding, by valid (B, N); None if all are valid, or none is.

    fits: a boolean tensor, whether the library's mask is that of this padding; None: it is. If it is not, returns None.
    """
    lengths = valid.sum(1)
    fits = torch.ones_like(lengths[0]) if fits is None else fits.to(lengths.dtype)
    count, longest, fits = torch.stack([lengths.sum(), lengths.max(), fits]).tolist()
    full = count == valid.numel() and not batch_invariant()  # which packs whatever it is, as among longer images
    if not _runs(tower, None if fits else "the mask is not one of padding") or count == 0 or full:
        return None
    return UnpaddedTokens(valid, count, longest, mask)


def _naflexvit(cls: type) -> type:
    """timm's NaFlexVit. Its blocks and its last norm get packed tokens."""

    def tokens(self, patches: Tensor, patch_valid: Tensor) -> UnpaddedTokens | None:
        seen = (*self.blocks.modules(), *self.norm.modules())
        reason = input_unsupported(patches) or _unsupported(self.blocks, seen, lambda module: False)
        if reason is None and self.training and self.patch_drop is not None:
            reason = "it drops patches in training"
        if not _runs(self, reason):
            return None
        prefix = patch_valid.new_ones(len(patch_valid), self.num_prefix_tokens)
        symmetric = not getattr(self, "use_key_only_attn_mask", False)  # timm before 1.0.27 has none
        options = dict(symmetric=symmetric, q_len=None if symmetric else 1, dtype=patches.dtype)
        library = sys.modules[cls.__module__]
        mask = functools.partial(library.create_attention_mask, patch_valid, self.num_prefix_tokens, **options)
        return _unpadded(self, torch.cat([prefix, patch_valid], 1).bool(), None, mask)

    def forward_features(self, patches, patch_coord=None, patch_valid=None, attn_mask=None):
        packed = None
        if patch_coord is not None and patch_valid is not None and attn_mask is None and may_wait(patch_valid):
            packed = tokens(self, patches, patch_valid)
        if packed is None:
            return cls.forward_features(self, patches, patch_coord, patch_valid, attn_mask)
        found = cls.forward_features(self, patches, patch_coord, patch_valid, packed)
        return {**found, "patches": packed.unpack(found["patches"])}

    def _forward_embeds(self, x, patch_coord, patch_valid, attn_mask):
        found = cls._forward_embeds(self, x, patch_coord, patch_valid, attn_mask)
        if isinstance(attn_mask, UnpaddedTokens):
            rope = found["rope_embeds"]
            if rope is not None:
                rope = attn_mask.pack_rope(rope) if isinstance(rope, Tensor) else map(attn_mask.pack_rope, rope)
            found |= dict(patches=attn_mask.pack(found["patches"]), rope_embeds=rope)
        return found

    return subclass(cls, cls.forward, forward_features=forward_features, _forward_embeds=_forward_embeds)


def _siglip2(cls: type) -> type:
    """Our subclass of SigLIP 2's encoder; it packs images alone, as texts may read a token of padding."""

    def tokens(self, x: Tensor, mask: Tensor) -> UnpaddedTokens | None:
        B, N, _ = x.shape
        idle = functools.partial(only_captures, keys=("attentions", "hidden_states"))
        reason = input_unsupported(x) or input_unsupported(mask)
        reason = reason or _unsupported(self.layers, self.layers.modules(), idle)
        if reason is None and (mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[2] not in (1, N)):
            reason = "the mask is not one of padding"
        if not _runs(self, reason):
            return None
        seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        valid = seen[:, 0].any(1)
        fits = (seen == valid[:, None, None]).all()
        if mask.dtype != torch.bool:
            fits = fits & ((mask == 0) | ~seen).all()
        return _unpadded(self, valid.expand(B, N), fits, lambda: mask)

    def forward(self, inputs_embeds, attention_mask=None, **kwargs):
        packed = None
        images = type(self.config).__name__ == "Siglip2VisionConfig"
        if images and attention_mask is not None and may_wait(attention_mask):
            packed = tokens(self, inputs_embeds, attention_mask)
        if packed is None:
            return cls.forward(self, inputs_embeds, attention_mask, **kwargs)
        found = cls.forward(self, packed.pack(inputs_embeds), packed, **kwargs)
        found.last_hidden_state = packed.unpack(found.last_hidden_state)
        return found

    return subclass(cls, forward)


_in_one_row: ContextVar[bool] = ContextVar("vitfast.adapters.packed_models.in_one_row", default=False)


def _pixtral(cls: type) -> type:
    """Our subclass of Pixtral's tower, in which the function that writes masks returns offsets."""
    library = sys.modules[cls.__module__]
    write = library.generate_block_attention_mask

    @functools.wraps(write)
    def offsets_or_mask(patch_embeds_list, tensor):
        if torch.compiler.is_compiling() or not _in_one_row.get():
            return write(patch_embeds_list, tensor)
        offsets = torch.tensor([0, *patch_embeds_list]).cumsum(0).int().to(tensor.device, non_blocking=True)
        return PackedTokens(
            offsets, max(patch_embeds_list), functools.partial(write, patch_embeds_list, tensor.detach())
        )

    library.generate_block_attention_mask = offsets_or_mask

    @functools.wraps(cls.forward)
    def forward(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            return cls.forward(self, *args, **kwargs)
        layers = self.transformer.layers
        idle = functools.partial(only_captures, keys=())
        set_before = _in_one_row.set(_runs(self, _unsupported(layers, (self.transformer, *layers), idle)))
        try:
            return cls.forward(self, *args, **kwargs)
        finally:
            _in_one_row.reset(set_before)

    # transformers finds what a model can record, and how it attends, by the module and name of its class
    return subclass(cls, forward, __module__=cls.__module__)


TOWERS: dict[str, Callable[[type], type]] = {
    "timm.models.naflexvit.NaFlexVit": _naflexvit,
    "transformers.models.siglip2.modeling_siglip2.Siglip2Encoder": _siglip2,
    "transformers.models.pixtral.modeling_pixtral.PixtralVisionModel": _pixtral,
}


def tower_class(cls: type, name: str) -> type | None:
    """Our subclass of a model's class; None if the library's version lacks the functions to override."""
    try:
        ours = TOWERS[name](cls)
    except AttributeError:
        return None
    ours.vitfast_tower = True
    return ours
