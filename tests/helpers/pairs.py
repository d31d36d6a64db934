"""Grids of test cases of which `make test` runs those that pair every two values, and `make long` the others."""

import itertools

import pytest


def pairs(*axes) -> list:
    """A pytest.param for each combination; those without which two values of different axes still meet are long.

    The last axis is the shortest: its value turns with the places of the others.
    """
    shortest = len(axes[-1])
    assert all(len(axis) >= shortest for axis in axes)  # or a pair would be left out
    found = []
    for values in itertools.product(*axes):
        places = sum(axis.index(value) for axis, value in zip(axes, values))
        marks = () if places % shortest == 0 else pytest.mark.long
        name = "-".join(str(value).removeprefix("torch.") for value in values)
        found.append(pytest.param(*values, marks=marks, id=name))
    return found
