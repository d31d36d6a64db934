"""Data sets: folders, digits, noise, WebDataset shards, torchvision's and Hugging Face's."""

import functools
import itertools
import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from timm.data import create_dataset

from ..errors import InputError
from ..run import hub
from ..run.config import NAMED_DATA, UNLABELLED, Config
from .classes import class_number, class_numbers, count_classes, first_of, library_classes, places_by_name, text_classes
from .folders import TRAINING, VALIDATION, open_folder, open_images
from .images import Reading, printable, read_rgb, unreadable
from .records import Cell
from .samples import mix_seed
from .shards import NUMBER, local_shards
from .sources import UNNAMED, Source, Subset, split

NAMED = tuple(NAMED_DATA)
HELD_OUT = 0.1  # the share of each class that validates where there is no such split: at least one image of two
ADVICE = dict(torch="check the network, or bring its files there", hfds=hub.CHECK)
PATIENCE = 10  # seconds without an answer: torchvision's downloads would wait for ever
logger = logging.getLogger("vitfast")


class Digits(Source):
    """scikit-learn's digits: 1,797 scans of 8 x 8 pixels, a fixed fifth of each class for testing."""

    classes = [str(i) for i in range(10)]

    def __init__(self, train: bool):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        scans, self.where = load_digits(), f"the {'training' if train else 'test'} images of digits"
        split = train_test_split(np.arange(len(scans.target)), test_size=0.2, random_state=0, stratify=scans.target)
        self.indices = np.sort(split[0 if train else 1])
        self.pixels = (scans.images[self.indices] * (255 / 16)).round().astype(np.uint8)
        self.labels = scans.target[self.indices].tolist()

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.pixels[index]).convert("RGB"), self.labels[index]


class Synthetic(Source):
    """Random images, made once and repeated, to measure speed and not to learn from."""

    transformed = True

    def __init__(self, train: bool, img_size: tuple[int, int]):
        self.where, generator = "synthetic", torch.Generator().manual_seed(int(train))
        self.pixels = torch.randint(0, 256, (64, 3, *img_size), dtype=torch.uint8, generator=generator).numpy()
        self.labels = [index * 7919 % 1000 for index in range(8192 if train else 512)]

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.pixels[index % len(self.pixels)], self.labels[index]


def library_files(dataset, reader) -> tuple[list[str], Callable[[int], object] | None]:
    """(the paths of the images from their root, a function from an index to the image's file or bytes).

    The paths are [] where images have none, and the function is None where the data does not say what holds them.
    dataset: one of torchvision's, with reader None, or one of timm's reader of Hugging Face datasets.
    """
    if reader is not None:
        from pyarrow.compute import binary_length, struct_field

        table = getattr(reader.dataset, "data", None)
        if table is None or reader.dataset._indices is not None:
            return [], None
        images, files = table.column(reader.image_key), [each["filename"] for each in reader.dataset.cache_files]
        paths, data = struct_field(images, "path").to_pylist(), struct_field(images, "bytes")
        sizes, newest = binary_length(data).to_pylist(), max(files, key=os.path.getmtime, default=None)
        if newest is None:  # the data set is in memory
            return [], lambda index: data[index].as_py()
        alone = [os.path.dirname(path) for path, size in zip(paths, sizes) if size is None]  # files, not in the table
        folder = os.path.commonpath(alone) if alone else ""

        def content(index: int) -> object:
            return paths[index] if sizes[index] is None else Cell(data, index, newest, sizes[index])

        return [(path or str(i)).removeprefix(folder).lstrip(os.sep) for i, path in enumerate(paths)], content
    if (pixels := getattr(dataset, "data", None)) is not None:
        return [], lambda index: np.asarray(pixels[index]).tobytes()
    root, pairs = str(getattr(dataset, "root", "")), getattr(dataset, "samples", getattr(dataset, "imgs", None))
    if pairs is None and hasattr(dataset, "all_categories"):  # iNaturalist
        pairs = [(os.path.join(root, dataset.all_categories[kind], name), kind) for kind, name in dataset.index]
    files = [str(path) for path, *_ in pairs or ()]
    return [path.removeprefix(root).lstrip(os.sep) for path in files], files.__getitem__ if files else None


class Named(Source):
    """A data set of timm's factory (torchvision, Hugging Face datasets)."""

    def __init__(self, spec: str, dataset, split: str = "train"):
        self.spec, self.where, self.dataset = spec, f"{spec}, split {split!r}", dataset
        self.reader = getattr(dataset, "reader", None)  # torchvision has none
        if hasattr(dataset, "loader"):  # torchvision's: it returns the path now, and __getitem__ reads the file
            dataset.loader = os.fspath
        self.classes, self.numbers = library_classes(dataset if self.reader is None else self.reader)
        if (labels := self._column()) is None:
            return
        if self.numbers is None:
            self.classes, self.numbers = text_classes(labels)
        self.labels = class_numbers(labels, self.numbers, self.name)

    def _column(self) -> list | None:
        """The labels as the data set has them, where they are known without reading images."""
        if self.reader is None:
            targets = getattr(self.dataset, "targets", None)
        else:  # Hugging Face: the column, unless timm maps its values
            column = getattr(self.reader, "label_key", None)
            mapped = getattr(self.reader, "remap_class", False) or getattr(self.reader, "target_keys", None)
            plain = column and not mapped and column in self.reader.dataset.column_names
            targets = self.reader.dataset[column] if plain else None
        targets = targets.tolist() if hasattr(targets, "tolist") else targets
        return None if targets is None or any(isinstance(each, list | dict) for each in targets) else list(targets)

    def __len__(self) -> int:
        return len(self.dataset)

    def name(self, index: int) -> str:
        return f"{self.spec}[{index}]"

    def path(self, index: int) -> str:
        return self._files[0][index] if self._files[0] else str(index)

    def content(self, index: int) -> object:
        return self._files[1] and self._files[1](index)

    @functools.cached_property
    def _files(self) -> tuple[list[str], Callable[[int], object] | None]:
        return library_files(self.dataset, self.reader)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        with unreadable(f"{self.name(index)} is a broken image"):  # timm's own __getitem__ skips it without a word
            found, label = (self.dataset if self.reader is None else self.reader)[index][:2]
        with found if hasattr(found, "read") else nullcontext():
            image = read_rgb(found, self.name(index), self.reading)
        if self.labels is not None:
            return image, self.labels[index]
        return image, class_number(label, self.numbers, len(self.classes) or None, self.name(index))


def take(source: Source, count: int) -> Subset:
    """Returns `count` images of a training source, always the same ones, or all if it has fewer."""
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))
    return Subset(source, order[:count].tolist())


def open_named(spec: str, data_dir: str, split: str):
    """Calls timm's create_dataset, and raises every failure as an InputError of one line."""
    root, (library, _, name) = data_dir or None, spec.partition("/")
    if library == "torch":
        root = root or os.path.join(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "vitfast")
    where, unheard = f"data set {spec!r}, split {split!r}{f' in {root}' if root else ''}", ""
    patience = socket.getdefaulttimeout()
    try:
        socket.setdefaulttimeout(patience or PATIENCE)
        if library in ("hfds", "hfids") and not os.path.exists(name):
            unheard = hub.silence(f"datasets/{name}/resolve/main/README.md")
        with hub.cache_alone() if unheard else nullcontext():
            return create_dataset(spec, root=root, split=split, download=library == "torch")
    except (Exception, SystemExit) as error:  # each library raises errors of its own
        if unheard and isinstance(error, ConnectionError):
            raise hub.unreachable(f"{where}: not", unheard) from error
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if library in ADVICE and isinstance(error, OSError | RuntimeError):
            said += f"; {ADVICE[library]}"
        raise InputError(f"{where} cannot be opened: {said}") from error
    finally:
        socket.setdefaulttimeout(patience)


def _named_splits(spec: str, data_dir: str, training: bool) -> list[Named | None]:
    """The training and validation splits of a data set, None for one that cannot be opened.

    training: whether there must be a training split. The log says why any other split cannot be opened.
    """
    found, failed = [], []
    for names in (("train",), ("validation", "test")):
        for name in names:
            try:
                dataset = open_named(spec, data_dir, name)
            except InputError as error:
                failed.append(error)
            else:
                found.append(Named(spec, dataset, name))
                break
        else:
            found.append(None)
        if found == [None] * (1 if training else 2):
            raise failed[0]
    for error in failed:
        logger.warning("%s", error)
    return found


def open_sources(
    spec: str, data_dir: str, img_size: tuple[int, int], patch_size: tuple[int, int], config: Config
) -> tuple[Source | None, Source | None]:
    """(training, validation) sources of a data SPEC, None where it has no such split. Raises InputError.

    Each source numbers its own classes until `settle_classes` is called.
    """
    if not spec:
        raise InputError("no data given: --data takes a folder, 'digits', 'synthetic', or a name such as torch/cifar10")
    reading, labelled = Reading.of(config, patch_size), config.objective not in UNLABELLED
    if spec == "digits":
        found = Digits(True), Digits(False)
    elif spec == "synthetic":
        found = Synthetic(True, img_size), Synthetic(False, img_size)
    elif spec in NAMED and not (spec == "wds/" and data_dir):
        advice = f"write its name or folder after it, such as {NAMED_DATA[spec]}"
        raise InputError(f"--data {spec} names no data set; {advice}")
    elif spec.startswith("wds/"):
        root = Path(data_dir or spec.partition("/")[2])
        train, val = (local_shards(root, names, labelled) for names in (TRAINING, VALIDATION))
        found = train if train or val else local_shards(root, ("",), labelled), val
        shards = list(filter(None, found))
        if not shards:
            raise InputError(f"no shards {root}/*.tar; WebDataset folders hold train-*.tar and val-*.tar")
        texts = set(itertools.chain.from_iterable(source.texts for source in shards))
        for source in shards:
            source.read_classes(all(NUMBER.fullmatch(text) for text in texts))
        if others := sorted({*map(str, root.glob("*.tar"))} - {str(path) for each in shards for path in each.paths}):
            logger.info("%s: reads %s and passes over %s", root, shards[-1].where, first_of(others))
    elif spec.startswith(("hfids/", "tfds/")):
        raise InputError(f"--data {spec}: streamed data sets are not read; take hfds/NAME, or shards as wds/DIR")
    elif spec.startswith(NAMED):
        found = tuple(_named_splits(spec, data_dir, config.task != "eval"))
    elif not Path(spec).exists():
        known = f"'digits', 'synthetic', or a name that starts with {', '.join(NAMED)}"
        raise InputError(f"no folder {spec}; --data takes an existing folder, {known}")
    else:
        try:
            found = open_folder(Path(spec), reading, config.task != "eval") if labelled else open_images(spec, reading)
        except OSError as error:
            raise InputError(f"{printable(str(error.filename))} cannot be read ({error.strerror})") from None
    if not labelled and None not in found and [*found[0].classes] == [UNNAMED] != [*found[1].classes]:
        logger.info("%s is left out, as %s has no classes; --set probe names it", found[1].where, found[0].where)
        found = found[0], None
    for source in filter(None, found):
        source.reading = reading
    return found


def settle_classes(
    sources: Sequence[Source], known: Sequence[str] = (), count: int | None = None, owner: str = ""
) -> list[str]:
    """Gives the classes of sources one numbering, by their names, and returns their names.

    known: the class names of the weights `owner`, which decide; without them the first source decides. count: how many
    classes data has that only numbers them. Raises InputError for a class that is not among those that decide.
    """
    first = sources[0]
    classes = list(known or first.classes)
    if not classes:
        if count is None and first.labels is None:
            raise InputError(f"{first.where} does not say how many classes it has; add --set num_classes=N")
        classes = [str(i) for i in range(count or count_classes(first.labels, first.where))]
    numbers = [str(i) for i in range(len(classes))]
    for source in sources:
        labels = source.labels or ()
        present = {*itertools.chain.from_iterable(labels)} if source.multi_label else {*labels}
        names = source.classes or [str(k) for k in range(max(present, default=-1) + 1)]
        places = places_by_name(names, classes)
        if known and places.count(None) == len(places) and numbers in (classes, names):
            logger.warning("%s and %s have no name in common: classes go by their numbers", source.where, owner)
            places = list(range(len(classes)))
        elif not source.classes and (not known or not all(map(str.isdecimal, known))):
            places = [k if k < len(classes) else None for k in range(len(names))]
        bad = {k for k, place in enumerate(places) if place is None and (k in present or source.labels is None)}
        if bad:
            at = (i for i, k in enumerate(labels) if bad & ({*k} if source.multi_label else {k}))
            here, there = ("the data", owner) if owner else ("validation", first.where)
            sides = f"{source.where} ({len(names)} classes) and {there} ({len(classes)} classes) must have the same"
            missing, more = [n for n in classes if n not in names], [names[k] for k in sorted(bad)]
            lacks = f"missing in {here}: {first_of(missing, more)}; " if missing else ""
            place = next((f", first in {getattr(source, 'place', source.name)(i)}" for i in at), "")
            raise InputError(f"{sides}; {lacks}only in {here}: {first_of(more, missing)}{place}")
        met = {places[k] for k in present}
        if labels and (absent := [name for place, name in enumerate(classes) if place not in met]):
            level, many = logging.INFO if known else logging.WARNING, f"{len(absent)} of the {len(classes)} classes"
            logger.log(level, "%s has no image of %s: %s", source.where, many, first_of(absent))
        source.renumber(places, classes)
    return classes


def select(config: Config, train: Source, val: Source) -> tuple[Source, Source]:
    """(train, val): the images that the settings choose from both.

    `hold_out` validates on a share of the training images; `shots` and `train_images` train on fewer.
    """
    if not (config.hold_out or config.shots or config.train_images):
        return train, val
    if config.hold_out:
        val, train = split(train, lambda n: min(max(1, round(n * config.hold_out)), n - 1))
    if config.shots and train.multi_label:
        several = f"images of {config.data!r} have several: set train_images"
        raise InputError(f"shots is a number of images a class; {several}")
    if config.shots:
        train, _ = split(train, lambda n: config.shots, mix_seed(config.seed, 1))
    if config.train_images and config.train_images < len(train):
        generator = torch.Generator().manual_seed(mix_seed(config.seed, 2))
        train = Subset(train, sorted(torch.randperm(len(train), generator=generator)[: config.train_images].tolist()))
    return train, val
