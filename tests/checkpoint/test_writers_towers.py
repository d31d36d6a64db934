"""DINOv3, SigLIP, CLIP and other later ViTs, written: transformers and timm compute the same."""

import json

import pytest
import timm
import torch
import transformers
from checkpoints import SMALL, TOL, agree, images, randomised
from packaging.version import Version
from safetensors.torch import load_file
from timm.models import vision_transformer as timm_vit

from vitfast import InputError, ViT, cli
from vitfast.convert import FORMATS, write

TARGETS = {"vitfast": "out", "timm": "out", "huggingface": "out", "npz": "out.npz", "torchvision": "out.pth"}
DINOV3 = dict(rope="dinov3", pos_embed="none", reg_tokens=2, init_values=0.1, norm_eps=1e-5, num_classes=0)
CLIP = dict(pre_norm=True, act_layer="quick_gelu", norm_eps=1e-5)
SIGLIP = dict(class_token=False, global_pool="map", act_layer="gelu_tanh", num_classes=0)


def small(**changes):
    return randomised(ViT(**{**SMALL, **changes}))


def whole(cls, folder):
    """transformers' model, no tensor of which is missing or left over."""
    truth, info = getattr(transformers, cls).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return truth.eval()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(swiglu_mlp=True, reg_tokens=0, qkv_bias=False),
        dict(proj_bias=False, rope_temperature=30.0, act_layer="gelu_tanh", dynamic_img_size=True, img_size=(32, 16)),
    ],
    ids=str,
)
def test_transformers_loads_dinov3(tmp_path, changes):
    model = small(**DINOV3 | changes)
    assert all("images are cut" in note for note in write(model, tmp_path / "out", "huggingface"))
    x = images(*model.patch_embed.img_size)
    if x.shape[2] == x.shape[3] or Version(transformers.__version__) >= Version("5.18"):  # before it, squares alone
        truth = whole("DINOv3ViTModel", tmp_path / "out")
        with torch.no_grad():
            torch.testing.assert_close(model.forward_features(x), truth(x).last_hidden_state, **TOL)
    agree(ViT.from_pretrained(tmp_path / "out"), model, x)


@pytest.mark.parametrize("arguments", [CLIP, {**CLIP, "num_classes": 0}, SIGLIP], ids=["projection", "CLIP", "SigLIP"])
def test_names_are_those_of_the_released_files(tmp_path, arguments):
    """transformers before 5.8 takes no others: it would start such weights at random, with a warning."""
    model = small(**arguments)
    if model.num_classes:
        model.head.bias.data.zero_()
    write(model, tmp_path / "out", "huggingface")
    names = load_file(tmp_path / "out" / "model.safetensors")
    assert all(name.startswith("vision_model.") or name == "visual_projection.weight" for name in names)


@pytest.mark.parametrize("classes", [0, 5])
def test_transformers_loads_clip(tmp_path, classes):
    model = small(**CLIP, num_classes=classes)
    if classes:
        with pytest.raises(
            InputError, match="CLIP's projection has no bias, this head has one; --num-classes 0 leaves"
        ):
            write(model, tmp_path / "out", "huggingface")
        assert not list(tmp_path.iterdir())
        model.head.bias.data.zero_()
    assert write(model, tmp_path / "out", "huggingface") == []
    truth = whole("CLIPVisionModelWithProjection" if classes else "CLIPVisionModel", tmp_path / "out")
    agree(model, lambda x: truth(x).image_embeds if classes else truth(x).pooler_output)
    agree(ViT.from_pretrained(tmp_path / "out"), model)


def test_transformers_loads_siglip(tmp_path):
    model = small(**SIGLIP)
    assert write(model, tmp_path / "out", "huggingface") == []
    truth = whole("SiglipVisionModel", tmp_path / "out")
    agree(model, lambda x: truth(x).pooler_output)
    agree(ViT.from_pretrained(tmp_path / "out"), model)


@pytest.mark.parametrize(
    "changes",
    [
        CLIP,
        SIGLIP,
        dict(global_pool="map", reg_tokens=2, qk_norm=True, norm_layer="rmsnorm", scale_mlp_norm=True),
        dict(swiglu_mlp=True, init_values=0.1, norm_layer="rmsnorm", mlp_ratio=2.51, scale_mlp_norm=True),
        dict(swiglu_mlp=True, mlp_ratio=8 / 3, pre_norm=True),
        dict(act_layer="silu", norm_eps=1e-5, qkv_bias=False),
    ],
    ids=str,
)
def test_timm_loads_the_folder(tmp_path, changes):
    model = small(**changes)
    assert write(model, tmp_path / "out", "timm") == []
    truth = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    assert type(truth) is timm_vit.VisionTransformer
    agree(model, truth)
    assert truth.state_dict().keys() == model.state_dict().keys()
    agree(ViT.from_pretrained(tmp_path / "out"), model)


def test_timms_own_gated_model_with_another_width(tmp_path):
    """Its mlp_ratio counts the gate."""
    from timm.models._hub import save_for_hf

    truth = randomised(timm.create_model("vit_giant_patch14_dinov2", **{**SMALL, "mlp_ratio": 3.0}))
    save_for_hf(truth, tmp_path, safe_serialization=True)
    agree(ViT.from_pretrained(tmp_path), truth)


# What each format lacks of each model.
LACKS = {
    "rotary positions": (dict(rope="cat"), {"timm", "huggingface", "npz", "torchvision"}),
    "swiglu_mlp": (dict(swiglu_mlp=True), {"huggingface", "npz", "torchvision"}),
    "a gated MLP and a MAP head": (dict(swiglu_mlp=True, global_pool="map"), {"timm"}),
    "qk_norm": (dict(qk_norm=True), {"huggingface", "npz", "torchvision"}),
    "scale_mlp_norm": (dict(scale_mlp_norm=True), {"huggingface", "npz", "torchvision"}),
    "norm_layer": (dict(norm_layer="rmsnorm"), {"huggingface", "npz", "torchvision"}),
    "pre_norm": (dict(pre_norm=True), {"npz", "torchvision"}),
    "act_layer": (dict(act_layer="quick_gelu"), {"npz", "torchvision"}),
    "global_pool": (dict(global_pool="map"), {"npz"}),
    "a head": ({**DINOV3, "num_classes": 5}, {"huggingface"}),
    "prefix tokens": ({**SIGLIP, "reg_tokens": 2}, {"huggingface"}),
    "without LayerScale": ({**DINOV3, "init_values": None}, {"huggingface"}),
    "beside rotary positions": ({**DINOV3, "pos_embed": "learn"}, {"huggingface"}),
    "no squares": ({**CLIP, "num_classes": 0, "img_size": (32, 16)}, {"huggingface", "torchvision"}),
}


@pytest.mark.parametrize("what", LACKS)
def test_what_a_format_cannot_hold_is_refused_by_name(tmp_path, what):
    """Another library would read another function; all formats that do not refuse it return it."""
    changes, lacking = LACKS[what]
    model = small(**changes)
    for form in FORMATS:
        path = tmp_path / form / TARGETS[form]
        try:
            write(model, path, form)
        except InputError as error:
            assert form in lacking or what not in str(error), (form, str(error))
            assert "has no place for" in str(error) or "CLIP's projection" in str(error)
            assert not path.exists()
        else:
            assert form not in lacking, form


def test_the_way_out_is_told(tmp_path, capsys):
    small(**{**DINOV3, "num_classes": 5}).save_pretrained(tmp_path / "in")
    command = ["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--format", "huggingface"]
    assert cli.main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(
        "no place for a head; the format vitfast has; in vitfast convert --num-classes 0 leaves the head out"
    )
    assert cli.main([*command, "--num-classes", "0"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "dinov3_vit"
