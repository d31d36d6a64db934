"""`eval` and `predict` on folders of mixed sizes, each image at its own: what the model says of it alone."""

import json

import numpy as np
import pytest
import torch
from commands import run_cli
from frozen import tiny
from PIL import Image

from vitfast.data.packing import Native
from vitfast.eval.predict import predict
from vitfast.run.config import Config

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
    code, out, err = run_cli(capsys, *command, "--sizes", "native", *settings)
    assert code == 0, err
    found = json.loads(out)
    paths = sorted((folder / "data" / "val").glob("c?/[0-9].png"))
    logits = torch.stack([alone(model, path) for path in paths])
    labels = torch.tensor([int(path.parent.name[1]) for path in paths])
    assert found["images"] == 6 and found["unreadable_images"] == 1
    assert found["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert found["accuracy"] == pytest.approx((logits.argmax(1) == labels).double().mean().item())


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
