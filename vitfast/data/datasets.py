"""Data sets: a folder of class folders, the digits, synthetic noise, or any data set that timm names."""

import itertools
import os
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from timm.data import IterableImageDataset, create_dataset
from timm.data.readers.reader_image_folder import ReaderImageFolder
from torch.utils.data import IterableDataset

from ..errors import InputError

ITERABLE = ("wds/", "hfids/", "tfds/")
NAMED = ("torch/", "hfds/", *ITERABLE)
HELD_OUT = 0.1  # share of a folder without val/ that is kept for validation
CHECKED_FILES = 20_000  # headers read before a run starts; a larger folder is checked as it is read


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


class ImageFiles:
    """Image files of one split, as timm's folder reader lists them."""

    def __init__(self, reader: ReaderImageFolder, indices: list[int], min_size: tuple[int, int]):
        self.reader, self.indices, self.min_size = reader, indices, min_size
        self.classes = sorted(reader.class_to_idx, key=reader.class_to_idx.get)
        if len(indices) <= CHECKED_FILES:
            for index in range(len(indices)):
                self._open(index).close()

    def __len__(self) -> int:
        return len(self.indices)

    def name(self, index: int) -> str:
        return self.reader.filename(self.indices[index], absolute=True)

    def path(self, index: int) -> tuple[str, int]:
        """File and class of an image whose header is right."""
        self._open(index).close()
        return self.name(index), self.reader.samples[self.indices[index]][1]

    def _open(self, index: int) -> Image.Image:
        try:
            image = Image.open(self.reader[self.indices[index]][0])
        except (OSError, UnidentifiedImageError):
            raise InputError(f"{self.name(index)} cannot be read as an image; remove or replace it") from None
        if image.height < self.min_size[0] or image.width < self.min_size[1]:
            pixels, patch = f"{image.height} x {image.width}", f"{self.min_size[0]} x {self.min_size[1]}"
            raise InputError(f"{self.name(index)} has {pixels} pixels, less than one patch ({patch}); remove it")
        return image

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        label = self.reader.samples[self.indices[index]][1]
        try:
            with self._open(index) as image:
                return image.convert("RGB"), label
        except (OSError, SyntaxError) as error:
            raise InputError(f"{self.name(index)} is a broken image ({error}); remove or replace it") from None


class Subset:
    """The images of a map-style source at these indices."""

    def __init__(self, source, indices: list[int]):
        self.source, self.indices, self.classes = source, indices, source.classes
        self.transformed = getattr(source, "transformed", False)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int):
        return self.source[self.indices[index]]

    def name(self, index: int) -> str:
        return self.source.name(self.indices[index])

    def path(self, index: int) -> tuple[str, int]:
        """File and class, of sources that are files."""
        return self.source.path(self.indices[index])


def known_labels(source) -> list[int] | None:
    """The class of each image where the source knows them without reading images, None elsewhere."""
    if isinstance(source, Subset):
        known = known_labels(source.source)
        return None if known is None else [known[i] for i in source.indices]
    if isinstance(source, Digits):
        return source.labels
    if isinstance(source, ImageFiles):
        return [source.reader.samples[i][1] for i in source.indices]
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
                image = Image.open(stream)
            else:
                image, label = self.dataset[index]
            return image.convert("RGB"), int(label)
        except OSError as error:
            raise InputError(f"{self.name(index)} is a broken image ({error})") from None


def _reader(folder: Path) -> ReaderImageFolder:
    try:
        return ReaderImageFolder(str(folder))
    except RuntimeError:
        expected = "expected class folders with .jpg, .jpeg or .png files in them"
        raise InputError(f"no images in {folder}: {expected}") from None


def _held_out(reader: ReaderImageFolder) -> tuple[list[int], list[int]]:
    """(training, validation) indices: a fixed tenth of every class held out, at least one image of two."""
    labels = [label for _, label in reader.samples]
    val, train = split_by_class(labels, lambda n: max(round(n * HELD_OUT), int(n > 1)), seed=0)
    return train, val


def _folder(root: Path, min_size: tuple[int, int]) -> tuple[ImageFiles, ImageFiles]:
    if not root.is_dir():
        raise InputError(f"{root} is a file; --data takes a folder that holds train/<class>/ (and val/<class>/)")
    train_root = root / "train" if (root / "train").is_dir() else root
    names = ("val", "validation", "test") if train_root != root else ()
    val_root = next((root / name for name in names if (root / name).is_dir()), None)
    reader = _reader(train_root)
    if len(reader.class_to_idx) < 2:
        only = next(iter(reader.class_to_idx))
        raise InputError(f"{train_root} has one class only ({only!r}); expected a folder for each class")
    if val_root is None:
        train, val = _held_out(reader)
        return ImageFiles(reader, train, min_size), ImageFiles(reader, val, min_size)
    val_reader = _reader(val_root)
    missing = [c for c in reader.class_to_idx if c not in val_reader.class_to_idx]
    extra = [c for c in val_reader.class_to_idx if c not in reader.class_to_idx]
    if missing or extra:
        kinds = {"missing in validation": missing, "only in validation": extra}
        shown = {kind: f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}" for kind, names in kinds.items()}
        differences = "; ".join(f"{kind}: {shown[kind]}" for kind, names in kinds.items() if names)
        raise InputError(f"{val_root} and {train_root} must have the same class folders; {differences}")
    return tuple(ImageFiles(each, list(range(len(each))), min_size) for each in (reader, val_reader))


class Shards:
    """An iterable data set of timm's factory: read in order, not by index.

    WebDataset shards, streamed Hugging Face data sets or TensorFlow data sets.
    """

    def __init__(self, spec: str, dataset: IterableImageDataset, classes: list[str]):
        self.spec, self.dataset, self.classes = spec, dataset, classes

    def __len__(self) -> int:
        return len(self.dataset)

    def samples(self, transform) -> "ShardSamples":
        """One pass over the images, transformed in the process that reads them."""
        return ShardSamples(self.dataset, transform)


class ShardSamples(IterableDataset):
    """(uint8 (C, H, W), label, []) of each image of timm's data set, which itself has no transform.

    The list is of what could not be read, as in the samples of map-style sources; timm passes over such images.
    """

    def __init__(self, dataset: IterableImageDataset, transform):
        self.dataset, self.transform = dataset, transform

    def __iter__(self):
        for image, label in self.dataset:
            yield np.asarray(self.transform(image)), label, []


class InMemory:
    """Images and labels that are held in memory, as a map-style source."""

    def __init__(self, samples: list, classes: list[str]):
        self.samples, self.classes = samples, classes

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int):
        return self.samples[index]


def take(source, count: int):
    """`count` images of a training source, always the same, or all where it has no more."""
    if isinstance(source, Shards):
        return InMemory(list(itertools.islice(source.dataset, count)), source.classes)
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))
    return Subset(source, order[:count].tolist())


def _count_shards(paths: list[Path]) -> tuple[int, int]:
    """(samples, classes) of WebDataset shards, from their .cls members."""
    samples, top = 0, -1
    for path in paths:
        try:
            with tarfile.open(path) as tar:
                for member in tar:
                    if member.name.endswith(".cls"):
                        samples, top = samples + 1, max(top, int(tar.extractfile(member).read()))
        except (tarfile.TarError, OSError, ValueError) as error:
            raise InputError(f"shard {path} cannot be read ({error})") from None
    return samples, top + 1


def _local_shards(root: Path, prefixes: tuple[str, ...]) -> tuple[str, int, int]:
    """The shards of a split below `root`: (timm's split text with the count, samples, classes)."""
    for prefix in prefixes:
        paths = sorted([*root.glob(f"{prefix}*.tar"), *root.glob(f"{prefix}/*.tar")])
        if paths:
            samples, classes = _count_shards(paths)
            return "::".join(str(p.relative_to(root)) for p in paths) + f"|{samples}", samples, classes
    raise InputError(f"no shards {root}/{prefixes[0]}*.tar; WebDataset folders hold train-*.tar and val-*.tar")


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


def _shards(spec: str, data_dir: str, batch_size: int, seed: int) -> tuple[Shards, Shards]:
    both, classes = [], 0
    for train, splits in ((True, ("train",)), (False, ("val", "validation", "test"))):
        options = dict(is_training=train, batch_size=batch_size, seed=seed)
        if spec.startswith("wds/"):
            root = Path(data_dir or spec.partition("/")[2])
            split, samples, count = _local_shards(root, splits)
            classes = max(classes, count)
            dataset = _open_named(spec, str(root), split, num_samples=samples, **options)
        else:
            dataset = _open_named(spec, data_dir, "train" if train else "validation", **options)
            classes = classes or len(getattr(dataset.reader, "class_to_idx", None) or {})
        both.append(dataset)
    names = [str(i) for i in range(classes)]
    return Shards(spec, both[0], names), Shards(spec, both[1], names)


def open_sources(
    spec: str, data_dir: str, img_size: tuple[int, int], patch_size: tuple[int, int], batch_size: int, seed: int
):
    """(training source, validation source) of a data SPEC. Raises InputError.

    Map-style sources have `len`, `source[i] -> (image, label)`, `classes` and `name(i)`; Shards are read in order.
    """
    if not spec:
        raise InputError("no data given: --data takes a folder, 'digits', 'synthetic', or a name such as torch/cifar10")
    if spec == "digits":
        return Digits(True), Digits(False)
    if spec == "synthetic":
        return Synthetic(True, img_size), Synthetic(False, img_size)
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
    return _folder(Path(spec), patch_size)
