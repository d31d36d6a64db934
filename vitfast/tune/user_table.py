"""The user's own table of tiles on disk, as the tuner writes it and kernels/tiles.py reads it: $VITFAST_TILES, or ~/.cache/vitfast/tiles.json.

Beside "tiles" it holds "refused", candidates that broke or hung a GPU, and "trying", those that a process is just running: one whose process
has ended in the middle of it is taken for what ended it. Several processes may write: each change is made under a lock, and whole or not at all.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import InputError
from ..kernels import tiles

KEY = ("op", "gpu", "bits", "shape")


def _read(path: Path) -> dict[str, list[dict]]:
    if not path.is_file():
        return {"tiles": []}
    try:
        table = json.loads(path.read_text())
        for name in ("tiles", "refused", "trying"):
            for row in table.get(name, []) if name != "tiles" else table[name]:
                tiles.from_record(row)
                [
                    row[key]
                    for key in (*KEY, *(["reason"] if name == "refused" else ["pid"] if name == "trying" else []))
                ]
        return table
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"the tile table {path} is damaged ({type(error).__name__}: {error}); remove it") from None


@contextlib.contextmanager
def _changing() -> Iterator[dict[str, list[dict]]]:
    """The table to change; written when the block ends well."""
    path = tiles.user_table_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        table = _read(path)
        yield table
        new = path.with_suffix(f".{os.getpid()}.new")
        new.write_text(json.dumps(table, indent=1))
        new.replace(path)
    tiles.reload_user_table()


def _add(rows: list[dict], row: dict) -> list[dict]:
    """The rows with this one in the place of one for the same operation, GPU, bits and shape class."""
    return [r for r in rows if any(r[k] != row[k] for k in KEY)] + [row]


def keep(row: dict) -> None:
    """Puts a row (tiles.to_record) into the table."""
    with _changing() as table:
        table["tiles"] = _add(table["tiles"], row)


def refuse(row: dict, reason: str) -> None:
    """Notes a candidate that is not to be tried again on its GPU."""
    with _changing() as table:
        table.setdefault("refused", []).append(row | {"reason": reason})


@contextlib.contextmanager
def trying(row: dict) -> Iterator[None]:
    """Notes a candidate for as long as the block runs: should the process not come out of it, the next one knows."""
    mine = row | {"pid": os.getpid()}
    with _changing() as table:
        table.setdefault("trying", []).append(mine)
    try:
        yield
    finally:
        with _changing() as table:
            table["trying"] = [r for r in table.get("trying", []) if r != mine]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def refused(gpu: str) -> dict[tuple, str]:
    """(op, bits, shape, tile) -> why it is not tried again on this GPU; what another process ended in is among them."""
    with _changing() as table:  # which also shows at once whether the table can be written
        left = [r for r in table.get("trying", []) if r["pid"] == os.getpid() or not _alive(r["pid"])]
        if left:
            table["trying"] = [r for r in table["trying"] if r not in left]
            rows = [
                {k: v for k, v in r.items() if k != "pid"} | {"reason": "a run ended in the middle of it"} for r in left
            ]
            table.setdefault("refused", []).extend(rows)
        rows = [row for row in table.get("refused", []) if row["gpu"] == gpu]
    return {(row["op"], row["bits"], row["shape"], tiles.from_record(row)): row["reason"] for row in rows}


def only_one(name: str):
    """A lock that this process holds as long as what is returned lives; raises InputError where another process tunes the same GPU."""
    path = tiles.user_table_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = open(path.with_name(f"tuning-{name}.lock"), "w")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise InputError("another vitfast tune runs on this GPU: each would spoil the other's times") from None
    return lock
