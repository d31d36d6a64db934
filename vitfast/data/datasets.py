"""Data sets: a folder of class folders, the digits, synthetic noise, or any data set that timm names."""

import hashlib
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from timm.data import create_dataset

from ..errors import InputError
from ..run.config import NAMED_DATA, Config
from .folders import open_folder
from .images import Unreadable, as_rgb, read_rgb
from .samples import mix_seed
from .shards import SUFFIXES, Shards, local_shards, stream_files
from .sources import Source, Subset, split

NAMED = tuple(NAMED_DATA)
ITERABLE = NAMED[2:]


class Digits(Source):
    """scikit-learn's digits: 1,797 scans of 8 x 8 pixels, a fixed fifth of each class for testing."""

    classes = [str(i) for i in range(10)]

    def __init__(self, train: bool):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        scans = load_digits()
        split = train_test_split(np.arange(len(scans.target)), test_size=0.2, random_state=0, stratify=scans.target)
        self.indices = np.sort(split[0 if train else 1])
        self.pixels = (scans.images[self.indices] * (255 / 16)).round().astype(np.uint8)
        self.labels = scans.target[self.indices].tolist()

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.pixels[index]).convert("RGB"), self.labels[index]


class Synthetic(Source):
    """Random images, made once and repeated: for measuring speed, not for learning."""

    classes = [str(i) for i in range(1000)]
    transformed = True

    def __init__(self, train: bool, img_size: tuple[int, int]):
        generator = torch.Generator().manual_seed(int(train))
        self.pixels = torch.randint(0, 256, (64, 3, *img_size), dtype=torch.uint8, generator=generator).numpy()
        self.labels = [index * 7919 % len(self.classes) for index in range(8192 if train else 512)]

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.pixels[index % len(self.pixels)], self.labels[index]


class Named(Source):
    """A data set of timm's factory that is read by index (torchvision, Hugging Face datasets)."""

    def __init__(self, spec: str, dataset):
        self.spec, self.dataset, self.reader = spec, dataset, getattr(dataset, "reader", None)  # torchvision has none
        classes = getattr(dataset if self.reader is None else self.reader, "class_to_idx", None) or {}
        self.classes = [str(c) for c in sorted(classes, key=classes.get)]

    @property
    def labels(self) -> list[int] | None:
        if self.reader is None:
            targets = getattr(self.dataset, "targets", None)
        else:  # Hugging Face: the column, unless timm maps its values
            column = getattr(self.reader, "label_key", None)
            mapped = getattr(self.reader, "remap_class", False) or getattr(self.reader, "target_keys", None)
            plain = column and not mapped and column in self.reader.dataset.column_names
            targets = self.reader.dataset[column] if plain else None
        return None if targets is None else [int(t) for t in targets]

    def __len__(self) -> int:
        return len(self.dataset)

    def name(self, index: int) -> str:
        return f"{self.spec}[{index}]"

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        try:
            if self.reader is not None:  # timm's own __getitem__ skips broken images without a word
                stream, label = self.reader[index][:2]
                with stream:
                    image = read_rgb(stream, self.name(index))
            else:
                image, label = self.dataset[index]
                image = as_rgb(image)
        except Unreadable:
            raise
        except Exception as error:  # each library raises its own
            raise Unreadable(f"{self.name(index)} is a broken image ({' '.join(str(error).split())})") from None
        if int(label) < 0:
            raise InputError(f"{self.name(index)} has the class {int(label)}: this split of {self.spec} has no labels")
        return image, int(label)


class InMemory(Source):
    """The first images of a stream, held in memory, by index."""

    def __init__(self, stream: Shards, count: int):
        self.stream, self.classes = stream, stream.classes
        self.contents, self.labels = [], []
        for content, label in itertools.islice(stream.dataset, count):
            self.contents.append(content)
            self.labels.append(label)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return self.stream.image(self.contents[index], index), self.labels[index]


def by_index(source: Source) -> Source:
    """The source of the same images by index, where there is one; else the source itself."""
    return source.files if isinstance(source, Shards) and source.files is not None else source


def fingerprint(source: Source) -> dict[str, str]:
    """Hashes of the names, the classes and the sizes in bytes of a source's images.

    The images are not read. A source without files has no hashes: its spec and its length say as much. The size of each
    file is asked for once, 16 at a time for the sake of network disks; the 1.3 million of ImageNet take about 8 s on a
    local disk.
    """
    source = by_index(source)
    if source.described(0) is None:
        return {}
    parts = [range(len(source))[first : first + 1000] for first in range(0, len(source), 1000)]
    hashes = dict(names=hashlib.sha256(), labels=hashlib.sha256(), sizes=hashlib.sha256())
    with ThreadPoolExecutor(16) as pool:
        for described in pool.map(lambda part: [source.described(i) for i in part], parts):
            for values in described:
                for each, value in zip(hashes.values(), values):
                    each.update(f"{value}\0".encode("utf-8", "surrogateescape"))
    return {name: each.hexdigest() for name, each in hashes.items()}


def take(source: Source, count: int) -> Source:
    """`count` images of a training source, always the same, or all where it has no more."""
    source = by_index(source)
    if isinstance(source, Shards):
        return InMemory(source, count)
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))
    return Subset(source, order[:count].tolist())


def _open_named(spec: str, data_dir: str, split: str, **options):
    """timm's create_dataset, with every failure as an InputError of one line."""
    root = data_dir or None
    if spec.startswith("torch/"):
        root = root or os.path.join(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "vitfast")
        options["download"] = True
    try:
        return create_dataset(spec, root=root, split=split, **options)
    except (Exception, SystemExit) as error:  # each library raises its own
        text = str(error).strip().splitlines() or [type(error).__name__]
        where = f" in {root}" if root else ""
        raise InputError(f"data set {spec!r}, split {split!r}{where} cannot be opened: {text[0]}") from error


def _shards(spec: str, data_dir: str, batch_size: int, seed: int):
    """Training shards and the validation split, which is read by index if it is local, else as shards."""
    options = dict(is_training=True, batch_size=batch_size, seed=seed)
    if spec.startswith("wds/"):
        root = Path(data_dir or spec.partition("/")[2])
        train, val = local_shards(root, ("train",)), local_shards(root, ("val", "validation", "test"))
        name = "::".join(str(p.relative_to(root)) for p in train.paths) + f"|{len(train)}"  # as timm writes it
        options |= dict(num_samples=len(train), input_img_mode="", input_key=";".join(SUFFIXES))
        dataset = _open_named(spec, str(root), name, **options)
        train.classes = val.classes = max(train.classes, val.classes, key=len)
        return Shards(spec, dataset, train.classes, train), val
    streamed = spec.startswith("hfids/")
    options |= dict(input_img_mode="") if streamed else {}  # as_rgb converts
    train = _open_named(spec, data_dir, "train", **options)
    val = _open_named(spec, data_dir, "validation", **options | dict(is_training=False))
    names = getattr(train.reader, "class_to_idx", None) or getattr(val.reader, "class_to_idx", None) or {}
    for dataset in (train, val) if streamed else ():
        stream_files(dataset)
    return tuple(Shards(spec, dataset, [str(i) for i in range(len(names))]) for dataset in (train, val))


def open_sources(
    spec: str, data_dir: str, img_size: tuple[int, int], patch_size: tuple[int, int], batch_size: int, seed: int
):
    """(training source, validation source) of a data SPEC. Raises InputError."""
    if not spec:
        raise InputError("no data given: --data takes a folder, 'digits', 'synthetic', or a name such as torch/cifar10")
    if spec == "digits":
        return Digits(True), Digits(False)
    if spec == "synthetic":
        return Synthetic(True, img_size), Synthetic(False, img_size)
    if spec in NAMED and not (spec == "wds/" and data_dir):
        raise InputError(
            f"--data {spec} names no data set; write its name or folder after it, such as {NAMED_DATA[spec]}"
        )
    if spec.startswith(ITERABLE):
        return _shards(spec, data_dir, batch_size, seed)
    if spec.startswith(NAMED):
        train = Named(spec, _open_named(spec, data_dir, "train"))
        try:
            val = Named(spec, _open_named(spec, data_dir, "validation"))
        except InputError:
            val = Named(spec, _open_named(spec, data_dir, "test"))
        return train, val
    if not Path(spec).exists():
        known = f"'digits', 'synthetic', or a name that starts with {', '.join(NAMED)}"
        raise InputError(f"no folder {spec}; --data takes an existing folder, {known}")
    return open_folder(Path(spec), patch_size)


def select(config: Config, train: Source, val: Source) -> tuple[Source, Source]:
    """(train, val): the images that the settings choose from both.

    `hold_out` validates on a share of the training images; `shots` and `train_images` train on fewer.
    """
    if not (config.hold_out or config.shots or config.train_images):
        return train, val
    train = by_index(train)
    if isinstance(train, Shards):
        needed = "hold_out, shots and train_images need a data set that is read by index"
        raise InputError(f"{needed}; {config.data!r} is read in order")
    if config.hold_out:
        val, train = split(train, lambda n: min(max(1, round(n * config.hold_out)), n - 1))
    if config.shots and train.multi_label:
        raise InputError(
            f"shots is a number of images a class; images of {config.data!r} have several: set train_images"
        )
    if config.shots:
        train, _ = split(train, lambda n: config.shots, mix_seed(config.seed, 1))
    if config.train_images and config.train_images < len(train):
        generator = torch.Generator().manual_seed(mix_seed(config.seed, 2))
        train = Subset(train, sorted(torch.randperm(len(train), generator=generator)[: config.train_images].tolist()))
    return train, val
