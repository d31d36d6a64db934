"""Which images `vitfast eval` measures: any folder whole, of its own run's data the held-out tenth; a line says it."""

import json
import shutil

import pictures
import pytest
from commands import make_folder, run_cli
from frozen import tiny

CLASSES = ("ape", "bee")


def folder(root, *names, count=10, first=0):
    return make_folder(root, [""], names, count, first)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """(data without val/, the weights of a run on it)."""
    from vitfast.train.recipes import resolve
    from vitfast.train.trainer import train

    root = tmp_path_factory.mktemp("own")
    settings = dict(data=str(folder(root / "data", *CLASSES)), output=str(root / "run"), device="cpu", img_size=16)
    train(resolve("pretrain", settings | dict(model="Nano/8", steps=2, batch_size=4, workers=0, hidden_head=False)))
    return root / "data", root / "run" / "checkpoints" / "last"


@pytest.fixture
def evaluate(own, capsys, caplog):
    """A function of the data and flags: (images, what is said of them)."""
    caplog.set_level("INFO")

    def found(data, *flags, weights=own[1], code=0):
        caplog.clear()
        command = ("eval", "--weights", weights, "--data", data, "--device", "cpu", "--json", *flags)
        got, out, err = run_cli(capsys, *command, "--set", "workers=0")
        assert got == code, err
        said = [r.getMessage() for r in caplog.records if "measures" in r.getMessage()]
        assert len(said) == (code == 0)
        return (json.loads(out)["images"], said[0]) if code == 0 else err

    return found


@pytest.mark.slow
def test_the_data_of_the_weights_own_run_is_measured_by_the_tenth_that_it_held_out(own, evaluate, tmp_path):
    data, weights = own
    tenth = f"measures the 2 images of {data} that training holds out; the run of these weights trained on the others; "
    assert evaluate(data) == (2, f"{tenth}--split all measures all 20")
    assert evaluate(data, "--split", "val")[0] == 2
    count, said = evaluate(data, "--split", "all")
    assert count == 20 and said.startswith(
        f"measures all 20 images of {data}; the run of these weights trained on most of them"
    )
    copy = shutil.copytree(data, tmp_path / "replaced")
    for path in copy.rglob("*.png"):  # of equal size, and later
        path.write_bytes(path.read_bytes()[:-13] + bytes(13))
    said = f"measures all 20 images of {copy}; --split val measures the 2 that training holds out"
    assert evaluate(copy) == (20, said)
    copy = shutil.copytree(data, tmp_path / "elsewhere")  # known by its files
    assert evaluate(copy)[0] == 2
    (copy / "bee" / "9.png").unlink()
    assert evaluate(copy)[0] == 19  # other data
    (tmp_path / "link").symlink_to(data)
    assert evaluate(tmp_path / "link")[0] == 2
    pictures.smooth(901, 16, 16).save(data / "bee" / "new.png")
    try:  # nobody knows any more which images the run held out
        count, said = evaluate(tmp_path / "link")
        assert count == 21 and "trained on data of this name, which has changed or was another" in said
    finally:
        (data / "bee" / "new.png").unlink()


def test_held_out_is_said_of_no_image_that_the_run_trained_on(own, evaluate, tmp_path, caplog):
    count, said = evaluate(own[0], "--set", "hold_out=0.5")
    assert count == 8 and said == f"measures the 8 images of {own[0]} that hold_out=0.5 holds out"
    from vitfast.train.recipes import resolve
    from vitfast.train.trainer import train

    for split, count in (("train", 5), ("val", 2)):
        folder(tmp_path / "data" / split, *CLASSES, count=count)
    settings = dict(data=str(tmp_path / "data"), output=str(tmp_path / "run"), device="cpu", img_size=16, workers=0)
    train(resolve("pretrain", settings | dict(model="Nano/8", steps=1, batch_size=4, hidden_head=False)))
    weights, trained = tmp_path / "run" / "checkpoints" / "last", "; the run of these weights trained on them"
    for flags, right in (((), 10), (("--split", "val"), 2)):
        count, said = evaluate(tmp_path / "data" / "train", *flags, weights=weights)
        assert count == right and trained in said


def test_any_other_folder_is_measured_whole(own, evaluate, tmp_path):
    test = folder(tmp_path / "test", *CLASSES, first=300)
    assert evaluate(test) == (
        20,
        f"measures all 20 images of {test}; --split val measures the 2 that training holds out",
    )
    assert evaluate(test, "--split", "val")[0] == 2
    assert evaluate(folder(tmp_path / "one", "bee", count=3))[0] == 3  # of one class
    assert evaluate(folder(tmp_path / "single", *CLASSES, count=1))[0] == 2  # of which nothing could be held out
    (tmp_path / "listed").mkdir()
    for i in range(4):
        pictures.smooth(i, 16, 16).save(tmp_path / "listed" / f"{i}.png")
    (tmp_path / "listed" / "labels.csv").write_text("id;class\n0;bee\n1;ape\n3;ape\n")
    assert evaluate(tmp_path / "listed")[0] == 3
    weights = tmp_path / "nameless"
    tiny(2).save_pretrained(weights)
    assert evaluate(test, weights=weights)[0] == 20


def test_of_several_splits_the_one_that_is_measured_is_said(own, evaluate, tmp_path, caplog):
    for name, count in (("val", 3), ("test", 4), ("training", 5), ("other", 1)):
        folder(tmp_path / "data" / name, *CLASSES, count=count)
    root = tmp_path / "data"
    assert evaluate(root) == (6, f"measures the 6 images of {root}/val")
    assert f"{root}: reads training/ and val/ and passes over other, test" in caplog.text
    assert evaluate(root / "test") == (8, f"measures all 8 images of {root}/test; --split val measures the 2 that "
                                          "training holds out")  # fmt: skip
    err = evaluate(root, "--split", "all", code=2)
    assert f"--split all: {root} has {root}/val to measure; give --data another folder" in err
    for name in ("training", "other", "val"):
        shutil.rmtree(root / name)
    assert evaluate(root) == (8, f"measures the 8 images of {root}/test")  # without training images


def test_class_folders_called_like_splits_are_classes_beside_others(evaluate, tmp_path):
    names = ("bus", "car", "train", "test")
    model = tiny(4)
    model.class_names = names
    model.save_pretrained(tmp_path / "w")
    root = folder(tmp_path / "traffic", *names)
    assert evaluate(root, weights=tmp_path / "w")[0] == 40
    flat = folder(tmp_path / "flat", "train", "test")
    assert f"{flat}/test holds images and no class folders; expected test/<class>/" in evaluate(flat, code=2)
    for name in CLASSES:  # images for training in class folders, and more images without any
        folder(tmp_path / "kaggle" / "train", name, first=ord(name[0]))
    folder(tmp_path / "kaggle", "test", count=5)
    assert evaluate(tmp_path / "kaggle")[0] == 20


def test_shards_are_measured_whole_too(evaluate, tmp_path):
    from shards import files, shards

    weights = tmp_path / "w"
    tiny(3).save_pretrained(weights)
    root = shards(tmp_path / "data", files(9), ["part"])
    assert evaluate(f"wds/{root}", weights=weights) == (
        9,
        f"measures all 9 images of {root}/*.tar; --split val measures the 3 that training holds out",
    )
    shards(root, files(6), ["test"])
    assert evaluate(f"wds/{root}", weights=weights) == (6, f"measures the 6 images of {root}/test*.tar")


def test_weights_whose_state_is_gone_are_measured(own, evaluate, tmp_path):
    """Their run's data is known by what state.json says."""
    weights = shutil.copytree(own[1], tmp_path / "w")
    state = weights / "state" / "state.safetensors"
    state.write_bytes(b"no tensors")
    assert evaluate(own[0], weights=weights)[0] == 2
    state.unlink()
    assert evaluate(own[0], weights=weights)[0] == 2
