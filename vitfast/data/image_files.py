"""Image files by their paths: what counts as one is decided here, for folders, lists and tar files."""

import logging
import mimetypes
import os
import stat
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from PIL import Image, ImageFile

from ..errors import InputError
from ..run.distributed import is_first_rank
from .images import formats, printable

SUFFIXES = frozenset(".jpg .jpeg .png .webp .bmp .gif .tif .tiff .ppm .pgm".split())  # images without a look inside
CLUTTER = frozenset(
    "thumbs.db ehthumbs.db desktop.ini @eadir #recycle #snapshot __macosx $recycle.bin lost+found".split()
)  # what systems and network disks put beside people's files
KINDS = 8  # how many kinds of passed-over files a line names
logger = logging.getLogger("vitfast")


def suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def is_clutter(path: str) -> bool:
    """Whether a file, or a folder around it, is hidden or put there by a system, such as `._a.jpg` or `@eaDir`."""
    names = path.lower().split("/")
    return any(name in CLUTTER or (name.startswith(".") and name.strip(".")) for name in names)


class PassedOver:
    """What a listing of images leaves out, counted by kind and said in one line."""

    def __init__(self):
        self.kinds: Counter[str] = Counter()
        self.lost = False  # whether images are among them

    def add(self, kind: str, lost: bool = True, count: int = 1) -> None:
        self.kinds[kind] += count
        self.lost |= lost

    def add_file(self, name: str) -> None:
        """A file that is no image for Pillow."""
        kind, known = suffix(name), mimetypes.guess_type(name, strict=False)[0] or ""
        lost = known.startswith("image/") or kind in (".heic", ".heif", ".jxl", ".dng")
        shown = printable(kind) or "without a suffix"
        self.add(f"{shown} (Pillow cannot read them)" if lost else shown, lost)

    def say(self, where: object) -> None:
        """Logs the line, as a warning where images are among the files."""
        if self.kinds and is_first_rank():
            most = [f"{count:,} {kind}" for kind, count in self.kinds.most_common(KINDS)]
            others = sum(self.kinds.values()) - sum(count for _, count in self.kinds.most_common(KINDS))
            text = ", ".join(most + ([f"{others:,} others"] if others else []))
            logger.log(logging.WARNING if self.lost else logging.INFO, "%s: passed over: %s", where, text)


def is_image(name: str, open_file: Callable[[], BinaryIO], passed: PassedOver) -> bool:
    """Whether a file is an image: one that the installed Pillow opens, whatever its suffix.

    Files with one of SUFFIXES are images without a look: a broken one is named when it is read. Others are opened. The
    further pages of a TIFF, and what is no image, are noted in `passed`.
    """
    kind = suffix(name)
    if kind in SUFFIXES and not kind.startswith(".tif"):
        return True
    # Formats that no file's beginning tells are for files of their own suffixes.
    likely = [each for each in formats() if Image.OPEN[each][1] or Image.registered_extensions().get(kind) == each]
    found = False
    with suppress(Exception), warnings.catch_warnings(), open_file() as file:
        warnings.simplefilter("ignore")
        with Image.open(file, formats=likely) as image:
            found = not isinstance(image, ImageFile.StubImageFile) and image.format != "MPEG"
            if image.format == "TIFF" and getattr(image, "n_frames", 1) > 1:
                passed.add("further pages of TIFF files, whose first is read", count=image.n_frames - 1)
    if not found and kind not in SUFFIXES:
        passed.add_file(name)
    return found or kind in SUFFIXES


def image_files(path: str | os.PathLike, say: bool = True, refuse_circles: bool = False) -> Iterator[str]:
    """The path of a file as it is, or of each image file below a folder, in the order of names.

    Only the entries of a folder and of those around it are held. say: log what is passed over, in one line at the end.
    Raises InputError where there is no path or no image.
    """
    path, found, passed = os.fspath(path), False, PassedOver()
    if not os.path.exists(path):
        raise InputError(f"there is no file or folder {path}")
    if not os.path.isdir(path):
        yield path
        return
    for file in visible_files(path, refuse_circles=refuse_circles):
        if is_image(file, lambda file=file: _regular(file), passed):
            found = True
            yield file
    if say:
        passed.say(path)
    if not found:
        raise InputError(f"no images in {path}; images are files that Pillow can open, such as .jpg and .png")


def _regular(path: str) -> BinaryIO:
    """An opened file. Raises ValueError for a pipe, which would wait for a writer."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("no regular file")
    return open(path, "rb")


def visible_files(folder: str, above: tuple[str, ...] = (), refuse_circles: bool = False) -> Iterator[str]:
    """The path of each file below a folder, in the order of names; links are followed.

    Clutter, pipes, sockets and devices are left out, and so are links back to a folder around them; with refuse_circles
    these raise InputError. above: the real paths of the folders around this one.
    """
    here = os.path.realpath(folder)
    if here in above:
        if refuse_circles:
            link = next(path for path in (Path(folder), *Path(folder).parents) if path.is_symlink())
            raise InputError(f"{printable(str(link))} links back to a folder around it; remove the link")
        return
    with os.scandir(folder) as found:
        entries = sorted((entry for entry in found if not is_clutter(entry.name)), key=lambda entry: entry.name)
    for entry in entries:
        is_link = entry.is_symlink()
        if os.path.isdir(entry.path) if is_link else entry.is_dir():  # is_dir would raise for a link to itself
            yield from visible_files(entry.path, (*above, here), refuse_circles)
        elif is_link or entry.is_file():
            yield entry.path
