"""fc1 + GELU, and the whole MLP, against cuBLAS with eager and compiled pointwise operations."""

import pytest
import torch
from harness import DEVICE, DTYPE, Case, bench, compiled
from shapes import DIRECTIONS, SHAPES

from vitfast import ops, ref


def inputs(s, *shapes) -> list[torch.Tensor]:
    x = torch.randn(s.batch, s.tokens, s.width, device=DEVICE).to(DTYPE)
    return [x, *((torch.randn(*shape, device=DEVICE) * shape[-1] ** -0.5).to(DTYPE) for shape in shapes)]


def cases(s) -> dict[str, tuple]:
    d, u, product = s.width, s.rows * s.width, 2 * s.rows * 4 * s.width**2
    fc1, fc2 = [(4 * d, d), (4 * d,)], [(d, 4 * d), (d,)]
    return {
        "linear_gelu": (ops.linear_gelu, Case(f"linear_gelu {s.name}", ref.linear_gelu, lambda: inputs(s, *fc1), product, 9 * u, 14 * u)),
        "mlp": (ops.mlp, Case(f"mlp {s.name}", ref.mlp, lambda: inputs(s, *fc1, *fc2), 2 * product, 14 * u, 26 * u)),
    }


@pytest.mark.parametrize("impl", ["vitfast", "eager", "compile"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("op", ["linear_gelu", "mlp"])
@pytest.mark.parametrize("shape", SHAPES)
def test_mlp(benchmark, shape, op, direction, impl):
    ours, case = cases(SHAPES[shape])[op]
    function = dict(vitfast=lambda: ours, eager=lambda: case.formula, compile=lambda: compiled(case.formula))[impl]()
    bench(benchmark, case, impl, function, direction)
