"""Data sets in shards: WebDataset tar files, streamed Hugging Face data sets, TensorFlow data sets."""

import io
import tarfile
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from timm.data import IterableImageDataset
from torch.utils.data import IterableDataset

from ..errors import InputError
from ..run.config import MOST_CLASSES
from .contents import read_bytes
from .images import Unreadable, as_rgb, printable, read_rgb
from .sources import Source

SUFFIXES = ("jpg", "jpeg", "png", "webp")  # the images of WebDataset shards


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
    """The images of local WebDataset shards by index, read out of the tar files where they lie.

    apart: the first image whose class lies elsewhere in its shard than beside it, where reading in order misses both.
    """

    def __init__(self, paths: list[Path]):
        self.paths, self.labels, self.names = paths, [], []
        self.where, self.apart = array("q"), None  # where: shard, offset, bytes of each image
        for number, path in enumerate(paths):
            for name, offset, size, label, beside in _members(path):
                if self.apart is None and not beside:
                    self.apart = len(self.names)
                self.where.extend((number, offset, size))
                self.names.append(name)
                self.labels.append(label)
        self.classes = [str(i) for i in range(max(self.labels, default=-1) + 1)]

    def name(self, index: int) -> str:
        return printable(f"{self.paths[self.where[3 * index]]}, {self.names[index]}")

    def described(self, index: int) -> tuple[str, int, int]:
        return self.names[index], self.labels[index], self.where[3 * index + 2]

    def __getitem__(self, index: int):
        shard, offset, size = self.where[3 * index : 3 * index + 3]
        content = read_bytes(Slice(self.paths[shard], offset, size), self.name(index))
        return read_rgb(io.BytesIO(content), self.name(index)), self.labels[index]


def tar_members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The members of an opened tar file. Raises ReadError where a damaged header ends them."""
    for member in tar:
        tar.members = []  # it would keep all of them
        yield member
    tar.fileobj.seek(tar.offset)
    # tarfile takes such a header for the end, which is two blocks of zeros or that of the file.
    if tar.fileobj.read(2 * tarfile.BLOCKSIZE).strip(b"\0"):
        raise tarfile.ReadError(f"damaged at byte {tar.offset}")


def _members(path: Path) -> Iterator[tuple[str, int, int, int, bool]]:
    """(name, offset, bytes, class, whether that lies beside it) of a shard's images that have a .cls."""
    images, labels, last, run = {}, {}, None, 0  # run: of files of one key, side by side
    try:
        with tarfile.open(path, "r:") as tar:  # not compressed: images are read where they lie
            for member in tar_members(tar):
                folder, _, name = member.name.rpartition("/")
                key, dot, suffix = name.partition(".")
                if member.isfile() and dot and (folder, key) != last:
                    last, run = (folder, key), run + 1
                if member.isfile() and suffix.lower() == "cls":
                    labels[folder, key] = int(tar.extractfile(member).read()), run
                elif member.isfile() and suffix.lower() in SUFFIXES:
                    images[folder, key] = (member.name, member.offset_data, member.size), run
    except (tarfile.TarError, OSError, ValueError) as error:
        raise InputError(f"shard {path} cannot be read ({error})") from None
    for key, (image, place) in images.items():
        label, beside = labels.get(key, (0, 0))
        if not 0 <= label < MOST_CLASSES:
            which, most = f"{printable(image[0])} has the class {label}", MOST_CLASSES - 1
            raise InputError(f"shard {path}: {which}; classes are numbers from 0 to at most {most:,}")
        if key in labels:
            yield *image, label, beside == place


def local_shards(root: Path, prefixes: tuple[str, ...]) -> ShardFiles:
    """The shards of a split below `root`. Raises InputError where there are none."""
    for prefix in prefixes:
        paths = sorted([*root.glob(f"{prefix}*.tar"), *root.glob(f"{prefix}/*.tar")])
        if paths:
            found = ShardFiles(paths)
            if not len(found):
                raise InputError(
                    f"{paths[0]}{' ...' if paths[1:] else ''}: no image in it has a class (NAME.jpg and NAME.cls)"
                )
            return found
    raise InputError(f"no shards {root}/{prefixes[0]}*.tar; WebDataset folders hold train-*.tar and val-*.tar")


class Shards(Source):
    """An iterable data set of timm's factory, without a transform: read in order, not by index.

    files: the same images by index, where they are local.
    """

    def __init__(self, spec: str, dataset: IterableImageDataset, classes: list[str], files: ShardFiles | None = None):
        self.spec, self.dataset, self.classes, self.files = spec, dataset, classes, files

    def __len__(self) -> int:
        """The samples of the whole set; timm's own length is that of one rank, rounded up for its workers."""
        return self.dataset.reader.num_samples

    def image(self, content, number: int) -> Image.Image:
        """The RGB image of `content`, which is item `number` of a pass over the set. Raises Unreadable."""
        name = f"{self.spec}, image {number} of a pass,"
        try:
            if isinstance(content, dict):  # a file as Hugging Face streams it, its bytes or its address
                import datasets

                name = content.get("path") or name
                content = datasets.Image().decode_example(content)  # turned as EXIF says
            return as_rgb(content)
        except Exception as error:
            text = " ".join(str(error).split())
            raise Unreadable(f"{printable(name)} is a broken image ({text}); remove it") from None


class ShardSamples(IterableDataset):
    """(uint8 (C, H, W), label, unreadable) of each image of one pass, transformed where it is read.

    An image that cannot be read becomes the pair `blank`; without one (in training) it is left out, and its message
    comes with the next image. In WebDataset's shards timm passes over what it cannot decode, with a warning.
    """

    def __init__(self, source: Shards, transform: Callable, blank: tuple | None = None):
        self.source, self.transform, self.blank = source, transform, blank

    def __iter__(self):
        unreadable = []
        for number, (content, label) in enumerate(self.source.dataset):
            try:
                image = self.transform(self.source.image(content, number))
            except Unreadable as error:
                unreadable.append(str(error))
                if self.blank is None:
                    continue
                image, label = self.blank
            yield np.asarray(image), label, unreadable
            unreadable = []


def stream_files(dataset: IterableImageDataset) -> None:
    """Makes timm's Hugging Face stream give undecoded files: a broken image would end the stream."""
    builder = dataset.reader.builder
    builder.as_streaming_dataset = partial(_stream_files, builder.as_streaming_dataset, dataset.reader.input_key)


def _stream_files(stream: Callable, key: str, **options):
    import datasets

    return stream(**options).cast_column(key, datasets.Image(decode=False))
