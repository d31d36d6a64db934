"""Arguments of from_pretrained: another size, other classes, and what the tensors do not allow."""

import numpy as np
import pytest
import torch
import torchvision
from checkpoints import CLASSES, HEADS, SIZE, SMALL, TOL, D, P, agree, google, images, logits, small_timm
from timm.layers import resample_abs_pos_embed
from timm.models import vision_transformer as timm_vit

from vitfast import InputError, ViT, load_checkpoint
from vitfast.checkpoint import read, save


@pytest.fixture
def saved(tmp_path):
    truth = small_timm()
    torch.save(truth.state_dict(), tmp_path / "w.pth")
    return truth, tmp_path / "w.pth"


@pytest.mark.parametrize("size", [64, 24, (16, 64)])
def test_another_image_size(saved, size):
    truth, path = saved
    model = ViT.from_pretrained(path, num_heads=HEADS, img_size=size)
    height, width = (size, size) if isinstance(size, int) else size
    positions = resample_abs_pos_embed(truth.pos_embed.data, (height // P, width // P))
    torch.testing.assert_close(model.pos_embed.data, positions, atol=1e-6, rtol=0)
    truth.set_input_size((height, width))
    agree(model, truth, images(height, width))
    assert model.config["img_size"] == (height, width)


def test_another_number_of_classes(saved):
    truth, path = saved
    model, x = ViT.from_pretrained(path, num_heads=HEADS, num_classes=9).eval(), images()
    with torch.no_grad():
        torch.testing.assert_close(model.forward_features(x), truth.forward_features(x), **TOL)
    assert logits(model, x).shape == (2, 9) and not logits(model, x).any()
    headless = ViT.from_pretrained(path, num_heads=HEADS, num_classes=0)
    assert headless.num_classes == 0 and not any(k.startswith("head") for k in headless.state_dict())
    truth.reset_classifier(0)
    agree(headless, truth)
    agree(ViT.from_pretrained(path, num_heads=HEADS, num_classes=CLASSES, img_size=SIZE), small_timm_like(saved))


def small_timm_like(saved):
    truth = timm_vit.VisionTransformer(**SMALL).eval()
    truth.load_state_dict(torch.load(saved[1]))
    return truth


def test_new_head_replaces_the_hidden_layer_too(tmp_path):
    np.savez(
        tmp_path / "w.npz",
        **google() | {"pre_logits/kernel": np.ones((D, D), "f4"), "pre_logits/bias": np.ones(D, "f4")},
    )
    model = ViT.from_pretrained(tmp_path / "w.npz", num_classes=2)
    assert model.config["representation_size"] is None and not any("pre_logits" in k for k in model.state_dict())


def test_other_overrides(saved):
    truth, path = saved
    plain = dict(drop_path_rate=0.2, mean=0.1, dynamic_img_size=True, residual_in_fp32=True)
    model = ViT.from_pretrained(path, num_heads=HEADS, global_pool="avg", embed_dim=D, **plain)
    assert model.blocks[-1].drop_path_rate == 0.2 and model.mean == (0.1,) * 3 and model.config["global_pool"] == "avg"
    truth.global_pool = "avg"  # timm's own norm stays before the pooling here
    agree(model, truth)
    assert logits(model, images(48, 16)).shape == (2, CLASSES)
    config = read(path, num_heads=HEADS)[1]
    assert ViT(**config).load_state_dict(read(path, num_heads=HEADS)[0], strict=True)


def test_other_architectures(tmp_path):
    torch.save(torchvision.models.resnet18().state_dict(), tmp_path / "resnet.pth")
    lists = "missing patch_embed.proj.weight, blocks.0.attn.qkv.weight, .*; "
    lists += "unexpected conv1.weight, bn1.weight, bn1.bias and 119 more"
    for call in (load_checkpoint, ViT.from_pretrained):
        with pytest.raises(InputError, match=f"resnet.pth: not a Vision Transformer as timm, .*{lists}"):
            call(tmp_path / "resnet.pth")
    truth = timm_vit.VisionTransformer(**SMALL)
    state = truth.state_dict() | {f"blocks.0.extra_{i}.weight": torch.zeros(2) for i in range(5)}
    del state["norm.weight"]
    torch.save(state, tmp_path / "odd.pth")
    lists = "missing norm.weight; unexpected blocks.0.extra_0.weight, .* and 2 more"
    with pytest.raises(InputError, match=f"odd.pth: a timm checkpoint with embed_dim=48, .*{lists}"):
        ViT.from_pretrained(tmp_path / "odd.pth", num_heads=HEADS)


@pytest.mark.parametrize(
    "key, what",
    [
        ("patch_embed.backbone.layers.0.weight", "hybrid"),
        ("vit.embeddings.patch_embeddings.backbone.bit.embedder.convolution.weight", "hybrid"),
        ("params/img/MAPHead_0/probe", "attention pooling"),
        ("rope.freqs", "learned rotary positions"),
        ("conv_proj.conv_bn_relu_0.0.weight", "convolutional stem"),
        ("blocks.0.attn.rel_pos.relative_position_bias_table", "relative positions"),
        ("blocks.0.attn.norm.weight", "norms inside attention"),
    ],
)
def test_tensors_of_variants_the_vit_lacks_are_refused(tmp_path, key, what):
    state = timm_vit.VisionTransformer(**SMALL).state_dict() | {key: torch.zeros(2)}
    torch.save(state, tmp_path / "w.pth")
    for call in (load_checkpoint, ViT.from_pretrained):
        with pytest.raises(InputError, match=f"w.pth: .*{what}.*not supported yet"):
            call(tmp_path / "w.pth")


@pytest.mark.parametrize(
    "overrides, message",
    [
        (dict(), "how many heads there are, and no preset has embed_dim=48, depth=2; pass num_heads="),
        (
            dict(num_heads=3, embed_dim=64),
            "a timm checkpoint with embed_dim=48, .*expected embed_dim=64, not 48.*"
            "cls_token is .1, 1, 48. for .1, 1, 64.",
        ),
        (
            dict(num_heads=3, depth=3),
            "expected depth=3, not 2; missing blocks.2.norm1.weight, .* and 9 more; unexpected none",
        ),
        (
            dict(num_heads=3, depth=1),
            "expected depth=1, not 2; missing none; unexpected blocks.1.norm1.weight, .* and 9 more",
        ),
        (dict(num_heads=3, patch_size=16), "expected patch_size=16, not 8"),
        (dict(num_heads=3, in_chans=1), "reads in_chans=3 channels, expected in_chans=1"),
        (dict(num_heads=3, mlp_ratio=4.0), "expected mlp_ratio=4.0, not 2.0"),
        (dict(num_heads=3, init_values=1e-5), "expected init_values=1e-05, not None; missing blocks.0.ls1.gamma"),
        (
            dict(num_heads=3, global_pool="avg", fc_norm=True),
            "expected fc_norm=True, not False; missing fc_norm.weight",
        ),
        (dict(num_heads=3, img_size=33), "image size 33 x 33 is no multiple"),
        (dict(num_heads=3, num_clases=2), "unknown argument of from_pretrained 'num_clases'; did you mean num_classes"),
    ],
)
def test_overrides_that_do_not_fit(saved, overrides, message):
    with pytest.raises(InputError, match=message):
        ViT.from_pretrained(saved[1], **overrides)


def test_heads_that_contradict_the_config(tmp_path):
    save(ViT(**SMALL), tmp_path)
    with pytest.raises(InputError, match="expected num_heads=6, not 3"):
        ViT.from_pretrained(tmp_path, num_heads=6)


def test_positions_that_are_no_square(tmp_path):
    truth = small_timm(img_size=(16, 64 + 8))
    torch.save(truth.state_dict(), tmp_path / "w.pth")
    with pytest.raises(InputError, match="w.pth: a position table of 19 entries is no square grid; pass img_size="):
        ViT.from_pretrained(tmp_path / "w.pth", num_heads=HEADS)
    agree(ViT.from_pretrained(tmp_path / "w.pth", num_heads=HEADS, img_size=(16, 72)), truth, images(16, 72))
