"""Takes a ViT's tensors out of what training code wraps them in: dictionaries, and prefixes of names."""

import re

from torch import Tensor

from ...errors import InputError
from .names import State

# Keys of wrappers, in the order of preference: averaged weights come before raw ones, as in timm.
WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model", "model_state_dict")
PREFIXES = ("module.", "model.", "timm_model.")
# What torch.compile, activation checkpointing and FSDP add to the names of a module, or of one block in it.
_WRAPPED = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
# The patch projection, which every ViT has: in timm's names and Meta's, Hugging Face's, torchvision's and CLIP's.
_PATCHES = re.compile(
    r"(|.*\.)(patch_embed\.proj|embeddings\.patch_embeddings?(\.projection)?|conv_proj|visual\.conv1)\.weight"
)
_INNER = re.compile(r"(|.*\.)(vit|deit|dinov2|dinov2_with_registers|vision_model)\.")  # Hugging Face's own prefixes
# What a model has beside the first four of these. Beside a `vision_model` anything may be, such as a text model.
_BESIDE = re.compile(r"(cls_|distillation_)?classifier\.|pooler\.|decoder\.")
_HEADS = ("head", "heads", "fc", "classifier")


def unwrap(content: dict) -> tuple[State, list[str]]:
    """Finds the ViT in the content of a file; returns its tensors, and the names of all other tensors.

    Nested dictionaries such as `{"state_dict": ...}` are opened, and the prefixes that wrappers of modules add to names
    are removed. In the checkpoints of training frameworks such as Lightning, the names of the ViT begin with that of an
    attribute ("model.", "backbone.vit."), and there are heads or losses beside it. Raises InputError if there are
    several ViTs, if some names lack the prefix that others have, and for the layers of peft.
    """
    while inner := next((content[k] for k in WRAPPERS if isinstance(content.get(k), dict)), None):
        content = inner
    models = [k for k, v in content.items() if isinstance(v, dict) and any(_PATCHES.fullmatch(str(name)) for name in v)]
    if len(models) > 1:
        keys = " and ".join(map(repr, models[:3]))
        raise InputError(f"there are {len(models)} models in it, {keys}; save one of them: checkpoint[{models[0]!r}]")
    content = content[models[0]] if models else content
    state = {_WRAPPED.sub("", str(k)): v.detach() for k, v in content.items() if isinstance(v, Tensor)}
    while state and (prefix := next((p for p in PREFIXES if all(k.startswith(p) for k in state)), None)):
        state = {k[len(prefix) :]: v for k, v in state.items()}
    if any(".base_layer." in name for name in state):
        raise InputError("it has peft's layers in it; save model.merge_and_unload().state_dict()")
    return _within(state)


def _within(state: State) -> tuple[State, list[str]]:
    """Returns the tensors of the only ViT without the prefix of their names, and the names of the others."""
    patches = {match[1]: match[2] for key in state if (match := _PATCHES.fullmatch(key))}  # {prefix: projection's name}
    if not patches or "" in patches:
        return state, []
    if len(patches) > 1:
        prefixes, first = " and ".join(map(repr, sorted(patches)[:3])), min(patches)
        keep = f"{{k.removeprefix({first!r}): v for k, v in state_dict.items() if k.startswith({first!r})}}"
        raise InputError(f"there are {len(patches)} models in it, behind {prefixes}; save one of them: {keep}")
    ((holder, projection),) = patches.items()
    inner = _INNER.fullmatch(holder) if projection.startswith("embeddings.") else None
    prefix = inner[1] if inner else holder
    beside = _BESIDE if inner and inner[2] != "vision_model" else re.compile("")
    behind = {key: key[len(prefix) :] for key in state if key.startswith(prefix)}
    vit = {name: state[key] for key, name in behind.items() if key.startswith(holder) or beside.match(name)}
    outside = [key for key in state if behind.get(key) not in vit]
    top = {name.partition(".")[0] for name in vit}.difference(_HEADS)
    if stray := [key for key in outside if key not in vit and key.partition(".")[0] in top]:
        some = f"{len(vit)} of {len(state)} names are behind {prefix!r}"
        raise InputError(f"{some}, and others are not ({', '.join(stray[:3])}); take it off these names")
    return vit, outside
