"""The sweep over learning rates."""

import json
from pathlib import Path

import pytest
from runs import digits, finetuning

from vitfast import InputError
from vitfast.experiments import runs as experiments
from vitfast.experiments.sweep import sweep
from vitfast.train.trainer import train


def test_a_sweep_chooses_on_held_out_images_then_trains_on_all(tmp_path, monkeypatch):
    train(digits(tmp_path / "pre", steps=3))
    config = finetuning(tmp_path / "pre", tmp_path / "fine", steps=2, sweep_lr="0.001,0.01,0.1")
    seen = []
    fake = {0.001: 0.5, 0.01: 0.9, 0.1: 0.9}

    def run(config, resume):
        seen.append((config.lr, config.hold_out, Path(config.output).name))
        summary = train(config, resume)
        return {**summary, "accuracy": fake[config.lr]} if config.hold_out else summary

    monkeypatch.setattr(experiments, "train", run)
    summary = sweep(config)
    assert seen == [
        (0.001, 0.1, "lr-0.001"),
        (0.01, 0.1, "lr-0.01"),
        (0.1, 0.1, "lr-0.1"),
        (0.01, 0.0, "fine"),
    ]  # of equals the smaller
    assert summary["train_images"] == 1437
    told = json.loads((tmp_path / "fine" / "sweep.json").read_text())
    assert told["lr"] == 0.01 and [row["held_out_accuracy"] for row in told["tried"]] == [0.5, 0.9, 0.9]
    assert json.loads((tmp_path / "fine" / "sweep" / "lr-0.01" / "summary.json").read_text())["train_images"] < 1300
    with pytest.raises(InputError, match="--resume takes auto or never"):
        sweep(config, "runs/other")
