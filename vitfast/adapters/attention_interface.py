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
from .fused_blocks import are_plain, is_supported_input

# Keyword arguments that reach the attention and change nothing in it.
_HARMLESS = ("output_hidden_states", "return_dict", "num_items_in_batch")


def changes(kwargs: dict) -> bool:
    """True where keyword arguments ask an attention layer for more than softmax(q k^T * scale) v."""
    return any(value is not None and value is not False and name not in _HARMLESS for name, value in kwargs.items())


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
    same = query.shape == key.shape == value.shape and query.dtype == key.dtype == value.dtype
    supported = same and is_supported_input(query) and are_plain(key, value)
    if attention_mask is not None or dropout > 0 or causal or not supported or changes(kwargs):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    return ops.attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale=scaling), None


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
