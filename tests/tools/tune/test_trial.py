"""A trial: what is left unwritten is found out, and what is timed."""

import math
import time
from types import SimpleNamespace

import pytest
import torch
from tuning import CPU

from vitfast.kernels.configs.tiles import tile
from vitfast.tools import verify
from vitfast.tools.tune.trial import DeviceClock, Problem, Trial
from vitfast.tools.verify import Wrong
from vitfast.tools.verify.clock import flush_buffer
from vitfast.tools.verify.launcher import Launcher


def test_what_a_candidate_leaves_unwritten_is_found_out(monkeypatch):
    """Whose error is infinite; and no NaN passes, wherever it comes from."""

    def call(x):
        out = torch.empty_like(x)
        out[:-1] = 2 * x[:-1]
        return out

    launcher = Launcher(lambda t: (t.values(6, 3),), call, lambda x: 2 * x)
    trial = Trial(Problem("", "", "", "double", launcher, tile(), [], {}), torch.float32, CPU)
    right = 2 * trial.inputs[0]
    del right  # whose memory, with the right values in it, is what the next allocation gets
    with pytest.raises(Wrong, match="error of a row inf"):
        trial.check()
    monkeypatch.setattr(verify, "errors", lambda *_: (math.nan, math.nan))
    with pytest.raises(Wrong, match="error of a row nan"):
        trial.check()


def test_the_clock_takes_the_median_of_calls_that_are_launched_behind_a_busy_device(monkeypatch):
    """Every timed call comes after a flush and a lead longer than its launch, and events stand around it alone."""
    told, times = [], iter([5.0, 1.0, 9.0])

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            told.append("event")

        def elapsed_time(self, end):
            return next(times)  # in milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: told.append("wait"))
    monkeypatch.setattr(
        torch.cuda, "_sleep", lambda cycles: told.append("lead" if cycles > 2e9 * 0.01 else "short lead")
    )
    clock = DeviceClock.__new__(DeviceClock)
    written, read = (SimpleNamespace(**{name: lambda name=name: told.append(name)}) for name in ("zero_", "sum"))
    clock.rounds, clock.flushed = 3, (written, read)

    def run():
        told.append("run")
        time.sleep(0.005)

    assert clock.seconds(None, None, run) == pytest.approx(5e-3)
    assert told == ["run", "run", "wait", "run", *(["zero_", "sum", "lead", "event", "run", "event"] * 3), "wait"]
    largest_l2 = 126 * 2**20  # of a B200, in bytes
    assert all(piece.nbytes >= largest_l2 for piece in flush_buffer(torch.device("meta")))
