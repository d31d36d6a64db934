"""Files that are whole or absent: whoever reads one sees the old content or the new, never a part."""

import csv
import io
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ..errors import InputError

SCRATCH = ".vitfast-"  # the beginning of the names of scratch folders, whose files move out once they are whole


@contextmanager
def staged(folder: Path, wanted: Path | None = None, name: str = "") -> Iterator[Path]:
    """Yields a scratch folder in `folder`; its files move into `folder` when the block ends.

    Each file is synced and replaces the one of its name atomically, and none does before all are whole: where the block
    raises, nothing changes. An OSError names `wanted` (default: the folder), as that of a full disk names no file.
    name: the beginning of the scratch folder's own name, by which a later process finds what a kill left.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=SCRATCH + name, dir=folder, ignore_cleanup_errors=True) as made:
            scratch = Path(made)
            yield scratch
            # In reverse order, because path.data must be there before path, which names it.
            written = sorted(filter(Path.is_file, scratch.rglob("*")), reverse=True)
            places = {file: folder / file.relative_to(scratch) for file in written}
            if in_the_way := next(filter(Path.is_dir, places.values()), None):
                raise InputError(f"{in_the_way}: a folder is in the way; give another path")
            for file in written:
                sync(file)
            for file, place in places.items():
                place.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, place)
                sync(place.parent)
            sync(folder)  # for a new folder that the files may have brought
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(wanted or folder)) from error


def write_atomically(path: str | Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a file of the same name elsewhere, then syncs it and moves it to `path`.

    Where `write` raises, the old file stays.
    """
    path = Path(path)
    with staged(path.parent, path) as scratch:
        write(scratch / path.name)


def write_text(path: str | Path, text: str) -> None:
    """Replaces a file by `text`, atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text))


def write_tar(path: str | Path, files: Mapping[str, bytes], compression: str) -> None:
    """Writes files by name, in this order, as a .tar compressed by "gz" or "xz", atomically.

    It holds no user, time or permission of this machine: others can read what root unpacks.
    """

    def write(temporary: Path) -> None:
        with tarfile.open(temporary, f"w:{compression}") as tar:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))

    write_atomically(path, write)


def as_csv(columns: Iterable[str], rows: Iterable[Mapping]) -> str:
    """The rows as CSV under a line of their columns; a column that a row lacks is empty."""
    writer = csv.DictWriter(text := io.StringIO(), list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def free_name(path: Path) -> Path:
    """`path`.1, or the first number after it whose name is free."""
    number = 1
    while os.path.lexists(free := path.with_name(f"{path.name}.{number}")):
        number += 1
    return free


def not_ours(path: Path, writer: str = "this run") -> InputError:
    """The error that refuses to replace a file or folder which `writer` did not write."""
    return InputError(f"{path} is damaged, or {writer} did not write it; move it away, or choose another --output")


def sync(path: Path) -> None:
    """fsync of a file or folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
