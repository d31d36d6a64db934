"""Predictions of image files: what has none, folders, CSV, as `vitfast eval` sees them, each at its own size."""

import csv
import dataclasses
import io
import itertools
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pictures
import pytest
import taped_graphs
import torch
from commands import run_cli, works
from frozen import evaluation, tiny
from PIL import Image

from vitfast import InputError, ViT, ops
from vitfast.data.image_files import image_files
from vitfast.data.loader import open_data
from vitfast.data.packing import Native
from vitfast.data.samples import PADDING
from vitfast.eval.accuracy import evaluate
from vitfast.eval.predict import predict, write_csv
from vitfast.kernels.launch import INTERPRETED
from vitfast.run.config import Config

HOST = Config(workers=0)
tapes = pytest.fixture(taped_graphs.tapes)


def test_images_stream(tmp_path):
    """Paths are taken and files are read as the answers are asked for: an endless list has a beginning."""
    pictures.smooth(0, 30, 30).save(tmp_path / "a.png")
    taken = []

    def endless():
        for number in itertools.count():
            taken.append(number)
            yield str(tmp_path / "a.png")

    records = predict(tiny(3), endless(), Config(workers=0, eval_batch_size=4))
    assert len([next(records) for _ in range(9)]) == 9 and len(taken) <= 16


def test_what_cannot_be_read_has_its_place_and_its_reason(tmp_path):
    good, bad, cut = (str(tmp_path / name) for name in ("good.png", "bad.png", "cut.jpg"))
    pictures.smooth(0, 40, 40).save(good)
    pictures.smooth(1, 400, 400).save(cut)
    with open(cut, "r+b") as file:
        file.truncate(2000)  # its header is whole
    (tmp_path / "bad.png").write_text("no image")
    paths = [bad, good, cut, good, str(tmp_path), str(tmp_path / "gone.png")]
    for size in (1, 2, 6):
        records = list(predict(tiny(3), iter(paths), Config(workers=0, eval_batch_size=size)))
        assert [r["image"] for r in records] == paths
        assert ["error" in r for r in records] == [True, False, True, False, True, True]
        assert all(r["image"] in r["error"] and "predictions" not in r for r in records if "error" in r)
        first, second = ({p["label"]: p["probability"] for p in records[i]["predictions"]} for i in (1, 3))
        assert second == pytest.approx(first, abs=1e-6) and len(first) == 3


def test_numbers_that_are_none_no_head_and_too_little_memory_are_one_line(tmp_path, monkeypatch):
    pictures.smooth(0, 40, 40).save(tmp_path / "a.png")
    model = tiny(3)
    model.head.bias.data[1] = float("nan")
    (record,) = predict(model, [str(tmp_path / "a.png")], HOST, sigmoid=True)
    assert "not a number" in record["error"] and "predictions" not in record
    for model in (tiny(0), tiny(3, global_pool="")):
        with pytest.raises(InputError, match="no classification head"):
            predict(model, [], HOST)
    with pytest.raises(InputError, match="top_k must be at least 1, got 0"):
        predict(tiny(3), [], HOST, top_k=0)

    def full(self, images):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ViT, "forward", full)
    with pytest.raises(InputError, match="out of memory with 1 images at once; give a smaller --batch-size"):
        next(predict(tiny(3), [str(tmp_path / "a.png")], HOST))


def test_a_folder_is_walked_in_order_with_its_links_and_without_its_circles(tmp_path):
    for name in ("b/2.JPG", "b/10.png", "a.webp", "c/deep/x.png", "b/.hidden.png", ".cache/y.png", "b/notes.txt"):
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "z.png").touch()
    (tmp_path / "root" / "d").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root" / "c" / "up").symlink_to(tmp_path / "root")
    os.mkfifo(tmp_path / "root" / "pipe.png")
    for name, target in (("e.png", "a.webp"), ("f.png", "gone.png"), ("g.png", "g.png")):
        (tmp_path / "root" / name).symlink_to(target)
    found = [path.removeprefix(f"{tmp_path}/root/") for path in image_files(tmp_path / "root")]
    assert found == ["a.webp", "b/10.png", "b/2.JPG", "c/deep/x.png", "d/z.png", "e.png", "f.png", "g.png"]
    records = predict(tiny(3), [str(tmp_path / "root" / name) for name in ("f.png", "g.png")], HOST)
    assert [record["error"].split("(")[1][:8] for record in records] == ["No such ", "Too many"]
    assert list(image_files(tmp_path / "root/b/notes.txt")) == [str(tmp_path / "root/b/notes.txt")]  # as asked for
    (tmp_path / "empty").mkdir()
    for path, message in (("empty", "no images in"), ("gone", "no file or folder")):
        with pytest.raises(InputError, match=message):
            list(image_files(tmp_path / path))


def written(records: list[dict], top_k: int) -> list[list[str]]:
    text = io.StringIO(newline="")
    write_csv(records, text, top_k)
    return list(csv.reader(io.StringIO(text.getvalue(), newline="")))


def test_names_of_any_kind_come_back_from_csv_and_no_cell_is_a_formula():
    """As OWASP says for "CSV injection"; a path still names its file, and a number is one."""
    names = ["plain.png", "a, b.png", 'quo"te.png', "new\nline.png", "re\rturn.png", "é 猫.png", "same.png", "same.png"]
    best = [dict(label="é,\n", probability=0.75), dict(label=3, probability=1.5e-9)]
    rows = written([dict(image=name, predictions=best) for name in names] + [dict(image="bad", error="why")], 2)
    assert rows[0] == ["image", "label_1", "probability_1", "label_2", "probability_2"]
    assert rows[1:-1] == [[name, "é,\n", "0.75", "3", "1.5e-09"] for name in names]
    assert rows[-1] == ["bad", "", "", "", ""]
    names = ["=cmd().png", "+1.png", "-x.png", "@a.png", "\ttab.png", "\rreturn.png", "a=b.png", "/=.png"]
    labels = ["=1+1", "+a", "-cat", "@SUM(A1)", "\t=1", "-1.5", "+2e-3", 7]
    _, *rows = written([dict(image=i, predictions=[dict(label=k, probability=0.5)]) for i, k in zip(names, labels)], 1)
    assert not [row[0] for row in rows if row[0][0] in "=+-@\t\r"]
    assert [Path(row[0]) for row in rows] == [Path(name) for name in names]
    assert [row[1] for row in rows] == ["'=1+1", "'+a", "'-cat", "'@SUM(A1)", "'\t=1", "-1.5", "+2e-3", "7"]


def test_predict_and_eval_see_the_same_images_of_a_folder(tmp_path):
    """Any suffix, hidden files, images less than a patch, less than the crop, and long ones."""
    sizes = [(3, 30), (30, 7), (8, 8), (9, 20), (12, 40), (16, 16), (40, 90), (16, 600), (5, 5)]
    suffixes = ["png", "jpg", "webp", "bmp", "tif", "ppm", "gif", "JPEG", "tiff"]
    for number, ((height, width), suffix) in enumerate(zip(sizes, suffixes)):
        for name in ("a", "b"):
            file = tmp_path / "val" / name / f"{number}.{suffix}"
            file.parent.mkdir(parents=True, exist_ok=True)
            pictures.smooth(number, height, width).save(file)
    shutil.copytree(tmp_path / "val", tmp_path / "train")
    (tmp_path / "val" / "a" / ".hidden").mkdir()
    for hidden in (".hidden/1.png", ".1.png", "._0.jpg"):
        pictures.smooth(1, 20, 20).save(tmp_path / "val" / "a" / hidden)
    model = tiny(2)
    model.class_names = names = ("n01.440", "é,\n")
    config = evaluation("", tmp_path, crop_pct=0.9)
    data = open_data(config, (16, 16), (8, 8), torch.device("cpu"))
    probabilities, files = [], [data.val.name(i) for i in range(len(data.val))]

    def note(logits, labels):
        probabilities.extend(zip(logits.softmax(1).tolist(), labels.tolist()))

    assert evaluate(model, data, note)["unreadable_images"] == 6
    in_batches = dataclasses.replace(config, workers=2, eval_batch_size=5)
    told = {record["image"]: record for record in predict(model, image_files(tmp_path / "val"), in_batches, top_k=2)}
    assert sorted(told) == sorted(files) and len(files) == 18
    for file, (shares, label) in zip(files, probabilities):
        assert ("error" in told[file]) == (label == PADDING) == (min(sizes[int(Path(file).stem)]) < 8), file
        if label != PADDING:
            said = {p["label"]: p["probability"] for p in told[file]["predictions"]}
            assert said == pytest.approx(dict(zip(names, shares)), abs=1e-6), file


# ---- folders of mixed sizes, each image at its own: what the model says of it alone


SIZES = [(16, 16), (40, 16), (13, 30), (64, 64), (5, 90), (24, 24)]  # width, height


@pytest.fixture(scope="module")
def model():
    return tiny(2, std=0.3, seed=1, depth=2, dynamic_img_size=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model):
    """Two classes, three validation images each, every one of another size; and one that cannot be read."""
    root = tmp_path_factory.mktemp("mixed")
    for i, size in enumerate(SIZES):
        for split in ("train", "val"):
            place = root / "data" / split / f"c{i % 2}"
            place.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(i).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / f"{i}.png")
    (root / "data" / "val" / "c1" / "broken.png").write_bytes(b"no image")
    model.save_pretrained(root / "weights")
    return root


def alone(model, path):
    """The logits of an image file as the model is to see it: to the nearest patches, both sides resized at once."""
    with Image.open(path) as image, torch.no_grad():
        size = [8 * max(1, round(side / 8)) for side in image.size]
        image = image if image.size == tuple(size) else image.resize(size, Image.Resampling.BICUBIC)
        return model(torch.from_numpy(np.array(image)).permute(2, 0, 1)[None])[0]


@pytest.mark.parametrize("settings", [[], ["--batch-size", "1"], ["--set", "workers=2", "tokens_per_step=90"]])
def test_eval_sees_each_image_whole(folder, model, capsys, settings):
    command = ("eval", "--weights", folder / "weights", "--data", folder / "data", "--device", "cpu", "--json")
    if "--batch-size" in settings:  # 4 patches, the model's own, at once: what is larger is made smaller
        settings = [*settings, "--set", "tokens_per_step=64"]
    out = works(capsys, *command, "--sizes", "native", *settings)
    found = json.loads(out)
    paths = sorted((folder / "data" / "val").glob("c?/[0-9].png"))
    logits = torch.stack([alone(model, path) for path in paths])
    labels = torch.tensor([int(path.parent.name[1]) for path in paths])
    assert found["images"] == 6 and found["unreadable_images"] == 1
    assert found["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert found["accuracy"] == pytest.approx((logits.argmax(1) == labels).double().mean().item())


@pytest.mark.skipif(not INTERPRETED, reason="interpreted kernels")
@pytest.mark.quick(1)
@pytest.mark.parametrize("sizes", ["", "native"])
def test_graphs_predict_the_same(sizes, folder, model, tapes):
    """Full batches by a graph, and the last one, which is not, without; packs of native sizes all by graphs."""
    paths = [str(folder / "data" / "val" / f"c{i % 2}" / f"{i}.png") for i in range(4)] * 3
    config = Config(workers=0, eval_batch_size=5, **dict(sizes=sizes, tokens_per_step=70) if sizes else {})
    with ops.use_kernels("on"):
        truth, found = (list(predict(model, paths, config, top_k=2, graphs=graphs)) for graphs in (False, True))
    for one, other in zip(truth, found, strict=True):
        assert one["image"] == other["image"] and len(one["predictions"]) == 2
        for mine, theirs in zip(one["predictions"], other["predictions"]):
            assert mine["label"] == theirs["label"]
            assert mine["probability"] == pytest.approx(theirs["probability"], rel=1e-5)
    assert not any(tape.read for tape in tapes)
    assert [tape.replays for tape in tapes] == [2] if not sizes else len(tapes) > 1


def test_graphs_need_a_gpu(folder, model, capsys):
    with pytest.raises(InputError, match="^graphs: a model that runs as CUDA graphs must be on one GPU"):
        predict(model, [], HOST, graphs=True)
    command = ("predict", folder / "data", "--weights", folder / "weights", "--device", "cpu", "--graphs")
    code, out, err = run_cli(capsys, *command)
    assert code == 2 and not out and err.count("\n") == 1 and "must be on one GPU, and this one is on cpu" in err


def test_predict_sees_each_image_whole(folder, model, capsys):
    paths = [folder / "data" / "val" / f"c{i % 2}" / f"{i}.png" for i in range(6)]
    paths.insert(2, folder / "data" / "val" / "c1" / "broken.png")
    command = ("predict", *paths, "--weights", folder / "weights", "--device", "cpu", "--json", "--top-k", 2)
    code, out, err = run_cli(capsys, *command, "--sizes", "native", "--set", "tokens_per_step=70")
    assert code == 0 and "broken.png" in err
    records = json.loads(out)
    assert [record["image"] for record in records] == list(map(str, paths)) and "error" in records.pop(2)
    for record in records:
        best = record["predictions"][0]
        probabilities = alone(model, record["image"]).softmax(-1)
        assert int(best["label"]) == probabilities.argmax() and best["probability"] == pytest.approx(
            probabilities.max().item(), rel=1e-5
        )
    one_size = list(predict(model, map(str, paths[3:4]), Config(workers=0)))[0]["predictions"]
    assert one_size != records[2]["predictions"]  # 64 x 64 made 16 x 16


def test_images_keep_their_nearest_grid_unless_it_is_too_large():
    native = Native((8, 8), 50)
    for size, shape in (((37, 76), (3, 80, 40)), ((250, 3), (3, 8, 248)), ((400, 200), (3, 40, 80))):
        assert native.transform(Image.new("RGB", size)).shape == shape
    kept = native.transform(Image.fromarray(np.arange(16 * 24 * 3, dtype=np.uint8).reshape(16, 24, 3)))
    assert np.array_equal(kept.transpose(1, 2, 0), np.arange(16 * 24 * 3, dtype=np.uint8).reshape(16, 24, 3))


def test_images_are_computed_together_up_to_a_budget():
    images = [np.zeros((3, 8 * h, 8 * w), np.uint8) for h, w in ((2, 5), (4, 5), (5, 5), (1, 1), (5, 10), (1, 2))]
    groups = Native((8, 8), 50).pack(images)
    assert [list(group.counts) for group in groups] == [[10, 20], [25, 1], [50], [2]]


ONE_SIZE = [
    ("eval", "sizes=native", "pos_embed='relative' takes images of one size"),
    ("eval", "sizes=16:32", "eval and predict take sizes=native, got sizes=16:32"),
    ("eval", "tokens_per_step=90", "tokens_per_step is for images of many sizes: add --sizes native"),
    ("fewshot", "sizes=native", "fewshot takes images of one size"),
    ("pretrain", "sizes=native", "sizes=native is for eval and predict"),
]


@pytest.mark.parametrize("command, setting, says", ONE_SIZE)
def test_what_is_of_one_size_says_so(folder, tmp_path, capsys, command, setting, says):
    more = ("--output", tmp_path / "run") if command == "pretrain" else ()
    if "relative" in says:
        tiny(2, pos_embed="relative").save_pretrained(tmp_path / "weights")
    weights = (tmp_path if "relative" in says else folder) / "weights"
    flags = ("--weights", weights, "--data", folder / "data", "--device", "cpu", "--set", setting)
    code, _, err = run_cli(capsys, command, *flags, *more)
    assert code == 2 and says in err
