"""A full disk: one line, exit code 1, the earlier checkpoint whole, and the same command goes on once there is room."""

import csv
import errno
import json
import os
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
from commands import picture, run_cli
from processes import Child, command_line
from runs import digits, pretraining_command, same, training_tensors, weights

from vitfast.train import log, trainer
from vitfast.train.lock import LOCK
from vitfast.train.resume import read_training_state
from vitfast.train.trainer import train

QUICK = dict(img_size=16, batch_size=16, save_every=2)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished run with checkpoints of steps 4 and 2."""
    folder = tmp_path_factory.mktemp("run") / "run"
    train(digits(folder, steps=4, **QUICK))
    return folder


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory):
    """A disk of 16 MB, where this process may mount one."""
    folder = tmp_path_factory.mktemp("disk")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no right to mount a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)  # busy while a file is held


def assert_kept(folder: Path, run: Path) -> None:
    """`folder` holds the checkpoint of `run`, no part of another one, and no lock."""
    assert same(weights(folder), weights(run)) and same(training_tensors(folder), training_tensors(run))
    assert {path.name for path in (folder / "checkpoints").iterdir()} <= {"last", "previous"}
    assert not (folder / LOCK).exists()


def fill(folder: Path, pages: int) -> Path:
    """Fills the disk but for this many pages, and returns the file that does."""
    filling = folder / "filling"
    with open(filling, "wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(2**16))
            except OSError:
                break
        free = os.statvfs(folder).f_bavail
        file.truncate(max(0, os.path.getsize(filling) - (pages - free) * 4096))
    return filling


@pytest.mark.parametrize("pages", [0, 1, 2, 4, 6, 300])
def test_a_full_disk_loses_nothing(run, small_disk, tmp_path, capsys, pages):
    """Full at once, at the settings, at a record, in the middle of a checkpoint."""
    folder = small_disk / "run"
    shutil.rmtree(folder, ignore_errors=True)
    (small_disk / "filling").unlink(missing_ok=True)
    shutil.copytree(run, folder)
    filling = fill(small_disk, pages)
    command = pretraining_command(folder, steps=6, **QUICK)
    code, _, err = run_cli(capsys, *command)
    assert code == 1 and err.count("\n") == 1 and "No space left on device" in err and str(folder) in err
    assert f"the last good checkpoint is {folder / 'checkpoints' / 'last'} (step 4)" in err
    assert_kept(folder, run)
    filling.unlink()
    assert run_cli(capsys, *command)[0] == 0 and read_training_state(folder / "checkpoints" / "last")["step"] == 6


def limited(size: int, argv: list[str]) -> int:
    """`vitfast ...` where no file may become larger than `size` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return command_line(argv)


@pytest.mark.parametrize("size", [1_200, 500_000, 1_500_000])
def test_a_file_that_cannot_become_large_enough(run, tmp_path, size):
    """As on a full disk, also without the right to mount one: config.yaml, the records, the model, the state."""
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    command = pretraining_command(folder, steps=6, **QUICK)
    child = Child(limited, size, [str(text) for text in command])
    _, err = child.communicate()
    assert child.returncode == 1, err
    errors = [line for line in err.splitlines() if not line.startswith(("resumed", "pretrain:", "epoch"))]
    assert len(errors) == 1 and "File too large" in errors[0] and "(step 4)" in errors[0], err
    assert_kept(folder, run)


@pytest.mark.parametrize("name", ["photos.csv", "photos.json"])
def test_predictions_that_find_no_room_name_their_file(run, tmp_path, name):
    for i in range(40):
        picture(i).save(tmp_path / f"{i}.png")
    command = ["predict", tmp_path, "--weights", run, "--device", "cpu", "--output", tmp_path / name]
    child = Child(limited, 4_000, [str(text) for text in command])
    _, err = child.communicate()
    assert child.returncode == 1 and err == f"vitfast: error: [Errno 27] File too large: '{tmp_path / name}'\n"
    assert not list(tmp_path.glob("*photos*"))


@pytest.mark.parametrize("part", ["metrics.csv", "tensorboard", "summary.json"])
def test_every_file_of_the_log(run, tmp_path, monkeypatch, capsys, part):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    owner, name = {
        "metrics.csv": (log.Metrics, "_line"),
        "tensorboard": (log.Events, "write"),
        "summary.json": (trainer, "write_summary"),
    }[part]
    monkeypatch.setattr(owner, name, full)
    command = pretraining_command(folder, steps=6, **QUICK)
    code, _, err = run_cli(capsys, *command)
    assert code == 1 and err.count("\n") == 1 and "cannot be written (No space left on device)" in err
    step = read_training_state(folder / "checkpoints" / "last")["step"]
    assert step == (6 if part == "summary.json" else 4)
    monkeypatch.undo()
    assert run_cli(capsys, *command)[0] == 0
    with open(folder / "metrics.csv") as file:
        assert [row["step"] for row in csv.DictReader(file)][-1] == "6"
    assert json.loads((folder / "summary.json").read_text())["steps"] == 6
