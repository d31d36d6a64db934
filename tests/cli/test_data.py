"""Commands on data of every kind: folders, shards, Hugging Face, torchvision."""

import csv
import io
import json
import tarfile

import pytest
from commands import RUN, make_folder, picture, run_cli

from vitfast import ViT
from vitfast.data.datasets import Subset, known_labels, open_sources


def test_folder_pretrain_finetune_eval(capsys, tmp_path):
    data = make_folder(tmp_path / "data")
    code, out, err = run_cli(capsys, "pretrain", "--recipe", "digits", "--data", data, "--output", tmp_path / "a", *RUN)
    assert code == 0 and "accuracy" in out, err
    last = tmp_path / "a" / "checkpoints" / "last"
    code, out, err = run_cli(
        capsys, "finetune", "--weights", last, "--data", data, "--output", tmp_path / "b", "--img-size", 24, *RUN[4:]
    )
    assert code == 0, err
    code, out, err = run_cli(
        capsys,
        "eval",
        "--weights",
        tmp_path / "b" / "checkpoints" / "last",
        "--data",
        data,
        "--device",
        "cpu",
        "--json",
    )
    assert code == 0, err
    result = json.loads(out)
    rows = list(csv.DictReader(open(tmp_path / "b" / "metrics.csv")))
    assert (
        result["images"] == 18
        and result["accuracy"] == float(rows[-1]["accuracy"])
        and result["loss"] == pytest.approx(float(rows[-1]["loss"]))
    )
    assert ViT.from_pretrained(tmp_path / "b" / "checkpoints" / "last").patch_embed.img_size == (24, 24)
    code, _, err = run_cli(capsys, "eval", "--weights", last, "--data", "digits")
    assert code == 2 and "3 classes" in err and "10" in err


def test_a_tenth_is_held_out_without_val(capsys, tmp_path):
    make_folder(tmp_path, splits=("train",), count=20)
    train, val = open_sources(str(tmp_path), "", (16, 16), (8, 8), 4, 0)
    names = {split: {source.name(i) for i in range(len(source))} for split, source in (("train", train), ("val", val))}
    assert len(names["val"]) == 6 and len(names["train"]) == 54 and not names["train"] & names["val"]
    assert sorted(val[i][1] for i in range(6)) == [0, 0, 1, 1, 2, 2]
    again = open_sources(str(tmp_path / "train"), "", (16, 16), (8, 8), 4, 5)[1]
    assert {again.name(i) for i in range(len(again))} == names["val"]


def test_webdataset_shards(capsys, tmp_path):
    for split, count in (("train", 12), ("val", 6)):
        for shard in range(2):
            with tarfile.open(tmp_path / f"{split}-{shard:04d}.tar", "w") as tar:
                for i in range(count // 2):
                    buffer = io.BytesIO()
                    picture(i).save(buffer, "png")
                    for extension, content in (("png", buffer.getvalue()), ("cls", str(i % 3).encode())):
                        info = tarfile.TarInfo(f"{shard}{i:03d}.{extension}")
                        info.size = len(content)
                        tar.addfile(info, io.BytesIO(content))
    code, out, err = run_cli(
        capsys, "pretrain", "--recipe", "digits", "--data", f"wds/{tmp_path}", "--output", tmp_path / "run", *RUN
    )
    assert code == 0, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["classes"] == 3 and summary["train_images"] == 12 and summary["val_images"] == 6


def test_hugging_face_dataset_on_disk(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = make_folder(tmp_path / "data", splits=("train", "test"))
    code, out, err = run_cli(
        capsys, "pretrain", "--recipe", "digits", "--data", f"hfds/{data}", "--output", tmp_path / "run", *RUN
    )
    assert code == 0, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["classes"] == 3 and summary["train_images"] == summary["val_images"] == 18
    source = open_sources(f"hfds/{data}", "", (8, 8), (8, 8), 4, 0)[0]
    assert known_labels(Subset(source, [5, 17, 0])) == [
        source[i][1] for i in (5, 17, 0)
    ]  # from the column, no image is read


CARD = """---
dataset_info:
  features:
  - {name: image, dtype: image}
  - {name: label, dtype: {class_label: {names: {'0': a, '1': b, '2': c}}}}
  splits:
  - {name: train, num_bytes: 1, num_examples: 18}
  - {name: validation, num_bytes: 1, num_examples: 18}
---
"""


def test_streamed_hugging_face_dataset(capsys, tmp_path, monkeypatch):
    """Streams have no length of their own: it comes from the data set's card."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = make_folder(tmp_path / "data", splits=("train", "validation"))
    (data / "README.md").write_text(CARD)
    code, out, err = run_cli(
        capsys, "pretrain", "--recipe", "digits", "--data", f"hfids/{data}", "--output", tmp_path / "run", *RUN
    )
    assert code == 0, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["classes"] == 3 and summary["val_images"] == 18
    assert summary["train_images"] == 18
    (data / "README.md").unlink()
    code, out, err = run_cli(
        capsys, "pretrain", "--recipe", "digits", "--data", f"hfids/{data}", "--output", tmp_path / "other", *RUN
    )
    assert code == 2 and "length is unknown" in err and err.count("\n") == 1 and not (tmp_path / "other").exists()


def test_tensorflow_dataset_without_tensorflow(capsys, tmp_path):
    """The reader is timm's; where its library is not installed the one line says which."""
    code, out, err = run_cli(
        capsys, "pretrain", "--recipe", "digits", "--data", "tfds/mnist", "--output", tmp_path / "run", *RUN
    )
    assert code == 2 and "tfds/mnist" in err and "tensorflow" in err and err.count("\n") == 1


def test_torchvision_dataset_on_disk(capsys, tmp_path, monkeypatch):
    import torchvision

    class Tiny(torchvision.datasets.FakeData):
        """CIFAR-10's interface without its download."""

        def __init__(self, root, train, download):
            super().__init__(24 if train else 10, (3, 32, 32), 10)
            self.class_to_idx = {str(i): i for i in range(10)}

    monkeypatch.setitem(__import__("timm.data.dataset_factory", fromlist=["x"])._TORCH_BASIC_DS, "cifar10", Tiny)
    code, out, err = run_cli(
        capsys, "pretrain", "--recipe", "digits", "--data", "torch/cifar10", "--output", tmp_path / "run", *RUN
    )
    assert code == 0, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["classes"] == 10 and summary["train_images"] == 24 and summary["val_images"] == 10
