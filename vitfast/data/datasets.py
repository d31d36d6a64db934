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
from .folders import ImageFiles, open_folder
from .images import Unreadable, as_rgb, read_rgb
from .shards import SUFFIXES, ShardFiles, Shards, decode_streamed, local_shards, undecoded

ITERABLE = ("wds/", "hfids/", "tfds/")
NAMED = ("torch/", "hfds/", *ITERABLE)
EXAMPLES = dict(
    zip(NAMED, ("torch/cifar10", "hfds/timm/mini-imagenet", "wds/DIR", "hfids/timm/mini-imagenet", "tfds/mnist"))
)


class Digits:
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

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.pixels[index]).convert("RGB"), self.labels[index]

    def name(self, index: int) -> str:
        return f"digit {self.indices[index]}"


class Synthetic:
    """Random images, made once and repeated: for measuring speed, not for learning."""

    classes = [str(i) for i in range(1000)]
    transformed = True  # nothing is decoded, cropped or resized

    def __init__(self, train: bool, img_size: tuple[int, int], chans: int = 3, pool: int = 64):
        generator = torch.Generator().manual_seed(int(train))
        self.pixels = torch.randint(0, 256, (pool, chans, *img_size), dtype=torch.uint8, generator=generator).numpy()
        self.length = 8192 if train else 512

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.pixels[index % len(self.pixels)], index * 7919 % len(self.classes)

    def name(self, index: int) -> str:
        return f"synthetic image {index}"


class Subset:
    """The images of a map-style source at these indices."""

    def __init__(self, source, indices: list[int]):
        self.source, self.indices, self.classes = source, indices, source.classes
        self.transformed = getattr(source, "transformed", False)
        self.multi_label = getattr(source, "multi_label", False)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int):
        return self.source[self.indices[index]]

    def name(self, index: int) -> str:
        return self.source.name(self.indices[index])


def whole(source, index: int) -> tuple[object, int]:
    """The source that an image of a (nested) Subset is of, and its index there."""
    while isinstance(source, Subset):
        source, index = source.source, source.indices[index]
    return source, index


def known_labels(source) -> list[int] | None:
    """The class of each image where the source knows them without reading images, None elsewhere."""
    if getattr(source, "multi_label", False):
        return None
    if isinstance(source, Subset):
        known = known_labels(source.source)
        return None if known is None else [known[i] for i in source.indices]
    if isinstance(source, (Digits, ImageFiles, ShardFiles)):
        return source.labels
    if not isinstance(source, Named):
        return None
    reader = getattr(source.dataset, "reader", None)
    if reader is None:  # torchvision
        targets = getattr(source.dataset, "targets", None)
    else:  # Hugging Face: the column, unless timm maps its values
        column = getattr(reader, "label_key", None)
        mapped = getattr(reader, "remap_class", False) or getattr(reader, "target_keys", None)
        targets = reader.dataset[column] if column and not mapped and column in reader.dataset.column_names else None
    return None if targets is None else [int(t) for t in targets]


def labels_of(source) -> list[int]:
    """The class of each image of a map-style source; reads the images only where there is no other way."""
    known = known_labels(source)
    return [source[i][1] for i in range(len(source))] if known is None else known


class Named:
    """A map-style data set of timm's factory (torchvision, Hugging Face datasets)."""

    def __init__(self, spec: str, dataset):
        self.spec, self.dataset = spec, dataset
        reader = getattr(dataset, "reader", None)
        classes = getattr(reader, "class_to_idx", None) or getattr(dataset, "class_to_idx", None) or {}
        self.classes = [str(c) for c in sorted(classes, key=classes.get)]

    def __len__(self) -> int:
        return len(self.dataset)

    def name(self, index: int) -> str:
        return f"{self.spec}[{index}]"

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        try:
            if hasattr(self.dataset, "reader"):  # timm's own __getitem__ skips broken images without a word
                stream, label = self.dataset.reader[index][:2]
                with stream:
                    image = read_rgb(stream, self.name(index))
            else:
                image, label = self.dataset[index]
                image = as_rgb(image)
        except Exception as error:  # each library raises its own
            if isinstance(error, Unreadable):
                raise
            raise Unreadable(f"{self.name(index)} is a broken image ({' '.join(str(error).split())})") from None
        if int(label) < 0:
            raise InputError(f"{self.name(index)} has the class {int(label)}: this split of {self.spec} has no labels")
        return image, int(label)


class InMemory:
    """The first images of a stream, held in memory, as a map-style source."""

    def __init__(self, stream: Shards, count: int):
        self.stream, self.classes = stream, stream.classes
        self.samples = list(itertools.islice(stream.dataset, count))

    def __len__(self) -> int:
        return len(self.samples)

    def name(self, index: int) -> str:
        return f"{self.stream.spec}, image {index}"

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        content, label = self.samples[index]
        return self.stream.image(content, index), label


def by_index(source):
    """The same images as a map-style source, where there is one."""
    return source.files if isinstance(source, Shards) and source.files is not None else source


def fingerprint(source) -> dict[str, str]:
    """Hashes of the names, the classes and the sizes in bytes of a source's images.

    Their contents are not read. Empty for a source of no files: its spec and its length say as much. The size of each
    file is asked for once, 16 at a time for the sake of network disks; the 1.3 million of ImageNet take about 8 s on a
    local disk.
    """
    source = by_index(source)
    indices = range(len(source))
    while isinstance(source, Subset):
        source, indices = source.source, [source.indices[i] for i in indices]
    if not isinstance(source, (ImageFiles, ShardFiles)):
        return {}
    parts = [indices[first : first + 1000] for first in range(0, len(indices), 1000)]
    hashes = dict(names=hashlib.sha256(), labels=hashlib.sha256(), sizes=hashlib.sha256())
    with ThreadPoolExecutor(16) as pool:
        for described in pool.map(lambda part: [source.described(i) for i in part], parts):
            for values in described:
                for each, value in zip(hashes.values(), values):
                    each.update(f"{value}\0".encode("utf-8", "surrogateescape"))
    return {name: each.hexdigest() for name, each in hashes.items()}


def take(source, count: int):
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
    """Training shards, and the validation split: by index where it is local, else shards too."""
    options = dict(is_training=True, batch_size=batch_size, seed=seed)
    if spec.startswith("wds/"):
        root = Path(data_dir or spec.partition("/")[2])
        train, val = local_shards(root, ("train",)), local_shards(root, ("val", "validation", "test"))
        split = "::".join(str(p.relative_to(root)) for p in train.paths) + f"|{len(train)}"  # as timm writes it
        options |= dict(num_samples=len(train), input_img_mode="", input_key=";".join(SUFFIXES))
        dataset = _open_named(spec, str(root), split, **options)
        train.classes = val.classes = max(train.classes, val.classes, key=len)
        return Shards(spec, dataset, train.classes, train), val
    if spec.startswith("hfids/"):
        options |= dict(input_img_mode="")  # as_rgb converts
    train = _open_named(spec, data_dir, "train", **options)
    val = _open_named(spec, data_dir, "validation", **options | dict(is_training=False))
    names = getattr(train.reader, "class_to_idx", None) or getattr(val.reader, "class_to_idx", None) or {}
    classes, decode = [str(i) for i in range(len(names))], None
    if spec.startswith("hfids/"):
        train, val, decode = undecoded(train), undecoded(val), decode_streamed
    return tuple(Shards(spec, dataset, classes, decode=decode) for dataset in (train, val))


def open_sources(
    spec: str, data_dir: str, img_size: tuple[int, int], patch_size: tuple[int, int], batch_size: int, seed: int
):
    """(training source, validation source) of a data SPEC. Raises InputError.

    Map-style sources have `len`, `source[i] -> (image, label)`, `classes` and `name(i)`; Shards are read in order.
    Where images have several classes (`multi_label`) the labels are vectors of zeros and ones.
    """
    if not spec:
        raise InputError("no data given: --data takes a folder, 'digits', 'synthetic', or a name such as torch/cifar10")
    if spec == "digits":
        return Digits(True), Digits(False)
    if spec == "synthetic":
        return Synthetic(True, img_size), Synthetic(False, img_size)
    if spec in NAMED and not (spec == "wds/" and data_dir):
        raise InputError(
            f"--data {spec} names no data set; write its name or folder after it, such as {EXAMPLES[spec]}"
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
