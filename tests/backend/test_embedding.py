"""Patch embeddings in every spelling, floats and uint8: replaced and equal, or left with the reason."""

import pytest
import torch
import torch.nn.functional as F
from checks import slow_but
from compiled import compare
from torch import nn

from vitfast import backend

D, P = 32, 8


class Embedding(nn.Module):
    def __init__(self, forward):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.linear = nn.Conv2d(3, D, P, P), nn.Linear(3 * P * P, D)
        shapes = dict(cls=(1, 1, D), reg=(1, 3, D), vector=(D,), pos=(1, 17, D), patch_pos=(1, 16, D))
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))
        self.register_buffer("mean", torch.rand(3, 1, 1))
        self.register_buffer("std", torch.rand(1, 3, 1, 1) + 0.5)
        self.call = forward
        self.double()

    def forward(self, x):
        return self.call(self, x, x.shape[0])

    def patches(self, x):
        return self.conv(x).flatten(2).transpose(1, 2)

    def tokens(self, x, *prefix):
        return torch.cat([*(p.expand(x.shape[0], -1, -1) for p in prefix), self.patches(x)], 1)


def unfolded(s, x, B):
    return s.linear(x.unfold(2, P, P).unfold(3, P, P).permute(0, 2, 3, 1, 4, 5).reshape(B, 16, -1))


def rearranged(s, x, B):
    return s.linear(x.reshape(B, 3, 4, P, 4, P).permute(0, 2, 4, 3, 5, 1).reshape(B, 16, -1)) + s.patch_pos


def numbers(values):
    return torch.tensor(values, dtype=torch.float64).view(3, 1, 1)


FLOATS = {
    "class token": lambda s, x, B: s.tokens(x, s.cls) + s.pos,
    "positions first": lambda s, x, B: torch.cat([s.cls.repeat(B, 1, 1), s.patches(x) + s.patch_pos], 1),
    "registers after": lambda s, x, B: torch.cat([s.reg.expand(B, -1, -1), s.tokens(x, s.cls) + s.pos], 1),
    "registers before": lambda s, x, B: s.tokens(x, s.cls, s.reg) + torch.cat([s.pos, s.reg], 1),
    "rearranged": rearranged,
    "unfolded": unfolded,
    "F.unfold": lambda s, x, B: s.linear(F.unfold(x, P, stride=P).transpose(1, 2)),
    "one channel": lambda s, x, B: F.linear(
        x[:, :1].clone().reshape(B, 1, 2, 16, 8, 4).permute(0, 2, 4, 3, 5, 1).reshape(B, 16, -1),
        s.linear.weight[:, :64],
    ),
}
PIXELS = {
    "buffers": lambda s, x, B: s.patches(((x / 255 - s.mean) / s.std).double()) + s.patch_pos,
    "one factor": lambda s, x, B: s.patches(x.to(torch.float64) * (2 / 255) - 1),
    "literals": lambda s, x, B: s.patches((x.double() - numbers([123.0, 116, 104])) / numbers([58.0, 57, 57])),
    "in place": lambda s, x, B: s.patches(x.double().div_(255).sub_(s.mean)),
}
OTHERS = {
    "grid transposed": lambda s, x, B: s.conv(x).transpose(2, 3).flatten(2).transpose(1, 2),
    "overlapping": lambda s, x, B: F.conv2d(x, s.conv.weight, s.conv.bias, 4, 2)[..., ::2, ::2].flatten(2).mT,
    "padded": lambda s, x, B: F.conv2d(x, s.conv.weight, s.conv.bias, P, P).flatten(2).mT,
    "dilated": lambda s, x, B: F.conv2d(x, s.conv.weight[..., :4, :4], s.conv.bias, 4, 0, 2).flatten(2).mT,
    "pixels squared": lambda s, x, B: s.patches((x.double() / 255) ** 2),
    "pixels of all": lambda s, x, B: s.patches(x.double() - x.double().mean()),
}


QUICK = ("registers after", "rearranged", "one factor", "overlapping", "pixels squared")


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", slow_but(QUICK, [*FLOATS, *PIXELS, *OTHERS]))
def test_a_patch_embedding_is_replaced_and_equal_or_left(name):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64, generator=generator)
    if name in PIXELS or "pixels" in name:
        images = (images * 64 + 128).clamp(0, 255).byte()
    forward = (FLOATS | PIXELS | OTHERS)[name]
    done = compare(Embedding(forward), images, tolerance=1e-6 if name == "buffers" else 1e-9)
    assert done["patch embedding"] == (name not in OTHERS)
    assert all("grid" not in name or "not the same numbers" in entry.why for entry in backend.report().left)


@pytest.mark.parametrize("pixels", slow_but([True], [False, True]))
def test_pixels_that_fill_no_patch_are_left_out(pixels):
    images = torch.randint(256, (3, 3, 37, 35), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    model = Embedding(PIXELS["one factor"] if pixels else FLOATS["class token"])
    assert compare(model, images if pixels else images.double()) == {"patch embedding": 1}


@pytest.mark.parametrize("after", slow_but(["seen by a view"], ["returned", "seen by a view", "pooled"]))
def test_a_projection_alone_is_replaced_and_keeps_its_layout(after):
    ways = {
        "returned": lambda y: y,
        "seen by a view": lambda y: y.view(-1, 16),
        "pooled": lambda y: F.max_pool2d(y, 2),
    }
    model, images = Embedding(lambda s, x, B: ways[after](s.conv(x))), torch.randn(3, 3, 32, 32).double()
    assert compare(model, images, tolerance=1e-9) == {"patch projection": 1}
    compiled = torch.compile(model, backend="vitfast", options={"inner": "eager"})
    assert compiled(images).stride() == model(images).stride()


@pytest.mark.slow
def test_images_of_any_size_are_replaced():
    torch._dynamo.reset()
    model = Embedding(lambda s, x, B: s.tokens(x, s.cls))
    compiled = torch.compile(model, backend="vitfast", dynamic=True, options={"inner": "eager"})
    for shape in ((3, 3, 32, 32), (2, 3, 16, 48), (2, 3, 40, 24)):
        images = torch.randn(shape).double()
        torch.testing.assert_close(compiled(images), model(images), atol=1e-9, rtol=1e-9)
        assert [entry.kind for entry in backend.report().replaced] == ["patch embedding"]
