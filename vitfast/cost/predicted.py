"""Steps of the presets as the port model predicts them, read from a table; none was measured.

The port model: machine_code/ports.py. `make codegen` writes the table.
"""

import csv
import functools
import hashlib
from pathlib import Path

import torch

from .. import kernels
from ..machine_code import LAUNCH
from ..model import ViT

STEPS = Path(__file__).with_name("predicted.csv")
KERNELS = Path(kernels.__file__).parent
UPDATE = "clipping + update"  # the row of a step that does not grow with the batch
RANGE = 2  # a batch may be this many times larger or smaller than the table's, kernels taken to grow with the images


def source_hash() -> str:
    """sha256 over the files with kernels and tiles, not those that call libraries."""
    digest = hashlib.sha256()
    for path in sorted(KERNELS.glob("*.py")):
        if b"import triton" in path.read_bytes() or path.name in ("tile.py", "tile_rules.py", "attention_rules.py"):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def step(model: ViT, gpu: str, batch: int, micro_batches: int = 1) -> dict | None:
    """Seconds of a "training" step of AdamW and of an "inference", and their "source" in words.

    batch: images in each of the `micro_batches`.
    None for what the table was not made for: it holds presets in bf16 as they are, on H100 and H200, with keep="least",
    at one batch each.
    """
    with open(STEPS, newline="") as file:
        made = next(file)
        rows = [row for row in csv.DictReader(file) if row["gpu"] == gpu and _is(model, row)]
    if not rows or not 1 / RANGE <= batch / int(rows[0]["batch_size"]) <= RANGE:
        return None
    seconds = dict(training=0.0, inference=0.0)
    for row in rows:
        if row["what"] != "step":
            whole, launches = 1e-6 * float(row["predicted_us"]), LAUNCH * int(row["times"])
            grown = launches + max(0.0, whole - launches) * batch / int(row["batch_size"])
            seconds[row["direction"]] += whole if row["what"] == UPDATE else micro_batches * grown
    versions = made.partition("; ")[2].partition("; written")[0]
    stale = "" if f"kernels {source_hash()}," in made else " (stale: the kernels have changed since)"
    return dict(seconds, source=f"predicted by the port model, not measured; keep='least', {versions}{stale}")


def _is(model: ViT, row: dict) -> bool:
    """Whether a row is of this very model: sizes first, then all that a preset says."""
    tokens = model.num_prefix_tokens + model.patch_embed.num_patches
    if (model.embed_dim, len(model.blocks), tokens) != tuple(int(row[name]) for name in ("width", "depth", "tokens")):
        return False
    return _architecture(model) == _of_preset(row["preset"], int(row["img_size"]))


@functools.cache
def _of_preset(name: str, img_size: int) -> dict:
    with torch.device("meta"):
        return _architecture(ViT.from_preset(name, img_size=img_size))


def _architecture(model: ViT) -> dict:
    """The arguments that make a model, without those that only start it or read raw images."""
    others = ("weight_init", "head_init_bias", "mean", "std")
    return {k: v for k, v in model.config.items() if k not in others} | dict(img_size=model.patch_embed.img_size)
