"""The files of a shard of embeddings: which images it holds, and whether they are still the same."""

import logging
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ..data.classes import first_of
from ..data.identity import LOST, THREADS, content_hash
from ..data.image_files import open_regular
from ..data.records import Record
from ..errors import InputError
from ..run.files import staged
from .embedder import Embedded, Embedder

JOB = b"vitfast.job"  # metadata of an index
FILE = re.compile(r"(embeddings|index)-(\d{5,})\.(npy|parquet)")
logger = logging.getLogger("vitfast")


def paths_of(folder: Path, shard: int) -> tuple[Path, Path]:
    """The files of the vectors and of the index of a shard."""
    return folder / f"embeddings-{shard:05d}.npy", folder / f"index-{shard:05d}.parquet"


def shards_in(folder: Path) -> list[int]:
    """The numbers of the shards that have a file."""
    return sorted({int(found[2]) for name in os.listdir(folder) if (found := FILE.fullmatch(name))})


class ShardImage:
    """An image of a shard, from which an Embedder reads; then it keeps its hash and drops its content."""

    def __init__(self, record: Record):
        self.id, self.content, self.size, self.modified = record
        self.hash = LOST

    def read_bytes(self) -> bytes:
        content, self.content = self.content, None
        if isinstance(content, (str, os.PathLike)):
            with open_regular(content) as file:
                found = file.read()
        else:
            found = content.read_bytes()
        self.hash = content_hash(found)
        return found


class Written:
    """The shards of a folder and their images, by name. Raises InputError for shards of another job."""

    def __init__(self, folder: Path, job: bytes, resume: bool):
        self.folder, self.job = folder, job
        self.counts: dict[int, int] = {}  # how many images each shard has
        self.met: dict[int, dict[int, Record]] = {}  # the source's images by shard and row, until one is complete
        places = [np.empty((0, 3), np.int64)]  # for each image: the hash of its name, its shard and its row
        for shard in shards_in(folder) if resume else ():
            if all(path.is_file() for path in paths_of(folder, shard)):
                ids = self._ids(shard)
                self.counts[shard] = len(ids)
                places.append(np.array([(hash(name), shard, row) for row, name in enumerate(ids)]).reshape(-1, 3))
        found = np.concatenate(places)
        self.places = found[np.argsort(found[:, 0], kind="stable")]
        self.keys = self.places[:, 0].copy()
        self.used, self.missing = np.zeros(len(found), bool), len(found)

    def _ids(self, shard: int) -> list[str]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        index = paths_of(self.folder, shard)[1]
        try:
            table = pq.read_table(index, columns=["id"])
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{index} is damaged ({' '.join(str(error).split())}); remove it and run again") from None
        if (table.schema.metadata or {}).get(JOB) != self.job:
            raise other_job(self.folder, shard)
        return table.column("id").to_pylist()

    def place(self, record: Record) -> tuple[int | None, list[Record]]:
        """(shard of an image, None for a new one; the images of that shard if this is its last, else [])."""
        key = hash(record.id)
        at = np.searchsorted(self.keys, key)
        while at < len(self.keys) and self.keys[at] == key and self.used[at]:  # a name may be there twice
            at += 1
        if at == len(self.keys) or self.keys[at] != key:
            return None, []
        self.used[at] = True
        self.missing -= 1
        _, shard, row = self.places[at].tolist()
        part = self.met.setdefault(shard, {})
        part[row] = record
        if len(part) < self.counts[shard]:
            return shard, []
        return shard, [record for _, record in sorted(self.met.pop(shard).items())]

    def gone(self) -> list[str]:
        """The names of the images for which `place` was never called: the source has them no longer."""
        lost = self.places[~self.used]
        ids = {shard: self._ids(shard) for shard in np.unique(lost[:, 1]).tolist()}
        return [ids[shard][row] for _, shard, row in lost[np.lexsort(lost.T[1:][::-1])].tolist()]

    def is_same(self, shard: int, part: list[Record]) -> bool:
        """Whether the images of a shard, in its order, are unchanged; a warning says which are not.

        Only images whose files were modified at another time are read.
        """
        import pyarrow.parquet as pq

        table = pq.read_table(paths_of(self.folder, shard)[1])
        facts = zip(part, *(table.column(name).to_pylist() for name in ("bytes", "modified", "content")))
        other = [(record, before) for record, *stamp, before in facts if stamp != [record.size, record.modified]]
        with ThreadPoolExecutor(THREADS) as pool:
            now = list(pool.map(content_hash, (record.content for record, _ in other)))
        replaced = [record.id for (record, before), after in zip(other, now) if before != after]
        if replaced:
            said = "shard %d is computed again: of its %d images some were replaced since (%s)"
            logger.warning(said, shard, len(part), first_of(replaced))
        return not replaced

    def write(self, shard: int, images: list[ShardImage], results: list[Embedded], embedder: Embedder) -> None:
        """Writes the two files of a shard; the vectors come last, each file whole."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        vectors = [found.vector for found in results if found.vector is not None]
        rows = iter(range(len(vectors)))
        columns = dict(
            id=pa.array([image.id for image in images], pa.string()),
            row=pa.array([None if found.vector is None else next(rows) for found in results], pa.int32()),
            height=pa.array([found.height for found in results], pa.int32()),
            width=pa.array([found.width for found in results], pa.int32()),
            error=pa.array([found.error for found in results], pa.string()),
            bytes=pa.array([image.size for image in images], pa.int64()),
            modified=pa.array([image.modified for image in images], pa.int64()),
            content=pa.array([image.hash for image in images], pa.int64()),
        )
        table = pa.table(columns).replace_schema_metadata({JOB: self.job})
        paths = paths_of(self.folder, shard)
        with staged(self.folder, paths[0], name=f"shard-{shard:05d}-") as scratch:
            np.save(scratch / paths[0].name, np.stack(vectors) if vectors else np.empty((0, embedder.dim), np.float32))
            pq.write_table(table, scratch / paths[1].name)
            paths[0].unlink(missing_ok=True)  # the vectors of images that were replaced since


def other_job(folder: Path, shard: int) -> InputError:
    """The error for a shard that a rank left which was to start again and never began."""
    return InputError(f"shard {shard} in {folder} is of another job than manifest.json; run again with --resume never")
