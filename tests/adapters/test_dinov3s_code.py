"""facebookresearch/dinov3's own blocks, written out: accelerate knows them by their names."""

import copy
import sys
import types

import pytest
import torch
from adapter_models import assert_same, calls, left
from checks import assert_close, randomize
from own_blocks import FeedForward, LinearKMaskedBias, Scale, SelfAttention, SwiGLUFFN
from torch import nn

import vitfast


@pytest.fixture
def block_class(monkeypatch):
    class Block(nn.Module):
        def __init__(
            self, dim, num_heads, ffn_ratio=4.0, qkv_bias=False, init_values=None, drop_path=0.0,
            ffn_layer=FeedForward, mask_k_bias=False,
        ):  # fmt: skip
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(dim, 1e-5), nn.LayerNorm(dim, 1e-5)
            self.attn = SelfAttention(dim, num_heads, LinearKMaskedBias if mask_k_bias else nn.Linear)
            self.ls1, self.ls2 = Scale(dim), Scale(dim)
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
@pytest.mark.parametrize("ffn", [FeedForward, SwiGLUFFN])
def test_the_block(block_class, ffn, masked):
    """With rotary positions of the patches alone, and without; several crops run its own code."""
    original = randomize(block_class(48, 3, 2.0, True, 0.5, ffn_layer=ffn, mask_k_bias=masked)).train()
    if masked:
        original.attn.qkv.bias_mask.fill_(1.0)[48:96] = 0.0
    model, x = vitfast.accelerate(copy.deepcopy(original)), torch.randn(2, 9, 48)
    angle = torch.randn(4, 8).repeat(1, 2)
    for rope in (None, (angle.sin(), angle.cos())):
        batch = dict(x_or_x_list=x, rope_or_rope_list=rope)
        assert_same(model, original, batch)
        assert calls(model, **batch) == {"attention block": 1, "MLP block": 1}
        assert_close(model([x, x], [rope, rope])[1], original(x, rope), atol=1e-5)


def test_images_that_training_drops(block_class):
    model = vitfast.accelerate(block_class(32, 2, 2.0, True, 0.5, drop_path=0.2)).train()
    assert set(left(model)) == {"drops images of the batch in training"}
    assert not left(model.eval())
