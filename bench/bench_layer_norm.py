"""Residual add + LayerNorm against eager PyTorch and torch.compile."""

import pytest
import torch
from harness import DEVICE, DTYPE, Case, bench, compiled
from shapes import DIRECTIONS, SHAPES

from vitfast import ops, ref


def case_of(s) -> Case:
    def make():
        x, residual = (torch.randn(s.batch, s.tokens, s.width, device=DEVICE).to(DTYPE) for _ in range(2))
        return [x, residual, *(torch.randn(s.width, device=DEVICE).to(DTYPE) for _ in range(2))]

    u = s.rows * s.width
    return Case(f"add_layer_norm {s.name}", ref.add_layer_norm, make, flops=0, traffic=4 * u, traffic_backward=4 * u)


@pytest.mark.parametrize("impl", ["vitfast", "eager", "compile"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_layer_norm(benchmark, shape, direction, impl):
    function = dict(vitfast=lambda: ops.add_layer_norm, eager=lambda: ref.add_layer_norm, compile=lambda: compiled(ref.add_layer_norm))[impl]()
    bench(benchmark, case_of(SHAPES[shape]), impl, function, direction)
