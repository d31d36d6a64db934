"""What a run keeps to continue: written whole or not at all, read without executing anything.

    checkpoints/step-00000120/model.safetensors, config.json   what ViT.from_pretrained reads (EMA weights where there are any)
                              state/state.safetensors          model, optimiser, EMA
                              state/state.json                 step, scaler, and all that is not a tensor
    checkpoints/last -> step-00000120                          swapped in one rename

The random numbers and the position in the data follow from (seed, step), so they need no place here.
"""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import InputError


def _flatten(value, path: str, tensors: dict[str, Tensor]):
    """A nested value as JSON; each tensor in it moves to `tensors` and leaves its name."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach().contiguous().cpu()
        return {"tensor": path}
    if isinstance(value, dict):
        return {"dict": [[k, _flatten(v, f"{path}.{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"list": [_flatten(v, f"{path}.{i}", tensors) for i, v in enumerate(value)]}
    return {"value": value}


def _unflatten(node: dict, tensors: dict[str, Tensor]):
    if "tensor" in node:
        return tensors[node["tensor"]]
    if "dict" in node:
        return {k: _unflatten(v, tensors) for k, v in node["dict"]}
    if "list" in node:
        return [_unflatten(v, tensors) for v in node["list"]]
    return node["value"]


def _sync(folder: Path) -> None:
    """fsync of everything in a folder, and of the folder."""
    for path in [*folder.rglob("*"), folder]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def save_checkpoint(run: Path, step: int, model, state: dict) -> Path:
    """Writes the checkpoint of `step` and makes it the last one. `model` has save_pretrained; `state` nests dicts, lists, tensors."""
    folder = run / "checkpoints"
    final, work = folder / f"step-{step:08d}", folder / f".writing-{step:08d}"
    shutil.rmtree(work, ignore_errors=True)
    try:
        (work / "state").mkdir(parents=True)
        model.save_pretrained(work)
        tensors: dict[str, Tensor] = {}
        structure = _flatten({**state, "step": step}, "state", tensors)
        save_file(tensors, work / "state" / "state.safetensors")
        (work / "state" / "state.json").write_text(json.dumps(structure))
        _sync(work)
    except BaseException:  # a full disk: the room goes back, and the last checkpoint stays
        shutil.rmtree(work, ignore_errors=True)
        raise
    if final.exists() and not (folder / "last").exists():
        shutil.rmtree(final)
    if final.exists():  # the same step was saved before the run was cut off: its bytes are the same
        shutil.rmtree(work)
    else:
        os.rename(work, final)
    link = folder / ".last"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    os.replace(link, folder / "last")
    _sync_directory(folder)
    for old in folder.iterdir():
        if not old.is_symlink() and old != final:
            shutil.rmtree(old, ignore_errors=True)
    return final


def _sync_directory(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def load_state(checkpoint: Path) -> dict:
    """The state that save_checkpoint wrote into this checkpoint. Raises InputError where it is not whole."""
    folder = checkpoint / "state"
    if not folder.is_dir():
        raise InputError(
            f"{checkpoint} holds no training state (no state/ folder); --resume takes a run folder or one of its checkpoints"
        )
    try:
        tensors = load_file(folder / "state.safetensors")
        return _unflatten(json.loads((folder / "state.json").read_text()), tensors)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise InputError(
            f"the training state in {folder} is damaged ({error}); start again with --resume never"
        ) from None


def find_checkpoint(path: Path) -> Path | None:
    """The checkpoint to continue from: `path` itself, or the last one of the run folder `path`."""
    if (path / "state").is_dir():
        return path
    last = path / "checkpoints" / "last"
    return last.resolve() if last.exists() else None


def to_device(value, device: torch.device):
    """Moves every tensor in nested dicts and lists."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {k: to_device(v, device) for k, v in value.items()}
    return [to_device(v, device) for v in value] if isinstance(value, list) else value
