"""tl.dot in the interpreter as on a GPU, where every element of a block is computed alike.

The interpreter multiplies blocks by NumPy's BLAS, in which equal rows of a block have unequal results.
"""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def even_dot() -> Iterator[None]:
    """Inside, each element of a product is a sum in the order of k, one rounding after another."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self, a, b, d, *_):
        total = d.data.copy()
        for column, row in zip(a.data.astype(total.dtype).T, b.data.astype(total.dtype)):
            total += column[:, None] * row
        return TensorHandle(total, d.dtype.scalar)

    before, InterpreterBuilder.create_dot = InterpreterBuilder.create_dot, create_dot
    try:
        yield
    finally:
        InterpreterBuilder.create_dot = before
