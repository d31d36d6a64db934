"""Image files by their paths: what counts as one is decided here, for folders, lists and tar files."""

import logging
import mimetypes
import os
import stat
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from PIL import Image, ImageFile

from ..errors import InputError, both_ends
from ..run.config import MAX_PIXELS
from ..run.distributed import is_first_rank
from .images import formats, pillows_limit, printable

SUFFIXES = frozenset(".jpg .jpeg .png .webp .bmp .gif .tif .tiff .ppm .pgm".split())  # counted as images unopened
# What systems and network disks put beside people's files.
CLUTTER = frozenset("thumbs.db ehthumbs.db desktop.ini @eadir #recycle #snapshot __macosx $recycle.bin".split())
logger = logging.getLogger("vitfast")


def suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def is_clutter(path: str) -> bool:
    """Whether a file, or a folder around it, is hidden or a system's own, as `._a.jpg`."""
    return any(name in CLUTTER or (name.startswith(".") and name.strip(".")) for name in path.lower().split("/"))


class PassedOver(Counter):
    """The files that a listing of images leaves out, counted by kind."""

    def say(self, where: object) -> None:
        """Logs one line: a warning, unless only files of other suffixes are left out."""
        if self and is_first_rank():
            text = both_ends(", ".join(f"{count:,} {kind}" for kind, count in self.most_common()))
            level = logging.WARNING if any(" " in kind for kind in self) else logging.INFO
            logger.log(level, "%s: passed over: %s", where, text)


def is_image(name: str, open_file: Callable[[], BinaryIO], passed: PassedOver) -> bool:
    """Whether a file is an image: one that the installed Pillow opens, whatever its suffix.

    Files with one of SUFFIXES count as images unopened: a broken one is named when it is read. Others are opened. The
    further pages of a TIFF, and files that are no images, are counted in `passed`.
    """
    kind = suffix(name)
    if kind in SUFFIXES and not kind.startswith(".tif"):
        return True
    # A format that the first bytes of a file do not tell is tried for its own suffixes only.
    likely = [each for each in formats() if Image.OPEN[each][1] or Image.registered_extensions().get(kind) == each]
    found = False
    with suppress(Exception), warnings.catch_warnings(), pillows_limit(MAX_PIXELS), open_file() as file:
        warnings.simplefilter("ignore")
        with Image.open(file, formats=likely) as image:
            found = not isinstance(image, ImageFile.StubImageFile) and image.format != "MPEG"
            if image.format == "TIFF" and (more := getattr(image, "n_frames", 1) - 1):
                passed["further pages of TIFF files, whose first is read"] += more
    if not found and kind not in SUFFIXES:
        known = kind in (".heic", ".jxl") or (mimetypes.guess_type(name, strict=False)[0] or "").startswith("image/")
        passed[f"{printable(kind) or 'without a suffix'}{' (Pillow cannot read them)' if known else ''}"] += 1
    return found or kind in SUFFIXES


def image_files(path: str | os.PathLike, say: bool = True, refuse_circles: bool = False) -> Iterator[str]:
    """Yields the path if it is a file's, else that of each image file below the folder, ordered by name.

    Memory holds the entries of one folder and of those around it. say: log what is passed over, in one line at the end.
    Raises InputError where there is no path or no image.
    """
    path, found, passed = os.fspath(path), False, PassedOver()
    if not os.path.exists(path):
        raise InputError(f"there is no file or folder {path}")
    if not os.path.isdir(path):
        yield path
        return
    for file in images_among(visible_files(path, passed, refuse_circles), passed):
        found = True
        yield file
    if say:
        passed.say(path)
    if not found:
        raise InputError(f"no images in {path}; images are files that Pillow can open, such as .jpg and .png")


def images_among(paths: Iterable[str], passed: PassedOver) -> Iterator[str]:
    """Yields those of the paths whose files are images."""
    return (path for path in paths if is_image(path, partial(open_regular, path), passed))


def open_regular(path: str | os.PathLike) -> BinaryIO:
    """Opens a file. Raises ValueError for a pipe, which would wait for a writer."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("no regular file")
    return open(path, "rb")


def visible_files(folder: str, passed: PassedOver, refuse_circles: bool = False, above: tuple = ()) -> Iterator[str]:
    """The path of each file below a folder, in the order of names; links are followed.

    Clutter is left out. Pipes, sockets, devices and links back to a folder around them are counted in `passed`; with
    refuse_circles such links raise InputError. above: the real paths of the folders around this one.
    """
    here = os.path.realpath(folder)
    if here in above:
        if refuse_circles:
            link = next(path for path in (Path(folder), *Path(folder).parents) if path.is_symlink())
            raise InputError(f"{printable(str(link))} links back to a folder around it; remove the link")
        passed["links back to a folder around them"] += 1
        return
    with os.scandir(folder) as found:
        entries = sorted((entry for entry in found if not is_clutter(entry.name)), key=lambda entry: entry.name)
    for entry in entries:
        is_link = entry.is_symlink()
        if os.path.isdir(entry.path) if is_link else entry.is_dir():  # is_dir would raise for a link to itself
            yield from visible_files(entry.path, passed, refuse_circles, (*above, here))
        elif is_link or entry.is_file():
            yield entry.path
        else:
            passed["pipes, sockets or devices"] += 1
