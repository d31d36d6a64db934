"""Predicted steps of the presets by the port model (ports.py), from the table that `make codegen` writes; none of them was measured."""

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
RANGE = 2  # a batch may be this many times larger or smaller than the table's: in between, kernels are taken to grow with the images


def source_hash() -> str:
    """sha256 over the files with kernels and tiles, not those that call libraries."""
    digest = hashlib.sha256()
    for path in sorted(KERNELS.glob("*.py")):
        if b"import triton" in path.read_bytes() or path.name == "tile_rules.py":
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def step(model: ViT, gpu: str, batch: int, parts: int = 1) -> dict | None:
    """Seconds of a "training" step of AdamW, and of an "inference", on `parts` times `batch` images, and their "source" in words.

    None for what the table was not made for: it holds presets in bf16 as they are, on H100 and H200, with keep="least", at one batch each.
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
            constant = row["what"] == UPDATE
            grown = launches + max(0.0, whole - launches) * batch / int(row["batch_size"])
            seconds[row["direction"]] += whole if constant else parts * grown
    about = (
        f"predicted by the port model, not measured; keep='least', {made.partition('; ')[2].partition('; written')[0]}"
    )
    stale = "" if f"kernels {source_hash()}," in made else " (stale: the kernels have changed since)"
    return dict(seconds, source=about + stale)


def _is(model: ViT, row: dict) -> bool:
    """Whether a row is of this very model: sizes first, then all that a preset says."""
    tokens = model.num_prefix_tokens + model.patch_embed.num_patches
    if (model.embed_dim, len(model.blocks), tokens) != tuple(int(row[name]) for name in ("width", "depth", "tokens")):
        return False
    return _plain(model) == _of_preset(row["preset"], int(row["img_size"]))


@functools.cache
def _of_preset(name: str, img_size: int) -> dict:
    with torch.device("meta"):
        return _plain(ViT.from_preset(name, img_size=img_size))


def _plain(model: ViT) -> dict:
    """The arguments that make a model, without those that only start it or read raw images."""
    return {k: v for k, v in model.config.items() if k not in ("weight_init", "head_init_bias", "mean", "std")} | dict(
        img_size=model.patch_embed.img_size
    )
