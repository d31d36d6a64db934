"""Which cases run, in which order, for how long, and at which batch."""

import signal
import time
import types
from pathlib import Path

import bench_model
import clock
import peers
import photos
import pytest
import report
import shapes
import torch
from bench_cases import Benchmark, bench_conftest

ROOT = Path(__file__).parents[2]


def test_a_model_too_large_for_the_smallest_batch_says_so(gpu, monkeypatch):
    """Larger batches that do not fit end the search."""
    room = 0

    def peer(setting, shape, training):
        if shape.batch > room:
            raise torch.cuda.OutOfMemoryError("no room")
        assert (setting.how, setting.precision, training) == ("eager", "bf16", False)
        return types.SimpleNamespace(kernels="auto", images=None)

    monkeypatch.setattr(bench_model, "Peer", peer)
    monkeypatch.setattr(bench_model, "median_seconds", lambda run, rounds: 1.0)
    search, model = bench_model.best_batch.__wrapped__, next(iter(bench_model.MODELS))
    with pytest.raises(RuntimeError, match=f"no batch for timm {model}: eager bf16 runs out of memory at 64 images"):
        search("timm", model)
    room = 256
    assert search("timm", model) == 256


def test_throughput_says_how_its_batch_was_searched(gpu, monkeypatch):
    """Compiled cases too: the search is of the eager model in bf16. Latency and a CPU search nothing."""
    kernels = dict(kernels="auto", check=dict, check_again=dict, backend=None, images=torch.zeros(2))

    class Peer:
        __call__ = staticmethod(lambda batch: batch)

        def __init__(self, setting, shape, training):
            vars(self).update(kernels, setting=setting)

    fakes = dict(Peer=Peer, warm_up=lambda *_, **__: None, peak_bytes=lambda *_: 0, allocated=lambda: 0)
    fakes.update(captured=lambda run: run, facts=lambda *_, **__: {}, best_batch=lambda *_: 2)
    found = {}
    fakes.update(describe=lambda *_, **info: found.update(info), measure=lambda *_, **__: 1.0)
    for name, fake in fakes.items():
        monkeypatch.setattr(bench_model, name, fake)
    monkeypatch.setitem(bench_model.CASES, "timm compile bf16", peers.Setting("timm", "compile", "bf16"))
    model = next(iter(bench_model.MODELS))
    expected = ((True, "throughput", "eager bf16"), (False, "throughput", None), (True, "latency", "-"))
    for on_gpu, what, wanted in expected:
        monkeypatch.setattr(clock, "GPU", on_gpu)
        found.clear()
        bench_model.test_inference(Benchmark(), model, "timm compile bf16", what)
        assert found["op"] == what and found.get("batch_search", "-") == wanted
    assert "searched with its eager model in bf16" in " ".join(report.HOW_TO_READ.split())


def test_no_case_starts_shortly_before_the_end(monkeypatch):
    conftest = bench_conftest()
    monkeypatch.setattr(conftest.time, "time", lambda: 1000.0)

    def skipped(**options) -> str:
        item = types.SimpleNamespace(config=types.SimpleNamespace(getoption=options.get))
        try:
            conftest.pytest_runtest_setup(item)
        except pytest.skip.Exception as skip:
            return str(skip)
        return ""

    assert skipped() == skipped(ends=1015.0) == ""
    assert skipped(ends=1014.9).startswith("out of time: fewer than 15 s")


def test_the_alarm_of_a_case_rings_again(monkeypatch):
    """A compiler's `except Exception` swallows the first one.

    After the case it is silent, and 0 is no limit.
    """
    conftest = bench_conftest()
    monkeypatch.setattr(conftest, "ALARM_AGAIN", 0.05)
    before = signal.getsignal(signal.SIGALRM)

    def case(limit: float):
        config = types.SimpleNamespace(getoption=dict(case_limit=limit).get)
        return conftest.pytest_runtest_call(types.SimpleNamespace(config=config))

    running = case(0.05)
    next(running)
    for _ in range(3):
        with pytest.raises(TimeoutError, match="took longer than 0.05 s"):
            time.sleep(5)
    running.close()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0) and signal.getsignal(signal.SIGALRM) is before
    running = case(0)
    next(running)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0
    running.close()


def test_the_main_shape_comes_first_and_what_compiles_long_last(gpu):
    main, second = list(shapes.SHAPES)[:2]
    assert main == shapes.FOCUS.name
    impls = ("vitfast", "eager", "compile", "max-autotune", "max-autotune all")
    quickest = ("vitfast", "sdpa flash", "compile unfold", "max-autotune", "max-autotune all")
    cases = [dict(shape=shape, impl=impl) for shape in (second, main) for impl in reversed(impls)]
    wanted = [(shape, impl) for shape in (main, second) for impl in impls]
    priority = bench_conftest().priority
    assert [(c["shape"], c["impl"]) for c in sorted(cases, key=priority)] == wanted
    assert sorted(reversed(quickest), key=lambda impl: priority(dict(shape=main, impl=impl))) == list(quickest)
    models = [dict(model=f"{shapes.WHERE}{model}", setting="any") for model in ("S/16 224", "B/16 384", "B/16 224")]
    assert [m["model"] for m in sorted(models, key=priority)] == [models[i]["model"] for i in (2, 0, 1)]


def test_the_peers_of_the_targets_run_at_the_main_shape(gpu):
    """In every direction, under ids of shape, direction and implementation that -k can pick."""
    ids = [case.id for case in shapes.grid("vitfast", "eager", "compile", "max-autotune")]
    for direction in ("forward", "backward", "both"):
        for impl in ("vitfast", "eager", "compile", "max-autotune"):
            assert f"{shapes.FOCUS.name}-{direction}-{impl}" in ids
    assert len([name for name in ids if "max-autotune" in name]) == 3
    names = [setting.name for setting in bench_model.SETTINGS]
    assert names[:2] == ["vitfast compile bf16", "timm compile bf16"] and len(set(names)) == len(names)
    assert names[names.index("timm compile amp") + 1] == "vitfast compile bf16 again"


def test_largest_batch_lies_on_the_line():
    """2 GiB at batch 0, 12 GiB at batch 100: a tenth of a GiB an image.

    23 usable GiB hold 210, 79 hold 770.
    """
    assert [bench_model.largest_batch(100, 2 << 30, 12 << 30, gib) for gib in (24, 80, 2)] == [210, 770, 0]


def test_photographs_are_real_and_repeatable(tmp_path):
    from PIL import Image

    one, two = (photos.write(tmp_path / name, 16, (64, 48)) for name in "ab")
    files = sorted(path.relative_to(one) for path in one.rglob("*.jpg"))
    assert len([f for f in files if f.parts[0] == "train"]) == 16 and {f.parts[1] for f in files} == set(
        photos.sources()
    )
    assert all((one / f).read_bytes() == (two / f).read_bytes() for f in files)
    with Image.open(one / files[0]) as image:
        assert image.format == "JPEG" and image.size == (64, 48) and len(set(image.convert("L").tobytes())) > 50
