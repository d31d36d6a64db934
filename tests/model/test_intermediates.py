"""What a ViT shows of its blocks: feature maps as timm's, with gradients, and exact attention matrices."""

import copy

import pytest
import torch
from checks import assert_close, randomize
from timm.models.vision_transformer import VisionTransformer

from vitfast import ViT

SMALL = dict(img_size=64, patch_size=16, embed_dim=48, depth=4, num_heads=3, num_classes=3)
TOL = dict(atol=1e-5)  # fp32 on both sides


def flat(value) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, dict):
        return flat([value[key] for key in sorted(value)])
    return [value] if isinstance(value, torch.Tensor) else [t for v in value for t in flat(v)]


@pytest.mark.parametrize(
    "options",
    [dict(), dict(reg_tokens=2, dynamic_img_size=True), dict(global_pool="avg", class_token=False, img_size=(32, 80))],
    ids=str,
)
def test_intermediates_equal_timm(options):
    """In every form, with gradients, of images that are no squares where the model takes them."""
    size = (96, 32) if "dynamic_img_size" in options else options.get("img_size", (64, 64))
    ours, theirs = ViT(**SMALL | options), VisionTransformer(**SMALL | options)
    theirs.load_state_dict(randomize(ours).state_dict())
    x = torch.randn(2, 3, *size)
    for kwargs in (
        dict(),
        dict(indices=2),
        dict(indices=[0, -1], norm=True),
        dict(indices=[1], output_fmt="NLC", return_prefix_tokens=True),
        dict(indices=[0, 2], intermediates_only=True, stop_early=True),
        dict(indices=2, output_dict=True, return_prefix_tokens=True),
    ):
        mine, expected = (flat(model.forward_intermediates(x, **kwargs)) for model in (ours, theirs))
        upstream = [torch.randn_like(t) for t in expected]
        for a, b in zip(mine, expected, strict=True):
            assert_close(a, b, **TOL)
        wanted = [dict(m.named_parameters()) for m in (ours, theirs)]
        found = (
            torch.autograd.grad(maps, list(p.values()), upstream, allow_unused=True)
            for maps, p in zip((mine, expected), wanted)
        )
        for name, a, b in zip(wanted[0], *found):
            assert (a is None) == (b is None), name
            assert a is None or assert_close(a, b, atol=1e-4, rtol=1e-4, name=name) is None
    shown = (model.get_intermediate_layers(x, 2, reshape=True) for model in (ours, theirs))
    for a, b in zip(*shown, strict=True):
        assert_close(a, b, **TOL)
    with pytest.raises(ValueError, match="indices"):
        ours.forward_intermediates(x, indices=[9])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return randomize(ViT(**SMALL, reg_tokens=1, init_values=0.5, drop_path_rate=0.2), std=0.3).eval()


def test_attention_maps_of_chosen_layers(model):
    x = torch.randn(2, 3, 64, 64)
    every, exact = model.attention_maps(x), copy.deepcopy(model).double().attention_maps(x.double())
    assert len(every) == 4 and max(m.max().item() for m in exact) > 0.5  # peaked enough to tell heads and layers apart
    for a, b in zip(every, exact):  # test_positions.py has the formula in float64
        assert_close(a.double(), b, atol=1e-4)
    for indices, layers in ((1, [3]), (2, [2, 3]), ([0, -2], [0, 2]), ([1], [1])):
        for a, layer in zip(model.attention_maps(x, indices), layers, strict=True):
            assert torch.equal(a, every[layer])
    seen = []
    handles = [block.register_forward_hook(lambda module, *_: seen.append(module)) for block in model.blocks]
    model.attention_maps(x, [1])
    for handle in handles:
        handle.remove()
    assert len(seen) <= 2  # layers behind the last one asked for do not run
    with pytest.raises(ValueError, match="indices must lie in 0..3"):
        model.attention_maps(x, [4])


def test_training_keeps_no_attention_matrix():
    """Nothing that autograd saves in a training step is as large as one image's maps.

    Asking for maps leaves no graph behind either.
    """
    model, x = ViT(**SMALL | dict(patch_size=4)), torch.randn(2, 3, 64, 64)
    tokens, saved = 257, []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        model(x).sum().backward()
        assert saved and max(saved) < 3 * tokens * tokens
        del saved[:]
        maps = model.attention_maps(x, [0])
    assert not saved and maps[0].shape == (2, 3, tokens, tokens) and maps[0].grad_fn is None


@pytest.mark.parametrize(
    "options",
    [
        dict(rope="dinov3", pos_embed="none", reg_tokens=4),
        dict(qk_norm=True, norm_layer="rmsnorm"),
        dict(pre_norm=True, norm_eps=1e-5),
    ],
    ids=str,
)
def test_attention_maps_are_those_of_the_layers(options):
    """Weights times values, projected, is the attention of the layer."""
    model = randomize(ViT(**SMALL | options), std=0.3).double().eval()
    x, layers = model._embed(torch.randn(2, 3, 64, 64, dtype=torch.float64))
    block = model.blocks[0]
    h, attn = block.branch_input(x, block.norm1), block.attn
    o = block.attention_map(x, *layers[0]) @ attn.heads(h)[2].transpose(1, 2)
    assert_close(attn.proj(o.transpose(1, 2).flatten(2)), attn(h, **layers[0][1]), atol=1e-10)
