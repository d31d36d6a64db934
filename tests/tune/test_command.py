"""`vitfast tune`: what it prints, hands to its next process, and returns."""

import json
import os

import torch
from tuning import CPU, TINY, Clock, Compiler

from vitfast.kernels import tiles
from vitfast.tune import command, user_table


def test_the_command_says_what_is_wrong(capsys):
    from vitfast.cli import main

    for given, said in (
        (["--model", "B/61"], "unknown model 'B/61'; did you mean B/16"),
        (["--seconds", "0"], "--seconds must be positive, got 0"),
        (["--batch-size", "-1"], "--batch-size must be positive, got -1"),
    ):
        assert main(["tune", *given]) == 2
        assert said in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["tune"]) == 2
        assert "there is none here" in capsys.readouterr().err


def run_command(monkeypatch, clock, *given) -> int:
    """`vitfast tune` on a machine whose GPU is this clock."""
    from vitfast.cli import main

    monkeypatch.setattr(command, "machine", lambda: (CPU, "GPU", clock, Compiler()))
    monkeypatch.setitem(command.MODELS, "B/16", TINY)
    return main(["tune", "--dtype", "float16", *given])


def test_the_command_keeps_what_it_finds_and_tells_its_own_count(table, monkeypatch, capsys):
    clock = Clock(lambda problem, t: 0.5 if t.num_warps == 16 else 1.0)
    assert run_command(monkeypatch, clock, "--only", "linear_gelu") == 0
    out = capsys.readouterr().out
    assert "1.000" not in out.splitlines()[0] and "1000.000 ms as it was, 500.000 ms now (2.00x)" in out
    assert f"{len(clock.timed)} timings" in out and "1 tiles faster than before, kept in" in out and len(table()) == 1
    assert run_command(monkeypatch, Clock(), "--only", "nonsense") == 2
    assert "no operation has 'nonsense' in its name; there are layer_norm_fwd" in capsys.readouterr().err


def test_the_command_says_when_the_time_was_up(table, monkeypatch, capsys):
    class Slow(Clock):
        def seconds(self, problem, t, run):
            self.time += 1.0
            return super().seconds(problem, t, run)

    assert run_command(monkeypatch, Slow(), "--seconds", "3") == 0
    assert "the same command goes on from here" in capsys.readouterr().out


def test_the_command_goes_on_in_a_new_process_when_a_candidate_breaks_the_gpu(table, monkeypatch, capsys):
    def breaks(problem, t):
        clock.time += 1.0
        if problem.op == "linear_gelu_fwd" and t.num_warps == 16:
            clock.broken = True
            raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
        return 1.0

    became = []
    monkeypatch.setattr(command.os, "execv", lambda path, given: became.append(given))
    monkeypatch.setenv(command.GOES_ON, "{}")
    clock = Clock(breaks)
    try:
        run_command(monkeypatch, clock, "--only", "gelu", "--seconds", "500", "--batch-size", "2", "--deterministic")
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
    wanted = [
        "-m",
        "vitfast",
        "tune",
        "--model",
        "B/16",
        "--dtype",
        "float16",
        "--only",
        "gelu",
        "--batch-size",
        "2",
        "--deterministic",
    ]
    assert became[0][1:] == wanted and "has broken the GPU's context" in capsys.readouterr().err
    state = json.loads(os.environ[command.GOES_ON])
    assert (
        state["left"] == 500 - clock.time and [key[0] for key in state["done"]] == ["gelu_bwd"] and state["kept"] == []
    )
    assert [key[3].num_warps for key in user_table.refused("GPU")] == [16]
    assert run_command(monkeypatch, again := Clock(), "--only", "gelu") == 0  # which takes up what was handed over
    assert {key[0] for key, _ in again.timed} == {
        "linear_gelu_fwd",
        "dgelu_matmul",
    } and command.GOES_ON not in os.environ


def test_a_problem_that_one_model_did_not_reach_is_the_next_ones(table, monkeypatch, capsys):
    class Slow(Clock):
        def seconds(self, problem, t, run):
            self.time += 1.0
            return super().seconds(problem, t, run)

    monkeypatch.setitem(command.MODELS, "S/16", TINY)
    assert (
        run_command(monkeypatch, clock := Slow(), "--only", "linear_gelu", "--seconds", "20", "--model", "B/16", "S/16")
        == 0
    )
    out = capsys.readouterr().out
    assert out.count("linear_gelu_fwd") == 2 and "the same command goes on from here" in out and 20 <= clock.time <= 22


def test_deterministic_leaves_out_libraries_that_may_add_in_any_order(table, monkeypatch, capsys):
    try:
        assert (
            run_command(
                monkeypatch,
                Clock(lambda problem, t: 0.5 if t.provider == "flash" else 1.0),
                "--only",
                "attention",
                "--deterministic",
            )
            == 0
        )
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
    assert [(row["op"], row["provider"]) for row in table()] == [("attention_fwd", "flash")]
    assert "its backward may add in any order" in capsys.readouterr().out


def test_a_damaged_table_is_one_line(table, monkeypatch, capsys):
    tiles.user_table_path().write_text('{"tiles": [{"op": 1}]}')
    assert run_command(monkeypatch, Clock()) == 2
    assert "tiles.json is damaged" in capsys.readouterr().err
    tiles.user_table_path().write_text(
        '{"tiles": [], "refused": [{"num_warps": 4, "num_stages": 2, "provider": "x", "blocks": {}}]}'
    )
    assert run_command(monkeypatch, Clock()) == 2
    assert "tiles.json is damaged (KeyError: 'op'); remove it" in capsys.readouterr().err


def test_an_interrupted_command_says_what_was_kept(table, monkeypatch, capsys):
    clock = Clock(lambda problem, t: 1 / t.num_warps, stop_after=40)
    assert run_command(monkeypatch, clock, "--only", "linear_gelu") == 130
    said = capsys.readouterr()
    assert "1 tiles faster than before, kept in" in said.out and "interrupted" in said.err and len(table()) == 1
