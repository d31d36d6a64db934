"""Image files by their paths: those below a folder."""

import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import InputError
from .images import printable

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})


def suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def image_files(path: str | os.PathLike) -> Iterator[str]:
    """The path of a file as it is, or of each image file below a folder, in the order of names.

    Only the entries of a folder and of those around it are held. Raises InputError where there is no path or no image.
    """
    path, found = os.fspath(path), False
    if not os.path.exists(path):
        raise InputError(f"there is no file or folder {path}")
    if not os.path.isdir(path):
        yield path
        return
    for file in visible_files(path):
        if suffix(file) in SUFFIXES:
            found = True
            yield file
    if not found:
        raise InputError(f"no images in {path}; known are files that end in {', '.join(sorted(SUFFIXES))}")


def visible_files(folder: str, above: tuple[str, ...] = (), refuse_circles: bool = False) -> Iterator[str]:
    """The path of each file below a folder, in the order of names; links are followed.

    Hidden files and folders, pipes, sockets and devices are left out, and so are links back to a folder around them;
    with refuse_circles these raise InputError. above: the real paths of the folders around this one.
    """
    here = os.path.realpath(folder)
    if here in above:
        if refuse_circles:
            link = next(path for path in (Path(folder), *Path(folder).parents) if path.is_symlink())
            raise InputError(f"{printable(str(link))} links back to a folder around it; remove the link")
        return
    with os.scandir(folder) as found:
        entries = sorted((entry for entry in found if not entry.name.startswith(".")), key=lambda entry: entry.name)
    for entry in entries:
        is_link = entry.is_symlink()
        if os.path.isdir(entry.path) if is_link else entry.is_dir():  # is_dir would raise for a link to itself
            yield from visible_files(entry.path, (*above, here), refuse_circles)
        elif is_link or entry.is_file():
            yield entry.path
