"""Images by name and in order: folders, shards, Parquet files, and lists and tables as people write and pipe them."""

import io
import itertools
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pictures
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import shards
import torch
from frozen import tiny

from vitfast import Embedder, InputError
from vitfast.data import contents
from vitfast.data.lists import read_paths, read_table
from vitfast.data.records import records
from vitfast.data.shards import local_shards

CONTENTS = shards.files(7)


def content(record) -> bytes:
    """That of CONTENTS whose pixels the Embedder reads of a record."""
    pixels = contents.content(record.content, record.id).content
    return next(file for file in CONTENTS if torch.equal(contents.content(file, "").content, pixels))


def listed(spec, column=None) -> dict[str, bytes]:
    found = list(records(str(spec), column))
    assert len({record.id for record in found}) == len(found)
    return {record.id: content(record) for record in found}


def test_a_folder_is_read_in_the_order_of_names(tmp_path, caplog):
    """At any depth, as tests/eval/test_predict.py has it; what is passed over is counted."""
    for i, name in enumerate(("b/10.png", "b/2.png", os.fsdecode(b"z\xff.png"), "notes.txt")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(CONTENTS[i] if "png" in str(name) else b"no image")
    (tmp_path / "b" / "back").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe.png")
    assert list(listed(tmp_path).items()) == list(zip(("b/10.png", "b/2.png", "z\\udcff.png"), CONTENTS))
    line = "1 links back to a folder around them, 1 .txt, 1 pipes, sockets or devices"
    assert f"{tmp_path}: passed over: {line}" in caplog.text
    assert listed(tmp_path / "b" / "2.png") == {"2.png": CONTENTS[1]}


def test_a_list_holds_a_path_in_each_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i in range(3):
        (tmp_path / f"{i}.png").write_bytes(CONTENTS[i])
    (tmp_path / "list.txt").write_text(f"2.png\n{tmp_path}/0.png\r\n\nnone.png")
    found = list(records("list.txt"))
    assert [(r.id, r.size) for r in found[:2]] == [("2.png", len(CONTENTS[2])), (f"{tmp_path}/0.png", len(CONTENTS[0]))]
    assert found[2].id == "none.png" and found[2].size == -1  # it may come; until then it cannot be read
    (tmp_path / "images.csv").write_text("label,id\ncat,2\n")
    assert [(r.id, r.content, r.size) for r in records("images.csv")] == [("2", "2.png", len(CONTENTS[2]))]
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"0.png\r\n1.png")))
    assert [(r.id, r.content) for r in records("-")] == [("0.png", "0.png"), ("1.png", "1.png")]


def test_web_dataset_shards_are_read_where_they_lie(tmp_path):
    members = [[(f"s/{i}.cls", b"1"), (f"s/{i}.png", CONTENTS[i]), (f"s/{i}.json", b"{}")] for i in range(7)]
    for shard, part in enumerate((members[:4], members[4:])):
        shards.write(tmp_path / f"x-{shard:03d}.tar", [member for group in part for member in group])
    truth = {f"x-{i // 4:03d}.tar/s/{i}.png": CONTENTS[i] for i in range(7)}
    assert listed(tmp_path) == listed(tmp_path / "x-*.tar") == listed(tmp_path / "x-{000..001}.tar") == truth
    assert listed(tmp_path / "x-001.tar") == {name: truth[name] for name in list(truth)[4:]}
    with pytest.raises(InputError, match="there is no file or folder .*x-002.tar"):
        records(str(tmp_path / "x-{000..002}.tar"))
    shards.write(tmp_path / "y.tar", [("a.cls", b"1")])
    with pytest.raises(InputError, match="no image in shard .*y.tar"):
        listed(tmp_path / "y.tar")
    (tmp_path / "z.tar").write_bytes(b"no tar" * 200)
    with pytest.raises(InputError, match="shard .*z.tar cannot be read"):
        listed(tmp_path / "z.tar")


def parquet(file, **columns) -> None:
    pq.write_table(pa.table(columns), file, row_group_size=3)


def test_a_shard_with_a_damaged_header_is_no_shorter_shard(tmp_path):
    """Neither for embeddings nor for training."""
    members = [(f"{i}.{kind}", content) for i in range(3) for kind, content in (("cls", b"1"), ("png", CONTENTS[i]))]
    shards.write(tmp_path / "train-0.tar", members)
    whole = (tmp_path / "train-0.tar").read_bytes()
    header, end = whole.index(b"1.png"), len(whole.rstrip(b"\0")) // 512 * 512 + 512
    for entire in (whole[:end], whole[: end + 512], whole[: end + 1024]):  # as others write them
        (tmp_path / "train-0.tar").write_bytes(entire)
        assert len(listed(tmp_path)) == len(local_shards(tmp_path, ("train",))) == 3
    wrong, zeros = whole[: header + 9] + b"\1" + whole[header + 10 :], whole[:header] + bytes(512)
    for damaged in (wrong, whole[: header + 100], zeros + whole[header + 512 :]):
        (tmp_path / "train-0.tar").write_bytes(damaged)
        for read in (listed, lambda root: local_shards(root, ("train",))):
            with pytest.raises(InputError, match=rf"train-0.tar cannot be read \(damaged at byte {header}\)"):
                read(tmp_path)


def test_paths_in_parquet_files_that_cannot_be_read_say_why(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    parquet(tmp_path / "a.parquet", path=["pipe.png", "none.png", "a\0b.png"])
    found = Embedder(tiny(5), workers=0).embed([r.content for r in records(str(tmp_path / "a.parquet"))], errors="skip")
    assert [reason for _, reason in found.skipped] == [
        f"{tmp_path}/{name} cannot be read as an image ({why}); remove or replace it"
        for name, why in (
            ("pipe.png", "it is no regular file"),
            ("none.png", "No such file or directory"),
            ("a\0b.png", "embedded null byte"),
        )
    ]


def test_parquet_files_hold_bytes_structs_or_paths(tmp_path):
    files = [{"bytes": c, "path": f"{i}.png"} for i, c in enumerate(CONTENTS)]
    parquet(tmp_path / "a.parquet", label=list(range(7)), jpg=CONTENTS)
    assert listed(tmp_path / "a.parquet") == {f"a.parquet:{i}": c for i, c in enumerate(CONTENTS)}
    parquet(tmp_path / "b.parquet", id=[f"n{i}" for i in range(7)], image=files, path=["none"] * 7)
    assert listed(tmp_path / "b.parquet") == {f"n{i}": c for i, c in enumerate(CONTENTS)}
    assert len(listed(tmp_path)) == 14  # both, in the order of names
    (tmp_path / "files").mkdir()
    for i, c in enumerate(CONTENTS):
        (tmp_path / "files" / f"{i}.png").write_bytes(c)
    names = [f"files/{i}.png" for i in range(7)]
    for column, given in (("path", names), ("other", names), ("image", [{"bytes": None, "path": n} for n in names])):
        parquet(tmp_path / "c.parquet", text=["a"] * 7, **{column: given})
        chosen = column if column == "other" else None
        assert list(listed(tmp_path / "c.parquet", chosen).values()) == CONTENTS
        stamps = [(record.size, record.modified) for record in records(str(tmp_path / "c.parquet"), chosen)]
        assert stamps == [((file := (tmp_path / n).stat()).st_size, file.st_mtime_ns) for n in names]
    mixed = [{"bytes": c if i % 2 else None, "path": n} for i, (c, n) in enumerate(zip(CONTENTS, names))]
    parquet(tmp_path / "c.parquet", image=mixed)
    assert list(listed(tmp_path / "c.parquet").values()) == CONTENTS
    assert [str(r.content).endswith(n) for r, n in zip(records(str(tmp_path / "c.parquet")), names)] == [1, 0] * 3 + [1]
    for columns, column, message in (
        (dict(a=[1], b=["x"]), None, r"no column of images \(a, b\); give --column"),
        (dict(a=[b"1"], b=[b"2"]), None, r"several columns of images \(a, b\)"),
        (dict(a=[1]), "a", "no column 'a' of bytes or paths; it has a"),
        (dict(a=[1]), "c", "no column 'c'"),
    ):
        parquet(tmp_path / "d.parquet", **columns)
        with pytest.raises(InputError, match=message):
            listed(tmp_path / "d.parquet", column)
    (tmp_path / "d.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(InputError, match="d.parquet cannot be read as Parquet"):
        listed(tmp_path / "d.parquet")


@pytest.mark.slow
def test_a_row_group_is_let_go_with_its_last_image(tmp_path):
    """So a job holds the images that it reads, not the file."""
    import gc
    import weakref

    parquet(tmp_path / "a.parquet", image=CONTENTS)
    found = list(records(str(tmp_path / "a.parquet")))
    groups = [weakref.ref(record.content.column) for record in found[::3]]
    found.reverse()
    for left in (2, 1, 0):
        for _ in range(min(3, len(found))):
            found.pop().content.read_bytes()
        gc.collect()
        assert sum(group() is not None for group in groups) == left


def test_what_is_no_source_is_refused(tmp_path):
    with pytest.raises(InputError, match="there is no file or folder"):
        list(records(str(tmp_path / "none")))
    with pytest.raises(InputError, match="no images in"):
        list(records(str(tmp_path)))
    shards.write(tmp_path / "x.tar", [("a.png", CONTENTS[0])])
    parquet(tmp_path / "x.parquet", image=CONTENTS)
    with pytest.raises(InputError, match="has both .parquet and .tar files; name those to embed"):
        records(str(tmp_path))
    with pytest.raises(InputError, match="column='a' is for Parquet files"):
        records(str(tmp_path / "x.tar"), "a")
    (tmp_path / "x.parquet").unlink()
    for name in ("inner/a", "a.png"):  # an image is known by its content, at any depth
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pictures.smooth(0).save(tmp_path / name, "PNG")
        with pytest.raises(InputError, match="has both images and .tar files; name those to embed"):
            records(str(tmp_path))
        (tmp_path / "inner" / "a").unlink(missing_ok=True)
    with pytest.raises(InputError, match="a.png is no .tar or .parquet file; for images give their folder"):
        records(str(tmp_path / "*.png"))
    with pytest.raises(InputError, match="is no pattern of file names|there is no file"):
        records(str(tmp_path / "x-{0.tar"))


# ---- lists of paths and tables of classes


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
