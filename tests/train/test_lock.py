"""One process trains in a run folder; one that was killed there is followed, one on another machine is respected."""

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from commands import run_cli
from processes import Child, command_line
from runs import content, digits, pretraining_command

from vitfast import InputError
from vitfast.train.lock import LOCK, locked
from vitfast.train.resume import read_training_state
from vitfast.train.trainer import Trainer, train

QUICK = dict(img_size=16, batch_size=16, save_every=2)


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory) -> Path:
    """A finished run with checkpoints of steps 4 and 2."""
    run = tmp_path_factory.mktemp("four") / "run"
    train(digits(run, steps=4, **QUICK))
    return run


def wait_for(path: Path, process) -> None:
    end = time.time() + 90
    while not path.exists():
        assert time.time() < end and process.poll() is None, process.communicate()
        time.sleep(0.02)


@pytest.mark.slow(5)
def test_one_process_trains_in_a_run_folder_and_a_killed_one_is_followed(tmp_path, capsys, caplog):
    caplog.set_level("INFO")
    run = tmp_path / "run"
    command = pretraining_command(run, steps=100_000, **QUICK)
    first = Child(command_line, [str(text) for text in command])
    wait_for(run / "checkpoints" / "last", first)
    code, out, err = run_cli(capsys, *command)
    held = f"{run} is in use by process {first.pid} on {socket.gethostname()}"
    assert code == 2 and not out and err == f"vitfast: error: {held}; wait for it or choose another --output\n"
    assert json.loads((run / LOCK).read_text())["pid"] == first.pid and first.poll() is None
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert (run / LOCK).exists()
    step = read_training_state(run / "checkpoints" / "last")["step"]
    torch.set_num_threads(1)
    assert run_cli(capsys, *pretraining_command(run, steps=step + 2, **QUICK))[0] == 0
    assert caplog.text.count(f"took {run} over from process {first.pid} on") == 1
    assert f"resumed from step {step}" in caplog.text
    assert not (run / LOCK).exists()


def test_the_lock_of_another_machine_is_respected(four_steps, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(four_steps, run)
    (run / LOCK).write_text(json.dumps(dict(host="elsewhere", pid=os.getpid())))
    before = content(run)
    command = pretraining_command(run, steps=6, **QUICK)
    code, _, err = run_cli(capsys, *command)
    assert code == 2 and f"is in use by process {os.getpid()} on elsewhere" in err and f"remove {run / LOCK}" in err
    assert content(run) == before
    (run / LOCK).unlink()
    assert run_cli(capsys, *command)[0] == 0


@pytest.mark.parametrize("text", ["", "[]", '{"host": 1, "pid": "x"}', "\0\xff", '{"host":'])
def test_a_lock_file_that_says_nothing_holds_nobody_up(tmp_path, text):
    (tmp_path / LOCK).write_text(text)
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text()) == dict(host=socket.gethostname(), pid=os.getpid())
        with pytest.raises(InputError, match="in use by this process already"), locked(tmp_path):
            pass
    assert not (tmp_path / LOCK).exists()


def test_where_the_system_has_no_locks_the_process_number_decides(tmp_path, monkeypatch):
    def lockf(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for pid, free in ((os.getppid(), False), (gone.pid, True)):
        (tmp_path / LOCK).write_text(json.dumps(dict(host=socket.gethostname(), pid=pid)))
        if free:
            with locked(tmp_path):
                pass
        else:
            with pytest.raises(InputError, match=f"in use by process {pid}"), locked(tmp_path):
                pass


def test_the_lock_is_released_by_an_error_too(tmp_path, monkeypatch):
    trainer = Trainer(digits(tmp_path, steps=4, **QUICK))
    monkeypatch.setattr(trainer, "evaluate", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    assert not (tmp_path / LOCK).exists() and read_training_state(tmp_path / "checkpoints" / "last")["step"] == 4


def test_a_run_that_another_process_has_continued_meanwhile_is_left_alone(tmp_path):
    late = Trainer(digits(tmp_path, steps=4, **QUICK))
    train(digits(tmp_path, steps=4, **QUICK))
    before = content(tmp_path)
    with pytest.raises(InputError, match="another process has continued"):
        late.fit()
    assert content(tmp_path) == before
