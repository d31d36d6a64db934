"""A ViT under detection, segmentation and inspection, against timm and float64.

Feature maps under a pyramid, and attention matrices.
"""

import copy

import pytest
import torch
from checks import assert_close, randomize
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from vitfast import ViT

SMALL = dict(img_size=64, patch_size=16, embed_dim=48, depth=4, num_heads=3, num_classes=0)
TOL = dict(atol=1e-5)  # fp32 on both sides


class Pyramid(nn.Module):
    """Maps of strides 4, 8, 16 and 32 from those of four blocks, all of stride 16.

    Li et al., 2022, feed theirs from one.
    """

    def __init__(self, backbone, width=48, out=8):
        super().__init__()
        self.backbone = backbone

        def up(chans):
            return nn.ConvTranspose2d(chans, out, 2, stride=2)

        scales = (
            nn.Sequential(up(width), nn.GELU(), up(out)),
            up(width),
            nn.Conv2d(width, out, 1),
            nn.Conv2d(width, out, 2, stride=2),
        )
        self.scales = nn.ModuleList(scales)

    def forward(self, images):
        maps = self.backbone.forward_intermediates(images, indices=4, intermediates_only=True, output_fmt="NCHW")
        return [scale(m) for scale, m in zip(self.scales, maps, strict=True)]


@pytest.mark.parametrize(
    "size, options",
    [((64, 96), dict(img_size=(64, 96))), ((96, 32), dict(dynamic_img_size=True, reg_tokens=2))],
    ids=["non-square", "dynamic"],
)
def test_feature_pyramid_trains_as_on_timm(size, options):
    """Maps and the gradients of every parameter are timm's; a step along them lowers the loss."""
    peer = Pyramid(randomize(VisionTransformer(**SMALL | options)))
    ours = copy.deepcopy(peer)
    ours.backbone = ViT(**SMALL | options)
    ours.backbone.load_state_dict(peer.backbone.state_dict())
    x = torch.randn(2, 3, *size)
    for model in (ours, peer):
        for part in (model.backbone.norm, model.backbone.fc_norm):
            part.requires_grad_(False)  # behind the maps
    mine, theirs = ours(x), peer(x)
    for stride, a, b in zip((4, 8, 16, 32), mine, theirs):
        assert a.shape == (2, 8, size[0] // stride, size[1] // stride)
        assert_close(a, b, **TOL)
    upstream = [torch.randn_like(m) for m in mine]
    for maps in (mine, theirs):
        torch.autograd.backward(maps, upstream)
    for (name, a), b in zip(ours.named_parameters(), peer.parameters()):
        if a.requires_grad:
            assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-4, name=name)
    targets = [torch.randn_like(m) for m in mine]

    def loss():
        return sum((m - target).square().mean() for m, target in zip(ours(x), targets))

    ours.zero_grad()
    before = loss()
    before.backward()
    torch.optim.SGD([p for p in ours.parameters() if p.requires_grad], lr=1e-2).step()
    assert loss() < before


def test_one_model_gives_maps_of_every_size():
    """Positions follow each image's grid, and a patch's token is found in its row and column."""
    model = randomize(ViT(**SMALL, dynamic_img_size=True)).eval()
    for size in ((64, 64), (32, 160), (128, 48)):
        fixed = ViT(**SMALL)
        fixed.load_state_dict(model.state_dict())
        fixed.set_input_size(size)
        x = torch.randn(1, 3, *size)
        (a,), (b,) = (
            m.eval().forward_intermediates(x, indices=[2], norm=True, intermediates_only=True) for m in (model, fixed)
        )
        assert_close(a, b, **TOL)
        tokens = fixed.forward_intermediates(x, indices=[2], norm=True, intermediates_only=True, output_fmt="NLC")[0]
        row, column = size[0] // 16 - 1, 1
        assert torch.equal(b[0, :, row, column], tokens[0, row * (size[1] // 16) + column])


# ---- attention maps


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return randomize(ViT(**SMALL, reg_tokens=1, init_values=0.5, drop_path_rate=0.2), std=0.3).eval()


def by_hand(model, x):
    """softmax(q k^T / sqrt(Dh)) of every layer, in float64 from timm's modules and one einsum."""
    peer = VisionTransformer(**SMALL, reg_tokens=1, init_values=0.5).eval()
    peer.load_state_dict(model.state_dict())
    peer, maps = peer.double(), []
    z = peer.norm_pre(peer.patch_drop(peer._pos_embed(peer.patch_embed(x.double()))))
    for block in peer.blocks:
        q, k, _ = block.attn.qkv(block.norm1(z)).reshape(*z.shape[:2], 3, 3, 16).unbind(2)
        logits = torch.einsum("bnhd,bmhd->bhnm", q, k) / 4
        maps.append(torch.exp(logits - logits.logsumexp(-1, keepdim=True)))
        z = block(z)
    return maps


def test_attention_maps_are_exact(model):
    x = torch.randn(2, 3, 64, 64)
    truth = by_hand(model, x)
    assert max(m.max().item() for m in truth) > 0.5  # peaked enough to tell heads and layers apart
    for ours, tolerance in (
        (copy.deepcopy(model).double().attention_maps(x.double()), 1e-10),
        (model.attention_maps(x), 1e-4),
    ):
        assert len(ours) == 4
        for layer, (a, b) in enumerate(zip(ours, truth)):
            assert a.shape == (2, 3, 18, 18) and not a.requires_grad
            assert_close(a.double(), b, atol=tolerance, name=f"layer {layer}")


def test_attention_maps_of_chosen_layers(model):
    x = torch.randn(2, 3, 64, 64)
    every = model.attention_maps(x)
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
    model, x = ViT(**SMALL | dict(patch_size=4, num_classes=3)), torch.randn(2, 3, 64, 64)
    tokens, saved = 257, []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        model(x).sum().backward()
        assert saved and max(saved) < 3 * tokens * tokens
        del saved[:]
        maps = model.attention_maps(x, [0])
    assert not saved and maps[0].shape == (2, 3, tokens, tokens) and maps[0].grad_fn is None
