"""Files that are whole or absent: whoever reads one sees the old content or the new, never a part."""

import csv
import errno
import io
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ..errors import InputError


def write_atomically(path: str | Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a temporary file beside `path`, then puts it, synced, in its place.

    Where `write` raises, the old file stays.
    """
    write_all_atomically({Path(path): write})


def write_all_atomically(writes: Mapping[Path, Callable[[Path], object]]) -> None:
    """`write_atomically` of files that belong together: none is replaced before all are written."""
    temporaries = {path: path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp") for path in writes}
    try:
        for path, write in writes.items():
            write(temporaries[path])
            sync(temporaries[path])
        for path in writes:
            if path.is_dir():  # or the one before it would be new, and the others old
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        for path, temporary in temporaries.items():
            move_synced(temporary, path)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # a full disk's own names no file
    finally:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Replaces a file by `text`, atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text))


def as_csv(columns: Iterable[str], rows: Iterable[Mapping]) -> str:
    """The rows as CSV under a line of their columns; a column that a row lacks is empty."""
    writer = csv.DictWriter(text := io.StringIO(), list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def move_synced(source: Path, target: Path) -> None:
    """Puts a file in the place of another on the same disk, whole, and lasting from here on."""
    sync(source)
    os.replace(source, target)
    sync(target.parent)


def free_name(path: Path) -> Path:
    """`path`.1, or the first number after it whose name is free."""
    number = 1
    while os.path.lexists(free := path.with_name(f"{path.name}.{number}")):
        number += 1
    return free


def not_ours(path: Path, writer: str = "this run") -> InputError:
    """The refusal to replace a file or folder."""
    return InputError(f"{path} is damaged, or {writer} did not write it; move it away, or choose another --output")


def sync(path: Path) -> None:
    """fsync of a file or folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
