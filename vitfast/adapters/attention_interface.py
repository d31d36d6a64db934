"""`model.set_attn_implementation("vitfast")`: the attention operation for transformers.

The import of this module puts it into transformers' registry, for any model that uses the registry. `import vitfast`
imports this module if transformers was imported before; else `vitfast.accelerate` of a transformers model does, which
also sets "vitfast" if layers stay transformers' own. An accelerated model needs it in one more case: compiled by torch
2.11, for which transformers makes a mask of ones with "sdpa".
"""

from collections.abc import Iterator
from copy import deepcopy

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

from .. import ops
from ..ops.attention import unsupported_reason as head_unsupported
from .fallback_log import ATTENTION_ALONE as PART
from .fallback_log import DROPOUT, library_runs, operation_runs
from .fused_blocks import are_plain, asked, input_unsupported
from .hugging_face import HARMLESS
from .known_classes import attention_layers
from .masks import call_options
from .specs import Logits


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

    Causal attention, dropout, fewer key heads than query heads, and keyword arguments of other attentions go to
    transformers' own "sdpa", whose errors say what it cannot do. Like it, this function never returns weights.
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
    """The models of transformers in a model, inner ones first, that can change their attention."""
    for module in reversed(list(model.modules())):
        if getattr(module, "_can_set_attn_implementation", bool)():
            yield module


def _copy_configs(model: nn.Module) -> None:
    """Gives the modules of a model copies of their configs, because other models may share the originals."""
    copies: dict = {}  # one memo for all modules, so that they share the copies
    for module in model.modules():
        for name, config in list(vars(module).items()):
            if hasattr(config, "_attn_implementation"):  # whatever the class of configs is called
                setattr(module, name, deepcopy(config, copies))


def set_attention(model: nn.Module) -> None:
    """Sets "vitfast" for models whose layers are left and attend with "sdpa", in both directions.

    Other choices of the user stay, such as "eager" for attention weights or flash attention, and decoders too.
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
    """sdpa's mask; None if nothing is masked, for which transformers writes one if torch 2.11 compiles."""
    if (
        kwargs.get("attention_mask") is None
        and kwargs.get("mask_function") is bidirectional_mask_function
        and kwargs.get("allow_is_bidirectional_skip")
    ):
        return None
    return sdpa_mask(**kwargs)


AttentionInterface.register("vitfast", vitfast_attention_forward)
AttentionMaskInterface.register("vitfast", _mask)
