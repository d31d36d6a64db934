"""Image files by their paths: those below a folder."""

import os
from collections.abc import Iterator

from ..errors import InputError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})


def image_files(path: str | os.PathLike) -> Iterator[str]:
    """The path of a file as it is, or of each image file below a folder, in the order of names.

    Nothing is held but the names of one folder. Hidden files and folders are left out, links to folders are followed.
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
    with os.scandir(folder) as entries:
        names = sorted((entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith("."))
    for name, is_folder in names:
        if is_folder:
            yield from _below(os.path.join(folder, name), (*above, here))
        elif os.path.splitext(name)[1].lower() in SUFFIXES:
            yield os.path.join(folder, name)
