"""Attention against each backend of PyTorch's SDPA, and flash-attn 3 and 4 where they are installed.

"attention": qkv packed, as a linear layer leaves it, transposes and the stacking of the gradients included on all
sides. "attention separate": q, k and v apart, where nobody has gradients to stack.
"""

import pytest
from harness import DTYPE, Case, bench, values
from peers import BACKENDS, FLASH_ATTENTION, flash_attention, forced, sdpa, sdpa_separate
from shapes import SHAPES, Shape, grid

from vitfast import ops
from vitfast.cost import work

CASES = grid("vitfast", *(f"sdpa {name}" for name in BACKENDS), *FLASH_ATTENTION, cpu=("vitfast", "sdpa math"))


def case_of(s: Shape, packed: bool = True) -> Case:
    def make():
        if packed:
            return [values(s.batch, s.tokens, 3, s.heads, s.head)]
        return [values(s.batch, s.tokens, s.heads, s.head) for _ in range(3)]

    op, formula, batched = ("attention", sdpa, 1) if packed else ("attention separate", sdpa_separate, 3)
    return Case(op, s.name, formula, make, batched, work.attention(s.rows, s.tokens, s.width, DTYPE.itemsize))


def function_of(impl: str, packed: bool):
    """The function of a name, of one packed tensor or of three."""
    if impl == "vitfast":
        return ops.attention
    if impl in FLASH_ATTENTION:
        function = flash_attention(impl)
        return (lambda qkv: function(*qkv.unbind(2))) if packed else function
    return forced(sdpa if packed else sdpa_separate, impl.removeprefix("sdpa "))


@pytest.mark.parametrize("shape, direction, impl", CASES)
def test_attention(benchmark, shape, direction, impl):
    bench(benchmark, case_of(SHAPES[shape]), impl, function_of(impl, packed=True), direction)


@pytest.mark.parametrize("shape, direction, impl", CASES)
def test_attention_separate(benchmark, shape, direction, impl):
    bench(benchmark, case_of(SHAPES[shape], packed=False), impl, function_of(impl, packed=False), direction)
