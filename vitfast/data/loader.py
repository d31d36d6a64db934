"""From data sets to batches of raw uint8 images, on one rank or on many."""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.utils.data import DataLoader

from ..errors import InputError
from ..run.config import Config
from ..run.distributed import Ranks
from . import jpeg
from .datasets import Shards, Subset, by_index, labels_of, open_sources, take
from .packing import NATIVE_AT_ONCE, Native, Packing, Progress, SizedSamples, StepSampler
from .samples import (
    ONE,
    PADDING,
    Batch,
    Samples,
    StreamSampler,
    collate,
    mix_seed,
    raising,
    seed_everything,
    split_by_class,
    unchanged,
)
from .transforms import transforms
from .workers import PREFETCH, loader_processes

logger = logging.getLogger("vitfast")


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
    packing: Packing | None = None  # of images of many sizes
    native: Native | None = None  # of an evaluation at the images' own sizes: lists of PackedImages in place of images
    progress: Progress = field(default_factory=Progress)  # of those, after the last training batch
    named: list[str] = field(default_factory=list)  # what a warning has said of unreadable images

    @property
    def multi_label(self) -> bool:
        """Whether an image has any number of classes: labels are zeros and ones (B, K)."""
        return getattr(self.train, "multi_label", False)

    def _loader(self, dataset, **options) -> DataLoader:
        if self.workers:
            options.update(num_workers=self.workers, prefetch_factor=PREFETCH)
        options.setdefault("collate_fn", collate)
        return DataLoader(dataset, pin_memory=self.device.type == "cuda", **options)

    def train_batches(self, start: int, stop: int) -> Iterator[Batch]:
        """The batches of training steps `start` to `stop`; of many sizes, from where `progress` is."""
        if self.packing is not None:
            yield from self._packed(stop - start)
            return
        if isinstance(self.train, Shards):
            yield from self._stream(start, stop)
            return
        sampler = StreamSampler(len(self.train), self.config.batch_size, self.config.seed, start, stop, self.ranks)
        if self.config.decode == "device":
            samples = jpeg.EncodedSamples(self.train, self.config)
            loader = self._loader(samples, batch_sampler=sampler, collate_fn=partial(collate, together=jpeg.as_columns))
            yield from jpeg.batches(raising(loader), self.img_size, self.device)
        else:
            samples = Samples(self.train, self.train_transform, self.config.seed)
            yield from raising(self._loader(samples, batch_sampler=sampler))

    def _packed(self, steps: int) -> Iterator[Batch]:
        """Batches of images of many sizes: lists of PackedImages, one for each micro-batch."""
        samples = SizedSamples(self.train, self.train_transform, self.config.seed, self.packing)
        order = StepSampler(len(self.train), self.packing, self.config, steps, self.progress, self.ranks)
        collated = partial(collate, together=self.packing.pack)
        for batch in raising(self._loader(samples, batch_sampler=order, collate_fn=collated)):
            self.progress = order.after.popleft()
            yield batch

    @property
    def images_per_step(self) -> float:
        """How many images a training step has; of a budget of tokens, about."""
        return self.config.batch_size if self.packing is None else self.packing.images_per_step

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
                    yield collate(kept)  # no error among them: unreadable ones are left out
                step, kept = step + 1, []
                if step == stop:
                    return
            if (step, len(kept)) == before:
                raise InputError(f"data set {self.train.spec!r} gave no training image")
            epoch += 1

    def eval_batches(self) -> Iterator[Batch]:
        """The batches of the validation set, once."""
        return self.in_order(self.val)

    def in_order(self, source) -> Iterator[Batch]:
        """The batches of every image of a source, once and in order, with the evaluation's transform.

        What cannot be read has the label PADDING. Ranks take turns and all get as many batches; the last one is filled
        up with images of that label.
        """
        source, size, together = by_index(source), self.config.eval_batch_size, collate
        if self.native is not None:
            size, together = NATIVE_AT_ONCE, partial(collate, together=self.native.pack)
        if isinstance(source, Shards):
            samples = source.samples(self.eval_transform, self.img_size)
            yield from DataLoader(samples, batch_size=size, collate_fn=together)
            return
        mine = [(0, i) for i in range(self.ranks.rank, len(source), self.ranks.world)]
        mine += [(PADDING, 0)] * (-(-len(source) // self.ranks.world) - len(mine))
        keys = [mine[first : first + size] for first in range(0, len(mine), size)]
        samples = Samples(source, self.eval_transform, None, self.img_size)
        yield from raising(self._loader(samples, batch_sampler=keys, collate_fn=together))

    def left_out(self, messages: list[str]) -> int:
        """How many images these messages are of.

        A warning names each image once, up to `max_unreadable` of them.
        """
        for message in messages:
            if message not in self.named and len(self.named) <= self.config.max_unreadable:
                self.named.append(message)
                logger.warning("left out: %s", message)
        return len(messages)

    def check_left_out(self, unreadable: int, read: int) -> None:
        """Raises InputError where an evaluation read no image, or more than `max_unreadable` were not."""
        limit, first = self.config.max_unreadable, f"; the first: {self.named[0]}" if self.named else ""
        if not read:
            raise InputError(f"none of the {unreadable} images of {self.config.data!r} could be read{first}")
        if unreadable > limit:
            many = f"{unreadable} images of {self.config.data!r} could not be read"
            raise InputError(f"{many}, more than max_unreadable {limit}{first}")


def select(config: Config, train, val):
    """(train, val) as the settings choose them from both.

    `hold_out` validates on a share of the training images; `shots` and `train_images` train on fewer.
    """
    if not (config.hold_out or config.shots or config.train_images):
        return train, val
    train = by_index(train)
    if isinstance(train, Shards):
        needed = "hold_out, shots and train_images need a data set that is read by index"
        raise InputError(f"{needed}; {config.data!r} is read in order")
    multi_label = getattr(train, "multi_label", False)
    if config.hold_out:
        groups = [0] * len(train) if multi_label else labels_of(train)
        held, kept = split_by_class(groups, lambda n: min(max(1, round(n * config.hold_out)), n - 1), 0)
        train, val = Subset(train, kept), Subset(train, held)
    if config.shots and multi_label:
        raise InputError(
            f"shots is a number of images a class; images of {config.data!r} have several: set train_images"
        )
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
    prefix: int = 0,
) -> Data:
    """The data of a run, checked as far as it can be before anything is written. Raises InputError.

    examples: train on this many images alone (`take`). prefix: tokens of an image besides its patches.
    """
    packing = native = None
    if config.task == "eval":
        native = Native.of(config, img_size, patch_size)
    elif packing := Packing.of(config, img_size, patch_size, prefix):
        packing.check(ranks.world * config.accumulate)
    least = (1, 1) if native else patch_size  # sides of an image that can be read
    sources = open_sources(config.data, config.data_dir, img_size, least, config.batch_size, config.seed)
    train, val = select(config, *sources)
    classes = train.classes or [str(i) for i in range(config.num_classes or 0)]
    if not classes:
        raise InputError(f"data set {config.data!r} does not say how many classes it has; add --set num_classes=N")
    if config.num_classes not in (None, len(classes)):
        have = f"num_classes={config.num_classes}, and data set {config.data!r} has {len(classes)} classes"
        raise InputError(f"{have}: leave num_classes out, it is for data that does not say")
    if getattr(train, "multi_label", False) and config.task != "eval" and config.objective == "softmax":
        several = f"images of {config.data!r} have any number of classes, which softmax cannot learn"
        raise InputError(f"{several}: add --set objective=sigmoid")
    for name, source in (("training", train), ("validation", val)):
        if not isinstance(source, Shards) and not len(source):
            raise InputError(f"there is no {name} image in {config.data!r} with these settings")
    if config.decode == "device":
        jpeg.check_decodable(config, train)
    if examples is not None:
        train = take(train, examples)
    made = getattr(train, "transformed", False)
    if packing is not None and isinstance(train, Shards):
        raise InputError(
            f"images of many sizes need a data set that is read by index; {config.data!r} is read in order"
        )
    if packing is not None and made and packing.high**2 > math.prod(img_size):
        raise InputError(f"{config.data!r} has images of {img_size[0]} x {img_size[1]}; sizes must not be larger")
    chain = (None, None) if made else transforms(config, img_size, packing)
    read = max(len(val), len(train)) if config.task == "eval" else len(val)  # by eval_batch_size
    step = native.batch_bytes if native else packing.step_bytes if packing else None
    if native is not None and not made:
        chain = chain[0], native.transform
    workers = loader_processes(config, img_size, read, ranks, step)
    return Data(config, train, val, *chain, classes, img_size, workers, device, ranks, packing, native)
