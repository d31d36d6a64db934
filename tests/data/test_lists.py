"""Lists of paths and tables of classes, as people write, export and pipe them."""

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vitfast import InputError
from vitfast.data.lists import read_paths, read_table

BOM = b"\xef\xbb\xbf"
FILES = ["a.jpg", "b c,d;e.jpg", "s.png", "'q'", '"r"', "back\\slash.jpg", "é.jpg", "1.2.840.tif", ".0003.jpg"]
FILES += "sub/0001.jpg sub/0002.PNG sub/x.d/x two.jpg two.png mask.jpg mask.npy mask.txt note.txt".split()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder in the current one, whose files hold their own names."""
    monkeypatch.chdir(tmp_path)
    for name in FILES:
        Path("data", name).parent.mkdir(parents=True, exist_ok=True)
        Path("data", name).write_text(name)
    return Path("data")


# A list, and for each of its images (path as written, file that is opened), or one where they are the same.
LISTS = [
    ("l.txt", b"a.jpg\r\ns.png\r\n", ["a.jpg", "s.png"]),
    ("l.lst", BOM + b"a.jpg\n\n \n./a.jpg", ["a.jpg", ("./a.jpg", "a.jpg")]),
    ("l.txt", b"b c,d;e.jpg", ["b c,d;e.jpg"]),
    ("l.txt", b"\"a.jpg\"\r\n's.png'\n\"r\"\n'q'", ["a.jpg", "s.png", '"r"', "'q'"]),
    ("l.txt", b"sub\\0001.jpg\nback\\slash.jpg", [("sub\\0001.jpg", "sub/0001.jpg"), "back\\slash.jpg"]),
    ("l.txt", b"no.jpg\nmask\n.0003", [("no.jpg", None), ("mask", "mask.jpg"), (".0003", None)]),
    ("l.txt", b"note\nsub/x\nsub\\0002", [("note", None), ("sub/x", None), ("sub\\0002", "sub/0002.PNG")]),
    ("l.txt", b"caf\xe9.jpg\n\xc3\xa9.jpg", [("caf\udce9.jpg", None), "é.jpg"]),
    ("l.csv", b'label;Image\r\ncat;a.jpg\r\n"x;y";sub\\0001\r\n', ["a.jpg", ("sub\\0001", "sub/0001.jpg")]),
    ("l.csv", b'a.jpg\n"b c,d;e.jpg"\r\n\n1.2.840', ["a.jpg", "b c,d;e.jpg", ("1.2.840", "1.2.840.tif")]),
    ("l.csv", b"a.jpg,image\ns.png,path\n", ["a.jpg", "s.png"]),  # no header
    ("l.csv", b"breed,Image_ID\ncat,a\n", [("a", "a.jpg")]),
    ("l.tsv", b"x;y\tpath\n1\tb c,d;e.jpg\n", ["b c,d;e.jpg"]),
]


@pytest.mark.parametrize("name, content, lines", LISTS)
@pytest.mark.parametrize("here", [True, False])
def test_a_line_of_a_list_names_a_file_here_or_beside_the_list(name, content, lines, here, folder, monkeypatch):
    (folder / name).write_bytes(content)
    if here:
        monkeypatch.chdir(folder)
    found = list(read_paths(name if here else f"data/{name}"))
    for (text, path), line in zip(found, lines, strict=True):
        written, file = (line, line) if isinstance(line, str) else line
        assert text == written and (path == text if file is None else Path(path).read_text() == file)


def test_the_current_folder_comes_first(folder, monkeypatch):
    monkeypatch.chdir(folder)
    Path("sub/l.txt").write_text("a.jpg\n0001.jpg\n0002\n")
    Path("0001.jpg").touch()
    assert [path for _, path in read_paths("sub/l.txt")] == ["a.jpg", "0001.jpg", "sub/0002.PNG"]


def test_the_standard_input_is_read_line_by_line(folder, monkeypatch):
    lines = itertools.chain([BOM + b"data/a.jpg\r\n", b"data/mask\n"], itertools.repeat(b"no.jpg\n"))  # without an end
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=lines))
    found = list(itertools.islice(read_paths("-"), 3))
    assert found == [("data/a.jpg", "data/a.jpg"), ("data/mask", "data/mask.jpg"), ("no.jpg", "no.jpg")]


CAT_DOG = [("a.jpg", ["cat", "dog"]), ("s.png", [])]
TABLES = [
    (b"a.jpg,cat;dog\ns.png,\n", CAT_DOG),
    (BOM + b'file,classes\r\n"a.jpg", "cat; dog"\r\n\r\ns.png,\r\n,\r\n', CAT_DOG),
    (b"file;classes\r\na.jpg;cat, dog\r\ns.png; \r\n", CAT_DOG),
    (b'"b c,d;e.jpg"\tcat\na.jpg\tcat;dog\n', [("b c,d;e.jpg", ["cat"]), ("a.jpg", ["cat", "dog"])]),
    (b'"b c,d;e.jpg";"a;b"\r', [("b c,d;e.jpg", ["a;b"])]),
    (b"image.id,breed\nsub/0001,cat\nmask,dog\n", [("sub/0001.jpg", ["cat"]), ("mask.jpg", ["dog"])]),
    (b"sub\\0001,id\nback\\slash.jpg,x\n", [("sub/0001.jpg", ["id"]), ("back\\slash.jpg", ["x"])]),
]


@pytest.mark.parametrize("content, rows", TABLES)
def test_a_table_gives_the_classes_of_each_image(content, rows, folder, caplog):
    (folder / "labels.csv").write_bytes(content)
    with caplog.at_level("INFO"):
        assert [row[1:] for row in read_table(folder.absolute() / "labels.csv")] == rows
    said = f"{folder.absolute()}/labels.csv, line 1 (image.id, breed) is taken for a header"
    assert caplog.messages == ([said] if b"breed" in content else [])


def test_rows_tell_where_they_stand_and_absolute_paths_stay(folder):
    whole = str(Path("data/a.jpg").absolute())
    (folder / "labels.csv").write_text(f"file,classes\n\n{whole},cat\ns.png,dog\n")
    rows = [("data/labels.csv, line 3", whole, ["cat"]), ("data/labels.csv, line 4", "s.png", ["dog"])]
    assert read_table(folder / "labels.csv") == rows
    (folder / "labels.json").write_text('\ufeff{"sub/0001": ["cat"], "s.png": []}')
    rows = [("data/labels.json, sub/0001", "sub/0001.jpg", ["cat"]), ("data/labels.json, s.png", "s.png", [])]
    assert read_table(folder / "labels.json") == rows


# Of lists (l.*) and labels files: the content, and the error.
WRONG = [
    ("l.txt", b"\r\n\n", "l.txt names no image"),
    ("l.csv", b"path,label\n", "l.csv names no image"),
    ("l.txt", "a.jpg\n".encode("utf-16"), "l.txt, line 1 is no UTF-8 text.*save it as UTF-8"),
    ("l.csv", b"a.jpg\ns.png\0", "l.csv, line 2 is no UTF-8 text: it has NUL bytes"),
    ("l.txt", b"a.jpg\ntwo\n", "l.txt, line 2: two may be two.jpg or two.png; expected one image"),
    ("l.csv", b"label,path\nx,a.jpg\nx,b c,d;e.jpg\n", "line 3: expected 2 cells, of which number 2 is a path, got "),
    ("l.csv", b"label,path\ncat,\n", "line 2: expected 2 cells, of which number 2 is a path"),
    ("l.csv", b'a.jpg\n"s.png\nmask.jpg\n', "l.csv cannot be read: .*in the row that begins in line 2"),
    ("labels.csv", b"b.png,dog\na.jpg,cat\n", "line 1: no file data/b.png"),
    ("labels.csv", b"0009,dog\na.jpg,cat\ns.png,dog\n", "line 1: no file data/0009"),
    ("labels.csv", b"0009,\na.jpg,cat\n", "line 1: no file data/0009"),
    ("labels.csv", b"id,label\na.jpg,cat\n0009,cat\n", "line 3: no file data/0009"),
    ("labels.csv", b"a.jpg,cat\nfile,classes\n", "line 2: no file data/file"),
    ("labels.csv", b"sub/0001,cat\ntwo,dog\n", "line 2: two may be two.jpg or two.png"),
    ("labels.csv", b"a.jpg,x\n./a.jpg,x\n", "line 2: ./a.jpg is there already, in data/labels.csv, line 1; give its "),
    ("labels.csv", b"a.jpg,cat\nsub/../a.jpg,dog\n", "line 2: sub/../a.jpg is there already, in .*line 1"),
    ("labels.csv", b"a.jpg,x\ns.png,cat;;dog\n", "line 2: expected the names of the classes of s.png, got .'cat', ''"),
    ("labels.csv", b"a.jpg,cat,dog\n", "line 1: expected a file and its classes, such as cat.jpg,cat;dog"),
    ("labels.csv", b"a.jpg;cat\ns.png\n", "line 2: expected a file and its classes, such as cat.jpg;cat,dog"),
    ("labels.csv", b"a.jpg,cat\n,dog\n", "line 2: expected a file and its classes"),
    ("labels.csv", b"a.jpg,cat\ns.png,caf\xe9\n", "line 2 is no UTF-8 text"),
    ("labels.csv", "a.jpg,cat\n".encode("utf-16-le"), "line 1 is no UTF-8 text.*save it as UTF-8"),
    (
        "labels.csv",
        b'a.jpg,x\ns.png,"x\nx\n',
        "cannot be read: unexpected end of data, in the row that begins in .* 2$",
    ),
    ("labels.csv", b"file,classes\n", "labels.csv lists no images"),
    ("labels.json", b'{\n"\xff": []}', "line 2 is no UTF-8 text.*save it as UTF-8"),
]


@pytest.mark.parametrize("name, content, said", WRONG)
def test_a_wrong_line_is_named_with_what_was_expected(name, content, said, folder):
    (folder / name).write_bytes(content)
    with pytest.raises(InputError, match=said) as caught:
        read_table(folder / name) if name.startswith("labels") else list(read_paths(str(folder / name)))
    assert "\n" not in str(caught.value)
