"""The ViT against timm's VisionTransformer and the paper's numbers."""

from functools import partial

import pytest
import timm.optim
import torch
import torch._dynamo.testing
import torch._inductor.config
from checks import assert_close, gradients, randomize
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from vitfast import InputError, ViT
from vitfast.positions import resample, sincos_2d

SMALL = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=7)
TOL = dict(atol=1e-5)  # fp32: the same formula in another order of sums

# ours, and what timm calls the same
PARITY = {
    "class token": ({}, {}),
    "average pooling": (dict(global_pool="avg", class_token=False), {}),
    "average pooling beside a class token, norm first": (dict(global_pool="avg", fc_norm=False), {}),
    "registers": (dict(reg_tokens=3), {}),
    "registers, positions for patches only": (dict(reg_tokens=2, no_embed_class=True), {}),
    "layer scale": (dict(init_values=0.3), {}),
    "tanh gelu": (dict(act_layer="gelu_tanh"), {}),
    "other eps": (dict(norm_eps=1e-3), dict(norm_layer=partial(nn.LayerNorm, eps=1e-3))),
    "no head": (dict(num_classes=0), {}),
    "no pooling": (dict(global_pool=""), {}),
    "no positions": (dict(pos_embed="none"), {}),
    "non-square image and patch": (dict(img_size=(24, 40), patch_size=(8, 10)), {}),
    "one channel, no biases": (dict(in_chans=1, qkv_bias=False, proj_bias=False), {}),
    "narrow mlp": (dict(mlp_ratio=1.5), {}),
}


def both(name: str) -> tuple[ViT, VisionTransformer, torch.Tensor]:
    ours, theirs = PARITY[name]
    ours = {**SMALL, **ours}
    theirs = {**{k: v for k, v in ours.items() if k != "norm_eps"}, **theirs}
    a, b = ViT(**ours), randomize(VisionTransformer(**theirs))
    a.load_state_dict(b.state_dict(), strict=True)
    b.load_state_dict(a.state_dict(), strict=True)
    return a, b, torch.randn(3, ours.get("in_chans", 3), *a.patch_embed.img_size)


@pytest.mark.parametrize("name", PARITY)
def test_logits_and_gradients_equal_timm(name):
    a, b, x = both(name)
    x.requires_grad_()
    ya, yb = a(x), b(x)
    assert_close(ya, yb, **TOL)
    upstream = torch.randn_like(ya)
    mine = gradients(a, ya, upstream) | {"input": x.grad.clone()}
    x.grad = None
    theirs = gradients(b, yb, upstream) | {"input": x.grad}
    assert mine.keys() == theirs.keys()
    for key in mine:
        assert_close(mine[key], theirs[key], atol=1e-4, rtol=1e-4, name=key)


def test_state_dict_has_timms_keys_and_shapes_at_b16():
    with torch.device("meta"):
        ours, theirs = ViT(), timm.create_model("vit_base_patch16_224")
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}


COUNTS = {
    "Ti/16": 5_717_416,
    "S/16": 22_050_664,
    "S/32": 22_878_952,
    "B-half/32": 22_878_952,
    "B/16": 86_567_656,
    "B/32": 88_224_232,
    "L/16": 304_326_632,
    "L/32": 306_535_400,
    "H/14": 632_045_800,
}


@pytest.mark.parametrize("name", COUNTS)
def test_preset_parameter_counts(name):
    with torch.device("meta"):
        model = ViT.from_preset(name)
    assert sum(p.numel() for p in model.parameters()) == COUNTS[name]


def test_the_half_of_vit_b_is_vit_b_with_hidden_dimensions_halved():
    with torch.device("meta"):
        whole, half = ViT.from_preset("B/32"), ViT.from_preset("B-half/32")
    for model, width in ((whole, 768), (half, 384)):
        block = model.blocks[0]
        assert (model.embed_dim, block.mlp.fc1.out_features, len(model.blocks)) == (width, 4 * width, 12)
        assert (block.attn.num_heads, model.patch_embed.num_patches) == (12, 49)


def test_meta_model_materialises_like_a_fresh_one():
    for options in ({}, dict(pos_embed="sincos2d", global_pool="avg", class_token=False, init_values=0.2)):
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
            assert abs(a.std(unbiased=False) - b.std(unbiased=False)) < 0.02 and abs(a.mean() - b.mean()) < 0.02, name
        assert model(torch.randn(1, 3, 32, 32)).isfinite().all()


def test_presets_unknown():
    with pytest.raises(InputError, match="did you mean R50.B/16"):
        ViT.from_preset("R50-B/16")
    with pytest.raises(InputError, match="did you mean.*B/16"):
        ViT.from_preset("b-16")
    for name in ("b/32", "ViT-b/32", "ViT-B/32"):  # ViT-B/32 or, in the paper's Figure 4, its half
        with pytest.raises(InputError, match="write B/32 for ViT-B, B-half/32 for the half as wide ViT-b"):
            ViT.from_preset(name)
    assert ViT.from_preset("Ti/16", num_classes=10, img_size=32, depth=1).head.out_features == 10


@pytest.mark.parametrize("mode", ["", "jax", "jax_nlhb", "moco", "reset"])
def test_initialisation_has_timms_distribution(mode):
    sizes = dict(img_size=64, embed_dim=192, depth=2, num_heads=3, reg_tokens=2, init_values=0.1, num_classes=300)
    ours, theirs = ViT(**sizes, weight_init=mode), VisionTransformer(**sizes, weight_init=mode)
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values()):
        spread, error = b.std(unbiased=False).item(), (2 / a.numel()) ** 0.5  # of the means' difference, in deviations
        assert abs(a.std(unbiased=False).item() - spread) <= 5 * error * spread + 1e-7, name
        assert abs(a.mean().item() - b.mean().item()) <= 5 * error * spread + 1e-6, name
        assert a.abs().max() <= b.abs().max() * 1.5 + 1e-5, name


def test_head_bias_and_representation():
    model = ViT(**SMALL, head_init_bias=-10.0, representation_size=20)
    assert (model.head.bias == -10).all()
    assert set(model.state_dict()) - set(ViT(**SMALL).state_dict()) == {"pre_logits.fc.weight", "pre_logits.fc.bias"}
    x = torch.randn(2, 3, 32, 32)
    tokens = model.forward_features(x)
    hidden = torch.tanh(tokens[:, 0] @ model.pre_logits.fc.weight.T + model.pre_logits.fc.bias)
    assert_close(model.forward_head(tokens, pre_logits=True), hidden, **TOL)
    assert_close(model(x), hidden @ model.head.weight.T + model.head.bias, **TOL)


def test_uint8_equals_normalised_floats():
    mean, std = (0.48, 0.45, 0.40), (0.22, 0.23, 0.25)
    model = randomize(ViT(**SMALL, mean=mean, std=std))
    assert model.mean == mean and model.std == std and ViT(**SMALL).mean == (0.5, 0.5, 0.5)
    raw = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    floats = (raw.float() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    assert_close(model(raw), model(floats), **TOL)
    assert_close(model(raw.contiguous(memory_format=torch.channels_last)), model(floats), **TOL)
    assert not any("mean" in key or "std" in key for key in model.state_dict())


def test_resampled_positions_equal_timms_in_every_dtype():
    table = torch.randn(1, 3 + 4 * 6, 16)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        mine = resample(table.to(dtype), (4, 6), (7, 5), prefix=3)
        theirs = resample_abs_pos_embed(table.to(dtype), new_size=[7, 5], old_size=[4, 6], num_prefix_tokens=3)
        assert mine.dtype == dtype
        assert_close(mine, theirs, atol=0)
    with pytest.raises(ValueError, match="pos_embed must have 3"):
        resample(table, (5, 5), (7, 5), prefix=3)


def test_sincos_table_from_the_formula():
    table = sincos_2d((3, 5), 24, prefix=1)
    assert table.shape == (1, 16, 24) and (table[0, 0] == 0).all()
    row, column = 2, 3
    omega = torch.tensor([10_000.0 ** -(i / 5) for i in range(6)])
    expected = torch.cat([(column * omega).sin(), (column * omega).cos(), (row * omega).sin(), (row * omega).cos()])
    assert_close(table[0, 1 + row * 5 + column], expected, **TOL)
    model = ViT(**SMALL, pos_embed="sincos2d")
    assert "pos_embed" in model.state_dict() and "pos_embed" not in dict(model.named_parameters())
    with pytest.raises(ValueError, match="multiple of 4"):
        sincos_2d((2, 2), 10)


@pytest.mark.parametrize(
    "options", [{}, dict(reg_tokens=2), dict(no_embed_class=True), dict(pos_embed="sincos2d")], ids=str
)
@pytest.mark.parametrize("size", [(48, 48), (16, 56)], ids=str)
def test_set_input_size_and_dynamic_size_agree_with_timm(options, size):
    model = randomize(ViT(**SMALL, **options))
    x = torch.randn(2, 3, *size)
    theirs = {k: v for k, v in options.items() if k != "pos_embed"}
    peer = VisionTransformer(**SMALL, **theirs)
    peer.load_state_dict(model.state_dict(), strict=True)
    peer.set_input_size(size)
    dynamic = ViT(**SMALL, **options, dynamic_img_size=True)
    dynamic.load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match="images must be"):
        model(x)
    model.set_input_size(img_size=size)
    assert model.config["img_size"] == size
    assert_close(model(x), peer(x), **TOL)
    assert_close(dynamic(x), peer(x), **TOL)


def flat(value) -> list[torch.Tensor]:
    """The tensors in nested lists and tuples."""
    return [value] if isinstance(value, torch.Tensor) else [t for v in value for t in flat(v)]


@pytest.mark.parametrize("options", [{}, dict(reg_tokens=2), dict(global_pool="avg", class_token=False)], ids=str)
def test_intermediates_equal_timm(options):
    ours, theirs = ViT(**{**SMALL, "depth": 4}, **options), VisionTransformer(**{**SMALL, "depth": 4}, **options)
    theirs.load_state_dict(randomize(ours).state_dict())
    x = torch.randn(2, 3, 32, 32)
    for kwargs in (
        dict(),
        dict(indices=2),
        dict(indices=[0, -1], norm=True),
        dict(indices=[1], output_fmt="NLC", return_prefix_tokens=True),
        dict(indices=[0, 2], intermediates_only=True, stop_early=True),
    ):
        mine, expected = ours.forward_intermediates(x, **kwargs), theirs.forward_intermediates(x, **kwargs)
        assert len(flat(mine)) == len(flat(expected))
        for a, b in zip(flat(mine), flat(expected)):
            assert_close(a, b, **TOL)
    mine, expected = (
        m.forward_intermediates(x, 2, output_dict=True, return_prefix_tokens=True) for m in (ours, theirs)
    )
    assert mine.keys() == expected.keys()
    for a, b in zip(
        ours.get_intermediate_layers(x, 2, reshape=True), theirs.get_intermediate_layers(x, 2, reshape=True)
    ):
        assert_close(a, b, **TOL)
    with pytest.raises(ValueError, match="indices"):
        ours.forward_intermediates(x, indices=[9])


def test_patches_may_be_changed_before_they_get_prefix_and_positions():
    x, flip = torch.randn(2, 3, 32, 32), lambda patches: patches.flip(1)
    for options in (dict(reg_tokens=2), dict(no_embed_class=True), dict(pos_embed="none")):
        model = randomize(ViT(**SMALL, **options))
        plain, flipped = model.forward_features(x), model.forward_features(x, change_patches=flip)
        assert_close(model.forward_features(x, change_patches=lambda patches: patches), plain, **TOL)
        prefix = model.num_prefix_tokens
        back = torch.cat([flipped[:, :prefix], flipped[:, prefix:].flip(1)], 1)
        assert torch.allclose(back, plain, **TOL) == ("pos_embed" in options)  # only positions know the order


def test_attention_maps_are_the_attention_that_ran():
    model = randomize(ViT(**SMALL, reg_tokens=1))
    x = torch.randn(2, 3, 32, 32)
    maps = model.attention_maps(x)
    assert len(maps) == 2 and maps[0].shape == (2, 3, 18, 18)
    assert_close(maps[1].sum(-1), torch.ones(2, 3, 18), **TOL)
    peer = VisionTransformer(**SMALL, reg_tokens=1)
    peer.load_state_dict(model.state_dict())
    seen = []
    for block in peer.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda module, args, output: seen.append(output))
    peer(x)
    for mine, theirs in zip(maps, seen):
        assert_close(mine, theirs, **TOL)


def test_reset_classifier_replaces_the_whole_head_by_zeros():
    model = ViT(**SMALL, representation_size=20)
    model.reset_classifier(11)
    assert model.head.weight.shape == (11, 48) and (model.head.weight == 0).all() and (model.head.bias == 0).all()
    assert not any("pre_logits" in key for key in model.state_dict())
    assert ViT(**model.config).load_state_dict(model.state_dict(), strict=True)
    model.reset_classifier(0, "avg")
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 48)
    with pytest.raises(InputError, match="cannot pool"):
        model.reset_classifier(3, "max")


def test_optimiser_helpers_have_timms_meaning():
    ours, theirs = ViT(**SMALL, reg_tokens=1), VisionTransformer(**SMALL, reg_tokens=1)
    assert ours.no_weight_decay() <= theirs.no_weight_decay()
    groups = timm.optim.param_groups_layer_decay(ours, 0.05, layer_decay=0.75)
    expected = timm.optim.param_groups_layer_decay(theirs, 0.05, layer_decay=0.75)
    assert [(g["lr_scale"], g["weight_decay"], len(g["params"])) for g in groups] == [
        (g["lr_scale"], g["weight_decay"], len(g["params"])) for g in expected
    ]
    assert ours.get_classifier() is ours.head and ours.num_features == 48
    assert ours.prune_intermediate_layers(1) == [1] and len(ours.blocks) == 2


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(img_size=30), "no multiple of the patch size"),
        (dict(img_size=4), "no multiple of the patch size"),
        (dict(num_heads=5), "multiple of num_heads"),
        (dict(global_pool="max"), "global_pool must be one of"),
        (dict(class_token=False), "needs class_token"),
        (dict(pos_embed="rope"), "pos_embed must be one of"),
        (dict(act_layer="relu"), "act_layer must be one of"),
        (dict(depth=0), "depth must be a whole number from 1 to"),
        (dict(mean=(0.5, 0.5)), "one for each of the 3 channels"),
        (dict(std=0.0), "std must be positive"),
        (dict(weight_init="kaiming"), "weight_init must be one of"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(InputError, match=message):
        ViT(**{**SMALL, **options})


def test_bad_images_are_named():
    model = ViT(**SMALL)
    for shape in ((2, 1, 32, 32), (2, 3, 32, 40), (3, 32, 32)):
        with pytest.raises(ValueError, match="ViT: images must be"):
            model(torch.randn(shape))
