"""WebDataset shards by index: what cannot be read is named and ends nothing."""

import gzip
import hashlib
import io

import numpy as np
import pytest
import torch
from PIL import Image
from runs import digits
from shards import files, shards, write

from vitfast import InputError
from vitfast.data import samples
from vitfast.data.datasets import take
from vitfast.data.identity import described, fingerprint
from vitfast.data.loader import open_data
from vitfast.data.samples import PADDING
from vitfast.data.shards import local_shards
from vitfast.run.distributed import Ranks

CPU = torch.device("cpu")


def test_local_shards_are_read_by_index(tmp_path):
    contents = files(9)
    root = shards(tmp_path, contents, suffix="JPEG")  # whatever the suffix says
    data = open_data(digits(data=f"wds/{root}"), (24, 24), (8, 8), CPU)
    order = [0, 2, 4, 6, 8, 1, 3, 5, 7]
    for source in (data.val, data.train):
        assert source.labels == [i % 3 for i in order] and source.classes == ["0", "1", "2"]
        for at, i in enumerate(order):
            assert np.array_equal(np.asarray(source[at][0]), np.asarray(Image.open(io.BytesIO(contents[i]))))
        assert source.name(5) == f"{root}/{'val' if source is data.val else 'train'}-1.tar, s/001.JPEG"
        assert described(source, 5)[:3] == ("s/001.JPEG", 1, len(contents[1]))
    taken = take(data.train, 4)
    assert taken.indices == take(data.train, 4).indices
    labels = "".join(f"{label}\0" for label in taken.labels)
    assert fingerprint(taken)[0]["labels"] == hashlib.sha256(labels.encode()).hexdigest()
    few = open_data(digits(data=f"wds/{root}", shots=2, hold_out=0.3), (24, 24), (8, 8), CPU)
    assert sorted(few.train.labels) == [0, 0, 1, 1, 2, 2] and sorted(few.val.labels) == [0, 1, 2]


@pytest.mark.slow
def test_a_broken_image_of_a_shard_is_left_out_named_and_counted(tmp_path):
    contents = files(8)
    contents[3] = contents[3][:150]
    root = shards(tmp_path, contents)
    seen = {}
    for world in (1, 2, 3):  # more ranks than shards, too
        config = digits(data=f"wds/{root}", eval_batch_size=2)
        ranks = [open_data(config, (24, 24), (8, 8), CPU, Ranks(rank, world)) for rank in range(world)]
        batches = [list(each.in_order(each.val)) for each in ranks]
        assert len({len(b) for b in batches}) == 1
        labels = [label for rank in batches for _, some, _ in rank for label in some.tolist() if label != PADDING]
        seen[world] = sorted(labels), [text for rank in batches for _, _, told in rank for text in told]
    assert seen[1] == seen[2] == seen[3] and seen[1][0] == sorted(i % 3 for i in range(8) if i != 3)
    assert len(seen[1][1]) == 1 and f"{root}/val-1.tar, s/003.png is a broken image" in seen[1][1][0]


def test_shards_are_read_file_by_file_in_an_order_of_the_epoch(monkeypatch):
    """Each sample once, near the others of its file, so that a slow disk reads ahead."""
    monkeypatch.setattr(samples, "WINDOW", 50)
    sizes = (200, 300, 100, 400)
    orders = [samples.epoch_order(1000, 7, epoch, shards=sizes)[0] for epoch in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1] and all(sorted(order) == list(range(1000)) for order in orders)
    ends = np.cumsum(sizes)
    for order in orders:
        places = np.argsort(order)  # of each sample
        for first, last in zip(ends - sizes, ends):
            assert np.ptp(places[first:last]) < last - first + 2 * 50
            assert not np.array_equal(np.argsort(places[first:last]), np.arange(last - first))
    keys = list(samples.stream_keys(1000, 100, 7, 5, 15, shards=sizes))
    assert [index for batch in keys for _, index in batch] == orders[0][500:] + orders[1][:500]


def test_shards_of_other_splits_are_passed_over_by_name(tmp_path, caplog):
    caplog.set_level("INFO")
    root = shards(tmp_path, files(6))
    for name in ("valuable", "trainval", "extra"):
        write(root / f"{name}-0.tar", [("a.png", files(1)[0]), ("a.cls", b"2")])
    data = open_data(digits(data=f"wds/{root}", workers=0), (24, 24), (8, 8), CPU)
    assert (len(data.train), len(data.val)) == (6, 6)
    passed = ", ".join(f"{root}/{name}-0.tar" for name in ("extra", "trainval", "valuable"))
    assert f"{root}: reads {root}/val*.tar and passes over {passed}" in caplog.text


def test_wrong_shards_are_named(tmp_path):
    picture = files(1)[0]
    for number, message in (
        (None, r"train\*.tar: no image in it has a class"),
        (b"-1", "a.png has the class -1 .this split has no labels.; classes are numbers from 0 to"),
        (b"1000000", "class 1000000; classes are .* at most 999,999"),
        (b" ", "train-0.tar cannot be read .a.cls is empty"),
    ):
        write(tmp_path / "train-0.tar", [("a.png", picture), *([] if number is None else [("a.cls", number)])])
        with pytest.raises(InputError, match=message):
            open_data(digits(data=f"wds/{tmp_path}"), (24, 24), (8, 8), CPU)


def test_pairs_may_lie_apart_and_compressed_shards_are_refused(tmp_path):
    (one, two), beside = files(2), [("b.json", b"{}"), ("b.png", files(1)[0]), ("b.cls", b"0")]
    write(tmp_path / "train-0.tar", [*beside, ("c.png", one), ("a.cls", b"1"), ("a.png", two), ("c.cls", b"1")])
    write(tmp_path / "val-0.tar", beside)
    data = open_data(digits(data=f"wds/{tmp_path}", batch_size=3, workers=0), (24, 24), (8, 8), CPU)
    assert sorted(next(iter(data.train_batches(0, 1)))[1].tolist()) == [0, 1, 1]
    (tmp_path / "val-0.tar.gz").write_bytes(gzip.compress((tmp_path / "val-0.tar").read_bytes()))
    with pytest.raises(InputError, match="val-0.tar.gz is compressed: unpack it"):
        open_data(digits(data=f"wds/{tmp_path}"), (24, 24), (8, 8), CPU)


def mac(members: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """The members as the tar of macOS writes them, with an AppleDouble file before each, and what others leave."""
    doubles = [each for name, content in members for each in ((f"._{name}", b"\0\5\x16\7"), (name, content))]
    return [
        *doubles,
        ("__MACOSX/._x.jpg", b"\0\5"),
        ("Thumbs.db", b""),
        ("s/@eaDir/x.jpg", b""),
        (".hidden/x.png", b""),
    ]


def test_shards_hold_what_webdataset_finds_in_them_and_more(tmp_path, caplog):
    """Plain names by webdataset itself, in the order of the shard; of the others nothing is lost without a word."""
    webdataset = pytest.importorskip("webdataset")
    caplog.set_level("INFO")
    contents = files(8)
    plain = [(f"{i:02d}.{kind}", b) for i in range(4) for kind, b in (("cls", b"%d" % (i % 2)), ("png", contents[i]))]
    write(tmp_path / "train-0.tar", mac(plain))
    stream = webdataset.WebDataset(str(tmp_path / "train-0.tar"), shardshuffle=False)
    theirs = [(sample["png"], int(sample["cls"])) for sample in stream if {"png", "cls"} <= sample.keys()]
    source = local_shards(tmp_path, ("train",))
    source.read_classes(True)
    where = [source.places[3 * i + 1 : 3 * i + 3] for i in range(len(source))]
    content = (tmp_path / "train-0.tar").read_bytes()
    assert [(content[at : at + size], k) for (at, size), k in zip(where, source.labels)] == theirs
    assert len(theirs) == 4 and "passed over" not in caplog.text
    odd = [("v1.00001.png", contents[4]), ("v1.00001.cls", b"0"), ("v1.00002.png", contents[5]), ("v1.00002.cls", b"1")]
    odd += [("no suffix", contents[6]), ("no suffix.cls", b"1"), ("two.png", contents[7]), ("two.jpg", contents[0])]
    odd += [
        ("two.cls", b"0"),
        ("two.cls", b"1"),
        ("alone.png", contents[1]),
        ("gone.cls", b"1"),
        ("f.heic", b"ftyp"),
        ("f.json", b"{}"),
    ]
    write(tmp_path / "train-1.tar", odd)
    source = local_shards(tmp_path, ("train",))
    source.read_classes(True)
    found = {source.names[i]: (np.asarray(source[i][0]), source.labels[i]) for i in range(4, len(source))}
    right = {"v1.00001.png": (4, 0), "v1.00002.png": (5, 1), "no suffix": (6, 1), "two.png": (7, 0)}
    assert found.keys() == right.keys() and source.shards == (4, 4)
    for name, (number, label) in right.items():
        assert np.array_equal(found[name][0], np.asarray(Image.open(io.BytesIO(contents[number])))), name
        assert found[name][1] == label
    line = "1 second images of one name, such as two.png, 1 images without a .cls, such as alone.png, "
    line += "1 .cls without an image, such as gone.cls"
    (said,) = (r.getMessage() for r in caplog.records if "passed over" in r.getMessage())
    for part in (*line.split(", 1 "), ".heic (Pillow cannot read them)", "1 .json"):
        assert part in said, said
