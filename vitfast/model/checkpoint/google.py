"""Reads and writes Google's npz files: those of the paper's code and of big_vision."""

import re
from collections.abc import Mapping

import torch

from ...errors import InputError
from .names import BIG_VISION, GOOGLE, QKV, Renames, State, rename, same_tensor, split, to_ours, to_theirs

RENAMES: Renames = (
    *to_ours(BIG_VISION),
    *to_ours(GOOGLE),
    (r"^(conv|gn)_root/", r"patch_embed/backbone/stem/\1/"),
    (r"/(conv|gn)_proj/", r"/downsample/\1/"),
    (r"/gn(\d?)/", r"/norm\1/"),
    (r"/(kernel|scale)$", "/weight"),
    (r"/", "."),
)

WRITTEN: Renames = (
    (r"\.", "/"),
    *to_theirs(GOOGLE),
    (r"((LayerNorm_\d|encoder_norm)/)weight$", r"\1scale"),
    (r"/weight$", "/kernel"),
)

# Flax's kernels are (in, out), and some have an axis for heads. Each entry: a pattern of names, a function from Flax's
# layout to PyTorch's, and one from PyTorch's layout and the number of heads h to Flax's (None: never written).
LAYOUTS = (
    # (P, Q, C, D), (D, C, P, Q)
    (r"^embedding/kernel$|(^|/)conv\w+/kernel$", lambda w: w.permute(3, 2, 0, 1), lambda w, h: w.permute(2, 3, 1, 0)),
    (r"(^|/)gn\w+/(scale|bias)$", torch.flatten, None),  # (C,), in old files (1, 1, 1, C)
    # (D, H, Dh), (H*Dh, D)
    (r"/(query|key|value)/kernel$", lambda w: w.flatten(1).T, lambda w, h: w.T.unflatten(1, (h, -1))),
    (r"/(query|key|value)/bias$", torch.flatten, lambda w, h: w.unflatten(0, (h, -1))),  # (H, Dh), (H*Dh,)
    (r"/out/kernel$", lambda w: w.flatten(0, 1).T, lambda w, h: w.T.unflatten(0, (h, -1))),  # (H, Dh, D), (D, H*Dh)
    (r"(/Dense_[01]|^head|^pre_logits)/kernel$", lambda w: w.T, lambda w, h: w.T),
)
PREFIXES = ("opt/target/", "params/img/", "params/", "img/", "")


def prepare(source: State, args: Mapping) -> tuple[State, dict]:
    """Extracts the image model, unstacks layers in one array, and converts to PyTorch's layout."""
    prefix = next((p for p in PREFIXES if f"{p}embedding/kernel" in source), "")
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
    else:  # big_vision computes sine and cosine positions, for patches alone, and stores no table
        facts |= dict(pos_embed="sincos2d", no_embed_class="cls" in state)
    for pattern, turn, _ in LAYOUTS:
        state.update({k: turn(v) for k, v in state.items() if re.search(pattern, k)})
    return {re.sub(r"^block(\d+)/unit(\d+)/", _unit, k): v for k, v in state.items()}, facts


def _unit(match: re.Match) -> str:
    """Returns our name of a unit in a hybrid's ResNet; Google counts stages and units from 1."""
    return f"patch_embed/backbone/stages/{int(match[1]) - 1}/blocks/{int(match[2]) - 1}/"


def to_arrays(state: State, config: dict) -> State:
    """Converts tensors to the paper code's arrays, or big_vision's if positions are for patches alone."""
    arrays = rename(split(state, ".attn.qkv.", QKV), WRITTEN)
    if config["no_embed_class"] or not config["class_token"]:
        arrays = rename(arrays, to_theirs(BIG_VISION))
    for pattern, _, turn in LAYOUTS:
        arrays |= {k: turn(v, config["num_heads"]) for k, v in arrays.items() if turn and re.search(pattern, k)}
    return arrays
