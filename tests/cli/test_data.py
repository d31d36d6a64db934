"""Commands on data of every kind: folders, shards, Hugging Face, torchvision."""

import csv
import json
import shutil

import pytest
import torch
from commands import RUN, make_folder, run_cli
from runs import digits
from shards import files, shards

from vitfast import ViT
from vitfast.data.datasets import open_sources
from vitfast.data.loader import open_data
from vitfast.data.sources import Subset


def pretrained(capsys, data, output) -> dict:
    """The summary of two steps of pre-training."""
    command = ("pretrain", "--recipe", "digits", "--data", data, "--output", output)
    code, out, err = run_cli(capsys, *command, *RUN)
    assert code == 0 and "accuracy" in out, err
    return json.loads((output / "summary.json").read_text())


def test_folder_pretrain_finetune_eval(capsys, tmp_path):
    data, tuned = make_folder(tmp_path / "data"), tmp_path / "b"
    pretrained(capsys, data, tmp_path / "a")
    last = tmp_path / "a" / "checkpoints" / "last"
    flags = ("--weights", last, "--data", data, "--output", tuned, "--img-size", 24, *RUN[4:])
    code, _, err = run_cli(capsys, "finetune", *flags)
    assert code == 0, err
    flags = ("--weights", tuned / "checkpoints" / "last", "--data", data, "--device", "cpu", "--json")
    code, out, err = run_cli(capsys, "eval", *flags)
    assert code == 0, err
    result, row = json.loads(out), list(csv.DictReader(open(tuned / "metrics.csv")))[-1]
    assert result["images"] == 18 and result["accuracy"] == float(row["accuracy"])
    assert result["loss"] == pytest.approx(float(row["loss"]))
    assert ViT.from_pretrained(tuned / "checkpoints" / "last").patch_embed.img_size == (24, 24)
    code, _, err = run_cli(capsys, "eval", "--weights", last, "--data", "digits")
    assert code == 2 and "3 classes" in err and "10" in err


def test_a_tenth_is_held_out_without_val(capsys, tmp_path):
    make_folder(tmp_path, splits=("train",), count=20)

    def opened(data):
        opened = open_data(digits(data=str(data), workers=0), (16, 16), (8, 8), torch.device("cpu"))
        return opened.train, opened.val

    train, val = opened(tmp_path)
    names = {split: {source.name(i) for i in range(len(source))} for split, source in (("train", train), ("val", val))}
    assert len(names["val"]) == 6 and len(names["train"]) == 54 and not names["train"] & names["val"]
    assert sorted(val[i][1] for i in range(6)) == [0, 0, 1, 1, 2, 2]
    again = opened(tmp_path / "train")[1]
    assert {again.name(i) for i in range(len(again))} == names["val"]


def test_webdataset_shards(capsys, tmp_path):
    for split, count in (("train", 12), ("val", 6)):
        shards(tmp_path, files(count), (split,))
    summary = pretrained(capsys, f"wds/{tmp_path}", tmp_path / "run")
    assert [summary[name] for name in ("classes", "train_images", "val_images")] == [3, 12, 6]


def test_hugging_face_dataset_on_disk(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = make_folder(tmp_path / "data", splits=("train", "test"))
    summary = pretrained(capsys, f"hfds/{data}", tmp_path / "run")
    assert summary["classes"] == 3 and summary["train_images"] == summary["val_images"] == 18
    source = open_sources(f"hfds/{data}", "", (8, 8), (8, 8), digits())[0]
    labels = [source[i][1] for i in (5, 17, 0)]
    assert Subset(source, [5, 17, 0]).labels == labels  # from the column, no image is read


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
    summary = pretrained(capsys, f"hfids/{data}", tmp_path / "run")
    assert summary["classes"] == 3 and summary["val_images"] == 18
    assert summary["train_images"] == 18
    (data / "README.md").unlink()
    command = ("pretrain", "--recipe", "digits", "--data", f"hfids/{data}", "--output", tmp_path / "other")
    code, _, err = run_cli(capsys, *command, *RUN)
    assert code == 2 and "length is unknown" in err and err.count("\n") == 1 and not (tmp_path / "other").exists()


def test_tensorflow_dataset_without_tensorflow(capsys, tmp_path):
    """The reader is timm's; where its library is not installed the one line says which."""
    command = ("pretrain", "--recipe", "digits", "--data", "tfds/mnist", "--output", tmp_path / "run")
    code, _, err = run_cli(capsys, *command, *RUN)
    assert code == 2 and "tfds/mnist" in err and "tensorflow" in err and err.count("\n") == 1


def test_torchvision_dataset_on_disk(capsys, tmp_path, monkeypatch):
    import torchvision

    class Tiny(torchvision.datasets.FakeData):
        """CIFAR-10's interface without its download."""

        def __init__(self, root, train, download):
            super().__init__(24 if train else 10, (3, 32, 32), 10)
            self.class_to_idx = {str(i): i for i in range(10)}

    monkeypatch.setitem(__import__("timm.data.dataset_factory", fromlist=["x"])._TORCH_BASIC_DS, "cifar10", Tiny)
    summary = pretrained(capsys, "torch/cifar10", tmp_path / "run")
    assert summary["classes"] == 10 and summary["train_images"] == 24 and summary["val_images"] == 10


def test_a_bare_file_of_images_that_are_not_square_is_measured_at_its_size(capsys, tmp_path):
    """A height and a width reach every command that reads images; the config.json of a folder says the same."""
    data, shared = make_folder(tmp_path / "data"), ("--device", "cpu", "--json")
    model = ViT.from_preset("Nano/8", img_size=(24, 40), num_classes=3)
    torch.nn.init.normal_(model.pos_embed)
    model.save_pretrained(tmp_path / "w")
    bare = tmp_path / "bare.safetensors"
    shutil.copy(tmp_path / "w" / "model.safetensors", bare)
    commands = {
        "eval": ("--data", data),
        "fewshot": ("--data", data, "--method", "ridge", "--shots", 2),
        "predict": (data / "val",),
    }
    for command, given in commands.items():
        found = []
        for weights, size in ((tmp_path / "w", ()), (bare, ("--img-size", 24, 40))):
            code, out, err = run_cli(capsys, command, *given, "--weights", weights, *size, *shared)
            assert code == 0, err
            rows = json.loads(out) if command == "predict" else [json.loads(out)]
            found.append([{k: v for k, v in row.items() if "second" not in k and k != "weights"} for row in rows])
        assert found[0] == found[1], command
        code, _, err = run_cli(capsys, command, *given, "--weights", bare, *shared)
        assert code == 2 and "16 entries is 3 x 5 + 1 (img_size=(24, 40), no_embed_class=False) or 4 x 4 + 0" in err
    code, _, err = run_cli(capsys, "eval", "--data", data, "--weights", bare, "--img-size", 24, 40, 3)
    assert code == 2 and "--img-size takes one number or two, got 3" in err
