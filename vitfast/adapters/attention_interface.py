"""`model.set_attn_implementation("vitfast")`: the attention operation for transformers.

It is in transformers' registry, for any model that uses it. Registered when this module is imported: by `import
vitfast` where transformers was imported before, else by `vitfast.accelerate` of a transformers model or by `import
vitfast.adapters.hugging_face`. A model that is accelerated needs it in one case: compiled by torch 2.11, where
transformers makes a mask of ones for "sdpa" and the attention block would run the library's code.
"""

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

from .. import ops
from ..ops.attention import unsupported_reason as head_unsupported
from .fallbacks import ATTENTION_ALONE as PART
from .fallbacks import DROPOUT, library_runs, operation_runs
from .fused_blocks import are_plain, asked, input_unsupported

# Keyword arguments that reach the attention and change nothing in it.
HARMLESS = ("output_hidden_states", "return_dict", "num_items_in_batch")


def _unsupported_reason(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, scale: float) -> str | None:
    """Why the operation cannot attend; None where it can."""
    if dropout > 0:
        return DROPOUT
    if causal:
        return "attention is causal"
    if not q.shape == k.shape == v.shape or not q.dtype == k.dtype == v.dtype:
        return "queries, keys and values differ in shape or dtype"
    if not are_plain(k, v):
        return "keys or values are of a class of their own"
    return input_unsupported(q) or head_unsupported(q.shape[-1], scale)


def vitfast_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """query, key, value (B, H, N, Dh) -> ((B, N, H, Dh), None).

    Masks, causal attention, dropout, fewer keys than heads, and keyword arguments of other attentions go to
    transformers' own "sdpa", which also says what it cannot do; like it, this one never returns attention weights.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    reason = asked(dict(attention_mask=attention_mask, **kwargs), HARMLESS)
    reason = reason or _unsupported_reason(query, key, value, dropout, causal, scale)
    if reason is not None:
        library_runs(module, PART, reason, of_this_call=True)
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    operation_runs(module, PART)
    return ops.attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale=scale), None


def _mask(**kwargs) -> Tensor | None:
    """sdpa's mask; None where nothing is masked: torch 2.11 compiling, transformers writes one."""
    if (
        kwargs.get("attention_mask") is None
        and kwargs.get("mask_function") is bidirectional_mask_function
        and kwargs.get("allow_is_bidirectional_skip")
    ):
        return None
    return sdpa_mask(**kwargs)


AttentionInterface.register("vitfast", vitfast_attention_forward)
AttentionMaskInterface.register("vitfast", _mask)
