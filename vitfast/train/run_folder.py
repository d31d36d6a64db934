"""The folder of a run: its files, which of them vitfast wrote, and how its checkpoints take turns.

    config.yaml  metrics.csv  summary.json  report.html  tensorboard/events.out.tfevents.*.vitfast
    vitfast.lock                       while a process trains there
    checkpoints/last/                  the newest checkpoint; real folders, so that every way of copying copies them
                previous/              the one before it
                .writing  .removing    one that is not whole yet, or no longer
    best/                              of a run with early stopping: its best checkpoint, links to the files of that
                state/best.json            and its step and accuracy: by this file the run knows its own

Anything else is the user's, and so is a file of these names that does not look like vitfast's: it is never touched.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import yaml

from ..errors import InputError
from ..eval.inspect.page import GENERATOR
from ..run.config import Config, as_plain, course
from ..run.files import exchange, free_name, sync, write_text

LAST, PREVIOUS, WRITING, REMOVING = "last", "previous", ".writing", ".removing"
BEST, BEST_RECORD = "best", "state/best.json"
# The files of a checkpoint, and those beside them that are not whole yet.
PARTS = re.compile(r"state|(state/)?\.?(model\.safetensors|config\.json|state\.(json|safetensors)|best\.json)(\..+)?")
EVENTS = "vitfast"  # the ending of the names of TensorBoard files
FIRST_COLUMNS = "step,epoch,split,loss,accuracy"  # of metrics.csv
logger = logging.getLogger("vitfast")


def is_checkpoint(path: Path) -> bool:
    """Whether a folder was written as a checkpoint, be it damaged since."""
    return any(os.path.lexists(path / "state" / name) for name in ("state.json", "state.safetensors"))


def _is_part(path: Path) -> bool:
    """Whether a folder holds nothing but files of a checkpoint: what a kill leaves of one."""
    if path.is_symlink() or not path.is_dir():
        return False
    held = [Path(here, name) for here, folders, files in os.walk(path) for name in folders + files]
    return all(PARTS.fullmatch(each.relative_to(path).as_posix()) for each in held)


def _is_own_best(run: Path) -> bool:
    """Whether best/ is what this run wrote there, no other checkpoint, and none of another run."""
    best, default = run / BEST, as_plain(Config())  # for fields that are newer than the run
    try:
        settings = json.loads((best / "state" / "state.json").read_text(encoding="utf-8"))["settings"]
        return (best / BEST_RECORD).is_file() and course(default | settings) == course(default | read_settings(run))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # ValueError: InputError too
        return False


def find_checkpoint(path: Path) -> Path | None:
    """`path` where it is a checkpoint itself, else the newest one of the run folder `path`."""
    newest = (path, path / "checkpoints" / LAST, path / "checkpoints" / PREVIOUS)
    return next((checkpoint for checkpoint in newest if is_checkpoint(checkpoint)), None)


def read_settings(run: Path) -> dict | None:
    """The settings in a run folder's config.yaml, or None. Raises InputError for another file."""
    return _read(run / "config.yaml", yaml.safe_load, lambda content: content.keys() >= {"name", "task", "output"})


def read_summary(run: Path) -> dict | None:
    """The content of summary.json, None where there is none. Raises InputError for another file."""
    return _read(run / "summary.json", json.loads, _is_summary)


def _is_summary(content: dict) -> bool:
    names = "steps train_images val_images classes parameters accuracy images_per_second seconds"
    numbers = [content.get(name) for name in names.split()]
    return content.get("finished") is True and all(isinstance(n, (int, float)) and n >= 0 for n in numbers)


def _read(path: Path, parse: Callable, is_ours: Callable[[dict], bool]) -> dict | None:
    """The mapping in a file; None where it is not there or empty: then there is nothing to lose."""
    if not os.path.lexists(path) or (path.is_file() and not path.stat().st_size):
        return None
    try:
        content = parse(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and is_ours(content):
            return content
    except (OSError, ValueError, yaml.YAMLError, RecursionError):  # ValueError: no JSON, no UTF-8
        pass
    raise _not_ours(path)


def _not_ours(path: Path) -> InputError:
    return InputError(f"{path} is damaged, or no run of vitfast wrote it; move it away, or choose another --output")


def check_output(run: Path, early_stop: int | None = None) -> None:
    """Raises InputError where a run cannot be written, or would replace what vitfast did not write."""
    if not run.is_dir():
        if os.path.lexists(run):
            raise InputError(f"--output {run} is {'a file' if run.exists() else 'a link to nothing'}; give a folder")
        above = next(path for path in run.absolute().parents if os.path.lexists(path))
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise InputError(f"--output {run} cannot be made, as {above} is no folder that can be written to")
        return
    if not os.access(run, os.W_OK | os.X_OK):
        raise InputError(f"--output {run} cannot be written to; choose another")
    folders = {run / name: Path.is_dir for name in ("checkpoints", "tensorboard")}
    checkpoints = {run / "checkpoints" / name: is_checkpoint for name in (LAST, PREVIOUS)}
    checkpoints |= {run / "checkpoints" / name: _is_part for name in (WRITING, REMOVING)}
    checkpoints |= {run / f".{BEST}": _is_part} if early_stop else {}
    files = {
        run / "metrics.csv": lambda path: _begins(path, lambda text: not text or text.startswith(FIRST_COLUMNS)),
        run / "report.html": lambda path: _begins(path, lambda text: GENERATOR in text),
    }
    for path, is_ours in (folders | checkpoints | files).items():
        if os.path.lexists(path) and not is_ours(path):
            raise _not_ours(path)
    read_summary(run)
    read_settings(run)
    if early_stop and os.path.lexists(run / BEST) and not _is_own_best(run):
        put = "is damaged, or not the best checkpoint that this run wrote there"
        raise InputError(f"{run / BEST} {put}; move it away, or choose another --output")


def _begins(path: Path, accepted: Callable[[str], bool]) -> bool:
    """Whether the first 1000 bytes of a file are accepted."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return accepted(file.read(1000).decode(errors="replace"))


def prepare(run: Path, config: Config, fresh: bool) -> None:
    """Makes the folder ready for a run; `fresh`: one from the beginning, so that an earlier one goes."""
    has_best, text = _is_own_best(run), yaml.safe_dump(as_plain(config), sort_keys=False)
    write_text(run / "config.yaml", text)  # first: where the disk is full nothing else has gone
    for name in ("summary.json", "report.html"):
        (run / name).unlink(missing_ok=True)
    if fresh:
        for name in (PREVIOUS, LAST):
            _discard(run / "checkpoints" / name)
        if has_best:
            _discard(run / BEST)
        for path in (run / "tensorboard").glob(f"events.out.tfevents.*.{EVENTS}"):
            path.unlink()


def begin_checkpoint(run: Path) -> Path:
    """An empty folder in which the next checkpoint is to be written."""
    work = run / "checkpoints" / WRITING
    _clear(work)
    work.mkdir(parents=True)
    return work


def keep_as_last(work: Path) -> None:
    """Makes the whole checkpoint `work` the last one, the last one the previous one, and removes that.

    `last` is whole at every moment, but where the system cannot exchange two names: there it is missing for a moment,
    in which `previous` is what was the last.
    """
    for path in [*work.rglob("*"), work]:
        sync(path)
    last, previous = work.with_name(LAST), work.with_name(PREVIOUS)
    if not os.path.lexists(last):
        os.rename(work, last)
    elif exchange(work, last):
        _discard(previous)
        os.rename(work, previous)
    else:
        _discard(previous)
        os.rename(last, previous)
        try:
            os.rename(work, last)
        except BaseException:
            os.rename(previous, last)
            raise
    sync(work.parent)


def keep_as_best(run: Path, record: dict) -> None:
    """Makes the last checkpoint the best one too. record: the content of its best.json."""
    best, work = run / BEST, run / f".{BEST}"
    _clear(work)
    shutil.copytree(run / "checkpoints" / LAST, work, copy_function=_link)
    write_text(work / BEST_RECORD, json.dumps(record) + "\n")
    if os.path.lexists(best) and not _is_own_best(run):  # put there since the run began
        _set_aside(best)
    if not os.path.lexists(best):
        os.rename(work, best)
    elif not best.is_symlink() and exchange(work, best):
        shutil.rmtree(work)
    else:
        _discard(best)
        os.rename(work, best)
    sync(run)


def _link(source: str, target: str) -> None:
    """A second name of a file, whose content never changes; a copy where there are no such names."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        sync(Path(target))


def kept_weights(run: Path) -> Path:
    """The weights of a finished run that count: the best of a run with early stopping, else the last."""
    early = (read_summary(run) or {}).get("best_step") is not None
    return run / BEST if early else run / "checkpoints" / LAST


def _discard(path: Path) -> None:
    """Removes a checkpoint; of a link the link, and what is no checkpoint gets another name."""
    removing = path.with_name(REMOVING)
    _clear(removing)
    if path.is_symlink():
        path.unlink()
    elif is_checkpoint(path):
        os.rename(path, removing)  # so that it is never half a checkpoint
        shutil.rmtree(removing, ignore_errors=True)
    elif path.exists():
        _set_aside(path)


def _clear(path: Path) -> None:
    """Frees a hidden name: what a kill left of a checkpoint goes, anything else gets another name."""
    if _is_part(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        _set_aside(path)


def _set_aside(path: Path) -> None:
    os.rename(path, kept := free_name(path))
    logger.warning("%s is no checkpoint of this run; it is %s now", path, kept.name)
