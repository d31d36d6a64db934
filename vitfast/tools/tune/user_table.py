"""The user's own table of tiles on disk: the tuner writes it, kernels/user_table.py reads it.

It is $VITFAST_TILES, or ~/.cache/vitfast/tiles.json. Several processes may write, each for its GPU: each change is made
under a lock, and whole or not at all.
"""

import contextlib
import dataclasses
import fcntl
import json
from collections.abc import Iterator

from ...errors import InputError
from ...kernels import tiles
from ...run import files

KEY = ("op", "gpu", "bits", "shape")  # the fields of an entry beside its tile


@contextlib.contextmanager
def lock(name: str, taken: str = "") -> Iterator[None]:
    """Locks a file beside the table. taken: do not wait for another, but raise InputError(taken)."""
    path = tiles.user_table.path().with_name(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if taken else 0))
        except BlockingIOError:
            raise InputError(taken) from None
        yield


def read() -> list[dict]:
    """The table's entries. Raises InputError where it is damaged."""
    path = tiles.user_table.path()
    try:
        entries = json.loads(path.read_text())["tiles"] if path.is_file() else []
        for entry in entries:
            tiles.from_record(entry), [entry[key] for key in KEY]
        return entries
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"the tile table {path} is damaged ({type(error).__name__}: {error}); remove it") from None


def keep(config: tiles.KernelConfig, **key: str) -> None:
    """Puts a configuration into the table, in the place of one with the same KEY."""
    path = tiles.user_table.path()
    entry = key | dataclasses.asdict(config) | {"blocks": dict(config.blocks)}
    with lock(path.with_suffix(".lock").name):
        others = [other for other in read() if any(other[name] != key[name] for name in KEY)]
        files.write_text(path, json.dumps({"tiles": [*others, entry]}, indent=1))
    tiles.forget_user_table()
