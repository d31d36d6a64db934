"""The parameters of a test that `make test` takes: the first of them; `make slow` takes the others."""

import pytest


def first(count: int, values) -> list:
    """All values, those behind the first `count` marked slow; a tuple has a value for each of several arguments."""
    values = list(values)
    others = (value if isinstance(value, tuple) else (value,) for value in values[count:])
    return values[:count] + [pytest.param(*value, marks=pytest.mark.slow) for value in others]
