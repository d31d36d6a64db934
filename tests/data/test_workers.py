"""How many processes read images: within the cores and the memory of the machine."""

import multiprocessing
import os
import subprocess
import time

import pytest
import torch
from runs import digits

from vitfast import InputError
from vitfast.data import workers
from vitfast.data.loader import open_data
from vitfast.data.samples import ONE

CPU = torch.device("cpu")
BATCH = 32 * 3 * 32 * 32  # bytes of the images of a batch


def processes(**settings) -> int:
    return open_data(digits(eval_batch_size=32, **settings), (32, 32), (8, 8), CPU).workers


def test_workers_are_bounded_by_cores_and_memory(monkeypatch, caplog):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6))
    unset = digits(data="hfds/any"), (32, 32), 1, ONE
    assert processes(workers=24) == 24 and processes(workers=0) == 0 and not caplog.text
    assert workers.loader_processes(*unset) == 6
    assert processes(workers=1_000_000_000) == 24
    assert "workers=1000000000 is lowered to 24: at most 4 for each of 6 cores" in caplog.text
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # ranks share the machine
    assert processes(workers=24) == 12 and workers.loader_processes(*unset) == 3
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    caplog.clear()
    monkeypatch.setattr(workers, "total_memory", lambda: 5 * 2 * 4 * BATCH)  # half of it: four batches of each of five
    assert processes(workers=24) == 5 and "half of the memory holds no more of the 4 batches" in caplog.text


def test_the_memory_of_a_container_counts():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 2**28 < workers.total_memory() <= total


def test_batches_larger_than_the_memory_are_refused_before_anything_is_read(monkeypatch):
    """But more than the images of a validation set are never at once: there is no reason to refuse."""
    with pytest.raises(InputError, match="batch_size=1000000000 is too large: a batch takes"):
        open_data(digits(batch_size=10**9), (32, 32), (8, 8), CPU)
    open_data(digits(eval_batch_size=10**9), (32, 32), (8, 8), CPU)
    monkeypatch.setattr(workers, "total_memory", lambda: 300 * BATCH // 32)
    with pytest.raises(InputError, match="eval_batch_size=200 is too large"):
        open_data(digits(eval_batch_size=200), (32, 32), (8, 8), CPU)
    assert open_data(digits(eval_batch_size=100), (32, 32), (8, 8), CPU).workers == 0


def _waits(ready) -> None:
    workers.leave_signals(0)
    ready.set()
    time.sleep(60)


def test_a_loader_process_ends_by_its_parent_alone():
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_waits, args=(ready := context.Event(),))
    process.start()
    assert ready.wait(30)
    for name in ("INT", "TERM"):
        subprocess.run(["kill", f"-{name}", str(process.pid)], check=True)
    process.join(0.3)
    assert process.is_alive()
    process.terminate()
    process.join(30)
    assert process.exitcode == 0
