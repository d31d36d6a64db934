"""Images by name and in order: folders, lists, WebDataset shards, Parquet files."""

import io
import os
import sys
from types import SimpleNamespace

import pictures
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import shards
import torch
from frozen import tiny

from vitfast import Embedder
from vitfast.data import contents
from vitfast.data.records import records
from vitfast.data.shards import local_shards
from vitfast.errors import InputError

CONTENTS = shards.files(7)


def content(record) -> bytes:
    """That of CONTENTS whose pixels the Embedder reads of a record."""
    pixels = contents.content(record.content, record.id).content
    return next(file for file in CONTENTS if torch.equal(contents.content(file, "").content, pixels))


def listed(spec, column=None) -> dict[str, bytes]:
    found = list(records(str(spec), column))
    assert len({record.id for record in found}) == len(found)
    return {record.id: content(record) for record in found}


def test_a_folder_is_read_at_any_depth_in_the_order_of_names(tmp_path, caplog):
    for i, name in enumerate(("b/10.png", "b/2.png", "a.png", "c/d/e.JPG", "é.png")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(CONTENTS[i])
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "c" / "back").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / os.fsdecode(b"z\xff.png")).write_bytes(CONTENTS[5])
    names = ["a.png", "b/10.png", "b/2.png", "c/d/e.JPG", "z\\udcff.png", "é.png"]
    assert listed(tmp_path) == dict(zip(names, (CONTENTS[i] for i in (2, 0, 1, 3, 5, 4))))
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
    for column in ("path", "other"):
        parquet(tmp_path / "c.parquet", text=["a"] * 7, **{column: names})
        chosen = column if column == "other" else None
        assert list(listed(tmp_path / "c.parquet", chosen).values()) == CONTENTS
        stamps = [(record.size, record.modified) for record in records(str(tmp_path / "c.parquet"), chosen)]
        assert stamps == [((file := (tmp_path / n).stat()).st_size, file.st_mtime_ns) for n in names]
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
