"""fc1 + GELU, the MLP and a gated one (SwiGLU), against cuBLAS and PyTorch, eager and compiled.

fc1 + GELU with tanh also against cuBLASLt's own GELU epilogue.
"""

import functools

import pytest
import torch
from harness import DTYPE, Case, bench, implementation, values, weight
from shapes import SHAPES, Shape, grid

from vitfast import ops, ref
from vitfast.cost import work


def case_of(op: str, s: Shape, **options) -> Case:
    d, f = s.width, s.hidden

    def make():
        layers = {"linear_gelu": [(f, d)], "mlp": [(f, d), (d, f)], "gated_mlp": [(f, d), (f, d), (d, f)]}[op]
        return [values(s.batch, s.tokens, d), *(t for n, k in layers for t in (weight(n, k), values(n)))]

    formula, counted = functools.partial(getattr(ref, op), **options), getattr(work, op)(s.rows, d, f, DTYPE.itemsize)
    return Case(" ".join([op, *options.values()]), s.name, formula, make, 1, counted)


@pytest.mark.parametrize("op", ["linear_gelu", "mlp", "gated_mlp"])
@pytest.mark.parametrize(
    "shape, direction, impl", grid("vitfast", "eager", "compile", "max-autotune", "max-autotune all")
)
def test_mlp(benchmark, op, shape, direction, impl):
    function = implementation(impl, getattr(ops, op), getattr(ref, op))
    bench(benchmark, case_of(op, SHAPES[shape]), impl, function, direction)


def addmm_activation(x: torch.Tensor, fc1_weight: torch.Tensor, fc1_bias: torch.Tensor) -> torch.Tensor:
    """The product with GELU in cuBLASLt's epilogue: tanh only, and no derivative."""
    return torch._addmm_activation(fc1_bias, x.flatten(0, 1), fc1_weight.t(), use_gelu=True).unflatten(0, x.shape[:2])


@pytest.mark.parametrize(
    "shape, direction, impl",
    grid("vitfast", "eager", "compile", "_addmm_activation", forward_only=("_addmm_activation",)),
)
def test_linear_gelu_tanh(benchmark, shape, direction, impl):
    ours, formula = (functools.partial(place.linear_gelu, activation="gelu_tanh") for place in (ops, ref))
    function = addmm_activation if impl == "_addmm_activation" else implementation(impl, ours, formula)
    bench(benchmark, case_of("linear_gelu", SHAPES[shape], activation="gelu_tanh"), impl, function, direction)
