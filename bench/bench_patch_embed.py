"""Raw uint8 images to tokens, against normalise-then-convolve in eager PyTorch and torch.compile."""

import functools

import pytest
import torch
from harness import DEVICE, DTYPE, Case, bench, compiled
from shapes import DIRECTIONS, SHAPES

from vitfast import ops, ref


def case_of(s) -> Case:
    grid = s.image // s.patch

    def make():
        images = torch.randint(0, 256, (s.batch, 3, s.image, s.image), dtype=torch.uint8, device=DEVICE)
        weight = (torch.randn(s.width, 3, s.patch, s.patch, device=DEVICE) * (3 * s.patch**2) ** -0.5).to(DTYPE)
        vectors = [torch.randn(*shape, device=DEVICE).to(DTYPE) for shape in ((s.width,), (1, 1, s.width), (1, 1 + grid**2, s.width))]
        return [images, weight, *vectors]

    pixels, u = 3 * s.batch * s.image**2, s.batch * (grid**2 + 1) * s.width
    formula = functools.partial(ref.patch_embed, mean=0.5, std=0.5)
    return Case(f"patch_embed uint8 {s.name}", formula, make, 2 * s.batch * grid**2 * s.width * 3 * s.patch**2, u + pixels / 2, u + pixels / 2)


@pytest.mark.parametrize("impl", ["vitfast", "eager", "compile"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_patch_embed(benchmark, shape, direction, impl):
    case = case_of(SHAPES[shape])
    ours = functools.partial(ops.patch_embed, mean=0.5, std=0.5)
    function = dict(vitfast=lambda: ours, eager=lambda: case.formula, compile=lambda: compiled(case.formula))[impl]()
    bench(benchmark, case, impl, function, direction)
