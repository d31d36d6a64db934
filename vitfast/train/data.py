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
from torchvision.transforms import RandomErasing

from ..errors import InputError
from .parallel import Ranks
from .settings import Config
from .sources import Part, Shards, labels_of, open_sources, split_by_class

Batch = tuple[Tensor, Tensor, list[str]]  # uint8 (B, C, H, W), int64 (B,), what could not be read and was replaced
ONE = Ranks()


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


PADDING = -1  # the epoch of a sample that only fills up a rank's last batch, and its label
REPLACEMENTS = 20  # unreadable samples in a row after which a data set is given up


class Samples(Dataset):
    """(epoch, index) -> (uint8 (C, H, W), label, unreadable).

    A training sample that cannot be read (`unreadable` says which and why) is replaced by the next one that can: the batch keeps its size,
    and its content depends on nothing but the data. Where nothing can be read, or for validation, the InputError itself comes back.
    """

    def __init__(self, source, transform, seed: int | None):
        self.source, self.transform, self.seed = source, transform, seed

    def __len__(self) -> int:
        return len(self.source)

    def _read(self, index: int):
        """The sample at `index`, or the next readable one in training."""
        unreadable = []
        for offset in range(REPLACEMENTS):
            try:
                return *self.source[(index + offset) % len(self.source)], unreadable
            except InputError as error:
                if self.seed is None:
                    raise
                unreadable.append(str(error))
        raise InputError(f"{REPLACEMENTS} images in a row cannot be read, the first: {unreadable[0]}")

    def __getitem__(self, key: tuple[int, int]):
        epoch, index = key
        try:
            image, label, unreadable = self._read(index)
        except InputError as error:  # raised in the main process: a worker would wrap it in its traceback
            return error
        if self.transform is not None:
            if self.seed is not None:
                seed_everything(self.seed, epoch, index)
            image = self.transform(image)
        return np.asarray(image), PADDING if epoch == PADDING else label, unreadable


class StreamSampler(Sampler):
    """Yields lists of (epoch, index): this rank's part of the batches of steps `start` to `stop` of the endless stream."""

    def __init__(self, length: int, batch_size: int, seed: int, start: int, stop: int, ranks: Ranks = ONE):
        self.length, self.batch_size, self.seed, self.start, self.stop, self.ranks = (
            length,
            batch_size,
            seed,
            start,
            stop,
            ranks,
        )

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


def collate(samples: list) -> Batch | InputError:
    """Stacks samples; hands on the first error."""
    for sample in samples:
        if isinstance(sample, InputError):
            return sample
    images, labels, unreadable = zip(*samples)
    return torch.from_numpy(np.stack(images)), torch.tensor(labels), [text for texts in unreadable for text in texts]


@dataclass
class Data:
    """The data of a run, this rank's part of it. `train_batches(start, stop)` are the batches of those steps; `eval_batches()` the validation set once.

    Ranks take turns in the validation set and all get as many batches; what fills up the last has the label PADDING.
    """

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
        if isinstance(self.train, Shards):
            yield from self._stream(start, stop)
            return
        sampler = StreamSampler(len(self.train), self.config.batch_size, self.config.seed, start, stop, self.ranks)
        if self.config.decode == "device":
            from . import jpeg

            loader = self._loader(
                jpeg.EncodedSamples(jpeg.Paths(self.train), self.config), batch_sampler=sampler, collate_fn=jpeg.hand_on
            )
            yield from jpeg.batches(_raising(loader), self.img_size, self.device)
            return
        yield from _raising(
            self._loader(Samples(self.train, self.train_transform, self.config.seed), batch_sampler=sampler)
        )

    def _stream(self, start: int, stop: int) -> Iterator[Batch]:
        """An iterable data set, epoch after epoch. Steps before `start` are read and thrown away: shards have no other position."""
        dataset, (first, last) = self.train.dataset, self.ranks.share(self.config.batch_size)
        size = last - first  # timm's reader gives every rank its own shards
        dataset.transform = lambda image: np.asarray(self.train_transform(image))
        dataset.set_loader_cfg(num_workers=self.workers)
        step, epoch, kept = 0, 0, []
        while step < stop:
            dataset.set_epoch(epoch)
            seed_everything(self.config.seed, epoch)
            before = step, len(kept)
            for sample in DataLoader(dataset, batch_size=None, num_workers=self.workers, collate_fn=_unchanged):
                kept.append((*sample, []))
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
        size = self.config.eval_batch_size
        if isinstance(self.val, Shards):
            self.val.dataset.transform = lambda image: np.asarray(self.eval_transform(image))
            for samples in DataLoader(self.val.dataset, batch_size=size, collate_fn=_unchanged):
                yield collate([(*sample, []) for sample in samples])[:2]
            return
        mine = [(0, i) for i in range(self.ranks.rank, len(self.val), self.ranks.world)]
        mine += [(PADDING, 0)] * (-(-len(self.val) // self.ranks.world) - len(mine))
        keys = [mine[first : first + size] for first in range(0, len(mine), size)]
        for images, labels, _ in _raising(
            self._loader(Samples(self.val, self.eval_transform, None), batch_sampler=keys)
        ):
            yield images, labels


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


class Erase:
    """Random erasing (Zhong et al., 2017) of a uint8 (C, H, W) image: a rectangle becomes noise around the middle grey."""

    def __init__(self, share: float):
        self.share = share

    def __call__(self, image: Tensor) -> Tensor:
        if random.random() >= self.share:
            return image
        top, left, height, width, _ = RandomErasing.get_params(
            image, scale=(0.02, 1 / 3), ratio=(0.3, 3.3), value=[0.0]
        )
        image = image.clone()
        image[:, top : top + height, left : left + width] = (
            torch.randn(len(image), height, width).mul(64).add(127.5).clamp(0, 255)
        )
        return image


def select(config: Config, train, val):
    """The parts of a data set that the settings name: `hold_out` validates on training images, `shots` and `train_images` train on fewer."""
    if not (config.hold_out or config.shots or config.train_images):
        return train, val
    if isinstance(train, Shards):
        raise InputError(
            f"hold_out, shots and train_images need a data set that is read by index; {config.data!r} is read in order"
        )
    if config.hold_out:
        held, kept = split_by_class(labels_of(train), lambda n: max(1, round(n * config.hold_out)), 0)
        train, val = Part(train, kept), Part(train, held)
    if config.shots:
        train = Part(train, split_by_class(labels_of(train), lambda n: config.shots, mix_seed(config.seed, 1))[0])
    if config.train_images and config.train_images < len(train):
        generator = torch.Generator().manual_seed(mix_seed(config.seed, 2))
        train = Part(train, sorted(torch.randperm(len(train), generator=generator)[: config.train_images].tolist()))
    return train, val


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
    if config.random_erasing:
        train.transforms.append(Erase(config.random_erasing))
    evaluate = create_transform(
        (3, *img_size), is_training=False, use_prefetcher=True, interpolation="bicubic", crop_pct=1.0
    )
    return train, evaluate


def open_data(
    config: Config, img_size: tuple[int, int], patch_size: tuple[int, int], device: torch.device, ranks: Ranks = ONE
) -> Data:
    """The data of a run, checked as far as it can be before anything is written. Raises InputError."""
    train, val = select(
        config, *open_sources(config.data, config.data_dir, img_size, patch_size, config.batch_size, config.seed)
    )
    classes = train.classes or [str(i) for i in range(config.num_classes or 0)]
    if not classes:
        raise InputError(f"data set {config.data!r} does not say how many classes it has; add --set num_classes=N")
    if config.decode == "device":
        from . import jpeg

        jpeg.check(config, train)
    chain = (None, None) if getattr(train, "transformed", False) else transforms(config, img_size)
    return Data(config, train, val, *chain, classes, img_size, default_workers(config), device, ranks)
