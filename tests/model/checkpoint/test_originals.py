"""Weights of Google, torchvision, Meta and OpenAI, judged by timm, torchvision and open_clip on random weights."""

import logging
import re

import checkpoints as c
import numpy as np
import open_clip
import pytest
import timm
import torch
import torchvision
import transformers
from timm.models import eva
from timm.models import vision_transformer as timm_vit

from vitfast import ViT, load_checkpoint
from vitfast.model.convert import write

FLAX, BIG_VISION = [("", False), ("opt/target/", False)], [("", True), ("params/", False), ("params/img/", True)]


@pytest.mark.parametrize(
    "big_vision, prefix, stack", [*((False, *row) for row in FLAX), *((True, *row) for row in BIG_VISION)]
)
def test_google_npz_as_timm_reads_it(tmp_path, big_vision, prefix, stack):
    w = c.google(big_vision)
    w = c.stacked(w) if stack else w
    extra = {"opt/": {"opt/state/step": np.array(7)}, "params/img/": {"params/t": np.zeros(1, np.float32)}}
    more = next((tensors for start, tensors in extra.items() if prefix.startswith(start)), {})
    np.savez(tmp_path / "w.npz", **{prefix + k: v for k, v in w.items()}, **more)
    truth = timm_vit.VisionTransformer(**c.SMALL, no_embed_class=big_vision, act_layer="gelu_tanh").eval()
    truth.load_pretrained(str(tmp_path / "w.npz"))
    assert c.same(load_checkpoint(tmp_path / "w.npz"), truth.state_dict())
    model = ViT.from_pretrained(tmp_path / "w.npz")  # the head count is in the shape of the query kernel
    c.agree(model, truth)
    wanted = dict(act_layer="gelu_tanh", norm_eps=1e-6, num_heads=c.HEADS, no_embed_class=big_vision)
    assert c.pick(model.config, *wanted) == wanted and model.mean == model.std == (0.5,) * 3
    assert write(model, tmp_path / "back.npz", "npz") == []
    again, first = dict(np.load(tmp_path / "back.npz")), c.google(big_vision)
    assert again.keys() == first.keys() and all(np.array_equal(again[k], v) for k, v in first.items())


def test_google_pre_logits(tmp_path):
    """The 21k head: tanh(x W + b) before the last layer, which timm drops; a new head replaces both."""
    w = c.google() | {
        "pre_logits/kernel": np.random.rand(c.D, 40).astype("f4"),
        "pre_logits/bias": np.random.rand(40).astype("f4"),
    }
    w["head/kernel"] = np.random.rand(40, c.CLASSES).astype("f4")
    np.savez(tmp_path / "w.npz", **w)
    model, x = ViT.from_pretrained(tmp_path / "w.npz").eval(), c.images()
    assert model.config["representation_size"] == 40
    truth = timm_vit.VisionTransformer(**{**c.SMALL, "num_classes": 0}, act_layer="gelu_tanh").eval()
    truth.load_pretrained(str(tmp_path / "w.npz"))
    hidden = np.tanh(c.logits(truth, x).numpy() @ w["pre_logits/kernel"] + w["pre_logits/bias"])
    np.testing.assert_allclose(c.logits(model, x), hidden @ w["head/kernel"] + w["head/bias"], **c.TOL)
    model = ViT.from_pretrained(tmp_path / "w.npz", num_classes=2)
    assert model.config["representation_size"] is None and not any("pre_logits" in k for k in model.state_dict())


@pytest.mark.parametrize("cls", [False, True])
def test_big_vision_computed_positions(tmp_path, cls):
    """No table in the file: big_vision's posemb_sincos_2d, written out here entry by entry.

    Without a class token it pools after the norm.
    """
    table = [
        [
            fun(at / 10_000 ** (j / (c.D // 4 - 1)))
            for at, fun in ((i % 4, np.sin), (i % 4, np.cos), (i // 4, np.sin), (i // 4, np.cos))
            for j in range(c.D // 4)
        ]
        for i in range(c.N)
    ]
    w = c.google(big_vision=True, cls=cls, table=False)
    np.savez(tmp_path / "w.npz", **w)
    np.savez(tmp_path / "full.npz", **w, pos_embedding=np.array([table], np.float32))
    pooling = dict(class_token=cls, global_pool="token" if cls else "avg", fc_norm=False)
    truth = timm_vit.VisionTransformer(**c.SMALL, **pooling, no_embed_class=True, act_layer="gelu_tanh").eval()
    truth.load_pretrained(str(tmp_path / "full.npz"))
    model = ViT.from_pretrained(tmp_path / "w.npz", img_size=c.SIZE)
    assert c.pick(model.config, "pos_embed", *pooling) == dict(pos_embed="sincos2d", **pooling)
    torch.testing.assert_close(model.state_dict()["pos_embed"], truth.pos_embed.data, atol=1e-6, rtol=0)
    c.agree(model, truth)


def test_bfloat16_npz(tmp_path):
    """NumPy stores bfloat16 as two raw bytes; the values are the upper halves of the floats."""
    w = {k: (v.view(np.uint32) & 0xFFFF0000).view(np.float32) for k, v in c.google().items()}
    halves = {k: (np.ascontiguousarray(v).view(np.uint32) >> 16).astype(np.uint16).view("V2") for k, v in w.items()}
    np.savez(tmp_path / "w.npz", **halves)
    np.savez(tmp_path / "full.npz", **w)
    state, full = load_checkpoint(tmp_path / "w.npz"), load_checkpoint(tmp_path / "full.npz")
    assert state["cls_token"].dtype == torch.bfloat16 and all(torch.equal(state[k].float(), v) for k, v in full.items())
    model = ViT.from_pretrained(tmp_path / "w.npz")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model.cls_token, full["cls_token"])


@pytest.mark.parametrize("older, representation_size", [(False, 40), (True, None)])
def test_torchvision(tmp_path, older, representation_size):
    sizes = dict(image_size=c.SIZE, patch_size=c.P, num_layers=c.DEPTH, num_heads=c.HEADS, hidden_dim=c.D, mlp_dim=c.F)
    more = dict(num_classes=c.CLASSES, representation_size=representation_size)
    truth = c.randomised(torchvision.models.VisionTransformer(**sizes, **more))
    state = truth.state_dict()
    if older:
        state = {k.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): v for k, v in state.items()}
    torch.save(state, tmp_path / "vit_b_16.pth")
    model = ViT.from_pretrained(tmp_path / "vit_b_16.pth", num_heads=c.HEADS)
    c.agree(model, truth)
    wanted = dict(**c.IMAGENET, norm_eps=1e-6, representation_size=representation_size)
    assert c.pick(model.config, *wanted) == wanted
    write(model, tmp_path / "back.pth", "torchvision")
    assert c.same(torch.load(tmp_path / "back.pth", weights_only=True), truth.state_dict())


@pytest.mark.parametrize("registers", [0, 4])
def test_facebook_dinov2(tmp_path, registers):
    """Their names are timm's but for the registers and a mask token; timm's own conversion is the judge."""
    truth = c.small_timm(num_classes=0, init_values=1e-5, reg_tokens=registers, no_embed_class=registers > 0)
    state = {k: torch.randn_like(v) * 0.3 for k, v in truth.state_dict().items() if k not in ("reg_token", "pos_embed")}
    state |= {"pos_embed": torch.randn(1, c.N + 1, c.D), "mask_token": torch.randn(1, c.D)}
    if registers:
        state["register_tokens"] = torch.randn(1, registers, c.D)
    torch.save(state, tmp_path / "dinov2.pth")
    truth.load_state_dict(timm_vit.checkpoint_filter_fn(dict(state), truth), strict=True)
    model = ViT.from_pretrained(tmp_path / "dinov2.pth", num_heads=c.HEADS)
    c.agree(model, truth)
    assert c.pick(model.config, *c.IMAGENET) == c.IMAGENET and model.config["reg_tokens"] == registers


# ---- Meta's DINOv3


@pytest.mark.parametrize(
    "name, base",
    [
        ("vit_small_patch16_dinov3_qkvb", 100),
        ("vit_small_patch16_dinov3_qkvb", 50),
        ("vit_small_plus_patch16_dinov3_qkvb", 100),
        ("vit_7b_patch16_dinov3", 100),  # without any bias of qkv
    ],
)
def test_metas_dinov3(tmp_path, name, base, caplog):
    options = c.WITHOUT_HEAD | dict(global_pool="token") | ({} if base == 100 else dict(rope_temperature=base))
    state = c.meta(c.randomised(timm.create_model(name, **options)), base)
    truth = timm.create_model(name, **options).eval()
    truth.load_state_dict(eva.checkpoint_filter_fn(dict(state), truth), strict=True)
    state |= {f"cls_{key}": state[key] for key in ("norm.weight", "norm.bias")}  # the same norm for the class token
    torch.save({"teacher": 0, "model": state}, tmp_path / "dinov3.pth")
    with caplog.at_level(logging.WARNING, "vitfast"):
        model = ViT.from_pretrained(tmp_path / "dinov3.pth")  # the periods tell the heads
    for size in ((32, 32), (16, 48)):
        c.agree(model, truth, c.images(*size))
    rounded = r"rope_embed.periods are rounded, by up to [\d.]+e-0[34]: the ViT takes the exact ones"
    assert re.search(rounded, caplog.text)
    assert c.pick(model.config, *c.IMAGENET) == c.IMAGENET and model.config["rope_temperature"] == base
    if base == 100:
        plain = {key: value for key, value in state.items() if not key.startswith("rope_embed")}
        torch.save(plain, tmp_path / "without.pth")
        c.agree(ViT.from_pretrained(tmp_path / "without.pth", num_heads=c.HEADS), truth)


# ---- OpenAI's CLIP


@pytest.mark.parametrize(
    "act, layout",
    [("quick_gelu", "whole"), ("quick_gelu", "half precision"), ("gelu", "wrapped"), ("quick_gelu", "tower")],
)
def test_openais_clip(tmp_path, act, layout, caplog):
    """open_clip's model of images and texts, OpenAI's code with OpenAI's names."""
    vision = dict(layers=2, width=48, head_width=16, patch_size=8, image_size=32)
    text = dict(context_length=9, vocab_size=99, width=24, heads=2, layers=1)
    truth, x = c.randomised(open_clip.CLIP(40, vision, text, quick_gelu=act == "quick_gelu")), c.images()
    state = truth.state_dict() | {"input_resolution": torch.tensor(32), "vocab_size": torch.tensor(99)}
    if layout == "half precision":  # OpenAI's files hold it
        state = {key: value.half() if value.is_floating_point() else value for key, value in state.items()}
        truth.load_state_dict({key: value for key, value in state.items() if value.dim() or key == "logit_scale"})
    if layout == "tower":
        state = {key.removeprefix("visual."): value for key, value in state.items() if key.startswith("visual.")}
    elif layout == "wrapped":  # of open_clip's training
        state = {"epoch": 3, "state_dict": {f"module.{key}": value for key, value in state.items()}}
    torch.save(state, tmp_path / "clip.pth")
    chosen = {} if act == "quick_gelu" else dict(act_layer=act)
    with caplog.at_level(logging.WARNING, "vitfast"):
        model = ViT.from_pretrained(tmp_path / "clip.pth", num_heads=c.HEADS, **chosen)
    c.agree(model, truth.encode_image, x)
    said = "the weights do not say img_size=32, act_layer='quick_gelu', global_pool='token', norm_eps=1e-05: assumed"
    assert (said in caplog.text) == (act == "quick_gelu")
    assert ("left out" in caplog.text and "text_projection" not in model.state_dict()) == (layout != "tower")
    features = ViT.from_pretrained(tmp_path / "clip.pth", num_heads=c.HEADS, num_classes=0, **chosen)
    truth.visual.proj = None
    c.agree(features, truth.encode_image, x)
    processor = transformers.CLIPImageProcessor()
    assert (model.mean, model.std) == (tuple(processor.image_mean), tuple(processor.image_std))
