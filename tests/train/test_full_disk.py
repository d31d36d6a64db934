"""A full disk: one line, exit code 1, the earlier checkpoint whole, and the same command goes on once there is room."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from children import limited
from commands import picture, run_cli
from processes import Child
from runs import QUICK, pretraining_command, records, same_runs

from vitfast.train import log, resume, run_folder, trainer
from vitfast.train.lock import LOCK
from vitfast.train.resume import read_training_state


def assert_kept(folder: Path, run: Path) -> None:
    """`folder` holds the checkpoint and the settings of `run`, no part of another one, and no lock."""
    assert same_runs(folder, run) and (folder / "config.yaml").read_text().startswith("name: digits\n")
    assert {path.name for path in (folder / "checkpoints").iterdir()} <= {"last", "previous"}
    assert not (folder / LOCK).exists()


def test_a_file_that_cannot_become_large_enough(four_steps, tmp_path):
    """The settings, the model, the state of the optimiser; and tables of predictions."""
    sizes, folders = [1_200, 500_000, 1_500_000], [tmp_path / name for name in "abc"]
    commands = [pretraining_command(shutil.copytree(four_steps, run), steps=6, **QUICK) for run in folders]
    photos = tmp_path / "photos"
    photos.mkdir()
    for i in range(40):
        picture(i).save(photos / f"{i}.png")
    tables = [photos / "photos.csv", photos / "photos.json"]
    predict = ["predict", str(photos), "--weights", str(four_steps), "--device", "cpu", "--output"]
    child = Child(limited, [*sizes, 4_000, 4_000], *commands, *([*predict, str(table)] for table in tables))
    _, err = child.communicate()
    assert child.returncode == 0, err
    errors = [line for line in err.splitlines() if line.startswith("vitfast: error: ")]
    assert len(errors) == 5 and "Traceback" not in err
    for folder, line in zip(folders, errors):
        assert "File too large" in line and str(folder) in line and "(step 4)" in line
        assert_kept(folder, four_steps)
    assert errors[3:] == [f"vitfast: error: [Errno 27] File too large: '{table}'" for table in tables]
    assert not list(photos.glob("*photos*"))


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "owner, name, step",
    [
        (os, "pwrite", 4),  # of the lock
        (log.Metrics, "_line", 4),
        (log.Events, "write", 4),
        (resume, "write_safetensors", 4),
        (trainer, "write_summary", 6),
    ],
)
def test_every_file_of_a_run(four_steps, tmp_path, monkeypatch, capsys, owner, name, step):
    folder = shutil.copytree(four_steps, tmp_path / "run")
    monkeypatch.setattr(owner, name, full)
    command = pretraining_command(folder, steps=6, **QUICK)
    code, _, err = run_cli(capsys, *command)
    assert code == 1 and err.count("\n") == 1 and "cannot be written (No space left on device)" in err
    assert read_training_state(folder / "checkpoints" / "last")["step"] == step
    assert not list((folder / "checkpoints").glob(".*")) and not (folder / LOCK).exists()
    monkeypatch.undo()
    assert run_cli(capsys, *command)[0] == 0 and records(folder, "val", "step")[-1] == "6"
    assert json.loads((folder / "summary.json").read_text())["steps"] == 6


def test_a_rename_that_fails_puts_the_last_checkpoint_back(four_steps, tmp_path, monkeypatch, capsys):
    run, rename = shutil.copytree(four_steps, tmp_path / "run"), os.rename
    monkeypatch.setattr(run_folder, "exchange", lambda a, b: False)
    monkeypatch.setattr(os, "rename", lambda a, b: full() if Path(a).name == ".writing" else rename(a, b))
    code, _, err = run_cli(capsys, *pretraining_command(run, steps=6, **QUICK))
    assert code == 1 and "No space left on device); the last good checkpoint is" in err and "last (step 4)" in err
    assert_kept(run, four_steps)
