"""Weights of every format, judged by the library that wrote them: its logits, or its own converter, on random weights."""

import argparse
import json

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import torchvision
import transformers
from checkpoints import (
    CLASSES,
    DEPTH,
    HEADS,
    HF,
    IMAGENET,
    SIZE,
    SMALL,
    TOL,
    D,
    F,
    N,
    P,
    agree,
    google,
    images,
    logits,
    pick,
    randomised,
    small_timm,
    stacked,
)
from timm.models import vision_transformer as timm_vit
from timm.models._hub import save_for_hf

from vitfast import InputError, ViT, load_checkpoint

# ---- timm


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
    model = ViT.from_pretrained(tmp_path / "w.pth", num_heads=HEADS)
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
    timm.models.register_model(vit_vitfast_checkpoint_test)
    mean, std = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
    args = dict(SMALL, img_size=(32, 16), act_layer="gelu_tanh")
    truth = randomised(
        timm.create_model("vit_vitfast_checkpoint_test", pretrained_cfg_overlay=dict(mean=mean, std=std), **args)
    )
    save_for_hf(truth, tmp_path, safe_serialization=True, model_args=args)
    model = ViT.from_pretrained(tmp_path)
    agree(model, truth, images(32, 16))
    assert model.mean == tuple(mean) and model.std == tuple(std) and model.config["img_size"] == (32, 16)
    agree(ViT.from_pretrained(tmp_path / "model.safetensors"), truth, images(32, 16))  # its config.json is beside it


def vit_vitfast_checkpoint_test(pretrained=False, **kwargs):
    return timm_vit._create_vision_transformer("vit_vitfast_checkpoint_test", pretrained=pretrained, **kwargs)


@pytest.mark.parametrize(
    "name, act", [("vit_base_patch16_siglip_gap_224", "gelu_tanh"), ("vit_base_patch16_224", "gelu")]
)
def test_timm_flat_config(tmp_path, name, act):
    """The older config.json of timm is flat; SigLIP's activation is known by the model's name alone."""
    truth = small_timm(class_token=False, global_pool="avg", fc_norm=False, act_layer=act)
    torch.save(truth.state_dict(), tmp_path / "pytorch_model.bin")
    content = dict(architecture=name, mean=[0.2] * 3, std=[0.3] * 3, input_size=[3, 224, 224], num_classes=CLASSES)
    (tmp_path / "config.json").write_text(json.dumps(content))
    model = ViT.from_pretrained(tmp_path, num_heads=HEADS)
    agree(model, truth)
    assert model.mean == (0.2,) * 3 and model.config["img_size"] == SIZE


@pytest.mark.parametrize("wrapper", ["model", "state_dict", "state_dict_ema", "model_ema"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "model."])
def test_wrappers(tmp_path, wrapper, prefix):
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
    agree(ViT.from_pretrained(tmp_path / "deit_3.pth", num_heads=HEADS), truth)


# ---- Google


@pytest.mark.parametrize(
    "big_vision, prefix, stack",
    [
        (False, "", False),
        (False, "opt/target/", False),
        (True, "", False),
        (True, "", True),
        (True, "params/", False),
        (True, "params/", True),
        (True, "params/img/", False),
    ],
)
def test_google_npz_as_timm_reads_it(tmp_path, big_vision, prefix, stack):
    w = google(big_vision)
    w = stacked(w) if stack else w
    extra = (
        {"opt/state/step": np.array(7)}
        if "opt" in prefix
        else {"params/t": np.zeros(1, np.float32)}
        if "img" in prefix
        else {}
    )
    np.savez(tmp_path / "w.npz", **{prefix + k: v for k, v in w.items()}, **extra)
    truth = timm_vit.VisionTransformer(**SMALL, no_embed_class=big_vision, act_layer="gelu_tanh").eval()
    truth.load_pretrained(str(tmp_path / "w.npz"))
    state = load_checkpoint(tmp_path / "w.npz")
    assert state.keys() == truth.state_dict().keys()
    assert all(torch.equal(state[k], v) for k, v in truth.state_dict().items())
    model = ViT.from_pretrained(tmp_path / "w.npz")  # the head count is in the shape of the query kernel
    agree(model, truth)
    assert pick(model.config, "act_layer", "norm_eps", "num_heads", "no_embed_class") == dict(
        act_layer="gelu_tanh", norm_eps=1e-6, num_heads=HEADS, no_embed_class=big_vision
    )
    assert model.mean == model.std == (0.5,) * 3


def test_google_pre_logits(tmp_path):
    """The 21k head: tanh(x W + b) before the last layer, which timm drops."""
    w = google() | {
        "pre_logits/kernel": np.random.rand(D, 40).astype("f4"),
        "pre_logits/bias": np.random.rand(40).astype("f4"),
    }
    w["head/kernel"] = np.random.rand(40, CLASSES).astype("f4")
    np.savez(tmp_path / "w.npz", **w)
    model, x = ViT.from_pretrained(tmp_path / "w.npz").eval(), images()
    assert model.config["representation_size"] == 40
    truth = timm_vit.VisionTransformer(**{**SMALL, "num_classes": 0}, act_layer="gelu_tanh").eval()
    truth.load_pretrained(str(tmp_path / "w.npz"))
    hidden = np.tanh(logits(truth, x).numpy() @ w["pre_logits/kernel"] + w["pre_logits/bias"])
    np.testing.assert_allclose(logits(model, x), hidden @ w["head/kernel"] + w["head/bias"], **TOL)


@pytest.mark.parametrize("cls", [False, True])
def test_big_vision_computed_positions(tmp_path, cls):
    """No table in the file: big_vision's posemb_sincos_2d, written out here entry by entry. Without a class token it pools after the norm."""
    table = [
        [
            fun(at / 10_000 ** (j / (D // 4 - 1)))
            for at, fun in ((i % 4, np.sin), (i % 4, np.cos), (i // 4, np.sin), (i // 4, np.cos))
            for j in range(D // 4)
        ]
        for i in range(N)
    ]
    w = google(big_vision=True, cls=cls, table=False)
    np.savez(tmp_path / "w.npz", **w)
    np.savez(tmp_path / "full.npz", **w, pos_embedding=np.array([table], np.float32))
    pooling = dict(class_token=cls, global_pool="token" if cls else "avg", fc_norm=False)
    truth = timm_vit.VisionTransformer(**SMALL, **pooling, no_embed_class=True, act_layer="gelu_tanh").eval()
    truth.load_pretrained(str(tmp_path / "full.npz"))
    model = ViT.from_pretrained(tmp_path / "w.npz", img_size=SIZE)
    assert pick(model.config, "pos_embed", *pooling) == dict(pos_embed="sincos2d", **pooling)
    torch.testing.assert_close(model.state_dict()["pos_embed"], truth.pos_embed.data, atol=1e-6, rtol=0)
    agree(model, truth)


def test_bfloat16_npz(tmp_path):
    """NumPy stores bfloat16 as two raw bytes; the values are the upper halves of the floats."""
    w = {k: (v.view(np.uint32) & 0xFFFF0000).view(np.float32) for k, v in google().items()}
    np.savez(
        tmp_path / "w.npz",
        **{k: (np.ascontiguousarray(v).view(np.uint32) >> 16).astype(np.uint16).view("V2") for k, v in w.items()},
    )
    np.savez(tmp_path / "full.npz", **w)
    state, full = load_checkpoint(tmp_path / "w.npz"), load_checkpoint(tmp_path / "full.npz")
    assert state["cls_token"].dtype == torch.bfloat16 and all(torch.equal(state[k].float(), v) for k, v in full.items())
    model = ViT.from_pretrained(tmp_path / "w.npz")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model.cls_token, full["cls_token"])


# ---- Hugging Face


def store(truth, folder, layout):
    """As save_pretrained writes it (transformers 4's names), or transformers 5's names in memory, with or without config.json."""
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
    """Other than the defaults: eps, activation, heads, image size, channels, no qkv bias, pixel statistics."""
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
    torch.testing.assert_close((features[:, 0] @ state["head.weight"].T + features[:, 1] @ state["head_dist.weight"].T) / 2
                               + (state["head.bias"] + state["head_dist.bias"]) / 2, logits(truth, x), **TOL)  # fmt: skip


def test_distilled_deit_of_timm(tmp_path):
    truth = randomised(timm.models.deit.VisionTransformerDistilled(**SMALL))
    torch.save({"model": truth.state_dict()}, tmp_path / "w.pth")
    with pytest.raises(InputError, match="distilled DeiT has two heads"):
        ViT.from_pretrained(tmp_path / "w.pth", num_heads=HEADS)
    model, x = ViT.from_pretrained(tmp_path / "w.pth", num_heads=HEADS, num_classes=7).eval(), images()
    with torch.no_grad():
        torch.testing.assert_close(model.forward_features(x), truth.forward_features(x), **TOL)
    assert not logits(model, x).any()


@LAYOUTS
@pytest.mark.parametrize("kind", ["Dinov2", "Dinov2WithRegisters"])
def test_hugging_face_dinov2(tmp_path, layout, kind):
    """The backbone. Its classifier reads the class token beside the mean of the patches: the ViT's cannot."""
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


# ---- torchvision, Facebook's DINOv2


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
