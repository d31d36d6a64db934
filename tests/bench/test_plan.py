"""Which cases run, in which order, for how long, and at which batch; the clock and the ceilings."""

import contextlib
import signal
import time
import types

import bench_embed
import bench_model
import bench_ops
import bench_packed
import bench_train
import machine
import pytest
import shapes
import torch


def test_every_case_on_a_cpu_says_so():
    """In its name, which begins with the shape or the model: what the decorator next to the function gives."""
    names = []
    for module in (bench_ops, bench_model, bench_packed, bench_train, bench_embed):
        for test in (value for name, value in vars(module).items() if name.startswith("test_")):
            values = [mark.args[1] for mark in test.pytestmark if mark.name == "parametrize"][0]
            names += [value if isinstance(value, str) else value[0] for value in values]
    assert len(names) > 80 and all(name.startswith("cpu small") for name in names)


def test_larger_batches_that_do_not_fit_end_the_search(gpu, monkeypatch):
    """It is of the eager model in bf16."""
    monkeypatch.setattr(machine, "_kept", {})
    monkeypatch.setattr(bench_model, "median_seconds", lambda run, rounds: 1.0)

    def peer(setting, shape, op):
        if shape.batch > 256:
            raise torch.cuda.OutOfMemoryError("no room")
        assert (setting.how, setting.precision, op) == ("eager", "bf16", "throughput")
        return types.SimpleNamespace(context=contextlib.nullcontext, images=None)

    monkeypatch.setattr(bench_model, "Peer", peer)
    assert bench_model.best_batch("timm", shapes.shape_of(shapes.FOCUS)) == 256


def item(**options) -> types.SimpleNamespace:
    """A case in a run with these options."""
    return types.SimpleNamespace(config=types.SimpleNamespace(getoption=options.get))


def test_the_alarm_of_a_case_rings_again(hooks, monkeypatch):
    """A compiler's `except Exception` swallows the first one. After the case it is silent, and 0 is no limit."""
    monkeypatch.setattr(machine, "ALARM_AGAIN", 0.05)
    before = signal.getsignal(signal.SIGALRM)
    running = hooks.pytest_runtest_call(item(case_limit=0.05))
    next(running)
    for _ in range(3):
        with pytest.raises(TimeoutError, match="took longer than 0.05 s"):
            time.sleep(5)
    running.close()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0) and signal.getsignal(signal.SIGALRM) is before
    running = hooks.pytest_runtest_call(item(case_limit=0))
    next(running)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0
    running.close()


def test_what_compiles_long_runs_at_the_main_shape_alone(gpu):
    (main,) = shapes.here(shapes.FOCUS)
    cases = shapes.grid(bench_ops.EAGER)
    assert {(name, impl) for name, _, impl in cases if impl in ("compile", "max-autotune")} == {
        (main, impl) for impl in ("compile", "max-autotune")
    }
    assert len([name for name, _, _ in cases if name == main]) == 3 * len(bench_ops.EAGER)


def test_ceilings_are_shared_by_the_processes_of_a_run(tmp_path, monkeypatch):
    path, measured = tmp_path / ".ceilings.json", []
    monkeypatch.setattr(machine, "median_seconds", lambda run, warmup: measured.append(run()) or 0.5)
    for file, counts in (("", [2, 4]), (str(path), [6, 6])):
        monkeypatch.setenv("VITFAST_CEILINGS", file)
        for count in counts:
            monkeypatch.setattr(machine, "_kept", {})  # as in another process
            found = machine.ceilings()
            assert found == machine.ceilings()
            assert found == dict(copy=4.0 * 2**22, float32=4.0 * 256**3) and len(measured) == count
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_measurement_measures_on_its_way_is_kept_too(tmp_path, monkeypatch):
    """The best batch of a model asks for the best backend of SDPA at each."""
    monkeypatch.setenv("VITFAST_CEILINGS", str(tmp_path / "known.json"))
    monkeypatch.setattr(machine, "_kept", {})
    assert machine.once("batch", lambda: len(machine.once("backend", lambda: "flash"))) == 5
    failed = lambda: pytest.fail("measured again")  # noqa: E731
    assert machine.once("batch", failed) == 5 and machine.once("backend", failed) == "flash"


def test_a_stamp_waits_for_its_event_and_divides_by_the_calls(gpu, monkeypatch):
    """30 ms between two events around 3 calls: 0.01 s each. Before it has happened an event has no time."""
    later = types.SimpleNamespace(record=lambda: None, synchronize=lambda: setattr(later, "done", True))
    earlier = types.SimpleNamespace(record=lambda: None, elapsed_time=lambda event: 30.0 if event.done else None)
    events = iter((earlier, later))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: next(events))
    start = machine.clock(3)()
    assert machine.clock(3)() - start == pytest.approx(0.01)


def test_a_gpu_is_warm_before_it_is_timed(gpu, monkeypatch):
    """Each case for its seconds and calls; a CPU for calls alone."""

    def warmed(pause: float, least: int) -> tuple[float, int]:
        """Seconds and calls."""
        calls, start = [], time.perf_counter()
        machine.warm_up(lambda: calls.append(time.sleep(pause)), least, seconds=0.05)
        return time.perf_counter() - start, len(calls)

    seconds, calls = warmed(0.01, 3)
    assert 0.05 <= seconds and calls >= 3 and warmed(0.03, 4)[1] >= 4
    monkeypatch.setattr(machine, "GPU", False)
    assert warmed(0, 3)[1] == 3
