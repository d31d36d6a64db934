"""Images to tokens, from raw uint8 and from floats, against the convolution and unfold + matmul.

From uint8 the peers normalise first.
"""

import functools

import clock
import pytest
import torch
import torch.nn.functional as F
from harness import DTYPE, Case, bench, implementation, values, weight
from shapes import SHAPES, Shape, grid, patch_embed_work

from vitfast import ops, ref

IMPLS = ("vitfast", "eager", "compile", "compile unfold", "max-autotune", "max-autotune all")


def case_of(pixels: str, s: Shape) -> Case:
    def make():
        size, d = (s.batch, 3, s.image, s.image), s.width
        if pixels == "uint8":
            images = torch.randint(0, 256, size, dtype=torch.uint8, device=clock.DEVICE)
        else:
            images = torch.randn(size, device=clock.DEVICE).to(DTYPE)
        return [images, weight(d, 3, s.patch, s.patch), values(d), values(1, 1, d), values(1, s.tokens, d)]

    counted = patch_embed_work(s, DTYPE.itemsize, 1 if pixels == "uint8" else DTYPE.itemsize)
    return Case(f"patch_embed {pixels}", s.name, _normalising(ref.patch_embed, pixels), make, 1, counted)


def _normalising(function, pixels: str):
    """The function, which normalises raw pixels."""
    return functools.partial(function, mean=0.5, std=0.5) if pixels == "uint8" else function


def unfold(images, weight, bias, cls_token, pos_embed, *, mean=None, std=None):
    """The same as one matrix product over patches laid out in memory: often faster than the convolution."""
    images = ref.normalize(images, mean, std, weight.dtype) if images.dtype == torch.uint8 else images
    b, c, h, w = images.shape
    p, q = weight.shape[2:]
    patches = images.view(b, c, h // p, p, w // q, q).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * p * q)
    tokens = F.linear(patches, weight.flatten(1), bias)
    return torch.cat([cls_token.expand(b, -1, -1), tokens], 1) + pos_embed


@pytest.mark.parametrize("pixels", ["uint8", "float"])
@pytest.mark.parametrize("shape, direction, impl", grid(*IMPLS))
def test_patch_embed(benchmark, pixels, shape, direction, impl):
    case = case_of(pixels, SHAPES[shape])
    formula = _normalising(unfold, pixels) if impl.endswith("unfold") else case.formula
    function = implementation(impl.removesuffix(" unfold"), _normalising(ops.patch_embed, pixels), formula)
    bench(benchmark, case, impl, function, direction)
