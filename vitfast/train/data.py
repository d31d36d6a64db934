"""From sources to batches of raw uint8 images. Sample and augmentation depend on (seed, epoch, sample) alone.

The training samples are one endless stream: the shuffled epochs end to end, cut into batches of exactly `batch_size`. Step k takes
samples k*batch_size and on, so the position in the data is the step, and nothing else has to be kept to resume.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from timm.data import create_transform
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ..errors import InputError
from .recipes import Config
from .sources import Shards, Synthetic, open_sources

Batch = tuple[Tensor, Tensor]  # uint8 (B, C, H, W), int64 (B,)


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
    """(epoch, index) -> (uint8 (C, H, W), label). A sample that cannot be read comes back as the InputError that says why."""

    def __init__(self, source, transform, seed: int | None):
        self.source, self.transform, self.seed = source, transform, seed

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: tuple[int, int]):
        epoch, index = key
        try:
            image, label = self.source[index]
        except InputError as error:  # raised in the main process: a worker would wrap it in its traceback
            return error
        if self.transform is not None:
            if self.seed is not None:
                seed_everything(self.seed, epoch, index)
            image = self.transform(image)
        return np.asarray(image), label


class StreamSampler(Sampler):
    """Yields lists of (epoch, index): the batches of steps `start` to `stop` of the endless stream."""

    def __init__(self, length: int, batch_size: int, seed: int, start: int, stop: int):
        self.length, self.batch_size, self.seed, self.start, self.stop = length, batch_size, seed, start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch_now, order = -1, []
        for step in range(self.start, self.stop):
            batch = []
            for position in range(step * self.batch_size, (step + 1) * self.batch_size):
                epoch, offset = divmod(position, self.length)
                if epoch != epoch_now:
                    generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch))
                    epoch_now, order = epoch, torch.randperm(self.length, generator=generator).tolist()
                batch.append((epoch, order[offset]))
            yield batch


def collate(samples: list) -> Batch | InputError:
    """Stacks samples; hands on the first that could not be read."""
    for sample in samples:
        if isinstance(sample, InputError):
            return sample
    return torch.from_numpy(np.stack([image for image, _ in samples])), torch.tensor([label for _, label in samples])


@dataclass
class Data:
    """The data of a run. `train_batches(start, stop)` are the batches of those steps; `eval_batches()` the validation set once."""

    config: Config
    train: object
    val: object
    train_transform: object
    eval_transform: object
    classes: list[str]
    workers: int
    pin: bool

    @property
    def train_length(self) -> int:
        return len(self.train)

    def _loader(self, dataset, **options) -> DataLoader:
        if self.workers:
            options.update(num_workers=self.workers, prefetch_factor=4)
        return DataLoader(dataset, collate_fn=collate, pin_memory=self.pin, **options)

    def train_batches(self, start: int, stop: int) -> Iterator[Batch]:
        if isinstance(self.train, Shards):
            yield from self._stream(start, stop)
            return
        sampler = StreamSampler(len(self.train), self.config.batch_size, self.config.seed, start, stop)
        yield from _raising(self._loader(Samples(self.train, self.train_transform, self.config.seed), batch_sampler=sampler))

    def _stream(self, start: int, stop: int) -> Iterator[Batch]:
        """An iterable data set, epoch after epoch. Steps before `start` are read and thrown away: shards have no other position."""
        dataset, size = self.train.dataset, self.config.batch_size
        dataset.transform = lambda image: np.asarray(self.train_transform(image))
        dataset.set_loader_cfg(num_workers=self.workers)
        step, epoch, kept = 0, 0, []
        while step < stop:
            dataset.set_epoch(epoch)
            seed_everything(self.config.seed, epoch)
            before = step, len(kept)
            for sample in DataLoader(dataset, batch_size=None, num_workers=self.workers, collate_fn=_unchanged):
                kept.append(sample)
                if len(kept) < size:
                    continue
                if step >= start:
                    yield collate(kept)
                step, kept = step + 1, []
                if step == stop:
                    return
            if (step, len(kept)) == before:
                raise InputError(f"data set {self.train.spec!r} gave no training image")
            epoch += 1

    def eval_batches(self) -> Iterator[Batch]:
        size = self.config.eval_batch_size
        if isinstance(self.val, Shards):
            self.val.dataset.transform = lambda image: np.asarray(self.eval_transform(image))
            yield from DataLoader(self.val.dataset, batch_size=size, collate_fn=collate)
            return
        keys = [[(0, i) for i in range(first, min(first + size, len(self.val)))] for first in range(0, len(self.val), size)]
        yield from _raising(self._loader(Samples(self.val, self.eval_transform, None), batch_sampler=keys))


def _unchanged(sample):
    return sample


def _raising(batches) -> Iterator[Batch]:
    for batch in batches:
        if isinstance(batch, InputError):
            raise batch
        yield batch


def default_workers(config: Config) -> int:
    """Loader processes where the config names none: none for data that is in memory, else one per core, at most 8."""
    if config.workers is not None:
        return config.workers
    return 0 if config.data in ("digits", "synthetic") else min(8, len(os.sched_getaffinity(0)))


def transforms(config: Config, img_size: tuple[int, int]):
    """timm's training and evaluation transforms, ending in uint8 (C, H, W): the model normalises."""
    train = create_transform(
        (3, *img_size),
        is_training=True,
        use_prefetcher=True,
        scale=config.crop_scale,
        ratio=config.crop_ratio,
        hflip=config.hflip,
        color_jitter=config.color_jitter or None,
        auto_augment=config.auto_augment or None,
        interpolation="bicubic",
    )
    evaluate = create_transform((3, *img_size), is_training=False, use_prefetcher=True, interpolation="bicubic", crop_pct=1.0)
    return train, evaluate


def open_data(config: Config, img_size: tuple[int, int], patch_size: tuple[int, int], device: torch.device) -> Data:
    """The data of a run, checked as far as it can be before anything is written. Raises InputError."""
    train, val = open_sources(config.data, config.data_dir, img_size, patch_size, config.batch_size, config.seed)
    classes = train.classes or [str(i) for i in range(config.num_classes or 0)]
    if not classes:
        raise InputError(f"data set {config.data!r} does not say how many classes it has; add --set num_classes=N")
    chain = (None, None) if isinstance(train, Synthetic) else transforms(config, img_size)
    return Data(config, train, val, *chain, classes, default_workers(config), device.type == "cuda")
