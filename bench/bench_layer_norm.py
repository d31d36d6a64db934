"""LayerNorm, RMSNorm, and residual add + LayerNorm, against eager PyTorch and torch.compile."""

import pytest
from harness import DTYPE, Case, bench, implementation, values
from shapes import MAIN, SHAPES, Shape, grid

from vitfast import ops, ref
from vitfast.cost import work

IMPLS = ("vitfast", "eager", "compile", "max-autotune")


def case_of(op: str, s: Shape) -> Case:
    tensors = 2 if op == "add_layer_norm" else 1

    def make():
        vectors = (values(s.width) for _ in range(1 if op == "rms_norm" else 2))
        return [*(values(s.batch, s.tokens, s.width) for _ in range(tensors)), *vectors]

    return Case(op, s.name, getattr(ref, op), make, tensors, getattr(work, op)(s.rows, s.width, DTYPE.itemsize))


@pytest.mark.parametrize("shape, direction, impl", grid(*IMPLS))
def test_layer_norm(benchmark, shape, direction, impl):
    function = implementation(impl, ops.layer_norm, ref.layer_norm)
    bench(benchmark, case_of("layer_norm", SHAPES[shape]), impl, function, direction)


@pytest.mark.parametrize("shape, direction, impl", grid(*IMPLS))
def test_rms_norm(benchmark, shape, direction, impl):
    function = implementation(impl, ops.rms_norm, ref.rms_norm)
    bench(benchmark, case_of("rms_norm", SHAPES[shape]), impl, function, direction)


@pytest.mark.parametrize("shape, direction, impl", grid(*IMPLS, cpu=("vitfast", "eager", "compile"), compile_at=MAIN))
def test_add_layer_norm(benchmark, shape, direction, impl):
    function = implementation(impl, ops.add_layer_norm, ref.add_layer_norm)
    bench(benchmark, case_of("add_layer_norm", SHAPES[shape]), impl, function, direction)
