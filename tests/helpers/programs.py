"""The interpreter's programs in another order: shuffled, or of several launches in turn, as on a GPU."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

from triton.runtime.interpreter import InterpreterBuilder

from vitfast.kernels.launch import Launch


@contextlib.contextmanager
def _at(program: Callable[[int], int]) -> Iterator[None]:
    """Inside, what would be the i-th program of a launch is program(i)."""
    original = InterpreterBuilder.set_grid_idx

    def moved(builder, x, y, z):
        original(builder, x, y, z)
        builder.grid_idx = program(x), y, z

    with mock.patch.object(InterpreterBuilder, "set_grid_idx", moved):
        yield


def in_order(order: Sequence[int]) -> contextlib.AbstractContextManager:
    """Inside, launches of len(order) programs run them in this order, and others as always."""
    return _at(lambda i: order[i] if i < len(order) else i)


def interleaved(*launches: Launch) -> None:
    """Runs recorded launches of as many programs at once: the first program of each, then the second of each."""
    for program in range(launches[0].grid[0]):
        with _at(lambda _: program):  # noqa: B023
            for each in launches:
                each.kernel[(1,)](**each.arguments)
