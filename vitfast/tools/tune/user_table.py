"""The user's own table of tiles on disk: the tuner writes it, kernels/tiles.py reads it.

It is $VITFAST_TILES, or ~/.cache/vitfast/tiles.json. Besides "tiles" it holds "refused", the candidates that broke or
hung a GPU. Several processes may write: each change is made under a lock, and whole or not at all.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

from ...errors import InputError
from ...kernels import tiles

KEY = ("op", "gpu", "bits", "shape")  # of an entry, beside its tile


def _read(path: Path) -> dict[str, list[dict]]:
    if not path.is_file():
        return {"tiles": [], "refused": []}
    try:
        table = {"refused": []} | json.loads(path.read_text())
        for entry in (*table["tiles"], *table["refused"]):
            tiles.from_record(entry), [entry[key] for key in KEY]
        [entry["reason"] for entry in table["refused"]]
        return table
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"the tile table {path} is damaged ({type(error).__name__}: {error}); remove it") from None


@contextlib.contextmanager
def _changing() -> Iterator[dict[str, list[dict]]]:
    """Yields the table to change, under a lock; writes it unless the block raises."""
    path = tiles.user_table_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        table = _read(path)
        yield table
        # It is replaced as a whole but not synced to disk, as files.write_text would, since it is written often.
        new = path.with_suffix(f".{os.getpid()}.new")
        new.write_text(json.dumps(table, indent=1))
        new.replace(path)
    tiles.reload_user_table()


def keep(entry: dict) -> None:
    """Puts an entry (tiles.to_record) into the table, in the place of one with the same KEY."""
    with _changing() as table:
        table["tiles"] = [e for e in table["tiles"] if any(e[k] != entry[k] for k in KEY)] + [entry]


def refuse(entry: dict, reason: str) -> None:
    """Notes a candidate that is not to be tried again on its GPU."""
    with _changing() as table:
        table["refused"].append(entry | {"reason": reason})


def refused(gpu: str) -> dict[tuple, str]:
    """(op, bits, shape, tile) -> why it is not tried again on this GPU, such as that its process ended."""
    with _changing() as table:  # this also shows at once whether the table can be written
        found = [entry for entry in table["refused"] if entry["gpu"] == gpu]
    return {(e["op"], e["bits"], e["shape"], tiles.from_record(e)): e["reason"] for e in found}


def only_one(name: str):
    """A lock on tuning one GPU, held while the returned file lives. Raises InputError if it is taken."""
    path = tiles.user_table_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = open(path.with_name(f"tuning-{name}.lock"), "w")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise InputError("another vitfast tune runs on this GPU: each would spoil the other's times") from None
    return lock
