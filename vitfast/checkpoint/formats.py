"""The weight formats that are read: how each is recognised, what its names become, its defaults."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from . import timm
from .names import BIG_VISION, GOOGLE, HUGGING_FACE, TORCHVISION, Renames, State, rename, same_tensor, to_ours

IMAGENET = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
HALF = dict(mean=0.5, std=0.5)
NONE = r"(?!)"  # matches no key


@dataclass(frozen=True)
class Format:
    """One format.

    mark: a pattern that some key matches. renames: what its names become. ignored: keys (renamed) that the ViT does
    without. defaults: constructor arguments of this format. unsaid: arguments that differ from model to model, and that
    its tensors do not say. prepare: source tensors -> tensors in PyTorch's layout, and the constructor arguments that
    only the source's shapes tell.
    """

    name: str
    mark: str
    renames: Renames
    ignored: str
    defaults: dict
    unsaid: tuple[str, ...] = ()
    prepare: Callable[[State], tuple[State, dict]] = lambda state: (state, {})


_IN_MOST = ("cls_token", "reg_token", "blocks.0.ls1.gamma")  # of timm's models: one of these


@dataclass
class Converted:
    """The tensors of a file in timm's names, and what else the file says of its model.

    facts: constructor arguments that only the source could tell. left_out: tensors that the ViT does without. training:
    see timm.of_training. gamma_names: LayerScale had the names of DeiT III and of timm's rotary models.
    """

    state: State
    form: Format
    facts: dict
    left_out: list[str]
    training: dict
    gamma_names: bool

    @property
    def notes(self) -> list[str]:
        """A line for the tensors that are left out."""
        return [f"left out, as the ViT has no place for them: {', '.join(self.left_out)}"] if self.left_out else []

    def doubt(self, known: Mapping) -> str:
        """Why these tensors alone may be of a model that computes something else, or "".

        Rotary positions have no parameters, an activation neither, and norms do not tell where they stand. known: what
        the caller says.
        """
        if self.form.name not in ("timm", "Facebook DINOv2"):
            return ""
        rotary = "which vitfast does not have yet; where there are none, pass pos_embed="
        if not any(name.startswith("pos_embed") for name in self.state):
            if known.get("pos_embed") not in ("none", ""):
                return f"there is no position table, as in models with rotary positions (DINOv3, rope), {rotary}'none'"
        elif self.gamma_names and known.get("pos_embed") != "learn":
            where = "in DeiT III's own files, but also in timm's models with rotary positions"
            return f"LayerScale is called gamma_1: so it is {where}, {rotary}'learn'"
        elif known.get("act_layer") is None and not any(name in self.state for name in _IN_MOST):
            others = "SigLIP's have an exact GELU or a tanh one, vit_base_patch16_rpn_224 (which vitfast cannot load)"
            return f"timm's models with these tensors differ: {others} has its norms after attention; pass act_layer="
        return ""


# Keys of Vision Transformers that ours is not, or not yet.
NOT_YET = {
    r"^patch_embed\.backbone\.(?!(stem|stages)\.)": "a hybrid with another CNN than the paper's ResNet",
    r"patch_embeddings\.backbone\.": "a hybrid (a ResNet under the ViT) of Hugging Face",
    r"(^|/)MAPHead_0/|^attn_pool\.": "a ViT with attention pooling (MAP head)",
    r"^conv_proj\.(conv_bn_relu_0|conv_last)\.": "a ViT with a convolutional stem",
    r"\.mlp\.(w12|weights_in|gate_proj|fc1_g)\.": "a ViT with a gated MLP (SwiGLU)",
    r"^rope|rope_embed": "a ViT with rotary positions",
    r"rel_pos|relative_position": "a ViT with relative positions",
    r"^norm_pre\.": "a CLIP ViT (a norm before the first block)",
    r"\.[qk]_norm\.": "a ViT with normalised queries and keys",
    r"\.(attn|mlp)\.norm\.": "a ViT with norms inside attention or MLP",
    r"\.attn\.(q|v)_bias$": "a ViT with biases of queries and values alone",
    r"\.attn\.lambda_": "a ViT with differential attention",
    r"^blocks\.\d+\.(attns|ffns|in_proj)\.": "a ViT whose attention and MLP run side by side",
    r"^embeds\.": "a NaFlex ViT",
    r"^decoder\.(decoder_|mask_token)": "a masked autoencoder (ViTMAE)",
}

TIMM_RENAMES: Renames = (
    (r"\.gamma_([12])$", r".ls\1.gamma"),  # DeiT III's own files
    (r"^dist_token$", "reg_token"),
)

GOOGLE_RENAMES: Renames = (
    *to_ours(BIG_VISION),
    *to_ours(GOOGLE),
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
    (r"^cls_classifier\.", "classifier."),
    *to_ours(HUGGING_FACE),
    (r"^embeddings\.distillation_token$", "reg_token"),
    (r"^distillation_classifier\.", "head_dist."),
    (r"^embeddings\.", ""),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
    (r"^layers\.", "blocks."),  # these three are of transformers 5, in memory
    (r"\.attention\.([qkv])_proj\.", r".attn.\1."),
    (r"\.attention\.o_proj\.", ".attn.proj."),
)

TORCHVISION_RENAMES: Renames = (
    *to_ours(TORCHVISION),
    (r"\.mlp\.linear_([12])\.", r".mlp.fc\1."),  # of older files
)


def _prepare_google(source: State) -> tuple[State, dict]:
    """Takes the image model out, unstacks stacked layers, turns every array to PyTorch's layout."""
    prefix = next((p for p in GOOGLE_PREFIXES if f"{p}embedding/kernel" in source), "")
    source = {k[len(prefix) :]: v for k, v in source.items() if k.startswith(prefix)}
    if "embedding/kernel" in source and source["embedding/kernel"].dim() != 4:
        raise InputError("a NaFlex ViT (a dense patch projection) is not supported yet")
    if "conv_root/kernel" in source and "block1/unit1/conv1/kernel" not in source:
        raise InputError("a hybrid of a ResNet's root alone is not supported yet")
    stacked = [key for key in source if key.startswith("Transformer/encoderblock/")]
    state = {key: value for key, value in source.items() if key not in stacked}
    for key in stacked:
        for i, layer in enumerate(source[key]):
            if (name := key.replace("encoderblock/", f"encoderblock_{i}/")) in state:
                raise same_tensor(key, name)
            state[name] = layer
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


_HUGGING_FACE = (HUGGING_FACE_RENAMES, r"^(mask_token$|pooler\.|decoder\.)")
_ERF = dict(act_layer="gelu", norm_eps=1e-6)
_ERF_1E_12 = dict(act_layer="gelu", norm_eps=1e-12)
_GOOGLE = (GOOGLE_RENAMES, NONE, dict(act_layer="gelu_tanh", norm_eps=1e-6) | HALF)

_HEADS, _NUMBERS = ("num_heads",), ("num_heads", "act_layer", "norm_eps", "mean", "std")
_DISTILLATION = r"(^deit\.|^)embeddings\.distillation_token$"

# The first whose mark is found is it.
FORMATS = (
    Format("Google npz", r"(^|/)Transformer/encoderblock(_\d+)?/", *_GOOGLE, prepare=_prepare_google),
    Format("Hugging Face DINOv2", r"\.layer_scale1\.lambda1$", *_HUGGING_FACE, _ERF | IMAGENET, _HEADS),
    Format("Hugging Face DeiT", _DISTILLATION, *_HUGGING_FACE, _ERF_1E_12 | IMAGENET, _NUMBERS),
    Format("Hugging Face ViT", r"(^|\.)embeddings\.patch_embeddings\.", *_HUGGING_FACE, _ERF_1E_12 | HALF, _NUMBERS),
    Format("torchvision", r"^encoder\.layers\.encoder_layer_\d+\.", TORCHVISION_RENAMES, NONE, _ERF | IMAGENET, _HEADS),
    Format("Facebook DINOv2", r"^(mask_token|register_tokens)$", (), r"^mask_token$", _ERF | IMAGENET, _HEADS),
    Format("timm", r"^blocks\.\d+\.attn\.qkv\.weight$", TIMM_RENAMES, NONE, _ERF | HALF, (*_NUMBERS, "global_pool")),
)

# In the order in which a wrapper is looked into: averaged weights before raw ones, as timm does.
WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model", "model_state_dict")
PREFIXES = ("module.", "_orig_mod.", "model.", "timm_model.")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ALWAYS = ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight")
RANKS = {"patch_embed.proj.weight": 4, **dict.fromkeys((*ALWAYS[1:], "head.weight", "pre_logits.fc.weight"), 2)}
RANKS |= dict.fromkeys(("pos_embed", "cls_token", "reg_token", "register_tokens"), 3)


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
    names = "timm, Google npz, Hugging Face (ViT, DeiT, DINOv2), torchvision or DINOv2"
    raise InputError(f"not a Vision Transformer as {names} write one; {listing(ALWAYS, state)}")


def to_timm_names(content: dict) -> Converted:
    """The content of a file in any format, in timm's names.

    Raises InputError as `detect` does, and where the tensors of a ViT are missing, or are no weights.
    """
    source = unwrap(content)
    form = detect(source)
    gamma_names = any(re.search(r"\.gamma_[12]$", k) for k in source)
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
        state = _join_qkv(state)
    except (IndexError, RuntimeError) as error:
        raise InputError(f"a {form.name} file with tensors of unexpected shapes ({error}); export it again") from error
    if any(k not in state for k in ALWAYS):
        raise InputError(f"a {form.name} file without a whole ViT; {listing(ALWAYS, state)}")
    for key, value in state.items():
        shape, rank = tuple(value.shape), RANKS.get(key, value.dim())
        if value.dim() != rank:
            raise InputError(f"a {form.name} file with {key} of shape {shape}, expected {rank} axes; export it again")
    if what := _not_yet(state):
        raise InputError(f"{what} is not supported yet")
    if "register_tokens" in state:
        facts["no_embed_class"] = True
        _fold_class_position(state)
    state = {k: v.contiguous() for k, v in state.items()}
    training = timm.of_training(content) if form.name == "timm" else {}
    return Converted(state, form, facts, left_out, training, gamma_names)


def _not_yet(state: State) -> str:
    """The ViT that these tensors, in timm's names, show to be another than ours; "" where they do not."""
    fc2 = state.get("blocks.0.mlp.fc2.weight")
    if fc2 is not None and fc2.dim() == 2 and state["blocks.0.mlp.fc1.weight"].shape[0] == 2 * fc2.shape[1]:
        return "a ViT with a gated MLP (SwiGLU)"
    if "blocks.0.norm1.weight" in state and not any(re.search(r"\.norm[12]\.bias$", key) for key in state):
        return "a ViT with norms without bias (RMSNorm)"
    last = any(key.startswith(("norm.", "fc_norm.")) for key in state)
    return "" if last else "a ViT without a norm after its last block"


def _check_prefixes(state: State, form: str) -> None:
    """Raises InputError where some names have lost the prefix of a wrapper and others have not."""
    for prefix in PREFIXES:
        if behind := [key for key in state if key.startswith(prefix)]:
            some = f"a {form} file with {len(behind)} of {len(state)} names behind {prefix!r}"
            missing = listing([key[len(prefix) :] for key in behind], behind)
            raise InputError(f"{some}; {missing}; take it off these names")


def listing(expected, found) -> str:
    """ "missing a, b, c and 2 more; unexpected d", three names of each."""

    def first(names: list[str]) -> str:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return (", ".join(names[:3]) or "none") + more

    missing, unexpected = [n for n in expected if n not in found], [n for n in found if n not in expected]
    return f"missing {first(missing)}; unexpected {first(unexpected)}"


def _join_qkv(state: State) -> State:
    """`blocks.i.attn.{q,k,v}` -> one `qkv`, rows in that order, where all three are there."""
    joined = {}
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
