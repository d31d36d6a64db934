"""Wrappers of a ViT's tensors in training code: dictionaries, and the prefix of its module."""

import re

from torch import Tensor

from ...errors import InputError
from .names import State

# Keys of wrappers, in the order of preference: averaged weights come before raw ones, as in timm.
WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model", "model_state_dict")
PREFIXES = ("module.", "model.", "timm_model.")
# What PyTorch's wrappers of a module, or of one block in it, add to names: compiled, checkpointed, FSDP.
_WRAPPED = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
# The patch projection, by which a ViT is found: in timm's names and Meta's, in Hugging Face's, torchvision's, CLIP's.
_PATCHES = re.compile(
    r"(|.*\.)(patch_embed\.proj|embeddings\.patch_embeddings?(\.projection)?|conv_proj|visual\.conv1)\.weight"
)
_INNER = re.compile(r"(|.*\.)(vit|deit|dinov2|dinov2_with_registers|vision_model)\.")  # Hugging Face's own prefixes
# What a model has beside the first four of these; beside a vision model anything may be, such as that of texts.
_BESIDE = re.compile(r"(cls_|distillation_)?classifier\.|pooler\.|decoder\.")
_HEADS = ("head", "heads", "fc", "classifier")


def unwrap(content: dict) -> tuple[State, list[str]]:
    """The tensors of a ViT in what a file holds, and the names of others beside it.

    They come out of `{"state_dict": ...}` and the like, without the prefixes that wrappers of modules add to names. A
    training framework's checkpoint, such as Lightning's, has the ViT behind the name of an attribute ("model.",
    "backbone.vit."), and heads or losses beside it. Raises InputError where there are several ViTs, where some names
    lack the prefix that others have, and for the layers of peft.
    """
    while inner := next((content[k] for k in WRAPPERS if isinstance(content.get(k), dict)), None):
        content = inner
    held = [k for k, v in content.items() if isinstance(v, dict) and any(_PATCHES.fullmatch(str(name)) for name in v)]
    if len(held) > 1:
        told = " and ".join(map(repr, held[:3]))
        raise InputError(f"there are {len(held)} models in it, {told}; save one of them: checkpoint[{held[0]!r}]")
    content = content[held[0]] if held else content
    state = {_WRAPPED.sub("", str(k)): v.detach() for k, v in content.items() if isinstance(v, Tensor)}
    while state and (prefix := next((p for p in PREFIXES if all(k.startswith(p) for k in state)), None)):
        state = {k[len(prefix) :]: v for k, v in state.items()}
    if any(".base_layer." in name for name in state):
        raise InputError("it has peft's layers in it; save model.merge_and_unload().state_dict()")
    return _within(state)


def _within(state: State) -> tuple[State, list[str]]:
    """(the tensors behind the prefix of the only ViT, without it; the names of the others)."""
    places = {found[1]: found[2] for key in state if (found := _PATCHES.fullmatch(key))}
    if not places or "" in places:
        return state, []
    if len(places) > 1:
        told, first = " and ".join(map(repr, sorted(places)[:3])), min(places)
        keep = f"{{k.removeprefix({first!r}): v for k, v in state_dict.items() if k.startswith({first!r})}}"
        raise InputError(f"there are {len(places)} models in it, behind {told}; save one of them: {keep}")
    ((holder, patches),) = places.items()
    inner = _INNER.fullmatch(holder) if patches.startswith("embeddings.") else None
    prefix = inner[1] if inner else holder
    beside = _BESIDE if inner and inner[2] != "vision_model" else re.compile("")
    behind = {key: key[len(prefix) :] for key in state if key.startswith(prefix)}
    found = {name: state[key] for key, name in behind.items() if key.startswith(holder) or beside.match(name)}
    outside = [key for key in state if behind.get(key) not in found]
    top = {name.partition(".")[0] for name in found}.difference(_HEADS)
    if stray := [key for key in outside if key not in found and key.partition(".")[0] in top]:
        some = f"{len(found)} of {len(state)} names are behind {prefix!r}"
        raise InputError(f"{some}, and others are not ({', '.join(stray[:3])}); take it off these names")
    return found, outside
