"""The weight formats that are read: how each is recognised, what its names become, its defaults."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import InputError
from . import google, timm, towers
from .names import HUGGING_FACE, HUGGING_FACE_LATER, TORCHVISION, Renames, State, rename, same_tensor, to_ours

IMAGENET = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
HALF = dict(mean=0.5, std=0.5)
CLIP = dict(mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711))
NONE = r"(?!)"  # matches no key


@dataclass(frozen=True)
class Format:
    """One format.

    mark: a pattern that some key matches. renames: what its names become. ignored: keys (renamed) that the ViT does
    without. defaults: constructor arguments of this format. unsaid: arguments that differ from model to model, and that
    its tensors do not say. prepare: source tensors -> tensors in PyTorch's layout, and the constructor arguments that
    only the source's shapes tell, with a `note` where there is more to say.
    """

    name: str
    mark: str
    renames: Renames
    ignored: str
    defaults: dict
    unsaid: tuple[str, ...] = ()
    prepare: Callable[[State], tuple[State, dict]] = lambda state: (state, {})


_PREFIX = ("cls_token", "reg_token")
_IN_MOST = (*_PREFIX, "blocks.0.ls1.gamma")  # of timm's models: one of these


@dataclass
class Converted:
    """The tensors of a file in timm's names, and what else the file says of its model.

    facts: constructor arguments that only the source could tell. left_out: tensors that the ViT does without. training:
    see timm.of_training. note: what else is to be said. gamma_names: LayerScale had the names of DeiT III and of timm's
    rotary models. eva_names: so had the biases of queries and values, or the gate, those of EVA.
    """

    state: State
    form: Format
    facts: dict
    left_out: list[str]
    training: dict
    note: str
    gamma_names: bool
    eva_names: bool

    @property
    def notes(self) -> list[str]:
        """A line for the tensors that are left out, and what else is to be said."""
        left_out = f"left out, as the ViT has no place for them: {_first(self.left_out)}" if self.left_out else ""
        return [line for line in (self.note, left_out) if line]

    def doubt(self, known: Mapping) -> str:
        """Why these tensors alone may be of a model that computes something else, or "".

        Rotary positions have no parameters, an activation neither, and norms do not tell where they stand. known: what
        the caller says.
        """
        if self.form.name not in ("timm", "Facebook DINOv2"):
            return ""
        map_head, clip = "attn_pool.latent" in self.state, "norm_pre.weight" in self.state
        if not any(name.startswith("pos_embed") for name in self.state):
            if known.get("pos_embed") not in ("none", "") and known.get("rope") is None:
                missing = "there is no position table, as in models with rotary positions"
                return f"{missing}: pass rope='dinov3' for DINOv3; where there are none, pass pos_embed='none'"
        elif self.gamma_names and known.get("pos_embed") != "learn" and known.get("rope") is None:
            where = "in DeiT III's own files, but also in timm's models with rotary positions (rope_ape)"
            return f"LayerScale is called gamma_1: so it is {where}; where there are none, pass pos_embed='learn'"
        elif self.eva_names and "rope" not in known:
            have = "so they are in models with rotary positions (EVA-02: pass rope='cat' and ref_feat_shape=(16, 16))"
            return f"biases or gates have EVA's names: {have}, and without (EVA: pass rope=None)"
        elif map_head and clip and "rope" not in known:
            have = "Perception Encoders have, with rotary positions in an order that vitfast does not know"
            return f"a norm before the blocks and a MAP head {have}; where there are none, pass rope=None"
        if map_head and any(name in self.state for name in _PREFIX) and known.get("global_pool") != "map":
            reads = "whether the MAP head reads prefix tokens too, no tensor says"
            return f"{reads}: where it reads the patches alone, pass global_pool='map'"
        if known.get("act_layer") is not None:
            return ""
        if clip:
            return "timm's models with these tensors differ: CLIP's have an exact GELU or a quick one; pass act_layer="
        if not any(name in self.state for name in _IN_MOST):
            others = "SigLIP's have an exact GELU or a tanh one, vit_base_patch16_rpn_224 (which vitfast cannot load)"
            return f"timm's models with these tensors differ: {others} has its norms after attention; pass act_layer="
        return ""


# Keys of Vision Transformers that ours is not, or not yet.
NOT_YET = {
    r"^patch_embed\.backbone\.(?!(stem|stages)\.)": "a hybrid with another CNN than the paper's ResNet",
    r"patch_embeddings\.backbone\.": "a hybrid (a ResNet under the ViT) of Hugging Face",
    r"(^|/)MAPHead_0/": "a ViT of big_vision with attention pooling (MAP head)",
    r"^conv_proj\.(conv_bn_relu_0|conv_last)\.": "a ViT with a convolutional stem",
    r"^rope\.freqs$": "a ViT with learned rotary positions",
    r"rel_pos|relative_position": "a ViT with relative positions",
    r"\.attn\.(norm|inner_attn_ln)\.": "a ViT with norms inside attention",
    r"\.attn\.lambda_": "a ViT with differential attention",
    r"^blocks\.\d+\.(attns|ffns|in_proj)\.": "a ViT whose attention and MLP run side by side",
    r"^embeds\.": "a NaFlex ViT",
    r"^decoder\.(decoder_|mask_token)": "a masked autoencoder (ViTMAE)",
}

GATED_RENAMES: Renames = (  # of Facebook's and EVA's own files
    (r"\.mlp\.w12\.", ".mlp.fc1."),
    (r"\.mlp\.w1\.", ".mlp.fc1_g."),
    (r"\.mlp\.w2\.", ".mlp.fc1_x."),
    (r"\.mlp\.w3\.", ".mlp.fc2."),
)

TIMM_RENAMES: Renames = (
    (r"\.gamma_([12])$", r".ls\1.gamma"),  # DeiT III's own files
    (r"^dist_token$", "reg_token"),
    *GATED_RENAMES,
    (r"\.mlp\.ffn_ln\.", ".mlp.norm."),
    (r"\.attn\.([qkv])_proj\.", r".attn.\1."),
)
_EVA = r"\.attn\.(q_bias$|q_proj\.)|\.mlp\.(fc1_g|w1)\."

HUGGING_FACE_RENAMES: Renames = (
    (r"^(vit|deit|dinov2|dinov2_with_registers)\.", ""),
    (r"^cls_classifier\.", "classifier."),
    *to_ours(HUGGING_FACE),
    (r"^embeddings\.distillation_token$", "reg_token"),
    (r"^distillation_classifier\.", "head_dist."),
    (r"^embeddings\.", ""),
    (r"\.mlp\.weights_in\.", ".mlp.fc1."),
    (r"\.mlp\.weights_out\.", ".mlp.fc2."),
    *to_ours(HUGGING_FACE_LATER),
    (r"^layers\.", "blocks."),  # these three are of transformers 5, in memory
    (r"\.attention\.([qkv])_proj\.", r".attn.\1."),
    (r"\.attention\.o_proj\.", ".attn.proj."),
)

TORCHVISION_RENAMES: Renames = (
    *to_ours(TORCHVISION),
    (r"\.mlp\.linear_([12])\.", r".mlp.fc\1."),  # of older files
)


_HUGGING_FACE = (HUGGING_FACE_RENAMES, r"^(mask_token$|pooler\.|decoder\.)")
_ERF = dict(act_layer="gelu", norm_eps=1e-6)
_ERF_1E_12 = dict(act_layer="gelu", norm_eps=1e-12)
_GOOGLE = (google.RENAMES, NONE, dict(act_layer="gelu_tanh", norm_eps=1e-6) | HALF)

_HEADS, _NUMBERS = ("num_heads",), ("num_heads", "act_layer", "norm_eps", "mean", "std")
_CLIP, _SIGLIP = dict(act_layer="quick_gelu", norm_eps=1e-5) | CLIP, dict(act_layer="gelu_tanh", norm_eps=1e-6) | HALF
_DINOV3 = dict(act_layer="gelu", norm_eps=1e-5, rope="dinov3", dynamic_img_size=True) | IMAGENET
_PIXELS = ("num_heads", "mean", "std")
_TOWER, _PATCHES = (towers.TOWER_RENAMES, towers.BESIDE), r"(^|\.)embeddings\.patch_embedding\.weight$"
_DISTILLATION = r"(^deit\.|^)embeddings\.distillation_token$"

# The first whose mark is found is it.
FORMATS = (
    Format("Google npz", r"(^|/)Transformer/encoderblock(_\d+)?/", *_GOOGLE, prepare=google.prepare),
    Format(
        "Hugging Face DINOv3",
        r"(^|\.)embeddings\.patch_embeddings\.weight$",
        towers.DINOV3_RENAMES,
        r"^mask_token$",
        _DINOV3,
        _PIXELS,
        towers.prepare_dinov3,
    ),
    Format(
        "Meta DINOv3",
        r"^(storage_tokens|rope_embed\.periods)$",
        ((r"^storage_tokens$", "reg_token"), *GATED_RENAMES),
        r"^(mask_token$|rope_embed\.|local_cls_norm\.|cls_norm\.)",
        _DINOV3,
        _PIXELS,
        towers.prepare_meta,
    ),
    Format(
        "Hugging Face CLIP",
        r"(^|\.)embeddings\.class_embedding$",
        *_TOWER,
        _CLIP,
        ("num_heads", "act_layer"),
        towers.prepare_tower,
    ),
    Format("Hugging Face SigLIP", _PATCHES, *_TOWER, _SIGLIP, _HEADS, towers.prepare_tower),
    Format(
        "OpenAI CLIP",
        r"^(visual\.)?class_embedding$",
        towers.OPENAI_RENAMES,
        towers.BESIDE_OPENAI,
        _CLIP,
        ("num_heads", "act_layer", "global_pool", "norm_eps"),
        towers.prepare_openai,
    ),
    Format("Hugging Face DINOv2", r"\.layer_scale1\.lambda1$", *_HUGGING_FACE, _ERF | IMAGENET, _HEADS),
    Format("Hugging Face DeiT", _DISTILLATION, *_HUGGING_FACE, _ERF_1E_12 | IMAGENET, _NUMBERS),
    Format("Hugging Face ViT", r"(^|\.)embeddings\.patch_embeddings\.", *_HUGGING_FACE, _ERF_1E_12 | HALF, _NUMBERS),
    Format("torchvision", r"^encoder\.layers\.encoder_layer_\d+\.", TORCHVISION_RENAMES, NONE, _ERF | IMAGENET, _HEADS),
    Format(
        "Facebook DINOv2", r"^(mask_token|register_tokens)$", GATED_RENAMES, r"^mask_token$", _ERF | IMAGENET, _HEADS
    ),
    Format(
        "timm",
        r"^blocks\.\d+\.attn\.(qkv|q_proj)\.weight$",
        TIMM_RENAMES,
        r"(^|\.)rope\.(freqs_(cos|sin)|pos_embed\w*|bands|periods)$",  # all computed
        _ERF | HALF,
        (*_NUMBERS, "global_pool"),
        lambda state: (towers.without_key_bias(state), {}),  # EVA-02 has q, k and v apart
    ),
)

# In the order in which a wrapper is looked into: averaged weights before raw ones, as timm does.
WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model", "model_state_dict")
PREFIXES = ("module.", "_orig_mod.", "model.", "timm_model.")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_ALWAYS = ("patch_embed.proj", "blocks.0.attn.qkv", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2")
ALWAYS = tuple(f"{name}.weight" for name in _ALWAYS)
MATRICES = (*ALWAYS[1:], "head.weight", "pre_logits.fc.weight")
RANKS = {"patch_embed.proj.weight": 4, **dict.fromkeys(MATRICES, 2)}
RANKS |= dict.fromkeys(("pos_embed", "cls_token", "reg_token", "register_tokens", "attn_pool.latent"), 3)


def unwrap(content: dict) -> State:
    """The tensors in what a file holds, out of `{"state_dict": ...}` and the like.

    The prefixes that wrappers of modules add to all names are gone.
    """
    while inner := next((content[k] for k in WRAPPERS if isinstance(content.get(k), dict)), None):
        content = inner
    state = {str(k): v.detach() for k, v in content.items() if isinstance(v, Tensor)}
    while state and (prefix := next((p for p in PREFIXES if all(k.startswith(p) for k in state)), None)):
        state = {k[len(prefix) :]: v for k, v in state.items()}
    return state


def detect(state: State) -> Format:
    """The format of these tensors, by their names.

    Raises InputError for what is no ViT, or one that is not supported yet.
    """
    for pattern, what in NOT_YET.items():
        if any(re.search(pattern, k) for k in state):
            raise InputError(f"{what} is not supported yet")
    for form in FORMATS:
        if any(re.search(form.mark, k) for k in state):
            return form
    hugging_face = "Hugging Face (ViT, DeiT, DINOv2, DINOv3, CLIP, SigLIP)"
    names = f"timm, Google npz, {hugging_face}, torchvision, DINOv2, DINOv3 or CLIP"
    raise InputError(f"not a Vision Transformer as {names} write one; {listing(ALWAYS, state)}")


def to_timm_names(content: dict) -> Converted:
    """The content of a file in any format, in timm's names.

    Raises InputError as `detect` does, and where the tensors of a ViT are missing, or are no weights.
    """
    source = unwrap(content)
    form = detect(source)
    gamma_names, eva_names = (any(re.search(names, k) for k in source) for names in (r"\.gamma_[12]$", _EVA))
    for key, value in source.items():
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            kind = "on the meta device" if value.is_meta else "quantized" if value.is_quantized else "sparse"
            raise InputError(f"{key} is {kind}, expected a dense tensor with values; export it again")
    try:
        source, facts = form.prepare(source)
        state = rename(source, form.renames)
        left_out = [k for k in state if re.search(form.ignored, k)]
        state = {k: v for k, v in state.items() if k not in left_out}
        for key, value in state.items():  # before q, k and v are joined, which would make a common dtype
            if value.dtype not in DTYPES or not value.numel():
                known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
                is_ = f"{key} is {value.dtype} of shape {tuple(value.shape)}"
                raise InputError(f"{is_}, expected values of {known}; export it again")
        _check_prefixes(state, form.name)
        state = _join_gate(_join_qkv(state))
    except (IndexError, RuntimeError) as error:
        raise InputError(f"a {form.name} file with tensors of unexpected shapes ({error}); export it again") from error
    if any(k not in state for k in ALWAYS):
        raise InputError(f"a {form.name} file without a whole ViT; {listing(ALWAYS, state)}")
    for key, value in state.items():
        shape, rank = tuple(value.shape), RANKS.get(key, value.dim())
        if value.dim() != rank:
            raise InputError(f"a {form.name} file with {key} of shape {shape}, expected {rank} axes; export it again")
    if not any(key.startswith(("norm.", "fc_norm.")) for key in state):
        raise InputError("a ViT without a norm after its last block is not supported yet")
    if "register_tokens" in state:
        facts["no_embed_class"] = True
        _fold_class_position(state)
    state = {k: v.contiguous() for k, v in state.items()}
    training = timm.of_training(content) if form.name == "timm" else {}
    return Converted(state, form, facts, left_out, training, facts.pop("note", ""), gamma_names, eva_names)


def _check_prefixes(state: State, form: str) -> None:
    """Raises InputError where some names have lost the prefix of a wrapper and others have not."""
    for prefix in PREFIXES:
        if behind := [key for key in state if key.startswith(prefix)]:
            some = f"a {form} file with {len(behind)} of {len(state)} names behind {prefix!r}"
            missing = listing([key[len(prefix) :] for key in behind], behind)
            raise InputError(f"{some}; {missing}; take it off these names")


def listing(expected, found) -> str:
    """ "missing a, b, c and 2 more; unexpected d", three names of each."""

    missing, unexpected = [n for n in expected if n not in found], [n for n in found if n not in expected]
    return f"missing {_first(missing)}; unexpected {_first(unexpected)}"


def _first(names: list[str]) -> str:
    """Three of these names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(names[:3]) or "none") + more


def _join_gate(state: State) -> State:
    """`blocks.i.mlp.{fc1_g,fc1_x}`, gate and up -> one `fc1`, rows in that order, where both are there."""
    joined = dict(state)
    for key in [key for key in state if ".mlp.fc1_g." in key]:
        if (up := key.replace(".fc1_g.", ".fc1_x.")) in state:
            if (whole := key.replace(".fc1_g.", ".fc1.")) in state:
                raise same_tensor(key, whole)
            joined[whole] = torch.cat([joined.pop(key), joined.pop(up)])
    return joined


def _join_qkv(state: State) -> State:
    """`blocks.i.attn.{q,k,v}` -> one `qkv`, rows in that order, where all three are there.

    `q_bias` and `v_bias` say that keys have none: zeros.
    """
    joined, given = {}, dict(state)
    for key, value in state.items():
        if key.endswith(".attn.q_bias") and (other := key.replace("q_bias", "v_bias")) in state:
            stem = key.removesuffix("q_bias")
            given |= {f"{stem}q.bias": value, f"{stem}k.bias": torch.zeros_like(value), f"{stem}v.bias": state[other]}
            del given[key], given[other]
    state = given
    for key, value in state.items():
        found = re.fullmatch(r"(.*\.attn\.)([qkv])(\.\w+)", key)
        names = [found[1] + name + found[3] for name in "qkv"] if found else []
        if not found or any(n not in state for n in names):
            joined[key] = value
        elif found[2] == "q":
            if (whole := f"{found[1]}qkv{found[3]}") in state:
                raise same_tensor(key, whole)
            joined[whole] = torch.cat([state[n] for n in names])
    return joined


def _fold_class_position(state: State) -> None:
    """Adds the class token's position to it and keeps the patches' alone: DINOv2's registers have none."""
    state["reg_token"] = state.pop("register_tokens")
    if "cls_token" in state and "pos_embed" in state:
        state["cls_token"] = state["cls_token"] + state["pos_embed"][:, :1]
        state["pos_embed"] = state["pos_embed"][:, 1:]


def differences(expected: dict[str, Tensor], state: dict[str, Tensor]) -> str:
    """The names and shapes that keep a state dict from loading, "" where it fits."""
    names = listing(expected, state) if expected.keys() != state.keys() else ""
    shapes = [
        f"{k} is {tuple(state[k].shape)} for {tuple(v.shape)}"
        for k, v in expected.items()
        if k in state and state[k].shape != v.shape
    ]
    return "; ".join(said for said in (names, ", ".join(shapes[:3])) if said)
