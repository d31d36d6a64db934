"""The samples of a batch: which, in which order, and how they are read.

Sample and augmentation depend on (seed, epoch, sample) alone. The training samples are one endless stream: the
shuffled epochs end to end, cut into batches of exactly `batch_size`. Step k takes samples k*batch_size and on, so the
position in the data is the step, and nothing else has to be kept to resume.
"""

import functools
import itertools
import random
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import InputError
from ..run.distributed import Ranks
from .images import Unreadable
from .sources import Source

# Images uint8 (B, C, H, W); labels int64 (B,), or float32 (B, K) zeros and ones where images have several classes; the
# messages on images that could not be read, which training replaces and validation labels PADDING.
Batch = tuple[Tensor, Tensor, list[str]]
ONE = Ranks()
PADDING = -1  # the label of samples that do not count: unreadable, or (as is their epoch) filling up a last batch
WINDOW = 16_384  # places by which shuffling moves a sample of shards, at most
REPLACEMENTS = 20  # unreadable samples in a row after which a data set is given up


def mix_seed(*parts: int) -> int:
    """One 32-bit seed from several numbers."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def seed_everything(*parts: int) -> None:
    """Seeds torch, numpy and random from several numbers."""
    seed = mix_seed(*parts)
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 0.7 ms where CUDA is not initialised
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


class Samples(Dataset):
    """A map from keys (epoch, index, ...) to samples (image, label, unreadable).

    image: what the transform returns for the source's image and for the rest of the key; `stack` takes uint8
    (C, H, W). A training sample that cannot be read (`unreadable` says which and why) is replaced by the next one that
    can: the batch keeps its size, and its content depends on nothing but the data. In validation (seed None) it becomes
    the pair `blank`, whose label is PADDING. Where nothing can be read the InputError itself is returned.
    """

    def __init__(self, source: Source, transform: Callable | None, seed: int | None, blank: tuple | None = None):
        self.source, self.transform, self.seed, self.blank = source, transform, seed, blank

    def _read(self, index: int):
        """The sample at `index`, or the next readable one in training."""
        if self.seed is None:
            return *self.source[index], []
        unreadable = []
        for offset in range(REPLACEMENTS):
            try:
                return *self.source[(index + offset) % len(self.source)], unreadable
            except Unreadable as error:
                unreadable.append(str(error))
        raise InputError(f"{REPLACEMENTS} images in a row cannot be read, the first: {unreadable[0]}")

    def __getitem__(self, key: tuple):
        epoch, index, *drawn = key
        if epoch == PADDING:
            return *self.blank, []
        try:
            image, label, unreadable = self._read(index)
        except InputError as error:  # raised in the main process: a worker would wrap it in its traceback
            return (*self.blank, [str(error)]) if self.seed is None and isinstance(error, Unreadable) else error
        if self.transform is not None:
            if self.seed is not None:
                seed_everything(self.seed, epoch, index)
            image = self.transform(image, *drawn)
        return image, label, unreadable


@functools.lru_cache(3)  # samples of the two epochs before may still be waiting
def epoch_order(
    length: int, seed: int, epoch: int, sides: range = range(1), shards: tuple[int, ...] = ()
) -> tuple[list[int], list[int]]:
    """The order of the samples in an epoch, and for each position in it one of the sizes `sides`.

    shards: how many samples each of several files holds. They are then read file by file, so that a slow disk reads
    ahead: the files are shuffled, and each sample moves by up to WINDOW places.
    """
    generator = torch.Generator().manual_seed(mix_seed(seed, epoch))
    order = torch.randperm(length, generator=generator)
    if len(shards) > 1 and length > WINDOW:
        parts = torch.arange(length).split(shards)
        order = torch.cat([parts[i] for i in torch.randperm(len(parts), generator=generator)])
        moved = torch.arange(length) + WINDOW * torch.rand(length, generator=generator, dtype=torch.float64)
        order = order[moved.argsort()]
    return order.tolist(), [sides[i] for i in torch.randint(len(sides), (length,), generator=generator).tolist()]


def stream_keys(
    length: int, batch_size: int, seed: int, start: int, stop: int, ranks: Ranks = ONE, shards: tuple[int, ...] = ()
) -> Iterator[list[tuple[int, int]]]:
    """Yields for each step from `start` to `stop` the (epoch, index) of this rank's part of the batch."""
    first, last = ranks.share(batch_size)
    for step in range(start * batch_size, stop * batch_size, batch_size):
        places = [divmod(position, length) for position in range(step + first, step + last)]
        orders = {epoch: epoch_order(length, seed, epoch, shards=shards)[0] for epoch in {e for e, _ in places}}
        yield [(epoch, orders[epoch][offset]) for epoch, offset in places]


def stack(images: tuple) -> Tensor:
    """Images of one size, arrays or tensors, as one tensor."""
    return torch.from_numpy(np.stack([np.asarray(image) for image in images]))


def collate(samples: list, together: Callable = stack) -> Batch | InputError:
    """The samples of a batch, or the first error among them.

    together: makes the images of a batch out of those of its samples. Labels that are class numbers become int64 (B,),
    those that are vectors of zeros and ones float32 (B, K).
    """
    for sample in samples:
        if isinstance(sample, InputError):
            return sample
    images, labels, unreadable = zip(*samples)
    return together(images), torch.from_numpy(np.array(labels)), list(itertools.chain(*unreadable))


def counts(labels: Tensor) -> Tensor:
    """Which samples of a batch count, (B,) bool: those whose label, (B,) or (B, K), is not PADDING."""
    return (labels if labels.dim() == 1 else labels[:, 0]) != PADDING
