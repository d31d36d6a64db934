"""Turns a checkpoint of any format into a state dict, a configuration, or a model."""

import inspect
import logging
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ...errors import InputError, unknown
from .. import config as arguments
from .. import positions
from ..presets import pair
from .config import disagreeing, infer, read_json
from .files import locate, read_tensors
from .formats import Checkpoint, differences, to_timm_names

logger = logging.getLogger("vitfast")

_HEAD = ("head.", "head_dist.", "pre_logits.")


def load_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """Reads weights: a state_dict in vitfast's (= timm's) names, on the CPU, in the file's dtype.

    path: a .safetensors, .npz or .pth/.pt/.bin file, a folder, or `hf-hub:owner/name[@revision]`; written by timm,
    Google (ViT, big_vision), Hugging Face (ViT, DeiT, DINOv2, DINOv3, CLIP, SigLIP), torchvision, Meta's DINOv2 and
    DINOv3, OpenAI's CLIP or `save_pretrained`. No pickle is ever run. Beyond timm's names there can be
    `pre_logits.fc.*` (the hidden layer of a pre-training head) and `head_dist.*` (DeiT's second head). Raises
    InputError if weights are missing, broken, or not a ViT of these formats.
    """
    files = locate(path)
    content = read_tensors(files.weights)
    with _named(path):  # SigLIP 2's patches are rows of a matrix, which config.json describes
        siglip2 = str(files.config.get("model_type")).startswith("siglip2")
        checkpoint = to_timm_names(content, read_json(files.config)[0] if siglip2 else {})
    for note in checkpoint.notes:
        logger.warning("%s: %s", path, note)
    return checkpoint.state


def read(source: str | Path, **caller_args) -> tuple[dict[str, Tensor], dict]:
    """Returns the state dict of `load_checkpoint`, and the constructor arguments of its model.

    caller_args: the caller's constructor arguments, which supply what the checkpoint leaves open (`num_heads`, or
    `img_size` for a position table that is not square) and settle doubts. What `save` wrote comes back exactly. Raises
    InputError as `load_checkpoint` does, and if an argument remains open.
    """
    checkpoint = _open(source, caller_args)
    return checkpoint.state, checkpoint.config


def load_model(cls, source: str | Path, overrides: dict, keep_dtype: bool = False):
    """Returns a `cls` (a ViT) with the weights and the configuration of `source`, changed by `overrides`.

    `overrides` are constructor arguments; they must agree with the tensors, but for two: another `img_size` resamples
    the positions, another `num_classes` replaces the whole head by a zero linear layer (or none, for 0). The model is
    in torch's default dtype or, with `keep_dtype`, in the dtype of the tensors if they share one. Raises InputError if
    an override or a tensor does not fit.
    """
    params = [p for base in cls.__mro__ for p in inspect.signature(base.__init__).parameters.values()]
    names = [p.name for p in params if p.name != "self" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for name in overrides:
        if name not in names:
            raise unknown("argument of from_pretrained", name, names)
        if name in arguments.ARGUMENTS:
            arguments.read(name, overrides[name], f"from_pretrained: {name}")
    checkpoint = _open(source, overrides)
    with _named(source):
        model = _build(cls, checkpoint, overrides)
    for note in checkpoint.notes:
        logger.warning("%s: %s", source, note)
    dtypes = {v.dtype for v in checkpoint.state.values()}
    return model.to(*dtypes) if keep_dtype and len(dtypes) == 1 else model


def _build(cls, checkpoint: Checkpoint, overrides: dict):
    """Returns the model of `load_model` from a checkpoint that has been read."""
    if checkpoint.config["swiglu_mlp"] and overrides.get("act_layer", "silu") != "silu":
        says = "its MLPs are gated, and the ViT's gates have only 'silu'"
        raise InputError(f"{says}, not act_layer={overrides['act_layer']!r}")
    classes = overrides.get("num_classes", checkpoint.config["num_classes"])
    changes = {k: v for k, v in overrides.items() if k not in ("img_size", "num_classes", "class_names")}
    if classes != checkpoint.config["num_classes"]:
        checkpoint.state = {k: v for k, v in checkpoint.state.items() if not k.startswith(_HEAD)}
        checkpoint.config |= dict(num_classes=0, representation_size=None, class_names=None)
    else:
        _check_head(checkpoint)
    model = _on_meta(cls, checkpoint, changes)
    model.to_empty(device=torch.get_default_device())
    model.load_state_dict(checkpoint.state)
    if "img_size" in overrides and pair(overrides["img_size"]) != model.patch_embed.img_size:
        model.set_input_size(overrides["img_size"])
    if classes != model.num_classes:
        model.reset_classifier(classes)
    if "class_names" in overrides:
        model.class_names = overrides["class_names"]
    return model


def _on_meta(cls, checkpoint: Checkpoint, changes: dict):
    """Returns the model on the meta device. Raises InputError if the checkpoint's tensors do not fit it."""
    config = checkpoint.config
    if changes.get("in_chans", config["in_chans"]) != config["in_chans"]:
        reads = f"its patch projection reads in_chans={config['in_chans']} channels, not {changes['in_chans']}"
        advice = arguments.channels_hint(changes["in_chans"], config["in_chans"])
        raise InputError(f"{checkpoint}; {reads}; leave in_chans out, and of such images {advice}")
    wrong = disagreeing(changes, config)
    one_head = {"num_heads": 1} if wrong else {}  # any head count has these tensors, and one always divides the width
    try:
        with torch.device("meta"):
            model = cls(**{**config, **changes, **one_head})
        why = differences(model.state_dict(), checkpoint.state)
    except TypeError as error:
        raise InputError(f"{cls.__name__} must take the arguments of ViT ({error})") from error
    except InputError as error:
        if not wrong:
            raise
        why = str(error)
    if wrong or why:
        expected = ", ".join(f"{k}={changes[k]}, not {config.get(k)}" for k in wrong)
        expected = expected or "the tensors of a ViT like it"
        raise InputError(f"{checkpoint}; expected {expected}; {why or 'leave out what differs'}")
    return model


@contextmanager
def _named(source: str | Path):
    """Puts the name of the source before the message of an InputError about its content."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{source}: {error}") from error


def _open(source: str | Path, caller_args: dict) -> Checkpoint:
    """Reads the tensors of a source, and infers the constructor arguments of its model."""
    files = locate(source)
    with _named(source):  # a config.json of another model is refused before its tensors are read
        args = caller_args | read_json(files.config)[0]
    content = read_tensors(files.weights)
    with _named(source):
        checkpoint = to_timm_names(content, args)
        checkpoint.config, notes = infer(checkpoint, files, caller_args)
        checkpoint.notes = notes + checkpoint.notes
        if checkpoint.facts.get("pos_embed") == "sincos2d":
            size, patch = pair(checkpoint.config.setdefault("img_size", 224)), pair(checkpoint.config["patch_size"])
            grid = size[0] // patch[0], size[1] // patch[1]
            checkpoint.state["pos_embed"] = positions.sincos_2d(grid, checkpoint.config["embed_dim"])
    return checkpoint


def _check_head(checkpoint: Checkpoint) -> None:
    """Raises InputError for a head that is not one linear layer on one pooled token."""
    way_out = "pass num_classes= for a new head, 0 for none"
    if "head_dist.weight" in checkpoint.state:
        raise InputError(f"{checkpoint}; a distilled DeiT has two heads, the ViT has one; {way_out}")
    width = checkpoint.config.get("representation_size") or checkpoint.config["embed_dim"]
    if "head.weight" in checkpoint.state and checkpoint.state["head.weight"].shape[1] == 2 * width:
        reads = "its head reads the class token beside the mean of the patches, the ViT's reads one of them"
        raise InputError(f"{checkpoint}; {reads}; {way_out}")
