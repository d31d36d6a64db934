"""The data of a run: recorded with each checkpoint, and compared between ranks and on resuming.

Where the data lies does not matter. A checkpoint holds the classes and the `fingerprint` of both splits, and for each
image its file's time of modification and its `content_hash`, as the first rank has them; other ranks may read copies.
"""

import logging
from pathlib import Path

import numpy as np
from safetensors import safe_open

from ..data.classes import first_of
from ..data.identity import UNKNOWN, described, fingerprint, hash_contents, replaced
from ..data.loader import Data
from ..data.samples import WINDOW
from ..data.sources import Source
from ..errors import InputError
from ..run.config import changes
from .resume import reading

CHANGED = dict(paths="files renamed or moved", labels="files of other classes", sizes="files of other sizes")
CHANGED |= dict(shards="images spread over other shards")
SPLITS = dict(train="training images", val="validation images")
WAIT = 5.0  # seconds that a run waits for the hashes of a split; the rest is hashed while it trains
logger = logging.getLogger("vitfast")


def run_data(data: Data, record: dict, checkpoint: Path | None) -> tuple[dict, dict[str, np.ndarray]]:
    """(the record of a run's data; SPLIT_modified and SPLIT_hashes of its images, (N,) int64).

    Some hashes may be UNKNOWN at first. record: that of the checkpoint that the run goes on from, or {}. Every
    rank asks for the size of each file. Raises InputError where ranks differ in the data or in the step of the
    checkpoint, and where the checkpoint has other data.
    """
    facts, listed = {"step to go on from": record.get("step"), "classes": list(data.classes)}, {}
    index, images = dict(classes=list(data.classes)), {}
    sources = dict(train=data.train, val=data.val)
    for split, source in sources.items():
        found, times = fingerprint(source)
        found["shards"] = str(source.shards) if len(source) > WINDOW else ""  # `epoch_order` depends on them
        index |= {f"{split}_images": len(source)} | {f"{split}_{kind}": value for kind, value in found.items()}
        images |= {f"{split}_modified": times, f"{split}_hashes": np.full_like(times, UNKNOWN)}
        facts[SPLITS[split]] = [len(source), found]
        listed[SPLITS[split]] = lambda source=source: [described(source, index)[:3] for index in range(len(source))]
    data.ranks.check_same(facts, listed)

    def of_first() -> None:
        if record:
            check_data(record["data"], index, checkpoint)
            _check_contents(sources, images, checkpoint)
        for split, source in sources.items():
            hashes = images[f"{split}_hashes"]
            hash_contents(source, np.flatnonzero(hashes == UNKNOWN).tolist(), hashes, WAIT)

    data.ranks.on_first(of_first)
    return index, images


def check_data(saved: dict, now: dict, checkpoint: Path) -> None:
    """Raises InputError where the data of a run (the record that `run_data` makes) is not what it was."""
    found, classes = [], list(map(str, saved["classes"]))
    if classes != now["classes"]:
        there, here = set(classes), set(now["classes"])
        sides = dict(gone=[c for c in classes if c not in here], new=[c for c in now["classes"] if c not in there])
        named = [f"{first_of(names)} {word}" for word, names in sides.items() if names]
        found.append(f"classes: {', '.join(named) or 'another order'}")
    for name in (f"{split}_images" for split in SPLITS):
        found += changes({name: saved.get(name)}, {name: now.get(name)})
    for split in () if found else SPLITS:
        keys = {f"{split}_{kind}": text for kind, text in CHANGED.items()}
        found += [f"{split}_images: {text}" for key, text in keys.items() if saved.get(key) != now.get(key)][:1]
    if found:
        raise _other_data(checkpoint, ", ".join(found))


def _check_contents(sources: dict[str, Source], images: dict[str, np.ndarray], checkpoint: Path) -> None:
    """Takes over the hashes that a checkpoint has of its images.

    Images that were modified at another time are read. Raises InputError for those of another content.
    """
    with reading(checkpoint), safe_open(checkpoint / "state" / "state.safetensors", "pt") as file:
        saved = {name: file.get_tensor(f"images.{name}").numpy() for name in images}
    for split, source in sources.items():
        modified, hashes = (images[f"{split}_{kind}"] for kind in ("modified", "hashes"))
        hashes[:] = saved[f"{split}_hashes"]
        other = replaced(source, modified, saved[f"{split}_modified"], hashes)
        if len(other):
            names = first_of([source.path(index) for index in other[:4]])
            raise _other_data(checkpoint, f"{split}_images: files replaced by others of equal size: {names}")


def _other_data(checkpoint: Path, what: str) -> InputError:
    advice = f"restore it, or start a new run from the weights: --weights {checkpoint} and another --output"
    return InputError(f"the data is not what {checkpoint} was trained on ({what}); {advice}")
