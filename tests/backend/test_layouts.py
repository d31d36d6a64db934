"""Hybrids of convolutions and attention: what follows a replaced part gets the layout in memory that it was made for.

The operations write contiguous tensors. Where the model's own part has another layout, views of it, changes in place,
group norms (of which PyTorch's fake tensors say other strides than there are) and convolutions would see it.
"""

import pytest
import timm
import torch
import torch.nn.functional as F
from checks import randomize, slow_but
from compiled import compare
from torch import nn

from vitfast import backend

B, H, D, SIDE = 2, 4, 32, 4  # samples, heads, width, pixels of a side
N = SIDE * SIDE


class Hybrid(nn.Module):
    """A stem, one of CASES, a head."""

    def __init__(self, case):
        super().__init__()
        self.stem, self.to_qkv = nn.Conv2d(3, D, 2, 2), nn.Conv2d(D, 3 * D, 1)
        self.between, self.group_norm = nn.Conv2d(D, D, 1), nn.GroupNorm(1, D)
        self.norm1, self.norm2, self.rms = nn.LayerNorm(D), nn.LayerNorm(D), nn.RMSNorm(D)
        self.qkv, self.proj, self.fc1, self.fc2 = (nn.Linear(i * D, o * D) for i, o in ((1, 3), (1, 1), (1, 2), (2, 1)))
        self.case = case

    def forward(self, x):
        return self.case(self, x)

    def map_attention(self, x, attend):
        """A map (B, D, h, w) -> a map, by heads (B, H, N, Dh) that are cut from a convolution's channels."""
        q, k, v = self.to_qkv(self.group_norm(x)).reshape(B, H, 3 * D // H, N).permute(0, 1, 3, 2).chunk(3, 3)
        o = attend(q, k, v).permute(0, 1, 3, 2).reshape(x.shape)
        return self.between(o) + x

    def heads(self, x):
        """q, k and v (B, H, N, Dh) of a map."""
        return self.qkv(x.flatten(2).transpose(1, 2)).reshape(B, N, 3, H, D // H).permute(2, 0, 3, 1, 4).unbind(0)

    def mlp(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))

    def mapped(self, x):
        """A map's tail: what has fakes or views that tell layouts apart."""
        x = self.between(self.group_norm(x))
        return self.group_norm(x + 1)


def softmax_attention(q, k, v):
    return (q @ k.transpose(-2, -1) * (D // H) ** -0.5).softmax(-1) @ v


def two_layers(attend):
    return lambda s, x: s.mapped(s.map_attention(s.map_attention(s.stem(x), attend), attend))


def changed_in_place(s, x):
    """A reshape that is a view, of the layout that the model has."""
    o = softmax_attention(*s.heads(s.stem(x)))
    o.reshape(B, -1).add_(1)
    return s.proj(o.transpose(1, 2).reshape(B, N, D))


def viewed(s, x):
    o = F.scaled_dot_product_attention(*s.heads(s.stem(x)))
    return s.proj(o.transpose(1, 2).reshape(B, N, D)).view(B, -1)


def tokens_first(s, x):
    """Blocks on (N, B, D)."""
    x = s.stem(x).flatten(2).permute(2, 0, 1)
    q, k, v = s.qkv(s.norm1(x)).reshape(N, B, 3, H, D // H).permute(2, 1, 3, 0, 4).unbind(0)
    x = x + s.proj(F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).reshape(N, B, D))
    return s.mapped(s.mlp(x).permute(1, 2, 0).unflatten(-1, (SIDE, SIDE)))


def normalised(s, x):
    x = s.rms(s.norm1(s.stem(x).permute(0, 2, 3, 1)))
    return s.mapped(x.permute(0, 3, 1, 2))


ATTENTION = {"attention": 1}
CASES = {
    "fused attention on maps": (two_layers(F.scaled_dot_product_attention), {"attention": 2}),
    "changed in place": (changed_in_place, ATTENTION),
    "viewed": (viewed, ATTENTION),
    "tokens first": (tokens_first, {"attention block": 1, "MLP block": 1}),
    "norms": (normalised, {"LayerNorm": 1, "RMSNorm": 1}),
}
FORMATS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}
INNER = [(layout, inner) for inner in ("aot_eager", "eager", "inductor") for layout in FORMATS]
QUICK = ("changed in place", "tokens first")


def images(layout: str, side: int) -> torch.Tensor:
    x = torch.randn(B, 3, side, side, generator=torch.Generator().manual_seed(0))
    return x.contiguous(memory_format=FORMATS[layout])


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", slow_but(QUICK, CASES))
@pytest.mark.parametrize("way", slow_but([("channels-last", "aot_eager")], INNER), ids=" ".join)
def test_hybrids_compute_the_same_and_callers_get_the_strides_of_the_model(name, way):
    (case, expected), (layout, inner) = CASES[name], way
    torch.manual_seed(0)
    model, x = randomize(Hybrid(case)).to(memory_format=FORMATS[layout]), images(layout, 2 * SIDE)
    compiled = backend.compile(model, options={"inner": inner}, fullgraph=True)
    done = compare(model, x, compiled=compiled, tolerance=1e-4)
    assert {kind: done[kind] for kind in expected} == expected, backend.report()
    assert inner == "inductor" or compiled(x).stride() == model(x).stride()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lowformer_b0", "efficientvit_b0", "mobilevit_xxs", "edgenext_xx_small"])
@pytest.mark.parametrize("layout", FORMATS)
def test_hybrids_of_timm(name, layout):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=3).eval().to(memory_format=FORMATS[layout])
    x = images(layout, 64)
    with torch.inference_mode():
        expected = model(x)
        torch._dynamo.reset()
        found = backend.compile(model, options={"inner": "aot_eager"})(x)
    torch.testing.assert_close(found, expected, atol=1e-5 * expected.abs().max().item(), rtol=0)
    assert backend.report().replaced
