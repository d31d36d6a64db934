"""Processes that share VITFAST_TURNS are alone one at a time, and whoever runs in windows lets them in."""

import fcntl
import json
import multiprocessing
import signal
import sys
import threading
import time
from pathlib import Path

import machine
import pytest

BENCH = Path(__file__).parents[2] / "bench"
LIMIT = 20  # seconds


def process(turns: str, out: str, windows: bool) -> None:
    """Writes (begin, end, whether alone) of what it did on the device."""
    import os

    os.environ["VITFAST_TURNS"] = turns
    sys.path.insert(0, str(BENCH))
    import machine

    found = []

    def work(alone: bool) -> None:
        begin = time.monotonic()
        time.sleep(0.05)
        found.append((begin, time.monotonic(), alone))

    machine.together()
    for _ in range(20 if windows else 3):
        work(alone=False)
        if windows:
            machine.together()
        else:
            with machine.alone():
                work(alone=True)
    Path(out).write_text(json.dumps(found))


@pytest.mark.slow
def test_nobody_uses_the_device_beside_one_that_is_alone(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    outs = [tmp_path / f"{i}.json" for i in range(3)]
    given = [(str(tmp_path / "turns"), str(out), i == 2) for i, out in enumerate(outs)]
    processes = [spawn.Process(target=process, args=arguments, daemon=True) for arguments in given]
    for each in processes:
        each.start()
    for each in processes:
        each.join(LIMIT)
    assert [each.exitcode for each in processes] == [0, 0, 0]
    spans = [[(*span, i) for span in json.loads(out.read_text())] for i, out in enumerate(outs)]
    alone = [span for each in spans for span in each if span[2]]
    assert len(alone) == 6
    for begin, end, _, i in alone:
        beside = [s for each in spans for s in each if s[3] != i and s[0] < end and begin < s[1]]
        assert not beside, (begin, end, beside)


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """The file of the turns, as another process holds it together with this one."""
    monkeypatch.setenv("VITFAST_TURNS", str(tmp_path / "turns"))
    machine._turns.cache_clear()
    with open(tmp_path / "turns", "w") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        yield other
    machine._turns.cache_clear()


def test_a_case_has_its_whole_time_after_it_has_waited(shared):
    def stop(number, frame):
        raise TimeoutError

    threading.Timer(0.6, fcntl.flock, (shared, fcntl.LOCK_UN)).start()
    previous = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        start = time.monotonic()
        with machine.alone():
            assert time.monotonic() - start > 0.5
            assert 0.2 < signal.getitimer(signal.ITIMER_REAL)[0] <= 0.3
            with pytest.raises(TimeoutError):
                time.sleep(5)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_what_is_measured_once_is_measured_alone(shared, tmp_path, monkeypatch):
    """And by one process: what another one wrote meanwhile counts. Inside, `alone` is still alone."""
    known = tmp_path / "known.json"
    monkeypatch.setenv("VITFAST_CEILINGS", str(known))

    def beside() -> bool:
        with open(shared.name) as third:
            try:
                fcntl.flock(third, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    def let_in():
        known.write_text(json.dumps({"copy": 1.0}))
        fcntl.flock(shared, fcntl.LOCK_UN)

    threading.Timer(0.3, let_in).start()
    assert machine.once("copy", lambda: pytest.fail("measured twice")) == 1.0
    assert machine.once("product", lambda: (machine.once("inner", beside), beside())) == (False, False)
    assert beside()
