"""The ViT in all its families against timm's models in float64: logits, every gradient, sizes, starts, heads."""

import math
from functools import partial
from itertools import product

import pytest
import torch
from checks import assert_close, gradients, randomize
from timm.layers import SwiGLUPacked, resample_abs_pos_embed
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from vitfast import ViT
from vitfast.model.checkpoint.formats import to_timm_names
from vitfast.model.positions import resample, rope_tables, sincos_2d

SMALL = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=5)
TOL = dict(atol=1e-5)  # fp32: the same formula in another order of sums
EXACT = dict(atol=1e-10, rtol=1e-10)
ROTARY_TOL = dict(atol=3e-5, rtol=3e-5)  # timm makes the tables of rotary positions in fp32
ROTARY = dict(use_rot_pos_emb=True)


def eps(value: float) -> dict:
    return dict(norm_layer=partial(nn.LayerNorm, eps=value))


def same(**arguments) -> tuple:
    return VisionTransformer, arguments, arguments


# timm's class, its arguments, ours
FAMILIES = {
    "class token": same(),
    "average pooling": same(global_pool="avg", class_token=False),
    "average pooling beside a class token, norm first": same(global_pool="avg", fc_norm=False),
    "registers": same(reg_tokens=3),
    "registers, positions for patches only": same(reg_tokens=2, no_embed_class=True),
    "layer scale": same(init_values=0.3),
    "tanh gelu": same(act_layer="gelu_tanh"),
    "SiLU": same(act_layer="silu"),
    "other eps": (VisionTransformer, eps(1e-3), dict(norm_eps=1e-3)),
    "no head": same(num_classes=0),
    "no pooling": same(global_pool=""),
    "no positions": same(pos_embed="none"),
    "non-square image and patch": same(img_size=(24, 40), patch_size=(8, 10)),
    "one channel, no biases": same(in_chans=1, qkv_bias=False, proj_bias=False),
    "narrow mlp": same(mlp_ratio=1.5),
    "SigLIP": same(class_token=False, global_pool="map", act_layer="gelu_tanh"),
    "a MAP head beside a class token": same(global_pool="map"),
    "a MAP head beside registers": same(global_pool="map", class_token=False, reg_tokens=4),
    "norms everywhere": same(qk_norm=True, norm_layer="rmsnorm", scale_mlp_norm=True),
    "CLIP": (
        VisionTransformer,
        dict(pre_norm=True, act_layer="quick_gelu", **eps(1e-5)),
        dict(pre_norm=True, act_layer="quick_gelu", norm_eps=1e-5),
    ),
    "DINOv2 giant": (
        VisionTransformer,
        dict(mlp_layer=SwiGLUPacked, act_layer=nn.SiLU, mlp_ratio=4.0, init_values=0.5),
        dict(swiglu_mlp=True, mlp_ratio=2.0, init_values=0.5),
    ),
    "DINOv3": (
        Eva,
        dict(rope_type="dinov3", rope_temperature=100, rope_rotate_half=True, use_abs_pos_emb=False, num_reg_tokens=4)
        | dict(dynamic_img_size=True, init_values=0.5, use_fc_norm=False, qkv_bias=False, **eps(1e-5), **ROTARY),
        dict(rope="dinov3", pos_embed="none", reg_tokens=4, dynamic_img_size=True, init_values=0.5, fc_norm=False)
        | dict(norm_eps=1e-5, qkv_bias=False, global_pool="avg"),
    ),
    "DINOv3 H+": (
        Eva,
        dict(rope_type="dinov3", rope_temperature=50, rope_rotate_half=True, use_abs_pos_emb=False, swiglu_mlp=True)
        | dict(swiglu_align_to=8, mlp_ratio=3.2, global_pool="token", **ROTARY),
        dict(rope="dinov3", rope_temperature=50, pos_embed="none", swiglu_mlp=True, mlp_ratio=160 / 48),
    ),
    "EVA-02": (
        Eva,
        dict(swiglu_mlp=True, scale_mlp=True, qkv_fused=False, mlp_ratio=4 * 2 / 3, ref_feat_shape=(3, 5), **ROTARY),
        dict(rope="cat", ref_feat_shape=(3, 5), swiglu_mlp=True, scale_mlp_norm=True, mlp_ratio=4 * 2 / 3)
        | dict(global_pool="avg"),
    ),
    "EVA-02 without a reference": (Eva, dict(qkv_bias=True, **ROTARY), dict(rope="cat", global_pool="avg")),
}


def pair(family: str):
    """timm's model and ours, of the same random weights, in float64."""
    cls, theirs, ours = FAMILIES[family]
    original = randomize(cls(**{**SMALL, **theirs}), std=0.3).double()
    model = ViT(**{**SMALL, **ours}).double()
    state = original.state_dict()
    model.load_state_dict(to_timm_names(state).state if cls is Eva else state)
    return original.eval(), model.eval()


@pytest.mark.quick(11)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_timms(family):
    original, model = pair(family)
    tolerance = ROTARY_TOL if type(original) is Eva else EXACT
    images = torch.randn(2, model.in_chans, *model.patch_embed.img_size).double().requires_grad_()
    logits, theirs = model(images), original(images)
    assert_close(logits, theirs, **tolerance)
    upstream = torch.randn_like(logits)
    ours = gradients(model, logits, upstream) | {"input": images.grad.clone()}
    images.grad = None
    theirs = gradients(original, theirs, upstream) | {"input": images.grad}
    if type(original) is Eva:
        named = dict(original.named_parameters())
        whole = to_timm_names({name: theirs.get(name, torch.zeros_like(p)) for name, p in named.items()}).state
        for name in [name for name in whole if name.endswith("qkv.bias")]:
            third = len(whole[name]) // 3  # timm has no bias of k
            whole[name][third : 2 * third] = ours[name][third : 2 * third]
        theirs = whole | {"input": theirs["input"]}
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert_close(gradient, theirs[name], **tolerance, name=name)


# ---- positions and sizes


@pytest.mark.parametrize("family", ["DINOv3", "EVA-02"])
@pytest.mark.parametrize("size", [(48, 24), (32, 64)])
def test_rotary_positions_at_other_sizes_are_timms(family, size):
    original, model = pair(family)
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    if family == "EVA-02":
        original.set_input_size(size)
        model.set_input_size(size)
    assert_close(model(images), original(images), **ROTARY_TOL)


@pytest.mark.parametrize("kind", ["dinov3", "cat"])
def test_rotary_positions_of_float64_tokens_are_exact(kind):
    """Two rows and three columns of patches, a head of 8 columns: two frequencies for either."""
    images, x = torch.empty(1, 3, 16, 24), torch.empty(0, dtype=torch.float64)
    tables = rope_tables(kind, images, x, (8, 8), 8, 100.0, None)
    for patch, column in product(range(6), range(4)):
        place, count = ((patch // 3, 2), (patch % 3, 3))[column // 2]
        frequency = 100.0 ** -(column % 2 / 2)
        angle = (2 * math.pi * (2 * (place + 0.5) / count - 1) if kind == "dinov3" else place) * frequency
        for table, exact in zip(tables, (math.cos(angle), math.sin(angle))):
            assert table[patch, column].item() == pytest.approx(exact, abs=1e-14)


@pytest.mark.parametrize(
    "options", [{}, dict(reg_tokens=2), dict(no_embed_class=True), dict(pos_embed="sincos2d")], ids=str
)
@pytest.mark.parametrize("size", [(48, 48), (16, 56)], ids=str)
def test_set_input_size_and_dynamic_size_agree_with_timm(options, size):
    model = randomize(ViT(**SMALL, **options))
    x = torch.randn(2, 3, *size)
    peer = VisionTransformer(**SMALL, **{k: v for k, v in options.items() if k != "pos_embed"})
    peer.load_state_dict(model.state_dict(), strict=True)
    peer.set_input_size(size)
    dynamic = ViT(**SMALL, **options, dynamic_img_size=True)
    dynamic.load_state_dict(model.state_dict())
    model.set_input_size(img_size=size)
    assert model.config["img_size"] == size
    assert_close(model(x), peer(x), **TOL)
    assert_close(dynamic(x), peer(x), **TOL)


def test_resampled_positions_equal_timms_in_every_dtype():
    table = torch.randn(1, 3 + 4 * 6, 16)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        mine = resample(table.to(dtype), (4, 6), (7, 5), prefix=3)
        theirs = resample_abs_pos_embed(table.to(dtype), new_size=[7, 5], old_size=[4, 6], num_prefix_tokens=3)
        assert mine.dtype == dtype
        assert_close(mine, theirs, atol=0)


@pytest.mark.parametrize("new", [(7, 5), (2, 9), (1, 1), (3, 6)])
@pytest.mark.parametrize("how", ["bicubic_antialias", "bicubic", "bilinear_antialias"])
def test_resampling_as_weights_is_interpolate(how, new):
    """Of the map that packed images and deterministic training take, and of what every other call takes."""
    table = torch.randn(2, 1 + 4 * 6, 16, dtype=torch.float64)
    options = dict(mode=how.partition("_")[0], antialias="antialias" in how)
    plane = torch.nn.functional.interpolate(table[:, 1:].mT.unflatten(2, (4, 6)), size=new, **options)
    truth = torch.cat([table[:, :1], plane.flatten(2).mT], 1)
    assert_close(resample(table, (4, 6), new, 1, how), truth, atol=0)
    torch.use_deterministic_algorithms(True)
    try:
        assert_close(resample(table, (4, 6), new, 1, how), truth, atol=1e-12)
    finally:
        torch.use_deterministic_algorithms(False)


def test_sincos_table_from_the_formula():
    """Of a grid that is no square; test_originals.py has every entry of one that is."""
    table, row, column = sincos_2d((3, 5), 24, prefix=1), 2, 3
    omega = torch.tensor([10_000.0 ** -(i / 5) for i in range(6)])
    expected = torch.cat([(column * omega).sin(), (column * omega).cos(), (row * omega).sin(), (row * omega).cos()])
    assert table.shape == (1, 16, 24) and (table[0, 0] == 0).all()
    assert_close(table[0, 1 + row * 5 + column], expected, **TOL)
    model = ViT(**SMALL, pos_embed="sincos2d")
    assert "pos_embed" in model.state_dict() and "pos_embed" not in dict(model.named_parameters())


def test_uint8_equals_normalised_floats():
    mean, std = (0.48, 0.45, 0.40), (0.22, 0.23, 0.25)
    model = randomize(ViT(**SMALL, mean=mean, std=std))
    assert model.mean == mean and model.std == std and ViT(**SMALL).mean == (0.5, 0.5, 0.5)
    raw = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    floats = (raw.float() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    assert_close(model(raw), model(floats), **TOL)
    assert_close(model(raw.contiguous(memory_format=torch.channels_last)), model(floats), **TOL)
    assert not any("mean" in key or "std" in key for key in model.state_dict())


def test_patches_may_be_changed_before_they_get_prefix_and_positions():
    x, flip = torch.randn(2, 3, 32, 32), lambda patches: patches.flip(1)
    for options in (dict(reg_tokens=2), dict(no_embed_class=True), dict(pos_embed="none")):
        model = randomize(ViT(**SMALL, **options))
        plain, flipped = model.forward_features(x), model.forward_features(x, change_patches=flip)
        assert_close(model.forward_features(x, change_patches=lambda patches: patches), plain, **TOL)
        prefix = model.num_prefix_tokens
        back = torch.cat([flipped[:, :prefix], flipped[:, prefix:].flip(1)], 1)
        assert torch.allclose(back, plain, **TOL) == ("pos_embed" in options)  # only positions know the order


# ---- the start of training


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(pos_embed="sincos2d", global_pool="avg", class_token=False, init_values=0.2),
        dict(backbone=dict(layers=(1, 2), width=0.5), weight_init="jax"),
    ],
    ids=str,
)
def test_meta_model_materialises_like_a_fresh_one(options):
    with torch.device("meta"):
        model = ViT(**SMALL, **options)
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    model.init_weights()
    fresh = ViT(**SMALL, **options)
    for (name, a), b in zip(model.state_dict().items(), fresh.state_dict().values()):
        assert a.isfinite().all(), name
        assert abs(a.std(unbiased=False) - b.std(unbiased=False)) < 0.03 and abs(a.mean() - b.mean()) < 0.02, name
        assert "norm3.weight" not in name or not a.any()  # the last norm of each unit of a ResNet starts at 0
    assert model(torch.randn(1, 3, 32, 32)).isfinite().all()


@pytest.mark.parametrize("mode", ["", "jax", "jax_nlhb", "moco", "reset"])
def test_initialisation_has_timms_distribution(mode):
    sizes = dict(img_size=64, embed_dim=192, depth=2, num_heads=3, reg_tokens=2, init_values=0.1, num_classes=300)
    ours, theirs = ViT(**sizes, weight_init=mode), VisionTransformer(**sizes, weight_init=mode)
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values()):
        spread, error = b.std(unbiased=False).item(), (2 / a.numel()) ** 0.5  # of the means' difference, in deviations
        assert abs(a.std(unbiased=False).item() - spread) <= 5 * error * spread + 1e-7, name
        assert abs(a.mean().item() - b.mean().item()) <= 5 * error * spread + 1e-6, name
        assert a.abs().max() <= b.abs().max() * 1.5 + 1e-5, name


# ---- heads


def test_head_bias_and_representation():
    model = ViT(**SMALL, head_init_bias=-10.0, representation_size=20)
    assert (model.head.bias == -10).all()
    x = torch.randn(2, 3, 32, 32)
    tokens = model.forward_features(x)
    hidden = torch.tanh(tokens[:, 0] @ model.pre_logits.fc.weight.T + model.pre_logits.fc.bias)
    assert_close(model.forward_head(tokens, pre_logits=True), hidden, **TOL)
    assert_close(model(x), hidden @ model.head.weight.T + model.head.bias, **TOL)


@pytest.mark.parametrize("options", [dict(representation_size=20), dict(global_pool="map", class_token=False)], ids=str)
def test_reset_classifier_replaces_the_whole_head_by_zeros(options):
    model = ViT(**SMALL, **options)
    model.reset_classifier(11)
    assert model.head.weight.shape == (11, 48) and (model.head.weight == 0).all() and (model.head.bias == 0).all()
    assert not any("pre_logits" in key for key in model.state_dict())
    assert ViT(**model.config).load_state_dict(model.state_dict(), strict=True)
    model.reset_classifier(0, "avg")
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 48)
