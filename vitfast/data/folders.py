"""Folders of images: class folders, or a labels file that gives each image any number of classes."""

import csv
import io
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from timm.utils.misc import natural_key

from ..errors import InputError
from .image_files import SUFFIXES, suffix, visible_files
from .images import Unreadable, opened, printable, read_rgb
from .sources import Source, split

HELD_OUT = 0.1  # share of a folder without val/, class by class, that validates: at least one image of two
VALIDATION = ("val", "valid", "validation", "test")  # the first of these folders that is there validates
SPLITS = frozenset((*VALIDATION, "train", "training", "eval", "evaluation", "testing"))  # names of no class
LABELS = ("labels.csv", "labels.json")
HEADER = ("file", "classes")
NESTED = "images in {} are of the class {!r}, the outermost folder, as in torchvision (timm takes the innermost)"
UNLISTED = frozenset(".avif .heic .jp2 .jxl".split())  # images that not every Pillow reads
logger = logging.getLogger("vitfast")


class ImageFiles(Source):
    """Image files of one split.

    labels: the class number of each image, or a tuple of them where an image has any number of classes. upright: turn
    images as their EXIF orientation says.
    """

    upright = True

    def __init__(self, files: list[str], labels: list, classes: list[str], min_size: tuple[int, int]):
        self.files, self.labels, self.classes, self.min_size = files, labels, classes, min_size
        self.multi_label = isinstance(next(iter(labels), None), tuple)

    def name(self, index: int) -> str:
        return printable(self.files[index])

    def label(self, index: int) -> int | np.ndarray:
        """The class of an image, or (K,) float32 zeros and ones."""
        if not self.multi_label:
            return self.labels[index]
        target = np.zeros(len(self.classes), np.float32)
        target[list(self.labels[index])] = 1
        return target

    def described(self, index: int) -> tuple[str, int | tuple[int, ...], int]:
        """The path, the classes and the size in bytes of an image, the size -1 where the path leads nowhere."""
        try:
            size = os.stat(self.files[index]).st_size
        except OSError:
            size = -1
        return self.files[index], self.labels[index], size

    def opened(self, index: int):
        """A context that gives the image with its header read. Raises Unreadable."""
        return opened(self.files[index], self.name(index), self.min_size, self.upright)

    def __getitem__(self, index: int):
        return read_rgb(self.files[index], self.name(index), self.min_size, self.upright), self.label(index)


def open_folder(root: Path, min_size: tuple[int, int]) -> tuple[Source, Source]:
    """(training, validation) images of a folder. Raises InputError.

    Single unreadable images are found when they are read; a class folder without a readable image is an error here.
    """
    if not root.is_dir():
        raise InputError(f"{root} is a file; --data takes a folder that holds train/<class>/ (and val/<class>/)")
    train_root = root / "train" if (root / "train").is_dir() else root
    names = VALIDATION if train_root != root else ()
    val_root = next((root / name for name in names if (root / name).is_dir()), None)
    roots = [train_root] if val_root is None else [train_root, val_root]
    listed = any((train_root / name).exists() for name in LABELS)
    train, *val = _labels_files(roots, min_size) if listed else _class_folders(roots, min_size)
    if not val:
        logger.info("%s has no val/: %g %% of the images of each class are kept for validation", root, 100 * HELD_OUT)
        *val, train = split(train, lambda n: max(round(n * HELD_OUT), int(n > 1)))
        if not len(val[0]):
            raise InputError(f"{root} has no val/ and one image of each class, of which none can validate; add more")
    return train, *val


def first_of(names: list[str]) -> str:
    """The first three names, as text."""
    return f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"


# ---- class folders


def _class_folders(roots: list[Path], min_size: tuple[int, int]) -> list[ImageFiles]:
    """The splits in these folders. Raises InputError if their classes differ or there is one class only."""
    sources = [_class_folder(root, min_size) for root in roots]
    classes = sources[0].classes
    splits = [name for name in classes if name.lower() in SPLITS]
    if roots[0].name != "train" and (len(splits) == len(classes) or {"val", "validation"} & set(splits)):
        advice = f"name the folder of the training images {roots[0] / 'train'}, and that of the validation images val"
        raise InputError(f"{roots[0]} holds {first_of(splits)} and no train/; {advice}")
    if len(classes) < 2:
        deeper = sorted({os.path.dirname(os.path.relpath(file, roots[0])) for file in sources[0].files} - {classes[0]})
        hint = f"; if the folders in it are the classes, give --data {roots[0] / classes[0]}" if deeper else ""
        raise InputError(f"{roots[0]} has one class only ({classes[0]!r}); expected a folder for each class{hint}")
    for root, source in zip(roots, sources):
        kinds = {
            "missing in validation": [c for c in classes if c not in source.classes],
            "only in validation": [c for c in source.classes if c not in classes],
        }
        if differences := "; ".join(f"{kind}: {first_of(names)}" for kind, names in kinds.items() if names):
            raise InputError(f"{root} and {roots[0]} must have the same class folders; {differences}")
        _check_classes(root, source)
    return sources


def _class_folder(folder: Path, min_size: tuple[int, int]) -> ImageFiles:
    """The images below a class folder each, in timm's order (ReaderImageFolder).

    A class is named by the folder in `folder`, as in torchvision; timm takes the innermost folder of an image.

    Raises InputError, among others for a link back to a folder around it, which timm's reader would follow forty
    times, and for a folder that may not be read, which it would pass over. Warns of image files of unknown kinds.
    """
    try:
        found = list(visible_files(str(folder), refuse_circles=True))
    except OSError as error:
        raise InputError(f"{printable(str(error.filename))} cannot be read ({error.strerror})") from None
    suffixes, known = list(map(suffix, found)), ", ".join(sorted(SUFFIXES))
    files = sorted((file for file, kind in zip(found, suffixes) if kind in SUFFIXES), key=natural_key)
    unlisted = [kind for kind in suffixes if kind in UNLISTED]
    if unlisted:
        kinds = " ".join(sorted(set(unlisted)))
        logger.warning("%s: %d files (%s) are ignored; known are %s", folder, len(unlisted), kinds, known)
    if not files:
        known = f"known are files that end in {known}"
        raise InputError(f"no images in {folder}; {known}; expected class folders with images in them")
    folders = [os.path.dirname(file) for file in files]
    if str(folder) in folders:
        stray = printable(files[folders.index(str(folder))])
        listing = f"list the images and their classes in {folder / LABELS[0]}"
        raise InputError(f"{stray} lies in no class folder: move it into one, or {listing}")
    inside = {each: each.removeprefix(str(folder)).strip(os.sep) for each in dict.fromkeys(folders)}
    names = {each: path.partition(os.sep)[0] for each, path in inside.items()}
    classes = sorted(set(names.values()), key=natural_key)
    if nested := next((path for path in inside.values() if os.sep in path), ""):
        logger.info("%s: %s", folder, NESTED.format(printable(nested), printable(nested.partition(os.sep)[0])))
    shown = {each.name for each in folder.iterdir() if each.is_dir() and not each.name.startswith(".")}
    if empty := sorted(map(printable, shown.difference(classes))):
        logger.warning("%s: there are no images in %s, so that there is no such class", folder, first_of(empty))
    numbers = {name: number for number, name in enumerate(classes)}
    return ImageFiles(files, [numbers[names[each]] for each in folders], classes, min_size)


def _check_classes(folder: Path, source: ImageFiles) -> None:
    """Raises InputError where no image of a class has a header that can be read."""
    readable, errors = set(), {}
    for index, label in enumerate(source.labels):
        if label not in readable:
            try:
                with source.opened(index):
                    readable.add(label)
            except Unreadable as error:
                errors.setdefault(label, error)
    for label, error in errors.items():
        if label not in readable:
            name = source.classes[label]
            raise InputError(f"{folder}: no image of the class {name!r} can be read, the first: {error}")


# ---- labels files


def _labels_files(roots: list[Path], min_size: tuple[int, int]) -> list[ImageFiles]:
    """The splits in these folders: the images that their labels files list."""
    rows = [list(_rows(root)) for root in roots]
    classes = sorted({name for _, _, names in rows[0] for name in names}, key=natural_key)
    if not classes:
        raise InputError(f"{_labels_file(roots[0])} gives no image a class")
    return [_labelled(root, lines, classes, min_size) for root, lines in zip(roots, rows)]


def _labelled(folder: Path, rows: list, classes: list[str], min_size: tuple[int, int]) -> ImageFiles:
    """The images of a labels file. Raises InputError for a missing file and an unknown class."""
    numbers, labels, files, seen = {name: number for number, name in enumerate(classes)}, [], [], {}
    for row, (where, file, names) in enumerate(rows):
        if file in seen:
            raise InputError(f"{where}: {printable(file)} is there already, in {seen[file]}; give its classes once")
        if not (folder / file).is_file():
            header = f"; the first line may be {','.join(HEADER)!r}" if row == 0 else ""
            raise InputError(f"{where}: no file {printable(str(folder / file))}{header}")
        unknown = next((name for name in names if name not in numbers), None)
        if unknown is not None:
            raise InputError(f"{where}: {printable(file)} has the class {unknown!r}, which no training image has")
        labels.append(tuple(numbers[name] for name in names))
        seen[file] = where
        files.append(str(folder / file))
    return ImageFiles(files, labels, classes, min_size)


def _rows(folder: Path) -> Iterator[tuple[str, str, list[str]]]:
    """(where it stands, file, classes) of each line of a folder's labels file. Raises InputError."""
    path = _labels_file(folder)
    try:
        text = path.read_text(encoding="utf-8-sig")
        found = list(_json(path, text) if path.suffix == ".json" else _csv(path, text))
    except (OSError, ValueError, csv.Error) as error:
        raise error if isinstance(error, InputError) else InputError(f"{path} cannot be read: {error}") from None
    if not found:
        raise InputError(f"{path} lists no images")
    for where, file, names in found:
        if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
            raise InputError(f"{where}: expected the names of the classes of {printable(file)}, got {names!r}")
        yield where, file, names


def _csv(path: Path, text: str) -> Iterator[tuple[str, str, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    for line in reader:
        where = f"{path}, line {reader.line_num}"
        if line and len(line) != 2:
            raise InputError(f"{where}: expected a file and its classes, such as cat.jpg,cat;dog")
        if line and tuple(line) != HEADER:
            yield where, line[0], [name.strip() for name in line[1].split(";")] if line[1].strip() else []


def _json(path: Path, text: str) -> Iterator[tuple[str, str, list[str]]]:
    if not text.lstrip().startswith("{"):
        raise InputError(f'{path} must hold an object such as {{"cat.jpg": ["cat", "dog"]}}')
    for file, names in json.loads(text, object_pairs_hook=list):  # pairs: a dict would hide a file given twice
        yield f"{path}, {printable(file)}", file, names


def _labels_file(folder: Path) -> Path:
    """The labels file of a folder. Raises InputError where there is none, or two."""
    found = [folder / name for name in LABELS if (folder / name).exists()]
    if len(found) != 1:
        have = "two labels files" if found else "no labels file, which the training folder has"
        raise InputError(f"{folder} has {have}; it takes one of {' and '.join(LABELS)}")
    return found[0]
