"""Whether images are the same: by path, class and size, and by content where a file is newer."""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .shards import Slice
from .sources import Source

ENDS = 64 * 1024  # bytes hashed at the beginning and at the end of an image's file, in place of all
THREADS = 16  # this many because network disks answer late
logger = logging.getLogger("vitfast")
UNKNOWN, LOST = 0, -1  # in place of a content hash: it has not been computed; the image cannot be read


def stamp(content) -> tuple[int, int]:
    """The size of an image in bytes and its file's time of modification in ns; (-1, 0) if it is gone.

    content: a path; an object with `read_bytes`, the `path` of the file that holds it and, where it is known, its
    `size`; or bytes, which have no time: their `content_hash` stands in its place.
    """
    if isinstance(content, bytes):
        return len(content), content_hash(content)
    try:
        found = os.stat(getattr(content, "path", content))
    except (OSError, ValueError):  # a name with a null byte
        return -1, 0
    size = getattr(content, "size", None)
    return found.st_size if size is None else size, found.st_mtime_ns


def content_hash(content) -> int:
    """A hash of an image's size and of its first and last ENDS bytes; LOST where it cannot be read.

    content: as in `stamp`.
    """
    try:
        if isinstance(content, (str, os.PathLike)):
            content = Slice(content, 0, os.path.getsize(content))
        if not isinstance(content, Slice):
            data = content if isinstance(content, bytes) else content.read_bytes()
            size, first, last = len(data), data[:ENDS], data[ENDS:][-ENDS:]
        elif (size := content.size) == 0:  # as a pipe has, which would wait for a writer
            first = last = b""
        else:
            with open(content.path, "rb") as file:
                file.seek(content.offset)
                first = file.read(min(size, ENDS))
                file.seek(content.offset + max(ENDS, size - ENDS))
                last = file.read(min(max(size - ENDS, 0), ENDS))
    except Exception:  # libraries raise errors of their own
        return LOST
    digest = hashlib.blake2b(b"%d\n" % size, digest_size=8)
    digest.update(first)
    digest.update(last)
    return int.from_bytes(digest.digest(), "little") >> 1 or 1


def described(source: Source, index: int) -> tuple[str, int | tuple[int, ...] | None, int, int]:
    """The path from the root of the data, the classes and the `stamp` of an image."""
    return source.path(index), source.labels[index] if source.labels else None, *stamp(source.content(index))


def fingerprint(source: Source) -> tuple[dict[str, str], np.ndarray]:
    """Hashes of the paths, classes and sizes of images; and their times of modification, (N,) int64.

    The images are not read. Where their files are not known, the name of the data is hashed. Each file is asked for its
    size once; the 1.3 million of ImageNet take about 8 s on a local disk.
    """
    if not len(source) or source.content(0) is None:
        return dict(paths=hashlib.sha256(source.where.encode()).hexdigest()), np.zeros(0, np.int64)
    parts = [range(len(source))[first : first + 1000] for first in range(0, len(source), 1000)]
    hashes, times = dict(paths=hashlib.sha256(), labels=hashlib.sha256(), sizes=hashlib.sha256()), []
    with ThreadPoolExecutor(THREADS) as pool:
        for found in pool.map(lambda part: [described(source, i) for i in part], parts):
            for *values, modified in found:
                times.append(modified)
                for each, value in zip(hashes.values(), values):
                    each.update(f"{value}\0".encode("utf-8", "surrogateescape"))
    return {name: each.hexdigest() for name, each in hashes.items()}, np.array(times, np.int64)


def hash_contents(source: Source, indices: Iterable[int], hashes: np.ndarray, seconds: float | None = None) -> None:
    """Writes the `content_hash` of a source's images at these indices into `hashes`, by THREADS threads.

    seconds: how long to wait for the threads; None: until all images are done. Later, one thread goes on with the rest.
    """
    left = iter(list(indices))  # from which each thread takes the next
    until = None if seconds is None else time.monotonic() + seconds

    def work(goes_on: bool) -> None:
        for index in left:
            hashes[index] = content_hash(source.content(index))
            if until is not None and time.monotonic() > until and not goes_on:
                return

    options = dict(target=work, name="vitfast-hash", daemon=True)
    threads = [threading.Thread(args=[number == 0], **options) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(None if until is None else max(0.0, until - time.monotonic()))


def replaced(source: Source, modified: np.ndarray, before: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """Returns the indices of images whose content has changed, and writes their new hashes into `hashes`.

    modified, before: their times of modification now and earlier; only images whose times differ are read.
    """
    moved = np.flatnonzero(before != modified)
    known = hashes[moved]
    if len(moved):
        said = "%s: %d images were modified at other times; their contents are compared"
        logger.info(said, source.where, len(moved))
        hash_contents(source, moved.tolist(), hashes)
    return moved[(known != hashes[moved]) & (known != UNKNOWN)]
