"""One process writes a run folder, and only what is its own; kills, full disks and signals leave a whole checkpoint."""

import errno
import fcntl
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from children import limited
from commands import run_cli
from processes import Child, command_line, done
from runs import QUICK, content, digits, pretraining_command, records, same_runs, wait_for

from vitfast import InputError
from vitfast.run.lock import LOCK, locked
from vitfast.train import log, run_folder, trainer
from vitfast.train.resume import find_checkpoint, read_record, read_training_state
from vitfast.train.trainer import Trainer, train

HERE = socket.gethostname()


# ---- what vitfast did not write


@pytest.mark.slow
def test_nothing_of_somebody_else_is_removed(tmp_path):
    theirs = {
        "checkpoints/best.pt": b"mine",
        "checkpoints/step-00000003/model.safetensors": b"mine too",
        "tensorboard/events.out.tfevents.1700000000.host.1.0": b"another run",
        "notes.txt": b"do not lose",
    }
    for name, data in theirs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    train(digits(tmp_path, steps=2, **QUICK))
    shutil.copytree(tmp_path / "checkpoints" / "last", tmp_path / "checkpoints" / "best")
    best = content(tmp_path / "checkpoints" / "best")
    train(digits(tmp_path, steps=6, **QUICK))
    own_weights = str(tmp_path / "checkpoints" / "best")  # not to be removed with the run
    train(digits(tmp_path, steps=2, weights=own_weights, **QUICK), resume="never")
    held = content(tmp_path)
    assert {name: held[name] for name in theirs} == theirs
    assert content(tmp_path / "checkpoints" / "best") == best
    events = [path for path in (tmp_path / "tensorboard").iterdir() if path.name.endswith(".vitfast")]
    assert len(events) == 1  # those of the runs before were vitfast's own


def test_folders_that_somebody_puts_in_the_place_of_checkpoints_get_other_names(tmp_path, caplog):
    trainer = Trainer(digits(tmp_path, steps=4, eval_every=4, early_stop=2, hold_out=0.2, **QUICK))
    take, names = trainer._train, ("checkpoints/previous", "best")

    def put(images, labels):
        if trainer.step == 3:  # checkpoints/last is of step 2
            for name in names:
                (tmp_path / name).mkdir()
                (tmp_path / name / "thesis.txt").write_text("mine")
        return take(images, labels)

    trainer._train = put
    trainer.fit()
    for name in names:
        assert (tmp_path / f"{name}.1" / "thesis.txt").read_text() == "mine"
        assert f"was renamed to {Path(name).name}.1" in caplog.text
    steps = [
        read_training_state(tmp_path / name)["step"] for name in ("checkpoints/previous", "checkpoints/last", "best")
    ]
    assert steps == [2, 4, 4]


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path, monkeypatch):
    closed = (tmp_path, os.W_OK | os.X_OK)
    monkeypatch.setattr(os, "access", lambda path, mode: (Path(path), mode) != closed)
    for path in (tmp_path, tmp_path / "run"):
        with pytest.raises(InputError, match="cannot be written to"):
            run_folder.check_output(path)


# ---- one process


@pytest.mark.slow
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


# Signals, how many of them, whether every process of the run gets them, as from terminals, torchrun and schedulers.
SIGNALS = [(signal.SIGTERM, 1, True, 0), (signal.SIGINT, 1, True, 130), (signal.SIGINT, 2, False, 130)]


@pytest.mark.slow
@pytest.mark.parametrize("number, count, group, code", SIGNALS)
def test_a_signal_says_at_once_what_follows_and_leaves_a_saved_run(tmp_path, number, count, group, code):
    last = tmp_path / "run" / "checkpoints" / "last"
    settings = QUICK | dict(steps=400, lr_decay="constant", warmup_steps=0, workers=2 * group)
    command = [*map(str, pretraining_command(tmp_path / "run", **settings))]
    if group:
        program = [sys.executable, "-m", "vitfast", *command]
        process = subprocess.Popen(program, start_new_session=True, text=True, stderr=subprocess.PIPE)
    else:
        process = Child(command_line, command)
    wait_for(last, process)
    for _ in range(count):
        os.killpg(process.pid, number) if group else process.send_signal(number)
        time.sleep(0.01)
    _, said = process.communicate(timeout=180)
    told = "vitfast: stopping after this step"
    assert process.returncode == code and "Traceback" not in said and said.count(told) == 1
    assert code == 0 or ("; Ctrl-C again to stop now" in said and said.endswith("vitfast: interrupted\n"))
    if count == 1:
        stopped = re.search(r"stopped at step (\d+) of 400, saved; the same command goes on from there", said)
        assert said.index(told) < stopped.start() and read_training_state(last)["step"] == int(stopped[1])


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


# ---- a full disk


def assert_kept(folder: Path, run: Path) -> None:
    """`folder` holds the checkpoint and the settings of `run`, no part of another one, and no lock."""
    assert same_runs(folder, run) and (folder / "config.yaml").read_text().startswith("name: digits\n")
    assert {path.name for path in (folder / "checkpoints").iterdir()} <= {"last", "previous"}
    assert not (folder / LOCK).exists()


@pytest.mark.slow
def test_a_file_that_cannot_become_large_enough(four_steps, tmp_path):
    """The settings, the model, the state of the optimiser."""
    sizes, folders = [1_200, 500_000, 1_500_000], [tmp_path / name for name in "abc"]
    commands = [pretraining_command(shutil.copytree(four_steps, run), steps=6, **QUICK) for run in folders]
    child = Child(limited, sizes, *commands)
    _, err = child.communicate()
    assert child.returncode == 0, err
    errors = [line for line in err.splitlines() if line.startswith("vitfast: error: ")]
    assert len(errors) == 3 and "Traceback" not in err
    for folder, line in zip(folders, errors):
        assert "File too large" in line and str(folder) in line and "(step 4)" in line
        assert_kept(folder, four_steps)


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "owner, name, step",
    [
        (os, "pwrite", 4),  # of the lock
        (log.Metrics, "_line", 4),
        (log.Events, "write", 4),
        (trainer, "write_text", 6),
    ],
)
@pytest.mark.slow
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


# ---- killed while saving


def write_checkpoint(run: Path, step: int) -> None:
    """The calls of a save, with a few bytes for tensors."""
    with run_folder.new_checkpoint(run) as work:
        (work / "state").mkdir()
        for name in ("model.safetensors", "state/state.safetensors", "state/state.json"):
            (work / name).write_text(str(step))


def steps_of(run: Path) -> dict[str, set]:
    """The step that each file of each checkpoint is of: one, where it is whole."""
    folders = [path for path in (run / "checkpoints").iterdir() if not path.name.startswith(".")]
    return {path.name: {file.read_text() for file in path.rglob("*") if file.is_file()} for path in folders}


def die(work: Path, killed_at: int) -> int:
    """The exit code of a process that saves step 3 and is killed (99) at this call of the file system, if it comes."""
    calls = "open os.rename os.remove os.rmdir os.mkdir shutil.rmtree ctypes.dlopen os.listdir os.scandir".split()
    pid = os.fork()
    if not pid:
        count = 0

        def hook(event, _):
            nonlocal count
            count += event in calls
            if count == killed_at:
                os._exit(99)

        sys.addaudithook(hook)
        write_checkpoint(work, 3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.slow
def test_a_kill_at_every_point_of_a_save_leaves_a_whole_checkpoint(tmp_path):
    template, work, points = tmp_path / "template", tmp_path / "work", 0
    for step in (1, 2):
        write_checkpoint(template, step)
    assert steps_of(template) == dict(last={"2"}, previous={"1"})
    seen, code = [], 99
    while code == 99:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(template, work)
        points += 1
        code = die(work, points)
        kept = run_folder.find_checkpoint(work)
        seen.append((kept.name, *(steps := steps_of(work))[kept.name]))
        assert all(len(of) == 1 and len(list((work / "checkpoints" / k).rglob("*"))) == 4 for k, of in steps.items())
        write_checkpoint(work, 4)
        assert steps_of(work).keys() == {"last", "previous"} and steps_of(work)["last"] == {"4"}
        assert len(list((work / "checkpoints").iterdir())) == 2  # nothing is left behind
    assert code == 0 and points > 20
    assert list(dict.fromkeys(seen)) == [("last", "2"), ("previous", "2"), ("last", "3")]
