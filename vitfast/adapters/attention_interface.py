"""`model.set_attn_implementation("vitfast")`: the attention operation in transformers' own registry.

The import of this module registers it for all models. `vitfast.adapters` imports it where transformers was imported
before, and so does `vitfast.accelerate`.
"""

import logging

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

from ..ops.attention import head_unsupported
from ..ops.dispatch import constant_when_compiled

# The arguments that are read here, and those that transformers passes on but no attention reads.
_ARGUMENTS = ("is_causal", "scaling", "output_hidden_states", "return_dict", "num_items_in_batch")
_log = logging.getLogger("vitfast")
_said: set[tuple[str, str]] = set()  # (class, reason), logged once each


def _why_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float):
    """Returns why transformers' sdpa must compute a call in place of ops.attention, or None."""
    if dropout > 0:
        return "attention dropout is active in training"
    if causal:
        return "attention is causal"
    if not q.shape == k.shape == v.shape or not q.dtype == k.dtype == v.dtype:
        return "queries, keys and values differ in shape or dtype"
    if any(type(t) not in (Tensor, nn.Parameter) or t.is_nested for t in (q, k, v)):
        return "queries, keys or values are of a class of their own"
    if mask is not None:
        (batch, heads, tokens, _), fits = q.shape, mask.dtype == torch.bool or mask.is_floating_point()
        sizes = zip(mask.shape, (batch, heads, tokens, tokens)) if mask.dim() == 4 else [(0, 1)]
        if not fits or mask.shape[-1:] != (tokens,) or any(n not in (1, wanted) for n, wanted in sizes):
            return "the mask is not (B, H, N, N), of numbers or truth values"
    return head_unsupported(q.shape[-1], scale)


@constant_when_compiled
def _say(kind: str, reason: str) -> None:
    if (kind, reason) not in _said:
        _said.add((kind, reason))
        _log.warning("%s, attention: %s; transformers' sdpa runs", kind, reason)


def vitfast_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout=0.0, **kwargs
) -> tuple[Tensor, None]:
    """query, key, value (B, H, N, Dh) -> ((B, N, H, Dh), None).

    Causal attention, dropout, fewer key heads than query heads, and arguments of other attentions go to "sdpa".
    """
    causal, scale = kwargs.get("is_causal"), kwargs.get("scaling")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    others = [n for n, value in kwargs.items() if n not in _ARGUMENTS and value is not None and value is not False]
    reason = f"the call has {others[0]}" if others else None
    reason = reason or _why_sdpa(query, key, value, attention_mask, dropout, causal, scale)
    if reason is not None:
        _say(type(module).__name__, reason)
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, **kwargs)
    from ..backend.arguments import attend, logit_bias  # the backend takes a second to import

    bias = None if attention_mask is None else logit_bias([attention_mask], [False], query.shape[1], query.dtype)
    masks = {} if bias is None else dict(bias=bias)
    return attend(query, key, value, scale, **masks).transpose(1, 2), None


def _mask(**kwargs) -> Tensor | None:
    """Returns sdpa's mask; None if it hides nothing, where sdpa_mask makes one if 2.11 compiles it."""
    nothing = kwargs.get("attention_mask") is None and kwargs.get("allow_is_bidirectional_skip")
    return None if nothing and kwargs.get("mask_function") is bidirectional_mask_function else sdpa_mask(**kwargs)


AttentionInterface.register("vitfast", vitfast_attention_forward)
AttentionMaskInterface.register("vitfast", _mask)
