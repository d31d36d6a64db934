"""The tuner's clock: what is timed, and what stands around it."""

import time
from types import SimpleNamespace

import pytest
import torch

from vitfast.tools.verify.clock import DeviceClock, flush_buffer


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
