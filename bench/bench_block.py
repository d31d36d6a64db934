"""The two halves of an encoder layer against eager PyTorch and torch.compile of the same formula, each on the fastest SDPA backend."""

import functools

import costs
import pytest
from harness import Case, bench, implementation, values, weight
from peers import best_backend, forced
from shapes import MAIN, SHAPES, Shape, grid

from vitfast import ops, ref

IMPLS = ("vitfast", "eager", "compile", "max-autotune", "max-autotune all")


def case_of(half: str, s: Shape) -> Case:
    d = s.width
    first, second = ((3 * d, d), (d, d)) if half == "attention_block" else ((s.hidden, d), (d, s.hidden))

    def make():
        return [
            values(s.batch, s.tokens, d),
            values(d),
            values(d),
            weight(*first),
            values(first[0]),
            weight(*second),
            values(d),
        ]

    return Case(half, s.name, _partial(ref, half, s), make, 1, getattr(costs, half)(s, values(1).element_size()))


def _partial(place, half: str, s: Shape):
    return functools.partial(getattr(place, half), **(dict(num_heads=s.heads) if half == "attention_block" else {}))


@pytest.mark.parametrize("shape, direction, impl", grid(*IMPLS, compile_at=MAIN))
def test_attention_block(benchmark, shape, direction, impl):
    s = SHAPES[shape]
    case, facts = case_of("attention_block", s), {}
    function = implementation(impl, _partial(ops, "attention_block", s), case.formula)
    if impl != "vitfast":
        facts["attention"] = best_backend(s.batch, s.tokens, s.heads, s.head, direction != "forward")
        function = forced(function, facts["attention"])
    bench(benchmark, case, impl, function, direction, **facts)


@pytest.mark.parametrize("shape, direction, impl", grid(*IMPLS, compile_at=MAIN))
def test_mlp_block(benchmark, shape, direction, impl):
    case = case_of("mlp_block", SHAPES[shape])
    bench(benchmark, case, impl, implementation(impl, ops.mlp_block, case.formula), direction)
