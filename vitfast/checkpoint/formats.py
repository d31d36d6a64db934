"""The weight formats of the field: how each is recognised, what its names become, and what it leaves unsaid."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import InputError

State = dict[str, Tensor]
Renames = tuple[tuple[str, str], ...]

IMAGENET = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
HALF = dict(mean=0.5, std=0.5)


@dataclass(frozen=True)
class Format:
    """mark: a pattern that some key matches. renames: patterns and replacements, all applied, in this order. ignored: keys (renamed)
    that the ViT does without. defaults: constructor arguments of this format. prepare: source tensors -> tensors in PyTorch's layout,
    and the constructor arguments that only the source's shapes tell."""

    name: str
    mark: str
    renames: Renames = ()
    ignored: str = r"(?!)"
    defaults: dict = field(default_factory=dict)
    prepare: Callable[[State], tuple[State, dict]] = lambda state: (state, {})


# Keys of Vision Transformers that ours is not, or not yet.
NOT_YET = {
    r"^patch_embed\.backbone\.(?!(stem|stages)\.)": "a hybrid with another CNN than the paper's ResNet",
    r"patch_embeddings\.backbone\.": "a hybrid (a ResNet under the ViT) of Hugging Face",
    r"(^|/)MAPHead_0/|^attn_pool\.": "a ViT with attention pooling (MAP head)",
    r"^conv_proj\.(conv_bn_relu_0|conv_last)\.": "a ViT with a convolutional stem",
    r"\.mlp\.(w12|weights_in|gate_proj|fc1_g)\.": "a ViT with a gated MLP (SwiGLU)",
    r"rel_pos|relative_position": "a ViT with relative positions",
    r"^norm_pre\.": "a CLIP ViT (a norm before the first block)",
    r"\.attn\.[qk]_norm\.": "a ViT with normalised queries and keys",
}

TIMM_RENAMES: Renames = (
    (r"\.gamma_([12])$", r".ls\1.gamma"),  # DeiT III's own files
    (r"^dist_token$", "reg_token"),
)

GOOGLE_RENAMES: Renames = (
    (r"^embedding/", "patch_embed/proj/"),
    (r"^cls$", "cls_token"),
    (r"^(Transformer/posembed_input/)?pos_embedding$", "pos_embed"),
    (r"^Transformer/encoderblock_(\d+)/", r"blocks/\1/"),
    (r"/LayerNorm_0/", "/norm1/"),
    (r"/LayerNorm_[12]/", "/norm2/"),
    (r"/MultiHeadDotProductAttention_[01]/", "/attn/"),
    (r"/query/", "/q/"),
    (r"/key/", "/k/"),
    (r"/value/", "/v/"),
    (r"/out/", "/proj/"),
    (r"/MlpBlock_[03]/Dense_0/", "/mlp/fc1/"),
    (r"/MlpBlock_[03]/Dense_1/", "/mlp/fc2/"),
    (r"^Transformer/encoder_norm/", "norm/"),
    (r"^pre_logits/", "pre_logits/fc/"),
    (r"^(conv|gn)_root/", r"patch_embed/backbone/stem/\1/"),
    (r"/(conv|gn)_proj/", r"/downsample/\1/"),
    (r"/gn(\d?)/", r"/norm\1/"),
    (r"/(kernel|scale)$", "/weight"),
    (r"/", "."),
)

# Flax keeps (in, out), and heads as an axis of their own.
GOOGLE_LAYOUTS = (
    (r"^embedding/kernel$|(^|/)conv\w+/kernel$", lambda w: w.permute(3, 2, 0, 1)),  # (P, Q, C, D) -> (D, C, P, Q)
    (r"(^|/)gn\w+/(scale|bias)$", torch.flatten),  # (C,), in old files (1, 1, 1, C)
    (r"/(query|key|value)/kernel$", lambda w: w.flatten(1).T),  # (D, H, Dh) -> (H*Dh, D)
    (r"/(query|key|value)/bias$", torch.flatten),  # (H, Dh) -> (H*Dh,)
    (r"/out/kernel$", lambda w: w.flatten(0, 1).T),  # (H, Dh, D) -> (D, H*Dh)
    (r"(/Dense_[01]|^head|^pre_logits)/kernel$", lambda w: w.T),
)
GOOGLE_PREFIXES = ("opt/target/", "params/img/", "params/", "img/", "")

HUGGING_FACE_RENAMES: Renames = (
    (r"^(vit|deit|dinov2|dinov2_with_registers)\.", ""),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.distillation_token$", "reg_token"),
    (r"^embeddings\.", ""),
    (r"^(encoder\.layer|layers)\.(\d+)\.", r"blocks.\2."),
    (r"\.(layernorm_before|norm1)\.", ".norm1."),
    (r"\.(layernorm_after|norm2)\.", ".norm2."),
    (r"\.attention\.(attention\.query|q_proj)\.", ".attn.q."),
    (r"\.attention\.(attention\.key|k_proj)\.", ".attn.k."),
    (r"\.attention\.(attention\.value|v_proj)\.", ".attn.v."),
    (r"\.attention\.(output\.dense|o_proj)\.", ".attn.proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
    (r"^layernorm\.", "norm."),
    (r"^(cls_)?classifier\.", "head."),
    (r"^distillation_classifier\.", "head_dist."),
)
HUGGING_FACE_IGNORED = r"^(mask_token$|pooler\.|decoder\.)"

TORCHVISION_RENAMES: Renames = (
    (r"^class_token$", "cls_token"),
    (r"^conv_proj\.", "patch_embed.proj."),
    (r"^encoder\.pos_embedding$", "pos_embed"),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
    (r"\.ln_([12])\.", r".norm\1."),
    (r"\.self_attention\.in_proj_", ".attn.qkv."),
    (r"\.self_attention\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.(0|linear_1)\.", ".mlp.fc1."),
    (r"\.mlp\.(3|linear_2)\.", ".mlp.fc2."),
    (r"^encoder\.ln\.", "norm."),
    (r"^heads\.pre_logits\.", "pre_logits.fc."),
    (r"^heads\.head\.", "head."),
)


def _prepare_google(source: State) -> tuple[State, dict]:
    """Drops the wrapping and what is not the image model, unstacks stacked layers, turns every array to PyTorch's layout."""
    prefix = next((p for p in GOOGLE_PREFIXES if f"{p}embedding/kernel" in source), "")
    source = {k[len(prefix) :]: v for k, v in source.items() if k.startswith(prefix)}
    if "embedding/kernel" in source and source["embedding/kernel"].dim() != 4:
        raise InputError("a NaFlex ViT (a dense patch projection) is not supported yet")
    if "conv_root/kernel" in source and "block1/unit1/conv1/kernel" not in source:
        raise InputError("a hybrid of a ResNet's root alone is not supported yet")
    state = {}
    for key, value in source.items():
        if key.startswith("Transformer/encoderblock/"):
            state.update({key.replace("encoderblock/", f"encoderblock_{i}/"): layer for i, layer in enumerate(value)})
        else:
            state[key] = value
    query = next((v for k, v in state.items() if k.endswith("/query/kernel")), None)
    facts = {} if query is None else {"num_heads": query.shape[1]}
    if "Transformer/posembed_input/pos_embedding" in state:
        facts["no_embed_class"] = False
    elif "pos_embedding" in state:
        facts["no_embed_class"] = True
    else:  # big_vision computes these, for patches alone, and stores nothing
        facts |= dict(pos_embed="sincos2d", no_embed_class="cls" in state)
    for pattern, turn in GOOGLE_LAYOUTS:
        state.update({k: turn(v) for k, v in state.items() if re.search(pattern, k)})
    return {re.sub(r"^block(\d+)/unit(\d+)/", _unit, k): v for k, v in state.items()}, facts


def _unit(found: re.Match) -> str:
    """A unit of a hybrid's ResNet, which Google counts from 1."""
    return f"patch_embed/backbone/stages/{int(found[1]) - 1}/blocks/{int(found[2]) - 1}/"


_HUGGING_FACE = dict(renames=HUGGING_FACE_RENAMES, ignored=HUGGING_FACE_IGNORED)
_ERF = dict(act_layer="gelu", norm_eps=1e-6)

# The first whose mark is found is it.
FORMATS = (
    Format(
        "Google npz",
        r"(^|/)Transformer/encoderblock(_\d+)?/",
        GOOGLE_RENAMES,
        prepare=_prepare_google,
        defaults=dict(_ERF, act_layer="gelu_tanh", **HALF),
    ),
    Format("Hugging Face DINOv2", r"\.layer_scale1\.lambda1$", **_HUGGING_FACE, defaults=_ERF | IMAGENET),
    Format(
        "Hugging Face DeiT",
        r"(^deit\.|^)embeddings\.distillation_token$",
        **_HUGGING_FACE,
        defaults=dict(_ERF, norm_eps=1e-12) | IMAGENET,
    ),
    Format(
        "Hugging Face ViT",
        r"(^|\.)embeddings\.patch_embeddings\.",
        **_HUGGING_FACE,
        defaults=dict(_ERF, norm_eps=1e-12) | HALF,
    ),
    Format("torchvision", r"^encoder\.layers\.encoder_layer_\d+\.", TORCHVISION_RENAMES, defaults=_ERF | IMAGENET),
    Format("Facebook DINOv2", r"^(mask_token|register_tokens)$", ignored=r"^mask_token$", defaults=_ERF | IMAGENET),
    Format("timm", r"^blocks\.\d+\.attn\.qkv\.weight$", TIMM_RENAMES, defaults=_ERF | HALF),
)

# In the order in which a wrapper is looked into: averaged weights before raw ones, as timm does.
WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model", "model_state_dict")
PREFIXES = ("module.", "_orig_mod.", "model.", "timm_model.")
ALWAYS = ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight")
RANKS = {
    "patch_embed.proj.weight": 4,
    "pos_embed": 3,
    "cls_token": 3,
    "reg_token": 3,
    "register_tokens": 3,
    "head.weight": 2,
}


def unwrap(content: dict) -> State:
    """The tensors in what a file holds: out of `{"state_dict": ...}` and the like, without the prefixes that wrappers of modules add."""
    while inner := next((content[k] for k in WRAPPERS if isinstance(content.get(k), dict)), None):
        content = inner
    state = {str(k): v.detach() for k, v in content.items() if isinstance(v, Tensor)}
    while state and (prefix := next((p for p in PREFIXES if all(k.startswith(p) for k in state)), None)):
        state = {k[len(prefix) :]: v for k, v in state.items()}
    return state


def detect(state: State) -> Format:
    """The format of these tensors, by their names. Raises InputError for what is no ViT, or one that is not supported yet."""
    for pattern, what in NOT_YET.items():
        if any(re.search(pattern, k) for k in state):
            raise InputError(f"{what} is not supported yet")
    for form in FORMATS:
        if any(re.search(form.mark, k) for k in state):
            return form
    names = "timm, Google npz, Hugging Face (ViT, DeiT, DINOv2), torchvision or DINOv2"
    raise InputError(f"not a Vision Transformer as {names} write one; {listing(ALWAYS, state)}")


def convert(content: dict) -> tuple[State, Format, dict]:
    """What a file holds, in any format -> the state dict in timm's names, the format, and the constructor arguments that only the
    source could tell. Raises InputError as `detect` does, and where the tensors of a ViT are missing."""
    source = unwrap(content)
    form = detect(source)
    try:
        source, facts = form.prepare(source)
        state = _join_qkv(_renamed(source, form))
    except (IndexError, RuntimeError) as error:
        raise InputError(f"a {form.name} file with tensors of unexpected shapes ({error}); export it again") from error
    if any(k not in state for k in ALWAYS):
        raise InputError(f"a {form.name} file without a whole ViT; {listing(ALWAYS, state)}")
    for key, rank in RANKS.items():
        if key in state and state[key].dim() != rank:
            raise InputError(
                f"a {form.name} file with {key} of shape {tuple(state[key].shape)}, expected {rank} axes; export it again"
            )
    if "register_tokens" in state:
        facts["no_embed_class"] = True
        _fold_class_position(state)
    return {k: v.contiguous() for k, v in state.items()}, form, facts


def _renamed(source: State, form: Format) -> State:
    state = {}
    for key, value in source.items():
        for pattern, replacement in form.renames:
            key = re.sub(pattern, replacement, key)
        if not re.search(form.ignored, key):
            state[key] = value
    return state


def listing(expected, found) -> str:
    """ "missing a, b, c and 2 more; unexpected d", three names of each."""
    return "; ".join(
        f"{what} {_first(names)}"
        for what, names in (("missing", _without(expected, found)), ("unexpected", _without(found, expected)))
    )


def _without(names, others) -> list[str]:
    return [n for n in names if n not in others]


def _first(names: list[str]) -> str:
    return (", ".join(names[:3]) or "none") + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _join_qkv(state: State) -> State:
    """`blocks.i.attn.{q,k,v}` -> one `qkv`, rows in that order, where all three are there."""
    joined = {}
    for key, value in state.items():
        part = re.fullmatch(r"(.*\.attn\.)([qkv])(\.\w+)", key)
        names = [part[1] + name + part[3] for name in "qkv"] if part else []
        if not part or any(n not in state for n in names):
            joined[key] = value
        elif part[2] == "q":
            joined[f"{part[1]}qkv{part[3]}"] = torch.cat([state[n] for n in names])
    return joined


def _fold_class_position(state: State) -> None:
    """DINOv2 gives registers no position: the class token takes its own along, and the table keeps the patches alone."""
    state["reg_token"] = state.pop("register_tokens")
    if "cls_token" in state and "pos_embed" in state:
        state["cls_token"] = state["cls_token"] + state["pos_embed"][:, :1]
        state["pos_embed"] = state["pos_embed"][:, 1:]
