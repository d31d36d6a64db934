"""Finished runs that many tests begin from; they copy them."""

from pathlib import Path

import pytest
from commands import make_folder
from runs import FOLDER, QUICK, cut_at, digits

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


@pytest.fixture(scope="session")
def on_folder(tmp_path_factory) -> Path:
    """data/, three classes of images, and run/, which was cut off after the first of two steps."""
    root = tmp_path_factory.mktemp("on_folder")
    make_folder(root / "data", count=3)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyError):
        patch.chdir(root)
        cut_at(patch, 1)
        train(digits("run", **FOLDER))
    return root
