"""The fused blocks of an encoder layer against eager PyTorch and torch.compile.

The gated MLP (SwiGLU) among them. All of the same formula; each peer of the attention block runs on the fastest SDPA
backend.
"""

import functools

import pytest
from harness import DTYPE, Case, bench, implementation, values, weight
from peers import best_backend, forced
from shapes import MAIN, SHAPES, Shape, grid

from vitfast import ops, ref
from vitfast.cost import work

CASES = grid("vitfast", "eager", "compile", "max-autotune", "max-autotune all", compile_at=MAIN)


def attention_case_of(s: Shape) -> Case:
    d, formula = s.width, functools.partial(ref.attention_block, num_heads=s.heads)
    counted = work.attention_block(s.rows, s.tokens, d, DTYPE.itemsize)
    return Case("attention_block", s.name, formula, lambda: _inputs(s, (3 * d, d), (d, d)), 1, counted)


def mlp_case_of(op: str, s: Shape) -> Case:
    """Of mlp_block or gated_mlp_block."""
    d, f = s.width, s.hidden
    counted, layers = getattr(work, op)(s.rows, d, f, DTYPE.itemsize), [(f, d)] * (1 + op.startswith("gated"))
    return Case(op, s.name, getattr(ref, op), lambda: _inputs(s, *layers, (d, f)), 1, counted)


def _inputs(s: Shape, *layers: tuple[int, int]) -> list:
    """Tokens, the norm's weight and bias, and those of linear layers."""
    d = s.width
    parameters = (t for out, inner in layers for t in (weight(out, inner), values(out)))
    return [values(s.batch, s.tokens, d), values(d), values(d), *parameters]


@pytest.mark.parametrize("shape, direction, impl", CASES)
def test_attention_block(benchmark, shape, direction, impl):
    s, facts = SHAPES[shape], {}
    case = attention_case_of(s)
    function = implementation(impl, functools.partial(ops.attention_block, num_heads=s.heads), case.formula)
    if impl != "vitfast":
        facts["attention"] = best_backend(s.batch, s.tokens, s.heads, s.head, direction != "forward")
        function = forced(function, facts["attention"])
    bench(benchmark, case, impl, function, direction, **facts)


@pytest.mark.parametrize("shape, direction, impl", CASES)
def test_mlp_block(benchmark, shape, direction, impl):
    case = mlp_case_of("mlp_block", SHAPES[shape])
    bench(benchmark, case, impl, implementation(impl, ops.mlp_block, case.formula), direction)


@pytest.mark.parametrize("shape, direction, impl", CASES)
def test_gated_mlp_block(benchmark, shape, direction, impl):
    case = mlp_case_of("gated_mlp_block", SHAPES[shape])
    bench(benchmark, case, impl, implementation(impl, ops.gated_mlp_block, case.formula), direction)
