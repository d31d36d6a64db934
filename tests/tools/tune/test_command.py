"""`vitfast tune`: what it prints, refuses and returns, and what a lost GPU leaves behind."""

import contextlib
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tuning import OTHER, TINY, Clock, make_tuner

from vitfast.cli import main
from vitfast.errors import InputError
from vitfast.kernels import tiles
from vitfast.tools import tune
from vitfast.tools.tune import user_table


def run_command(monkeypatch, clock, *given) -> int:
    """`vitfast tune` on a machine whose GPU is this clock."""
    monkeypatch.setattr(tune, "machine", lambda dtype: contextlib.nullcontext(make_tuner(clock)))
    monkeypatch.setattr(tune, "monotonic", clock.now)
    monkeypatch.setitem(tune.MODELS, "B/16", TINY)
    return main(["tune", "--dtype", "float16", "--only", "gelu_bwd", *given])


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--model", "B/61"], "did you mean B/16"),
        (["--seconds", "0"], "--seconds"),
        (["--batch-size", "-1"], "--batch-size"),
        (["--only", "gelu", "--only", "nonsense"], "unknown operation 'nonsense'"),
        pytest.param([], "GPU", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")),
    ],
)
def test_wrong_options_are_refused(capsys, given, named):
    assert main(["tune", *given]) == 2 and named in capsys.readouterr().err


def test_the_command_keeps_what_it_finds_and_says_so(table, monkeypatch, capsys):
    assert run_command(monkeypatch, Clock(lambda tile: 0.5 if tile == OTHER else 1.0)) == 0
    out = capsys.readouterr().out
    assert "1000.000 ms as it was" in out and "500.000 ms in place of 1000.000 ms" in out
    assert "1 tiles faster than before, kept in" in out and len(table()) == 1 and "same command" not in out
    tiles.user_table.path().write_text('{"tiles": [{"op": 1}]}')
    assert run_command(monkeypatch, Clock()) == 2 and "tiles.json is damaged" in capsys.readouterr().err


def test_every_tile_has_its_share_of_the_time_and_what_was_not_tried_is_said(table, monkeypatch, capsys):
    clock = Clock(takes=2.0)
    assert run_command(monkeypatch, clock, "--seconds", "20", "--only", "column_sums") == 0
    out = capsys.readouterr().out
    assert out.count("the time was up") == 3 and "the same command goes on from here" in out
    blocks = ["BLOCK_N" in tile.meta for tile in clock.timed]
    assert blocks == [False] * 4 + [True] * 3 + [False] * 3 and clock.time == 20, blocks


BROKEN = "vitfast: error: gelu_bwd d96: .* has broken the GPU's context .*tune the other operations with --only NAME"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [(RuntimeError("CUDA error: launch failure"), 1, BROKEN), (KeyboardInterrupt(), 130, "interrupted")],
)
def test_a_broken_gpu_and_an_interruption_keep_what_was_found(table, monkeypatch, capsys, error, code, said):
    """Whatever words the error has: the device is asked."""

    def planted(tile):
        if tile.num_stages == 2:
            clock.broken = True
            raise error
        return 0.5 if tile == OTHER else 1.0

    clock = Clock(planted)
    assert run_command(monkeypatch, clock) == code
    found = capsys.readouterr()
    assert re.search(said, found.err) and "1 tiles faster than before, kept in" in found.out and len(table()) == 1


@pytest.mark.slow
def test_a_candidate_that_hangs_ends_the_command(table, monkeypatch, capsys):
    ended = threading.Event()
    monkeypatch.setattr(tune, "HANGS", -399.5)  # seconds past the time of the problem
    monkeypatch.setattr(tune.os, "_exit", lambda code: ended.set() if code == 1 else None)
    assert run_command(monkeypatch, Clock(lambda tile: float(ended.wait(60)))) == 0
    assert "vitfast: error: a kernel of gelu_bwd d96 hangs; faster tiles are kept; " in capsys.readouterr().err


def test_two_that_write_the_table_lose_nothing_and_replace_their_own(table):
    def writes(gpu: str) -> None:
        for i in range(20):
            user_table.keep(tiles.config(4, 2, BLOCK_M=16), op="x", gpu=gpu, bits="16", shape=str(i % 10))

    with ThreadPoolExecutor() as both:
        list(both.map(writes, ("a", "b")))
    assert sorted((row["gpu"], int(row["shape"])) for row in table()) == [(gpu, i) for gpu in "ab" for i in range(10)]


def test_one_tuner_at_a_time(table):
    for _ in range(2):  # a lock that was held is free again
        with user_table.lock("1", "taken"), user_table.lock("2", "taken"), pytest.raises(InputError, match="taken"):
            user_table.lock("1", "taken").__enter__()
