"""`vitfast tune`: what it prints, refuses and returns, and what a lost process leaves behind."""

import contextlib
import dataclasses

import pytest
import torch
from processes import SERVER, Child, done
from tool_children import dies, hangs, writes
from tuning import CPU, TINY, Clock, Compiler

from vitfast.cli import main
from vitfast.errors import InputError
from vitfast.kernels import tiles
from vitfast.tools import child
from vitfast.tools.tune import command, user_table


class InProcess:
    """`work` here, in the place of a process."""

    def __init__(self, module): ...

    def run(self, seconds, function, *arguments, hear):
        return function(lambda *what: hear(*what), *arguments)


def run_command(monkeypatch, clock, *given) -> int:
    """`vitfast tune` on a machine whose GPU is this clock."""
    monkeypatch.setattr(command, "machine", lambda: (CPU, "GPU", clock, Compiler()))
    monkeypatch.setattr(command, "gpu_lock", contextlib.nullcontext)
    monkeypatch.setattr(command, "monotonic", clock.now)
    monkeypatch.setattr(command, "Children", InProcess)
    monkeypatch.setattr(command.signal, "alarm", lambda seconds: None)
    monkeypatch.setitem(command.MODELS, "B/16", TINY)
    return main(["tune", "--dtype", "float16", *given])


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--model", "B/61"], "did you mean B/16"),
        (["--seconds", "0"], "--seconds"),
        (["--batch-size", "-1"], "--batch-size"),
        pytest.param([], "GPU", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")),
    ],
)
def test_wrong_options_are_refused(capsys, given, named):
    assert main(["tune", *given]) == 2 and named in capsys.readouterr().err


def test_the_command_keeps_what_it_finds_and_tells_its_own_count(table, monkeypatch, capsys):
    clock = Clock(lambda problem, t: 0.5 if t.num_warps == 16 else 1.0)
    assert run_command(monkeypatch, clock, "--only", "linear_gelu") == 0
    out = capsys.readouterr().out
    assert "1000.000 ms as it was, 500.000 ms now (2.00x)" in out and f"{len(clock.timed)} timings" in out
    assert "1 tiles faster than before, kept in" in out and len(table()) == 1
    assert run_command(monkeypatch, Clock(), "--only", "nonsense") == 2
    assert "no operation has 'nonsense' in its name; there are layer_norm_fwd" in capsys.readouterr().err
    tiles.user_table_path().write_text('{"tiles": [{"op": 1}]}')
    assert run_command(monkeypatch, Clock()) == 2 and "tiles.json is damaged" in capsys.readouterr().err


def test_what_one_model_did_not_reach_is_the_next_ones_and_said(table, monkeypatch, capsys):
    class Slow(Clock):
        def seconds(self, problem, t, run):
            self.time += 1.0
            return super().seconds(problem, t, run)

    monkeypatch.setitem(command.MODELS, "S/16", TINY)
    options = "--only linear_gelu --seconds 20 --model B/16 S/16".split()
    assert run_command(monkeypatch, clock := Slow(), *options) == 0
    out = capsys.readouterr().out
    assert out.count("linear_gelu_fwd") == 2 and "the same command goes on from here" in out and 20 <= clock.time <= 22


@pytest.mark.parametrize("again", [False, True], ids=["first", "when it is timed again"])
@pytest.mark.slow
def test_a_candidate_that_breaks_the_gpu_is_refused_and_the_rest_tuned(table, monkeypatch, capsys, again):
    """Whatever words the error has: the device is asked. Another process goes on with what is left."""
    times = iter([0.5] if again else [])

    def breaks(problem, t):
        clock.broken = False  # of a new process
        bad = problem.op == "linear_gelu_fwd" and t == dataclasses.replace(problem.start, num_warps=16)
        if bad and not (luck := next(times, 0)):
            clock.broken = True
            raise RuntimeError("CUDA error: unspecified launch failure")
        return luck if bad else 1.0

    clock = Clock(breaks)
    assert run_command(monkeypatch, clock, "--only", "gelu") == 0
    said = capsys.readouterr()
    assert "has broken the GPU's context" in said.err and "it is not tried again" in said.err
    assert [key[3].num_warps for key in user_table.refused("GPU")] == [16] and table() == []
    assert said.out.count("gelu_bwd ") == 1 and said.out.count("linear_gelu_fwd 64x96") == 1  # settled once each
    assert run_command(monkeypatch, later := Clock(), "--only", "linear_gelu") == 0
    (refused,) = (key[3] for key in user_table.refused("GPU"))
    assert later.timed and refused not in {t for _, t in later.timed}


@pytest.mark.slow
@pytest.mark.parametrize(("work", "why"), [(dies, "died with exit code 3"), (hangs, "has not ended after 1 s")])
def test_a_process_that_dies_or_hangs_in_a_candidate_is_ended_and_that_refused(table, monkeypatch, capsys, work, why):
    monkeypatch.setattr(command, "HANGS", 1)
    monkeypatch.setattr(command, "work", work)
    monkeypatch.setattr(child.multiprocessing, "get_context", lambda kind: SERVER)
    told = dict(done=set(), kept=set())
    assert command._in_a_process(told, "B/16", None, 1.0) is None
    assert list(user_table.refused("GPU").values()) == [why] and why in capsys.readouterr().err
    assert told == dict(done=set(), kept={"a"} if work is dies else set())


def test_an_interrupted_command_says_what_was_kept(table, monkeypatch, capsys):
    def interrupted(send, *_):
        send("kept", "linear_gelu_fwd")
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "work", interrupted)
    assert run_command(monkeypatch, Clock(), "--only", "linear_gelu") == 130
    said = capsys.readouterr()
    assert "1 tiles faster than before, kept in" in said.out and "interrupted" in said.err


# The user's own table: several writers, one tuner for each GPU


def test_two_processes_that_write_the_table_lose_nothing(table, tmp_path):
    path = str(tmp_path / "tiles.json")
    done([Child(writes, path, name, 40) for name in ("a", "b")])
    assert sorted((r["gpu"], int(r["shape"])) for r in table()) == [(name, i) for name in ("a", "b") for i in range(40)]


def test_one_tuner_at_a_time(table):
    held = user_table.only_one("GPU-1")
    assert user_table.only_one("GPU-2")
    with pytest.raises(InputError, match="another vitfast tune runs on this GPU"):
        user_table.only_one("GPU-1")
    held.close()
    assert user_table.only_one("GPU-1")
