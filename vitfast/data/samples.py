"""The samples of a batch: which, in which order, and how they are read.

Sample and augmentation depend on (seed, epoch, sample) alone. The training samples are one endless stream: the
shuffled epochs end to end, cut into batches of exactly `batch_size`. Step k takes samples k*batch_size and on, so the
position in the data is the step, and nothing else has to be kept to resume.
"""

import random
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from ..errors import InputError
from ..run.distributed import Ranks
from .images import Unreadable

# uint8 (B, C, H, W); int64 (B,), or float32 (B, K) zeros and ones where images have several classes; what could not be
# read: replaced in training, PADDING in validation
Batch = tuple[Tensor, Tensor, list[str]]
ONE = Ranks()
PADDING = -1  # the label of a sample that counts nowhere: unreadable, or filling up a rank's last batch (its epoch too)
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


def split_by_class(labels: list[int], count, seed: int) -> tuple[list[int], list[int]]:
    """(chosen, rest): of every class with n images a fixed random count(n) are chosen."""
    by_class: dict[int, list[int]] = {}
    for index, label in enumerate(labels):
        by_class.setdefault(label, []).append(index)
    chosen, rest = [], []
    for _, indices in sorted(by_class.items()):
        order = torch.randperm(len(indices), generator=torch.Generator().manual_seed(seed)).tolist()
        number = count(len(indices))
        chosen += [indices[i] for i in order[:number]]
        rest += [indices[i] for i in order[number:]]
    return sorted(chosen), sorted(rest)


def padding(size: tuple[int, int], classes: int | None = None) -> tuple[np.ndarray, int | np.ndarray]:
    """An empty uint8 image (3, *size) and the label PADDING; with `classes`, a vector of it."""
    return np.zeros((3, *size), np.uint8), PADDING if classes is None else np.full(classes, PADDING, np.float32)


class Samples(Dataset):
    """(epoch, index) -> (uint8 (C, H, W), label, unreadable).

    A training sample that cannot be read (`unreadable` says which and why) is replaced by the next one that can: the
    batch keeps its size, and its content depends on nothing but the data. In validation (no seed) it is an empty image
    of `size` with the label PADDING, which counts nowhere. Where nothing can be read the InputError itself is returned.
    """

    def __init__(self, source, transform, seed: int | None, size: tuple[int, int] | None = None):
        self.source, self.transform, self.seed, self.size = source, transform, seed, size

    def __len__(self) -> int:
        return len(self.source)

    def _get(self, index: int):
        return self.source[index]

    def _read(self, index: int):
        """The sample at `index`, or the next readable one in training."""
        unreadable = []
        for offset in range(REPLACEMENTS):
            try:
                return *self._get((index + offset) % len(self.source)), unreadable
            except Unreadable as error:
                if self.seed is None:
                    raise
                unreadable.append(str(error))
        raise InputError(f"{REPLACEMENTS} images in a row cannot be read, the first: {unreadable[0]}")

    def _padding(self, unreadable: list[str]):
        multi_label = getattr(self.source, "multi_label", False)
        return *padding(self.size, len(self.source.classes) if multi_label else None), unreadable

    def __getitem__(self, key: tuple[int, int]):
        epoch, index = key
        if epoch == PADDING:
            return self._padding([])
        try:
            image, label, unreadable = self._read(index)
        except InputError as error:  # raised in the main process: a worker would wrap it in its traceback
            return self._padding([str(error)]) if self.seed is None and isinstance(error, Unreadable) else error
        if self.transform is not None:
            if self.seed is not None:
                seed_everything(self.seed, epoch, index)
            image = self.transform(image)
        return np.asarray(image), label, unreadable


class StreamSampler(Sampler):
    """Lists of (epoch, index): this rank's part of the batches of steps `start` to `stop`."""

    def __init__(self, length: int, batch_size: int, seed: int, start: int, stop: int, ranks: Ranks = ONE):
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.start, self.stop, self.ranks = start, stop, ranks

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch_now, order = -1, []
        first, last = self.ranks.share(self.batch_size)
        for step in range(self.start, self.stop):
            batch = []
            for position in range(step * self.batch_size + first, step * self.batch_size + last):
                epoch, offset = divmod(position, self.length)
                if epoch != epoch_now:
                    generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch))
                    epoch_now, order = epoch, torch.randperm(self.length, generator=generator).tolist()
                batch.append((epoch, order[offset]))
            yield batch


def stack(images: tuple[np.ndarray, ...]) -> Tensor:
    """Images of one size as one tensor."""
    return torch.from_numpy(np.stack(images))


def collate(samples: list, together: Callable = stack) -> Batch | InputError:
    """The samples of a batch, or the first error among them.

    together: makes the images of a batch out of those of its samples, and of whatever a sample holds after its image,
    its label (class numbers become int64 (B,), vectors of zeros and ones float32 (B, K)) and what was unreadable.
    """
    for sample in samples:
        if isinstance(sample, InputError):
            return sample
    images, labels, unreadable, *more = zip(*samples)
    told = [text for texts in unreadable for text in texts]
    return together(images, *more), torch.from_numpy(np.array(labels)), told


def counts(labels: Tensor) -> Tensor:
    """Which samples of a batch count, (B,) bool: those whose label, (B,) or (B, K), is not PADDING."""
    return (labels if labels.dim() == 1 else labels[:, 0]) != PADDING


def unchanged(sample):
    """The collate function of samples that stay as they are."""
    return sample


def raising(batches) -> Iterator[Batch]:
    """The batches; raises the InputError that `collate` returned in place of one."""
    for batch in batches:
        if isinstance(batch, InputError):
            raise batch
        yield batch
