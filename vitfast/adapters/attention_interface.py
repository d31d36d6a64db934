"""`model.set_attn_implementation("vitfast")`: the attention operation for transformers.

It is in transformers' registry, for any model that uses it. Registered when this module is imported: by `import
vitfast` where transformers was imported before, else by `vitfast.accelerate` of a transformers model, which also sets
it where layers stay transformers' own. An accelerated model needs it in one more case: compiled by torch 2.11, where
transformers makes a mask of ones for "sdpa".
"""

from collections.abc import Iterator
from copy import deepcopy

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

from .. import ops
from ..ops.attention import unsupported_reason as head_unsupported
from .descriptions import Logits
from .fallbacks import ATTENTION_ALONE as PART
from .fallbacks import DROPOUT, library_runs, operation_runs
from .fused_blocks import are_plain, asked, input_unsupported
from .hugging_face import HARMLESS
from .kinds import attention_layers
from .masks import call_options


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

    Causal attention, dropout, fewer keys than heads, and keyword arguments of other attentions go to
    transformers' own "sdpa", which also says what it cannot do; like it, this one never returns attention weights.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    reason = asked(kwargs, HARMLESS) or _unsupported_reason(query, key, value, dropout, causal, scale)
    options: Logits = {}
    if reason is None:
        batch, heads, tokens, _ = query.shape
        options = call_options(dict(mask=attention_mask), query, (batch, heads, tokens))
        reason = options if isinstance(options, str) else None
    if reason is not None:
        library_runs(module, PART, reason, of_this_call=True)
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    operation_runs(module, PART)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return ops.attention(q, k, v, scale=scale, **options), None


def _settable(model: nn.Module) -> Iterator[nn.Module]:
    """Models of transformers in a model, inner ones first, whose attention may be another."""
    for module in reversed(list(model.modules())):
        if getattr(module, "_can_set_attn_implementation", bool)():
            yield module


def _copy_configs(model: nn.Module) -> None:
    """Gives the modules of a model copies of their configs, which other models may have been made of too."""
    copies: dict = {}  # one for all modules: what they shared they share still
    for module in model.modules():
        for name, config in list(vars(module).items()):
            if hasattr(config, "_attn_implementation"):  # whatever the class of configs is called
                setattr(module, name, deepcopy(config, copies))


def set_attention(model: nn.Module) -> None:
    """Sets "vitfast" where transformers' own layers attend with "sdpa", both ways and not in a decoder.

    Other choices of the user's stay: "eager" for attention weights, flash attention.
    """
    layers = [module for module in model.modules() if hasattr(module, "vitfast_layer")]
    ours = {id(inner) for layer in layers for inner in layer.modules()}
    for owner in _settable(model):
        attentions = attention_layers(owner).values()
        both_ways = all(getattr(module, "is_causal", True) is False for module in attentions)
        left = [module for module in attentions if id(module) not in ours]
        if left and both_ways and all(module.config._attn_implementation == "sdpa" for module in attentions):
            _copy_configs(model)
            owner.set_attn_implementation("vitfast")
            owner.vitfast_attention_before = "sdpa"


def restore_attention(model: nn.Module) -> None:
    """Undoes `set_attention`."""
    for owner in _settable(model):
        before = owner.__dict__.pop("vitfast_attention_before", None)
        if before is not None and owner.config._attn_implementation == "vitfast":
            owner.set_attn_implementation(before)


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
