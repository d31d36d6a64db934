"""The sweep over learning rates, and several runs with one."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from commands import refuses, run_cli, works
from frozen import tiny
from runs import digits, finetuning
from speed import first

from vitfast import InputError
from vitfast.errors import Diverged, TrainingError
from vitfast.experiments import runs as experiments
from vitfast.experiments.sweep import fine_tune
from vitfast.train.trainer import Trainer, train


@pytest.fixture
def told(monkeypatch):
    """Accuracies by seed and rate in the place of trained ones; the runs that asked, in order."""
    seen = []

    def run(config, resume):
        Path(config.output).mkdir(parents=True, exist_ok=True)
        seen.append((Path(config.output).name, config.seed, config.lr, config.hold_out))
        accuracy = 0.8 + config.lr if config.hold_out else {5: 0.90, 6: 0.94, 7: 0.95}[config.seed]
        return dict(finished=True, accuracy=accuracy, seconds=1.0)

    monkeypatch.setattr(experiments, "train", run)
    return seen


def test_three_runs_have_a_mean_and_the_deviation_of_a_sample(tmp_path, told, capsys):
    weights = tmp_path / "weights"
    command = ("finetune", "--data", "digits", "--weights", weights, "--seed", 5, "--output", tmp_path / "fine")
    out = works(capsys, *command, "--runs", 3, "--lr", 0.5)
    assert told == [(f"seed-{seed}", seed, 0.5, 0.0) for seed in (5, 6, 7)]
    result = json.loads((tmp_path / "fine" / "runs.json").read_text())
    assert result["accuracies"] == [0.90, 0.94, 0.95] and result["seeds"] == [5, 6, 7] and result["lr"] == 0.5
    assert result["accuracy"] == pytest.approx(np.mean([0.90, 0.94, 0.95]))
    assert result["stdev"] == pytest.approx(np.std([0.90, 0.94, 0.95], ddof=1))
    assert out == f"accuracy 0.9300 ± 0.0265 (0.9000 0.9400 0.9500), 3 s, in {tmp_path / 'fine'}\n"


def test_a_sweep_comes_once_before_the_runs(tmp_path, told, capsys):
    rates = ("--set", "sweep_lr=0.03,0.1,0.01")
    command = ("finetune", "--data", "digits", "--weights", tmp_path, "--seed", 5, "--output", tmp_path / "fine")
    works(capsys, *command, *rates, "--runs", 2, "--sweep")
    tried = [(f"lr-{lr:g}", 5, lr, 0.1) for lr in (0.03, 0.1, 0.01)]
    assert told == [*tried, ("seed-5", 5, 0.1, 0.0), ("seed-6", 6, 0.1, 0.0)]
    assert json.loads((tmp_path / "fine" / "sweep.json").read_text())["accuracy"] == pytest.approx(0.92)
    (tmp_path / "file").write_text("")
    for flags, message in (
        (["--runs", 0], "--runs must be positive, got 0"),
        (["--runs", 2, "--resume", "runs/other"], "--resume takes auto or never"),
        (["--runs", 2, "--output", tmp_path / "file"], "file is a file; give a folder"),
    ):
        refuses(capsys, message, *command, *flags)
    code, _, err = run_cli(capsys, *command[:-2], "--runs", 2)
    assert code == 2 and "add --output FOLDER" in err and len(told) == 5


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("pre") / "run"
    train(digits(run, steps=2, batch_size=8, train_images=16, img_size=16))
    return run


QUICK = dict(steps=6, batch_size=8, train_images=40, img_size=16, warmup_steps=0, clip_norm=None, optimizer="sgd")


@pytest.mark.slow
def test_a_rate_that_diverges_counts_as_0_and_the_sweep_goes_on(pretrained, tmp_path, monkeypatch):
    config = finetuning(pretrained, tmp_path / "fine", sweep_lr="1e8,0.01,0.003", **QUICK)
    path, on_the_way = tmp_path / "fine" / "sweep.json", []

    def watched(*args):
        on_the_way.append(len(json.loads(path.read_text())["tried"]) if path.exists() else 0)
        return train(*args)

    monkeypatch.setattr(experiments, "train", watched)
    summary = fine_tune(config, sweep=True)
    assert on_the_way == [0, 1, 2, 3]  # it is written as it goes
    told = json.loads(path.read_text())
    bad, *good = told["tried"]
    assert bad["lr"] == 1e8 and bad["held_out_accuracy"] == 0 and re.search("is (nan|inf)", bad["diverged"])
    assert [row["lr"] for row in good] == [0.01, 0.003] and not any("diverged" in row for row in good)
    best = max(good, key=lambda row: (row["held_out_accuracy"], -row["lr"]))
    assert told["lr"] == best["lr"] and told["accuracy"] == summary["accuracy"]
    assert json.loads((tmp_path / "fine" / "sweep" / "lr-0.01" / "summary.json").read_text())["finished"]


@pytest.mark.slow
def test_where_every_rate_diverges_the_sweep_says_so(pretrained, tmp_path, capsys):
    command = ("finetune", *"--data digits --device cpu --weights".split(), pretrained, "--output", tmp_path / "fine")
    settings = [f"{name}={'none' if value is None else value}" for name, value in QUICK.items()]
    code, _, err = run_cli(capsys, *command, "--sweep", "--set", "sweep_lr=1e8,1e9", *settings)
    assert code == 1 and err.splitlines()[-1].startswith("vitfast: error: with every rate of sweep_lr the training div")
    told = json.loads((tmp_path / "fine" / "sweep.json").read_text())
    assert [row["held_out_accuracy"] for row in told["tried"]] == [0, 0] and told["lr"] is told["accuracy"] is None


def test_a_run_that_diverges_is_named_after_the_others(tmp_path, monkeypatch):
    def run(config, resume):
        if config.seed == 6:
            raise Diverged("the loss of step 3 is nan")
        return dict(finished=True, accuracy=0.25, seconds=1.0)

    monkeypatch.setattr(experiments, "train", run)
    config = finetuning(tmp_path, tmp_path / "fine", seed=5, steps=1)
    with pytest.raises(TrainingError, match="1 of 3 runs diverged, with seed 6.*5: 0.2500, 7: 0.2500.*step 3 is nan"):
        fine_tune(config, runs=3)
    assert not (tmp_path / "fine" / "runs.json").exists()


def test_a_sweep_chooses_by_the_best_accuracy_of_early_stopping(tmp_path, monkeypatch):
    told = {0.001: dict(accuracy=0.1, best_accuracy=0.8), 0.01: dict(accuracy=0.5, best_accuracy=0.6)}
    monkeypatch.setattr(experiments, "train", lambda config, _: dict(finished=True, **told[config.lr]))
    fine_tune(finetuning(tmp_path / "pre", tmp_path / "fine", steps=2, sweep_lr="0.001,0.01", early_stop=9), sweep=True)
    found = json.loads((tmp_path / "fine" / "sweep.json").read_text())
    assert found["lr"] == 0.001 and [row["held_out_accuracy"] for row in found["tried"]] == [0.8, 0.6]


@pytest.mark.slow
def test_a_sweep_chooses_on_held_out_images_then_trains_on_all_and_can_be_extended(pretrained, tmp_path, monkeypatch):
    """Rates that were tried are not tried again; the first table is kept."""
    seen, tables, fake = [], [], {0.001: 0.5, 0.01: 0.9, 0.1: 0.9}

    def run(config, resume):
        folder = Path(config.output)
        seen.append((config.lr, config.hold_out, folder.name, (folder / "checkpoints" / "last").exists()))
        summary = train(config, resume)
        return {**summary, "accuracy": fake[config.lr]} if config.hold_out else summary

    monkeypatch.setattr(experiments, "train", run)
    for rates in ("0.1,0.01", "0.001,0.01"):
        config = finetuning(pretrained, tmp_path / "fine", steps=2, sweep_lr=rates)
        assert fine_tune(config, sweep=True)["train_images"] == 1437
        tables.append((tmp_path / "fine" / "sweep.json").read_text())
    tried = [(0.1, 0.1, "lr-0.1", False), (0.01, 0.1, "lr-0.01", False), (0.01, 0.0, "fine", False)]
    tried += [(0.001, 0.1, "lr-0.001", False), (0.01, 0.1, "lr-0.01", True), (0.01, 0.0, "fine", True)]
    assert seen == tried  # of equals the smaller
    assert (tmp_path / "fine" / "sweep.json.1").read_text() == tables[0]
    for text, accuracies in zip(tables, ([0.9, 0.9], [0.5, 0.9])):
        told = json.loads(text)
        assert told["lr"] == 0.01 and [row["held_out_accuracy"] for row in told["tried"]] == accuracies
    assert json.loads((tmp_path / "fine" / "sweep" / "lr-0.01" / "summary.json").read_text())["train_images"] < 1300
    with pytest.raises(InputError, match="--resume takes auto or never"):
        fine_tune(config, "runs/other", sweep=True)


def test_what_the_run_after_a_sweep_cannot_replace_is_told_before_the_sweep(pretrained, tmp_path, told):
    wanted = dict(steps=2, img_size=16, batch_size=8, train_images=16)
    train(finetuning(pretrained, tmp_path / "fine", **wanted, lr=0.01))
    shutil.copytree(tmp_path / "fine", tmp_path / "many" / "seed-5")
    for output, fields, runs in (
        ("fine", dict(batch_size=16), 1),
        ("fine", dict(sweep_lr="0.1,0.2"), 1),
        ("many", dict(seed=4, batch_size=16), 2),
    ):
        config = finetuning(pretrained, tmp_path / output, **wanted | dict(sweep_lr="0.1,0.01") | fields)
        with pytest.raises(InputError, match="holds a run with other settings"):
            fine_tune(config, sweep=True, runs=runs)
    config = finetuning(pretrained, tmp_path / "fine", **wanted, sweep_lr="0.1,0.01")
    (tmp_path / "fine" / "metrics.csv").write_text("mine")
    with pytest.raises(InputError, match="metrics.csv is damaged, or this run did not write it"):
        fine_tune(config, sweep=True)
    assert not told and not (tmp_path / "fine" / "sweep").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number, code", first(1, [(signal.SIGTERM, 0), (signal.SIGINT, 130)]))
def test_a_signal_at_the_end_of_a_run_starts_no_other_one(tmp_path, monkeypatch, capsys, number, code):
    def signalled(trainer, result):
        os.kill(os.getpid(), number)
        return finish(trainer, result)

    finish = Trainer._finish
    monkeypatch.setattr(Trainer, "_finish", signalled)
    tiny(3).save_pretrained(tmp_path / "w")
    command = ["finetune", "--data", "digits", "--weights", tmp_path / "w", "--output", tmp_path / "fine", "--runs", 2]
    command += ["--steps", 1, "--img-size", 16, "--device", "cpu"]
    assert run_cli(capsys, *command)[0] == code
    assert (tmp_path / "fine" / "seed-0" / "summary.json").exists() and not (tmp_path / "fine" / "seed-1").exists()
    monkeypatch.undo()
    assert run_cli(capsys, *command)[0] == 0 and (tmp_path / "fine" / "runs.json").exists()
