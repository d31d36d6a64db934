"""Weights written in other libraries' formats: those libraries load them whole and compute the same.

Round trips are bit-exact.
"""

import json
import resource

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import torchvision
import transformers
from checkpoints import CLASSES, DEPTH, HEADS, HF, SIZE, SMALL, TOL, D, F, P, agree, google, images, logits, randomised
from timm.models import vision_transformer as timm_vit

from vitfast import InputError, ViT, cli, load_checkpoint
from vitfast.checkpoint import save, writers
from vitfast.convert import FORMATS, write

TARGETS = {"vitfast": "out", "timm": "out", "huggingface": "out", "npz": "out.npz", "torchvision": "out.pth"}


def small(**changes):
    return randomised(ViT(**{**SMALL, **changes}))


def same(state, truth):
    return state.keys() == truth.keys() and all(torch.equal(state[k], v) for k, v in truth.items())


def run(capsys, *args):
    code = cli.main([str(a) for a in args])
    return code, *capsys.readouterr()


# ---- the other libraries load it


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(reg_tokens=3, no_embed_class=True, init_values=0.1, act_layer="gelu_tanh", mean=0.1, img_size=(32, 16)),
        dict(class_token=False, global_pool="avg", qkv_bias=False, proj_bias=False, pos_embed="sincos2d", in_chans=2),
        dict(
            global_pool="avg", num_classes=0, fc_norm=False, pos_embed="none", dynamic_img_size=True, patch_size=(8, 4)
        ),
    ],
    ids=["plain", "registers", "average", "features"],
)
def test_timm_loads_the_folder(tmp_path, changes):
    model, folder = small(**changes), tmp_path / "vit-1.5"
    assert write(model, folder, "timm") == []
    truth = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert same(truth.state_dict(), model.state_dict())
    agree(model, truth.eval(), images(*model.patch_embed.img_size, chans=model.in_chans))
    assert truth.pretrained_cfg["mean"] == list(model.mean)


def test_timm_loads_the_file(tmp_path):
    model = small()
    for suffix in (".safetensors", ".pth"):
        notes = write(model, tmp_path / f"w{suffix}", "timm")
        assert len(notes) == 1 and "pass num_heads=" in notes[0]
        truth = timm_vit.VisionTransformer(**SMALL)
        timm.models.load_checkpoint(truth, tmp_path / f"w{suffix}")
        assert same(truth.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(img_size=(32, 16), act_layer="gelu_tanh", norm_eps=0.1, qkv_bias=False, mean=(0.1, 0.2, 0.3), std=0.3),
    ],
    ids=["plain", "told"],
)
def test_hugging_face_loads_the_folder(tmp_path, changes):
    model = small(**changes)
    notes = write(model, tmp_path / "out", "huggingface")
    assert all("how images are cut (crop_mode='center', crop_pct=1.0)" in note for note in notes)
    assert len(notes) == bool(changes)  # it squashes to what is no square
    truth, info = transformers.ViTForImageClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    agree(model, truth.eval(), images(*model.patch_embed.img_size))
    truth.save_pretrained(tmp_path / "theirs")
    ours, theirs = (safetensors.torch.load_file(tmp_path / name / "model.safetensors") for name in ("out", "theirs"))
    assert same(ours, theirs)
    pixels = torch.randint(0, 256, (1, 3, *model.patch_embed.img_size), dtype=torch.uint8)
    prepared = transformers.ViTImageProcessor.from_pretrained(tmp_path / "out")(pixels[0], return_tensors="pt")[
        "pixel_values"
    ]
    torch.testing.assert_close(logits(model, pixels), logits(truth, prepared), **TOL)


def test_hugging_face_loads_a_model_without_head(tmp_path):
    model = small(num_classes=0)
    write(model, tmp_path / "out", "huggingface")
    truth, info = transformers.ViTModel.from_pretrained(
        tmp_path / "out", add_pooling_layer=False, output_loading_info=True
    )
    assert not any(info.values()), info
    x = images()
    torch.testing.assert_close(model.forward_features(x), truth.eval()(x).last_hidden_state, **TOL)


@pytest.mark.parametrize("big_vision", [False, True])
def test_timm_loads_the_npz(tmp_path, big_vision):
    model = small(no_embed_class=big_vision, act_layer="gelu_tanh")
    assert write(model, tmp_path / "w.npz", "npz") == []
    truth = timm_vit.VisionTransformer(**SMALL, no_embed_class=big_vision, act_layer="gelu_tanh").eval()
    truth.load_pretrained(str(tmp_path / "w.npz"))
    assert same(truth.state_dict(), model.state_dict())
    agree(model, truth)
    written = np.load(tmp_path / "w.npz")
    assert {k: v.shape for k, v in written.items()} == {k: v.shape for k, v in google(big_vision).items()}


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_torchvision_loads_the_state_dict(tmp_path, suffix):
    model, path = small(representation_size=40), tmp_path / f"w{suffix}"
    diverged = ViT(**SMALL)
    diverged.head.bias.data.fill_(float("nan"))
    write(diverged, path, "torchvision")  # it can be written too
    notes = write(model, path, "torchvision", force=True)
    assert any("mean=(0.5, 0.5, 0.5): its readers take (0.485, 0.456, 0.406)" in note for note in notes)
    state = torch.load(path, weights_only=True) if suffix == ".pth" else safetensors.torch.load_file(path)
    sizes = dict(
        image_size=SIZE, patch_size=P, num_layers=DEPTH, num_heads=HEADS, hidden_dim=D, mlp_dim=F, num_classes=CLASSES
    )
    truth = torchvision.models.VisionTransformer(**sizes, representation_size=40)
    truth.load_state_dict(state, strict=True)
    agree(model, truth.eval())


# ---- round trips


def test_every_format_in_a_row_returns_the_first_bits(tmp_path, capsys):
    """Google's file through all formats and back, on the command line.

    Then the hidden layer of the head through the formats that have one.
    """
    np.savez(tmp_path / "0.npz", **google())
    chain = ["0.npz", "1", "2", "3.safetensors", "4", "5.safetensors", "6.npz"]
    for source, target, form in zip(chain, chain[1:], ("huggingface", "timm", "timm", "vitfast", "torchvision", "npz")):
        code, out, err = run(
            capsys, "convert", tmp_path / source, tmp_path / target, "--format", form, "--num-heads", HEADS
        )
        assert code == 0 and f"wrote {tmp_path / target}" in out, err
    first, last = (dict(np.load(tmp_path / name)) for name in ("0.npz", "6.npz"))
    assert first.keys() == last.keys() and all(np.array_equal(last[k], v) for k, v in first.items())
    assert "note: npz does not say mean" in out  # torchvision's own, by now
    hidden = {
        "pre_logits/kernel": np.random.rand(D, 40).astype("f4"),
        "pre_logits/bias": np.ones(40, "f4"),
        "head/kernel": np.random.rand(40, CLASSES).astype("f4"),
    }
    np.savez(tmp_path / "h.npz", **google() | hidden)
    for source, target, form in (("h.npz", "h", "vitfast"), ("h", "h.pth", "torchvision"), ("h.pth", "i.npz", "npz")):
        assert (
            run(capsys, "convert", tmp_path / source, tmp_path / target, "--format", form, "--num-heads", HEADS)[0] == 0
        )
    assert all(np.array_equal(np.load(tmp_path / "i.npz")[k], v) for k, v in hidden.items())


def test_the_dtype_of_the_file_stays(tmp_path, capsys):
    model = small().bfloat16()
    save(model, tmp_path / "in")
    for form in ("timm", "huggingface"):
        assert run(capsys, "convert", tmp_path / "in", tmp_path / form, "--format", form)[0] == 0
        assert same(load_checkpoint(tmp_path / form), model.state_dict())
    assert (
        run(capsys, "convert", tmp_path / "in", tmp_path / "w.npz", "--format", "npz")[0] == 0
    )  # NumPy has no bfloat16
    assert same(load_checkpoint(tmp_path / "w.npz"), {k: v.float() for k, v in model.state_dict().items()})


def test_convert_changes_size_and_classes(tmp_path, capsys):
    save(small(), tmp_path / "in")
    code, *_ = run(
        capsys,
        "convert",
        tmp_path / "in",
        tmp_path / "out",
        "--format",
        "huggingface",
        "--img-size",
        64,
        32,
        "--num-classes",
        9,
    )
    truth = transformers.ViTForImageClassification.from_pretrained(tmp_path / "out").eval()
    assert code == 0 and truth.config.num_labels == 9
    agree(ViT.from_pretrained(tmp_path / "in", img_size=(64, 32), num_classes=9), truth, images(64, 32))


# ---- what a format cannot say


def test_google_means_the_tanh_gelu(tmp_path):
    """The same bits for timm and us; logits differ by the activation, which ours has from the format."""
    model = small()
    notes = write(model, tmp_path / "w.npz", "npz")
    assert notes == ["npz does not say act_layer='gelu': its readers take 'gelu_tanh'"]
    truth, x = timm_vit.VisionTransformer(**SMALL).eval(), images()
    truth.load_pretrained(str(tmp_path / "w.npz"))
    ours = ViT.from_pretrained(tmp_path / "w.npz")
    assert same(ours.state_dict(), truth.state_dict()) and (logits(ours, x) - logits(truth, x)).abs().max() > 1e-4
    agree(ViT.from_pretrained(tmp_path / "w.npz", act_layer="gelu"), truth, x)


def test_timm_cannot_say_the_eps(tmp_path):
    assert write(small(norm_eps=1e-12), tmp_path / "out", "timm") == [
        "timm does not say norm_eps=1e-12: its readers take 1e-06"
    ]


_CLASSIC = ("register tokens", "LayerScale", "a model without positions", "a norm after pooling", "proj_bias")
_CLASS_TOKEN = ("a model without class token", "patches alone", "another pooling")
REFUSED = {
    "npz": (*_CLASSIC, "qkv without bias"),
    "huggingface": (*_CLASSIC, *_CLASS_TOKEN, "pre_logits"),
    "torchvision": (*_CLASSIC, *_CLASS_TOKEN, "qkv without bias", "without head", "no squares", "3 channels"),
    "timm": ("pre_logits",),
}
MODELS = {
    "register tokens": dict(reg_tokens=1),
    "LayerScale": dict(init_values=0.1),
    "a model without positions": dict(pos_embed="none"),
    "a norm after pooling": dict(fc_norm=True),
    "qkv without bias": dict(qkv_bias=False),
    "proj_bias": dict(proj_bias=False),
    "a model without class token": dict(class_token=False, global_pool="avg", fc_norm=False),
    "patches alone": dict(no_embed_class=True),
    "another pooling": dict(global_pool="avg", fc_norm=False),
    "pre_logits": dict(representation_size=7),
    "without head": dict(num_classes=0),
    "no squares": dict(img_size=(32, 16)),
    "3 channels": dict(in_chans=1),
}


@pytest.mark.parametrize("form", REFUSED)
def test_models_that_a_format_cannot_hold(tmp_path, form):
    for what in REFUSED[form]:
        with pytest.raises(InputError, match=f"the format {form} has no place for .*{what}"):
            write(small(**MODELS[what]), tmp_path / TARGETS[form], form)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "form, classes", [("timm", 0), ("timm", CLASSES), ("huggingface", 0), ("huggingface", CLASSES), ("torchvision", 0)]
)
def test_a_head_without_a_place_can_be_replaced(tmp_path, capsys, form, classes):
    """What the error says works, word for word; with 0 classes a hidden layer would be the head that is left."""
    save(small(representation_size=7 if form != "torchvision" else None, num_classes=classes), tmp_path / "in")
    command = ["convert", tmp_path / "in", tmp_path / TARGETS[form], "--format", form]
    code, _, err = run(capsys, *command)
    assert code == 2 and f"--num-classes N (any but {classes}) puts a new one in its place" in err
    assert ("--num-classes 0 leaves the head out" in err) == (classes > 0)
    assert run(capsys, *command, "--num-classes", 9)[0] == 0
    assert load_checkpoint(tmp_path / TARGETS[form])["head.weight"].shape == (9, D)
    if classes:
        assert run(capsys, *command, "--num-classes", 0, "--force")[0] == 0
        assert "head.weight" not in load_checkpoint(tmp_path / TARGETS[form])


# ---- files


@pytest.mark.parametrize("form", FORMATS)
def test_nothing_is_replaced_without_force(tmp_path, capsys, form):
    old, new = small(), small()
    save(new, tmp_path / "new")
    write(old, tmp_path / TARGETS[form], form)
    args = ("convert", tmp_path / "new", tmp_path / TARGETS[form], "--format", form)
    code, _, err = run(capsys, *args)
    assert code == 2 and f"{tmp_path / TARGETS[form]}: is there already; add --force" in err and err.count("\n") == 1
    assert same(load_checkpoint(tmp_path / TARGETS[form]), old.state_dict())
    assert run(capsys, *args, "--force")[0] == 0
    assert same(load_checkpoint(tmp_path / TARGETS[form]), new.state_dict())
    assert {p.name for p in tmp_path.iterdir()} == {"new", TARGETS[form]}


def test_a_wrong_writer_is_found_out(tmp_path, monkeypatch):
    """Keys and values exchanged: the file would load, and compute something else.

    Nothing of it stays, and what was there does.
    """
    names = tuple(
        (old, new.replace("key", "value") if "key" in new else new.replace("value", "key"))
        for old, new in writers.GOOGLE_NAMES
    )
    monkeypatch.setattr(writers, "GOOGLE_NAMES", names)
    (tmp_path / "w.npz").write_text("old")
    with pytest.raises(RuntimeError, match="npz: what was written does not read back the same .blocks.0.attn.qkv.bias"):
        write(small(), tmp_path / "w.npz", "npz", force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["w.npz"] and (tmp_path / "w.npz").read_text() == "old"


@pytest.mark.parametrize(
    "target, form, message",
    [
        ("w.pth", "npz", "w.pth: the format npz is written as .npz"),
        ("w.npz", "huggingface", "the format huggingface is written as a folder"),
        ("w.bin", "timm", "w.bin: the format timm is written as a folder or .safetensors or .pth"),
        ("file", "vitfast", "file: a file is in the way"),
        ("dir.npz", "npz", "dir.npz: a folder is in the way"),
    ],
)
def test_targets_that_do_not_suit(tmp_path, capsys, target, form, message):
    save(small(), tmp_path / "in")
    (tmp_path / "file").touch()
    (tmp_path / "dir.npz").mkdir()
    code, _, err = run(capsys, "convert", tmp_path / "in", tmp_path / target, "--format", form, "--force")
    assert code == 2 and err.startswith("vitfast: error: ") and err.count("\n") == 1
    with pytest.raises(InputError, match=message):
        write(small(), tmp_path / target, form, force=True)


def test_bad_input_leaves_nothing(tmp_path, capsys):
    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "no.pth")
    code, _, err = run(capsys, "convert", tmp_path / "no.pth", tmp_path / "made" / "out", "--format", "timm")
    assert (
        code == 2 and "no.pth: not a Vision Transformer" in err and [p.name for p in tmp_path.iterdir()] == ["no.pth"]
    )
    with pytest.raises(SystemExit):
        cli.main(["convert", "in", "out", "--format", "hugging"])
    told = capsys.readouterr().err
    assert all(form in told for form in FORMATS)
    with pytest.raises(InputError, match="unknown format 'hugging'; did you mean huggingface"):
        write(small(), tmp_path / "out", "hugging")


def test_hugging_face_config_is_theirs(tmp_path):
    """Every field that transformers writes for this model, beyond its defaults, is there with its value."""
    write(small(), tmp_path / "out", "huggingface")
    transformers.ViTForImageClassification(transformers.ViTConfig(**HF | dict(layer_norm_eps=1e-6))).save_pretrained(
        tmp_path / "theirs"
    )
    ours, theirs = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "theirs"))
    defaults = transformers.ViTConfig().to_dict()
    wanted = {
        k: v
        for k, v in theirs.items()
        if defaults.get(k) != v and k not in ("transformers_version", "mlp_ratio", "pooler_output_size")
    }
    assert {k: ours.get(k) for k in wanted} == wanted


@pytest.mark.parametrize(
    "form, name", [("timm", "w.pth"), ("timm", "w.safetensors"), ("huggingface", "w"), ("npz", "w.npz")]
)
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, capfd, form, name):
    """No file may grow past 40 KB here; 300 KB are wanted."""
    ViT(img_size=16, patch_size=8, embed_dim=64, depth=2, num_heads=2, num_classes=2).save_pretrained(tmp_path / "from")
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
