"""The two halves of an encoder layer against eager PyTorch and torch.compile of the same formula."""

import functools

import pytest
import torch
from harness import DEVICE, DTYPE, Case, bench, compiled
from shapes import DIRECTIONS, SHAPES

from vitfast import ops, ref


def case_of(s, half: str) -> tuple:
    d, u = s.width, s.rows * s.width
    attention = half == "attention_block"
    matrices = [(3 * d, d), (d, d)] if attention else [(4 * d, d), (d, 4 * d)]

    def make():
        vectors = [torch.randn(n, device=DEVICE).to(DTYPE) for n in (d, d, matrices[0][0], d)]
        first, second = ((torch.randn(*m, device=DEVICE) * m[1] ** -0.5).to(DTYPE) for m in matrices)
        return [torch.randn(s.batch, s.tokens, d, device=DEVICE).to(DTYPE), vectors[0], vectors[1], first, vectors[2], second, vectors[3]]

    options = dict(num_heads=s.heads) if attention else {}
    ours, formula = (functools.partial(getattr(place, half), **options) for place in (ops, ref))
    flops = 2 * s.rows * 4 * d * d + 4 * s.batch * s.heads * s.tokens**2 * s.head if attention else 2 * s.rows * 8 * d * d
    traffic = (13, 24) if attention else (17, 32)  # in units of u: the sums of the table in the kernels' plan
    return ours, Case(f"{half} {s.name}", formula, make, flops, traffic[0] * u, traffic[1] * u)


@pytest.mark.parametrize("impl", ["vitfast", "eager", "compile"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("half", ["attention_block", "mlp_block"])
@pytest.mark.parametrize("shape", SHAPES)
def test_block(benchmark, shape, half, direction, impl):
    ours, case = case_of(SHAPES[shape], half)
    function = dict(vitfast=lambda: ours, eager=lambda: case.formula, compile=lambda: compiled(case.formula))[impl]()
    bench(benchmark, case, impl, function, direction)
