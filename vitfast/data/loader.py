"""From data sets to batches of raw uint8 images, on one rank or on many."""

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch.utils.data import DataLoader

from ..errors import InputError
from ..run.config import UNLABELLED, Config
from ..run.device import autocast_dtype
from ..run.distributed import Ranks
from . import jpeg
from .classes import places_by_name
from .crops import Crops
from .datasets import HELD_OUT, open_sources, select, settle_classes, take
from .packing import NATIVE_AT_ONCE, Native, Packing, Progress, StepKeys
from .samples import ONE, PADDING, Batch, Samples, collate, stack, stream_keys
from .sources import Source, Subset, evenly, split
from .transforms import transforms
from .workers import PREFETCH, leave_signals, loader_processes

WATCHED = 2000  # training images that evaluations without labels look at
logger = logging.getLogger("vitfast")


@dataclass
class Data:
    """This rank's part of the data of a run: its training and its validation images."""

    config: Config
    train: Source
    val: Source
    train_transform: Callable | None
    eval_transform: Callable | None
    classes: list[str]
    img_size: tuple[int, int]
    workers: int
    device: torch.device
    ranks: Ranks = ONE
    packing: Packing | None = None  # how images of many sizes are packed
    native: Native | None = None  # for evaluations at the images' own sizes, whose batches are lists of PackedImages
    crops: Crops | None = None  # LeJEPA's, of which an image has several
    probe: "Data | None" = None  # the labelled images by which training without labels is evaluated, if there are any
    progress: Progress = field(default_factory=Progress)  # of images of many sizes, after the last training batch
    named: list[str] = field(default_factory=list)  # the messages on unreadable images that were logged

    @property
    def multi_label(self) -> bool:
        """Whether an image has any number of classes: labels are zeros and ones (B, K)."""
        return self.train.multi_label

    @property
    def dtype(self) -> torch.dtype | None:
        """autocast's dtype in the run, None for fp32."""
        return autocast_dtype(self.config.amp, self.device)

    def train_batches(self, start: int, stop: int) -> Iterator[Batch]:
        """The batches of training steps `start` to `stop`; images of many sizes go on from `progress`."""
        config, samples = self.config, Samples(self.train, self.train_transform, self.config.seed)
        if self.packing is not None:
            keys = StepKeys(len(self.train), self.packing, config, stop - start, self.progress, self.ranks)
            for batch in loaded(samples, keys, self.packing.pack, self.workers, self.device):
                self.progress = keys.after.popleft()
                yield batch
            return
        shards = self.train.shards
        keys = stream_keys(len(self.train), config.batch_size, config.seed, start, stop, self.ranks, shards)
        if config.decode == "device":
            samples.source = jpeg.EncodedFiles(self.train, range(len(self.train)))
            yield from jpeg.batches(loaded(samples, keys, tuple, self.workers, self.device), self.img_size, self.device)
        else:
            yield from loaded(samples, keys, self.crops.pack if self.crops else stack, self.workers, self.device)

    @property
    def images_per_step(self) -> float:
        """How many images a training step has; with a budget of tokens, about how many."""
        return self.config.batch_size if self.packing is None else self.packing.images_per_step

    def in_order(self, source: Source) -> Iterator[Batch]:
        """The batches of every image of a source, once and in order, with the evaluation's transform.

        Unreadable images have the label PADDING. The ranks take turns, and all get equally many batches; the last batch
        is filled up with images of that label.
        """
        size, together = self.config.eval_batch_size, stack
        if self.native is not None:
            size, together = NATIVE_AT_ONCE, self.native.pack
        no_label = np.full(len(source.classes), PADDING, np.float32) if source.multi_label else PADDING
        blank = np.zeros((3, *self.img_size), np.uint8), no_label
        mine = [(0, i) for i in range(self.ranks.rank, len(source), self.ranks.world)]
        mine += [(PADDING, 0)] * (-(-len(source) // self.ranks.world) - len(mine))
        keys = [mine[first : first + size] for first in range(0, len(mine), size)]
        yield from loaded(Samples(source, self.eval_transform, None, blank), keys, together, self.workers, self.device)

    def left_out(self, messages: list[str]) -> int:
        """Returns the number of messages on unreadable images, and warns of each image once.

        No more than `max_unreadable` + 1 images are named.
        """
        for message in messages:
            if message not in self.named and len(self.named) <= self.config.max_unreadable:
                self.named.append(message)
                logger.warning("left out: %s", message)
        return len(messages)

    def check_left_out(self, unreadable: int, read: int) -> None:
        """Raises InputError if an evaluation read no image, or if more than max_unreadable were unreadable."""
        limit, first = self.config.max_unreadable, f"; the first: {self.named[0]}" if self.named else ""
        if not read:
            raise InputError(f"none of the {unreadable} images of {self.config.data!r} could be read{first}")
        if unreadable > limit:
            many = f"{unreadable} images of {self.config.data!r} could not be read"
            raise InputError(f"{many}, more than max_unreadable {limit}{first}")


def loaded(
    samples: Samples, keys: Iterable[list[tuple]], together: Callable, workers: int, device: torch.device
) -> Iterator[Batch]:
    """Yields the batch of each list of keys. Raises an InputError that `collate` returns in its place."""
    loader = DataLoader(
        samples,
        batch_sampler=keys,
        collate_fn=partial(collate, together=together),
        pin_memory=device.type == "cuda",
        num_workers=workers,
        worker_init_fn=leave_signals,
        prefetch_factor=PREFETCH if workers else None,
    )
    for batch in loader:
        if isinstance(batch, InputError):
            raise batch
        yield batch


def open_data(
    config: Config,
    img_size: tuple[int, int],
    patch_size: tuple[int, int],
    device: torch.device,
    ranks: Ranks = ONE,
    examples: int | None = None,
    prefix: int = 0,
    mean: Sequence[float] = (0.5, 0.5, 0.5),
    known: Sequence[str] = (),
    count: int | None = None,
    measure: Callable[[Subset | None, Source], bool] | None = None,
) -> Data:
    """The data of a run, checked as far as it can be before anything is written. Raises InputError.

    examples: train on this many images only (`take`). prefix: tokens of an image besides its patches. mean: the
    model's, the colour around the images of crop_mode="border". known: the class names of `config.weights`. If those of
    a run are the same, they take this order; those of an evaluation must be among them. count: how many classes the
    weights have. measure: given by an evaluation. It is called with None and the validation images; where there are
    none, with the share that training would hold out and all images, and says whether only the share is measured.
    """
    evaluates = config.task == "eval"
    native = Native.of(config, img_size, patch_size) if evaluates else None
    packing = None if evaluates else Packing.of(config, img_size, patch_size, prefix, ranks.world)
    train, val = open_sources(config.data, config.data_dir, img_size, patch_size, config)
    if train is None and not measure:
        raise InputError(f"{config.data!r} has no training images, only {val.where}")
    if measure and known and val is not None:
        train = None  # its classes do not matter here
    sources = [each for each in (train, val) if each is not None]
    classes = sources[0].classes
    if classes and config.num_classes not in (None, len(classes)):
        have = f"num_classes={config.num_classes}, and data set {config.data!r} has {len(classes)} classes"
        raise InputError(f"{have}: leave num_classes out; it is only for data that does not say it")
    if config.task != "eval" and known and {*places_by_name(classes, known)} != {*range(len(known))}:
        known = ()  # the data has other classes
    unlabelled = config.objective in UNLABELLED and len(classes) == 1
    classes = settle_classes(sources, known, config.num_classes or count, config.weights if known or count else "")
    if unlabelled and val is None and not config.hold_out:
        val = Subset(train, evenly(len(train), WATCHED))
    train, val = _with_validation(config, train, val, measure)
    if config.hold_out:
        logger.info("measures the %d images of %s that hold_out=%g holds out", len(val), val.where, config.hold_out)
    if train.multi_label and config.task != "eval" and config.objective == "softmax":
        several = f"images of {config.data!r} have any number of classes, which softmax cannot learn"
        raise InputError(f"{several}: add --set objective=sigmoid")
    for name, source in (("training", train), ("validation", val)):
        if not len(source):
            raise InputError(f"there is no {name} image in {config.data!r} with these settings")
    if config.decode == "device":
        jpeg.check_decodable(config, train)
    if examples is not None:
        train = take(train, examples)
    train_transform, eval_transform = (None, None) if train.transformed else transforms(config, img_size, mean)
    if packing is not None:
        if train.transformed and packing.high**2 > math.prod(img_size):
            raise InputError(f"{config.data!r} has images of {img_size[0]} x {img_size[1]}; sizes must not be larger")
        train_transform = partial(packing.transform, train_transform)
    crops = Crops(config, img_size, patch_size) if config.objective == "lejepa" and not evaluates else None
    if crops is not None:
        train_transform = crops.transform
    if config.decode == "device":
        train_transform = partial(jpeg.draw, config)
    if native is not None and not train.transformed:
        eval_transform = native.transform
    read = max(len(val), len(train)) if config.task == "eval" else len(val)  # images in batches of eval_batch_size
    step = native.batch_bytes if native else packing.step_bytes if packing else None
    step = step if crops is None else 3 * math.prod(patch_size) * crops.patches * config.batch_size
    workers = loader_processes(config, img_size, read, ranks, step)
    chains = train_transform, eval_transform
    data = Data(config, train, val, *chains, classes, img_size, workers, device, ranks, packing, native, crops)
    if config.objective in UNLABELLED:
        data.probe = _probe_of(data, patch_size, mean)
    return data


def _probe_of(data: Data, patch_size: tuple[int, int], mean: Sequence[float]) -> Data | None:
    """The labelled images by which training without labels is evaluated, if there are any.

    Raises InputError for those of `probe`, and where early stopping has none.
    """
    config = data.config
    if config.probe:
        other = dict(data=config.probe, probe="", objective="softmax", data_dir="", early_stop=None, num_classes=None)
        config = dataclasses.replace(config, **other, hold_out=0.0, shots=None, train_images=None)
        try:
            return open_data(config, data.img_size, patch_size, data.device, data.ranks, mean=mean)
        except InputError as error:
            raise InputError(f"probe={data.config.probe}: {error}") from None
    if len(data.classes) > 1 and not data.multi_label:
        return data
    if config.early_stop:
        one = "there is no class for each image"
        raise InputError(f"early_stop waits for a better accuracy, and {one}: give --set probe=DIR")
    return None


def _with_validation(
    config: Config, train: Source | None, val: Source | None, measure: Callable[[Subset | None, Source], bool] | None
) -> tuple[Source, Source]:
    """(training, validation) images; some training images are held out where none are for validation."""
    measure = None if config.hold_out else measure  # hold_out says what is measured, and the log says so
    if val is None:
        share, rest = split(train, lambda n: max(round(n * HELD_OUT), int(n > 1)))
        if measure is None:
            said = "%s has no val/: %g %% of the images of each class are kept for validation"
            logger.info(said, config.data, 100 * HELD_OUT)
        of_share = measure is None or measure(share, train)
        if of_share and not len(share):
            problem = "has no val/ and one image of each class, of which none can validate"
            raise InputError(f"{config.data} {problem}; add more")
        val, train = (share, rest) if of_share else (train, train)
    elif measure is not None:
        measure(None, val)
    return select(config, val if train is None else train, val)
