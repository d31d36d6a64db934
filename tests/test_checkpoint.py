"""Weights of every format, judged by the library that wrote them: its logits, or its own converter, on random weights."""

import argparse
import json
import pickle
import sys

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import torchvision
import transformers
from timm.layers import resample_abs_pos_embed
from timm.models import vision_transformer as timm_vit
from timm.models._hub import save_for_hf

from vitfast import InputError, ViT, load_checkpoint
from vitfast.checkpoint import read, save, write_atomically

TOL = dict(atol=1e-5, rtol=1e-5)  # fp32 on both sides, logits of size ~1; erf in the place of tanh moves them by more than 1e-4
D, DEPTH, HEADS, F, P, SIZE, CLASSES = 48, 2, 3, 96, 8, 32, 5
N = (SIZE // P) ** 2
SMALL = dict(img_size=SIZE, patch_size=P, embed_dim=D, depth=DEPTH, num_heads=HEADS, mlp_ratio=F / D, num_classes=CLASSES)
HF = dict(
    hidden_size=D, num_hidden_layers=DEPTH, num_attention_heads=HEADS, intermediate_size=F, image_size=SIZE, patch_size=P, num_labels=CLASSES,
    attn_implementation="eager", mlp_ratio=2,
)  # fmt: skip
IMAGENET = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randomised(model):
    """The model in eval mode with every parameter random, norms and positions too."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(std=0.3)
            if p.dim() == 1 and name.endswith(("weight", "gamma", "lambda1")):
                p.add_(1)
    return model.eval()


def images(*size, chans=3):
    return torch.randn(2, chans, *(size or (SIZE, SIZE)))


def logits(model, x):
    with torch.no_grad():
        out = model(x)
    return getattr(out, "logits", out)


def agree(model, truth, x=None):
    """Our logits are the other library's."""
    x = images() if x is None else x
    torch.testing.assert_close(logits(model.eval(), x), logits(truth, x), **TOL)


def pick(config, *names):
    return {name: config[name] for name in names}


def small_timm(**changes):
    return randomised(timm_vit.VisionTransformer(**{**SMALL, **changes}))


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
    truth = randomised(timm.create_model("vit_vitfast_checkpoint_test", pretrained_cfg_overlay=dict(mean=mean, std=std), **args))
    save_for_hf(truth, tmp_path, safe_serialization=True, model_args=args)
    model = ViT.from_pretrained(tmp_path)
    agree(model, truth, images(32, 16))
    assert model.mean == tuple(mean) and model.std == tuple(std) and model.config["img_size"] == (32, 16)
    agree(ViT.from_pretrained(tmp_path / "model.safetensors"), truth, images(32, 16))  # its config.json is beside it


def vit_vitfast_checkpoint_test(pretrained=False, **kwargs):
    return timm_vit._create_vision_transformer("vit_vitfast_checkpoint_test", pretrained=pretrained, **kwargs)


@pytest.mark.parametrize("name, act", [("vit_base_patch16_siglip_gap_224", "gelu_tanh"), ("vit_base_patch16_224", "gelu")])
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
    content = {wrapper: {prefix + k: v for k, v in truth.state_dict().items()}, "epoch": 3, "args": argparse.Namespace(lr=0.1)}
    if wrapper.endswith("ema"):
        content["state_dict"] = other.state_dict()
    torch.save(content, tmp_path / "last.pth.tar")
    loaded = load_checkpoint(tmp_path / "last.pth.tar")
    assert all(torch.equal(loaded[k], v) for k, v in truth.state_dict().items()) and len(loaded) == len(truth.state_dict())


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
    state = {k.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): v for k, v in truth.state_dict().items()}
    torch.save({"model": state}, tmp_path / "deit_3.pth")
    agree(ViT.from_pretrained(tmp_path / "deit_3.pth", num_heads=HEADS), truth)


# ---- Google


def google(big_vision=False, cls=True, table=True):
    """Random arrays as Flax's ViT (the paper's code), or big_vision's, names and shapes them."""
    rng = np.random.default_rng(0)

    def array(*shape):
        return rng.normal(scale=0.3, size=shape).astype(np.float32)

    a, m, n = (0, 0, 1) if big_vision else (1, 3, 2)
    mha, mlp, second = f"MultiHeadDotProductAttention_{a}", f"MlpBlock_{m}", f"LayerNorm_{n}"
    w = {"embedding/kernel": array(P, P, 3, D), "embedding/bias": array(D), "head/kernel": array(D, CLASSES), "head/bias": array(CLASSES)}
    w |= {"Transformer/encoder_norm/scale": 1 + array(D), "Transformer/encoder_norm/bias": array(D)}
    if cls:
        w["cls"] = array(1, 1, D)
    for i in range(DEPTH):
        block = f"Transformer/encoderblock_{i}/"
        for norm in ("LayerNorm_0", second):
            w |= {f"{block}{norm}/scale": 1 + array(D), f"{block}{norm}/bias": array(D)}
        for name in ("query", "key", "value"):
            w |= {f"{block}{mha}/{name}/kernel": array(D, HEADS, D // HEADS), f"{block}{mha}/{name}/bias": array(HEADS, D // HEADS)}
        w |= {f"{block}{mha}/out/kernel": array(HEADS, D // HEADS, D), f"{block}{mha}/out/bias": array(D)}
        w |= {f"{block}{mlp}/Dense_0/kernel": array(D, F), f"{block}{mlp}/Dense_0/bias": array(F)}
        w |= {f"{block}{mlp}/Dense_1/kernel": array(F, D), f"{block}{mlp}/Dense_1/bias": array(D)}
    if table:
        w["pos_embedding" if big_vision else "Transformer/posembed_input/pos_embedding"] = array(1, N if big_vision else N + 1, D)
    return w


def stacked(w):
    """All layers under one `encoderblock`, as big_vision's scan over layers keeps them."""
    first = "Transformer/encoderblock_0/"
    layers = {k[len(first) :]: np.stack([w[k.replace("block_0/", f"block_{i}/")] for i in range(DEPTH)]) for k in w if k.startswith(first)}
    return {k: v for k, v in w.items() if "encoderblock_" not in k} | {f"Transformer/encoderblock/{k}": v for k, v in layers.items()}


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
    extra = {"opt/state/step": np.array(7)} if "opt" in prefix else {"params/t": np.zeros(1, np.float32)} if "img" in prefix else {}
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
    w = google() | {"pre_logits/kernel": np.random.rand(D, 40).astype("f4"), "pre_logits/bias": np.random.rand(40).astype("f4")}
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
        [fun(at / 10_000 ** (j / (D // 4 - 1))) for at, fun in ((i % 4, np.sin), (i % 4, np.cos), (i // 4, np.sin), (i // 4, np.cos)) for j in range(D // 4)]
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
    np.savez(tmp_path / "w.npz", **{k: (np.ascontiguousarray(v).view(np.uint32) >> 16).astype(np.uint16).view("V2") for k, v in w.items()})
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
        assert any(k.startswith("vit.encoder.layer.0.attention.attention.query") for k in safetensors.torch.load_file(path / "model.safetensors"))
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
    changes = dict(image_size=[32, 16], num_channels=2, layer_norm_eps=0.1, hidden_act="gelu_new", qkv_bias=False, num_attention_heads=6)
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
    assert model.config["norm_eps"] == 1e-12 and pick(model.config, *IMAGENET) == IMAGENET and model.config["reg_tokens"] == 1


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
    truth = randomised(getattr(transformers, f"{kind}ForImageClassification")(getattr(transformers, f"{kind}Config")(**HF)))
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
    args = dict(image_size=SIZE, patch_size=P, num_layers=DEPTH, num_heads=HEADS, hidden_dim=D, mlp_dim=F, num_classes=CLASSES)
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


# ---- ours


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(act_layer="gelu_tanh", norm_eps=1e-3, mean=(0.1, 0.2, 0.3), std=0.7, residual_in_fp32=True, drop_path_rate=0.1),
        dict(pos_embed="sincos2d", class_token=False, global_pool="avg", img_size=(32, 16), patch_size=(8, 4)),
        dict(representation_size=40, init_values=0.1, reg_tokens=3, no_embed_class=True, weight_init="jax", head_init_bias=-1.0),
        dict(num_classes=0, dynamic_img_size=True, global_pool=""),
    ],
    ids=["plain", "numbers", "sincos", "head", "features"],
)
def test_round_trip(tmp_path, changes):
    model = randomised(ViT(**{**SMALL, **changes}))
    model.save_pretrained(tmp_path / "a" / "b")
    again = ViT.from_pretrained(tmp_path / "a" / "b").eval()
    assert again.config == model.config and again.mean == model.mean
    assert ViT(**again.config).config == model.config
    assert [*again.state_dict()] == [*model.state_dict()]
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in again.state_dict().items())
    assert {p.name for p in (tmp_path / "a" / "b").iterdir()} == {"model.safetensors", "config.json"}
    for x in (images(*model.patch_embed.img_size), torch.randint(0, 256, (2, 3, *model.patch_embed.img_size), dtype=torch.uint8)):
        assert torch.equal(logits(again, x), logits(model, x))
    content = json.loads((tmp_path / "a" / "b" / "config.json").read_text())
    assert pick(content, "library", "architecture") == dict(library="vitfast", architecture="ViT")


def test_round_trip_after_changes(tmp_path):
    model = ViT(**SMALL, global_pool="avg")
    model.set_input_size((16, 48))
    model.reset_classifier(7)
    randomised(model).save_pretrained(tmp_path)
    again = ViT.from_pretrained(tmp_path)
    assert again.config == model.config
    agree(again, model, images(16, 48))


def test_save_untidy_tensors(tmp_path):
    """Tied weights, transposed ones and views into larger memory."""
    model = randomised(ViT(**SMALL))
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight
    model.blocks[0].attn.proj.weight.data = model.blocks[0].attn.proj.weight.data.T
    model.cls_token.data = torch.randn(1, 5, D)[:, 2:3]
    save(model, tmp_path)
    agree(ViT.from_pretrained(tmp_path), model)


def test_half_precision_weights_load_into_fp32(tmp_path):
    model = randomised(ViT(**SMALL)).to(torch.bfloat16)
    save(model, tmp_path)
    again = ViT.from_pretrained(tmp_path)
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    assert all(torch.equal(v, model.state_dict()[k].float()) for k, v in again.state_dict().items())


def test_save_keeps_the_old_file_when_writing_fails(tmp_path):
    write_atomically(tmp_path / "x", lambda path: path.write_text("old"))

    def fail(path):
        path.write_text("half of the n")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(tmp_path / "x", fail)
    assert [p.name for p in tmp_path.iterdir()] == ["x"] and (tmp_path / "x").read_text() == "old"
    with pytest.raises(InputError, match="x: a file is in the way"):
        save(ViT(**SMALL), tmp_path / "x")


# ---- changes


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
    np.savez(tmp_path / "w.npz", **google() | {"pre_logits/kernel": np.ones((D, D), "f4"), "pre_logits/bias": np.ones(D, "f4")})
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


# ---- the hub


def hub_cache(folder, truth, names):
    """A repository as huggingface_hub caches it."""
    snapshot = folder / "models--owner--name" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (folder / "models--owner--name" / "refs").mkdir()
    (folder / "models--owner--name" / "refs" / "main").write_text("0" * 40)
    truth.save_pretrained(folder / "made")
    for name in names:
        (folder / "made" / name).rename(snapshot / name)


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))


def test_hub(tmp_path, offline):
    truth = randomised(transformers.ViTForImageClassification(transformers.ViTConfig(**HF)))
    hub_cache(tmp_path, truth, ("model.safetensors", "config.json"))
    agree(ViT.from_pretrained("hf-hub:owner/name"), truth)
    assert "blocks.0.attn.qkv.weight" in load_checkpoint("hf-hub:owner/name@main")


def test_hub_errors(tmp_path, offline, monkeypatch):
    with pytest.raises(InputError, match="^hf-hub:owner/nobody: no model.safetensors or pytorch_model.bin .*HF_HUB_OFFLINE"):
        load_checkpoint("hf-hub:owner/nobody")
    with pytest.raises(InputError, match="^hf-hub:no/such/form: the hub did not give"):
        load_checkpoint("hf-hub:no/such/form")
    hub_cache(tmp_path, randomised(transformers.ViTModel(transformers.ViTConfig(**HF))), ("model.safetensors",))
    with pytest.raises(InputError, match="config.json is not in the cache"):  # it may say another eps than the format's
        load_checkpoint("hf-hub:owner/name")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match="^hf-hub:owner/name: needs the package huggingface_hub"):
        load_checkpoint("hf-hub:owner/name")


# ---- what goes wrong


def test_unreadable_files(tmp_path):
    state = small_timm().state_dict()
    safetensors.torch.save_file(state, tmp_path / "cut.safetensors")
    torch.save(state, tmp_path / "cut.pth")
    np.savez(tmp_path / "cut.npz", **google())
    for path in sorted(tmp_path.iterdir()):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (tmp_path / "empty.pth").touch()
    (tmp_path / "empty.safetensors").touch()
    (tmp_path / "empty.npz").touch()
    (tmp_path / "text.pth").write_text("hello")
    with open(tmp_path / "inside_out.npz", "wb") as file:
        np.save(file, np.zeros(3))
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(InputError, match=f"^{path}: not a whole|^{path}: holds a ndarray") as caught:
            load_checkpoint(path)
        assert "\n" not in str(caught.value)


def test_pickles_are_not_run(tmp_path):
    ran = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return ran.touch, ()

    torch.save({"model": Evil()}, tmp_path / "evil.pth")
    with open(tmp_path / "evil.bin", "wb") as file:
        pickle.dump(Evil(), file, protocol=2)
    with open(tmp_path / "evil.npz", "wb") as file:
        pickle.dump(Evil(), file)
    np.savez(tmp_path / "objects.npz", **google(), extra=np.array([Evil()], dtype=object))
    torch.save(small_timm(), tmp_path / "model.pt")
    for name in ("evil.pth", "evil.bin", "evil.npz", "objects.npz", "model.pt"):
        with pytest.raises(InputError, match=f"{name}: .*Python objects.*save model.state_dict") as caught:
            load_checkpoint(tmp_path / name)
        assert "\n" not in str(caught.value)
    assert not ran.exists()


def test_wrong_paths(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.npz: no such file or folder"):
        load_checkpoint(tmp_path / "nowhere.npz")
    with pytest.raises(InputError, match="write hf-hub:owner/name"):
        load_checkpoint("owner/name")
    with pytest.raises(InputError, match="no weights in this folder; expected model.safetensors or pytorch_model.bin"):
        load_checkpoint(tmp_path)
    (tmp_path / "weights.h5").touch()
    with pytest.raises(InputError, match="weights.h5: unknown kind of weights file; known are .safetensors, .npz"):
        load_checkpoint(tmp_path / "weights.h5")
    for name in ("a.pth", "b.pth"):
        torch.save({}, tmp_path / name)
    with pytest.raises(InputError, match="several weights files .a.pth, b.pth."):
        load_checkpoint(tmp_path)
    torch.save(torch.zeros(3), tmp_path / "a.pth")
    with pytest.raises(InputError, match="a.pth: holds a Tensor, expected a dictionary"):
        load_checkpoint(tmp_path / "a.pth")
    with pytest.raises(InputError, match="b.pth: not a Vision Transformer"):
        load_checkpoint(tmp_path / "b.pth")


def test_other_architectures(tmp_path):
    torch.save(torchvision.models.resnet18().state_dict(), tmp_path / "resnet.pth")
    lists = "missing patch_embed.proj.weight, blocks.0.attn.qkv.weight, .*; unexpected conv1.weight, bn1.weight, bn1.bias and 119 more"
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
        ("conv_root/kernel", "hybrid"),
        ("opt/target/conv_root/kernel", "hybrid"),
        ("patch_embed.backbone.stem.conv.weight", "hybrid"),
        ("vit.embeddings.patch_embeddings.backbone.bit.embedder.convolution.weight", "hybrid"),
        ("params/img/MAPHead_0/probe", "attention pooling"),
        ("attn_pool.latent", "attention pooling"),
        ("conv_proj.conv_bn_relu_0.0.weight", "convolutional stem"),
        ("blocks.0.mlp.w12.weight", "gated MLP"),
        ("blocks.0.attn.rel_pos.relative_position_bias_table", "relative positions"),
        ("norm_pre.weight", "CLIP"),
        ("blocks.0.attn.q_norm.weight", "normalised queries"),
    ],
)
def test_not_yet(tmp_path, key, what):
    state = timm_vit.VisionTransformer(**SMALL).state_dict() | {key: torch.zeros(2)}
    torch.save(state, tmp_path / "w.pth")
    for call in (load_checkpoint, ViT.from_pretrained):
        with pytest.raises(InputError, match=f"w.pth: .*{what}.*not supported yet"):
            call(tmp_path / "w.pth")


@pytest.mark.parametrize(
    "overrides, message",
    [
        (dict(), "how many heads there are, and no preset has embed_dim=48, depth=2; pass num_heads="),
        (dict(num_heads=3, embed_dim=64), "a timm checkpoint with embed_dim=48, .*expected embed_dim=64, not 48.*cls_token is .1, 1, 48. for .1, 1, 64."),
        (dict(num_heads=3, depth=3), "expected depth=3, not 2; missing blocks.2.norm1.weight, .* and 9 more; unexpected none"),
        (dict(num_heads=3, depth=1), "expected depth=1, not 2; missing none; unexpected blocks.1.norm1.weight, .* and 9 more"),
        (dict(num_heads=3, patch_size=16), "expected patch_size=16, not 8"),
        (dict(num_heads=3, in_chans=1), "reads in_chans=3 channels, expected in_chans=1"),
        (dict(num_heads=3, mlp_ratio=4.0), "expected mlp_ratio=4.0, not 2.0"),
        (dict(num_heads=3, init_values=1e-5), "expected init_values=1e-05, not None; missing blocks.0.ls1.gamma"),
        (dict(num_heads=3, global_pool="avg", fc_norm=True), "expected fc_norm=True, not False; missing fc_norm.weight"),
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


@pytest.mark.parametrize(
    "content, message",
    [
        ("{not json", "config.json: not readable as JSON"),
        ("[1]", "config.json: expected a JSON object, got a list"),
        ('{"library": "vitfast", "warp": 9}', "config.json has 'warp', which vitfast .* does not know"),
        ('{"model_type": "vit", "hidden_act": "quick_gelu"}', "activation 'quick_gelu' is not supported"),
        ('{"model_type": "vit", "image_size": {"height": 32}}', "config.json is not one of timm, Hugging Face or vitfast"),
        ('{"architecture": "vit_base", "global_pool": "max"}', "global_pool='max' is not supported"),
        ('{"architecture": "vit_base_patch16_rpn_224"}', "vit_base_patch16_rpn_224 has blocks that vitfast does not have"),
    ],
)
def test_config_files_that_do_not_fit(tmp_path, content, message):
    save(ViT(**SMALL), tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        ViT.from_pretrained(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))


def test_tensors_of_odd_shapes(tmp_path):
    for key, shape in (("embedding/kernel", (P * P * 3, D)), ("Transformer/encoderblock_0/LayerNorm_0/scale", (7,)), ("cls", (D,)), ("head/bias", ())):
        np.savez(tmp_path / "w.npz", **{**google(), key: np.zeros(shape, "f4")})
        with pytest.raises(InputError, match="w.npz: "):
            ViT.from_pretrained(tmp_path / "w.npz")
