"""The order and the numbers of classes: one order in every process, names before numbers, labels as they come."""

import json
import os
import subprocess
import sys

import numpy as np
import pictures
import pytest
import timm.data.dataset_factory
import torch
import torchvision
from commands import works
from frozen import evaluation, result, tiny
from runs import digits
from shards import files, write
from timm.data import ImageNetInfo
from timm.utils.misc import natural_key

from vitfast import InputError, ViT
from vitfast.data.classes import first_of, ordered, places_by_name
from vitfast.data.datasets import settle_classes
from vitfast.data.loader import open_data
from vitfast.data.sources import Source
from vitfast.eval.accuracy import evaluate_weights

CPU = torch.device("cpu")
ODD = ["Cat", "cat", "1", "01", "001", "①", "²", "class10", "class9", "é", "e\u0301", "a ", "a", "_", "٣"]


@pytest.mark.slow
def test_the_order_is_timms_where_timms_is_one_and_the_same_in_every_process():
    names = "x9 x10 X2 n01440764 n02 10 9 1 a1b10 a1b9 b-2 b-10".split()
    assert len({tuple(natural_key(name)) for name in names}) == len(names)
    assert ordered(np.random.default_rng(0).permutation(names).tolist() * 2) == sorted(names, key=natural_key)
    code = "import sys, json; from vitfast.data.classes import ordered\n"
    code += "print(json.dumps(ordered(set(json.load(sys.stdin)))))"
    orders = {
        subprocess.run([sys.executable, "-c", code], input=json.dumps(ODD), text=True, capture_output=True, check=True,
                       env=os.environ | dict(PYTHONHASHSEED=seed, OMP_NUM_THREADS="1")).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    (order,) = map(json.loads, orders)
    assert sorted(order) == sorted(ODD) and order == ordered(reversed(ODD))
    huge = ["9" * 5000, "b", "a"]
    assert ordered(huge) == ordered(huge[::-1]) and len(ordered(huge)) == 3
    assert [name for name in order if name.strip("0") == "1"] == ["001", "01", "1"]  # after their digits, by letters


def test_names_that_look_alike_are_told_apart():
    assert first_of(["café"], ["cafe\u0301"]) == r"'caf\xe9'" and first_of(["cafe\u0301"], ["café"]) == r"'cafe\u0301'"
    assert first_of(["cat "], ["cat"]) == "'cat '" and first_of(["cat"], ["cat "]) == "'cat'"
    assert first_of(["猫", "b", "c", "d"]) == "猫, b, c ..."
    assert first_of(["\u0430", "b"], ["a"]) == r"\u0430 ('\u0430'), b".replace(r"\u0430 ", "\u0430 ")  # Cyrillic


def test_imagenets_classes_are_the_same_by_either_name():
    info = ImageNetInfo()
    wordnet, synonyms = info.label_names(), [info.index_to_description(i) for i in range(1000)]
    assert synonyms.count("crane") == 2  # a bird and a machine
    for few in (wordnet, wordnet[500:], wordnet[::-1]):
        assert places_by_name(few, synonyms) == [wordnet.index(name) for name in few]
    assert places_by_name(synonyms, wordnet) == list(range(1000))
    assert places_by_name(["goldfish, Carassius auratus", "tench, Tinca tinca"], synonyms) == [1, 0]
    assert places_by_name(["n02", "cat"], synonyms) == [None, None]


# ---- libraries


class Few(torchvision.datasets.FakeData):
    """torchvision's interface: six images whose labels are `targets`."""

    targets, names = [0, 1, 2, 0, 1, 2], {}

    def __init__(self, root, train, download):
        super().__init__(6, (3, 16, 16), 3)
        self.targets, self.class_to_idx = self.targets, self.names

    def __getitem__(self, index):
        return super().__getitem__(index)[0], self.targets[index]


def torchvisions(monkeypatch, **given):
    """The Data of such a data set."""
    monkeypatch.setitem(timm.data.dataset_factory._TORCH_BASIC_DS, "cifar10", type("Given", (Few,), given))
    return open_data(digits(data="torch/cifar10", workers=0, data_dir="x"), (16, 16), (8, 8), CPU)


IMAGENET = {"tench": 0, "Tinca tinca": 0, "goldfish": 1, "crane": 2}
SETS = {  # class_to_idx, targets: the classes and the numbers, or the error
    "synonyms": (IMAGENET, [0, 1, 2, 0, 1, 2], (["tench, Tinca tinca", "goldfish", "crane"], [0, 1, 2, 0, 1, 2])),
    "from 1": ({"a": 1, "b": 2}, [1, 2, 1, 1, 2, 2], (["a", "b"], [0, 1, 0, 0, 1, 1])),
    "gaps": ({"a": 0, "b": 7}, torch.tensor([0, 7, 7, 0, 0, 7]), (["a", "b"], [0, 1, 1, 0, 0, 1])),
    "text": ({}, ["b10", "b9", "a", "a", "b9", "b9"], (["a", "b9", "b10"], [2, 1, 0, 0, 1, 1])),
    "text, named": ({"y": 0, "x": 1}, ["x", "y", "y", "y", "x", "x"], (["y", "x"], [1, 0, 0, 0, 1, 1])),
    "whole floats": ({}, np.array([0.0, 1, 2, 0, 1, 2]), (["0", "1", "2"], [0, 1, 2, 0, 1, 2])),
    "floats": ({}, [0.0, 1.0, 2.7, 0, 1, 2], r"torch/cifar10\[2\] has the class 2.7; expected a whole number from 0"),
    "none": ({}, [0, None, 2, 0, 1, 2], r"torch/cifar10\[1\] has the class None; expected a whole number"),
    "nan": ({}, [0.0, float("nan")] * 3, "has the class nan; expected a whole number"),
    "numbers from 1": (
        {},
        [1, 2, 3, 1, 2, 3],
        "labels are 3 numbers from 1 to 3, without 0; expected 0 to 2, or names",
    ),
    "numbers with gaps": ({}, [0, 5, 0, 5, 0, 5], "2 numbers from 0 to 5, without 1; .*say --set num_classes=6"),
    "beyond": ({"a": 0, "b": 1}, [0, 1, 2, 0, 1, 2], r"\[2\] has the class 2; expected one of 2 classes, such as 'a'"),
    "unlabelled": ({}, [-1] * 6, "has the class -1 .this split has no labels."),
}


@pytest.mark.parametrize("name", SETS)
def test_labels_of_torchvisions_sets(name, monkeypatch):
    names, targets, right = SETS[name]
    if isinstance(right, str):
        with pytest.raises(InputError, match=right) as caught:
            torchvisions(monkeypatch, names=names, targets=targets)
        assert "\n" not in str(caught.value)
        return
    data = torchvisions(monkeypatch, names=names, targets=targets)
    assert (data.classes, data.train.labels, [data.val[i][1] for i in range(6)]) == (*right, right[1])


def test_torchvisions_list_of_classes_wins_over_names_that_two_classes_share(monkeypatch):
    classes = [("crane", "bird"), ("crane",), ("tench", "Tinca tinca")]
    index = {name: i for i, names in enumerate(classes) for name in names}
    assert set(index.values()) == {0, 1, 2} and index["crane"] == 1
    assert torchvisions(monkeypatch, names=index | {"bird": 0}, classes=classes).classes[:2] == ["crane, bird", "crane"]


def test_labels_of_hugging_faces_sets_and_splits_that_are_not_there(tmp_path, monkeypatch, caplog):
    """A split with wrong labels is no reason to take another."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def opened(name, **splits):
        (tmp_path / name).mkdir()
        for split, labels in splits.items():
            columns = dict(image=[pictures.smooth(i, 16, 16) for i in range(len(labels))], label=labels)
            found = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
            found.to_parquet(tmp_path / name / f"{split}-0.parquet")
        return open_data(digits(data=f"hfds/{tmp_path / name}", workers=0), (16, 16), (8, 8), CPU)

    data = opened("a", train=["b", "a", "b", "a"], validation=["b", "a"])
    assert data.classes == ["a", "b"] and data.train.labels == [1, 0, 1, 0] == [data.train[i][1] for i in range(4)]
    with pytest.raises(InputError, match="split 'train' cannot be opened"):
        opened("b", test=["a", "b", "b"])
    tiny(2).save_pretrained(tmp_path / "w")
    found = evaluate_weights(evaluation(tmp_path / "w", f"hfds/{tmp_path / 'b'}"))
    assert found["images"] == 3 and "split 'validation' cannot be opened" in caplog.text  # without training images
    with pytest.raises(InputError, match="has the class 0.5"):
        opened("c", train=[0.0, 1.0], validation=[0.5, 1.0], test=[0.0, 1.0])


def test_labels_of_shards_are_numbers_or_names(tmp_path):
    picture = files(1)[0]

    def opened(train, val, **fields):
        for split, labels in (("train", train), ("val", val)):
            members = [(f"{i}.{kind}", b) for i, k in enumerate(labels) for kind, b in (("cls", k), ("png", picture))]
            write(tmp_path / f"{split}-0.tar", members)
        return open_data(digits(data=f"wds/{tmp_path}", workers=0, **fields), (16, 16), (8, 8), CPU)

    data = opened([b"b10", b"b9\n", b"a"], [b"a", b"b10"])
    assert data.classes == ["a", "b9", "b10"] and (data.train.labels, data.val.labels) == ([2, 1, 0], [0, 2])
    assert opened([b"0", b"1"], [b"1"]).classes == ["0", "1"]
    assert len(opened([b"0", b"3"], [b"2"], num_classes=4).classes) == 4
    data = opened([b"1", b"2", b"cat"], [b"1", b"2"])  # names in both, as one of them is no number
    assert data.classes == ["1", "2", "cat"] and (data.train.labels, data.val.labels) == ([0, 1, 2], [0, 1])
    data = opened([b"01", b"1", b"2"], [b"1"])
    assert data.classes == ["01", "1", "2"] and (data.train.labels, data.val.labels) == ([0, 1, 2], [1])
    for train, val, said in (
        ([b"1", b"2"], [b"1"], "from 1 to 2, without 0"),
        (
            [b"0", b"1"],
            [b"2"],
            r"train\*.tar .2 classes. must have the same; .*only in validation: 2, first in .*val-0.tar, 0.png",
        ),
        ([b"a", b"b"], [b"c"], "missing in validation: a, b; only in validation: c, first in"),
    ):
        with pytest.raises(InputError, match=said):  # the validation images add no class to the head
            opened(train, val)


# ---- evaluations


def one_colour(root, names, count=3):
    """Class folders of small images; a model of the classes "1", "2" and "10" measures them."""
    for number, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for i in range(count):
            pictures.smooth(10 * number + i, 16, 16).save(root / name / f"{i}.png")
    return root


def test_a_class_may_be_missing_from_what_is_measured_and_none_may_be_unknown(tmp_path, capsys):
    model = tiny(3, seed=1)
    model.class_names = ("1", "10", "2")  # the order of text
    model.save_pretrained(tmp_path / "w")
    root, guesses = one_colour(tmp_path / "test", ("2", "10"), 4), {}
    for name in ("2", "10"):
        pixels = [np.asarray(pictures.Image.open(root / name / f"{i}.png")) for i in range(4)]
        with torch.no_grad():
            guesses[name] = model(torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)).argmax(1).tolist()
    right = [guess == {"2": 2, "10": 1}[name] for name, some in guesses.items() for guess in some]
    found = result(capsys, "eval", tmp_path / "w", root)
    assert found["images"] == 8 and found["accuracy"] == pytest.approx(np.mean(right))
    members = [(f"{name}/{i}.{kind}", content) for name in ("2", "10") for i in range(4) for kind, content in (
        ("cls", name.encode()), ("png", (root / name / f"{i}.png").read_bytes()))]  # fmt: skip
    write(tmp_path / "shards" / "val-0.tar", members)  # whose numbers are the names of the weights
    assert result(capsys, "eval", tmp_path / "w", f"wds/{tmp_path / 'shards'}") == found
    (root / "3").mkdir()
    pictures.smooth(1, 16, 16).save(root / "3" / "0.png")
    with pytest.raises(
        InputError, match=r"test .3 classes. and .*w .3 classes. .*only in the data: 3, first in 3/0.png"
    ):
        evaluate_weights(evaluation(tmp_path / "w", root))


@pytest.mark.slow
def test_a_run_keeps_its_head_and_its_numbers_where_the_names_are_the_same(tmp_path, capsys):
    model = tiny(3)
    model.class_names = ("eel", "cat", "dog")
    model.save_pretrained(tmp_path / "w")
    for split in ("train", "val"):
        one_colour(tmp_path / "data" / split, ("cat", "dog", "eel"))
    for names, kept in ((("cat", "dog", "eel"), True), (("cat", "dog", "fox"), False)):
        if not kept:
            for split in ("train", "val"):
                (tmp_path / "data" / split / "eel").rename(tmp_path / "data" / split / "fox")
        run = tmp_path / str(kept)
        flags = ("--weights", tmp_path / "w", "--data", tmp_path / "data", "--output", run, "--device", "cpu")
        settings = ("steps=1", "lr=1e-9", "batch_size=3", "workers=0", "hidden_head=false", "warmup_steps=0")
        works(capsys, "pretrain", *flags, "--set", *settings)
        trained = ViT.from_pretrained(run / "checkpoints" / "last")
        assert set(trained.class_names) == set(names)
        assert torch.allclose(trained.head.weight, model.head.weight, atol=1e-6) == kept
        assert (trained.class_names == ("eel", "cat", "dog")) == kept


def test_settled_classes_renumber_several_classes_an_image():
    source = Source()
    source.classes, source.labels, source.multi_label = ["a", "b"], [(0, 1), (1,), ()], True
    assert settle_classes([source], ["b", "c", "a"]) == ["b", "c", "a"]
    assert source.labels == [(2, 0), (0,), ()]


def test_a_class_without_a_validation_image_is_said(tmp_path, caplog):
    for split, names in (("train", ("cat", "dog", "eel")), ("val", ("cat", "eel"))):
        one_colour(tmp_path / split, names)
    assert open_data(digits(data=str(tmp_path), workers=0), (16, 16), (8, 8), CPU).classes == ["cat", "dog", "eel"]
    assert "val has no image of 1 of the 3 classes: dog" in caplog.text
