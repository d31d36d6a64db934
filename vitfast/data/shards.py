"""Data sets in WebDataset shards: local tar files, whose images are read by index where they lie."""

import logging
import os
import re
import tarfile
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import InputError
from .classes import class_numbers, text_classes
from .image_files import PassedOver, is_clutter, is_image, suffix
from .images import printable
from .sources import UNNAMED, Source

logger = logging.getLogger("vitfast")
NUMBER = re.compile("-?(0|[1-9][0-9]*)")  # how classes are written that are numbers
PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


class Slice(NamedTuple):
    """A member of a tar file, read where it lies."""

    path: str | Path
    offset: int
    size: int

    def read_bytes(self) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


class ShardFiles(Source):
    """The images of local WebDataset shards by index, read out of the tar files where they lie."""

    def __init__(self, paths: list[Path], where: str = "", labelled: bool = True):
        self.paths, self.names, self.where = paths, [], where or str(paths[0])
        self.places, passed, labels, ends = array("q"), PassedOver(), [], [0]  # places: shard, offset, bytes of each
        for number, path in enumerate(paths):
            for name, offset, size, label in _samples(path, passed, labelled):
                self.places.extend((number, offset, size))
                self.names.append(name)
                labels.append(label)
            ends.append(len(labels))
        passed.say(self.where)
        if not labels:
            raise InputError(f"{self.where}: no image in it has a class (NAME.jpg and NAME.cls)")
        if "" in labels:  # training without labels: one image without a class is enough
            logger.info(
                "%s: its %s images train as one set, since not all have classes", self.where, f"{len(labels):,}"
            )
            labels = [UNNAMED] * len(labels)
        self.shards = tuple(np.diff(ends).tolist())
        self.texts = labels  # the classes as they are written, until `read_classes`

    def __len__(self) -> int:
        return len(self.texts)

    def read_classes(self, numeric: bool) -> None:
        """Reads the written classes as numbers, or as names."""
        labels = list(map(int, self.texts)) if numeric else self.texts
        self.classes, numbers = ([], None) if numeric else text_classes(labels)
        self.labels = class_numbers(labels, numbers, self.name)

    def name(self, index: int) -> str:
        return printable(f"{self.paths[self.places[3 * index]]}, {self.names[index]}")

    def path(self, index: int) -> str:
        return self.names[index]

    def content(self, index: int) -> Slice:
        shard, offset, size = self.places[3 * index : 3 * index + 3]
        return Slice(self.paths[shard], offset, size)


def tar_images(path: str | Path, passed: PassedOver, used: Callable = lambda tar, member: False) -> Iterator:
    """The members of a tar file that are images, in the order in which they lie there.

    used(tar, member): whether the caller uses a member otherwise, so that it is not passed over. Raises InputError for
    a file that is no tar file, or a damaged or compressed one: images are read where they lie.
    """
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                tar.members = []  # the tar file would keep all members
                if member.isfile() and not is_clutter(member.name) and not used(tar, member):
                    if is_image(member.name, partial(tar.extractfile, member), passed):
                        yield member
            tar.fileobj.seek(tar.offset)
            # tarfile takes a damaged header for the end; a true end is two blocks of zeros or the end of the file.
            if tar.fileobj.read(2 * tarfile.BLOCKSIZE).strip(b"\0"):
                raise tarfile.ReadError(f"damaged at byte {tar.offset}")
    except (tarfile.TarError, OSError, ValueError) as error:
        raise InputError(f"shard {path} cannot be read ({error})") from None


def _samples(path: Path, passed: PassedOver, labelled: bool) -> Iterator[tuple[str, int, int, str]]:
    """(name, offset, bytes, class as it is written) of a shard's images that have a .cls.

    Unless they must be `labelled`, the others come too, with the class "".
    """
    images, labels = {}, {}

    def is_class(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bool:
        if suffix(member.name) != ".cls":
            return False
        text = tar.extractfile(member).read().decode(errors="surrogateescape").strip()
        if not text:
            raise ValueError(f"{member.name} is empty")
        labels.setdefault(os.path.splitext(member.name)[0], text)
        return True

    for member in tar_images(path, passed, is_class):
        key = os.path.splitext(member.name)[0]
        if images.setdefault(key, member) is not member:
            passed[f"second images of one name, such as {printable(images[key].name)}"] += 1
    if not labelled:
        labels = dict.fromkeys(images, "") | labels
    for key, member in images.items():
        if key in labels:
            yield member.name, member.offset_data, member.size, labels[key]
    if alone := [member.name for key, member in images.items() if key not in labels]:
        passed[f"images without a .cls, such as {printable(alone[0])}"] += len(alone)
    if missing := [key for key in labels if key not in images]:
        passed[f".cls without an image, such as {printable(missing[0])}.cls"] += len(missing)


def local_shards(root: Path, prefixes: tuple[str, ...], labelled: bool = True) -> ShardFiles | None:
    """The shards of a split below `root`: those of the first prefix that any file has; "" means all.

    labelled: whether images need a class.
    """
    for prefix in prefixes:
        places = [*root.glob(f"{prefix}*"), *(root.glob(f"{prefix}/*") if prefix else ())]
        places = [p for p in places if p.parent != root or not p.name[len(prefix) :][:1].isalpha() or not prefix]
        files = sorted(p for p in places if p.name.endswith((".tar", *PACKED)) and not is_clutter(p.name))
        if packed := [path for path in files if path.suffix != ".tar"]:
            raise InputError(f"shard {packed[0]} is compressed: unpack it, since images are read where they lie")
        if files:
            where = f"{root}/{prefix}*.tar" if files[0].parent == root else f"{root}/{prefix}/*.tar"
            return ShardFiles(files, where, labelled)
    return None
