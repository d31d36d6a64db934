"""Embeddings of many images in files: in shards, by any number of processes, resumed if stopped.

    embeddings-00000.npy      (n, D) fp32, the vectors of the images of this shard that could be read
    index-00000.parquet       id, row, height, width, error of each image; row is null where it could not be read;
                              bytes, modified, content: its size, time of modification (ns) and `content_hash`
    manifest.json             the model's hash, the preprocessing, versions; at the end, how many images and shards, and
                              those of each part: the images of the first time, and of each time that some were new

The images that are in no shard yet, in the order of the source, fill the shards that are absent, in the order of their
numbers. So a shard holds the same images whoever computes it, and whichever others are there: ranks need not talk, a
job that was killed goes on, and new images become shards at the end. Its two files are there once they are whole.
"""

import hashlib
import itertools
import json
import logging
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

import numpy as np
import PIL
import torch
from torch import nn

from ..data.classes import first_of
from ..data.identity import LOST, THREADS, content_hash
from ..data.image_files import open_regular
from ..data.records import Record
from ..errors import InputError
from ..kernels.launch import batch_invariant
from ..run.files import SCRATCH, staged
from ..run.lock import locked
from ..version import __version__
from .embedder import Embedded, Embedder, Stages

MANIFEST, SOURCE, JOB = "manifest.json", b"vitfast.source", b"vitfast.job"  # the two are metadata of an index
LEFT = re.compile(rf"{re.escape(SCRATCH)}(shard|manifest)-(\d+)(-\w+)?")  # by a process that was killed
FILE = re.compile(r"(embeddings|index)-(\d{5,})\.(npy|parquet)")
TOTALS = ("images", "shards", "parts")  # in the manifest of a job that has ended
MAY_DIFFER = ("versions", "device")  # from one run of a job to the next, with a warning
logger = logging.getLogger("vitfast")


@dataclass
class Progress:
    """How far one run of a job has come."""

    images: int = 0  # computed, or found unreadable
    unreadable: int = 0
    kept: int = 0  # in shards that were there already
    stages: Stages = field(default_factory=Stages)
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started


def embed_to(
    embedder: Embedder,
    records: Iterable[Record],
    folder: str | Path,
    *,
    shard_size: int = 10_000,
    rank: int = 0,
    world: int = 1,
    resume: bool = True,
    on_progress: Callable[[Progress, str | None], None] = lambda progress, error: None,
) -> Progress:
    """Writes the embeddings of images into a folder, which `read` reads; returns what this call has done.

    records: what `vitfast.data.records.records(spec)` returns, or an iterable like it. shard_size: images of a shard.
    This process, `rank` of `world`, computes every world-th shard. resume: keep the shards that are there; False
    starts again. on_progress(progress, error): called after each image; error: why it could not be read, or None.

    Images are known by their names. What was written stays as it is, but that the shard of an image whose file was
    replaced is computed again. Raises InputError if the folder holds embeddings of other weights or settings, or of
    images that are gone, and OSError if the folder cannot be written.
    """
    folder = Path(folder)
    if os.path.lexists(folder) and not folder.is_dir():
        raise InputError(f"--output {folder} is a file; give a folder")
    with locked(folder, f"rank-{rank}.lock"):
        return _embed_to(embedder, records, folder, shard_size, rank, world, resume, on_progress)


def _embed_to(
    embedder: Embedder,
    records: Iterable[Record],
    folder: Path,
    shard_size: int,
    rank: int,
    world: int,
    resume: bool,
    on_progress: Callable[[Progress, str | None], None],
) -> Progress:
    """`embed_to`, once this process holds the folder."""
    progress = Progress()
    manifest = dict(describe(embedder), shard_size=shard_size)
    job = _job(manifest)
    _remove(folder, LEFT, rank, world)
    before = {}
    if resume:
        before = _check_manifest(folder, manifest, rank)
    else:
        _manifest_of(folder)
        _remove(folder, FILE, rank, world)
        _write_manifest(folder, manifest, rank)
    written = _Written(folder, job, resume)
    absent = (shard for shard in itertools.count() if shard not in written.counts)
    waiting: dict[int, list[_Image]] = {}  # the shards that are being read
    images, last = 0, max(written.counts, default=-1)

    def begin(shard: int, part: list[Record]) -> Iterator[tuple[int, object, str]]:
        nonlocal last
        last = max(last, shard)
        if shard % world == rank:
            waiting[shard] = [_Image(record) for record in part]
            yield from ((shard, image, image.id) for image in list(waiting[shard]))

    def wanted() -> Iterator[tuple[int, object, str]]:
        nonlocal images
        new: list[Record] = []
        for record in records:
            images += 1
            shard, whole = written.place(record)
            if shard is None:
                new.append(record)
            elif whole and shard % world == rank:
                if _is_same(folder, shard, whole):
                    progress.kept += len(whole)
                else:
                    yield from begin(shard, whole)
            while written.missing == 0 and len(new) >= shard_size:  # before, this may be another source
                yield from begin(next(absent), new[:shard_size])
                del new[:shard_size]
        if gone := written.gone() if images else []:
            advice = "bring them back, give another --output, or --resume never to embed all again"
            said = f"{len(gone)} images in {folder} are no longer in the source ({first_of(gone)})"
            raise InputError(f"{said}; nothing new was embedded; {advice}")
        for first in range(0, len(new), shard_size):
            yield from begin(next(absent), new[first : first + shard_size])

    results = embedder.stream_groups(wanted(), progress.stages)
    for shard, group in itertools.groupby(results, key=itemgetter(0)):
        computed = []
        for _, found in group:
            progress.images += 1
            progress.unreadable += found.error is not None
            on_progress(progress, found.error)
            computed.append(found)
        _write(folder, shard, waiting.pop(shard), job, computed, embedder)
    if not images:
        raise InputError("there is no image to embed")
    for shard in itertools.takewhile(lambda shard: shard < last, absent):  # of images that are gone, before they were
        if shard % world == rank:
            _write(folder, shard, [], job, [], embedder)
    totals = dict(images=images, shards=last + 1)
    parts = before.get("parts") or [{name: before[name] for name in totals if name in before}]  # an earlier vitfast's
    parts = parts if TOTALS[1] in before else []
    more = {name: total - sum(part[name] for part in parts) for name, total in totals.items()}
    parts += [more] * (more["shards"] > 0)
    _write_manifest(folder, manifest | totals | dict(parts=parts), rank)
    return progress


class _Image:
    """An image of a shard, as an Embedder takes it. Its content is let go once it is read, and its hash kept."""

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


class _Written:
    """The images in the shards that are there, known by their names. Raises InputError for shards of another job."""

    def __init__(self, folder: Path, job: bytes, resume: bool):
        self.folder, self.job = folder, job
        self.counts: dict[int, int] = {}  # of images, by shard
        self.met: dict[int, dict[int, Record]] = {}  # the images of the source by shard and row, until all are there
        places = [np.empty((0, 3), np.int64)]  # a hash of the name, the shard and the row of each image
        for shard in _shards(folder) if resume else ():
            if all(path.is_file() for path in _paths(folder, shard)):
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

        index = _paths(self.folder, shard)[1]
        try:
            table = pq.read_table(index, columns=["id"])
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{index} is damaged ({' '.join(str(error).split())}); remove it and run again") from None
        if (table.schema.metadata or {}).get(JOB) != self.job:
            raise _other_job(self.folder, shard)
        return table.column("id").to_pylist()

    def place(self, record: Record) -> tuple[int | None, list[Record]]:
        """The shard of an image, None where it is new; and the images of that shard if this is the last of them."""
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
        """The names of the images that no `place` was asked for."""
        lost = self.places[~self.used]
        ids = {shard: self._ids(shard) for shard in np.unique(lost[:, 1]).tolist()}
        return [ids[shard][row] for _, shard, row in lost[np.lexsort(lost.T[1:][::-1])].tolist()]


def read(folder: str | Path) -> tuple[list[str], np.ndarray]:
    """Returns (ids, vectors (n, D) fp32) of the images that could be read, in the order of the source.

    Raises InputError if the folder is not that of a finished job.
    """
    import pyarrow.parquet as pq

    folder = Path(folder)
    manifest = _manifest_of(folder)
    if manifest is None:
        raise InputError(f"{folder} holds no {MANIFEST} of `vitfast embed`")
    if TOTALS[1] not in manifest:
        raise InputError(f"{folder} holds a job that has not ended; run the same command again")
    ids, vectors = [], []
    for shard in range(manifest["shards"]):
        paths = _paths(folder, shard)
        if absent := next((path for path in paths if not path.is_file()), None):
            raise InputError(f"{absent} is missing; run the same command again")
        try:
            found, table = np.load(paths[0], mmap_mode="r"), pq.read_table(paths[1], columns=["id", "row"])
            rows = table.column("row").to_pylist()
            if found.shape != (wanted := (len(rows) - rows.count(None), manifest.get("dim"))):
                raise ValueError(f"its vectors are {found.shape}, and must be {wanted}")
        except (OSError, ValueError, EOFError) as error:
            advice = "remove its two files and run again"
            raise InputError(f"shard {shard} of {folder} cannot be read ({error}); {advice}") from None
        if (table.schema.metadata or {}).get(JOB) != _job(manifest):
            raise _other_job(folder, shard)
        ids += [name for name, row in zip(table.column("id").to_pylist(), rows) if row is not None]
        vectors.append(found)
    return ids, np.concatenate(vectors)


def describe(embedder: Embedder) -> dict:
    """A manifest's record of an Embedder: all that its vectors depend on, and the versions."""
    model, dtype = embedder.backbone.model, embedder.dtype or next(embedder.backbone.model.parameters()).dtype
    if embedder.device.type == "cuda":
        device = torch.cuda.get_device_name(embedder.device)
    else:
        device = embedder.device.type
    versions = dict(vitfast=__version__, torch=torch.__version__, pillow=PIL.__version__)
    versions |= dict(python=platform.python_version())
    return dict(
        model=f"{type(model).__module__}.{type(model).__qualname__}",
        weights_sha256=weights_hash(model),
        preprocessing=embedder.backbone.preprocessing,
        decode=embedder.decode,
        exif_orientation=embedder.reading.upright,
        pool=embedder.pool,
        normalize=embedder.normalize,
        batch_invariant=batch_invariant(),
        dtype=str(dtype).removeprefix("torch."),
        tokens=embedder.tokens,
        dim=embedder.dim,
        device=device,
        versions=versions,
    )


def weights_hash(model: nn.Module) -> str:
    """SHA-256 of the names, dtypes, shapes and bytes of a model's state dict."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, torch.Tensor):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


# ---- files


def _paths(folder: Path, shard: int) -> tuple[Path, Path]:
    return folder / f"embeddings-{shard:05d}.npy", folder / f"index-{shard:05d}.parquet"


def _shards(folder: Path) -> list[int]:
    """The numbers of the shards that have a file."""
    return sorted({int(found[2]) for name in os.listdir(folder) if (found := FILE.fullmatch(name))})


def _is_same(folder: Path, shard: int, part: list[Record]) -> bool:
    """Whether the images of a shard, in its order, are what they were; where not, it is logged.

    Those whose files were modified at another time are read. An index of an earlier vitfast has a hash of the sizes.
    """
    import pyarrow.parquet as pq

    table = pq.read_table(_paths(folder, shard)[1])
    if before := table.schema.metadata.get(SOURCE):
        digest = hashlib.sha256()
        for record in part:
            digest.update(f"{record.size} {record.id}\n".encode())
        replaced = [] if digest.hexdigest().encode() == before else [record.id for record in part]
    else:
        facts = zip(part, *(table.column(name).to_pylist() for name in ("bytes", "modified", "content")))
        other = [(record, before) for record, *stamp, before in facts if stamp != [record.size, record.modified]]
        with ThreadPoolExecutor(THREADS) as pool:
            now = list(pool.map(content_hash, (record.content for record, _ in other)))
        replaced = [record.id for (record, before), after in zip(other, now) if before != after]
    if replaced:
        said = "shard %d is computed again: of its %d images some were replaced since (%s)"
        logger.warning(said, shard, len(part), first_of(replaced))
    return not replaced


def _job(manifest: dict) -> bytes:
    """A hash of what the vectors of a job have in common."""
    common = {name: value for name, value in manifest.items() if name not in (*MAY_DIFFER, *TOTALS)}
    if not common.get("exif_orientation"):
        common.pop("exif_orientation", None)  # jobs from before there was this setting say nothing of it
    return hashlib.sha256(json.dumps(common, sort_keys=True).encode()).hexdigest().encode()


def _other_job(folder: Path, shard: int) -> InputError:
    """Of a rank that was to start again and never began."""
    return InputError(f"shard {shard} in {folder} is of another job than {MANIFEST}; run again with --resume never")


def _write(
    folder: Path, shard: int, images: list[_Image], job: bytes, results: list[Embedded], embedder: Embedder
) -> None:
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
    table = pa.table(columns).replace_schema_metadata({JOB: job})
    paths = _paths(folder, shard)
    with staged(folder, paths[0], name=f"shard-{shard:05d}-") as scratch:
        np.save(scratch / paths[0].name, np.stack(vectors) if vectors else np.empty((0, embedder.dim), np.float32))
        pq.write_table(table, scratch / paths[1].name)
        paths[0].unlink(missing_ok=True)  # of images that were replaced since


def _manifest_of(folder: Path) -> dict | None:
    """The content of a manifest, None where there is none. Raises InputError for any other file."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if isinstance(content, dict) and "weights_sha256" in content and isinstance(content.get("shards", 0), int):
            return content
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        pass
    raise InputError(f"{folder / MANIFEST} is damaged, or `vitfast embed` did not write it; move it away")


def _check_manifest(folder: Path, manifest: dict, rank: int) -> dict:
    """The manifest, written if there is none. Raises InputError where it is another job's."""
    before, now = _manifest_of(folder), json.loads(json.dumps(manifest))
    if before is None:
        if _shards(folder):
            raise InputError(f"{folder} holds embeddings without {MANIFEST}; give another --output, or --resume never")
        _write_manifest(folder, manifest, rank)
        return now
    before = dict(exif_orientation=False) | before  # of a job from before there was this setting
    for name, value in now.items():
        if name not in MAY_DIFFER and before.get(name) != value:
            what = f"with {name} {_short(before.get(name))}, not {_short(value)}"
            what = "of other weights" if name == "weights_sha256" else what
            advice = "give another --output, or --resume never to start again"
            raise InputError(f"{folder} holds embeddings {what}; {advice}")
    for name in MAY_DIFFER:
        if before.get(name) != now[name]:
            said = f"{_short(before.get(name))} before, {_short(now[name])} now"
            logger.warning("%s: %s; vectors may differ from shard to shard by rounding", name, said)
    return before


def _short(value) -> str:
    text = json.dumps(value)
    return text if len(text) < 200 else f"{text[:197]}..."


def _write_manifest(folder: Path, content: dict, rank: int) -> None:
    with staged(folder, folder / MANIFEST, name=f"manifest-{rank}-") as scratch:
        (scratch / MANIFEST).write_text(json.dumps(content, indent=2) + "\n")


def _remove(folder: Path, pattern: re.Pattern, rank: int, world: int) -> None:
    """Removes the files, or scratch folders, of the shards that this process computes."""
    for name in os.listdir(folder):
        if (found := pattern.fullmatch(name)) and int(found[2]) % world == rank:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
