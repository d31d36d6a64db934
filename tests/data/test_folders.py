"""Folders of images: class folders that are odd, and labels files."""

import json
import os

import numpy as np
import pictures
import pytest
import torch
from commands import make_folder
from runs import digits
from timm.data.readers.reader_image_folder import find_images_and_targets
from torchvision.datasets import ImageFolder

from vitfast import InputError
from vitfast.data.datasets import open_sources, settle_classes
from vitfast.data.folders import _class_folder, open_folder
from vitfast.data.image_files import SUFFIXES
from vitfast.data.loader import open_data

CPU = torch.device("cpu")


def test_one_broken_image_stops_no_run_before_it_begins(tmp_path):
    root = pictures.folder(tmp_path / "data")
    (root / "train" / "a" / "0.jpg").write_bytes(b"")
    (root / "val" / "b" / "0.jpg").write_bytes(b"")
    train, val = open_folder(root)
    assert (len(train), len(val)) == (8, 8)
    for image in (root / "val" / "b").iterdir():
        image.write_bytes(b"")
    with pytest.raises(InputError, match=f"{root / 'val'}: no image of the class 'b' can be read, the first: .*0.jpg"):
        open_folder(root)


def test_links_back_are_named(tmp_path):
    """timm's reader would follow them forty times, and call each image by another class."""
    for number, target in enumerate((".", "..", "../..")):
        root = pictures.folder(tmp_path / str(number))
        link = root / "train" / "a" / "again"
        link.symlink_to(target)
        with pytest.raises(InputError, match="again links back to a folder around it; remove the link"):
            open_folder(root)
        link.unlink()
        link.symlink_to(tmp_path / "other")
        (tmp_path / "other").mkdir(exist_ok=True)
        back = tmp_path / "other" / "back"
        back.symlink_to(root / "train")
        with pytest.raises(InputError, match="links back"):
            open_folder(root)
        back.unlink()
        assert len(open_folder(root)[0]) == 8  # other links are followed


def test_what_a_folder_holds_besides_is_said(tmp_path, caplog, monkeypatch):
    root = pictures.folder(tmp_path / "data")
    (root / "train" / "a" / "5.jxl").write_bytes(b"\xff\x0a")
    with caplog.at_level("WARNING"):
        assert len(open_folder(root)[0]) == 8
    assert f"{root / 'train'}: passed over: 1 .jxl (Pillow cannot read them)" in caplog.text
    (root / "train" / "x.jpg").mkdir()  # a folder called like a file is a class folder without images
    assert open_folder(root)[0].classes == ["a", "b"]
    pictures.smooth(0).save(root / "train" / "stray.jpg")
    with pytest.raises(InputError, match="stray.jpg lies in no class folder"):
        open_folder(root)
    (root / "train" / "stray.jpg").unlink()
    scan = os.scandir

    def closed(path):
        if str(path).endswith("b"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(InputError, match="train/b cannot be read .Permission denied."):
        open_sources(str(root), "", (16, 16), (8, 8), digits())


def test_class_folders_hold_what_timm_finds_there_with_every_suffix_and_nothing_hidden(tmp_path):
    names = "c10/2.png c10/10.JPG c9/b.jpeg c9/a.webp c9/z.tiff x/9.bmp n01.440/1.png x.jpg/a.b.png"
    for name in names.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pictures.smooth(1, 16, 16).save(tmp_path / name)
    theirs, numbers = find_images_and_targets(str(tmp_path), types=SUFFIXES)
    for name in ("c9/._a.jpg", "c9/.b.png", ".thumbnails/1.png", "c10/.trash/deep/1.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pictures.smooth(1, 16, 16).save(tmp_path / name)
    source = _class_folder(tmp_path)
    assert list(zip(source.files, source.labels)) == theirs
    assert source.classes == list(numbers) == ["c9", "c10", "n01.440", "x", "x.jpg"]


def test_the_outermost_folder_is_the_class_as_in_torchvision(tmp_path, caplog):
    names = "circle/s1/1.png circle/s2/deep/2.png circle/3.png square/s1/4.png square/s3/5.png"
    for name in names.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pictures.smooth(1, 16, 16).save(tmp_path / name)
    with caplog.at_level("INFO"):
        source = _class_folder(tmp_path)
    theirs = ImageFolder(str(tmp_path))
    assert source.classes == theirs.classes == ["circle", "square"]
    assert sorted(zip(source.files, source.labels)) == sorted(theirs.samples)
    said = "images in circle/s1 are of the class 'circle', the outermost folder, as in torchvision"
    assert f"{tmp_path}: {said} (timm takes the innermost)" in caplog.text
    (tmp_path / "above").mkdir()
    for name in ("circle", "square"):
        (tmp_path / name).rename(tmp_path / "above" / name)
    with pytest.raises(InputError, match="has one class only .'above'.*the folders in it are the classes.*above$"):
        open_folder(tmp_path)


def test_a_class_with_one_image_keeps_it_for_training(tmp_path):
    root = pictures.folder(tmp_path / "data", count=1)
    pictures.smooth(7, 32, 32).save(root / "train" / "b" / "1.jpg")
    settings = dict(data=str(root), hold_out=0.999, workers=0)
    data = open_data(digits(**settings), (32, 32), (8, 8), CPU)
    assert sorted(label for _, label in (data.train[i] for i in range(len(data.train)))) == [0, 1]
    assert [data.val[i][1] for i in range(len(data.val))] == [1]
    (root / "train" / "b" / "1.jpg").unlink()
    with pytest.raises(InputError, match="there is no validation image"):
        open_data(digits(**settings), (32, 32), (8, 8), CPU)


# ---- labels files


@pytest.mark.parametrize("train, val", [("Train", "Val"), (".", "val"), ("trainIng", "test")])
def test_splits_by_other_names_are_not_taken_for_classes(tmp_path, train, val):
    root = make_folder(tmp_path, (train, val), ("cat", "dog"), count=2)
    with pytest.raises(InputError, match="and no train/; name the folder of the training images .*/train, and that of"):
        open_folder(root)


def test_valid_validates_and_is_a_class_too(tmp_path):
    names = ("invalid", "valid")
    root = make_folder(tmp_path, ("train", "valid"), names, count=2)
    train, val = open_folder(root)
    assert train.classes == val.classes == [*names] and len(train) == len(val) == 4
    assert all("/valid/" in val.name(i).removeprefix(str(root)) for i in range(4))
    assert open_folder(root / "valid")[0].classes == [*names]


def test_train_is_a_class_beside_other_class_folders_even_with_a_folder_in_it(tmp_path):
    root = make_folder(tmp_path, [""], ("bus", "train"), count=2)
    pictures.smooth(0, 16, 16).save(root / "train" / "stray.png")
    (root / "train" / "inner").mkdir()
    train, val = open_folder(root)
    assert val is None and train.classes == ["bus", "train"] and train.labels == [0, 0, 1, 1, 1]


def test_a_class_folder_without_an_image_is_warned_of(tmp_path, caplog):
    root = make_folder(tmp_path, [""], ("cat", "dog"), count=2)
    for name in ("eel", ".hidden"):
        (root / name).mkdir()
    (root / "eel" / "notes.txt").write_text("none")
    assert open_folder(root)[0].classes == ["cat", "dog"]
    assert f"{root}: there are no images in eel, so that there is no such class" in caplog.text


def test_one_image_of_each_class_cannot_validate(tmp_path):
    root = make_folder(tmp_path, [""], ("cat", "dog"), count=1)
    with pytest.raises(InputError, match="has no val/ and one image of each class, of which none can validate"):
        open_data(digits(data=str(root), workers=0), (16, 16), (8, 8), CPU)


def listed(root, lines: str, split: str = "train", name: str = "labels.csv"):
    """A split whose labels file has these lines, and all files of one letter in it."""
    (root / split).mkdir(parents=True, exist_ok=True)
    for i, letter in enumerate("abcdefghijklmnopqrst"):
        pictures.smooth(i, 16, 16).save(root / split / f"{letter}.png")
    (root / split / name).write_text(lines)
    return root


def test_labels_files_say_the_classes_of_each_image(tmp_path):
    csv = 'file,classes\na.png,cat; dog\n"b.png",dog\n\nc.png,\nd.png,eel10;eel9\n'
    pairs = {"a.png": ["cat", "dog"], "b.png": ["dog"], "c.png": [], "d.png": ["eel10", "eel9"]}
    for number, (name, content) in enumerate((("labels.csv", csv), ("labels.json", json.dumps(pairs)))):
        root = listed(tmp_path / str(number), content, name=name)
        listed(root, content.replace("eel10", "cat"), split="val", name=name)
        train, val = open_sources(str(root), "", (16, 16), (8, 8), digits())
        settle_classes([train, val])
        assert train.classes == val.classes == ["cat", "dog", "eel9", "eel10"]  # as timm sorts class folders
        truth = [[1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1]]
        assert np.array_equal([train[i][1] for i in range(4)], truth) and train[0][1].dtype == np.float32
        assert val[3][1].tolist() == [1, 0, 1, 0] and train[0][0].size == (16, 16)
        for where in ("host", "device"):
            config = digits(data=str(root), objective="sigmoid", batch_size=4, decode=where, workers=0)
            _, labels, _ = next(iter(open_data(config, (16, 16), (8, 8), CPU).train_batches(0, 1)))
            assert labels.dtype == torch.float32 and sorted(labels.tolist()) == sorted(truth)


def test_without_val_a_tenth_of_a_labels_file_is_held_out(tmp_path):
    root = listed(tmp_path, "".join(f"{letter}.png,x{i % 3}\n" for i, letter in enumerate("abcdefghijklmnopqrst")))
    for spec in (root, root / "train"):
        data = open_data(digits(data=str(spec), workers=0), (16, 16), (8, 8), CPU)
        train, val = data.train, data.val
        assert not data.multi_label  # each image has one class
        assert (len(train), len(val)) == (17, 3) and not set(train.indices) & set(val.indices)
    config = digits(data=str(root), hold_out=0.5, workers=0)
    assert len(open_data(config, (16, 16), (8, 8), CPU).val) == 3 + 3 + 2


def test_a_table_beside_its_images_as_kaggle_has_it(tmp_path, caplog):
    """Ids without suffix; the images without labels are counted."""
    caplog.set_level("INFO")
    for split in ("train", "test"):
        listed(tmp_path, "", split)
        (tmp_path / split / "labels.csv").unlink()
    (tmp_path / "labels.csv").write_text("id,breed\na,pug\nb,boxer\nc,pug\nd,boxer\n")
    data = open_data(digits(data=str(tmp_path), workers=0, hold_out=0), (16, 16), (8, 8), CPU)
    assert data.classes == ["boxer", "pug"] and not data.multi_label and (len(data.train), len(data.val)) == (2, 2)
    for source in (data.train, data.val):
        for i in range(2):
            letter = source.name(i).removeprefix(f"{tmp_path}/train/").removesuffix(".png")
            pixels = np.asarray(pictures.smooth("abcd".index(letter), 16, 16))
            assert source[i][1] == int(letter in "ac") and np.array_equal(np.asarray(source[i][0]), pixels)
    assert f"{tmp_path}: passed over: 36 .png that labels.csv does not list" in caplog.text
    (tmp_path / "train" / "a" / "x").mkdir(parents=True)  # class folders in train/ count, as before
    pictures.smooth(0, 16, 16).save(tmp_path / "train" / "a" / "x" / "1.png")
    with pytest.raises(InputError, match="lies in no class folder"):
        open_folder(tmp_path)


def test_a_folder_of_images_without_labels_beside_labelled_ones_is_passed_over(tmp_path, caplog):
    caplog.set_level("INFO")
    root = listed(tmp_path, "a.png,cat;cat\nb.png,dog\nc.png,cat\nd.png,dog\n")
    (listed(root, "", "test") / "test" / "labels.csv").unlink()
    data = open_data(digits(data=str(root), workers=0), (16, 16), (8, 8), CPU)
    assert (len(data.train), len(data.val), data.multi_label) == (2, 2, False)  # a class named twice is one
    assert f"{root}: reads train/ and passes over test; --data can name another folder" in caplog.text


WRONG = [  # what test_records.py does not have
    ("labels.csv", "a.png,cat\nz.png,dog\n", "train/labels.csv, line 2: no file .*z.png"),
    ("labels.csv", "a.png,\n", "labels.csv gives no image a class"),
    ("labels.json", "[1]", "must hold an object"),
    ("labels.json", '{"a.png": [1]}', "names of the classes of a.png, got .1"),
    ("labels.json", '{"a.png": ["x"], "a.png": ["y"]}', "there already"),
    ("labels.json", "{", "cannot be read"),
]


@pytest.mark.parametrize("name, lines, said", WRONG)
def test_wrong_labels_files_are_named_with_line_and_class(name, lines, said, tmp_path):
    with pytest.raises(InputError, match=said) as caught:
        open_folder(listed(tmp_path, lines, name=name))
    assert "\n" not in str(caught.value)


def test_labels_files_of_two_splits_must_fit(tmp_path):
    root = listed(tmp_path, "a.png,cat\nb.png,dog\n")
    listed(root, "a.png,cat\nb.png,dog;fox\n", split="val")
    said = "must have the same; only in validation: fox, first in .*val/labels.csv, line 2, b.png"
    with pytest.raises(InputError, match=said):
        open_data(digits(data=str(root), objective="sigmoid"), (16, 16), (8, 8), CPU)
    (root / "val" / "labels.csv").unlink()
    with pytest.raises(InputError, match="val has no labels file, which the training folder has"):
        open_folder(root)
    with pytest.raises(InputError, match="two labels files"):
        open_folder(listed(root, "{}", name="labels.json"))


def test_settings_that_need_one_class_an_image_are_refused(tmp_path):
    root = listed(tmp_path, "a.png,cat;dog\nb.png,dog\nc.png,cat\n")
    for settings, message in (
        (dict(), "which softmax cannot learn: add --set objective=sigmoid"),
        (dict(objective="sigmoid", shots=2), "shots is a number of images a class"),
    ):
        with pytest.raises(InputError, match=message):
            open_data(digits(data=str(root), **settings), (16, 16), (8, 8), CPU)
