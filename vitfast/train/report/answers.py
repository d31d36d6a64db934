"""The sections on a model's answers: classes, confused pairs, wrong images."""

import dataclasses
import io
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from ...data.images import printable
from ...data.loader import Data
from ...data.samples import ONE, counts
from ...data.sources import Subset, evenly
from ...eval.answers import Answers
from ...eval.inspect.page import columns, fold, gallery, matrix, picture

SHOWN, OPEN = 200, 24  # how many wrong images are shown, and how many of them not folded
THUMBNAIL = 96  # pixels of the longer side: the pictures stay under 3 MB, whatever is in them
WHOLE = 30  # the most classes that tables and the matrix show whole
LISTED = 1000  # the most classes that a folded table lists
PAIRS = 10


def answer_sections(answers: Answers, data: Data) -> dict[str, tuple[str, str]]:
    """The sections, by their headings."""
    sections = {"Classes": _classes(answers, data)}
    if answers.named is None:
        if len(data.classes) <= WHOLE:
            note = "Rows are the true classes, columns the answers. The colour is the share of the row."
            sections["Confusion matrix"] = note, matrix(answers.confusion(len(data.classes)), data.classes)
        if pairs := answers.confused(PAIRS):
            sections["Most confused pairs"] = _pairs(pairs, answers, data)
    return sections | {"Wrong answers": _wrong(answers, data)}


def _classes(answers: Answers, data: Data) -> tuple[str, str]:
    """The classes: their names, their numbers of images, and how often each is recognised."""
    names, trained = data.classes, _training_counts(data)
    if answers.named is None:
        header, (images, right) = ("accuracy",), answers.by_class(len(names))
        shares = [right / np.maximum(1, images)]
    else:
        header, both = ("found", "right where named"), answers.labels & answers.named
        images, named, both = (each.sum(0).numpy() for each in (answers.labels, answers.named, both))
        shares = [both / np.maximum(1, images), both / np.maximum(1, named)]
    known = (trained, images) if trained is not None else (images,)
    header = ("class", "training images", "validation images")[:: 1 if trained is not None else 2] + header

    def rows(chosen) -> list[tuple[str, ...]]:
        totals = (images, images if answers.named is None else named)
        told = (tuple(f"{s[k]:.1%}" if of[k] else "" for s, of in zip(shares, totals)) for k in chosen)
        return [(names[k], *(f"{each[k]:,}" for each in known), *shown) for k, shown in zip(chosen, told)]

    note = f"Each of the {len(names):,} classes has {_spread(images)} of {looked_at(answers, data)} validation images"
    note += f" and {_spread(trained)} of {len(data.train):,} training images." if trained is not None else "."
    if answers.named is not None:
        note += " Found: images of the class that get a probability above one half for it. Right where named: images "
        note += "with such a probability that are of the class."
    if len(names) <= WHOLE:
        return note, columns(header, rows(range(len(names))))
    present = np.flatnonzero(images)
    worst = present[np.argsort(shares[0][present], kind="stable")][:WHOLE]
    text = columns(header, rows(worst))
    if len(names) <= LISTED:
        text += fold(f"All {len(names):,} classes", columns(header, rows(range(len(names)))))
    return f"{note} The {len(worst)} worst:", text


def _training_counts(data: Data) -> np.ndarray | None:
    """How many training images each class has; None if they would have to be read for that."""
    labels = data.train.labels
    if labels is None:
        return None
    labels = itertools.chain.from_iterable(labels) if data.multi_label else labels
    return np.bincount(np.fromiter(labels, np.int64), minlength=len(data.classes))


def _spread(images: np.ndarray) -> str:
    low, high = images.min(), images.max()
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _pairs(pairs: list[tuple[int, int, int]], answers: Answers, data: Data) -> tuple[str, str]:
    images = answers.by_class(len(data.classes))[0]
    rows = [(data.classes[a], data.classes[b], f"{n:,}", f"{n / images[a]:.1%}") for a, b, n in pairs]
    return "", columns(("true class", "answer", "images", "share of the true class"), rows, left=2)


def _wrong(answers: Answers, data: Data) -> tuple[str, str]:
    """The wrongly classified images, up to SHOWN of them, the most confident first."""
    wrong, looked, pictures = answers.wrong, looked_at(answers, data), []
    shown = wrong[:SHOWN]
    for i, image in zip(shown.tolist(), images_at(data, answers.index[shown].tolist())):
        truth = answers.labels[i].nonzero()[:, 0].tolist() if data.multi_label else [int(answers.labels[i])]
        names = ", ".join(data.classes[k] for k in truth) or "of no class"
        caption = f"{data.classes[answers.found[i]]} {answers.probability[i]:.0%}, is {names}{_place(answers, data, i)}"
        pictures.append((thumbnail(image, f"validation image, {names}"), caption, True))
    if not len(wrong):
        return f"The answers to {looked} validation images are all right.", ""
    many = f"Of {looked} validation images, {len(wrong):,} {'is' if len(wrong) == 1 else 'are'} classified wrongly"
    these = "" if len(shown) == len(wrong) else f"; these are {len(shown)} of them"
    order = "Each shows the answer with its probability and the true class; the most confident answers come first."
    rest = fold(f"{len(pictures) - OPEN} more", gallery(pictures[OPEN:])) if pictures[OPEN:] else ""
    return f"{many}{these}. {order}", gallery(pictures[:OPEN]) + rest


def _place(answers: Answers, data: Data, number: int) -> str:
    """A line with the name of an answer's image, without the folder of the data."""
    name = data.val.name(int(answers.index[number]))
    return "\n" + name.removeprefix(printable(str(Path(data.config.data))) + "/")


def looked_at(answers: Answers, data: Data) -> str:
    """How many validation images got an answer, and of how many where that is not all."""
    return f"{len(answers):,}" if len(answers) == len(data.val) else f"{len(answers):,} of the {len(data.val):,}"


def images_at(data: Data, indices: list[int]) -> Iterator[Tensor]:
    """The validation images at these indices as the model reads them, uint8 (C, H, W)."""
    config = dataclasses.replace(data.config, eval_batch_size=16)
    data = dataclasses.replace(data, config=config, workers=0, ranks=ONE)
    for images, _, _ in data.in_order(Subset(data.val, indices)) if indices else ():
        yield from images


def first_images(data: Data, count: int) -> Tensor:
    """`count` validation images (n, C, H, W) that can be read, evenly spread."""
    source = Subset(data.val, evenly(len(data.val), count))
    config = dataclasses.replace(data.config, eval_batch_size=count)
    images, labels, _ = next(iter(dataclasses.replace(data, config=config, workers=0, ranks=ONE).in_order(source)))
    return images[counts(labels)]


def thumbnail(image: Tensor, alt: str) -> str:
    """An <img> of a uint8 (C, H, W) image, in the format that is smaller."""
    small, files = to_pil_image(image), (io.BytesIO(), io.BytesIO())
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    small.save(files[0], "png")
    small.save(files[1], "jpeg", quality=80)
    return picture(min((file.getvalue() for file in files), key=len), alt)
