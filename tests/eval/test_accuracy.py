"""Accuracy, top-5 and loss, ImageNet's reassessed labels; images that cannot be read are left out everywhere."""

import json
import shutil
from pathlib import Path

import numpy as np
import pictures
import pytest
import torch
import torch.nn.functional as F
from commands import run_cli
from frozen import evaluation, result, save_tiny, tiny
from PIL import Image
from sklearn.metrics import top_k_accuracy_score

from vitfast import ViT
from vitfast.data.loader import open_data
from vitfast.eval.accuracy import evaluate_weights


@pytest.mark.slow
def test_top_1_top_5_and_loss_are_scikit_learns(tmp_path):
    """Of every validation image of the digits alone, whose batches do not divide their number."""
    config = evaluation(save_tiny(tmp_path), eval_batch_size=7)
    found, source = evaluate_weights(config), open_data(config, (16, 16), (8, 8), torch.device("cpu"))
    images = torch.stack([torch.from_numpy(np.asarray(source.eval_transform(image))) for image, _ in source.val])
    with torch.no_grad():
        logits = torch.cat([ViT.from_pretrained(tmp_path).eval()(image[None]) for image in images]).double()
    labels = np.array([label for _, label in source.val])
    first, fifth = (top_k_accuracy_score(labels, logits, k=k, labels=np.arange(10)) for k in (1, 5))
    assert 0 < first < fifth < 1
    assert (found["accuracy"], found["top5"]) == pytest.approx((first, fifth))
    assert found["loss"] == pytest.approx(F.cross_entropy(logits, torch.from_numpy(labels)).item(), rel=1e-5)


def guessed(model: ViT, seed: int, folder: Path, number: int) -> int:
    """Writes noise as the image of ImageNet's validation set of this number; what the model takes it for."""
    pixels = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(folder / f"ILSVRC2012_val_{number:08d}.JPEG", format="PNG")
    with torch.no_grad():
        return model(torch.from_numpy(pixels).permute(2, 0, 1)[None]).argmax().item()


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    """(weights, data, labels): 12 images with ImageNet's names, and real labels of which 6 in 10 are as guessed."""
    root, found = tmp_path_factory.mktemp("real"), []
    model = tiny(3, seed=1)
    model.save_pretrained(root / "w")
    order = np.random.default_rng(0).permutation(12) + 1  # ImageNet's numbers do not follow the class folders
    for split, first in (("train", 0), ("val", 12)):
        for i, number in enumerate(order):
            found.append((number, guessed(model, first + i, root / "data" / split / f"n0{i // 4}", number), i // 4))
    guesses = {number: guess for number, guess, _ in found[12:]}
    assert len(set(guesses.values())) > 1
    wrong = {n: [(guess + 1) % 3] for n, guess in guesses.items() if 6 <= n <= 9}
    right = {n: [guesses[n]] if n <= 3 else [] if n <= 5 else [0, 1, 2] for n in guesses}
    labels = [(right | wrong)[n] for n in range(1, 13)]
    return root / "w", root / "data", labels, np.mean([guess == k for _, guess, k in found[12:]])


@pytest.mark.slow
def test_real_labels_leave_out_what_has_none_or_cannot_be_read(imagenet, capsys, tmp_path):
    weights, data, labels, accuracy = imagenet
    (tmp_path / "real.json").write_text(json.dumps(labels))
    found = result(capsys, "eval", weights, data, "--real", tmp_path / "real.json")
    assert found["real_images"] == 10 and found["real_accuracy"] == pytest.approx(6 / 10) and found["images"] == 12
    assert found["accuracy"] == pytest.approx(accuracy)
    assert "real_accuracy" not in result(capsys, "eval", weights, data)
    whole = result(capsys, "eval", weights, data / "val", "--real", tmp_path / "real.json")
    assert whole == found  # of a folder that holds class folders alone
    shutil.copytree(data, tmp_path / "data")
    next((tmp_path / "data" / "val").rglob("*_00000001.JPEG")).write_bytes(b"")  # one of those that were right
    found = result(capsys, "eval", weights, tmp_path / "data", "--real", tmp_path / "real.json")
    assert (found["images"], found["unreadable_images"], found["real_images"]) == (11, 1, 9)
    assert found["real_accuracy"] == pytest.approx(5 / 9)


def test_real_labels_are_compared_by_imagenets_numbers_whatever_the_order_of_the_weights(tmp_path, capsys):
    names = ["n01514668", "n01440764", "n01443537"]  # 7, 0 and 1 of ImageNet
    model, found = tiny(3, seed=1), []
    guesses = [[7, 0, 1][guessed(model, i, tmp_path / "data" / names[i % 3], i)] for i in range(1, 7)]
    assert len(set(guesses)) > 1
    (tmp_path / "real.json").write_text(json.dumps([*([guess] for guess in guesses[:4]), [500], [2, 3]]))
    for order in ([0, 1, 2], [2, 0, 1]):
        other = tiny(3, seed=1)
        other.head.weight.data, other.head.bias.data = model.head.weight.data[order], model.head.bias.data[order]
        other.class_names = [names[k] for k in order]
        other.save_pretrained(tmp_path / "w")
        found.append(result(capsys, "eval", tmp_path / "w", tmp_path / "data", "--real", tmp_path / "real.json"))
    assert found[0]["real_accuracy"] == found[1]["real_accuracy"] == pytest.approx(4 / 6)
    assert found[0]["accuracy"] == found[1]["accuracy"]


OTHERS = [
    ("[[1], [2]]", "labels for another number of images than the 12"),
    ("nothing", "cannot be read"),
    ("[" + "1," * 11 + "1]", "one list"),
    (None, "another number of images than the 12"),  # timm's copy, of 50,000 images
    ("cat", "has cat.JPEG"),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize("content, says", OTHERS)
def test_real_labels_of_something_else_are_refused(imagenet, capsys, tmp_path, content, says):
    weights, data, labels, _ = imagenet
    command = ["eval", "--weights", weights, "--data", data, "--device", "cpu", "--set", "workers=0", "--real"]
    file = next((data / "val" / "n01").iterdir())
    if content == "cat":
        file.rename(file.with_name("cat.JPEG"))
    if content is not None:
        (tmp_path / "real.json").write_text(json.dumps(labels) if content == "cat" else content)
        command.append(tmp_path / "real.json")
    code, _, err = run_cli(capsys, *command)
    if content == "cat":
        file.with_name("cat.JPEG").rename(file)
    assert code == 2 and says in err and err.count("\n") == 1


# ---- images that cannot be read are left out, named and counted: as if they were not there


FLAGS = ("--device", "cpu", "--set", "workers=0", "eval_batch_size=3")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(weights, data with broken images, the same data without those images)."""
    root = tmp_path_factory.mktemp("unreadable")
    tiny(2, seed=3).save_pretrained(root / "weights")
    whole = pictures.folder(root / "data", count=9)
    shutil.copytree(whole, root / "rest")
    (whole / "train" / "a" / "2.jpg").write_bytes(b"")
    pictures.truncate(whole / "val" / "a" / "0.jpg")  # the first of all: ranks fill up with it
    pictures.truncate(whole / "val" / "b" / "4.jpg")
    for gone in ("train/a/2.jpg", "val/a/0.jpg", "val/b/4.jpg"):
        (root / "rest" / gone).unlink()
    return root / "weights", whole, root / "rest"


def test_eval_counts_only_what_it_read(made, capsys, caplog):
    weights, whole, rest = made
    alone = result(capsys, "eval", weights, rest)
    assert "left out" not in caplog.text
    found = result(capsys, "eval", weights, whole)
    assert (found["images"], found.pop("unreadable_images"), alone.pop("unreadable_images")) == (16, 2, 0)
    assert found == pytest.approx(alone, rel=1e-6)
    said = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert len(said) == 2 and "val/a/0.jpg is a broken image" in said[0] and "val/b/4.jpg" in said[1]
    code, _, err = run_cli(capsys, "eval", "--weights", weights, "--data", whole, *FLAGS, "max_unreadable=1")
    assert code == 2 and "2 images of" in err and "more than max_unreadable 1; the first: " in err


def test_an_evaluation_of_nothing_ends(made, capsys, tmp_path):
    weights, whole, _ = made
    shutil.copytree(whole, tmp_path / "data")
    for image in (tmp_path / "data" / "val").rglob("*.jpg"):
        image.write_bytes(image.read_bytes()[:-60])
    code, _, err = run_cli(capsys, "eval", "--weights", weights, "--data", tmp_path / "data", *FLAGS)
    assert code == 2 and "none of the 18 images of" in err and err.count("vitfast: error") == 1


@pytest.mark.parametrize("shots", ["all", "9", "3"])
def test_fewshot_leaves_out_of_both_splits(made, capsys, caplog, shots):
    """9 shots are all images of a class: drawn by known labels, they are those of the folder without the broken."""
    weights, whole, rest = made
    found = result(capsys, "fewshot", weights, whole, "--shots", shots, "--seeds", 1)
    assert found["images"] == 16 and "val/b/4.jpg" in caplog.text
    fewer = "9 images a class: some have fewer that can be read, and 17 of 18 are used"
    assert (fewer in caplog.messages) == (shots == "9")
    if shots == "3":
        return
    alone = result(capsys, "fewshot", weights, rest, "--shots", shots, "--seeds", 1)
    assert (found["unreadable_images"], alone["unreadable_images"]) == (3, 0)
    assert found["results"] == alone["results"] and found["images"] == alone["images"]
