"""Attention against each backend of PyTorch's SDPA, and flash-attn 3 and 4 where they are installed.

"attention": qkv packed, as a linear layer leaves it, transposes and the stacking of the gradients included on all
sides. "attention separate": q, k and v apart, where nobody has gradients to stack.
"""

import costs
import pytest
from harness import Case, bench, values
from peers import BACKENDS, FLASH_ATTENTION, flash_attention, forced, sdpa, sdpa_separate
from shapes import SHAPES, Shape, grid

from vitfast import ops

IMPLS = ("vitfast", *(f"sdpa {name}" for name in BACKENDS), *FLASH_ATTENTION)
CPU = ("vitfast", "sdpa math")


def case_of(s: Shape) -> Case:
    def make():
        return [values(s.batch, s.tokens, 3, s.heads, s.head)]

    return Case("attention", s.name, sdpa, make, 1, costs.attention(s, values(1).element_size()))


def separate_case_of(s: Shape) -> Case:
    def make():
        return [values(s.batch, s.tokens, s.heads, s.head) for _ in range(3)]

    return Case("attention separate", s.name, sdpa_separate, make, 3, costs.attention(s, values(1).element_size()))


def peer(impl: str, packed: bool):
    """The function of a peer's name, of one packed tensor or of three."""
    if impl in FLASH_ATTENTION:
        function = flash_attention(impl)
        return (lambda qkv: function(*qkv.unbind(2))) if packed else function
    return forced(sdpa if packed else sdpa_separate, impl.removeprefix("sdpa "))


@pytest.mark.parametrize("shape, direction, impl", grid(*IMPLS, cpu=CPU))
def test_attention(benchmark, shape, direction, impl):
    function = ops.attention if impl == "vitfast" else peer(impl, packed=True)
    bench(benchmark, case_of(SHAPES[shape]), impl, function, direction)


@pytest.mark.parametrize("shape, direction, impl", grid(*IMPLS, cpu=CPU))
def test_attention_separate(benchmark, shape, direction, impl):
    function = ops.attention if impl == "vitfast" else peer(impl, packed=False)
    bench(benchmark, separate_case_of(SHAPES[shape]), impl, function, direction)
