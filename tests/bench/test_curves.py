"""Loss curves of the same training, ours and timm's."""

import json
import os
import signal
import time
from pathlib import Path

import curves
import machine
import pytest
import torch
from peers import BUILDERS, Setting
from shapes import Shape

ROOT = Path(__file__).parents[2]


def test_loss_curves_compare_the_same_training(tmp_path):
    """On a CPU in fp32 both curves are one, from the same weights, images and optimiser.

    And the distance is what it says.
    """
    assert curves.distance([[1.0, 2.0], [3.0, 2.0]], [[2.0, 2.5], [4.0, 2.5]]) == pytest.approx(
        0.5 / 1e-3
    )  # no spread there: 1e-3 at least
    assert curves.distance([[1.0], [3.0]], [[2.0], [4.0]]) == pytest.approx(1 / 2**0.5)
    generator = torch.Generator().manual_seed(0)
    images, labels = curves.gratings(generator, 64, 32)
    assert images.shape == (64, 3, 32, 32) and labels.unique().numel() > 30 and 0.9 < images.std() < 1.3
    command = [
        str(tmp_path),
        "--model",
        "Ti/16",
        "--image",
        "32",
        "--batch",
        "4",
        "--steps",
        "3",
        "--seeds",
        "1",
        "--precision",
        "fp32",
    ]
    assert curves.main(command) == 0
    found = json.loads((tmp_path / "curves.json").read_text())["curves"]
    ours, theirs = (found["losses"][name][0] for name in ("vitfast", "timm"))
    assert ours == pytest.approx(theirs, abs=1e-4) and 4 < ours[0] < 9 and found["machine"]["device"] == machine.name()


def test_what_our_compiled_model_keeps_is_settled_before_it_is_compiled(settled, monkeypatch):
    found = []
    monkeypatch.setattr(torch, "compile", lambda model: found.append({b.keep for b in model.blocks}) or model)
    setting, shape = Setting("vitfast", "compile", "fp32"), Shape("Nano/8", 16, 2)
    curves.losses(setting, shape, BUILDERS["timm"](shape).state_dict(), seed=0, steps=1)
    assert found == [{"all"}] and settled == [shape.batch * shape.tokens]


def test_loss_curves_are_kept_after_every_run(tmp_path, monkeypatch, capsys):
    """An interrupt in the fourth run leaves three, and the distance of the seed that both have run."""
    runs = iter([[4.0, 3.0], [4.0, 3.5], [9.0, 9.0]])

    def losses(setting, shape, weights, seed, steps):
        found = next(runs, None)
        if found is None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        return found

    monkeypatch.setattr(curves, "losses", losses)
    command = [str(tmp_path), "--model", "Nano/8", "--image", "16", "--batch", "2", "--steps", "100", "--seeds", "2"]
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background job
    try:
        assert curves.main(command) == 130
    finally:
        signal.signal(signal.SIGINT, previous)
    assert "3 of 4 runs done" in capsys.readouterr().err
    found = json.loads((tmp_path / "curves.json").read_text())["curves"]
    assert (found["runs"], found["planned"], found["seeds"]) == (3, 4, 2)
    assert found["losses"] == {"vitfast": [[4.0, 3.0], [9.0, 9.0]], "timm": [[4.0, 3.5]]}
    assert found["distance"] == pytest.approx(0.5 / 1e-3)  # one seed has no spread: 1e-3 at least
    assert curves.distance([[4.0]], []) is None
