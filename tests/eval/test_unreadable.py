"""Images that cannot be read are left out of every evaluation, named and counted: as if they were not there."""

import shutil

import pictures
import pytest
from commands import run_cli
from frozen import evaluation, result, tiny

from vitfast.experiments import vtab

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


def test_vtab_leaves_out_too(made):
    weights, whole, rest = made
    found, alone = (vtab.evaluate_frozen(evaluation(weights, data), "knn", 18) for data in (whole, rest))
    assert (found["train_images"], found["test_images"], found["unreadable_images"]) == (17, 16, 3)
    assert found["accuracy"] == alone["accuracy"]
