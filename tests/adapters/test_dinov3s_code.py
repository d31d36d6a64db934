"""facebookresearch/dinov3's own blocks, written out: accelerate knows them by their names."""

import copy
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from checks import assert_close, gradients, randomize
from operation_calls import calls
from torch import nn

import vitfast


def rotated(x, sin, cos):
    """As rope_apply there: halves of a head in pairs."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class LinearKMaskedBias(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("bias_mask", torch.full_like(self.bias, float("nan")))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias * self.bias_mask.to(self.bias.dtype))


class SelfAttention(nn.Module):
    def __init__(self, dim, num_heads, qkv_bias, mask_k_bias):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv = (LinearKMaskedBias if mask_k_bias else nn.Linear)(dim, 3 * dim, qkv_bias)
        self.attn_drop, self.proj, self.proj_drop = nn.Dropout(0.0), nn.Linear(dim, dim), nn.Dropout(0.0)

    def forward(self, x, attn_bias=None, rope=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if rope is not None:
            prefix = x.shape[1] - rope[0].shape[-2]
            q, k = (torch.cat([t[:, :, :prefix], rotated(t[:, :, prefix:], *rope)], 2) for t in (q, k))
        o = F.scaled_dot_product_attention(q, k, v)
        return self.proj_drop(self.proj(o.transpose(1, 2).flatten(2)))


class LayerScale(nn.Module):
    def __init__(self, dim, value):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), value))

    def forward(self, x):
        return x * self.gamma


class Mlp(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1, self.act, self.fc2, self.drop = (
            nn.Linear(dim, hidden),
            nn.GELU(),
            nn.Linear(hidden, dim),
            nn.Dropout(0),
        )

    def forward(self, x):
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class SwiGLUFFN(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(dim, hidden), nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return self.w3(F.silu(self.w1(x)) * self.w2(x))


@pytest.fixture
def block_class(monkeypatch):
    class Block(nn.Module):
        def __init__(
            self, dim, num_heads, ffn_ratio=4.0, qkv_bias=False, init_values=None, drop_path=0.0, ffn_layer=Mlp,
            mask_k_bias=False,
        ):  # fmt: skip
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(dim, 1e-5), nn.LayerNorm(dim, 1e-5)
            self.attn = SelfAttention(dim, num_heads, qkv_bias, mask_k_bias)
            self.ls1, self.ls2 = (LayerScale(dim, init_values) if init_values else nn.Identity() for _ in range(2))
            self.mlp, self.sample_drop_ratio = ffn_layer(dim, int(dim * ffn_ratio)), drop_path

        def forward(self, x_or_x_list, rope_or_rope_list=None):
            x = x_or_x_list
            if isinstance(x, list):
                return [self(one, rope) for one, rope in zip(x, rope_or_rope_list)]
            if self.training and self.sample_drop_ratio > 0:
                raise NotImplementedError("not here")
            x = x + self.ls1(self.attn(self.norm1(x), rope=rope_or_rope_list))
            return x + self.ls2(self.mlp(self.norm2(x)))

    Block.__module__, Block.__qualname__ = "dinov3.layers.block", "SelfAttentionBlock"
    layers = types.ModuleType("dinov3.layers.ffn_layers")
    layers.SwiGLUFFN = SwiGLUFFN
    for name in ("dinov3", "dinov3.layers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, layers.__name__, layers)
    return Block


@pytest.mark.parametrize("masked", [True, False], ids=["without biases of keys", "with them"])
@pytest.mark.parametrize("ffn", [Mlp, SwiGLUFFN])
def test_the_block(block_class, ffn, masked):
    """With rotary positions of the patches alone, and without; several crops run its own code."""
    original = randomize(block_class(48, 3, 2.0, True, 0.5, ffn_layer=ffn, mask_k_bias=masked)).train()
    if masked:
        original.attn.qkv.bias_mask.fill_(1.0)[48:96] = 0.0
    model, x = vitfast.accelerate(copy.deepcopy(original)), torch.randn(2, 9, 48)
    angle = torch.randn(4, 8).repeat(1, 2)
    for rope in (None, (angle.sin(), angle.cos())):
        outs = [each(x, rope) for each in (model, original)]
        assert_close(*outs, atol=1e-5)
        upstream = torch.randn_like(x)
        mine, theirs = (gradients(each, out, upstream) for each, out in zip((model, original), outs))
        for name, grad in theirs.items():
            assert_close(mine[name], grad, atol=2e-5, rtol=1e-4, name=name)
        assert calls(model, x, rope_or_rope_list=rope) == {"attention block": 1, "MLP block": 1}
        assert_close(model([x, x], [rope, rope])[1], outs[1], atol=1e-5)


def test_images_that_training_drops(block_class):
    model = vitfast.accelerate(block_class(32, 2, 2.0, True, 0.5, drop_path=0.2)).train()
    assert {entry.why for entry in vitfast.acceleration_report(model).left} == {"drops images of the batch in training"}
    assert not vitfast.acceleration_report(model.eval()).left
