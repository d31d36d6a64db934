"""What weights say of themselves when they are evaluated: the names of their classes, how their images are cut."""

import json
import re

import numpy as np
import pictures
import pytest
import torch
from commands import run_cli, works
from frozen import evaluation, result, save_tiny, tiny
from PIL import Image
from runs import QUICK, digits

from vitfast import InputError, ViT
from vitfast.data.resize import INSTALLED
from vitfast.eval import accuracy
from vitfast.eval.fewshot import few_shot
from vitfast.model.convert import convert, write
from vitfast.train.trainer import train

CPU = torch.device("cpu")


def named(folder, names=None):
    """The folder of a small model whose classes have these names."""
    model = tiny(len(names or "abc"))
    model.class_names = names
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def weights(tmp_path):
    return named(tmp_path / "w")


BY_NUMBER = "have no name in common: classes go by their numbers"
NAMES = {  # the names of the weights: those of the data's classes 0, 1 and 2 there, or the warning, or the error
    ("cat", "dog", "eel"): (0, 1, 2),
    ("dog", "eel", "cat"): (2, 0, 1),
    ("cat", "dog", "fox", "eel"): (0, 1, 3),
    (
        "cat",
        "hound",
        "eel",
    ): ".*val .3 classes. and .*w .3 classes. must have the same; missing in the data: hound; only in the data: dog, ",
    ("x", "y", "z"): "missing in the data: x, y, z; only in the data: cat, dog, eel, first in cat/0.jpg",
    ("cat", "cat", "dog", "eel"): "two classes of the weights are named 'cat'",
    ("0", "1", "2"): BY_NUMBER,
    None: (0, 1, 2),
}


@pytest.mark.parametrize("names", NAMES, ids=str)
def test_classes_of_weights_and_data_are_compared_by_name(names, tmp_path, caplog):
    data = pictures.folder(tmp_path / "data", classes=("cat", "dog", "eel"), count=2)
    config, right = evaluation(named(tmp_path / "w", names), data), NAMES[names]
    if isinstance(right, str) and right != BY_NUMBER:
        with pytest.raises(InputError, match=right):
            accuracy.evaluate_weights(config)
        return
    with caplog.at_level("WARNING"):
        found = accuracy.evaluate_weights(config)
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == (right == BY_NUMBER) and all(re.search(BY_NUMBER, text) for text in said)
    places = (0, 1, 2) if right == BY_NUMBER else right
    model, opened = accuracy.open_weights(config, split="")
    images = torch.cat([images for images, _, _ in opened.in_order(opened.val)])
    with torch.no_grad():
        guesses = model(images).argmax(1)
    truth = torch.tensor(places).repeat_interleave(2)
    assert found["accuracy"] == pytest.approx((guesses == truth).double().mean().item())
    assert torch.equal(torch.cat([labels for _, labels, _ in opened.in_order(opened.val)]), truth)


def shown(data, weights, **settings) -> torch.Tensor:
    """What the model is shown of the first validation image."""
    config = evaluation(weights, data, **settings)
    _, opened = accuracy.open_weights(config)
    return next(iter(opened.in_order(opened.val)))[0][0]


@pytest.fixture
def wide(tmp_path):
    root = pictures.folder(tmp_path / "wide")
    for path in root.rglob("*.jpg"):
        pictures.smooth(int(path.stem), 40, 100).save(path, quality=95)
    return root


def resized(data, size: tuple[int, int], interpolation: str = "bicubic") -> Image.Image:
    with Image.open(data / "val" / "a" / "0.jpg") as image:
        return image.resize(size, Image.Resampling[interpolation.upper()])


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image)).permute(2, 0, 1)


def test_evaluations_cut_images_as_they_are_told(weights, wide):
    """By Pillow alone: resized, then cut at the centre."""
    centre = pixels(resized(wide, (40, 16)).crop((12, 0, 28, 16)))
    assert torch.equal(shown(wide, weights), centre)
    assert torch.equal(shown(wide, weights, crop_mode="squash"), pixels(resized(wide, (16, 16))))
    told = dict(crop_mode="squash", interpolation="lanczos")
    assert torch.equal(shown(wide, weights, **told), pixels(resized(wide, (16, 16), "lanczos")))
    assert torch.equal(shown(wide, weights, crop_pct=0.8), pixels(resized(wide, (50, 20)).crop((17, 2, 33, 18))))
    config = json.loads((weights / "config.json").read_text())
    assert config["crop_mode"] is None and config["crop_pct"] is None  # of no training


@pytest.fixture(
    params=[
        ("center", 0.8, "bilinear"),
        ("squash", 1.0, "bicubic"),
        ("squash", 0.8, "lanczos"),
        ("center", 1.0, "bicubic"),
    ],
    ids=["cut", "squash", "squash-cut", "center"],
)
def cut_weights(request, tmp_path):
    """A checkpoint that says how evaluations cut images, without any state of a run."""
    model = tiny(2)
    model.crop_mode, model.crop_pct, model.interpolation = request.param
    model.save_pretrained(tmp_path / "cut")
    return tmp_path / "cut"


@pytest.mark.quick(1)
def test_the_cut_of_images_goes_into_every_format_and_comes_back(weights, cut_weights, wide, tmp_path):
    """transformers, which reads what was written, sees the same pixels; test_embedder.py asks timm."""
    from transformers import AutoImageProcessor

    ours, told = shown(wide, cut_weights), json.loads((cut_weights / "config.json").read_text())
    mode, share, kind = (told[name] for name in ("crop_mode", "crop_pct", "interpolation"))
    assert torch.equal(ours, shown(wide, weights, crop_mode=mode, crop_pct=share, interpolation=kind))
    told = shown(wide, cut_weights, crop_mode="squash", crop_pct=1, interpolation="bicubic")  # the user's word is last
    assert torch.equal(told, pixels(resized(wide, (16, 16))))
    assert convert(cut_weights, tmp_path / "timm", "timm") == []
    convert(cut_weights, tmp_path / "hf", "huggingface")
    assert torch.equal(shown(wide, tmp_path / "timm"), ours) and torch.equal(shown(wide, tmp_path / "hf"), ours)
    with Image.open(wide / "val" / "a" / "0.jpg") as image:
        options = dict(return_tensors="pt", do_normalize=False, do_rescale=False)
        theirs = AutoImageProcessor.from_pretrained(tmp_path / "hf")(image, **options)["pixel_values"][0]
    assert theirs.shape == ours.shape and (ours - theirs.float()).abs().max() <= 2  # another bicubic
    for form, name in (("npz", "w.npz"), ("torchvision", "w.pth"), ("timm", "w.safetensors")):
        notes = [note for note in convert(cut_weights, tmp_path / name, form) if "cut" in note]
        assert len(notes) == ((mode, share, kind) != ("center", 1.0, "bicubic"))  # that it is where nothing is said
        assert all(f"crop_mode={mode!r}, crop_pct={share!r}" in note for note in notes)
    assert convert(tmp_path / "timm", tmp_path / "again", "vitfast") == []
    assert ViT.from_pretrained(tmp_path / "again").config == ViT.from_pretrained(cut_weights).config


def test_what_a_format_cannot_say_of_the_cut_is_told(tmp_path):
    model = tiny(2, img_size=(16, 24))
    for form, name, mode, share in (("huggingface", "hf", "border", 0.9), ("npz", "w.npz", None, 0.5)):
        model.crop_mode, model.crop_pct = mode, share
        (note,) = [note for note in write(model, tmp_path / name, form) if "cut" in note]
        assert f"crop_mode={mode or 'center'!r}, crop_pct={share}" in note
        assert write(model, tmp_path / f"timm of {form}", "timm") == []


@pytest.mark.parametrize("cut_weights", [("squash", 0.8, "bicubic")], indirect=True)
def test_fine_tuning_cuts_as_its_weights_do_unless_told(cut_weights, wide, tmp_path, capsys):
    flags = ("--weights", cut_weights, "--data", wide, "--device", "cpu", "--img-size", 16)
    quick = ("--set", "workers=0", "steps=1", "batch_size=4", "warmup_steps=0")
    for name, settings, wanted in (
        ("as-weights", ("crop_mode=", "crop_pct=none"), ["squash", 0.8]),
        ("told", ("crop_mode=squash", "crop_pct=0.5"), ["squash", 0.5]),
    ):
        run = tmp_path / name
        works(capsys, "finetune", *flags, "--output", run, *quick, *settings)
        config = json.loads((run / "checkpoints" / "last" / "config.json").read_text())
        assert [config["crop_mode"], config["crop_pct"]] == wanted


def test_eval_and_fewshot_cut_images_as_the_run_did(wide, tmp_path, capsys, caplog):
    """So `eval` gives the accuracy and loss that the run's own validation gave."""
    flags = ("--recipe", "finetune/vtab", "--data", wide, "--device", "cpu", "--model", "Nano/8", "--img-size", 16)
    settings = ("workers=0", "steps=2", "batch_size=4", "warmup_steps=0", "crop_pct=0.9")
    caplog.set_level("INFO")
    works(capsys, "pretrain", *flags, "--output", tmp_path / "run", "--set", *settings)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    last = tmp_path / "run" / "checkpoints" / "last"
    truth = resized(wide, (17, 17))  # 16 / 0.9, rounded down
    near = [pixels(truth.crop((i, i, 16 + i, 16 + i))) for i in (0, 1)]
    for source in (last, last.resolve(), last / "model.safetensors"):
        assert any(torch.equal(shown(wide, source), image) for image in near)
    assert result(capsys, "eval", last, wide)["loss"] == pytest.approx(summary["loss"], rel=1e-6)
    assert "images are cut as the weights say: crop_mode=squash, crop_pct=0.9" in caplog.text
    seen, cut = [], accuracy.open_data
    config = evaluation(last, wide)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accuracy, "open_data", lambda config, *a, **k: seen.append(config) or cut(config, *a, **k))
        few_shot(config, shots=[1], seeds=1)
    assert (seen[0].crop_mode, seen[0].crop_pct) == ("squash", 0.9)


HUGGING_FACE = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, patch_size=8)
HUGGING_FACE |= dict(image_size=16, num_labels=2)
PROCESSORS = {
    "a list": dict(image_processor_type="ViTImageProcessor", size=[16, 16], do_resize=True),
    "an edge": dict(image_processor_type="BitImageProcessor", size={"shortest_edge": 18}, do_resize=True),
    "a number": dict(image_processor_type="BitImageProcessor", size=18, do_resize=True, do_center_crop=True),
    "sides": dict(image_processor_type="ViTImageProcessor", size={"height": 16, "width": 16}),
    "not cut": dict(image_processor_type="DeiTImageProcessor", size={"height": 20, "width": 20}),
}


@pytest.mark.parametrize("kind", PROCESSORS)
def test_processors_mean_what_transformers_takes_them_for(tmp_path, wide, kind):
    from transformers import AutoImageProcessor, ViTConfig, ViTForImageClassification

    ViTForImageClassification(ViTConfig(**HUGGING_FACE)).save_pretrained(tmp_path)
    content = PROCESSORS[kind] | dict(crop_size={"height": 16, "width": 16}, resample=3)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    with Image.open(wide / "val" / "a" / "0.jpg") as image:
        theirs = processor(image, return_tensors="pt", do_normalize=False, do_rescale=False)["pixel_values"][0]
    assert (shown(wide, tmp_path) - theirs.float()).abs().max() <= 2


@pytest.mark.parametrize("size", [{"shortest_edge": 18.5}, -3, [16], {"longest_edge": 5}])
def test_processors_that_say_something_odd_are_a_note(tmp_path, wide, size, caplog):
    from transformers import ViTConfig, ViTModel

    ViTModel(ViTConfig(**HUGGING_FACE)).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(dict(size=size, do_resize=True)))
    assert ViT.from_pretrained(tmp_path).crop_mode is None
    assert "how images are resized and cut is not taken over" in caplog.text


@pytest.mark.slow
def test_the_order_of_another_pillow_is_said_once(tmp_path, capsys, caplog, monkeypatch):
    """A run writes the order in which its images were resized; who evaluates with the other is told."""
    train(digits(tmp_path / "run", steps=1, **QUICK))
    picture = tmp_path / "a.png"
    pictures.smooth(1, 20, 20).save(picture)
    weights, on_cpu = ("--weights", tmp_path / "run"), ("--device", "cpu", "--set", "workers=0")
    commands = [("eval", *weights, "--data", "digits", *on_cpu), ("predict", picture, *weights, *on_cpu)]
    for other, remedy in (("12", "pillow>=13"), ("13", "pillow<13")):
        monkeypatch.setattr(accuracy, "INSTALLED", other)
        for command in commands:
            caplog.clear()
            assert run_cli(capsys, *command)[0] == 0
            said = [record.getMessage() for record in caplog.records if "Pillow" in record.getMessage()]
            assert len(said) == (other != INSTALLED)
            assert all(f"resized images as Pillow {INSTALLED} does" in text and remedy in text for text in said)


@pytest.mark.slow
def test_the_size_of_an_evaluation_is_set_in_either_way(tmp_path, capsys):
    weights, command = save_tiny(tmp_path / "w"), ("eval", "--data", "digits", "--device", "cpu", "--json")

    def loss(*size) -> float:
        code, printed = run_cli(capsys, *command, "--weights", weights, *size)[:2]
        assert code == 0
        return json.loads(printed)["loss"]

    own, larger = loss(), loss("--img-size", 32)
    assert larger != own and loss("--set", "img_size=32") == larger  # tiny ViTs take 16 pixels
    assert loss("--set", "img_size=0") == loss("--img-size", 32, "--set", "img_size=0") == own
