"""Finds weights in a file, a folder or the hub, reads them, and moves written files into place.

No pickle is ever run.
"""

import argparse
import difflib
import errno
import itertools
import json
import os
import re
import stat
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from ...errors import InputError, both_ends
from ...run import files, hub
from ..presets import PRESETS

HUB = "hf-hub:"
EXAMPLE = f"{HUB}timm/vit_base_patch16_224.augreg2_in21k_ft_in1k"
_REPOSITORY = r"[\w-][\w.-]*/[\w.-]+(@.+)?"
CHECKPOINTS, LAST = "checkpoints", "last"  # in a run folder; see train/resume.py
WEIGHTS = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pth", "model.pth")
INDEXES = tuple(f"{name}.index.json" for name in WEIGHTS[:2])  # they list the shards of weights
# The JSON files that are read with weights that have one of the names above.
COMPANIONS = ("config.json", "preprocessor_config.json", "processor_config.json")
SHARD = re.compile(r"(model|pytorch_model)-\d+-of-\d+\.(safetensors|bin)")
_IN_ORDER = (WEIGHTS[0], INDEXES[0], WEIGHTS[1], INDEXES[1], *WEIGHTS[2:])
# The errno of errors that another path may not avoid; None where a library does not report the system's errno.
_SYSTEM_ERRORS = (None, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE)


@dataclass(frozen=True)
class CheckpointFiles:
    """The path of a source's weights, and the content of the JSON files that belong to them."""

    weights: Path
    config: dict = field(default_factory=dict)
    preprocessor: dict = field(default_factory=dict)


def locate(source: str | Path) -> CheckpointFiles:
    """Finds the weights and JSON of a file, a folder, a run folder, or `hf-hub:owner/name[@revision]`.

    A file with a name that folders use (`model.safetensors`, `pytorch_model.bin`) is read with the config.json beside
    it; any other file is read alone. A run folder stands for its last checkpoint. Raises InputError if there are no
    weights.
    """
    if not isinstance(source, (str, os.PathLike)) or not str(source).strip():
        raise InputError(f"no weights given: give a file, a folder or {HUB}owner/name, not {source!r}")
    if str(source).startswith(HUB):
        return _in_folder(_download(str(source)), source)
    try:
        return _on_disk(Path(source).expanduser(), source)
    except (OSError, RuntimeError) as error:  # no right to look there, a name too long, no such user
        raise InputError(f"{source}: cannot be read ({_line(error)})") from None


def _on_disk(path: Path, source: str | Path) -> CheckpointFiles:
    """Finds the weights and JSON of a file, a folder or a run folder on this machine."""
    if path.name == LAST:
        path = last_checkpoint(path.parent) or path
    elif (path / CHECKPOINTS).is_dir() and not any((path / name).is_file() for name in _IN_ORDER):
        path = last_checkpoint(path / CHECKPOINTS) or path
    if path.is_dir():
        return _in_folder(path, source)
    if path.is_file():
        if SHARD.fullmatch(path.name):
            raise InputError(f"{path}: one shard of several; give the folder, or the index.json that lists them")
        return _with_json(path) if path.name in _IN_ORDER else CheckpointFiles(path)
    raise InputError(f"{source}: no such file or folder{_hint(str(source), path)}")


def _hint(source: str, path: Path) -> str:
    """Returns a hint at weights that the user may have meant, the end of an error message, or ""."""
    hub_prefix = r"(?:https?://huggingface\.co/|(?:(?:hf|hugging_?face)[-_]?(?:hub)?|hub)[:/]+)"
    hub = re.fullmatch(f"{hub_prefix}(.+)", source, re.IGNORECASE)
    if hub and re.fullmatch(_REPOSITORY, hub[1]):
        return f"; did you mean {HUB}{hub[1]}?"
    with suppress(OSError):  # a folder that cannot be read
        names = [entry.name for entry in itertools.islice(os.scandir(path.parent), 1000)]
        if near := difflib.get_close_matches(path.name, names, n=1, cutoff=0.7):
            return f"; did you mean {path.with_name(near[0])}?"
    if source in PRESETS:
        return f"; {source} is the name of a model, not weights: give a file, a folder or {HUB}owner/name"
    if re.fullmatch(r"(timm[:/])?(?=\w*(vit|patch))[a-z0-9]+(_[a-z0-9]+)+(\.[a-z0-9_]+)?", source):
        tag = "" if "." in source else f" (and .TAG, as in {EXAMPLE})"
        return f"; for the pretrained weights of a timm model write {HUB}timm/{re.sub('^timm[:/]', '', source)}{tag}"
    if re.fullmatch(_REPOSITORY, source):
        return f"; for a repository of the Hugging Face hub write {HUB}{source}"
    return ""


def last_checkpoint(checkpoints: Path) -> Path | None:
    """Returns the folder that `last` among a run's checkpoints stands for; None if there is no `last`.

    `last` is a folder, a link to one, or a text file with the name of a folder beside it. Raises InputError if the text
    names no such folder.
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
    """Reads a weights file into a dictionary of CPU tensors, which a .pth may nest in another dictionary.

    Raises InputError, naming the file, where it is truncated, holds Python objects or has an unknown suffix.
    """
    if path.name in INDEXES:
        return _read_shards(path)
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise InputError(f"{path}: unknown kind of weights file; known are {', '.join(READERS)}")
    try:
        content = reader(path)
    except (InputError, MemoryError):
        raise
    except Exception as error:
        if "TorchScript" in str(error):
            make = f'torch.save(torch.jit.load("{path.name}", "cpu").state_dict(), "weights.pth")'
            hint = f"a TorchScript archive, which holds code, as OpenAI's CLIP; where you trust it, convert it: {make}"
        elif match := re.search(".*(Unsupported|allow_pickle).*", str(error)):
            line = both_ends(match[0], 160)
            hint = f"holds Python objects, which are never run ({line}); save model.state_dict() alone"
        else:
            hint = f"not a whole {path.suffix} file ({_line(error)}); copy or download it again"
        raise InputError(f"{path}: {hint}") from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise InputError(f"{path}: holds a {kind}, expected a dictionary of tensors; save model.state_dict()")
    return content


def target(path: str | Path) -> Path:
    """Returns the path to write to, with `~` expanded. Raises InputError for a path without a name."""
    try:
        expanded = Path(path).expanduser()
        expanded = expanded.resolve() if expanded.name in ("", "..") else expanded
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"{path!r} is no path to write to ({_line(error)})") from None
    if not str(path) or not expanded.name:
        raise InputError(f"nothing can be written to {str(path)!r}; give the path of a file or folder")
    return expanded


def present(path: Path) -> str:
    """Returns what is at a path: "file", "folder", "dangling link", "device or pipe", or "" for nothing.

    Raises InputError if nothing can exist there: below a file, or with a name that no file can have.
    """
    try:
        mode = path.stat().st_mode if path.exists() else None
        if mode is None:
            return "dangling link" if stat.S_ISLNK(path.lstat().st_mode) else ""
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise _no_place(path, error) from None
    return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "device or pipe"


def check_free(path: Path, force: bool, kinds: Sequence[str] = ("file", "folder", "dangling link")) -> None:
    """Raises InputError if `path` exists already and is not an empty folder, unless `force`.

    kinds: the results of `present` that may be replaced; whatever else is there is never replaced.
    """
    what = present(path)
    if what and what not in kinds:
        raise InputError(f"{path}: a {what} is in the way; give another path")
    if not force and what and not (what == "folder" and not any(path.iterdir())):
        raise InputError(f"{path}: is there already; add --force (force=True) to replace it")


def make_folder(folder: Path, wanted: Path) -> None:
    """Makes a folder and the folders above it. Raises InputError, which names `wanted`, if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise InputError(f"{wanted}: a file is in the way; give a folder") from None
    except (OSError, ValueError) as error:
        raise _no_place(wanted, error) from None


def _no_place(path: Path, error: Exception) -> Exception:
    """Returns the error for a path that cannot be made: an OSError for a full disk, else InputError."""
    why = getattr(error, "strerror", None) or error
    if isinstance(error, OSError) and error.errno in _SYSTEM_ERRORS:
        return OSError(f"{path} could not be written: {why}")
    return InputError(f"{path}: cannot be made ({why}); give another path")


@contextmanager
def staged(path: Path, force: bool = False) -> Iterator[Path]:
    """Yields a path in a scratch folder; a file that is written there moves to `path` afterwards.

    The block writes a file (with companions such as `path.data`) or a folder. Each file replaces the one of the same
    name atomically. If the block raises, nothing changes. Raises InputError as `check_free` does.
    """
    check_free(path, force)
    make_folder(path.parent, path)
    stack = ExitStack()
    try:
        scratch = stack.enter_context(files.staged(path.parent, path))
    except OSError as error:
        raise _no_place(path, error) from error
    try:
        with stack:
            yield scratch / path.name
    except OSError as error:
        raise OSError(f"{path} could not be written: {error.strerror or error}") from error


def _in_folder(folder: Path, source: str | Path) -> CheckpointFiles:
    """Finds a folder's weights and JSON: the first well-known name, else the only weights file."""
    weights = [folder / name for name in _IN_ORDER if (folder / name).is_file()][:1]
    weights = weights or sorted(p for p in folder.iterdir() if p.suffix.lower() in READERS and p.is_file())
    if weights and all(SHARD.fullmatch(path.name) for path in weights):
        raise InputError(f"{source}: shards without the index that lists them; copy {' or '.join(INDEXES)} too")
    if len(weights) == 1:
        return _with_json(weights[0])
    if weights:
        names = ", ".join(path.name for path in weights[:3])
        raise InputError(f"{source}: several weights files ({names}); give the path of one")
    raise InputError(f"{source}: no weights in this folder; expected {' or '.join(WEIGHTS[:2])}")


def _with_json(weights: Path) -> CheckpointFiles:
    config, preprocessor, processor = (_json(weights.with_name(name)) for name in COMPANIONS)
    # Since transformers 5, processor_config.json describes the processors of images and of texts.
    return CheckpointFiles(weights, config, processor.get("image_processor") or preprocessor)


def _json(path: Path) -> dict:
    """Returns the object in a JSON file, {} where there is no file."""
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
    absent, offline_reason = {}, hub.silence(f"{repo}/resolve/{revision or 'main'}/config.json")

    def get(name: str) -> Path | None:
        try:
            return Path(hf_hub_download(repo, name, revision=revision or None, local_files_only=bool(offline_reason)))
        except EntryNotFoundError as error:
            absent[name] = error
        except Exception as error:
            raise InputError(f"{source}: the hub did not give {name} ({_line(error)}); {hub.CHECK}") from error

    weights = next(filter(None, map(get, _IN_ORDER[:4])), None)
    if weights is None:
        why, none = absent[WEIGHTS[0]], f"{source}: no {' or '.join(WEIGHTS[:2])}"
        if offline_reason:
            raise hub.unreachable(none, offline_reason) from why
        raise InputError(f"{none} ({_line(why)}); {hub.CHECK}") from why
    # If config.json merely is not cached, the weights must not be read with defaults, which may not be theirs.
    if get("config.json") is None and isinstance(why := absent["config.json"], LocalEntryNotFoundError):
        raise InputError(f"{source}: config.json is not in the cache; fetch it once with the network on") from why
    for name in COMPANIONS[1:]:
        get(name)
    for name in sorted({*_shards(weights).values()} if weights.name in INDEXES else ()):
        if get(name) is None:
            raise InputError(f"{source}: {weights.name} lists {name}, which is not there ({_line(absent[name])})")
    return weights.parent


def _shards(index: Path) -> dict[str, str]:
    """Returns the name of the shard that an index of transformers' lists for each tensor."""
    listed = _json(index).get("weight_map")
    names = listed.values() if isinstance(listed, dict) else ()
    if not names or not all(isinstance(name, str) and SHARD.fullmatch(name) for name in names):
        example = "model-00001-of-00002.safetensors"
        raise InputError(f"{index}: weight_map must list a file such as {example} for each tensor")
    return listed


def _read_shards(index: Path) -> dict:
    """Reads the tensors of all shards that an index lists. Raises InputError where one is missing."""
    listed, state = _shards(index), {}
    for name in sorted({*listed.values()}):
        if not (shard := index.with_name(name)).is_file():
            raise InputError(f"{index}: lists {name}, which is not there; copy or download it too")
        content = read_tensors(shard)
        if absent := [key for key, file in listed.items() if file == name and key not in content]:
            raise InputError(f"{shard}: lacks {absent[0]}, which {index.name} lists; copy or download it again")
        state |= {key: content[key] for key, file in listed.items() if file == name}
    return state


def _read_npz(path: Path) -> dict[str, Tensor]:
    with np.load(path, allow_pickle=False) as archive:
        return {key: _from_numpy(archive[key]) for key in archive.files}


def _from_numpy(array: np.ndarray) -> Tensor:
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:  # NumPy has no bfloat16 and loads its bytes as void
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


def _line(error: Exception) -> str:
    """Returns the class and the message of an exception, in one line."""
    return both_ends(f"{type(error).__name__}: {error}", 160)
