"""The names of the classes: in our config.json, Hugging Face's id2label and timm's label_names, read and written."""

import json

import pytest
import timm
import transformers
from checkpoints import CLASSES, HF, SMALL, agree, randomised, small
from timm.models._hub import load_model_config_from_path, save_for_hf

from vitfast import ViT
from vitfast.model.convert import write

NAMES = ("cat", "dog", "crane", "crane", "Ara ararauna")


def test_ours_keeps_them(tmp_path):
    """While the head stays."""
    assert ViT(**SMALL).class_names is None and "class_names" not in ViT(**SMALL).config
    model = small()
    model.class_names = [*NAMES]
    assert model.class_names == model.config["class_names"] == ViT(**model.config).class_names == NAMES
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["class_names"] == [*NAMES]
    for changes, names in (
        ({}, NAMES),
        (dict(num_classes=CLASSES), NAMES),
        (dict(num_classes=0), None),
        (dict(num_classes=2), None),
        (dict(num_classes=2, class_names=["a", "b"]), ("a", "b")),
        (dict(class_names=None), None),
    ):
        assert ViT.from_pretrained(tmp_path, **changes).class_names == names
    model.reset_classifier(CLASSES)
    assert model.class_names is None and "class_names" not in model.config


@pytest.mark.parametrize("given", [True, False])
def test_hugging_face(tmp_path, given):
    """What transformers writes is read, its made-up LABEL_0 not; and the other way round."""
    labels = dict(id2label=dict(enumerate(NAMES)), label2id={name: i for i, name in enumerate(NAMES)}) if given else {}
    sizes = {k: v for k, v in HF.items() if k != "num_labels"}
    config = transformers.ViTConfig(**sizes, **(labels or {"num_labels": CLASSES}))
    truth = randomised(transformers.ViTForImageClassification(config))
    truth.save_pretrained(tmp_path / "theirs")
    model = ViT.from_pretrained(tmp_path / "theirs")
    agree(model, truth)
    assert model.class_names == (NAMES if given else None)
    write(model, tmp_path / "ours", "huggingface")
    again = transformers.ViTForImageClassification.from_pretrained(tmp_path / "ours").config
    assert again.id2label == truth.config.id2label and again.label2id == truth.config.label2id


LABELS = {
    "list": ([*NAMES], NAMES),
    "dict": ({str(i): name for i, name in enumerate(NAMES)}, NAMES),
    "none": (None, None),
    "names that do not fit": ({"0": "cat", "7": "dog"}, None),
}


@pytest.mark.parametrize("kind", LABELS)
def test_timm(tmp_path, kind, caplog):
    """As timm's save_for_hf writes them, beside its pretrained_cfg or in it, and as it reads them."""
    truth, (labels, names) = randomised(timm.create_model("vit_base_patch16_224", **SMALL)), LABELS[kind]
    save_for_hf(truth, tmp_path, safe_serialization=True, model_config={"label_names": labels} if labels else None)
    model = ViT.from_pretrained(tmp_path)
    agree(model, truth)
    assert model.class_names == names
    said = "label_names is not taken over: it has 2 names, not one for each of 5 classes"
    assert (f"{tmp_path}: {said}" in caplog.messages) == ("fit" in kind)
    content = json.loads((tmp_path / "config.json").read_text())
    content["pretrained_cfg"]["label_names"] = content.pop("label_names", None)
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert ViT.from_pretrained(tmp_path).class_names == model.class_names
    write(model, tmp_path / "ours", "timm")
    assert load_model_config_from_path(tmp_path / "ours")[0].get("label_names") == (names and [*names])
    again = timm.create_model(f"local-dir:{tmp_path / 'ours'}", pretrained=True)
    assert again.pretrained_cfg.get("label_names") == (names and [*names])


def test_names_that_a_format_cannot_hold_are_said(tmp_path):
    """Those of Hugging Face are made up where they are LABEL_i; timm's are taken literally."""
    model = small(class_names=NAMES, act_layer="gelu_tanh")
    for path, form in (("w.npz", "npz"), ("w.pth", "torchvision"), ("w.safetensors", "timm")):
        notes = write(model, tmp_path / path, form)
        assert f"{form} does not keep the names of the classes, such as 'cat'" in notes
    labels = [f"LABEL_{i}" for i in range(CLASSES)]
    model.class_names = labels
    assert write(model, tmp_path / "timm", "timm") == []
    assert ViT.from_pretrained(tmp_path / "timm").class_names == tuple(labels)
    truth = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True)
    assert truth.pretrained_cfg["label_names"] == labels
    said = "huggingface does not keep the names of the classes, such as 'LABEL_0'"
    assert write(model, tmp_path / "hf", "huggingface") == [said]
