"""The machine in words, its ceilings, its data sheet, and the clock."""

import json
import subprocess
import time
import types
from pathlib import Path

import clock
import machine
import pytest
import report
import stand_in
import torch
from bench_cases import bench_conftest

from vitfast import cost
from vitfast.machine_code.cubin import BIN

ROOT = Path(__file__).parents[2]


def test_ceilings_are_shared_by_the_processes_of_a_run(tmp_path, monkeypatch):
    """Read where the same run wrote them on this device with this torch, else measured and written anew."""
    path, measured = tmp_path / ".ceilings.json", []

    def median_seconds(run, warmup):
        measured.append(run)
        return 0.5

    runs = dict(copy=(lambda: "copy", 0.0, 8.0), float32=(lambda: "product", 6.0, 0.0))
    monkeypatch.setattr(machine, "ceiling_runs", lambda: runs)
    monkeypatch.setattr(machine, "median_seconds", median_seconds)
    monkeypatch.setenv("VITFAST_RUN", "tmp.1")

    def process() -> int:
        """How many ceilings a process measures."""
        measured.clear()
        assert machine.ceilings.__wrapped__() == dict(copy=16.0, float32=12.0)
        return len(measured)

    monkeypatch.delenv("VITFAST_CEILINGS", raising=False)
    assert process() == process() == 2 and not list(tmp_path.iterdir())
    monkeypatch.setenv("VITFAST_CEILINGS", str(path))
    assert process() == 2 and process() == 0 and list(tmp_path.iterdir()) == [path]
    written = json.loads(path.read_text())
    odd = [written | {key: "other"} for key in ("device", "torch", "run")]
    odd += [written | dict(ceilings=rates) for rates in (dict(copy=16.0), dict(copy=16.0, float32=None), [], None)]
    for content in (*map(json.dumps, odd), "[]", path.read_text()[:-9]):
        path.write_text(content)
        assert process() == 2 and process() == 0, content
    monkeypatch.setenv("VITFAST_RUN", "tmp.2")
    assert process() == 2 and process() == 0
    monkeypatch.setenv("VITFAST_CEILINGS", str(tmp_path / "nowhere" / "ceilings.json"))
    assert process() == process() == 2
    assert "on the same machine" in report.HOW_TO_READ


def test_the_facts_say_that_cudnn_chooses_and_who_assembles(gpu, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    bench_conftest().pytest_configure(types.SimpleNamespace(getoption=dict(shapes="few", dtype=None).get))
    assert torch.backends.cudnn.benchmark
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: stand_in.NAME)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: stand_in.PROPERTIES)
    said = subprocess.run([BIN / "ptxas", "--version"], capture_output=True, text=True).stdout
    assert f"release {machine.facts.__wrapped__()['ptxas']}," in said
    monkeypatch.setattr(clock, "GPU", False)
    facts = machine.facts.__wrapped__()
    assert facts["cudnn.benchmark"] == "on" and facts["device"] == "cpu"
    for package in ("flash-attn-3", "flash-attn-4", "nvidia-cutlass-dsl"):
        assert facts[package] == machine._version(package)
    assert machine._version("no-such-package") == "absent"


def test_datasheet_names_one_device_each():
    assert cost.datasheet_flops("NVIDIA H200") == cost.datasheet_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert cost.datasheet_flops("NVIDIA A100-SXM4-80GB") == 312e12 and cost.datasheet_flops("NVIDIA L40S") == 362e12
    for other in ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "cpu"):
        assert cost.datasheet_flops(other) is None


def test_a_stamp_waits_for_its_event_and_divides_by_the_calls(gpu, monkeypatch):
    """30 ms between two events around 3 calls: 0.01 s each. Before it has happened an event has no time."""
    now = iter((10.0, 40.0))

    class Event:
        done = False

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(now)

        def synchronize(self):
            self.done = True

        def elapsed_time(self, later):
            assert later.done, "asked for the time of an event that has not happened yet"
            return later.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    reading = clock.clock(3)
    start = reading()
    assert reading() - start == pytest.approx(0.01)


def test_a_gpu_is_warm_before_it_is_timed(gpu, monkeypatch):
    """The first case of a process for longer, each for its seconds and calls; a CPU for calls alone."""
    for name, value in dict(WARM_SECONDS=0.2, CASE_WARM_SECONDS=0.05, WARMUP=3, _warm=False).items():
        monkeypatch.setattr(clock, name, value)

    def took(*arguments) -> float:
        start = time.perf_counter()
        assert clock.warm_up(lambda: time.sleep(0.01), *arguments) >= 3
        return time.perf_counter() - start

    first, second, more = took(), took(), took(3, 0.1)
    assert 0.2 <= first and 0.05 <= second < 0.2 and 0.1 <= more
    assert clock.warm_up(lambda: time.sleep(0.03), 4) == 4
    monkeypatch.setattr(clock, "GPU", False)
    assert clock.warm_up(lambda: None) == 3 and clock.warm_up(lambda: None, 0) == 0
