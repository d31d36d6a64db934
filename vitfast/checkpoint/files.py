"""Weights as bytes: found (file, folder, hub), read, and put in their place when written.

No pickle is ever run.
"""

import argparse
import json
import re
import tempfile
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from ..errors import InputError
from ..files import move_synced, sync

HUB = "hf-hub:"
CHECKPOINTS, LAST = "checkpoints", "last"  # in a run folder; see train/resume.py
WEIGHTS = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pth", "model.pth")


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of a source: the weights, and the content of the JSON that belongs to them."""

    weights: Path
    config: dict = field(default_factory=dict)
    preprocessor: dict = field(default_factory=dict)


def locate(source: str | Path) -> CheckpointFiles:
    """The files of a weights file, a folder, a run folder, or `hf-hub:owner/name[@revision]`.

    Raises InputError where there are none. A file called as in a folder (`model.safetensors`,
    `pytorch_model.bin`) takes the folder's config.json with it; any other is bare. Of a run folder it is the last
    checkpoint.
    """
    if str(source).startswith(HUB):
        return _in_folder(_download(str(source)), source)
    if not str(source).strip():
        raise InputError("no weights given: give a file, a folder or hf-hub:owner/name")
    path = Path(source).expanduser()
    if path.name == LAST:
        path = last_checkpoint(path.parent) or path
    elif (path / CHECKPOINTS).is_dir() and not any((path / name).is_file() for name in WEIGHTS):
        path = last_checkpoint(path / CHECKPOINTS) or path
    if path.is_dir():
        return _in_folder(path, source)
    if path.is_file():
        return _with_json(path) if path.name in WEIGHTS else CheckpointFiles(path)
    like_a_repository = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(source))
    hint = f"; for a repository of the Hugging Face hub write {HUB}{source}" if like_a_repository else ""
    raise InputError(f"{source}: no such file or folder{hint}")


def last_checkpoint(checkpoints: Path) -> Path | None:
    """The checkpoint that `last` in a run's folder of checkpoints stands for, None where there is none.

    `last` is a folder, a link to one, or a text file with the name of a folder beside it. Raises InputError where that
    is not there.
    """
    last = checkpoints / LAST
    if not last.is_file():
        return last.resolve() if last.is_dir() else None
    with open(last, "rb") as file:
        name = file.read(256).decode("utf-8", "replace").strip()
    folder = checkpoints / name
    if folder.parent != checkpoints or "\0" in name or not folder.is_dir():
        raise InputError(f"{last}: names no checkpoint beside it; give the path of one of {checkpoints}/step-...")
    return folder.resolve()


def read_tensors(path: Path) -> dict:
    """The content of one weights file: a dictionary of CPU tensors, or what a .pth nests them in.

    Raises InputError, naming the file, where it is truncated, holds Python objects or has an unknown suffix.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise InputError(f"{path}: unknown kind of weights file; known are {', '.join(READERS)}")
    try:
        content = reader(path)
    except (InputError, MemoryError):
        raise
    except Exception as error:
        if re.search("Unsupported|allow_pickle", str(error)):
            said = _line(error, "Unsupported")
            hint = f"holds Python objects, which are never run ({said}); save model.state_dict() alone"
        else:
            hint = f"not a whole {path.suffix} file ({_line(error)}); copy or download it again"
        raise InputError(f"{path}: {hint}") from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise InputError(f"{path}: holds a {kind}, expected a dictionary of tensors; save model.state_dict()")
    return content


def check_free(path: Path, force: bool) -> None:
    """Raises InputError where `path` is there already (but for an empty folder), unless `force`."""
    if not force and (path.is_file() or (path.is_dir() and any(path.iterdir()))):
        raise InputError(f"{path}: is there already; add --force (force=True) to replace it")


@contextmanager
def staged(path: Path, force: bool = False) -> Iterator[Path]:
    """Yields the same name in a scratch folder beside `path`; what is written there moves to `path`.

    That is a file (with companions such as `path.data`) or a folder, whose files replace those of the same name, each
    atomically. Where the block raises, nothing changes. Raises InputError as `check_free` does.
    """
    check_free(path, force)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as scratch:
        try:
            yield Path(scratch) / path.name
        except OSError as error:
            raise OSError(f"{path} could not be written: {error.strerror or error}") from error
        written = [p for p in Path(scratch).rglob("*") if p.is_file()]
        for file in sorted(written, reverse=True):  # path.data before path, which names it
            target = path.parent / file.relative_to(scratch)
            target.parent.mkdir(exist_ok=True)
            move_synced(file, target)
        sync(path.parent)  # which may have got a folder


def _in_folder(folder: Path, source: str | Path) -> CheckpointFiles:
    """The weights of a folder: a well-known name first, else the only weights file there is."""
    known = [folder / name for name in WEIGHTS if (folder / name).is_file()]
    found = known[:1] or sorted(p for p in folder.iterdir() if p.suffix.lower() in READERS and p.is_file())
    if len(found) == 1:
        return _with_json(found[0])
    if found:
        names = ", ".join(p.name for p in found[:3])
        raise InputError(f"{source}: several weights files ({names}); give the path of one")
    raise InputError(f"{source}: no weights in this folder; expected {' or '.join(WEIGHTS[:2])}")


def _with_json(weights: Path) -> CheckpointFiles:
    config, preprocessor = (_json(weights.with_name(f"{name}.json")) for name in ("config", "preprocessor_config"))
    return CheckpointFiles(weights, config, preprocessor)


def _json(path: Path) -> dict:
    """The object in a JSON file, {} where there is no file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not readable as JSON ({_line(error)}); mend or remove it") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a JSON object, got a {type(content).__name__}; mend or remove it")
    return content


def _download(source: str) -> Path:
    """Brings a repository's weights and JSON into huggingface_hub's cache; returns their folder there."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    except ImportError as error:
        raise InputError(f"{source}: needs the package huggingface_hub; pip install huggingface_hub") from error
    repo, _, revision = source[len(HUB) :].partition("@")
    absent = {}

    def get(name: str) -> Path | None:
        try:
            return Path(hf_hub_download(repo, name, revision=revision or None))
        except EntryNotFoundError as error:
            absent[name] = error
        except Exception as error:
            said = f"the hub did not give {name} ({_line(error)}); check the name and the network"
            raise InputError(f"{source}: {said}") from error

    weights = get(WEIGHTS[0]) or get(WEIGHTS[1])
    if weights is None:
        why = absent[WEIGHTS[0]]
        said = f"no {' or '.join(WEIGHTS[:2])} ({_line(why)}); check the name, the network and HF_HUB_OFFLINE"
        raise InputError(f"{source}: {said}") from why
    # A config.json that the cache merely lacks would leave the weights with defaults that may not be theirs.
    if get("config.json") is None and isinstance(why := absent["config.json"], LocalEntryNotFoundError):
        raise InputError(f"{source}: config.json is not in the cache; fetch it once with the network on") from why
    get("preprocessor_config.json")
    return weights.parent


def _read_npz(path: Path) -> dict[str, Tensor]:
    with np.load(path, allow_pickle=False) as archive:
        return {key: _from_numpy(archive[key]) for key in archive.files}


def _from_numpy(array: np.ndarray) -> Tensor:
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:  # NumPy has no bfloat16 and keeps its bytes
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _read_torch(path: Path) -> dict:
    # timm's and MAE's training checkpoints keep their arguments beside the weights; a Namespace only holds values
    with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
        warnings.simplefilter("ignore")
        return torch.load(path, map_location="cpu", weights_only=True)


READERS = {
    ".safetensors": safetensors.torch.load_file,
    ".npz": _read_npz,
    **dict.fromkeys((".pth", ".pt", ".bin", ".ckpt", ".tar"), _read_torch),
}


def _line(error: Exception, about: str = "") -> str:
    """The kind of an exception and the first line of what it says (with `about`, the first that has it)."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in lines if about in line), next(iter(lines), "no more is said"))
    return textwrap.shorten(f"{type(error).__name__}: {said}", 160, placeholder=" ...")
