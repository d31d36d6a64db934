"""Our own files, changes on load, the hub, and one clear line for whatever is wrong with a checkpoint."""

import json
import pickle
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
import torchvision
import transformers
from checkpoints import (
    CLASSES,
    HEADS,
    HF,
    SIZE,
    SMALL,
    TOL,
    D,
    P,
    agree,
    google,
    images,
    logits,
    pick,
    randomised,
    small_timm,
)
from timm.layers import resample_abs_pos_embed
from timm.models import vision_transformer as timm_vit

from vitfast import InputError, ViT, load_checkpoint
from vitfast.checkpoint import read, save
from vitfast.files import write_atomically

# ---- ours


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(
            act_layer="gelu_tanh",
            norm_eps=1e-3,
            mean=(0.1, 0.2, 0.3),
            std=0.7,
            residual_in_fp32=True,
            drop_path_rate=0.1,
        ),
        dict(pos_embed="sincos2d", class_token=False, global_pool="avg", img_size=(32, 16), patch_size=(8, 4)),
        dict(
            representation_size=40,
            init_values=0.1,
            reg_tokens=3,
            no_embed_class=True,
            weight_init="jax",
            head_init_bias=-1.0,
        ),
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
    for x in (
        images(*model.patch_embed.img_size),
        torch.randint(0, 256, (2, 3, *model.patch_embed.img_size), dtype=torch.uint8),
    ):
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
    with pytest.raises(
        InputError, match="^hf-hub:owner/nobody: no model.safetensors or pytorch_model.bin .*HF_HUB_OFFLINE"
    ):
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
        ("patch_embed.backbone.layers.0.weight", "hybrid"),
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
        (
            dict(num_heads=3, embed_dim=64),
            "a timm checkpoint with embed_dim=48, .*expected embed_dim=64, not 48.*cls_token is .1, 1, 48. for .1, 1, 64.",
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


@pytest.mark.parametrize(
    "content, message",
    [
        ("{not json", "config.json: not readable as JSON"),
        ("[1]", "config.json: expected a JSON object, got a list"),
        ('{"library": "vitfast", "warp": 9}', "config.json has 'warp', which vitfast .* does not know"),
        ('{"model_type": "vit", "hidden_act": "quick_gelu"}', "activation 'quick_gelu' is not supported"),
        (
            '{"model_type": "vit", "image_size": {"height": 32}}',
            "config.json is not one of timm, Hugging Face or vitfast",
        ),
        ('{"architecture": "vit_base", "global_pool": "max"}', "global_pool='max' is not supported"),
        (
            '{"architecture": "vit_base_patch16_rpn_224"}',
            "vit_base_patch16_rpn_224 has blocks that vitfast does not have",
        ),
    ],
)
def test_config_files_that_do_not_fit(tmp_path, content, message):
    save(ViT(**SMALL), tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        ViT.from_pretrained(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))


def test_tensors_of_odd_shapes(tmp_path):
    for key, shape in (
        ("embedding/kernel", (P * P * 3, D)),
        ("Transformer/encoderblock_0/LayerNorm_0/scale", (7,)),
        ("cls", (D,)),
        ("head/bias", ()),
    ):
        np.savez(tmp_path / "w.npz", **{**google(), key: np.zeros(shape, "f4")})
        with pytest.raises(InputError, match="w.npz: "):
            ViT.from_pretrained(tmp_path / "w.npz")
