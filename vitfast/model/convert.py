"""Writes a model or a checkpoint in another format, and reads it back before it takes its place."""

from pathlib import Path

import torch

from ..errors import InputError, unknown
from .checkpoint.files import COMPANIONS, INDEXES, SHARD, WEIGHTS, check_free, present, staged, target
from .checkpoint.load import load_model, read
from .checkpoint.writers import HEAD, NO_HEAD, PRE_LOGITS, WRITERS, file_suffix, lacks, tensors, write_as
from .preprocessing import CROP
from .presets import pair
from .vit import ViT

FORMATS = tuple(WRITERS)
# Arguments that change what the model computes and that a format may leave unsaid.
_MEANING = """
    num_heads act_layer norm_eps global_pool fc_norm no_embed_class img_size mean std rope ref_feat_shape
""".split()
_OF_CHECKPOINTS = (*WEIGHTS, *INDEXES, *COMPANIONS)
_OPEN = ("num_heads", "img_size", "act_layer", "pos_embed", "rope", "global_pool")  # a bare file may not tell them


def write(model, path: str | Path, form: str, force: bool = False) -> list[str]:
    """Writes a ViT in one of FORMATS; returns a line for each thing that the format leaves unsaid.

    form: "vitfast" (a folder), "timm" (a folder for `timm.create_model("local-dir:...")`, or a bare .safetensors or
    .pth), "huggingface" (a folder for `from_pretrained`), "npz" (Google's; a .npz), "torchvision" (a bare .safetensors
    or .pth). bfloat16 becomes float32 in an npz. The result is read back and compared bit for bit before it moves to
    `path`, whole or not at all. Files of a checkpoint that it replaces are removed if they would be read with it.
    Raises InputError if the format cannot hold something that the model has, for a wrong suffix, and if `path` exists
    already, unless `force` is set.
    """
    path = target(path)
    _check_target(path, form, force)
    lacking = lacks(form, model.config)
    if lost := [what for what, present in lacking.items() if present]:
        said = f"the format {form} has no place for {', '.join(lost)}; the format vitfast has"
        ways = []
        # --num-classes 0 changes nothing in a model without a last layer: its hidden layer would stay
        if NO_HEAD not in lacking and model.num_classes > 0:
            ways.append("--num-classes 0 leaves the head out")
        if HEAD not in lacking:
            ways.append(f"--num-classes N (any but {model.num_classes}) puts a new one in its place")
        heads = f"; in vitfast convert {', '.join(ways)}" if {*lost} <= {PRE_LOGITS, NO_HEAD, HEAD} else ""
        raise InputError(said + heads)
    with staged(path, force) as scratch:
        write_as(model, form, scratch)
        written, notes = {file.name for file in scratch.parent.rglob("*")}, _read_back(model, scratch, form)
    for file in path.iterdir() if path.is_dir() else ():
        if file.name not in written and (file.name in _OF_CHECKPOINTS or SHARD.fullmatch(file.name)):
            file.unlink()
    return notes


def convert(source: str | Path, path: str | Path, form: str, *, force: bool = False, **overrides) -> list[str]:
    """Reads a checkpoint of any format as `ViT.from_pretrained` does, and writes it as `write` does.

    overrides: arguments of from_pretrained. The dtype is that of the checkpoint.
    """
    path = target(path)
    _check_target(path, form, force)
    return write(load_model(ViT, source, overrides, keep_dtype=True), path, form, force)


def _check_target(path: Path, form: str, force: bool) -> None:
    if form not in FORMATS:
        raise unknown("format", form, FORMATS)
    suffixes, suffix = WRITERS[form][0], file_suffix(path)
    if suffix not in suffixes:
        raise InputError(f"{path}: the format {form} is written as {' or '.join(s or 'a folder' for s in suffixes)}")
    check_free(path, force, ("file", "dangling link") if suffix else ("folder",))
    beside = [name for name in COMPANIONS if path.name in WEIGHTS and present(path.with_name(name))]
    if beside:
        raise InputError(f"{path}: {beside[0]} beside it would be read with it; give another name or folder")


def _read_back(model, path: Path, form: str) -> list[str]:
    """Reads what was written and compares; returns the notes of `write`."""
    notes = []
    try:
        state, config = read(path)
    except InputError as error:  # something that the tensors leave open
        notes.append(str(error).replace(str(path), path.name))
        state, config = read(path, **{name: model.config[name] for name in _OPEN})
    with torch.device("meta"):
        again = ViT(**config)
    ours = tensors(model)
    missing = {*ours, *again.state_dict()} ^ {*state}
    wrong = missing or {key for key, value in ours.items() if not _same(value, state[key])}
    if wrong:
        names = ", ".join(sorted(wrong)[:3])
        raise RuntimeError(f"{form}: what was written does not read back the same ({names}); please report this")
    if model.class_names and again.class_names != model.class_names:
        notes.append(f"{form} does not keep the names of the classes, such as {model.class_names[0]!r}")
    mine, theirs = ({**vit.config, "img_size": vit.patch_embed.img_size} for vit in (model, again))
    if mine["swiglu_mlp"]:  # a gated MLP has one activation, whatever act_layer says
        mine["act_layer"] = theirs["act_layer"]
    if any(config[name] for config in (mine, theirs) for name in CROP) and _cut(mine) != _cut(theirs):
        said = ", ".join(f"{name}={mine[name] or default!r}" for name, default in CROP.items())
        notes.append(f"{form} does not say how images are cut ({said}): evaluations need to be told")
    unlike = [name for name in _MEANING if mine[name] != theirs[name]]
    return notes + [f"{form} does not say {name}={mine[name]!r}: its readers take {theirs[name]!r}" for name in unlike]


def _cut(config: dict) -> tuple:
    """The crop mode, the filter, and the size that images have before they are cut."""
    mode, share, interpolation = (config[name] or default for name, default in CROP.items())
    return mode, interpolation, [int(side / share) for side in pair(config["img_size"])]


def _same(ours, theirs) -> bool:
    """Whether all values are equal (NaN equals NaN), even if the file has a wider dtype."""
    return ours.shape == theirs.shape and torch.allclose(ours, theirs.to(ours.dtype), rtol=0, atol=0, equal_nan=True)
