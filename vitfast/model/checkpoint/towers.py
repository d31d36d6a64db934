"""Prepares tensors of DINOv3, SigLIP and CLIP (Hugging Face, Meta, OpenAI) for renaming to ours."""

import math
import re
from collections.abc import Mapping

import torch

from ...errors import InputError
from ..presets import pair
from .names import HUGGING_FACE_DINOV3, HUGGING_FACE_TOWER, OPENAI, UNGATED, Renames, State, rename, split, to_ours

TOWER_RENAMES: Renames = (*to_ours(HUGGING_FACE_TOWER), (r"^classifier\.", "head."))
OPENAI_RENAMES: Renames = (*to_ours(OPENAI), (r"\.ls_([12])\.gamma$", r".ls\1.gamma"))
DINOV3_RENAMES: Renames = (*to_ours(HUGGING_FACE_DINOV3), (r"^embeddings\.", ""))
# Names of tensors beside an image tower: of a text tower, and of the comparison of images and texts.
BESIDE = r"^text_model\.|^text_projection\.|^logit_(scale|bias)$|^vision_model\.|^embeddings\.position_ids$"
BESIDE_OPENAI = r"^(?!visual\.|cls_token|pos_embed|patch_embed|norm|blocks|head)"

ROUNDED = 2**-8  # the relative error of a number that was rounded to bfloat16


def zero_key_bias(source: State) -> State:
    """Adds biases of zeros for keys if queries have biases and keys have none."""
    queries = {key: value for key, value in source.items() if re.search(r"\.q(_proj\.|_)bias$", key)}
    zeros = {re.sub(r"\.q(_(proj\.)?bias)$", r".k\1", key): torch.zeros_like(value) for key, value in queries.items()}
    return source if zeros.keys() & source.keys() else source | zeros


def prepare_tower(source: State, args: Mapping) -> tuple[State, dict]:
    """Extracts the image tower of Hugging Face's CLIP or SigLIP from its own or the whole model's file."""
    state, facts = {key.removeprefix("vision_model."): value for key, value in source.items()}, {}
    state = _as_batches(state, "embeddings.position_embedding.weight", "embeddings.class_embedding")
    patch = state.get("embeddings.patch_embedding.weight")
    if patch is not None and patch.dim() == 2:  # SigLIP 2 NaFlex flattens a patch with its channels last
        count, chans = patch.shape[1], args.get("in_chans", 3)
        p, q = pair(args.get("patch_size") or math.isqrt(count // chans))
        if p * q * chans != count:
            wrong = f"a patch of {count} numbers is no {p} x {q} of {chans} channels"
            raise InputError(f"{wrong}; pass in_chans=, patch_size=")
        state["embeddings.patch_embedding.weight"] = patch.unflatten(1, (p, q, chans)).permute(0, 3, 1, 2)
        facts["pos_resample"] = "bilinear_antialias"
        if "in_chans" not in args:
            facts["note"] = f"the weights do not say in_chans={chans}, patch_size={p}: assumed; pass those that differ"
    state = split(state, "head.attention.in_proj_", {"head.attention.q.": 1, "head.attention.kv.": 2})
    if "classifier.weight" in state:
        if "embeddings.class_embedding" in state:
            raise InputError("a classifier on CLIP's patches before their last norm is not supported yet")
        facts |= dict(global_pool="avg", fc_norm=False)  # it reads the mean of the patches, not the MAP head
        state = {f"vision_model.{key}" if key.startswith("head.") else key: value for key, value in state.items()}
    return _with_bias(state, "visual_projection.weight"), facts


def _as_batches(state: State, positions: str, token: str) -> State:
    """Adds the axes that ours have to a table (N, D) -> (1, N, D) and a class token (D,) -> (1, 1, D)."""
    new_axes = ((positions, (None,)), (token, (None, None)))
    return state | {key: state[key][axes] for key, axes in new_axes if key in state}


def _with_bias(state: State, key: str) -> State:
    """Adds a bias of zeros to the linear layer whose weight is `key`, because our head has a bias."""
    if key not in state:
        return state
    return state | {key.replace("weight", "bias"): state[key].new_zeros(len(state[key]))}


def prepare_openai(source: State, args: Mapping) -> tuple[State, dict]:
    """Extracts the image tower of OpenAI's or open_clip's CLIP from its own or the whole model's file."""
    if not any(key.startswith("visual.") for key in source):
        source = {f"visual.{key}": value for key, value in source.items()}
    if any(key.startswith("visual.attn_pool.") for key in source):
        raise InputError("a CLIP whose embedding an attentional pooler makes (attn_pool) is not supported yet")
    state = _as_batches(source, "visual.positional_embedding", "visual.class_embedding")
    if (projection := state.pop("visual.proj", None)) is not None:
        state["visual.proj.weight"] = projection.T
    return _with_bias(state, "visual.proj.weight"), {}


def prepare_dinov3(source: State, args: Mapping) -> tuple[State, dict]:
    """Removes the prefix of Hugging Face's DINOv3, adds biases of keys, and renames MLPs without a gate."""
    state = {key.removeprefix("model."): value for key, value in zero_key_bias(source).items()}
    if not any(".mlp.gate_proj." in key for key in state):
        state = rename(state, to_ours([UNGATED]))
    return state, {}


def prepare_meta(source: State, args: Mapping) -> tuple[State, dict]:
    """Applies the masks of biases in Meta's files of DINOv3, and reads the periods of rotary positions."""
    state, facts = dict(source), {}
    for key in [key for key in source if key.endswith(".bias_mask")]:
        bias, mask = key.removesuffix("_mask"), state.pop(key)
        if bias in state:
            state[bias] = torch.where(mask == 0, 0, state[bias] * mask)
    if "cls_norm.weight" in state:
        first, last = ([state.get(f"{norm}.{name}") for name in ("weight", "bias")] for norm in ("cls_norm", "norm"))
        if any(a is None or b is None or not torch.equal(a, b) for a, b in zip(first, last)):
            raise InputError("a ViT with another last norm of its class token (cls_norm) is not supported yet")
    if (periods := state.get("rope_embed.periods")) is not None:
        if periods.dim() != 1 or not periods.numel() or "patch_embed.proj.weight" not in state:
            raise InputError(f"rope_embed.periods of shape {tuple(periods.shape)} without a whole ViT; export it again")
        facts = _rope(periods.double(), len(state["patch_embed.proj.weight"]))
    return state, facts


def _rope(periods: torch.Tensor, width: int) -> dict:
    """Returns the arguments of rotary positions with periods base^(4i / Dh); and a note if rounded."""
    count = len(periods)
    exponent = torch.arange(count, dtype=torch.float64) / count
    base = 100.0
    if count > 1 and (periods[-1] / base ** exponent[-1] - 1).abs() > ROUNDED:
        base = float(f"{periods[-1] ** (1 / exponent[-1]):.2g}")
    off = (periods / base**exponent - 1).abs().max().item()
    if not off <= ROUNDED:
        raise InputError("rope_embed.periods are no powers of one base, which vitfast does not have yet")
    facts = dict(num_heads=width // (4 * count), rope_temperature=base)
    exact = "the ViT takes the exact ones, as timm and Hugging Face do"
    return facts | ({"note": f"rope_embed.periods are rounded, by up to {off:.1e}: {exact}"} if off > 1e-6 else {})
