"""The hybrids against timm's models and loader, and the paper's numbers."""

import sys
from functools import partial

import numpy as np
import pytest
import timm
import torch
from checkpoints import google, pick, same
from checks import assert_close, gradients, randomize
from timm.layers import HybridEmbed as TimmEmbed
from timm.layers import StdConv2dSame
from timm.models.resnetv2 import ResNetV2
from timm.models.vision_transformer import VisionTransformer, _load_weights
from timm.optim import param_groups_layer_decay

from vitfast import InputError, ViT, load_checkpoint

LAYERS, WIDTH = (1, 2), 0.5  # a narrow ResNet, 1/8 of the image's size
SIZES = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=5)
NARROW = dict(SIZES, backbone=dict(layers=LAYERS, width=WIDTH))
TOL = dict(atol=1e-4, rtol=1e-5)  # fp32, in another order of sums


def timm_narrow(**changes) -> VisionTransformer:
    plain = dict(num_classes=0, global_pool="", preact=False, stem_type="same")
    cnn = ResNetV2(LAYERS, width_factor=WIDTH, conv_layer=partial(StdConv2dSame, eps=1e-8), **plain)
    args = dict(SIZES, patch_size=1, embed_layer=partial(TimmEmbed, backbone=cnn))
    return VisionTransformer(**args | changes)


@pytest.fixture(scope="module")
def pair():
    torch.manual_seed(0)
    ours, theirs = ViT(**NARROW).eval(), randomize(timm_narrow(), 0.1)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


# Parameters of the two that timm has, and of the others by what their parts have there.
L_AFTER_B = 304_326_632 - 1024 * 3 * 16 * 16 - (86_567_656 - 768 * 3 * 16 * 16)  # without patch projection
L32, B_AFTER_L = 328_994_856, 88_224_232 - 768 * (3 * 32 * 32 + 1) - 306_535_400 + 1024 * (3 * 32 * 32 + 1)
PRESETS = {
    "R50+B/16": (98_659_112, "vit_base_r50_s16_384"),
    "R50+L/32": (L32, "vit_large_r50_s32_224"),
    "R50+B/32": (L32 + B_AFTER_L + (768 - 1024) * (2048 + 1), ""),
    "R50+L/16": (98_659_112 + L_AFTER_B + (1024 - 768) * 1024, ""),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_papers_parameters(name):
    parameters, peer = PRESETS[name]
    units, patch = ([3, 4, 9], 16) if name.endswith("16") else ([3, 4, 6, 3], 32)
    with torch.device("meta"):
        model = ViT.from_preset(name)
        theirs = timm.create_model(peer, img_size=224).state_dict() if peer else model.state_dict()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert {k: v.shape for k, v in model.state_dict().items()} == {k: v.shape for k, v in theirs.items()}
    assert [len(stage.blocks) for stage in model.patch_embed.backbone.stages] == units
    assert model.patch_embed.grid_size == (224 // patch,) * 2
    assert model.feature_info[-1]["reduction"] == patch == model.patch_embed.feat_ratio()


def test_logits_and_gradients_equal_timms(pair):
    ours, theirs = pair
    x, upstream = torch.randn(2, 3, 32, 32), torch.randn(2, 5)
    ya, yb = ours(x), theirs(x)
    assert_close(ya, yb, **TOL)
    mine, expected = gradients(ours, ya, upstream), gradients(theirs, yb, upstream)
    assert mine.keys() == expected.keys() == dict(ours.named_parameters()).keys()
    for key in expected:
        assert expected[key].abs().max() > 0, key
        assert_close(mine[key], expected[key], atol=1e-4 * max(1.0, expected[key].abs().max().item()), name=key)
    ours.set_grad_checkpointing()
    assert ours.grad_checkpointing and all(stage.grad_checkpointing for stage in ours.patch_embed.backbone.stages)
    for key, again in gradients(ours, ours(x), upstream).items():
        assert_close(again, mine[key], atol=1e-5 * max(1.0, mine[key].abs().max().item()), name=key)
    ours.set_grad_checkpointing(False)


def test_layers_decay_as_timms(pair):
    told = []
    for model in pair:
        groups = param_groups_layer_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.75)
        told.append([(g["lr_scale"], g["weight_decay"], sum(p.numel() for p in g["params"])) for g in groups])
    assert told[0] == told[1]


def test_other_sizes_saved_and_loaded(pair, tmp_path):
    ours, _ = pair
    x, other = torch.randn(2, 3, 32, 32), torch.randn(2, 3, 24, 48)
    ours.save_pretrained(tmp_path)
    again = ViT.from_pretrained(tmp_path).eval()
    assert again.config == ours.config and again.config["backbone"] == dict(layers=list(LAYERS), width=WIDTH, eps=1e-8)
    assert_close(again(x), ours(x), atol=0)
    peer = timm_narrow()
    peer.load_state_dict(ours.state_dict())
    peer.set_input_size((24, 48))
    dynamic = ViT.from_pretrained(tmp_path, dynamic_img_size=True).eval()
    again.set_input_size((24, 48))
    for model in (again, dynamic, ViT.from_pretrained(tmp_path, img_size=(24, 48)).eval()):
        assert_close(model(other), peer.eval()(other), **TOL)
    with pytest.raises(ValueError, match="multiples of 8 x 8 pixels, got .2, 3, 28, 48"):
        dynamic(torch.randn(2, 3, 28, 48))
    with pytest.raises(InputError, match="no multiple of the patch size 8 x 8"):
        again.set_input_size(28)
    torch.save(timm_narrow().state_dict(), tmp_path / "timm.pth")  # a bare state dict says all but the heads
    bare = ViT.from_pretrained(tmp_path / "timm.pth", num_heads=3)
    wanted = dict(backbone=ours.config["backbone"], patch_size=8, img_size=32)
    assert pick(bare.config, *wanted) == wanted
    stronger = ViT.from_pretrained(tmp_path, backbone=dict(layers=LAYERS, width=WIDTH, eps=1.0)).eval()
    assert not torch.allclose(stronger(x), ours(x), atol=1e-3)


@pytest.mark.parametrize(
    "options",
    [dict(pos_embed="relative"), dict(pos_embed="learn2d", pos_embed_at="layers", reg_tokens=2), dict(patch_size=16)],
    ids=str,
)
def test_other_positions_and_larger_patches_of_the_map(pair, options):
    """As a ViT on the feature map that timm's backbone makes."""
    _, theirs = pair
    model = randomize(ViT(**{**NARROW, **options}))
    model.patch_embed.backbone.load_state_dict(theirs.patch_embed.backbone.state_dict())
    side = 4 if "patch_size" not in options else 2
    on_map = {**NARROW, **options, "img_size": 4, "patch_size": 4 // side, "in_chans": 256, "backbone": None}
    plain = ViT(**on_map)
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "backbone" not in k})
    x = torch.randn(2, 3, 32, 32)
    assert_close(model(x), plain.eval()(theirs.patch_embed.backbone(x)), **TOL)
    model.set_input_size(64)
    plain.set_input_size(8)
    x = torch.randn(1, 3, 64, 64)
    assert_close(model(x), plain(theirs.patch_embed.backbone(x)), **TOL)


# ---- Google's files


def google_hybrid(old: bool = False) -> dict[str, np.ndarray]:
    """Random arrays as the paper's code names and shapes them. old: norms as (1, 1, 1, C)."""
    rng = np.random.default_rng(1)
    w = google()

    def conv(name, *shape):
        w[f"{name}/kernel"] = rng.normal(scale=0.05, size=shape).astype(np.float32)

    def norm(name, chans):
        shape = (1, 1, 1, chans) if old else (chans,)
        w[f"{name}/scale"] = (1 + 0.2 * rng.normal(size=shape)).astype(np.float32)
        w[f"{name}/bias"] = (0.2 * rng.normal(size=shape)).astype(np.float32)

    conv("conv_root", 7, 7, 3, 32)
    norm("gn_root", 32)
    before = 32
    for stage, units in enumerate(LAYERS):
        inner = 32 * 2**stage
        for unit in range(units):
            name = f"block{stage + 1}/unit{unit + 1}/"
            if unit == 0:
                conv(name + "conv_proj", 1, 1, before, 4 * inner)
                norm(name + "gn_proj", 4 * inner)
            for i, shape in enumerate([(1, 1, before, inner), (3, 3, inner, inner), (1, 1, inner, 4 * inner)], 1):
                conv(f"{name}conv{i}", *shape)
                norm(f"{name}gn{i}", shape[-1])
            before = 4 * inner
    conv("embedding", 1, 1, before, 48)
    return w


@pytest.mark.parametrize("prefix, old", [("", False), ("opt/target/", True)])
def test_googles_files_load_as_in_timm(tmp_path, prefix, old):
    arrays = google_hybrid(old)
    np.savez(tmp_path / "R50_B_16.npz", **{prefix + k: v for k, v in arrays.items()})
    theirs = timm_narrow(mlp_ratio=2)
    with torch.no_grad():
        _load_weights(theirs, str(tmp_path / "R50_B_16.npz"))
    state = load_checkpoint(tmp_path / "R50_B_16.npz")
    assert same(state, theirs.state_dict())
    model = ViT.from_pretrained(tmp_path / "R50_B_16.npz").eval()
    assert model.config["act_layer"] == "gelu_tanh" and model.mean == (0.5, 0.5, 0.5) and model.config["img_size"] == 32
    assert model.patch_embed.backbone.stages[1].blocks[1].conv2.weight.shape == (64, 64, 3, 3)


# ---- tools


def test_timm_is_asked_for_when_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm.layers", None)
    with pytest.raises(InputError, match="a hybrid's ResNet is timm's: pip install timm"):
        ViT(**NARROW)
    ViT(**{**NARROW, "backbone": None})
