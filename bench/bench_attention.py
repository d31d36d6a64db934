"""Packed attention against PyTorch's SDPA with each backend forced, transposes and concatenation included on both sides."""

import costs
import pytest
from harness import Case, bench, values
from peers import BACKENDS, forced, sdpa
from shapes import SHAPES, Shape, grid

from vitfast import ops

IMPLS = ("vitfast", *(f"sdpa {name}" for name in BACKENDS))


def case_of(s: Shape) -> Case:
    def make():
        return [values(s.batch, s.tokens, 3, s.heads, s.head)]

    return Case("attention", s.name, sdpa, make, 1, costs.attention(s, values(1).element_size()))


@pytest.mark.parametrize("shape, direction, impl", grid(*IMPLS, cpu=("vitfast", "sdpa math")))
def test_attention(benchmark, shape, direction, impl):
    function = ops.attention if impl == "vitfast" else forced(sdpa, impl.removeprefix("sdpa "))
    bench(benchmark, case_of(SHAPES[shape]), impl, function, direction)
