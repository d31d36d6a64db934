"""Weights of Hugging Face, judged by transformers' logits, on random weights."""

import json

import pytest
import safetensors.torch
import torch
import transformers
from checkpoints import HEADS, HF, IMAGENET, SMALL, TOL, agree, images, logits, pick, randomised
from timm.models import vision_transformer as timm_vit

from vitfast import InputError, ViT, load_checkpoint


def store(truth, folder, layout):
    """As save_pretrained writes it (transformers 4's names), or transformers 5's names in memory.

    layout: "on disk" (the former), "in memory" or "bare" (the latter, with config.json and without).
    """
    if layout == "on disk":
        truth.save_pretrained(folder)
        return folder
    if layout == "in memory":
        truth.config.save_pretrained(folder)
        torch.save(truth.state_dict(), folder / "pytorch_model.bin")
        return folder
    torch.save(truth.state_dict(), folder / "bare.pth")
    return folder / "bare.pth"


LAYOUTS = pytest.mark.parametrize("layout", ["on disk", "in memory", "bare"])


@LAYOUTS
def test_hugging_face_vit(tmp_path, layout):
    truth = randomised(transformers.ViTForImageClassification(transformers.ViTConfig(**HF)))
    path = store(truth, tmp_path, layout)
    if layout == "on disk":
        assert any(
            k.startswith("vit.encoder.layer.0.attention.attention.query")
            for k in safetensors.torch.load_file(path / "model.safetensors")
        )
    model = ViT.from_pretrained(path, num_heads=HEADS)
    agree(model, truth)
    assert pick(model.config, "norm_eps", "act_layer") == dict(norm_eps=1e-12, act_layer="gelu")
    assert model.mean == model.std == (0.5,) * 3
    assert model.state_dict().keys() == timm_vit.VisionTransformer(**SMALL).state_dict().keys()


@LAYOUTS
def test_hugging_face_vit_without_head_or_prefix(tmp_path, layout):
    truth, x = randomised(transformers.ViTModel(transformers.ViTConfig(**HF))), images()  # has a pooler
    model = ViT.from_pretrained(store(truth, tmp_path, layout), num_heads=HEADS).eval()
    assert model.num_classes == 0
    with torch.no_grad():
        torch.testing.assert_close(model.forward_features(x), truth(x).last_hidden_state, **TOL)
        torch.testing.assert_close(model(x), truth(x).last_hidden_state[:, 0], **TOL)


def test_hugging_face_config_is_heard(tmp_path):
    """Not the defaults: eps, activation, heads, image size, channels, no qkv bias, pixel statistics."""
    changes = dict(
        image_size=[32, 16],
        num_channels=2,
        layer_norm_eps=0.1,
        hidden_act="gelu_new",
        qkv_bias=False,
        num_attention_heads=6,
    )
    truth = randomised(transformers.ViTForImageClassification(transformers.ViTConfig(**HF | changes)))
    truth.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(dict(image_mean=[0.3, 0.4], image_std=[0.2, 0.1])))
    model = ViT.from_pretrained(tmp_path)
    agree(model, truth, images(32, 16, chans=2))
    assert model.mean == (0.3, 0.4) and model.std == (0.2, 0.1) and model.config["img_size"] == (32, 16)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(dict(image_mean=[0.3, 0.4], do_normalize=False)))
    assert ViT.from_pretrained(tmp_path).std == (1.0, 1.0)


@LAYOUTS
def test_hugging_face_deit(tmp_path, layout):
    """One head: the distillation token is one more prefix token, which the ViT calls a register."""
    truth = randomised(transformers.DeiTForImageClassification(transformers.DeiTConfig(**HF)))
    model = ViT.from_pretrained(store(truth, tmp_path, layout), num_heads=HEADS)
    agree(model, truth)
    assert (
        model.config["norm_eps"] == 1e-12
        and pick(model.config, *IMAGENET) == IMAGENET
        and model.config["reg_tokens"] == 1
    )


@LAYOUTS
def test_distilled_deit_with_two_heads(tmp_path, layout):
    truth = randomised(transformers.DeiTForImageClassificationWithTeacher(transformers.DeiTConfig(**HF)))
    path = store(truth, tmp_path, layout)
    with pytest.raises(InputError, match="distilled DeiT has two heads.*num_classes="):
        ViT.from_pretrained(path, num_heads=HEADS)
    model, x = ViT.from_pretrained(path, num_heads=HEADS, num_classes=0).eval(), images()
    with torch.no_grad():
        features = truth.deit(x).last_hidden_state
        torch.testing.assert_close(model.forward_features(x), features, **TOL)
    state = load_checkpoint(path)
    first = features[:, 0] @ state["head.weight"].T + state["head.bias"]
    second = features[:, 1] @ state["head_dist.weight"].T + state["head_dist.bias"]
    torch.testing.assert_close((first + second) / 2, logits(truth, x), **TOL)


@LAYOUTS
@pytest.mark.parametrize("kind", ["Dinov2", "Dinov2WithRegisters"])
def test_hugging_face_dinov2(tmp_path, layout, kind):
    """The backbone. Its classifier reads class token and mean of the patches: the ViT's cannot."""
    truth = randomised(
        getattr(transformers, f"{kind}ForImageClassification")(getattr(transformers, f"{kind}Config")(**HF))
    )
    path, x = store(truth, tmp_path, layout), images()
    with pytest.raises(InputError, match="class token beside the mean of the patches.*num_classes="):
        ViT.from_pretrained(path, num_heads=HEADS)
    model = ViT.from_pretrained(path, num_heads=HEADS, num_classes=0).eval()
    backbone = truth.dinov2 if kind == "Dinov2" else truth.dinov2_with_registers
    with torch.no_grad():
        torch.testing.assert_close(model.forward_features(x), backbone(x).last_hidden_state, **TOL)
    assert model.config["norm_eps"] == 1e-6 and pick(model.config, *IMAGENET) == IMAGENET
    assert model.config["no_embed_class"] is (kind != "Dinov2")
    bare = store(backbone, tmp_path, "bare")
    agree(ViT.from_pretrained(bare, num_heads=HEADS), lambda x: backbone(x).last_hidden_state[:, 0])
