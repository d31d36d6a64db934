"""The classes of data sets: the one order of their names, and how two lists of names are matched."""

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Real

from ..errors import InputError, both_ends
from ..run.config import MOST_CLASSES
from .images import printable

NAMED = 3  # how many classes a message names
DIGITS = re.compile("([0-9]+)")


def ordered(names: Iterable[str]) -> list[str]:
    """Returns each name once, in the order that all classes and files have: 2 before 10, as people count.

    The order is timm's. Names that timm's natural_key takes for equal, such as "Cat" and "cat" or "1" and "01", follow
    the order of their letters, so that every process has the same order.
    """
    unique = set(names)
    try:
        return sorted(unique, key=_key)
    except ValueError:  # Python reads no number of more than 4,300 digits
        return sorted(unique)


def _key(name: str) -> tuple:
    parts = DIGITS.split(name.lower())
    parts[1::2] = map(int, parts[1::2])
    return parts, name


def first_of(names: Sequence[str], others: Iterable[str] = ()) -> str:
    """The first three names as text, quoted and escaped where they look like one of `others`."""
    alike = {_look(name): name for name in others}
    shown = [ascii(n) if alike.get(_look(n), n) != n or n != n.strip() else printable(n) for n in names[:NAMED]]
    shown = [f"{n} ({ascii(n)})" if others and not n.isascii() else n for n in shown]
    return f"{', '.join(shown)}{' ...' if len(names) > NAMED else ''}"


def _look(name: str) -> str:
    return unicodedata.normalize("NFKC", name).strip()


def library_classes(dataset: object) -> tuple[list[str], dict | None]:
    """(classes, class number of each label) of a library's data set; ([], None) without names.

    Several names of one index, as torchvision's ImageNet has them, are one class, "tench, Tinca tinca". Indices may
    begin at 1 and have gaps. A label may be the index or one of the names.
    """
    index, listed = getattr(dataset, "class_to_idx", None) or {}, getattr(dataset, "classes", None) or ()
    names: dict[int, list[str]] = {}
    if listed and len(listed) > max(map(int, index.values()), default=0):  # ImageNet has two classes named "crane"
        names = {i: [each] if isinstance(each, str) else list(map(str, each)) for i, each in enumerate(listed)}
    else:
        for name, number in index.items():
            names.setdefault(int(number), []).append(str(name))
    places = {number: place for place, number in enumerate(sorted(names))}
    numbers = {name: places[number] for number, some in names.items() for name in some} | places
    return [", ".join(names[number]) for number in places], numbers or None


def class_number(label: object, numbers: Mapping | None, count: int | None, where: str) -> int:
    """The class number of a label as a data set has it: `numbers[label]`, or the label itself.

    numbers: the class number of each label, where labels are names or a library's indices; None: labels are class
    numbers, less than `count` where that is known. Raises InputError for labels that are no class.
    """
    with suppress(AttributeError, ValueError, RuntimeError):  # NumPy's and torch's scalars have it
        label = label.item()
    if numbers is not None and isinstance(label, (str, Real)) and label in numbers:
        return numbers[label]
    if numbers is not None or not isinstance(label, Real) or not float(label).is_integer():
        some = numbers and f"one of {len(set(numbers.values()))} classes, such as {next(iter(numbers))!r}"
        expected = some or "a whole number from 0, or text where all labels are names"
        raise InputError(f"{where} has the class {both_ends(repr(label), 60)}; expected {expected}")
    most = MOST_CLASSES if count is None else count
    if not 0 <= label < most:
        have = f"{where} has the class {int(label)}{' (this split has no labels)' if label == -1 else ''}"
        raise InputError(f"{have}; classes are numbers from 0 to at most {most - 1:,}")
    return int(label)


def class_numbers(labels: list, numbers: Mapping | None, name: Callable[[int], str]) -> list[int]:
    """Returns the class number of each label; `name(i)` is the name of image i in errors."""
    first = dict(zip(reversed(labels), range(len(labels))[::-1]))
    known = {label: class_number(label, numbers, None, name(index)) for label, index in first.items()}
    return [known[label] for label in labels]


def text_classes(labels: Iterable) -> tuple[list[str], dict | None]:
    """(classes, class number of each label) where all labels are text; ([], None) for other labels."""
    names = set(labels)
    classes = ordered(names) if all(isinstance(name, str) for name in names) else []
    return classes, {name: number for number, name in enumerate(classes)} or None


def count_classes(labels: Sequence[int], where: str) -> int:
    """How many classes the images have. Raises InputError unless their numbers are 0, 1, 2, ..."""
    found = sorted(set(labels))
    if found != list(range(len(found))):
        odd = next(number for number in (*range(len(found)), *found) if number not in found)
        have = f"labels are {len(found)} numbers from {found[0]} to {found[-1]}, without {odd}"
        right = f"expected 0 to {len(found) - 1}, or names"
        raise InputError(f"{where}: {have}; {right}. If images are missing, say --set num_classes={found[-1] + 1}")
    return len(found)


def places_by_name(names: Sequence[str], known: Sequence[str]) -> list[int | None]:
    """The place of each name among the known ones, None where it is unknown.

    Equal names are the same class. ImageNet's classes have two names, WordNet numbers (n01440764) and synonyms.
    """
    if list(names) == list(known):
        return list(range(len(known)))
    for ours, theirs in ((names, known), (_wordnet(names), _wordnet(known))):
        places = {name: place for place, name in enumerate(theirs)}
        twice = next((name for name in ours if theirs.count(name) > 1), None) if len(places) < len(theirs) else None
        found = [places.get(name) for name in ours]
        if not twice and None not in found:
            return found
    if twice:
        raise InputError(f"two classes of the weights are named {twice!r}: remove or change the names in config.json")
    return found


def imagenet_numbers(names: Sequence[str]) -> list[int]:
    """The numbers of ImageNet's classes by either of their names; other names get their places."""
    from timm.data import ImageNetInfo

    found = places_by_name(names, ImageNetInfo().label_names())
    return [place if number is None else number for place, number in enumerate(found)]


def _wordnet(names: Sequence[str]) -> list[str]:
    """Returns WordNet numbers for the names of ImageNet's 1000 classes in its order, else the names."""
    if len(names) == 1000:
        from timm.data import ImageNetInfo

        info = ImageNetInfo()
        pairs = zip(names, map(info.index_to_description, range(1000)))
        if sum(a.partition(",")[0].lower() == b.partition(",")[0].lower() for a, b in pairs) > 900:
            return info.label_names()
    return list(names)
