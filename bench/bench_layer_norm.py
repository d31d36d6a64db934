"""LayerNorm, and residual add + LayerNorm, against eager PyTorch and torch.compile."""

import costs
import pytest
from harness import Case, bench, implementation, values
from shapes import MAIN, SHAPES, Shape, grid

from vitfast import ops, ref

IMPLS = ("vitfast", "eager", "compile", "max-autotune")


def case_of(op: str, s: Shape) -> Case:
    tensors = 2 if op == "add_layer_norm" else 1

    def make():
        return [*(values(s.batch, s.tokens, s.width) for _ in range(tensors)), values(s.width), values(s.width)]

    return Case(op, s.name, getattr(ref, op), make, tensors, getattr(costs, op)(s, values(1).element_size()))


@pytest.mark.parametrize("shape, direction, impl", grid(*IMPLS))
def test_layer_norm(benchmark, shape, direction, impl):
    bench(
        benchmark,
        case_of("layer_norm", SHAPES[shape]),
        impl,
        implementation(impl, ops.layer_norm, ref.layer_norm),
        direction,
    )


@pytest.mark.parametrize("shape, direction, impl", grid(*IMPLS, cpu=("vitfast", "eager", "compile"), compile_at=MAIN))
def test_add_layer_norm(benchmark, shape, direction, impl):
    bench(
        benchmark,
        case_of("add_layer_norm", SHAPES[shape]),
        impl,
        implementation(impl, ops.add_layer_norm, ref.add_layer_norm),
        direction,
    )
