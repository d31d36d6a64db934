"""Weights of timm, bare, in folders, of its training, of every name: timm's logits, or an error that says why."""

import argparse
import dataclasses
import inspect
import json
import logging
import re
import shutil

import checkpoints as c
import pytest
import safetensors.torch
import timm
import torch
from speed import first
from timm.models._hub import save_for_hf
from timm.utils import CheckpointSaver
from timm_names import images, names, one_of_each_kind, ours, outcome, outcomes, small, tagged

from vitfast import InputError, ViT, load_checkpoint
from vitfast.model.checkpoint import timm as timm_config
from vitfast.model.checkpoint.timm import by_name
from vitfast.model.convert import write

B16 = "vit_base_patch16_224"


def saved(folder, name=B16, **changes):
    """A small model of timm with random weights, as its repositories have it."""
    truth = c.randomised(timm.create_model(name, **c.SMALL | changes))
    save_for_hf(truth, folder, safe_serialization=True)
    return truth


# ---- bare tensors


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt", ".bin"])
def test_a_state_dict_of_every_suffix(tmp_path, suffix):
    truth, path = c.small_timm(), tmp_path / f"w{suffix}"
    state = truth.state_dict()
    safetensors.torch.save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    model = ViT.from_pretrained(path, num_heads=c.HEADS)
    c.agree(model, truth)
    assert {**ViT(**c.SMALL).config, "mlp_ratio": c.F / c.D} == model.config
    if suffix in (".safetensors", ".pth"):
        (note,) = write(model, tmp_path / f"back{suffix}", "timm")
        again = timm.models.load_state_dict(tmp_path / f"back{suffix}")
        assert "pass num_heads=" in note and c.same(again, state)


@pytest.mark.parametrize(
    "changes",
    [
        dict(reg_tokens=4, no_embed_class=True, init_values=1e-5),
        dict(reg_tokens=2),
        dict(class_token=False, global_pool="avg", fc_norm=False, qkv_bias=False),
        dict(global_pool="avg"),
        dict(pos_embed="none", img_size=224),
        dict(patch_size=(8, 16), img_size=(32, 64), in_chans=2, num_classes=0, mlp_ratio=2.51),
        dict(proj_bias=False),
        dict(img_size=(16, 72)),  # whose table is no square
        dict(embed_dim=21, mlp_ratio=51.5 / 21),  # int(21 * (51 / 21)) is 50: a quotient would build the wrong width
    ],
    ids=lambda c: ",".join(c),
)
def test_shapes_say_the_architecture(tmp_path, changes):
    truth = c.small_timm(**changes)
    torch.save(truth.state_dict(), tmp_path / "w.pth")
    said = {"pos_embed": "none"} if "pos_embed" in changes else {}  # what the errors for bare tensors ask for
    said |= {"act_layer": "gelu"} if "class_token" in changes else {}
    said |= {"img_size": (16, 72)} if (16, 72) in changes.values() else {}
    model = ViT.from_pretrained(tmp_path / "w.pth", num_heads=c.HEADS, **said)
    c.agree(model, truth, c.images(*truth.patch_embed.img_size, chans=model.in_chans))
    assert model.patch_embed.img_size == truth.patch_embed.img_size


def test_deit3_layer_scale(tmp_path):
    truth = c.small_timm(init_values=1e-5, no_embed_class=True)
    state = {re.sub(r"ls([12])\.gamma", r"gamma_\1", k): v for k, v in truth.state_dict().items()}
    torch.save({"model": state}, tmp_path / "deit_3.pth")
    told = dict(num_heads=c.HEADS, pos_embed="learn", img_size=c.SIZE)
    c.agree(ViT.from_pretrained(tmp_path / "deit_3.pth", **told), truth)


@pytest.mark.parametrize("prefix", ["", "module._orig_mod.", "module.", "_orig_mod.", "model."])
@pytest.mark.parametrize("wrapper", ["model", "state_dict", "state_dict_ema", "model_ema"])
def test_nested_state_dicts_are_unwrapped(tmp_path, wrapper, prefix):
    truth, other = c.small_timm().state_dict(), c.small_timm().state_dict()
    content = {wrapper: {prefix + k: v for k, v in truth.items()}, "epoch": 3, "args": argparse.Namespace(lr=0.1)}
    if wrapper.endswith("ema"):
        content["state_dict"] = other
    torch.save(content, tmp_path / "last.pth.tar")
    assert c.same(load_checkpoint(tmp_path / "last.pth.tar"), truth)


def test_bare_tensors_say_what_is_assumed(tmp_path, caplog):
    """A line with all that no tensor says, but for what the caller says."""
    path, more = tmp_path / "w.safetensors", dict(norm_eps=1e-6, global_pool="avg", std=1)
    safetensors.torch.save_file(c.small_timm().state_dict(), path)
    with caplog.at_level(logging.WARNING, "vitfast"):
        ViT.from_pretrained(path, num_heads=c.HEADS, act_layer="gelu_tanh", mean=0.1)
        ViT.from_pretrained(path, num_heads=c.HEADS, act_layer="gelu", mean=0.1, img_size=c.SIZE, **more)
    said = "the weights do not say img_size=32, no_embed_class=False, norm_eps=1e-06, std=0.5, global_pool='token'"
    said += ": assumed; pass those that differ"
    assert [record.getMessage() for record in caplog.records] == [f"{path}: {said}"]


# ---- folders


def test_a_hub_folder(tmp_path):
    mean, std = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
    pixels = dict(pretrained_cfg_overlay=dict(mean=mean, std=std))
    truth = saved(tmp_path, img_size=(32, 16), act_layer="gelu_tanh", **pixels)
    model = ViT.from_pretrained(tmp_path)
    c.agree(model, truth, c.images(32, 16))
    assert model.mean == tuple(mean) and model.std == tuple(std) and model.config["img_size"] == (32, 16)
    # its config.json is beside it
    c.agree(ViT.from_pretrained(tmp_path / "model.safetensors"), truth, c.images(32, 16))


@pytest.mark.parametrize(
    "name, act", [("vit_base_patch32_siglip_gap_256", "gelu_tanh"), ("vit_base_patch16_siglip_gap_224", "gelu")]
)
def test_the_older_flat_config(tmp_path, name, act):
    """Activation and heads are known by the model's name alone."""
    truth = c.randomised(timm.create_model(name, img_size=64, embed_dim=96, depth=2, num_classes=c.CLASSES))
    torch.save(truth.state_dict(), tmp_path / "pytorch_model.bin")
    content = dict(architecture=name, mean=[0.2] * 3, std=[0.3] * 3, input_size=[3, 224, 224], num_classes=c.CLASSES)
    (tmp_path / "config.json").write_text(json.dumps(content))
    model = ViT.from_pretrained(tmp_path)
    c.agree(model, truth, c.images(64, 64))
    assert model.mean == (0.2,) * 3
    assert c.pick(model.config, "act_layer", "num_heads") == dict(act_layer=act, num_heads=12)


CHANGES = [
    *((B16, {name: value}) for name, values in timm_config.FIXED.items() for value in values),  # leave the function
    (B16, dict(act_layer="quick_gelu")),
    (B16, dict(pos_embed="none")),
    (B16, dict(qk_norm=True, norm_layer="rmsnorm", scale_mlp_norm=True)),
    (B16, dict(pre_norm=True, global_pool="map", act_layer="swish")),
    ("vit_base_patch16_clip_224", dict(norm_layer="layernorm")),  # not with the eps of the name
    ("vit_giant_patch14_dinov2", dict(mlp_ratio=3.0)),  # which counts the gate
]


@pytest.mark.parametrize("name, model_args", CHANGES, ids=str)
def test_arguments_that_the_vit_has_too_or_that_change_nothing(tmp_path, name, model_args):
    truth = saved(tmp_path, name, **model_args)
    assert json.loads((tmp_path / "config.json").read_text())["model_args"].items() >= model_args.items()
    model = ViT.from_pretrained(tmp_path)
    c.agree(model, truth)
    assert model.config["norm_eps"] == truth.norm.eps


@pytest.mark.parametrize("args", [dict(fc_norm=True), dict(fc_norm=True, global_pool="avg"), dict(fc_norm=False)])
@pytest.mark.parametrize("name", [B16, "vit_base_patch16_gap_224", "eva_large_patch14_196"])
def test_pooling_that_nothing_says_is_that_of_timms_name(tmp_path, name, args):
    truth = saved(tmp_path, name, **args)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["global_pool"]
    (tmp_path / "config.json").write_text(json.dumps(content | dict(model_args=c.SMALL | args)))
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    model = ViT.from_pretrained(tmp_path)
    c.agree(model, again)
    assert model.config["global_pool"] == again.global_pool == truth.global_pool


def test_dropout_that_the_vit_has_not_is_said(tmp_path, caplog):
    truth = c.randomised(timm.create_model(B16, **c.SMALL))
    rates = dict(c.SMALL, attn_drop_rate=0.1, drop_path_rate=0.2)
    save_for_hf(truth, tmp_path, safe_serialization=True, model_args=rates)
    with caplog.at_level(logging.WARNING, "vitfast"):
        model = ViT.from_pretrained(tmp_path)
    c.agree(model, truth)
    assert model.config["drop_path_rate"] == 0.2
    said = "attn_drop_rate=0.1 is not taken over, the ViT has no dropout there"
    assert [record.getMessage() for record in caplog.records] == [f"{tmp_path}: {said}"]


# ---- every name

SEEN = re.compile("^equal$|^refused: ")
# Bare tensors of these need the activation, rotary positions, the pooling or the size, which the errors ask for.
ASKED = "timm's models with these tensors differ: .*pass act_layer=|pass rope=|pass global_pool='map'|; pass those of"


def check(name, folder):
    """Equal or refused from timm's folder, by the name alone, and bare; listed names are equal (or have two heads)."""
    model = small(name)
    found = outcomes(model, folder)
    assert all(SEEN.search(said) for said in found.values()), found
    if not ours(name):
        assert found["folder"].startswith("refused: ") and found["name"].startswith("refused: "), found
    elif "distilled" in name:
        assert all("has two heads" in said for said in found.values()), found
    else:
        assert found["folder"] == found["name"] == "equal", found
        assert found["bare"] == "equal" or re.search(ASKED, found["bare"]), found
        size = dict(img_size=tuple(images(model).shape[2:]))
        assert outcome(folder / "bare.safetensors", model, **by_name(name), **size) == "equal"


# Names that differ from others of their kind in more than sizes.
APART = "vit_small_plus_patch16_dinov3 eva02_base_patch14_224 eva_giant_patch14_clip_224 test_vit3 test_vit4".split()


@pytest.mark.parametrize("name", first(len(APART), [*APART, *sorted({*one_of_each_kind()} - {*APART})]))
def test_one_of_each_kind(tmp_path, name):
    check(name, tmp_path)


@pytest.mark.long
def test_every_name(tmp_path):
    for name in names():
        folder = tmp_path / name
        folder.mkdir()
        check(name, folder)
    assert all(any(re.fullmatch(family, name) for name in names()) for family in timm_config.FAMILIES)


@pytest.mark.long
def test_every_pretrained_tag(tmp_path):
    """At its own image size, with its own number of classes and pixel statistics."""
    for name in tagged():
        folder = tmp_path / name
        folder.mkdir()
        model = small(name)
        found = outcomes(model, folder)
        uneven = any(side % p for side, p in zip(model.patch_embed.img_size, model.patch_embed.patch_size))
        if uneven:
            assert re.search("leave the last rows .* out", found["folder"]), (name, found)
        elif "distilled" not in name:
            assert found["folder"] == found["name"] == "equal", (name, found)
        assert all(SEEN.search(said) for said in found.values()), (name, found)
        shutil.rmtree(folder)


def test_images_that_patches_do_not_cover(tmp_path):
    """timm's convolution leaves out the last rows and columns; the ViT takes the rest where one asks for it."""
    truth = small("vit_so400m_patch14_siglip_gap_384", img_size=40)
    save_for_hf(truth, tmp_path, safe_serialization=True)
    with pytest.raises(InputError, match=r"patches of 14 x 14 leave the last rows .*pass img_size=\(28, 28\)"):
        ViT.from_pretrained(tmp_path)
    x = c.images(40, 40)
    ours, theirs = c.logits(ViT.from_pretrained(tmp_path, img_size=28).eval(), x[..., :28, :28]), c.logits(truth, x)
    torch.testing.assert_close(ours, theirs, **c.TOL)


@pytest.mark.parametrize("size", [(48, 80), (16, 64)])
def test_dinov3_at_other_sizes(tmp_path, size):
    """As timm takes them, without being told."""
    truth = small("vit_small_plus_patch16_dinov3_qkvb")
    save_for_hf(truth, tmp_path, safe_serialization=True)
    c.agree(ViT.from_pretrained(tmp_path), truth, c.images(*size))


def test_no_field_of_timms_is_unknown():
    fields = {field.name for field in dataclasses.fields(timm.models.PretrainedCfg)}
    assert fields - {*timm_config.PRETRAINED} == {"state_dict"}  # which is never written
    arguments = {*inspect.signature(timm.models.VisionTransformer).parameters} - {"device", "dtype"}
    classes = {"embed_layer", "embed_norm_layer", "block_fn", "mlp_layer"}  # no JSON holds these
    assert arguments - {*timm_config.FIELDS} == classes


# ---- checkpoints of timm's training script


def training_checkpoint(folder, network, **arguments):
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    args = argparse.Namespace(**arguments) if arguments else None
    CheckpointSaver(network, optimizer, args, checkpoint_dir=folder, recovery_dir=folder).save_checkpoint(0)
    return folder / "last.pth.tar"


def test_a_training_checkpoint_names_its_model(tmp_path):
    """Heads and activation come from the name, with the arguments of the script; without them it is bare."""
    name, args = "vit_base_patch32_siglip_gap_256", dict(embed_dim=96, depth=2, img_size=64)
    truth = c.randomised(timm.create_model(name, num_classes=3, **args))
    model = ViT.from_pretrained(training_checkpoint(tmp_path, truth, model=name, gp=None, model_kwargs=args))
    c.agree(model, truth, c.images(64, 64))
    assert (model.config["num_heads"], model.config["act_layer"]) == (12, "gelu_tanh")
    truth = c.small_timm()
    c.agree(ViT.from_pretrained(training_checkpoint(tmp_path, truth), num_heads=c.HEADS), truth)


@pytest.mark.parametrize("kind", [argparse.Namespace, dict])
def test_a_training_checkpoint_says_its_pixels(tmp_path, caplog, kind):
    truth = c.randomised(timm.create_model(B16, **c.SMALL, fc_norm=False, global_pool="avg"))
    options = dict(gp="avg", model_kwargs=dict(fc_norm=False, num_heads=c.HEADS), mean=[0.1, 0.2, 0.3], std=[0.2] * 3)
    options["img_size"] = c.SIZE
    torch.save(dict(state_dict=truth.state_dict(), arch=B16, args=kind(**options)), tmp_path / "last.pth.tar")
    with caplog.at_level(logging.WARNING, "vitfast"):
        model = ViT.from_pretrained(tmp_path / "last.pth.tar")
    assert not caplog.records
    raw = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    mean, std = (torch.tensor(options[name]).view(3, 1, 1) for name in ("mean", "std"))
    torch.testing.assert_close(c.logits(model.eval(), raw), c.logits(truth, (raw / 255 - mean) / std), **c.TOL)
