"""Sources of images with their labels, and parts of them."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from .images import DEFAULT, read_rgb

UNNAMED = "images"  # the one class of images without classes, in training without labels


class Source:
    """Images with labels by index: `source[i] -> (image, label)`.

    Images are PIL's, or uint8 (C, H, W) where they are `transformed`, that is, cropped and resized already. Labels are
    class numbers, or vectors of zeros and ones where an image has any number of classes (`multi_label`).
    """

    where: str = ""  # the folder, the shards or the split, in messages
    classes: Sequence[str] = ()  # their names; empty where the data only numbers them, until `settle_classes`
    labels: list | None = None  # one for each image, where they are known without reading images
    numbers: dict | None = None  # label as the data has it -> class number, for `labels` that are not known
    shards: tuple[int, ...] = ()  # how many images lie in each file of several images, in their order
    transformed = multi_label = False
    reading = DEFAULT  # how its images are read

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        return read_rgb(self.content(index), self.name(index), self.reading), self.label(index)

    def label(self, index: int) -> int | np.ndarray:
        """The class of an image, or (K,) float32 zeros and ones."""
        if not self.multi_label:
            return self.labels[index]
        target = np.zeros(len(self.classes), np.float32)
        target[list(self.labels[index])] = 1
        return target

    def renumber(self, places: list[int], classes: list[str]) -> None:
        """Gives class k the number places[k] among other classes."""
        if self.multi_label:
            self.labels = [tuple(places[k] for k in some) for some in self.labels]
        elif self.labels is not None:
            self.labels = [places[k] for k in self.labels]
        if self.numbers is not None:
            self.numbers = {label: places[k] for label, k in self.numbers.items()}
        self.classes = classes

    def name(self, index: int) -> str:
        """The name of an image in messages."""
        return f"image {index}"

    def path(self, index: int) -> str:
        """The name of an image that does not depend on where the data lies: its path from the root."""
        return str(index)

    def content(self, index: int) -> object:
        """The path, bytes or object that holds an image, as `identity.stamp` takes it; None if unknown."""


class Subset(Source):
    """The images of a source at these indices."""

    def __init__(self, source: Source, indices: list[int]):
        if isinstance(source, Subset):
            source, indices = source.source, [source.indices[i] for i in indices]
        self.source, self.indices, self.classes, self.where = source, indices, source.classes, source.where
        self.transformed, self.multi_label = source.transformed, source.multi_label

    @property
    def labels(self) -> list | None:
        known = self.source.labels
        return None if known is None else [known[i] for i in self.indices]

    @property
    def shards(self) -> tuple[int, ...]:
        if not self.source.shards or any(a > b for a, b in itertools.pairwise(self.indices)):
            return ()
        return tuple(np.diff(np.searchsorted(self.indices, np.cumsum((0, *self.source.shards)))).tolist())

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int):
        return self.source[self.indices[index]]

    def name(self, index: int) -> str:
        return self.source.name(self.indices[index])

    def path(self, index: int) -> str:
        return self.source.path(self.indices[index])

    def content(self, index: int) -> object:
        return self.source.content(self.indices[index])


def evenly(length: int, most: int) -> list[int]:
    """At most `most` of the indices of a sequence, evenly spread, its first and its last among them."""
    return np.unique(np.linspace(0, length - 1, min(most, length)).round().astype(int)).tolist()


def split(source: Source, count: Callable[[int], int], seed: int = 0) -> tuple[Subset, Subset]:
    """(chosen, rest): count(n) of the n images of each class are chosen, at random but always the same.

    Where an image has any number of classes, count(n) of all n images are chosen.
    """
    by_class: dict[int, list[int]] = {}
    labels = [0] * len(source) if source.multi_label else source.labels
    if labels is None:
        labels = [source[i][1] for i in range(len(source))]  # reads the images, as there is no other way
    for index, label in enumerate(labels):
        by_class.setdefault(label, []).append(index)
    chosen = []
    for indices in by_class.values():
        order = torch.randperm(len(indices), generator=torch.Generator().manual_seed(seed)).tolist()
        chosen += [indices[i] for i in order[: count(len(indices))]]
    rest = set(range(len(source))).difference(chosen)
    return Subset(source, sorted(chosen)), Subset(source, sorted(rest))
