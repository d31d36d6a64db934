"""The sections on a model's answers: classes, confused pairs, wrong images."""

import dataclasses
import io
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from ...data.images import printable
from ...data.loader import Data
from ...data.samples import ONE, counts
from ...data.shards import Shards
from ...data.sources import Source, Subset, evenly
from ...eval.accuracy import Answers
from ...eval.inspect.page import columns, fold, gallery, matrix, picture

SHOWN, OPEN = 200, 24  # wrong images; those of them that are not folded
THUMBNAIL = 96  # pixels of the longer side: the pictures stay under 3 MB, whatever is in them
WHOLE = 30  # classes that the matrix shows, and that the table shows without a click
LISTED = 1000  # classes that the table lists
PAIRS = 10


def answer_sections(answers: Answers, data: Data) -> dict[str, tuple[str, str]]:
    """The sections, by their headings."""
    sections = {"Classes": _classes(answers, data)}
    if answers.named is None:
        if len(data.classes) <= WHOLE:
            note = "Rows are the true classes, columns the answers. The colour is the share of the row."
            sections["Confusion matrix"] = note, matrix(answers.confusion(len(data.classes)), data.classes)
        rows = [(data.classes[a], data.classes[b], f"{n:,}") for a, b, n in answers.confused(PAIRS)]
        if rows:
            sections["Most confused pairs"] = "", columns(("true class", "answer", "images"), rows, left=2)
    return sections | {"Wrong answers": _wrong(answers, data)}


def _classes(answers: Answers, data: Data) -> tuple[str, str]:
    """The names of the classes, their numbers of images, and how well each is told; the worst first, where many."""
    from sklearn.metrics import precision_recall_fscore_support

    names, labels = data.classes, data.train.labels
    several = answers.named is not None
    truth, told = answers.labels.numpy(), (answers.named if several else answers.found).numpy()
    options = dict(labels=range(len(names)), zero_division=np.nan)
    precision, recall, _, images = precision_recall_fscore_support(truth, told, **options)
    trained = np.zeros(len(names), int)
    if labels is not None:  # else only reading the images would tell
        flat = itertools.chain.from_iterable(labels) if several else labels
        trained = np.bincount(np.fromiter(flat, np.int64), minlength=len(names))
    chosen = range(len(names)) if len(names) <= WHOLE else np.argsort(recall, kind="stable")[:LISTED]
    rows = [
        (
            names[k],
            f"{trained[k]:,}" if labels is not None else "",
            f"{images[k]:,}",
            *("" if np.isnan(share) else f"{share:.1%}" for share in (recall[k], precision[k])),
        )
        for k in chosen
    ]
    header = ("class", "training images", "validation images", "accuracy", "precision")
    note = "Accuracy is the share of its images that are told to be of the class, precision the share of the images "
    note += "told to be of the class that are."
    note += " An image is told to be of a class with a probability above one half." if several else ""
    more = fold(f"{len(rows) - WHOLE:,} more", columns(header, rows[WHOLE:])) if len(rows) > WHOLE else ""
    return note, columns(header, rows[:WHOLE]) + more


def _wrong(answers: Answers, data: Data) -> tuple[str, str]:
    """The wrongly classified images, up to SHOWN of them, the most confident first."""
    wrong, looked = answers.wrong, f"{len(answers):,}"
    if len(answers) != len(data.val):
        looked += f" of the {len(data.val):,}"
    if not len(wrong):
        return f"The answers to {looked} validation images are all right.", ""
    note = f"Of {looked} validation images, {len(wrong):,} {'is' if len(wrong) == 1 else 'are'} classified wrongly"
    if isinstance(data.val, Shards):
        return f"{note}. They are not shown, because the data is read in order.", ""
    pictures, shown = [], wrong[:SHOWN].tolist()
    folder = printable(str(Path(data.config.data))) + "/"
    for i, (image, _) in zip(shown, images_of(data, Subset(data.val, answers.index[shown].tolist()), 16)):
        truth = answers.labels[i].nonzero()[:, 0].tolist() if data.multi_label else [int(answers.labels[i])]
        names = ", ".join(data.classes[k] for k in truth) or "of no class"
        name = data.val.name(int(answers.index[i])).removeprefix(folder)
        caption = f"{data.classes[answers.found[i]]} {answers.probability[i]:.0%}, is {names}\n{name}"
        pictures.append((thumbnail(image, f"validation image, {names}"), caption))
    note += "" if len(shown) == len(wrong) else f"; these are {len(shown)} of them"
    order = "Each shows the answer with its probability and the true class; the most confident answers come first."
    rest = fold(f"{len(pictures) - OPEN} more", gallery(pictures[OPEN:])) if pictures[OPEN:] else ""
    return f"{note}. {order}", gallery(pictures[:OPEN]) + rest


def images_of(data: Data, source: Source, batch_size: int) -> Iterator[tuple[Tensor, bool]]:
    """Validation images as the model reads them, uint8 (C, H, W), and whether each could be read."""
    config = dataclasses.replace(data.config, eval_batch_size=batch_size)
    data = dataclasses.replace(data, config=config, workers=0, ranks=ONE)
    for images, labels, _ in data.in_order(source):
        yield from zip(images, counts(labels).tolist())


def first_images(data: Data, count: int) -> Tensor:
    """`count` validation images (n, C, H, W), without those that cannot be read.

    They are evenly spread over the set, or the first of Shards.
    """
    source = data.val if isinstance(data.val, Shards) else Subset(data.val, evenly(len(data.val), count))
    return torch.stack([image for image, read in itertools.islice(images_of(data, source, count), count) if read])


def thumbnail(image: Tensor, alt: str) -> str:
    """An <img> of a uint8 (C, H, W) image."""
    small = to_pil_image(image)
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    small.save(file := io.BytesIO(), "jpeg", quality=80)
    return picture(file.getvalue(), alt)
