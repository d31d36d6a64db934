"""The answers of a model to the images of a validation set, and the classes that it confuses."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ..data.loader import Data
from ..data.samples import ONE, PADDING
from ..data.sources import Subset, evenly
from .accuracy import logits_of, of_all_ranks


@dataclass
class Answers:
    """The most probable class of each of the n validation images that could be read; all on the CPU.

    index (n,): the places of the images in the set. labels: class numbers (n,), or (n, K) bool if images have any
    number of classes; named is (n, K) bool then, where a probability is above one half.
    """

    index: Tensor
    found: Tensor  # (n,)
    probability: Tensor  # (n,) that of the most probable class
    labels: Tensor
    named: Tensor | None = None

    def __len__(self) -> int:
        return len(self.found)

    @property
    def right(self) -> Tensor:
        """Whether the most probable class of each image is (one of) its own, (n,) bool."""
        if self.named is None:
            return self.found == self.labels
        return self.labels.gather(1, self.found[:, None])[:, 0]

    @property
    def wrong(self) -> Tensor:
        """Places among the n of the images that are classified wrongly, the most confident answer first."""
        places = (~self.right).nonzero()[:, 0]
        return places[self.probability[places].argsort(descending=True, stable=True)]

    def by_class(self, classes: int) -> tuple[np.ndarray, np.ndarray]:
        """(images, right answers) of each class, for images of one class."""
        return tuple(part.bincount(minlength=classes).numpy() for part in (self.labels, self.labels[self.right]))

    def confusion(self, classes: int) -> np.ndarray:
        """How many images of each class (row) got each answer (column)."""
        return (self.labels * classes + self.found).bincount(minlength=classes**2).reshape(classes, classes).numpy()

    def confused(self, count: int) -> list[tuple[int, int, int]]:
        """The `count` most confused pairs: (class, answer, images), most images first."""
        pairs = torch.stack([self.labels, self.found], 1)[~self.right]
        pairs, images = pairs.unique(dim=0, return_counts=True)
        most = images.argsort(descending=True, stable=True)[:count]
        return [(*pairs[i].tolist(), int(images[i])) for i in most]


class Collector:
    """Collects the answers of an evaluation.

    `add` is an `on_logits` of `evaluate`, and `gather` comes after it. objective: with "sigmoid" each class has a
    probability by itself, with "softmax" they share 1.
    """

    def __init__(self, objective: str):
        self.sigmoid, self.batches = objective == "sigmoid", []

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Adds a batch: logits (B, K); labels (B,) or zeros and ones (B, K), PADDING if it does not count."""
        found = logits.argmax(-1, keepdim=True)  # the largest logits: probabilities saturate
        probabilities = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        columns = [found, probabilities.gather(-1, found), labels if labels.dim() == 2 else labels[:, None]]
        columns += [logits > 0] if labels.dim() == 2 else []
        self.batches.append(torch.cat([column.float() for column in columns], 1))  # exact for up to 2^24 classes

    def gather(self, data: Data) -> Answers:
        """The answers of all ranks; every rank must call this."""
        rows = of_all_ranks(torch.cat(self.batches), data.ranks)
        index = (rows[:, 2] != PADDING).nonzero()[:, 0]
        found, probability, labels = rows[index].tensor_split([1, 2], 1)
        labels, named = labels.bool().chunk(2, 1) if data.multi_label else (labels[:, 0].long(), None)
        return Answers(index, found[:, 0].long(), probability[:, 0], labels, named)


@torch.no_grad()
def look(model: nn.Module, data: Data, most: int) -> Answers:
    """The answers to at most `most` validation images, evenly spread over the set.

    model: in eval mode, with a head.
    """
    chosen, collector = evenly(len(data.val), most), Collector(data.config.objective)
    data = dataclasses.replace(data, ranks=ONE)
    for images, labels, _ in data.in_order(Subset(data.val, chosen)):
        collector.add(logits_of(model, images, data.device, data.dtype), labels.to(data.device))
    answers = collector.gather(data)
    answers.index = torch.tensor(chosen)[answers.index]
    return answers
