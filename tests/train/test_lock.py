"""One process trains in a run folder; after SIGKILL and SIGTERM the same command goes on, bit for bit."""

import errno
import fcntl
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time

import pytest
import torch
from commands import run_cli
from processes import Child, command_line, done
from runs import QUICK, content, digits, pretraining_command, same_runs, wait_for

from vitfast import InputError
from vitfast.train.lock import LOCK, locked
from vitfast.train.resume import find_checkpoint, read_record, read_training_state
from vitfast.train.trainer import Trainer, train

HERE = socket.gethostname()


@pytest.mark.slow(5)
def test_a_run_is_one_processs_and_survives_sigkill_and_sigterm(tmp_path, capsys):
    run, whole = tmp_path / "run", tmp_path / "whole"
    fields = QUICK | dict(steps=400, drop_path=0.1, lr_decay="constant", warmup_steps=0)  # of no length
    command = pretraining_command(run, **fields)
    first = Child(command_line, command)
    wait_for(run / "checkpoints" / "last", first)
    code, out, err = run_cli(capsys, *command)
    held = f"{run} is in use by process {first.pid} on {HERE}"
    assert code == 2 and not out and err == f"vitfast: error: {held}; wait for it or choose another --output\n"
    assert json.loads((run / LOCK).read_text())["pid"] == first.pid and first.poll() is None
    first.send_signal(signal.SIGKILL)
    first.communicate()
    killed = read_training_state(run / "checkpoints" / "last")["step"]
    assert (run / LOCK).exists() and 2 <= killed < 400

    second = Child(command_line, command)
    end = time.time() + 60
    while read_record(find_checkpoint(run))["step"] == killed and second.poll() is None:
        assert time.time() < end
        time.sleep(0.01)
    second.send_signal(signal.SIGTERM)
    (said,) = done([second])
    stopped = read_training_state(run / "checkpoints" / "last")["step"]
    assert f"took {run} over from process {first.pid} on" in said and f"resumed from step {killed}" in said
    assert f"stopped at step {stopped} of 400" in said and killed < stopped < 400 and not (run / LOCK).exists()

    torch.set_num_threads(1)
    steps = stopped + 3
    for folder in (run, whole):
        assert train(digits(folder, **fields | dict(steps=steps)))["steps"] == steps
    assert same_runs(run, whole)


@pytest.mark.long
def test_killed_twenty_times_and_resumed_bit_for_bit(tmp_path):
    """At random moments: in a step, while saving, in a rename."""
    run, whole, count = tmp_path / "run", tmp_path / "whole", 20
    settings = dict(batch_size=16, steps=84, save_every=2, ema_decay=0.9, drop_path=0.1, clip_norm=1.0)

    def step() -> int:
        checkpoint = find_checkpoint(run)
        return read_record(checkpoint)["step"] if checkpoint else 0

    for number in range(count):
        process = Child(command_line, pretraining_command(run, **settings))
        while step() < (number + 1) * 84 // (count + 1) and process.poll() is None:
            time.sleep(0.005)
        time.sleep(random.Random(number).random() * 0.05)
        process.send_signal(signal.SIGKILL)
        said = process.communicate()[1]
        assert number == 0 or "resumed from step" in said, said
    torch.set_num_threads(1)
    for output in (run, whole):
        train(digits(output, **settings))
    assert same_runs(run, whole)


def test_the_lock_of_another_machine_is_respected(four_steps, tmp_path, capsys):
    run = shutil.copytree(four_steps, tmp_path / "run")
    (run / LOCK).write_text(json.dumps(dict(host="elsewhere", pid=os.getpid())))
    before = content(run)
    command = pretraining_command(run, **QUICK, steps=6)
    code, _, err = run_cli(capsys, *command)
    assert code == 2 and f"is in use by process {os.getpid()} on elsewhere" in err and f"remove {run / LOCK}" in err
    assert content(run) == before
    (run / LOCK).unlink()
    assert run_cli(capsys, *command)[0] == 0


@pytest.mark.parametrize("text", ["", "[]", '{"host": 1, "pid": "x"}', "\0\xff", '{"host":'])
def test_a_lock_file_that_says_nothing_holds_nobody_up(tmp_path, text):
    (tmp_path / LOCK).write_text(text)
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text()) == dict(host=HERE, pid=os.getpid())
        with pytest.raises(InputError, match="in use by this process already"), locked(tmp_path):
            pass
    assert not (tmp_path / LOCK).exists()


def test_where_the_system_has_no_locks_the_process_number_decides(tmp_path, monkeypatch):
    def lockf(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / LOCK).write_text(json.dumps(dict(host=HERE, pid=gone.pid)))
    with locked(tmp_path):
        pass
    (tmp_path / LOCK).write_text(json.dumps(dict(host=HERE, pid=os.getppid())))
    with pytest.raises(InputError, match=f"in use by process {os.getppid()}"), locked(tmp_path):
        pass


def test_the_lock_is_released_by_an_error_and_a_run_continued_meanwhile_is_left_alone(tmp_path, monkeypatch):
    late, failing = (Trainer(digits(tmp_path, steps=4, **QUICK)) for _ in range(2))
    monkeypatch.setattr(failing, "evaluate", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing.fit()
    assert not (tmp_path / LOCK).exists() and read_training_state(tmp_path / "checkpoints" / "last")["step"] == 4
    before = content(tmp_path)
    with pytest.raises(InputError, match="another process has continued"):
        late.fit()
    assert content(tmp_path) == before
