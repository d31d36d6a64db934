"""Folders of images: class folders, or a labels file that gives each image any number of classes."""

import logging
import os
from pathlib import Path

from ..errors import InputError
from .classes import first_of, ordered
from .image_files import PassedOver, image_files, images_among, is_clutter, suffix, visible_files
from .images import DEFAULT, Reading, Unreadable, opened, printable
from .lists import LISTS, is_list, read_paths, read_table
from .sources import UNNAMED, Source

TRAINING = ("train", "training")  # the first of these folders that exists holds the training images
VALIDATION = ("val", "valid", "validation", "eval", "evaluation", "test", "testing")  # and the first of these validates
SPLITS = frozenset((*TRAINING, *VALIDATION))
LABELS = ("labels.csv", "labels.json")
NESTED = "images in {} are of the class {!r}, the outermost folder, as in torchvision (timm takes the innermost)"
logger = logging.getLogger("vitfast")


class ImageFiles(Source):
    """Image files of one split.

    labels: the class number of each image, or a tuple of them where an image has any number of classes. where: the
    folder. lines: the line of a labels file that lists each image.
    """

    def __init__(self, files: list[str], labels: list, classes: list[str], reading=DEFAULT, where="", lines=()):
        self.files, self.labels, self.classes, self.reading = files, labels, classes, reading
        self.where, self.lines, self.multi_label = where, lines, isinstance(next(iter(labels), None), tuple)

    def name(self, index: int) -> str:
        return printable(self.files[index])

    def place(self, index: int) -> str:  # where its class is written, and its file
        return ", ".join([*self.lines[index : index + 1], os.path.relpath(self.files[index], self.where)])

    def path(self, index: int) -> str:
        return self.files[index].removeprefix(self.where).lstrip(os.sep)

    def content(self, index: int) -> str:
        return self.files[index]

    def opened(self, index: int):
        """A context that gives the image with its header read. Raises Unreadable."""
        return opened(self.files[index], self.name(index), self.reading)


def open_folder(root: Path, reading: Reading = DEFAULT, training: bool = True) -> list[ImageFiles | None]:
    """(training, validation) images of a folder, None where it has none for that. Raises InputError.

    A folder without train/ and val/ is for training as a whole. training: whether the folder must be fit to train on.
    Single unreadable images are found when they are read; a class folder without a readable image is an error here.
    """
    if not root.is_dir():
        raise InputError(f"{root} is a file; --data takes a folder that holds train/<class>/ (and val/<class>/)")
    entries = {e.name: Path(e) for e in os.scandir(root) if e.is_dir() and not is_clutter(e.name)}
    listed = [split for split in SPLITS & {*entries} if any((entries[split] / name).exists() for name in LABELS)]
    flat = bool(SPLITS & {*entries}) and any(_is_flat(entries[name]) for name in {*entries} - SPLITS)
    splits = [name for name in SPLITS & {*entries} if not listed and _is_split(entries[name], flat)]
    splits += [*listed, *({"val", "valid", "validation"} & {*entries})] if listed else []
    train = next((entries[name] for name in TRAINING if name in splits), None)
    vals = [entries[name] for name in VALIDATION if name in splits]
    if train is None and not vals:
        train, listed = root, any((root / name).exists() for name in LABELS)
    elif training and train is None:
        advice = f"name the folder of the training images {root / 'train'}, and that of the validation images val"
        raise InputError(f"{root} holds {first_of(splits)} and no train/; {advice}")
    roots = [each for each in (train, *vals[:1]) if each is not None]
    if train is not root and (others := sorted(entries.keys() - {each.name for each in roots})):
        reads = " and ".join(f"{each.name}/" for each in roots)
        logger.info("%s: reads %s and passes over %s; --data can name another folder", root, reads, first_of(others))
    found = _labels_files(roots, reading) if listed else [_class_folder(each, reading, training) for each in roots]
    return [found[0] if train else None, found[-1] if vals else None]


def open_images(spec: str, reading: Reading = DEFAULT) -> list[ImageFiles | None]:
    """Opens images for training without labels: in a folder at any depth, or in a list.

    Labels that `open_folder` finds are kept; else all images, or those of train/, are of the one class UNNAMED. Raises
    InputError where there is no image, where those for training are missing, and for a link back to a folder around it.
    """
    if not os.path.isdir(spec):
        if not is_list(spec):
            raise InputError(f"{spec} is a file; --data takes a folder, or a list of images ({', '.join(LISTS)})")
        return [_of_one_class([path for _, path in read_paths(spec)], os.path.dirname(spec), reading), None]
    try:
        return open_folder(Path(spec), reading)
    except InputError:
        inside = {entry.name for entry in os.scandir(spec) if entry.is_dir()}
        train, val = (next((name for name in names if name in inside), None) for names in (TRAINING, VALIDATION))
        if val and not train and _is_split(Path(spec, val), False):
            raise
    folder = os.path.join(spec, train) if train else spec
    files = ordered(image_files(folder, say=False, refuse_circles=True))
    logger.info("%s: its %s images train as one set, since they have no classes", folder, f"{len(files):,}")
    if train and val:
        unread = os.path.join(spec, val)
        logger.info("%s is left out; if it has class folders, --set probe=%s evaluates by them", unread, unread)
    return [_of_one_class(files, folder, reading), None]


def _of_one_class(files: list[str], folder: str, reading: Reading) -> ImageFiles:
    return ImageFiles(files, [0] * len(files), [UNNAMED], reading, folder)


def _is_split(folder: Path, beside: bool) -> bool:
    """Whether a folder called train or val is a split, not a class. beside: there are classes beside it."""
    return any(e.is_dir() and not is_clutter(e.name) for e in os.scandir(folder)) and not (beside and _is_flat(folder))


def _is_flat(folder: Path) -> bool:
    """Whether images lie in a folder itself, not only in folders inside it."""
    files = (e.path for e in os.scandir(folder) if e.is_file() and not is_clutter(e.name))
    return any(images_among(files, PassedOver()))


# ---- class folders


def _class_folder(folder: Path, reading: Reading = DEFAULT, training: bool = True) -> ImageFiles:
    """The images of a folder of class folders, in the order of their names.

    The class of an image is the folder inside `folder` that holds it, as in torchvision; timm takes the innermost one.

    Raises InputError, among others for a link back to a folder around it, which timm's reader would follow forty
    times; OSError for a folder that may not be read, which that reader would pass over.
    """
    files = ordered(image_files(folder, refuse_circles=True))
    folders = [os.path.dirname(file) for file in files]
    if str(folder) in folders:
        stray = printable(files[folders.index(str(folder))])
        listing = f"list the images and their classes in {folder / LABELS[0]}"
        raise InputError(f"{stray} lies in no class folder: move it into one, or {listing}")
    inside = {each: each.removeprefix(str(folder)).strip(os.sep) for each in dict.fromkeys(folders)}
    names = {each: path.partition(os.sep)[0] for each, path in inside.items()}
    classes = ordered(names.values())
    if nested := next((path for path in inside.values() if os.sep in path), ""):
        logger.info("%s: %s", folder, NESTED.format(printable(nested), printable(nested.partition(os.sep)[0])))
    shown = {each.name for each in folder.iterdir() if each.is_dir() and not is_clutter(each.name)}
    if empty := ordered(shown.difference(classes)):
        logger.warning("%s: there are no images in %s, so that there is no such class", folder, first_of(empty))
    numbers = {name: number for number, name in enumerate(classes)}
    source = ImageFiles(files, [numbers[names[each]] for each in folders], classes, reading, str(folder))
    _check_class_folders(source, {*inside.values()}, training)
    return source


def _check_class_folders(source: ImageFiles, inner: set[str], training: bool) -> None:
    """Raises InputError for splits among the classes, and for a class without a readable image.

    inner: the folders that hold the images, by their paths from `source.where`.
    """
    folder, classes = source.where, source.classes
    splits = [name for name in classes if name.lower() in SPLITS]
    if os.path.basename(folder) not in SPLITS and splits:
        if len(splits) == len(classes) and set(splits) <= inner:
            raise InputError(f"{folder}/{splits[0]} holds images and no class folders; expected {splits[0]}/<class>/")
        if not set(splits) <= inner:
            advice = f"name the folder of the training images {folder}/train, and that of the validation images val"
            raise InputError(f"{folder} holds {first_of(splits)} and no train/; {advice}")
    if training and len(classes) < 2:
        hint = f"; if the folders in it are the classes, give --data {folder}/{classes[0]}"
        hint = hint if inner - {*classes} else ""
        raise InputError(f"{folder} has one class only ({classes[0]!r}); expected a folder for each class{hint}")
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
            raise InputError(f"{folder}: no image of the class {classes[label]!r} can be read, the first: {error}")


# ---- labels files


def _labels_files(roots: list[Path], reading: Reading) -> list[ImageFiles]:
    """The images that the labels file of each folder lists; a label is one number if all have one class."""
    tables = [[(*row, list(dict.fromkeys(some))) for *row, some in read_table(_labels_file(root))] for root in roots]
    several = any(len(names) != 1 for table in tables for *_, names in table)
    found = []
    for root, table in zip(roots, tables):
        classes = ordered(name for *_, names in table for name in names)
        if not classes:
            raise InputError(f"{_labels_file(root)} gives no image a class")
        numbers = {name: number for number, name in enumerate(classes)}
        lines, files, names = zip(*table)
        files = [os.path.join(root, file) for file in files]
        labels = [tuple(numbers[name] for name in some) if several else numbers[some[0]] for some in names]
        found.append(ImageFiles(files, labels, classes, reading, str(root), list(lines)))
        listed, passed = set(map(os.path.abspath, files)), PassedOver()
        for path in visible_files(str(root), passed):
            if os.path.abspath(path) not in listed and suffix(path) not in (".csv", ".json"):
                passed[f"{suffix(path) or 'files'} that {_labels_file(root).name} does not list"] += 1
        passed.say(root)
    return found


def _labels_file(folder: Path) -> Path:
    """The labels file of a folder. Raises InputError where there is none, or two."""
    found = [folder / name for name in LABELS if (folder / name).exists()]
    if len(found) != 1:
        have = "two labels files" if found else "no labels file, which the training folder has"
        raise InputError(f"{folder} has {have}; it takes one of {' and '.join(LABELS)}")
    return found[0]
