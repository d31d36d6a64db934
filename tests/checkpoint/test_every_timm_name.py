"""Every model of timm's with a ViT's name: timm's logits, or an error that says why not. Never a third thing."""

import argparse
import dataclasses
import inspect
import json
import logging
import re
import shutil

import pytest
import safetensors.torch
import timm
import timm_names
import torch
from checkpoints import HEADS, SMALL, TOL, agree, images, logits, randomised, small_timm
from timm.models._hub import save_for_hf
from timm.utils import CheckpointSaver
from timm_names import names, one_of_each_kind, outcome, outcomes, small, tagged

from vitfast import InputError, ViT
from vitfast.arguments import ARGUMENTS
from vitfast.checkpoint import timm as timm_config
from vitfast.checkpoint.timm import MODELS, TANH, by_name

SEEN = re.compile("^equal$|^refused: ")
# Bare tensors of these need the activation, rotary positions or the pooling, which the errors ask for.
ASKED = "timm's models with these tensors differ: .*pass act_layer=|pass rope=|pass global_pool='map'"


def check(name, folder):
    """Equal or refused from timm's folder, by the name alone, and bare; listed names are equal (or have two heads)."""
    model = small(name)
    found = outcomes(model, folder)
    assert all(SEEN.search(said) for said in found.values()), found
    if name not in MODELS:
        assert found["folder"].startswith("refused: ") and found["name"].startswith("refused: "), found
    elif "distilled" in name:
        assert all("has two heads" in said for said in found.values()), found
    else:
        assert found["folder"] == found["name"] == "equal", found
        assert found["bare"] == "equal" or re.search(ASKED, found["bare"]), found
        assert outcome(folder / "bare.safetensors", model, **by_name(name)) == "equal"


# Names that differ from others of their kind in more than sizes.
APART = {
    "vit_small_plus_patch16_dinov3",
    "eva02_base_patch14_224",
    "eva_giant_patch14_clip_224",
    "test_vit3",
    "test_vit4",
}


@pytest.mark.parametrize("name", sorted({*one_of_each_kind(), *filter(TANH.search, MODELS), *APART}))
def test_one_of_each_kind(tmp_path, name):
    check(name, tmp_path)


@pytest.mark.long
def test_every_name(tmp_path):
    for name in names():
        folder = tmp_path / name
        folder.mkdir()
        check(name, folder)
    assert {name for name in MODELS if not name.startswith("vit_fast_")} <= set(names())


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
    x = images(40, 40)
    ours, theirs = logits(ViT.from_pretrained(tmp_path, img_size=28).eval(), x[..., :28, :28]), logits(truth, x)
    torch.testing.assert_close(ours, theirs, **TOL)


def test_two_heads_are_dropped_for_a_new_one(tmp_path):
    truth = small("deit_base_distilled_patch16_224")
    save_for_hf(truth, tmp_path, safe_serialization=True)
    model, x = ViT.from_pretrained(tmp_path, num_classes=0).eval(), timm_names.images(truth)
    with torch.no_grad():
        torch.testing.assert_close(model.forward_features(x), truth.forward_features(x), atol=1e-5, rtol=1e-5)


# ---- what names and arguments say


def test_no_field_of_timms_is_unknown():
    fields = {field.name for field in dataclasses.fields(timm.models.PretrainedCfg)}
    assert fields - {*timm_config.PRETRAINED} == {"state_dict"}  # which is never written
    arguments = {*inspect.signature(timm.models.VisionTransformer).parameters} - {"device", "dtype"}
    classes = {"embed_layer", "embed_norm_layer", "block_fn", "mlp_layer"}  # no JSON holds these
    assert arguments - {*ARGUMENTS, *timm_config.FIXED, *timm_config.DROPOUTS} == classes


@pytest.mark.parametrize(
    "model_args",
    [
        dict(act_layer="relu"),
        dict(qk_norm=True),
        dict(scale_mlp_norm=True),
        dict(pre_norm=True),
        dict(final_norm=False),
        dict(pool_include_prefix=True),
        dict(norm_layer="rmsnorm"),
        dict(attn_layer="diff"),
        dict(use_naflex=True),
        dict(global_pool="avgmax"),
        dict(rope_type="cat"),
        dict(num_heads=4, embed_dim=64),
        dict(class_token=False),
        dict(img_size=64),
    ],
    ids=str,
)
def test_arguments_of_another_function(tmp_path, model_args):
    """Named in the error where the tensors would not show them."""
    truth = randomised(timm.create_model("vit_base_patch16_224", **SMALL))
    save_for_hf(truth, tmp_path, safe_serialization=True)
    agree(ViT.from_pretrained(tmp_path), truth)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    content["model_args"] |= model_args
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=f"{tmp_path}: config.json") as caught:
        ViT.from_pretrained(tmp_path)
    assert any(word in str(caught.value) for word in [*model_args, "activation", "position table"])


@pytest.mark.parametrize("name, value", [(k, v) for k, values in timm_config.FIXED.items() for v in values])
def test_arguments_that_leave_the_function(tmp_path, name, value):
    truth = randomised(timm.create_model("vit_base_patch16_224", **SMALL, **{name: value}))
    save_for_hf(truth, tmp_path, safe_serialization=True)
    assert json.loads((tmp_path / "config.json").read_text())["model_args"][name] == value
    agree(ViT.from_pretrained(tmp_path), truth)


@pytest.mark.parametrize(
    "name, model_args",
    [
        ("vit_base_patch16_224", dict(act_layer="quick_gelu")),
        ("vit_base_patch16_224", dict(qk_norm=True, norm_layer="rmsnorm", scale_mlp_norm=True)),
        ("vit_base_patch16_224", dict(pre_norm=True, global_pool="map", act_layer="swish")),
        ("vit_base_patch16_clip_224", dict(norm_layer="layernorm")),  # not with the eps of the name
    ],
    ids=str,
)
def test_arguments_that_the_vit_has_too(tmp_path, name, model_args):
    truth = randomised(timm.create_model(name, **SMALL, **model_args))
    save_for_hf(truth, tmp_path, safe_serialization=True)
    assert json.loads((tmp_path / "config.json").read_text())["model_args"].items() >= model_args.items()
    model = ViT.from_pretrained(tmp_path)
    agree(model, truth)
    assert model.config["norm_eps"] == truth.norm.eps


def test_the_activation_of_a_gate_is_silu(tmp_path):
    """timm's argument would change it, without a trace in the tensors."""
    truth = small("vit_giant_patch14_dinov2", act_layer="gelu")
    save_for_hf(truth, tmp_path, safe_serialization=True)
    with pytest.raises(InputError, match="act_layer='gelu', and the ViT's gated MLP has 'silu' alone"):
        ViT.from_pretrained(tmp_path)


@pytest.mark.parametrize("size", [(48, 80), (16, 64)])
def test_dinov3_at_other_sizes(tmp_path, size):
    """As timm takes them, without being told."""
    truth = small("vit_small_plus_patch16_dinov3_qkvb")
    save_for_hf(truth, tmp_path, safe_serialization=True)
    agree(ViT.from_pretrained(tmp_path), truth, images(*size))


def test_dropout_that_the_vit_has_not_is_said(tmp_path, caplog):
    truth = randomised(timm.create_model("vit_base_patch16_224", **SMALL))
    save_for_hf(
        truth, tmp_path, safe_serialization=True, model_args=dict(SMALL, attn_drop_rate=0.1, drop_path_rate=0.2)
    )
    with caplog.at_level(logging.WARNING, "vitfast"):
        model = ViT.from_pretrained(tmp_path)
    agree(model, truth)
    assert model.config["drop_path_rate"] == 0.2
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: attn_drop_rate=0.1 is not taken over, the ViT has no dropout there"
    ]


def test_our_own_models_under_timms_names(tmp_path):
    import vitfast.timm_models  # noqa: F401

    options = dict(SMALL, norm_eps=1e-3, representation_size=20, pos_embed="learn2d", no_embed_class=True)
    truth = randomised(timm.create_model("vit_fast_base_patch16_224", **options))
    save_for_hf(truth, tmp_path, safe_serialization=True)
    model = ViT.from_pretrained(tmp_path)
    agree(model, truth)
    assert model.config == {**truth.config, "img_size": (32, 32), "crop_mode": "center", "crop_pct": 0.9}


def test_bare_tensors_say_what_is_assumed(tmp_path, caplog):
    """A line with all that no tensor says, but for what the caller says."""
    truth = small_timm()
    safetensors.torch.save_file(truth.state_dict(), tmp_path / "w.safetensors")
    with caplog.at_level(logging.WARNING, "vitfast"):
        ViT.from_pretrained(tmp_path / "w.safetensors", num_heads=HEADS, act_layer="gelu_tanh", mean=0.1)
        ViT.from_pretrained(
            tmp_path / "w.safetensors",
            num_heads=HEADS,
            act_layer="gelu",
            mean=0.1,
            std=1,
            norm_eps=1e-6,
            global_pool="avg",
        )
    said = "nothing here says norm_eps=1e-06, std=0.5, global_pool='token': assumed; pass those that differ"
    assert [record.getMessage() for record in caplog.records] == [f"{tmp_path / 'w.safetensors'}: {said}"]


# ---- checkpoints of timm's training script


def training_checkpoint(folder, network, **arguments):
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    args = argparse.Namespace(**arguments) if arguments else None
    CheckpointSaver(network, optimizer, args, checkpoint_dir=folder, recovery_dir=folder).save_checkpoint(0)
    return folder / "last.pth.tar"


def test_a_training_checkpoint_names_its_model(tmp_path):
    """Heads and activation come from the name, with the arguments of the script."""
    name, args = "vit_base_patch32_siglip_gap_256", dict(embed_dim=96, depth=2, img_size=64)
    truth = randomised(timm.create_model(name, num_classes=3, **args))
    model = ViT.from_pretrained(training_checkpoint(tmp_path, truth, model=name, gp=None, model_kwargs=args))
    agree(model, truth, images(64, 64))
    assert (model.config["num_heads"], model.config["act_layer"]) == (12, "gelu_tanh")


@pytest.mark.parametrize("name, why", [("vit_small_patch16_rope_ape_224", "rotary"), ("my_vit", "does not know")])
def test_a_training_checkpoint_of_another_model(tmp_path, name, why):
    path = training_checkpoint(tmp_path, small_timm(), model=name, gp=None, model_kwargs={})
    with pytest.raises(InputError, match=f"last.pth.tar: .*{why}") as caught:
        ViT.from_pretrained(path, num_heads=HEADS)
    assert f"timm's {name!r}" in str(caught.value)


def test_a_training_checkpoint_without_arguments_is_bare(tmp_path):
    truth = small_timm()
    agree(ViT.from_pretrained(training_checkpoint(tmp_path, truth), num_heads=HEADS), truth)
