"""Weights written in other formats: other libraries load them whole and compute the same; the names of classes."""

import json
import resource
import sys

import numpy as np
import pytest
import timm
import torch
import transformers
from checkpoints import CLASSES, HEADS, HF, SMALL, D, agree, google, images, randomised, same, small
from commands import refuses, works
from timm.models import vision_transformer as timm_vit
from timm.models._hub import load_model_config_from_path, save_for_hf

from vitfast import InputError, ViT, cli, load_checkpoint
from vitfast.model.checkpoint import files
from vitfast.model.checkpoint import google as google_files
from vitfast.model.checkpoint.writers import save
from vitfast.model.convert import FORMATS, write

TARGETS = {"vitfast": "out", "timm": "out", "huggingface": "out", "npz": "out.npz", "torchvision": "out.pth"}
DINOV3 = dict(rope="dinov3", pos_embed="none", reg_tokens=2, init_values=0.1, norm_eps=1e-5, num_classes=0)
CLIP = dict(pre_norm=True, act_layer="quick_gelu", norm_eps=1e-5)
SIGLIP = dict(class_token=False, global_pool="map", act_layer="gelu_tanh", num_classes=0)


# ---- the other libraries load it


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(reg_tokens=3, no_embed_class=True, init_values=0.1, act_layer="gelu_tanh", mean=0.1, img_size=(32, 16)),
        dict(class_token=False, global_pool="avg", qkv_bias=False, proj_bias=False, pos_embed="sincos2d", in_chans=2),
        dict(global_pool="avg", num_classes=0, fc_norm=False, pos_embed="none", dynamic_img_size=True),
        CLIP,
        SIGLIP,
        dict(global_pool="map", reg_tokens=2, qk_norm=True, norm_layer="rmsnorm", scale_mlp_norm=True),
        dict(swiglu_mlp=True, init_values=0.1, norm_layer="rmsnorm", mlp_ratio=2.51, scale_mlp_norm=True),
        dict(swiglu_mlp=True, mlp_ratio=8 / 3, pre_norm=True, patch_size=(8, 4)),
        dict(act_layer="silu", norm_eps=1e-5, qkv_bias=False),
    ],
    ids=str,
)
def test_timm_loads_the_folder(tmp_path, changes):
    model, folder = small(**changes), tmp_path / "vit-1.5"
    assert write(model, folder, "timm") == []
    truth, x = timm.create_model(f"local-dir:{folder}", pretrained=True).eval(), images(*model.patch_embed.img_size)
    x = torch.randn(2, model.in_chans, *x.shape[2:])
    assert type(truth) is timm_vit.VisionTransformer and same(truth.state_dict(), model.state_dict())
    agree(model, truth, x)
    agree(ViT.from_pretrained(folder), model, x)
    assert truth.pretrained_cfg["mean"] == list(model.mean)


# ---- round trips on the command line


@pytest.mark.slow
def test_every_format_in_a_row_returns_the_first_bits(tmp_path, capsys):
    """Google's file through all formats and back.

    Then the hidden layer of the head through the formats that have one.
    """
    np.savez(tmp_path / "0.npz", **google())
    hidden = {"pre_logits/kernel": np.random.rand(D, 40).astype("f4"), "pre_logits/bias": np.ones(40, "f4")}
    hidden["head/kernel"] = np.random.rand(40, CLASSES).astype("f4")
    np.savez(tmp_path / "h.npz", **google() | hidden)
    for chain, forms in (
        ("0.npz 1 2 3.safetensors 4 5.safetensors 6.npz", "huggingface timm timm vitfast torchvision npz"),
        ("h.npz h h.pth i.npz", "vitfast torchvision npz"),
    ):
        paths = [tmp_path / name for name in chain.split()]
        for source, target, form in zip(paths, paths[1:], forms.split(), strict=False):
            out = works(capsys, "convert", source, target, "--format", form, "--num-heads", HEADS)
            assert f"wrote {target}" in out
        first, last = (dict(np.load(paths[i])) for i in (0, -1))
        assert first.keys() == last.keys() and all(np.array_equal(last[k], v) for k, v in first.items())
        assert "note: npz does not say mean" in out  # torchvision's own, by now


def test_sizes_and_classes_change_and_the_dtype_stays(tmp_path, capsys):
    model = small()
    save(model, tmp_path / "in")
    command = f"convert {tmp_path}/in {tmp_path}/out --format huggingface --img-size 64 32 --num-classes 9"
    works(capsys, *command.split())
    truth = transformers.ViTForImageClassification.from_pretrained(tmp_path / "out").eval()
    assert truth.config.num_labels == 9
    agree(ViT.from_pretrained(tmp_path / "in", img_size=(64, 32), num_classes=9), truth, images(64, 32))
    save(model.bfloat16(), tmp_path / "in")
    for form, target, dtype in (("timm", "1", None), ("huggingface", "2", None), ("npz", "w.npz", torch.float32)):
        works(capsys, "convert", tmp_path / "in", tmp_path / target, "--format", form)
        assert same(load_checkpoint(tmp_path / target), {k: v.to(dtype) for k, v in model.state_dict().items()})


# ---- what a format cannot say or hold


# What of a model its readers take for something else; a model that diverged is written too.
SAID = [
    ("torchvision", {}, "mean=(0.5, 0.5, 0.5): its readers take (0.485, 0.456, 0.406)"),
    ("npz", {}, "npz does not say act_layer='gelu': its readers take 'gelu_tanh'"),
    ("timm", dict(norm_eps=1e-12), "timm does not say norm_eps=1e-12: its readers take 1e-06"),
]


@pytest.mark.parametrize("form, changes, says", SAID, ids=[form for form, *_ in SAID])
def test_what_readers_take_for_something_else_is_said(tmp_path, form, changes, says):
    model = small(**changes)
    model.head.bias.data.fill_(float("nan"))
    assert says in "\n".join(write(model, tmp_path / TARGETS[form], form))


# What of each model the formats lack.
THREE, TWO = {"huggingface", "npz", "torchvision"}, {"huggingface", "torchvision"}
LACKS = {
    "register tokens": (dict(reg_tokens=1), THREE),
    "LayerScale": (dict(init_values=0.1), THREE),
    "a model without positions": (dict(pos_embed="none"), THREE),
    "a norm after pooling": (dict(fc_norm=True), THREE),
    "qkv without bias": (dict(qkv_bias=False), {"npz", "torchvision"}),
    "proj_bias": (dict(proj_bias=False), THREE),
    "a model without class token": (dict(class_token=False, global_pool="avg", fc_norm=False), TWO),
    "patches alone": (dict(no_embed_class=True), TWO),
    "another pooling": (dict(global_pool="avg", fc_norm=False), TWO),
    "pre_logits": (dict(representation_size=7), {"huggingface", "timm"}),
    "without head": (dict(num_classes=0), {"torchvision"}),
    "no squares": (dict(img_size=(32, 16)), {"torchvision"}),
    "3 channels": (dict(in_chans=1), {"torchvision"}),
    "rotary positions": (dict(rope="cat"), {"timm", *THREE}),
    "swiglu_mlp": (dict(swiglu_mlp=True), THREE),
    "a gated MLP and a MAP head": (dict(swiglu_mlp=True, global_pool="map"), {"timm"}),
    "qk_norm": (dict(qk_norm=True), THREE),
    "scale_mlp_norm": (dict(scale_mlp_norm=True), THREE),
    "norm_layer": (dict(norm_layer="rmsnorm"), THREE),
    "pre_norm": (dict(pre_norm=True), {"npz", "torchvision"}),
    "act_layer": (dict(act_layer="quick_gelu"), {"npz", "torchvision"}),
    "global_pool": (dict(global_pool="map"), {"npz"}),
    "a head": ({**DINOV3, "num_classes": 5}, {"huggingface"}),
    "prefix tokens": ({**SIGLIP, "reg_tokens": 2}, {"huggingface"}),
    "without LayerScale": ({**DINOV3, "init_values": None}, {"huggingface"}),
    "CLIP's projection has no bias, this head has one; --num-classes 0 leaves": (CLIP, {"huggingface"}),
    "beside rotary positions": ({**DINOV3, "pos_embed": "learn"}, {"huggingface"}),
    "the ResNet of a hybrid": (dict(backbone=dict(layers=(1, 2), width=0.5)), {"timm", *THREE}),
    "images or patches that are no": ({**CLIP, "num_classes": 0, "img_size": (32, 16)}, TWO),
}


@pytest.mark.quick(8)
@pytest.mark.parametrize("what", LACKS)
def test_what_a_format_cannot_hold_is_refused_by_name(tmp_path, what):
    """Another library would read another function; all formats that do not refuse it return its bits."""
    changes, lacking = LACKS[what]
    model = small(**changes)
    for form in FORMATS:
        path = tmp_path / form / TARGETS[form]
        try:
            write(model, path, form)
        except InputError as error:
            said = str(error)
            assert (what in said) == (form in lacking), (form, said)
            assert f"the format {form} has no place for" in said or "CLIP's projection" in said
            assert not path.exists()
        else:
            assert form not in lacking, form


HIDDEN = dict(representation_size=7)
HEADS_LEFT_OUT = [("timm", 0, HIDDEN), ("timm", CLASSES, HIDDEN), ("huggingface", CLASSES, HIDDEN)]
HEADS_LEFT_OUT += [("torchvision", 0, {}), ("huggingface", CLASSES, DINOV3)]


@pytest.mark.parametrize("form, classes, changes", HEADS_LEFT_OUT, ids=str)
def test_a_head_without_a_place_can_be_replaced(tmp_path, capsys, form, classes, changes):
    """What the error says works, word for word; with 0 classes a hidden layer would be the head that is left."""
    save(small(**{**changes, "num_classes": classes}), tmp_path / "in")
    command = ["convert", tmp_path / "in", tmp_path / TARGETS[form], "--format", form]
    said = refuses(capsys, f"the format {form} has no place for", *command)
    assert ("--num-classes 0 leaves the head out" in said) == (classes > 0)
    if changes is not DINOV3:
        assert f"--num-classes N (any but {classes}) puts a new one in its place" in said
        works(capsys, *command, "--num-classes", 9)
        assert load_checkpoint(tmp_path / TARGETS[form])["head.weight"].shape == (9, D)
    if classes:
        works(capsys, *command, "--num-classes", 0, "--force")
        assert "head.weight" not in load_checkpoint(tmp_path / TARGETS[form])


# ---- files


@pytest.mark.parametrize("form", FORMATS)
def test_nothing_is_replaced_without_force(tmp_path, capsys, form):
    old, new = small(), small()
    save(new, tmp_path / "new")
    write(old, tmp_path / TARGETS[form], form)
    args = ("convert", tmp_path / "new", tmp_path / TARGETS[form], "--format", form)
    refuses(capsys, f"{tmp_path / TARGETS[form]}: is there already; add --force", *args)
    assert same(load_checkpoint(tmp_path / TARGETS[form]), old.state_dict())
    works(capsys, *args, "--force")
    assert same(load_checkpoint(tmp_path / TARGETS[form]), new.state_dict())
    assert {p.name for p in tmp_path.iterdir()} == {"new", TARGETS[form]}


def test_a_wrong_writer_is_found_out(tmp_path, monkeypatch):
    """Keys and values exchanged: the file would load, and compute something else.

    Nothing of it stays, and what was there does.
    """
    swapped = {"key": "value", "value": "key"}
    names = ((old, new) for old, new in google_files.WRITTEN)
    names = tuple((old, "/".join(swapped.get(part, part) for part in new.split("/"))) for old, new in names)
    monkeypatch.setattr(google_files, "WRITTEN", names)
    (tmp_path / "w.npz").write_text("old")
    with pytest.raises(RuntimeError, match="npz: what was written does not read back the same .blocks.0.attn.qkv.bias"):
        write(small(), tmp_path / "w.npz", "npz", force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["w.npz"] and (tmp_path / "w.npz").read_text() == "old"


def test_an_error_of_another_file_is_none_of_the_target(tmp_path):
    with pytest.raises(OSError, match="w could not be written: no compiler"), files.staged(tmp_path / "w"):
        raise FileNotFoundError(2, "no compiler", "g++")


@pytest.mark.parametrize(
    "form, name", [("timm", "w.pth"), ("timm", "w.safetensors"), ("huggingface", "w"), ("npz", "w.npz")]
)
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, capfd, monkeypatch, form, name):
    """No file may grow past 40 KB here; 300 KB are wanted."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python would leave half of what it compiles
    ViT(**{**SMALL, "embed_dim": 66}).save_pretrained(tmp_path / "from")
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        code = cli.main(["convert", str(tmp_path / "from"), str(tmp_path / name), "--format", form])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    (line,) = capfd.readouterr().err.splitlines()
    assert code == 1 and line.startswith(f"vitfast: error: {tmp_path / name} could not be written: ")
    assert "too large" in line or "is the disk full?" in line
    assert [path.name for path in tmp_path.iterdir()] == ["from"]


# ---- names of classes: in our config.json, Hugging Face's id2label and timm's label_names, read and written


NAMES = ("cat", "dog", "crane", "crane", "Ara ararauna")


def test_ours_keeps_them(tmp_path):
    """While the head stays."""
    assert ViT(**SMALL).class_names is None and "class_names" not in ViT(**SMALL).config
    model = small()
    model.class_names = [*NAMES]
    assert model.class_names == model.config["class_names"] == ViT(**model.config).class_names == NAMES
    model.save_pretrained(tmp_path)
    x = images()
    assert json.loads((tmp_path / "config.json").read_text())["class_names"] == [*NAMES]
    for changes, names in (
        ({}, NAMES),
        (dict(num_classes=CLASSES), NAMES),
        (dict(num_classes=0), None),
        (dict(num_classes=2), None),
        (dict(num_classes=2, class_names=["a", "b"]), ("a", "b")),
        (dict(class_names=None), None),
    ):
        found = ViT.from_pretrained(tmp_path, drop_path_rate=0.2, **changes).eval()
        assert found.class_names == names and found.blocks[-1].drop_path_rate == 0.2
        assert torch.equal(found.forward_features(x), model.forward_features(x))  # the head alone is another
        assert found.num_classes != 2 or not found.head.weight.any()
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
