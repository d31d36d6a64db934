"""Processes that share VITFAST_TURNS are alone one at a time, and whoever runs in windows lets them in."""

import json
import multiprocessing
import sys
import time
from pathlib import Path

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
