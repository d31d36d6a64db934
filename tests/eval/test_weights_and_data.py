"""What weights say of themselves when they are evaluated: the names of their classes, how their images are cut."""

import json

import numpy as np
import pictures
import pytest
import torch
from checks import randomize
from frozen import run_cli
from PIL import Image

from vitfast import InputError, ViT
from vitfast.eval import accuracy
from vitfast.eval.fewshot import few_shot
from vitfast.train.recipes import resolve

CPU = torch.device("cpu")


@pytest.fixture
def weights(tmp_path):
    torch.manual_seed(0)
    model = randomize(ViT(img_size=16, patch_size=8, embed_dim=32, depth=1, num_heads=2, num_classes=3), std=0.5)
    model.save_pretrained(tmp_path / "w")
    return tmp_path / "w"


NAMES = {
    ("cat", "dog", "eel"): None,
    ("dog", "cat", "eel"): "class 0 is 'dog' in .*w and 'cat' in .*data, with the same names in another order",
    ("cat", "hound", "eel"): "class 1 is 'hound' in .*w and 'dog' in .*data: the accuracy is right only where",
    ("0", "1", "2"): None,
    None: None,
}


@pytest.mark.parametrize("names", NAMES, ids=str)
def test_class_names_of_weights_and_data(names, weights, tmp_path, monkeypatch, caplog):
    data = pictures.folder(tmp_path / "data", classes=("cat", "dog", "eel"), count=1)
    monkeypatch.setattr(ViT, "class_names", names, raising=False)
    config = resolve("eval", dict(weights=str(weights), data=str(data), device="cpu", workers=0))
    message = NAMES[names]
    if message and "another order" in message:
        with pytest.raises(InputError, match=message):
            accuracy.evaluate_weights(config)
        return
    with caplog.at_level("WARNING"):
        assert accuracy.evaluate_weights(config)["images"] == 3
    said = [r.getMessage() for r in caplog.records]
    assert not said if message is None else len(said) == 1
    if message:
        caplog.clear()
        import re

        assert re.search(message, said[0])
    monkeypatch.setattr(ViT, "class_names", ("x", "y", "z"), raising=False)
    caplog.clear()
    pictures.folder(tmp_path / "numbers", classes=("0", "1", "2"), count=1)
    accuracy.evaluate_weights(resolve("eval", dict(weights=str(weights), data=str(tmp_path / "numbers"), workers=0)))
    assert not caplog.records


def shown(data, weights, **settings) -> torch.Tensor:
    """What the model is shown of the first validation image."""
    config = resolve("eval", dict(weights=str(weights), data=str(data), device="cpu", workers=0, **settings))
    _, opened, *_ = accuracy.open_weights(config)
    return next(iter(opened.eval_batches()))[0][0]


@pytest.fixture
def wide(tmp_path):
    root = pictures.folder(tmp_path / "wide")
    for path in root.rglob("*.jpg"):
        pictures.smooth(int(path.stem), 40, 100).save(path, quality=95)
    return root


def resized(data, size: tuple[int, int]) -> Image.Image:
    with Image.open(data / "val" / "a" / "0.jpg") as image:
        return image.resize(size, Image.Resampling.BICUBIC)


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image)).permute(2, 0, 1)


def test_evaluations_cut_images_as_they_are_told(weights, wide):
    """By Pillow alone: resized, then cut at the centre."""
    centre = pixels(resized(wide, (40, 16)).crop((12, 0, 28, 16)))
    assert torch.equal(shown(wide, weights), centre)
    assert torch.equal(shown(wide, weights, crop_mode="squash"), pixels(resized(wide, (16, 16))))
    assert torch.equal(shown(wide, weights, crop_pct=0.8), pixels(resized(wide, (50, 20)).crop((17, 2, 33, 18))))
    config = json.loads((weights / "config.json").read_text())
    assert "crop_pct" not in config  # a model is no recipe


def test_evaluations_cut_images_as_timms_and_hugging_faces_weights_say(tmp_path, wide):
    import timm
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    squash, cut = pixels(resized(wide, (16, 16))), pixels(resized(wide, (50, 20)).crop((17, 2, 33, 18)))
    cfg = dict(input_size=(3, 16, 16), crop_pct=0.8, crop_mode="center", mean=(0.5,) * 3, std=(0.5,) * 3)
    args = dict(img_size=16, patch_size=8, embed_dim=192, depth=1, num_heads=3, num_classes=2)
    model = timm.create_model("vit_tiny_patch16_224", pretrained_cfg_overlay=cfg, **args)
    from timm.models import save_for_hf

    save_for_hf(model, tmp_path / "timm", model_config=dict(model_args=args), safe_serialization=True)
    assert torch.equal(shown(wide, tmp_path / "timm"), cut)
    assert torch.equal(
        shown(wide, tmp_path / "timm", crop_mode="squash", crop_pct=1), squash
    )  # the user's word is last

    shape = dict(hidden_size=192, num_hidden_layers=1, num_attention_heads=3, intermediate_size=768, patch_size=8)
    ViTForImageClassification(ViTConfig(image_size=16, num_labels=2, **shape)).save_pretrained(tmp_path / "hf")
    processor = ViTImageProcessor(size={"height": 16, "width": 16}, resample=3)
    processor.save_pretrained(tmp_path / "hf")
    found = shown(wide, tmp_path / "hf")
    with Image.open(wide / "val" / "a" / "0.jpg") as image:
        theirs = processor(image, return_tensors="pt", do_normalize=False, do_rescale=False)["pixel_values"][0]
    assert torch.equal(found, squash) and (found - theirs.float()).abs().max() <= 2


def test_eval_and_fewshot_cut_images_as_the_run_did(wide, tmp_path, capsys, caplog):
    """So `eval` gives the accuracy and loss that the run's own validation gave."""
    flags = ("--recipe", "finetune/vtab", "--data", wide, "--device", "cpu", "--model", "Nano/8", "--img-size", 16)
    settings = ("workers=0", "steps=2", "batch_size=4", "warmup_steps=0", "crop_pct=0.9")
    caplog.set_level("INFO")
    code, _, err = run_cli(capsys, "pretrain", *flags, "--output", tmp_path / "run", "--set", *settings)
    assert code == 0, err
    summary, last = (
        json.loads((tmp_path / "run" / "summary.json").read_text()),
        tmp_path / "run" / "checkpoints" / "last",
    )
    truth = resized(wide, (17, 17))  # 16 / 0.9, rounded down
    for source in (last, last.resolve(), last / "model.safetensors"):
        assert torch.equal(shown(wide, source), pixels(truth.crop((0, 0, 16, 16)))) or torch.equal(
            shown(wide, source), pixels(truth.crop((1, 1, 17, 17)))
        )
    code, out, _ = run_cli(
        capsys, "eval", "--weights", last, "--data", wide, "--device", "cpu", "--set", "workers=0", "--json"
    )
    assert code == 0 and "images are cut as the weights say: crop_mode=squash, crop_pct=0.9" in caplog.text
    assert json.loads(out)["loss"] == pytest.approx(summary["loss"], rel=1e-6)
    seen, cut = [], accuracy.open_data
    config = resolve("eval", dict(weights=str(last), data=str(wide), device="cpu", workers=0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accuracy, "open_data", lambda config, *rest: seen.append(config) or cut(config, *rest))
        few_shot(config, shots=[1], seeds=1)
    assert (seen[0].crop_mode, seen[0].crop_pct) == ("squash", 0.9)
