"""The folder of a run: its files, which of them vitfast wrote, and how its checkpoints take turns.

    config.yaml  metrics.csv  summary.json  report.html  tensorboard/events.out.tfevents.*.vitfast
    vitfast.lock                       while a process trains there
    checkpoints/last/                  the newest checkpoint; real folders, so that every way of copying copies them
                previous/              the one before it
                .writing  .removing    a checkpoint that is not whole yet, or no longer
    best/                              the checkpoint of the best evaluation, hard-linked from last/
                state/best.json            its step and accuracy; by this file the run recognises its own best/

Anything else is the user's, and so is a file of these names that does not look like vitfast's: it is never touched.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from ..errors import InputError
from ..eval.inspect.page import GENERATOR
from ..run.config import Config, as_plain, course
from ..run.files import SCRATCH, free_name, not_ours, sync, write_text
from ..run.lock import LOCK

LAST, PREVIOUS, WRITING, REMOVING = "last", "previous", ".writing", ".removing"
BEST, BEST_RECORD = "best", "state/best.json"
# The files of a checkpoint, and unfinished ones: in a scratch folder, or beside them by safetensors' names.
_FILE = r"(model\.safetensors|config\.json|state\.(json|safetensors)|best\.json|\.tmp\w+)"
PARTS = re.compile(rf"state|(state/)?({re.escape(SCRATCH)}\w+(/{_FILE})?|{_FILE})")
EVENTS = "vitfast"  # the ending of the names of TensorBoard files
FIRST_COLUMNS = "step,epoch,split,loss,accuracy"  # how metrics.csv begins
logger = logging.getLogger("vitfast")


def is_checkpoint(path: Path) -> bool:
    """Whether a folder was written as a checkpoint, even if it has been damaged since."""
    return any(os.path.lexists(path / "state" / name) for name in ("state.json", "state.safetensors"))


def _is_part(path: Path) -> bool:
    """Whether a folder holds nothing but files of a checkpoint, as a kill leaves it."""
    held = (each.relative_to(path).as_posix() for each in path.rglob("*"))
    return path.is_dir() and not path.is_symlink() and all(map(PARTS.fullmatch, held))


def _is_own_best(best: Path) -> bool:
    """Whether this run wrote best/, and not another run or the user."""
    try:
        own = read_settings(best.parent) or _saved_settings(find_checkpoint(best.parent))
        here, there = (course(settings | dict(data="")) for settings in (own, _saved_settings(best)))
        return (best / BEST_RECORD).is_file() and here == there
    except (OSError, ValueError, KeyError, TypeError):  # InputError is a ValueError
        return False


def _saved_settings(checkpoint: Path) -> dict:
    """The settings of the run in a checkpoint's record, whatever else is damaged."""
    return json.loads((checkpoint / "state" / "state.json").read_text(encoding="utf-8"))["settings"]


def find_checkpoint(path: Path) -> Path | None:
    """`path` where it is a checkpoint itself, else the newest one of the run folder `path`."""
    newest = (path, path / "checkpoints" / LAST, path / "checkpoints" / PREVIOUS)
    return next((checkpoint for checkpoint in newest if is_checkpoint(checkpoint)), None)


def read_settings(run: Path) -> dict | None:
    """The settings in a run folder's config.yaml, or None. Raises InputError for other content."""
    return _read(run / "config.yaml", yaml.safe_load, {"name", "task", "output"})


def read_summary(run: Path) -> dict | None:
    """The content of summary.json, None where there is none. Raises InputError for other content."""
    names = {"finished", "steps", "train_images", "accuracy", "images_per_second"}
    return _read(run / "summary.json", json.loads, names)


def _read(path: Path, parse: Callable, names: set[str]) -> dict | None:
    """The mapping in a file; None if the file is absent or empty, so that nothing can be lost."""
    if not os.path.lexists(path) or (path.is_file() and not path.stat().st_size):
        return None
    try:
        content = parse(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.keys() >= names:
            return content
    except (OSError, ValueError, yaml.YAMLError, RecursionError):  # ValueError: it is no JSON or no UTF-8
        pass
    raise not_ours(path)


def check_output(run: Path) -> None:
    """Raises InputError where a run cannot be written, or would replace what vitfast did not write."""
    there = next(path for path in (run, *run.absolute().parents) if os.path.lexists(path))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"--output {run} cannot be written to: {there} is no folder that can be; choose another")
    ours = {"checkpoints": Path.is_dir, "tensorboard": Path.is_dir, LOCK: Path.is_file}
    ours |= {f"checkpoints/{name}": is_checkpoint for name in (LAST, PREVIOUS)}
    ours |= {f"checkpoints/{name}": _is_part for name in (WRITING, REMOVING)}
    ours |= {f".{BEST}": _is_part, BEST: _is_own_best}
    ours |= {"metrics.csv": lambda path: _holds(path, FIRST_COLUMNS)}
    ours |= {"report.html": lambda path: _holds(path, GENERATOR)}
    for name, is_ours in ours.items():
        if os.path.lexists(run / name) and not is_ours(run / name):
            raise not_ours(run / name)
    read_summary(run)
    read_settings(run)


def _holds(path: Path, text: str) -> bool:
    """Whether a file is empty, or this text is in its first 1000 bytes."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        beginning = file.read(1000)
    return not beginning or text.encode() in beginning


def prepare(run: Path, config: Config, fresh: bool) -> None:
    """Makes the folder ready for a run. A `fresh` run removes what an earlier one left there."""
    has_best, text = _is_own_best(run / BEST), yaml.safe_dump(as_plain(config), sort_keys=False)
    write_text(run / "config.yaml", text)  # this comes first: if the disk is full, nothing has been removed
    for name in ("summary.json", "report.html"):
        (run / name).unlink(missing_ok=True)
    if fresh:
        for path in (run / "checkpoints" / PREVIOUS, run / "checkpoints" / LAST):
            _free(path, is_checkpoint(path))
        if has_best:
            _free(run / BEST, has_best)
        for path in (run / "tensorboard").glob(f"events.out.tfevents.*.{EVENTS}"):
            path.unlink()


@contextmanager
def new_checkpoint(run: Path) -> Iterator[Path]:
    """Yields an empty folder that becomes the last checkpoint, while the last becomes the previous one.

    Where the block raises, both stay as they are. A kill leaves one of them whole at any moment: between two renames
    `last` is missing, and `previous` is the checkpoint that was last.
    """
    work, last, previous = (run / "checkpoints" / name for name in (WRITING, LAST, PREVIOUS))
    _free(work, _is_part(work))
    work.mkdir(parents=True)
    try:
        yield work
        for path in [*work.rglob("*"), work]:
            sync(path)
        if os.path.lexists(last):
            _free(previous, is_checkpoint(previous))
            os.rename(last, previous)
        os.rename(work, last)
        sync(work.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)  # if anything failed, a full disk gets its room back


def keep_as_best(run: Path, record: dict) -> None:
    """Makes the last checkpoint the best one too. record: the content of its best.json."""
    best, work = run / BEST, run / f".{BEST}"
    _free(work, _is_part(work))
    shutil.copytree(run / "checkpoints" / LAST, work, copy_function=_link)
    write_text(work / BEST_RECORD, json.dumps(record) + "\n")
    _free(best, _is_own_best(best))
    os.rename(work, best)
    sync(run)


def _link(source: str, target: str) -> None:
    """Hard-links a file, whose content never changes; copies it where the disk has no such links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        sync(Path(target))


def kept_weights(run: Path) -> Path:
    """The weights of a finished run that count: the best of a run with early stopping, else the last."""
    early = "stopped_early" in (read_summary(run) or {})
    return run / BEST if early else run / "checkpoints" / LAST


def _free(path: Path, ours: bool) -> None:
    """Frees a checkpoint's name: removes a link or what is ours, and renames anything else."""
    removing = path.with_name(REMOVING)
    if path != removing:
        _free(removing, _is_part(removing))
    if path.is_symlink():
        path.unlink()
    elif ours:
        os.replace(path, removing)  # renamed first, so that `path` is never half a checkpoint
        shutil.rmtree(removing, ignore_errors=True)
    elif os.path.lexists(path):
        os.rename(path, kept := free_name(path))
        logger.warning("%s is no checkpoint of this run; it was renamed to %s", path, kept.name)
