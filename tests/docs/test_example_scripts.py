"""The examples that README.md lists: each runs at toy size, on generated images."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from doc_blocks import ROOT
from examples import EXAMPLES, load
from pictures import folder
from PIL import Image

import vitfast
from vitfast.train.log import read_metrics

ViT = vitfast.ViT
TOY = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3)


@pytest.fixture
def weights(tmp_path) -> str:
    ViT(**TOY, num_classes=5).save_pretrained(tmp_path / "weights")
    return str(tmp_path / "weights")


def coloured(root) -> str:
    """Class folders of images that a head can tell apart: one class is dark, the other one bright."""
    noise = np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 8)):
        for name, low in (("bright", 150), ("dark", 0)):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = noise.integers(low, low + 100, (40, 48, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
    return str(root)


def test_the_table_has_every_example():
    table = (EXAMPLES / "README.md").read_text()
    assert set(re.findall(r"^\| `(\S+)` \|", table, re.MULTILINE)) == {
        path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")
    }
    assert "examples/README.md:table" in (ROOT / "docs/index.md").read_text()


@pytest.mark.slow
def test_train_from_scratch(tmp_path, capsys):
    data = folder(tmp_path / "data", size=40)
    flags = ["--data", str(data), "--output", str(tmp_path / "run"), "--epochs", "1"]
    module = load("train_from_scratch")
    summary = module.main(flags)
    rows = read_metrics(tmp_path / "run")
    said = capsys.readouterr().out
    assert said.count("\nstep") + said.startswith("step") == len(rows) > 1
    assert summary["finished"] and f"accuracy {summary['accuracy']:.4f}; ViT.from_pretrained(" in said
    assert module.main(flags) == summary  # the same command does not train it again


@pytest.mark.slow
def test_fine_tune(tmp_path, weights, capsys):
    data = coloured(tmp_path / "data")
    options = "--epochs 6 --batch-size 16 --lr 2e-3".split()
    accuracy = load("fine_tune").main([data, "--weights", weights, "--output", str(tmp_path / "tuned"), *options])
    tuned = ViT.from_pretrained(tmp_path / "tuned")
    assert accuracy > 0.9 and f"accuracy {accuracy:.4f}" in capsys.readouterr().out
    assert tuned.class_names == ("bright", "dark")
    assert not torch.equal(tuned.blocks[0].attn.qkv.weight, ViT.from_pretrained(weights).blocks[0].attn.qkv.weight)


def refused(name: str, flags: list[str], capsys) -> str:
    """What an example says that ends because its input is wrong."""
    with pytest.raises(SystemExit) as end:
        load(name).main(flags)
    return f"{end.value.code} {capsys.readouterr().err}"


def test_fine_tune_refuses_classes_that_differ(tmp_path, weights, capsys):
    """Else the second class of three would be the first of two, and the accuracy would be wrong."""
    data = coloured(tmp_path / "data")
    (tmp_path / "data/val/bright").rename(tmp_path / "data/val/pale")
    flags = [data, "--weights", weights, "--output", str(tmp_path / "tuned")]
    assert "train/ has the classes ['bright', 'dark'], val/ has ['dark', 'pale']" in refused("fine_tune", flags, capsys)
    assert "--epochs must be 1 or more, got 0" in refused("fine_tune", [*flags, "--epochs", "0"], capsys)


def test_embeddings(tmp_path, weights, capsys):
    data = folder(tmp_path / "data", ("train",))
    (data / "train/a/broken.png").write_bytes(b"no image")
    output, query = tmp_path / "v.npz", str(data / "train/b/2.jpg")
    nearest = load("embeddings").main([str(data), "--weights", weights, "--output", str(output), "--query", query])
    saved, said = np.load(output), capsys.readouterr().out
    truth = vitfast.Embedder(weights, normalize=True).embed(saved["paths"].tolist())
    np.testing.assert_allclose(saved["vectors"], truth, atol=1e-5)
    assert len(saved["paths"]) == 8 and len(nearest) == 5 and nearest[0] == query
    assert said.count("left out:") == 1 and "broken.png" in said and "1.0000  " + query in said
    plain = tmp_path / "vectors"  # without an ending
    load("embeddings").main([str(data), "--weights", weights, "--output", str(plain)])
    assert f"in {plain}; nearest to {saved['paths'][0]}:\n1.0000" in capsys.readouterr().out and np.load(plain)
    for image in saved["paths"]:
        Path(image).write_bytes(b"no image")
    said = refused("embeddings", [str(data), "--weights", weights, "--output", str(tmp_path / "none.npz")], capsys)
    assert f"no image of {data} can be read" in said and not (tmp_path / "none.npz").exists()


def test_segmentation_features(tmp_path, capsys, monkeypatch):
    """On generated shapes, and on files: there half the mask does not count."""
    module, make = load("segmentation_features"), ViT.from_preset
    monkeypatch.setattr(ViT, "from_preset", lambda name: make(name, depth=2, embed_dim=48, num_heads=3, patch_size=8))
    small = "--size 64 --layers 2".split()
    assert module.main([*small, "--count", "60", "--steps", "80"]) > 0.6
    assert "12 images, 3 classes" in capsys.readouterr().out
    images, masks = module.shapes(10, 64)
    masks[:, :32] = 255
    for i, (image, mask) in enumerate(zip(images, masks)):
        for name, array in (("images", image.permute(1, 2, 0)), ("masks", mask.to(torch.uint8))):
            (tmp_path / name).mkdir(exist_ok=True)
            Image.fromarray(array.numpy()).save(tmp_path / name / f"{i}.png")
    again = module.read(str(tmp_path), 64)
    assert torch.equal(again[0], images) and torch.equal(again[1], masks)
    make("DINOv3-S/16", depth=2, embed_dim=64, num_heads=2, img_size=32).save_pretrained(tmp_path / "weights")
    flags = ["--data", str(tmp_path), "--weights", str(tmp_path / "weights"), *small, "--steps", "2"]
    (tmp_path / "images/.DS_Store").write_bytes(b"no image")
    assert 0 <= module.main(flags) <= 1 and "2 images, 3 classes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        ((9, 9, 9), "0.png has colours (RGB); a mask has one number for each pixel"),
        (255, "2 images with classes up to 0"),
    ],
    ids=["colours", "black and white"],
)
def test_segmentation_features_refuses_masks_that_are_no_numbers_of_classes(pixels, message, tmp_path, capsys):
    """Masks of 0 and 255 have one class, which any model would find in each pixel that counts."""
    flags = ["--data", str(tmp_path), "--size", "32"]
    (tmp_path / "images").mkdir()
    assert "images has no .jpg or .png" in refused("segmentation_features", flags, capsys)
    for name, fill in (("images", (1, 2, 3)), ("masks", pixels)):
        (tmp_path / name).mkdir(exist_ok=True)
        for i in range(2):
            Image.new("L" if fill == 255 else "RGB", (32, 32), fill).save(tmp_path / name / f"{i}.png")
    assert message in refused("segmentation_features", flags, capsys)
