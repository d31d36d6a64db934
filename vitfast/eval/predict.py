"""Classes and probabilities of image files, as a stream: only a few batches are in memory."""

import csv
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO

import numpy as np
import torch
from torch import Tensor, nn

from ..data.images import Reading, printable, read_rgb
from ..data.loader import loaded
from ..data.packing import NATIVE_AT_ONCE, Native
from ..data.samples import ONE, PADDING, Samples, stack
from ..data.sources import Source
from ..data.transforms import transforms
from ..data.workers import loader_processes
from ..errors import InputError
from ..model.baselines import sizes
from ..model.graphs import Graphed, check_device
from ..ops.packed import PackedImages
from ..run.config import Config
from ..run.device import autocast_dtype
from .accuracy import check_sizes, cut_as_told, logits_of

FORMULA, NUMBER = re.compile(r"[=+\-@\t\r\n]"), re.compile(r"[+-]?\d+(\.\d+)?(e[+-]?\d+)?", re.IGNORECASE)


class Files(Source):
    """Image files without labels, by their paths."""

    def __init__(self, reading: Reading):
        self.reading = reading

    def __getitem__(self, path: str):
        return read_rgb(path, printable(path), self.reading), 0


@torch.inference_mode()
def best_classes(
    model: Callable[..., Tensor],
    images: Tensor | list[PackedImages],
    device: torch.device,
    dtype: torch.dtype | None,
    count: int,
    sigmoid: bool,
) -> tuple[list, list]:
    """(classes, probabilities): for each image a list of `count` of them, the best first."""
    try:
        logits = logits_of(model, images, device, dtype)
    except torch.OutOfMemoryError:
        patches = () if isinstance(images, Tensor) else [len(packed.patches) for packed in images]
        many = f"{max(patches)} patches" if patches else f"{len(images)} images"
        raise InputError(f"out of memory with {many} at once; give a smaller --batch-size") from None
    probabilities = logits.sigmoid() if sigmoid else logits.softmax(-1)
    classes = logits.topk(count).indices  # the largest logits: probabilities saturate
    return classes.tolist(), probabilities.gather(-1, classes).tolist()


def predict(
    model: nn.Module,
    paths: Iterable[str],
    config: Config | None = None,
    *,
    top_k: int = 5,
    sigmoid: bool = False,
    graphs: bool = False,
) -> Iterator[dict]:
    """For each image file, in order, its best classes as the model sees them: a generator of records.

        dict(image=path, predictions=[dict(label="cat", probability=0.98), ...])    # top_k, or as many as classes
        dict(image=path, error=why)                                                 # of one that cannot be read

    Labels are the model's `class_names`, or class numbers if it has none. Images are transformed as by `vitfast eval`,
    on the CPU; the model, a ViT or a baseline, runs on its present device and is set to eval. config: only
    eval_batch_size, amp, workers, exif_orientation, max_pixels, crop_mode and crop_pct (unset: the model's), sizes and
    tokens_per_step matter. sigmoid: each class gets a probability of its own, so they need not sum to 1. graphs:
    full batches, and all of sizes="native", run as CUDA graphs (vitfast.graphed). Raises InputError if the model has no
    head, its device too little memory or, with `graphs`, is no GPU.
    """
    config = cut_as_told(config or Config(task="eval"), model)
    check_sizes(model, config)
    if not model.num_classes or not getattr(model, "global_pool", "token"):
        raise InputError("the model has no classification head; fine-tune it first (vitfast finetune)")
    if top_k < 1:
        raise InputError(f"top_k must be at least 1, got {top_k}")
    if graphs:
        check_device("graphs", next(model.parameters()).device)
    names = model.class_names or range(model.num_classes)
    return _records(model.eval(), iter(paths), config, names, min(top_k, model.num_classes), sigmoid, graphs)


def _records(
    model: nn.Module, paths: Iterator[str], config: Config, names, count: int, sigmoid: bool, graphs: bool
) -> Iterator[dict]:
    device, (img_size, patch_size) = next(model.parameters()).device, sizes(model)
    dtype, native = autocast_dtype(config.amp, device), Native.of(config, img_size, patch_size)
    if native is None:
        size, held, transform = config.eval_batch_size, None, transforms(config, img_size, model.mean)[1]
        together = stack
    else:
        size, held, transform, together = NATIVE_AT_ONCE, native.batch_bytes, native.transform, native.pack
    source = Files(Reading.of(config, patch_size))
    samples = Samples(source, transform, None, blank=(np.zeros((3, *img_size), np.uint8), PADDING))
    first = list(itertools.islice(paths, size))
    # A single batch needs no processes.
    workers = loader_processes(config, img_size, size, ONE, held) if len(first) == size else 0
    paths, read = itertools.tee(itertools.chain(first, paths))
    keys = iter(lambda: [(0, path) for path in itertools.islice(read, size)], [])
    captured = Graphed(model) if graphs else model
    for images, labels, unreadable in loaded(samples, keys, together, workers, device):
        run = captured if native or len(images) == size else model
        found, reasons = zip(*best_classes(run, images, device, dtype, count, sigmoid)), iter(unreadable)
        for path, label, (classes, probabilities) in zip(itertools.islice(paths, len(labels)), labels.tolist(), found):
            error = next(reasons) if label == PADDING else ""
            if not error and not all(map(math.isfinite, probabilities)):
                error = f"{path}: the model's output is not a number in amp={config.amp}"
            if error:
                yield dict(image=path, error=error)
                continue
            pairs = zip(classes, probabilities)
            yield dict(image=path, predictions=[dict(label=names[k], probability=p) for k, p in pairs])


def write_csv(records: Iterable[dict], file: TextIO, count: int) -> None:
    """Writes rows `image, label_1, probability_1, ...` of `count` classes; an error's has the image only.

    A spreadsheet would run a cell such as =cmd() as a formula. So a path that begins like one is written with ./ before
    it, which names the same file, and a label with an apostrophe before it (OWASP, "CSV injection").
    """
    writer = csv.writer(file)
    writer.writerow(["image", *(f"{name}_{i + 1}" for i in range(count) for name in ("label", "probability"))])
    for record in records:
        best = [(_as_text(p["label"], "'"), f"{p['probability']:.6g}") for p in record.get("predictions", ())]
        writer.writerow([_as_text(record["image"], "./"), *itertools.chain(*(best or [("", "")] * count))])


def _as_text(value: str | int, mark: str) -> str:
    """A value as a cell, with a mark before it where it begins like a formula and is no number."""
    text = str(value)
    return f"{mark}{text}" if FORMULA.match(text) and not NUMBER.fullmatch(text) else text


def write_json(records: Iterable[dict], file: TextIO) -> None:
    """Writes a JSON list with a line for each record."""
    file.write("[")
    for number, record in enumerate(records):
        file.write(("," if number else "") + "\n" + json.dumps(record))
    file.write("\n]\n")
