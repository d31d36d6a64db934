"""Finished runs that many tests begin from; they copy them."""

from pathlib import Path

import pytest
from runs import QUICK, digits

from vitfast.train.trainer import train


@pytest.fixture(scope="session")
def four_steps(tmp_path_factory) -> Path:
    """A finished run with checkpoints of steps 4 and 2."""
    run = tmp_path_factory.mktemp("four") / "run"
    train(digits(run, steps=4, **QUICK))
    return run


@pytest.fixture(scope="session")
def six_steps(tmp_path_factory) -> Path:
    """A finished run of six steps that nothing interrupted."""
    run = tmp_path_factory.mktemp("six") / "run"
    train(digits(run, steps=6, **QUICK))
    return run
