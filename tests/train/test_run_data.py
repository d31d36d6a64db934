"""Which data a run goes on with: the same images anywhere, and none that was replaced."""

import io
import json
import os
import shutil
import tarfile
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import shards
import timm.data.dataset_factory
from pictures import later
from PIL import Image
from runs import QUICK, digits, same_runs
from safetensors import safe_open
from speed import first
from torchvision.datasets import CIFAR10

from vitfast import InputError
from vitfast.data import datasets
from vitfast.data.identity import ENDS, UNKNOWN, content_hash, hash_contents
from vitfast.train import run_data as run_data_module
from vitfast.train.resume import read_record
from vitfast.train.trainer import train


def make(root: Path, count: int = 6) -> Path:
    """Two classes of uncompressed images, all of one size in bytes."""
    for kind in ("a", "b"):
        for number in range(count):
            for split in ("train", "val"):
                path = root / split / kind / f"{number}.bmp"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(np.full((16, 16, 3), (20 * number + 130 * (kind == "b")) % 256, np.uint8)).save(path)
    return root


def config(output: Path, data: Path | str, steps: int, **fields):
    return digits(output, data=str(data), steps=steps, **QUICK | fields)


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_data_elsewhere(tmp_path, monkeypatch, caplog):
    """By another name of the folder, and in a copy whose files are newer, bit for bit as if it had stayed."""
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "photos")
    train(config(tmp_path / "whole", "photos", 6))
    train(config(tmp_path / "run", "photos", 2))
    train(config(tmp_path / "run", "./photos/", 4))
    for path in Path(shutil.copytree("photos", "local")).rglob("*.bmp"):
        os.utime(path, (1, 1))
    with caplog.at_level("INFO"):
        assert train(config(tmp_path / "run", tmp_path / "local", 6))["steps"] == 6
    assert f"{tmp_path}/local/train: 12 images were modified at other times; their contents are compared" in caplog.text
    assert same_runs(tmp_path / "run", tmp_path / "whole")
    assert read_record(tmp_path / "run/checkpoints/last")["settings"]["data"] == str(tmp_path / "local")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for data in (tmp_path / "local", "photos", tmp_path / "photos"):  # it is finished, whatever its data is called
        assert train(config(tmp_path / "run", data, 6))["steps"] == 6
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    assert same_runs(tmp_path / "run", tmp_path / "whole")
    for path in (tmp_path / "photos").rglob("*.bmp"):  # another folder is not the run's, though it has ended
        later(path, path.read_bytes()[:-9] + bytes(9))
    with pytest.raises(InputError, match="the data is not what .* was trained on .train_images: files replaced by oth"):
        train(config(tmp_path / "run", tmp_path / "photos", 6))


@pytest.mark.slow
@pytest.mark.parametrize("split", first(1, ["train", "val"]))
def test_a_file_that_was_replaced_by_one_of_equal_size_is_told(split, tmp_path):
    photos, run = make(tmp_path / "photos"), tmp_path / "run"
    train(config(run, photos, 2))
    for path in photos.rglob("[45].bmp"):
        later(path)
    train(config(run, photos, 3))
    path = photos / split / "b" / "3.bmp"
    later(path, path.read_bytes()[:-1] + b"\7")
    said = (
        rf"is not what .*last was trained on \({split}_images: files replaced by others of equal size: b/3.bmp\); res"
    )
    with pytest.raises(InputError, match=said):
        train(config(run, photos, 4))
    later(path, path.read_bytes()[:-1] + path.read_bytes()[:-1][-1:])
    assert train(config(run, photos, 4))["steps"] == 4


@pytest.mark.slow
def test_what_is_hashed_late_is_recorded_later(tmp_path, monkeypatch):
    """A run does not wait for more images than can be read in WAIT seconds; what is not known is not compared."""
    photos, run = make(tmp_path / "photos"), tmp_path / "run"
    monkeypatch.setattr(run_data_module, "hash_contents", lambda source, indices, hashes, *_: None)
    train(config(run, photos, 2))
    assert _saved(run)["images.train_hashes"].tolist() == [UNKNOWN] * 12
    monkeypatch.undo()
    path = photos / "train" / "b" / "3.bmp"
    later(path, path.read_bytes()[:-1] + b"\7")
    train(config(run, photos, 3))
    hashes = _saved(run)["images.train_hashes"]
    assert UNKNOWN not in hashes and len(set(hashes.tolist())) == 12
    assert hashes[9] == content_hash(str(path)) == content_hash(path.read_bytes())


def _saved(run: Path) -> dict[str, np.ndarray]:
    with safe_open(run / "checkpoints/last/state/state.safetensors", "pt") as file:
        return {name: file.get_tensor(name).numpy() for name in file.keys() if name.startswith("images.")}


def test_one_thread_goes_on_hashing_after_the_wait(tmp_path):
    photos = make(tmp_path / "photos", 100)
    source, _ = datasets.open_folder(photos)
    hashes = np.zeros(len(source), np.int64)
    hash_contents(source, range(1, len(source)), hashes, 0.0)
    for thread in threading.enumerate():
        if thread.name == "vitfast-hash":
            thread.join()
    assert hashes[0] == UNKNOWN and hashes[1:].tolist() == [content_hash(file) for file in source.files[1:]]


def test_the_ends_of_a_file_stand_for_it(tmp_path):
    """And its size; a byte between the ends is missed."""
    whole = bytes(range(256)) * 1024  # four times ENDS
    found = {}
    for at in (None, 0, ENDS - 1, ENDS, 2 * ENDS, 3 * ENDS - 1, 3 * ENDS, 4 * ENDS - 1):
        data = bytearray(whole)
        if at is not None:
            data[at] ^= 1
        (tmp_path / "a").write_bytes(data)
        found[at] = content_hash(str(tmp_path / "a"))
        assert found[at] == content_hash(bytes(data)) > 0
    same = {at for at, each in found.items() if each == found[None]}
    assert same == {None, ENDS, 2 * ENDS, 3 * ENDS - 1} and len(set(found.values())) == 5
    assert len({content_hash(bytes(size)) for size in (0, 1, ENDS, ENDS + 1, 2 * ENDS, 2 * ENDS + 1, 9 * ENDS)}) == 7
    assert content_hash(str(tmp_path / "gone")) == -1


# ---- libraries' data sets


def _bytes(number: int) -> bytes:
    Image.fromarray(np.full((16, 16, 3), number, np.uint8)).save(file := io.BytesIO(), "BMP")
    return file.getvalue()


def _torch_arrays(root: Path, numbers: list[int], monkeypatch) -> dict:
    class Arrays(CIFAR10):
        def __init__(self, root, train, download):
            self.data = np.array([np.full((16, 16, 3), number, np.uint8) for number in numbers])
            self.targets, self.class_to_idx, self.classes = [0, 1] * 4, dict(a=0, b=1), ["a", "b"]
            self.transform = self.target_transform = None

    monkeypatch.setitem(timm.data.dataset_factory._TORCH_BASIC_DS, "cifar10", Arrays)
    return dict(data="torch/cifar10")


def _torch_files(root: Path, numbers: list[int], _) -> dict:
    for place, number in enumerate(numbers):
        for split in ("train", "validation"):
            path = root / split / "ab"[place % 2] / f"{place}.bmp"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_bytes(number))
    return dict(data="torch/image_folder", data_dir=str(root))


def _hugging_face_files(root: Path, numbers: list[int], monkeypatch) -> dict:
    return dict(data=f"hfds/{_torch_files(root, numbers, monkeypatch)['data_dir']}")


def _hugging_face_table(root: Path, numbers: list[int], _) -> dict:
    root.mkdir()
    table = pa.table(dict(image=[dict(bytes=_bytes(n), path=None) for n in numbers], label=["a", "b"] * 4))
    for split in ("train", "validation"):
        told = {b"huggingface": json.dumps(dict(info=dict(features=FEATURES))).encode()}
        pq.write_table(table.replace_schema_metadata(told), root / f"{split}-0.parquet")
    return dict(data=f"hfds/{root}")


FEATURES = dict(image=dict(_type="Image"), label=dict(_type="Value", dtype="string"))


def _shards(root: Path, numbers: list[int], _) -> dict:
    members = [(f"{place}.bmp", _bytes(number)) for place, number in enumerate(numbers)]
    members += [(f"{place}.cls", b"%d" % (place % 2)) for place in range(len(numbers))]
    for split in ("train", "val"):
        shards.write(root / f"{split}-0.tar", members)
    return dict(data=f"wds/{root}")


WAYS = [_torch_arrays, _shards, _torch_files, _hugging_face_files, _hugging_face_table]


@pytest.mark.quick(1)
@pytest.mark.parametrize("build", first(2, WAYS))
def test_data_of_a_library_is_known_by_its_images(build, tmp_path, monkeypatch):
    """A copy elsewhere is the same; one in which an image was replaced by one of equal size is not."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    numbers = [0, 200, 10, 210, 20, 220, 30, 230]
    fields = QUICK | dict(workers=0, output=tmp_path / "run")
    train(digits(**fields, steps=2, **build(tmp_path / "first", numbers, monkeypatch)))
    copied = build(tmp_path / "copy", numbers, monkeypatch)
    assert train(digits(**fields, steps=3, **copied))["steps"] == 3
    other = build(tmp_path / "other", [*numbers[:5], 221, *numbers[6:]], monkeypatch)
    with pytest.raises(InputError, match=r"train_images: files replaced by others of equal size: \S*[56]\S*\)"):
        train(digits(**fields, steps=4, **other))


@pytest.mark.slow
def test_shards_of_other_sizes_are_other_data_where_the_order_goes_by_them(tmp_path, monkeypatch):
    """Above WINDOW images, which are then read file by file."""
    numbers = [0, 200, 10, 210, 20, 220, 30, 230]
    root = Path(_shards(tmp_path / "one", numbers, None)["data"].removeprefix("wds/"))
    other = Path(shutil.copytree(root, tmp_path / "two"))
    with tarfile.open(root / "train-0.tar") as tar:
        members = [(member.name, tar.extractfile(member).read()) for member in tar]
    for number in (0, 1):
        shards.write(other / f"train-{number}.tar", [*members[4 * number :][:4], *members[8 + 4 * number :][:4]])
    fields = QUICK | dict(workers=0, output=tmp_path / "run")
    for window, steps in ((run_data_module.WINDOW, 3), (7, 5)):
        monkeypatch.setattr(run_data_module, "WINDOW", window)
        train(digits(**fields, steps=steps - 1, data=f"wds/{root}"), resume="never")
        if window == 7:
            with pytest.raises(InputError, match="train_images: images spread over other shards"):
                train(digits(**fields, steps=steps, data=f"wds/{other}"))
        else:
            assert train(digits(**fields, steps=steps, data=f"wds/{other}"))["steps"] == steps
