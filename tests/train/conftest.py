"""Finished runs that many tests begin from; they copy them."""

from pathlib import Path

import pytest
from commands import make_folder
from runs import FOLDER, QUICK, cut_at, digits

from vitfast.train.trainer import train


def finished_run(steps: int):
    """A finished run of so many steps that nothing interrupted, with checkpoints of the last and of two before."""

    @pytest.fixture(scope="session")
    def run(tmp_path_factory) -> Path:
        folder = tmp_path_factory.mktemp(str(steps)) / "run"
        train(digits(folder, steps=steps, **QUICK))
        return folder

    return run


four_steps, six_steps = finished_run(4), finished_run(6)


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
