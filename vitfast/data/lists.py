"""Lists of images and tables of their classes, as people have them: lines of text, CSV, TSV, JSON."""

import codecs
import csv
import functools
import itertools
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

from PIL import Image

from ..errors import InputError
from .image_files import SUFFIXES, suffix
from .images import printable

PATHS = ("path", "image_path", "file_name", "filename", "file", "image")  # columns of paths; the first is taken
IDS = ("id", "image_id")  # columns of a list that has none of PATHS: names without suffix
LISTS = (".txt", ".lst", ".csv", ".tsv")
SIDECARS = (".csv", ".json", ".txt", ".xml")  # files beside an image that have its name
logger = logging.getLogger("vitfast")


def is_list(source: str) -> bool:
    """Whether a command's argument is a list of images: the standard input, or a file of one of LISTS."""
    return source == "-" or (os.path.isfile(source) and suffix(source) in LISTS)


def read_paths(source: str) -> Iterator[tuple[str, str]]:
    """(path as written, path to open) of each image that a list names, read line by line.

    source: a file (.csv and .tsv: a table with a column of paths or ids; else a path in each line), or "-" for the
    standard input. A path starts from the current folder or else from the list's; one that leads nowhere stays as it
    is. Raises InputError where the list cannot be read, names no image, or has a line that is no text.
    """
    name = "the standard input" if source == "-" else printable(source)
    find, empty = _Finder("", "" if source == "-" else os.path.dirname(source)), True
    try:
        with nullcontext(sys.stdin.buffer) if source == "-" else open(source, "rb") as file:
            for where, text in (_column if suffix(source) in LISTS[2:] else _whole_lines)(file, name, find):
                empty, found = False, find(text, where)
                yield text, os.path.join(*found) if found else text
    except OSError as error:
        raise InputError(f"{name} cannot be read ({error.strerror})") from None
    if empty:
        raise InputError(f"{name} names no image; it must hold a path in each line")


def read_table(path: Path, say: bool = True) -> list[tuple[str, str, list[str]]]:
    """(where it stands, file, classes) of each line of a table of images (.csv, .tsv or .json).

    All files exist, in the table's folder or in train/ beside it. Their paths start from the table's folder, or are
    absolute where the table has absolute ones. say: log which line is taken for a header. Raises InputError where the
    table cannot be read, lists nothing, or has a wrong line.
    """
    name, find, first, found = printable(str(path)), _Finder(str(path.parent), str(path.parent / "train")), {}, []
    try:
        with open(path, "rb") as stream:
            rows = _json(stream, name) if suffix(path.name) == ".json" else _labels(stream, name, find, say)
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror}") from None
    for where, text, classes in rows:
        if not isinstance(classes, list) or not all(isinstance(each, str) and each for each in classes):
            raise InputError(f"{where}: expected the names of the classes of {printable(text)}, got {classes!r}")
        if not (place := find(text, where)):
            raise InputError(f"{where}: no file {printable(str(path.parent / text))}")
        there = os.path.abspath(os.path.join(*place))
        if there in first:
            raise InputError(f"{where}: {printable(text)} is there already, in {first[there]}; give its classes once")
        first[there] = where
        found.append((where, text if os.path.isabs(text) else os.path.relpath(there, path.parent), classes))
    if not found:
        raise InputError(f"{name} lists no images")
    return found


class _Finder:
    """Finds the files that a list or a table names, in the first of some folders that has them."""

    def __init__(self, *folders: str):
        self.folders, self.stems = folders, functools.cache(_stems)

    def literal(self, name: str) -> tuple[str, str] | None:
        return next(((each, name) for each in self.folders if os.path.isfile(os.path.join(each, name))), None)

    def __call__(self, text: str, where: str) -> tuple[str, str] | None:
        """(folder, name of the file in it), None without one. Raises InputError for an id of two images."""
        name = text.replace("\\", "/")
        place = self.literal(text) or self.literal(name)
        if place or suffix(name) in SUFFIXES:
            return place
        inside, stem = os.path.split(name)
        for folder in reversed(self.folders):
            found = self.stems(os.path.join(folder, inside)).get(stem, [])
            found = [each for each in found if suffix(each) in SUFFIXES] or found
            if len(found) > 1:
                candidates = " or ".join(map(printable, sorted(found)))
                raise InputError(f"{where}: {printable(text)} may be {candidates}; expected one image, or a whole name")
            if found:
                return folder, os.path.join(inside, found[0])
        return None


def _stems(folder: str) -> dict[str, list[str]]:
    """The files of a folder by their names without suffix, except hidden ones and sidecars."""
    found = {}
    with suppress(OSError, ValueError):  # the folder is absent, or may not be read
        for name in os.listdir(folder or "."):
            if not name.startswith(".") and suffix(name) not in SIDECARS and os.path.isfile(os.path.join(folder, name)):
                found.setdefault(os.path.splitext(name)[0], []).append(name)
    return found


def _lines(file: Iterable[bytes], name: str, errors: str) -> Iterator[tuple[str, str]]:
    """(where it stands, text and line break) of each line. Raises InputError for a line that is no text."""
    for number, line in enumerate(file, 1):
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        where, text = f"{name}, line {number}", "\0"
        with suppress(UnicodeDecodeError):
            text = line.decode("utf-8", errors)
        if "\0" in text:  # UTF-16 text has NUL bytes
            raise InputError(f"{where} is no UTF-8 text: it has NUL bytes or another encoding; save it as UTF-8")
        yield where, text


def _whole_lines(file: Iterable[bytes], name: str, find: _Finder) -> Iterator[tuple[str, str]]:
    """(where it stands, path) of each line that is one path. Quotes around it may be part of a name."""
    for where, line in _lines(file, name, "surrogateescape"):
        text = line.rstrip("\r\n")
        if re.fullmatch(r"""(["']).+\1""", text) and not find.literal(text):
            text = text[1:-1]
        if text.strip():
            yield where, text


def _rows(file: Iterable[bytes], name: str, errors: str) -> Iterator[tuple[str, list[str], str]]:
    """(where it stands, cells, delimiter) of each row of a table that is not empty. Raises InputError."""
    ahead, lines = itertools.tee(text for _, text in _lines(file, name, errors))
    first = re.sub('"[^"]*"', "", next(filter(str.strip, ahead), ""))
    del ahead  # it would keep all lines in memory
    known = "\t" if suffix(name) == ".tsv" else ",;\t"
    delimiter = next((each for each in first if each in known), known[0])
    reader, begin = csv.reader(lines, delimiter=delimiter, skipinitialspace=True, strict=True), 1
    try:
        for cells in reader:
            if any(map(str.strip, cells)):
                yield f"{name}, line {reader.line_num}", cells, delimiter
            begin = reader.line_num + 1
    except csv.Error as error:
        raise InputError(f"{name} cannot be read: {error}, in the row that begins in line {begin}") from None


def _column(file: Iterable[bytes], name: str, find: _Finder) -> Iterator[tuple[str, str]]:
    """(where it stands, path) of each row: from the column that the header names, else from the first."""
    width = column = 0
    for where, cells, _ in _rows(file, name, "surrogateescape"):
        if not width:
            width, header = len(cells), [cell.strip().lower() for cell in cells]
            named = [header.index(each) for each in (*PATHS, *IDS) if each in header]
            if named and not any(suffix(cell) in SUFFIXES for cell in cells):
                column = named[0]
                continue
            if _is_header(cells, where, find):
                continue
        if len(cells) != width or not cells[column]:
            raise InputError(f"{where}: expected {width} cells, of which number {column + 1} is a path, got {cells}")
        yield where, cells[column]


def _labels(file: Iterable[bytes], name: str, find: _Finder, say: bool) -> list[tuple[str, str, list[str]]]:
    """(where it stands, file, classes) of each row but the header. Raises InputError."""
    rows = []
    for where, cells, delimiter in _rows(file, name, "strict"):
        inner = "," if delimiter == ";" else ";"
        if len(cells) != 2 or not cells[0]:
            raise InputError(f"{where}: expected a file and its classes, such as cat.jpg{delimiter}cat{inner}dog")
        classes = cells[1].split(inner) if cells[1].strip() else []
        rows.append((where, cells[0], [each.strip() for each in classes]))
    others = {each for _, _, classes in rows[1:] for each in classes}
    if rows and rows[0][2] and (rows[0][1:] == ("file", ["classes"]) or others.isdisjoint(rows[0][2])):
        del rows[: _is_header((rows[0][1], *rows[0][2]), rows[0][0], find, say)]
    return rows


def _is_header(cells: tuple[str, ...] | list[str], where: str, find: _Finder, say: bool = True) -> bool:
    """Whether a row is a header, since its first cell can be no file; if `say`, the log says so."""
    is_header = suffix(cells[0]) not in Image.registered_extensions() and not find(cells[0], where)
    if say and is_header and tuple(cells) != ("file", "classes"):
        logger.info("%s (%s) is taken for a header", where, ", ".join(map(printable, cells)))
    return is_header


def _json(file: Iterable[bytes], name: str) -> list[tuple[str, str, list[str]]]:
    """(where it stands, file, classes) of each member of an object. Raises InputError."""
    text = "".join(line for _, line in _lines(file, name, "strict"))
    if not text.lstrip().startswith("{"):
        raise InputError(f'{name} must hold an object such as {{"cat.jpg": ["cat", "dog"]}}')
    try:
        pairs = json.loads(text, object_pairs_hook=list)  # pairs: a dict would hide a file given twice
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} cannot be read: {error}") from None
    return [(f"{name}, {printable(file)}", file, classes) for file, classes in pairs]
