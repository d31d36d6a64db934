"""Image files by their paths: those below a folder."""

import os
from collections.abc import Iterator

from ..errors import InputError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})


def image_files(path: str | os.PathLike) -> Iterator[str]:
    """The path of a file as it is, or of each image file below a folder, in the order of names.

    Nothing is held but the entries of one folder. Hidden files and folders are left out, and so are pipes, sockets and
    devices; links are followed.
    Raises InputError where nothing is there, or no image.
    """
    path = os.fspath(path)
    if not os.path.exists(path):
        raise InputError(f"there is no file or folder {path}")
    if not os.path.isdir(path):
        yield path
        return
    found = False
    for found in _below(path, ()):
        yield found
    if not found:
        raise InputError(f"no images in {path}; known are files that end in {', '.join(sorted(SUFFIXES))}")


def _below(folder: str, above: tuple[str, ...]) -> Iterator[str]:
    here = os.path.realpath(folder)
    if here in above:  # a link back to a folder that holds it
        return
    with os.scandir(folder) as found:
        entries = sorted((entry for entry in found if not entry.name.startswith(".")), key=lambda entry: entry.name)
    for entry in entries:
        is_link = entry.is_symlink()
        if os.path.isdir(entry.path) if is_link else entry.is_dir():  # of a link to itself is_dir would raise
            yield from _below(entry.path, (*above, here))
        elif os.path.splitext(entry.name)[1].lower() in SUFFIXES and (is_link or entry.is_file()):
            yield entry.path
