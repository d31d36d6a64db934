"""Recognises weight formats, which `FORMATS` describes, and converts tensors to timm's names."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...errors import InputError
from . import google, timm, towers
from .names import GATE, HUGGING_FACE, HUGGING_FACE_DINOV3, QKV, TORCHVISION, Renames, State, join, rename, to_ours
from .wrappers import PREFIXES, unwrap

IMAGENET = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
HALF = dict(mean=0.5, std=0.5)
CLIP = dict(mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711))
NONE = r"(?!)"  # matches no key


@dataclass(frozen=True)
class Format:
    """How a weight format is recognised and read.

    mark: a pattern that matches some name in each of its files. renames: from its names to ours. ignored: a pattern of
    renamed tensors that the ViT does not need. defaults: constructor arguments for what nothing else states. assumed:
    arguments that differ from model to model, so that the user is warned when they get their default. prepare: takes a
    file's tensors and the constructor arguments that are available; returns the tensors in PyTorch's layout, and the
    arguments that only tensors in the file's own layout show, with a line for the log as `note` if there is one.
    """

    name: str
    mark: str
    renames: Renames
    ignored: str
    defaults: dict
    assumed: tuple[str, ...] = ()
    prepare: Callable[[State, Mapping], tuple[State, dict]] = lambda state, args: (state, {})


UNSURE = ("timm", "Facebook DINOv2")  # formats whose models may compute different things from the same tensors
_PREFIX = ("cls_token", "reg_token")
_IN_MOST = (*_PREFIX, "blocks.0.ls1.gamma")  # most of timm's models have one of these tensors


@dataclass
class Checkpoint:
    """The tensors of a file in timm's names, and what else the file says about its model.

    facts: constructor arguments from `Format.prepare`. training: see timm.of_training. sources: the names in the file.
    notes: lines for the log, on what was assumed or left out. config: all constructor arguments, once `infer` has run.
    """

    state: State
    form: Format
    facts: dict
    training: dict
    sources: list[str]
    notes: list[str]
    config: dict = field(default_factory=dict)

    def __str__(self) -> str:
        shape = ", ".join(f"{k}={self.config.get(k)}" for k in ("embed_dim", "depth", "patch_size", "num_classes"))
        return f"a {self.form.name} checkpoint with {shape}"

    def has(self, pattern: str) -> bool:
        """Whether this pattern matches in any name in the file."""
        return any(re.search(pattern, name) for name in self.sources)

    def doubt(self, caller_args: Mapping) -> str:
        """Returns why these tensors may belong to a model that computes something else, "" if they cannot.

        Rotary positions and activations have no parameters, and norms do not tell where they are applied. DeiT III and
        timm's rotary models share their names of LayerScale; models of EVA, with rotary positions or without, share
        those of biases and gates. caller_args: the caller's constructor arguments, which settle such doubts.
        """
        if self.form.name not in UNSURE:
            return ""
        map_head, clip = "attn_pool.latent" in self.state, "norm_pre.weight" in self.state
        table = any(name.startswith("pos_embed") for name in self.state)
        if table and self.has(_GAMMA) and caller_args.get("pos_embed") != "learn" and caller_args.get("rope") is None:
            where = "in DeiT III's own files, but also in timm's models with rotary positions (rope_ape)"
            return f"LayerScale is called gamma_1: so it is {where}; where there are none, pass pos_embed='learn'"
        if table and self.has(_EVA) and "rope" not in caller_args:
            have = "so they are in models with rotary positions (EVA-02: pass rope='cat' and ref_feat_shape=(16, 16))"
            return f"biases or gates have EVA's names: {have}, and without (EVA: pass rope=None)"
        if table and map_head and clip and "rope" not in caller_args:
            have = "Perception Encoders have, with rotary positions in an order that vitfast does not know"
            return f"a norm before the blocks and a MAP head {have}; where there are none, pass rope=None"
        if map_head and any(name in self.state for name in _PREFIX) and caller_args.get("global_pool") != "map":
            reads = "whether the MAP head reads prefix tokens too, no tensor says"
            return f"{reads}: where it reads the patches alone, pass global_pool='map'"
        if caller_args.get("act_layer") is not None:
            return ""
        if clip:
            return "timm's models with these tensors differ: CLIP's have an exact GELU or a quick one; pass act_layer="
        if not any(name in self.state for name in _IN_MOST):
            others = "SigLIP's have an exact GELU or a tanh one, vit_base_patch16_rpn_224 (which vitfast cannot load)"
            return f"timm's models with these tensors differ: {others} has its norms after attention; pass act_layer="
        return ""


# Patterns of names in Vision Transformers that vitfast does not support, or not yet, and what these models are.
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

_GAMMA = r"\.gamma_([12])$"
TIMM_RENAMES: Renames = (  # all other names in these files are timm's
    (_GAMMA, r".ls\1.gamma"),  # DeiT III's own files
    (r"^(dist_token|storage_tokens)$", "reg_token"),
    (r"\.mlp\.w12\.", ".mlp.fc1."),  # from here on: Facebook's and EVA's own files
    (r"\.mlp\.w1\.", ".mlp.fc1_g."),
    (r"\.mlp\.w2\.", ".mlp.fc1_x."),
    (r"\.mlp\.w3\.", ".mlp.fc2."),
    (r"\.mlp\.ffn_ln\.", ".mlp.norm."),
    (r"\.attn\.([qkv])_(proj\.)?(weight|bias)$", r".attn.\1.\3"),
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
    (r"^layers\.", "layer."),  # from here on: the names of transformers 5 in memory
    *to_ours(HUGGING_FACE_DINOV3),
)

TORCHVISION_RENAMES: Renames = (
    *to_ours(TORCHVISION),
    (r"\.mlp\.linear_([12])\.", r".mlp.fc\1."),  # older files
)


# Renames, with the pattern of renamed tensors that are left out.
_HUGGING_FACE = (HUGGING_FACE_RENAMES, r"^(mask_token$|pooler\.|decoder\.)")
_TOWER, _OPENAI = (towers.TOWER_RENAMES, towers.BESIDE), (towers.OPENAI_RENAMES, towers.BESIDE_OPENAI)
_HUGGING_FACE_DINOV3, _FACEBOOK = (towers.DINOV3_RENAMES, r"^mask_token$"), (TIMM_RENAMES, r"^mask_token$")
_META = (TIMM_RENAMES, r"^(mask_token$|rope_embed\.|local_cls_norm\.|cls_norm\.)")
# Defaults.
_ERF = dict(act_layer="gelu", norm_eps=1e-6)
_SHARP = dict(pos_resample="bicubic")  # transformers resamples positions without antialias
_ERF_1E_12 = dict(act_layer="gelu", norm_eps=1e-12) | _SHARP
_TANH = dict(act_layer="gelu_tanh", norm_eps=1e-6)
_CLIP = dict(act_layer="quick_gelu", norm_eps=1e-5) | CLIP
_DINOV3 = dict(act_layer="gelu", norm_eps=1e-5, rope="dinov3", dynamic_img_size=True) | IMAGENET
# Arguments of which the defaults are assumed with a warning.
_HEADS, _PIXELS, _ACTIVATION = ("num_heads",), ("num_heads", "mean", "std"), ("num_heads", "act_layer")
_NUMBERS = ("num_heads", "act_layer", "norm_eps", "mean", "std")
# Marks.
_FLAX, _DISTILLATION = r"(^|/)Transformer/encoderblock(_\d+)?/", r"(^deit\.|^)embeddings\.distillation_token$"
_DINOV3_PATCHES, _PATCHES = (rf"(^|\.)embeddings\.{name}\.weight$" for name in ("patch_embeddings", "patch_embedding"))
_CLIP_TOKEN, _OPENAI_TOKEN = r"(^|\.)embeddings\.class_embedding$", r"^(visual\.)?class_embedding$"
_META_TENSORS, _DINOV2_TOKENS = r"^(storage_tokens|rope_embed\.periods)$", r"^(mask_token|register_tokens)$"

# A file has the first of these formats whose mark matches one of its names.
FORMATS = (
    Format("Google npz", _FLAX, google.RENAMES, NONE, _TANH | HALF, prepare=google.prepare),
    Format("Hugging Face DINOv3", _DINOV3_PATCHES, *_HUGGING_FACE_DINOV3, _DINOV3, _PIXELS, towers.prepare_dinov3),
    Format("Meta DINOv3", _META_TENSORS, *_META, _DINOV3, _PIXELS, towers.prepare_meta),
    Format("Hugging Face CLIP", _CLIP_TOKEN, *_TOWER, _CLIP | _SHARP, _ACTIVATION, towers.prepare_tower),
    Format("Hugging Face SigLIP", _PATCHES, *_TOWER, _TANH | HALF | _SHARP, _HEADS, towers.prepare_tower),
    Format(
        "OpenAI CLIP", _OPENAI_TOKEN, *_OPENAI, _CLIP, (*_ACTIVATION, "global_pool", "norm_eps"), towers.prepare_openai
    ),
    Format("Hugging Face DINOv2", r"\.layer_scale1\.lambda1$", *_HUGGING_FACE, _ERF | IMAGENET | _SHARP, _HEADS),
    Format("Hugging Face DeiT", _DISTILLATION, *_HUGGING_FACE, _ERF_1E_12 | IMAGENET, _NUMBERS),
    Format("Hugging Face ViT", r"(^|\.)embeddings\.patch_embeddings\.", *_HUGGING_FACE, _ERF_1E_12 | HALF, _NUMBERS),
    Format("torchvision", r"^encoder\.layers\.encoder_layer_\d+\.", TORCHVISION_RENAMES, NONE, _ERF | IMAGENET, _HEADS),
    Format("Facebook DINOv2", _DINOV2_TOKENS, *_FACEBOOK, _ERF | IMAGENET, _HEADS),
    Format(
        "timm",
        r"^blocks\.\d+\.attn\.(qkv|q_proj)\.weight$",
        TIMM_RENAMES,
        r"(^|\.)rope\.(freqs_(cos|sin)|pos_embed\w*|bands|periods)$",  # the ViT computes all of these
        _ERF | HALF,
        (*_NUMBERS, "global_pool"),
        lambda state, args: (towers.zero_key_bias(state), {}),  # EVA-02 has q, k and v apart
    ),
)

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ALWAYS = ("patch_embed.proj.weight", *(f"blocks.0.{name}.weight" for name in ("attn.qkv", "mlp.fc1", "mlp.fc2")))
RANKS = dict.fromkeys((*ALWAYS, "head.weight", "pre_logits.fc.weight"), 2) | {ALWAYS[0]: 4}
RANKS |= dict.fromkeys(("pos_embed", "cls_token", "reg_token", "register_tokens", "attn_pool.latent"), 3)


def detect(state: State) -> Format:
    """Returns the format of these tensors, by their names. Raises InputError if none supports them."""
    for pattern, what in NOT_YET.items():
        if any(re.search(pattern, k) for k in state):
            raise InputError(f"{what} is not supported yet")
    for form in FORMATS:
        if any(re.search(form.mark, k) for k in state):
            return form
    hugging_face = "Hugging Face (ViT, DeiT, DINOv2, DINOv3, CLIP, SigLIP)"
    names = f"timm, Google npz, {hugging_face}, torchvision, DINOv2, DINOv3 or CLIP"
    raise InputError(f"not a Vision Transformer as {names} write one; {listing(ALWAYS, state)}")


def to_timm_names(content: dict, args: Mapping = {}) -> Checkpoint:
    """Converts the content of a file in any format to timm's names.

    args: constructor arguments from the caller or the JSON; SigLIP 2's patches need in_chans and patch_size. Raises
    InputError as `detect` does, and where tensors of a ViT are missing or have a dtype or shape that no weights have.
    """
    source, outside = unwrap(content)
    form = detect(source)
    for key, value in source.items():
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            kind = "on the meta device" if value.is_meta else "quantized" if value.is_quantized else "sparse"
            raise InputError(f"{key} is {kind}, expected a dense tensor with values; export it again")
    try:
        state, facts = form.prepare(source, args)
        state = rename(state, form.renames)
        left_out = [k for k in state if re.search(form.ignored, k)]
        empty = [k for k in ("reg_token", "register_tokens") if k in state and not state[k].numel()]  # for no tokens
        state = {k: v for k, v in state.items() if k not in left_out and k not in empty}
        for key, value in state.items():  # before q, k and v are joined, which would promote them to one dtype
            if value.dtype not in DTYPES or not value.numel():
                dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
                is_ = f"{key} is {value.dtype} of shape {tuple(value.shape)}"
                raise InputError(f"{is_}, expected values of {dtypes}; export it again")
        _check_prefixes(state, form.name)
        state = join(join(state, ".attn.qkv.", QKV), ".mlp.fc1.", GATE)
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
    if "register_tokens" in state:  # DINOv2's, which have no positions: the class token's position is added to it
        facts |= dict(pos_resample="bicubic_antialias")  # as transformers and Facebook do for models with registers
        facts["no_embed_class"], state["reg_token"] = True, state.pop("register_tokens")
        if "cls_token" in state and "pos_embed" in state:
            state["cls_token"] = state["cls_token"] + state["pos_embed"][:, :1]
            state["pos_embed"] = state["pos_embed"][:, 1:]
    state = {k: v.contiguous() for k, v in state.items()}
    notes = [facts.pop("note")] if "note" in facts else []
    notes += [f"left out, as the ViT has no place for them: {_first(left_out)}"] if left_out else []
    notes += [f"left out, as they are outside of the ViT: {_first(outside)}"] if outside else []
    training = timm.of_training(content) if form.name == "timm" else {}
    return Checkpoint(state, form, facts, training, list(source), notes)  # the names alone, to free its tensors


def _check_prefixes(state: State, form: str) -> None:
    """Raises InputError if only some names have a wrapper's prefix; `unwrap` removes it from all."""
    for prefix in PREFIXES:
        if behind := [key for key in state if key.startswith(prefix)]:
            some = f"a {form} file with {len(behind)} of {len(state)} names behind {prefix!r}"
            missing = listing([key[len(prefix) :] for key in behind], behind)
            raise InputError(f"{some}; {missing}; take it off these names")


def listing(expected, names) -> str:
    """Returns, for example, "missing a, b, c and 2 more; unexpected d", with at most three names of each."""
    missing, unexpected = [n for n in expected if n not in names], [n for n in names if n not in expected]
    return f"missing {_first(missing)}; unexpected {_first(unexpected)}"


def _first(names: list[str]) -> str:
    """Returns the first three of these names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(names[:3]) or "none") + more


def differences(expected: dict[str, Tensor], state: dict[str, Tensor]) -> str:
    """Returns the names and shapes for which a state dict does not load, "" where it fits."""
    names = listing(expected, state) if expected.keys() != state.keys() else ""
    shapes = [
        f"{k} is {tuple(state[k].shape)} for {tuple(v.shape)}"
        for k, v in expected.items()
        if k in state and state[k].shape != v.shape
    ]
    return "; ".join(said for said in (names, ", ".join(shapes[:3])) if said)
