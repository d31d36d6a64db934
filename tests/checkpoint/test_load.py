"""Weights of timm, torchvision and Facebook's DINOv2, judged by their libraries' logits."""

import argparse
import json

import pytest
import safetensors.torch
import timm
import torch
import torchvision
from checkpoints import (
    CLASSES,
    DEPTH,
    HEADS,
    IMAGENET,
    SIZE,
    SMALL,
    TOL,
    D,
    F,
    N,
    P,
    agree,
    images,
    logits,
    pick,
    randomised,
    small_timm,
)
from timm.models import vision_transformer as timm_vit
from timm.models._hub import save_for_hf

from vitfast import InputError, ViT, load_checkpoint


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt", ".bin"])
def test_timm_state_dict(tmp_path, suffix):
    truth, path = small_timm(), tmp_path / f"w{suffix}"
    state = truth.state_dict()
    safetensors.torch.save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    loaded = load_checkpoint(path)
    assert loaded.keys() == state.keys() and all(torch.equal(loaded[k], v) for k, v in state.items())
    model = ViT.from_pretrained(path, num_heads=HEADS)
    agree(model, truth)
    assert {**ViT(**SMALL).config, "mlp_ratio": F / D} == model.config
    model.load_state_dict(truth.state_dict(), strict=True)


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
    ],
    ids=lambda c: ",".join(c),
)
def test_timm_shapes_say_the_architecture(tmp_path, changes):
    truth = small_timm(**changes)
    torch.save(truth.state_dict(), tmp_path / "w.pth")
    said = {"pos_embed": "none"} if "pos_embed" in changes else {}  # what the errors for bare tensors ask for
    said |= {"act_layer": "gelu"} if "class_token" in changes else {}
    model = ViT.from_pretrained(tmp_path / "w.pth", num_heads=HEADS, **said)
    size = changes.get("img_size", SIZE)
    agree(model, truth, images(*((size, size) if isinstance(size, int) else size), chans=changes.get("in_chans", 3)))
    assert model.patch_embed.img_size == truth.patch_embed.img_size


def test_heads_come_from_the_preset(tmp_path):
    """Ti/16 is the smallest preset."""
    truth = randomised(timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=3))
    torch.save(truth.state_dict(), tmp_path / "ti.pth")
    model = ViT.from_pretrained(tmp_path / "ti.pth")
    assert model.config["num_heads"] == 3
    agree(model, truth)


def test_timm_hub_folder(tmp_path):
    mean, std = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
    args = dict(SMALL, img_size=(32, 16), act_layer="gelu_tanh")
    truth = randomised(
        timm.create_model("vit_base_patch16_224", pretrained_cfg_overlay=dict(mean=mean, std=std), **args)
    )
    save_for_hf(truth, tmp_path, safe_serialization=True)
    model = ViT.from_pretrained(tmp_path)
    agree(model, truth, images(32, 16))
    assert model.mean == tuple(mean) and model.std == tuple(std) and model.config["img_size"] == (32, 16)
    agree(ViT.from_pretrained(tmp_path / "model.safetensors"), truth, images(32, 16))  # its config.json is beside it


@pytest.mark.parametrize(
    "name, act", [("vit_base_patch32_siglip_gap_256", "gelu_tanh"), ("vit_base_patch16_siglip_gap_224", "gelu")]
)
def test_timm_flat_config(tmp_path, name, act):
    """The older config.json of timm is flat; activation and heads are known by the model's name alone."""
    truth = randomised(timm.create_model(name, img_size=64, embed_dim=96, depth=2, num_classes=CLASSES))
    torch.save(truth.state_dict(), tmp_path / "pytorch_model.bin")
    content = dict(architecture=name, mean=[0.2] * 3, std=[0.3] * 3, input_size=[3, 224, 224], num_classes=CLASSES)
    (tmp_path / "config.json").write_text(json.dumps(content))
    model = ViT.from_pretrained(tmp_path)
    agree(model, truth, images(64, 64))
    assert model.mean == (0.2,) * 3 and pick(model.config, "act_layer", "num_heads") == dict(
        act_layer=act, num_heads=12
    )


@pytest.mark.parametrize("wrapper", ["model", "state_dict", "state_dict_ema", "model_ema"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "model."])
def test_nested_state_dicts_are_unwrapped(tmp_path, wrapper, prefix):
    truth, other = small_timm(), small_timm()
    content = {
        wrapper: {prefix + k: v for k, v in truth.state_dict().items()},
        "epoch": 3,
        "args": argparse.Namespace(lr=0.1),
    }
    if wrapper.endswith("ema"):
        content["state_dict"] = other.state_dict()
    torch.save(content, tmp_path / "last.pth.tar")
    loaded = load_checkpoint(tmp_path / "last.pth.tar")
    assert all(torch.equal(loaded[k], v) for k, v in truth.state_dict().items()) and len(loaded) == len(
        truth.state_dict()
    )


def test_mlp_ratio_survives_rounding(tmp_path):
    """int(21 * (51 / 21)) is 50: a quotient alone would build the wrong width."""
    d, hidden = 21, 51
    assert int(d * (hidden / d)) != hidden
    truth = small_timm(embed_dim=d, mlp_ratio=(hidden + 0.5) / d)
    torch.save(truth.state_dict(), tmp_path / "w.pth")
    assert truth.blocks[0].mlp.fc1.out_features == hidden
    agree(ViT.from_pretrained(tmp_path / "w.pth", num_heads=HEADS), truth)


def test_deit3_layer_scale(tmp_path):
    truth = small_timm(init_values=1e-5, no_embed_class=True)
    state = {
        k.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): v for k, v in truth.state_dict().items()
    }
    torch.save({"model": state}, tmp_path / "deit_3.pth")
    with pytest.raises(
        InputError, match="gamma_1: so it is .* in timm's models with rotary positions.*pass pos_embed='learn'"
    ):
        ViT.from_pretrained(tmp_path / "deit_3.pth", num_heads=HEADS)
    agree(ViT.from_pretrained(tmp_path / "deit_3.pth", num_heads=HEADS, pos_embed="learn"), truth)


def test_distilled_deit_of_timm(tmp_path):
    truth = randomised(timm.models.deit.VisionTransformerDistilled(**SMALL))
    torch.save({"model": truth.state_dict()}, tmp_path / "w.pth")
    with pytest.raises(InputError, match="distilled DeiT has two heads"):
        ViT.from_pretrained(tmp_path / "w.pth", num_heads=HEADS)
    model, x = ViT.from_pretrained(tmp_path / "w.pth", num_heads=HEADS, num_classes=7).eval(), images()
    with torch.no_grad():
        torch.testing.assert_close(model.forward_features(x), truth.forward_features(x), **TOL)
    assert not logits(model, x).any()


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("representation_size", [None, 40])
def test_torchvision(tmp_path, older, representation_size):
    args = dict(
        image_size=SIZE, patch_size=P, num_layers=DEPTH, num_heads=HEADS, hidden_dim=D, mlp_dim=F, num_classes=CLASSES
    )
    truth = randomised(torchvision.models.VisionTransformer(**args, representation_size=representation_size))
    state = truth.state_dict()
    if older:
        state = {k.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): v for k, v in state.items()}
    torch.save(state, tmp_path / "vit_b_16.pth")
    model = ViT.from_pretrained(tmp_path / "vit_b_16.pth", num_heads=HEADS)
    agree(model, truth)
    assert pick(model.config, *IMAGENET) == IMAGENET and model.config["norm_eps"] == 1e-6
    assert model.config["representation_size"] == representation_size


@pytest.mark.parametrize("registers", [0, 4])
def test_facebook_dinov2(tmp_path, registers):
    """Their names are timm's but for the registers and a mask token; timm's own conversion is the judge."""
    truth = small_timm(num_classes=0, init_values=1e-5, reg_tokens=registers, no_embed_class=registers > 0)
    state = {k: torch.randn_like(v) * 0.3 for k, v in truth.state_dict().items() if k not in ("reg_token", "pos_embed")}
    state |= {"pos_embed": torch.randn(1, N + 1, D), "mask_token": torch.randn(1, D)}
    if registers:
        state["register_tokens"] = torch.randn(1, registers, D)
    torch.save(state, tmp_path / "dinov2.pth")
    truth.load_state_dict(timm_vit.checkpoint_filter_fn(dict(state), truth), strict=True)
    model = ViT.from_pretrained(tmp_path / "dinov2.pth", num_heads=HEADS)
    agree(model, truth)
    assert pick(model.config, *IMAGENET) == IMAGENET and model.config["reg_tokens"] == registers
