"""From data sets to batches of raw uint8 images, on one rank or on many."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..config import Config
from ..distributed import Ranks
from ..errors import InputError
from . import jpeg
from .datasets import Shards, Subset, labels_of, open_sources, split_by_class, take
from .samples import ONE, PADDING, Batch, Samples, StreamSampler, collate, mix_seed, raising, seed_everything, unchanged
from .transforms import transforms


@dataclass
class Data:
    """This rank's part of the data of a run: its training and its validation images."""

    config: Config
    train: object
    val: object
    train_transform: object
    eval_transform: object
    classes: list[str]
    img_size: tuple[int, int]
    workers: int
    device: torch.device
    ranks: Ranks = ONE

    @property
    def train_length(self) -> int:
        return len(self.train)

    def _loader(self, dataset, **options) -> DataLoader:
        if self.workers:
            options.update(num_workers=self.workers, prefetch_factor=4)
        return DataLoader(dataset, pin_memory=self.device.type == "cuda", **{"collate_fn": collate, **options})

    def train_batches(self, start: int, stop: int) -> Iterator[Batch]:
        """The batches of training steps `start` to `stop`."""
        if isinstance(self.train, Shards):
            yield from self._stream(start, stop)
            return
        sampler = StreamSampler(len(self.train), self.config.batch_size, self.config.seed, start, stop, self.ranks)
        if self.config.decode == "device":
            samples = jpeg.EncodedSamples(self.train, self.config)
            loader = self._loader(samples, batch_sampler=sampler, collate_fn=jpeg.collate_encoded)
            yield from jpeg.batches(raising(loader), self.img_size, self.device)
        else:
            samples = Samples(self.train, self.train_transform, self.config.seed)
            yield from raising(self._loader(samples, batch_sampler=sampler))

    def _stream(self, start: int, stop: int) -> Iterator[Batch]:
        """The batches of an iterable data set, epoch after epoch.

        Steps before `start` are read and thrown away: shards have no other position.
        """
        dataset, (first, last) = self.train.dataset, self.ranks.share(self.config.batch_size)
        size = last - first  # timm's reader gives every rank its own shards
        samples = self.train.samples(self.train_transform)
        dataset.set_loader_cfg(num_workers=self.workers)
        step, epoch, kept = 0, 0, []
        while step < stop:
            dataset.set_epoch(epoch)
            seed_everything(self.config.seed, epoch)
            before = step, len(kept)
            for sample in DataLoader(samples, batch_size=None, num_workers=self.workers, collate_fn=unchanged):
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

    def eval_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(images, labels) of the validation set, once."""
        return self.in_order(self.val)

    def in_order(self, source) -> Iterator[tuple[Tensor, Tensor]]:
        """(images, labels) of every image of a source, once and in order, with the evaluation's transform.

        Ranks take turns and all get as many batches; the last one is filled up with images of the label PADDING.
        """
        size = self.config.eval_batch_size
        if isinstance(source, Shards):
            samples = source.samples(self.eval_transform)
            yield from (batch[:2] for batch in DataLoader(samples, batch_size=size, collate_fn=collate))
            return
        mine = [(0, i) for i in range(self.ranks.rank, len(source), self.ranks.world)]
        mine += [(PADDING, 0)] * (-(-len(source) // self.ranks.world) - len(mine))
        keys = [mine[first : first + size] for first in range(0, len(mine), size)]
        for images, labels, _ in raising(self._loader(Samples(source, self.eval_transform, None), batch_sampler=keys)):
            yield images, labels


def default_workers(config: Config) -> int:
    """Loader processes: the config's number, else none for data in memory, else one per core, at most 8."""
    if config.workers is not None:
        return config.workers
    return 0 if config.data in ("digits", "synthetic") else min(8, len(os.sched_getaffinity(0)))


def select(config: Config, train, val):
    """(train, val) as the settings choose them from both.

    `hold_out` validates on a share of the training images; `shots` and `train_images` train on fewer.
    """
    if not (config.hold_out or config.shots or config.train_images):
        return train, val
    if isinstance(train, Shards):
        needed = "hold_out, shots and train_images need a data set that is read by index"
        raise InputError(f"{needed}; {config.data!r} is read in order")
    if config.hold_out:
        held, kept = split_by_class(labels_of(train), lambda n: max(1, round(n * config.hold_out)), 0)
        train, val = Subset(train, kept), Subset(train, held)
    if config.shots:
        train = Subset(train, split_by_class(labels_of(train), lambda n: config.shots, mix_seed(config.seed, 1))[0])
    if config.train_images and config.train_images < len(train):
        generator = torch.Generator().manual_seed(mix_seed(config.seed, 2))
        train = Subset(train, sorted(torch.randperm(len(train), generator=generator)[: config.train_images].tolist()))
    return train, val


def open_data(
    config: Config,
    img_size: tuple[int, int],
    patch_size: tuple[int, int],
    device: torch.device,
    ranks: Ranks = ONE,
    examples: int | None = None,
) -> Data:
    """The data of a run, checked as far as it can be before anything is written. Raises InputError.

    examples: train on this many images alone (`take`).
    """
    sources = open_sources(config.data, config.data_dir, img_size, patch_size, config.batch_size, config.seed)
    train, val = select(config, *sources)
    classes = train.classes or [str(i) for i in range(config.num_classes or 0)]
    if not classes:
        raise InputError(f"data set {config.data!r} does not say how many classes it has; add --set num_classes=N")
    if config.decode == "device":
        jpeg.check_decodable(config, train)
    if examples is not None:
        train = take(train, examples)
    chain = (None, None) if getattr(train, "transformed", False) else transforms(config, img_size)
    return Data(config, train, val, *chain, classes, img_size, default_workers(config), device, ranks)
