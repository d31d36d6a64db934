"""Images to embed, by name and in order: of folders, lists, WebDataset shards and Parquet files."""

import glob
import itertools
import os
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..errors import InputError
from .identity import stamp
from .image_files import PassedOver, image_files, images_among, is_clutter, suffix, visible_files
from .images import printable
from .lists import PATHS, is_list, read_paths
from .shards import Slice, tar_images


class Record(NamedTuple):
    """An image to embed: its name, its content, and its size and time, which show a change."""

    id: str
    content: object  # a path, or an object with `read_bytes`
    size: int  # in bytes; that of the file that holds the image where its own is not known
    modified: int = 0  # when the file that holds the image was modified, in ns


def records(spec: str, column: str | None = None) -> Iterable[Record]:
    """Lists the images that a spec names, always in the same order.

    spec: a folder of images at any depth; a list of paths that `read_paths` takes, "-" for the standard input;
    WebDataset shards or Parquet files: a file, a folder of them, a pattern in the shell's words (`*`, `?`,
    `{000..099}`). column: that of a Parquet file with the images' bytes, or with paths relative to the file's folder;
    None: the only column of bytes or of Hugging Face's images, else the first of PATHS.
    Nothing is decoded here. Raises InputError if there are no images or they cannot be listed.
    """
    files, root = _files(spec) if spec != "-" else ([], "")
    kinds = sorted({kind for kind in map(_kind, files) if kind})
    others = (path for path in visible_files(spec, PassedOver()) if not _kind(path)) if os.path.isdir(spec) else ()
    if kinds and any(images_among(others, PassedOver())):
        raise InputError(f"{spec} has both images and {kinds[0]} files; name those to embed, as {spec}/*{kinds[0]}")
    if len(kinds) > 1:
        raise InputError(f"{spec} has both {kinds[0]} and {kinds[1]} files; name those to embed, as {spec}/*{kinds[0]}")
    if column is not None and kinds != [".parquet"]:
        raise InputError(f"column={column!r} is for Parquet files, and {spec} has none")
    if kinds == [".tar"]:
        return (record for path in files for record in _of_tar(path, root))
    if kinds == [".parquet"]:
        return (record for path in files for record in _of_parquet(path, root, column))
    if is_list(spec):
        named = read_paths(spec)
    else:
        named = ((os.path.relpath(path, root or "."), path) for path in image_files(spec))
    return (Record(printable(name), path, *stamp(path)) for name, path in named)


def _kind(path: str) -> str:
    return found if (found := suffix(path)) in (".tar", ".parquet") else ""


def _files(spec: str) -> tuple[list[str], str]:
    """The .tar and .parquet files of a spec, sorted, and the folder that their names start from."""
    if os.path.isdir(spec):
        return sorted(os.path.join(spec, n) for n in os.listdir(spec) if _kind(n) and not is_clutter(n)), spec
    if os.path.exists(spec):
        return [spec] if _kind(spec) else [], os.path.dirname(spec)
    patterns = [spec]
    if "{" in spec:
        from braceexpand import UnbalancedBracesError, braceexpand

        try:
            patterns = list(braceexpand(spec))
        except (UnbalancedBracesError, ValueError) as error:
            raise InputError(f"{spec} is no pattern of file names ({error})") from None
    found = []
    for pattern in patterns:
        matching = sorted(glob.glob(pattern, recursive=True))
        if not matching:
            raise InputError(f"there is no file or folder {pattern}")
        found += matching
    if odd := next((path for path in found if not _kind(path)), None):
        raise InputError(f"{odd} is no .tar or .parquet file; for images give their folder, or a list of them (.txt)")
    return found, os.path.commonpath([os.path.dirname(path) for path in found])


# ---- WebDataset


def _of_tar(path: str, root: str) -> Iterator[Record]:
    """The images of a shard by their names, in the order in which they lie there."""
    shard, found, passed = os.path.relpath(path, root or "."), False, PassedOver()
    for member in tar_images(path, passed):
        found = True
        content = Slice(path, member.offset_data, member.size)
        yield Record(printable(f"{shard}/{member.name}"), content, *stamp(content))
    passed.say(path)
    if not found:
        raise InputError(f"no image in shard {path}; images are files that Pillow can open, such as .jpg and .png")


# ---- Parquet


class _Group:
    """A column of a row group, read when the first of its values is asked for."""

    def __init__(self, path: str, number: int, column: str):
        self.path, self.number, self.column = path, number, column
        self.lock, self.values = threading.Lock(), None

    def __getitem__(self, row: int):
        import pyarrow.parquet as pq

        with self.lock:
            if self.values is None:
                with pq.ParquetFile(self.path) as file:
                    self.values = file.read_row_group(self.number, columns=[self.column]).column(0)
            return self.values[row]


class Cell(NamedTuple):
    """An image in a table of Arrow: bytes, or a struct that has them."""

    column: object
    row: int
    path: str  # the file that holds the table
    size: int | None = None  # bytes of the image, where they are known without reading it

    def read_bytes(self) -> bytes:
        value = self.column[self.row].as_py()
        value = value.get("bytes") if isinstance(value, dict) else value  # Hugging Face writes images as such a struct
        if value is None:
            raise ValueError("its row has no image")
        return value


def _of_parquet(path: str, root: str, column: str | None) -> Iterator[Record]:
    """The images of a Parquet file, named by its column `id`, else by file and row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    name, of_file, row = os.path.relpath(path, root or "."), stamp(path), itertools.count()
    try:
        with pq.ParquetFile(path) as file:
            column = _column(file.schema_arrow, path, column)
            named = ["id"] if "id" in file.schema_arrow.names and column != "id" else []
            for number in range(file.num_row_groups):
                group, files = _Group(path, number, column), _files_of_group(file, number, column)
                ids = file.read_row_group(number, columns=named).column(0).to_pylist() if named else [None] * len(files)
                for place, (own, image) in enumerate(zip(ids, files)):
                    fallback = f"{name}:{next(row)}"
                    content = os.path.join(os.path.dirname(path), image) if image else Cell(group, place, path)
                    known = stamp(content) if image else of_file
                    yield Record(fallback if own is None else printable(str(own)), content, *known)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} cannot be read as Parquet ({' '.join(str(error).split())})") from None


def _files_of_group(file, number: int, column: str) -> list[str | None]:
    """For each row of a group: the path of its image's own file, None where the row holds the image.

    Hugging Face's datasets write images that were given by their paths as {bytes: null, path}.
    """
    group = file.metadata.row_group(number)
    leaves = {leaf.path_in_schema: leaf.statistics for leaf in map(group.column, range(group.num_columns))}
    if column in leaves and "string" in str(file.schema_arrow.field(column).type):
        return file.read_row_group(number, columns=[column]).column(0).to_pylist()
    told = leaves.get(f"{column}.bytes")
    lacking = told.null_count if told is not None and told.has_null_count else 1  # no statistics: some may
    if f"{column}.path" not in leaves or not lacking:
        return [None] * group.num_rows
    read = [f"{column}.path"] if lacking == group.num_rows else [column]
    values = file.read_row_group(number, columns=read).column(0).to_pylist()
    return [value["path"] if value and value.get("bytes") is None else None for value in values]


def _column(schema, path: str, column: str | None) -> str:
    """The name of the column of images: `column`, or the only one there is. Raises InputError."""
    import pyarrow.types as types

    def is_bytes(kind) -> bool:
        return types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)

    texts = [f.name for f in schema if types.is_string(f.type) or types.is_large_string(f.type)]
    structs = [f.name for f in schema if types.is_struct(f.type) and "bytes" in [part.name for part in f.type]]
    images = [f.name for f in schema if is_bytes(f.type) or f.name in structs]
    if column is not None:
        if column not in (*texts, *images):
            raise InputError(f"{path} has no column {column!r} of bytes or paths; it has {', '.join(schema.names)}")
        return column
    found = images or [name for name in PATHS if name in texts][:1]
    if len(found) != 1:
        many = "several columns" if found else "no column"
        raise InputError(f"{path} has {many} of images ({', '.join(found or schema.names)}); give --column")
    return found[0]
