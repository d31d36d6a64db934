"""Embeddings of many images in files: in shards, by any number of processes, resumed if stopped.

    embeddings-00000.npy      (n, D) fp32, the vectors of the images of this shard that could be read
    index-00000.parquet       id, row, height, width, error of each image; row is null where it could not be read;
                              bytes, modified, content: its size, time of modification (ns) and `content_hash`
    manifest.json             the model's hash, the preprocessing, versions; at the end, how many images and shards, in
                              all and by parts: those of the first run, and of each run that found new images

The images that are in no shard yet, in the order of the source, fill the shards that are absent, in the order of their
numbers. So a shard holds the same images whoever computes it, and whichever others exist: ranks need not communicate, a
job that was killed goes on, and new images become shards at the end. A shard's two files exist once both are whole.
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
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

import numpy as np
import PIL
import torch
from torch import nn

from ..data.classes import first_of
from ..data.records import Record
from ..errors import InputError, both_ends
from ..kernels.tiles import batch_invariant
from ..run.files import SCRATCH, staged
from ..run.lock import locked
from ..version import __version__
from .embed_shards import FILE, JOB, ShardImage, Written, other_job, paths_of, shards_in
from .embedder import Embedder

MANIFEST = "manifest.json"
LEFT = re.compile(rf"{re.escape(SCRATCH)}(shard|manifest)-(\d+)(-\w+)?")  # what a process left that was killed
TOTALS = ("images", "shards", "parts")  # entries of the manifest of a job that has ended
MAY_DIFFER = ("versions", "device")  # entries that may differ between runs of a job, with a warning
logger = logging.getLogger("vitfast")


@dataclass
class Progress:
    """How far one run of a job has come."""

    images: int = 0  # computed, or found unreadable
    unreadable: int = 0
    kept: int = 0  # images in shards that were there already
    waiting: float = 0.0  # seconds in which no image that had been read was there to compute
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

    Images are known by their names. Shards that are there stay as they are, except that the shard of an image whose
    file was replaced is computed again. Raises InputError if the folder holds embeddings of other weights or settings,
    or of images that are gone, and OSError if the folder cannot be written.
    """
    folder = Path(folder)
    if os.path.lexists(folder) and not folder.is_dir():
        raise InputError(f"--output {folder} is a file; give a folder")
    with locked(folder, f"rank-{rank}.lock"):
        progress, manifest = Progress(), dict(describe(embedder), shard_size=shard_size)
        _remove(folder, LEFT, rank, world)
        before = {}
        if resume:
            before = _check_manifest(folder, manifest, rank)
        else:
            _manifest_of(folder)
            _remove(folder, FILE, rank, world)
            _write_manifest(folder, manifest, rank)
        plan = _Plan(Written(folder, _job(manifest), resume), shard_size, rank, world)
        results = embedder.stream_groups(plan.items(records, progress), progress)
        for shard, group in itertools.groupby(results, key=itemgetter(0)):
            computed = []
            for _, embedded in group:
                progress.images += 1
                progress.unreadable += embedded.error is not None
                on_progress(progress, embedded.error)
                computed.append(embedded)
            plan.written.write(shard, plan.waiting.pop(shard), computed, embedder)
        if not plan.images:
            raise InputError("there is no image to embed")
        for shard in plan.empty():
            plan.written.write(shard, [], [], embedder)
        _write_manifest(folder, manifest | _totals(plan, before), rank)
        return progress


class _Plan:
    """Which shard holds which images: those of existing shards stay there, new ones fill absent shards."""

    def __init__(self, written: Written, shard_size: int, rank: int, world: int):
        self.written, self.shard_size, self.rank, self.world = written, shard_size, rank, world
        self.absent = (shard for shard in itertools.count() if shard not in written.counts)
        self.waiting: dict[int, list[ShardImage]] = {}  # the shards that are being read
        self.counts, self.images = dict(written.counts), 0  # how many images each shard has, and the source

    def items(self, records: Iterable[Record], progress: Progress) -> Iterator[tuple[int, object, str]]:
        """Yields (shard, image, name) of each image that this rank has to compute."""
        new: list[Record] = []
        for record in records:
            self.images += 1
            shard, whole = self.written.place(record)
            if shard is None:
                new.append(record)
            elif whole and self._is_mine(shard):
                if self.written.is_same(shard, whole):
                    progress.kept += len(whole)
                else:
                    yield from self._begin(shard, whole)
            while self.written.missing == 0 and len(new) >= self.shard_size:  # until then the source may be another one
                yield from self._begin(next(self.absent), new[: self.shard_size])
                del new[: self.shard_size]
        if gone := self.written.gone() if self.images else []:
            advice = "bring them back, give another --output, or --resume never to embed all again"
            said = f"{len(gone)} images in {self.written.folder} are no longer in the source ({first_of(gone)})"
            raise InputError(f"{said}; nothing new was embedded; {advice}")
        for first in range(0, len(new), self.shard_size):
            yield from self._begin(next(self.absent), new[first : first + self.shard_size])

    def empty(self) -> Iterator[int]:
        """Yields this rank's absent shards below the last one, whose images are gone since."""
        return filter(self._is_mine, itertools.takewhile(lambda shard: shard < max(self.counts), self.absent))

    def _begin(self, shard: int, part: list[Record]) -> Iterator[tuple[int, object, str]]:
        self.counts[shard] = len(part)
        if self._is_mine(shard):
            self.waiting[shard] = [ShardImage(record) for record in part]
            yield from ((shard, image, image.id) for image in list(self.waiting[shard]))

    def _is_mine(self, shard: int) -> bool:
        return shard % self.world == self.rank


def read(folder: str | Path) -> tuple[list[str], np.ndarray]:
    """Returns (ids, vectors (n, D) fp32) of the images that could be read, shard by shard.

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
        paths = paths_of(folder, shard)
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
            raise other_job(folder, shard)
        ids += [name for name, row in zip(table.column("id").to_pylist(), rows) if row is not None]
        vectors.append(found)
    return ids, np.concatenate(vectors)


def describe(embedder: Embedder) -> dict:
    """The manifest's record of an Embedder: everything that its vectors depend on, and the versions."""
    model, dtype = embedder.backbone.model, embedder.dtype or next(embedder.backbone.model.parameters()).dtype
    device = torch.cuda.get_device_name(embedder.device) if embedder.device.type == "cuda" else embedder.device.type
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


def _job(manifest: dict) -> bytes:
    """A hash of all in a manifest that must be the same for all vectors of a job."""
    common = {name: value for name, value in manifest.items() if name not in (*MAY_DIFFER, *TOTALS)}
    return hashlib.sha256(json.dumps(common, sort_keys=True).encode()).hexdigest().encode()


def _manifest_of(folder: Path) -> dict | None:
    """The content of a folder's manifest, None without one. Raises InputError for any other file."""
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
    """Returns the folder's manifest, or writes this one. Raises InputError if it is another job's."""
    before, now = _manifest_of(folder), json.loads(json.dumps(manifest))
    if before is None:
        if shards_in(folder):
            raise InputError(f"{folder} holds embeddings without {MANIFEST}; give another --output, or --resume never")
        _write_manifest(folder, manifest, rank)
        return now
    for name, value in now.items():
        if name not in MAY_DIFFER and before.get(name) != value:
            what = f"with {name} {both_ends(json.dumps(before.get(name)))}, not {both_ends(json.dumps(value))}"
            what = "of other weights" if name == "weights_sha256" else what
            advice = "give another --output, or --resume never to start again"
            raise InputError(f"{folder} holds embeddings {what}; {advice}")
    for name in MAY_DIFFER:
        if before.get(name) != now[name]:
            said = f"{json.dumps(before.get(name))} before, {json.dumps(now[name])} now"
            logger.warning("%s: %s; vectors may differ from shard to shard by rounding", name, said)
    return before


def _totals(plan: _Plan, before: dict) -> dict:
    """The entries TOTALS of a job that has ended. before: the manifest of the job's last run."""
    counts = plan.counts
    ends = {before.get("shards", 0), *itertools.accumulate(part["shards"] for part in before.get("parts", []))}
    ends = [*sorted(end for end in ends if 0 < end <= max(counts)), max(counts) + 1]
    parts = [dict(images=sum(counts.get(i, 0) for i in range(a, b)), shards=b - a) for a, b in zip([0, *ends], ends)]
    return dict(images=plan.images, shards=ends[-1], parts=parts)


def _write_manifest(folder: Path, content: dict, rank: int) -> None:
    with staged(folder, folder / MANIFEST, name=f"manifest-{rank}-") as scratch:
        (scratch / MANIFEST).write_text(json.dumps(content, indent=2) + "\n")


def _remove(folder: Path, pattern: re.Pattern, rank: int, world: int) -> None:
    """Removes the files, or scratch folders, of the shards that this process computes."""
    for name in os.listdir(folder):
        if (found := pattern.fullmatch(name)) and int(found[2]) % world == rank:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
