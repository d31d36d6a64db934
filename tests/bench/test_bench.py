"""The benchmarks themselves: no time for a wrong result, times that are right, work counted right, nothing that failed dropped, an honest report."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import bench_attention  # noqa: E402
import bench_model  # noqa: E402
import clock  # noqa: E402
import costs  # noqa: E402
import curves  # noqa: E402
import harness  # noqa: E402
import machine  # noqa: E402
import peers  # noqa: E402
import photos  # noqa: E402
import report  # noqa: E402
import result_files  # noqa: E402
import shapes  # noqa: E402
import targets  # noqa: E402
from harness import WrongResult  # noqa: E402
from shapes import Shape  # noqa: E402

from vitfast.errors import both_ends  # noqa: E402

TINY = Shape("Ti/16", 32, 2)  # B 2, N 5, D 192, H 3, Dh 64, F 768: 10 rows, u = 1920 elements
NANO = Shape("Nano/8", 16, 2)

# Implementations of 2x, one of them right and slow, the others wrong in ways that a benchmark can miss.
PLANTED = """
import os, time
import costs, pytest, torch
from harness import Case, bench, values


def busy(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def taking(seconds):
    def double(x):
        busy(seconds)
        return 2 * x
    return double


def late(x):
    return torch.cat([2 * x[:-1], 2.01 * x[-1:]])


class Backward(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: 2 * x)
    backward = staticmethod(lambda ctx, dy: 2.01 * dy)


def explains(x):
    raise RuntimeError("Compilation failed. " + "some instruction\\n" * 200 + "the last line says why")


class Tires:  # right when it is checked, wrong by the time that it has been timed
    calls = 0

    def __call__(self, x):
        self.calls += 1
        return 2 * x if self.calls < 5 else 2.01 * x


def hangs(x):
    time.sleep(60)


def dies(x):
    os._exit(9)


IMPLS = dict(quick=taking(0.02), slow=taking(0.04), last_sample=late, gradient=Backward.apply)
IMPLS |= dict(nan=lambda x: 2 * x / 0, raises=lambda x: x @ x, explains=explains, tires=Tires())
IMPLS |= dict(hangs=hangs, dies=dies)
COST = costs.Cost(((6e6, 5e3),))


@pytest.mark.parametrize("impl", IMPLS)
def test_double(benchmark, impl):
    case = Case("double", "cpu small B9", lambda x: 2 * x, lambda: [values(9, 3)], 1, costs.Costs(COST, COST, COST))
    bench(benchmark, case, impl, IMPLS[impl], "backward" if impl == "gradient" else "forward")
"""


def run_pytest(*arguments, **variables) -> subprocess.CompletedProcess:
    outside = {
        k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")
    }  # xdist's worker would switch benchmarks off
    environment = {**outside, "PYTHONPATH": str(ROOT / "bench"), "CUDA_VISIBLE_DEVICES": "", **variables}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--benchmark-only",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        *map(str, arguments),
    ]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> dict:
    """The JSON file of a run over the planted implementations, the last of which ends the process."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "bench_planted.py").write_text(PLANTED)
    run = run_pytest(
        folder / "bench_planted.py",
        "-p",
        "conftest",
        "--case-limit",
        8,
        f"--benchmark-json={folder / 'out.json'}",
        VITFAST_COMMIT="abc1234",
    )
    assert run.returncode == 9, run.stdout + run.stderr
    return json.loads((folder / "out.json").read_text())


def test_a_wrong_result_gets_no_time(planted):
    reasons = {case["params"]["impl"]: case["reason"] for case in planted["failed"]}
    for impl, direction in (("last_sample", "forward"), ("gradient", "backward"), ("nan", "forward")):
        assert (
            f"{impl} is wrong on double cpu small B9 {direction}" in reasons[impl]
            and "it gets no time" in reasons[impl]
        )
    assert {case["params"]["impl"] for case in planted["benchmarks"]} == {"quick", "slow"}


def test_a_result_that_is_wrong_after_timing_gets_no_time(planted):
    reasons = {case["params"]["impl"]: case["reason"] for case in planted["failed"]}
    assert "tires is wrong on double cpu small B9 forward after timing" in reasons["tires"]
    for case in planted["benchmarks"]:
        assert case["extra_info"]["error_after"] == case["extra_info"]["error"]


def test_a_long_reason_keeps_both_ends(planted):
    reason = next(case["reason"] for case in planted["failed"] if case["params"]["impl"] == "explains")
    assert reason.startswith("RuntimeError: Compilation failed. ") and reason.endswith("the last line says why")
    assert len(reason) == 400 and reason.count(" ... ") == 1
    for limit, wanted in ((9, "ab ... yz"), (10, "abc ... yz"), (26, "abcdefghijklmnopqrstuvwxyz")):
        assert both_ends("abcdefghijklmnopqrstuvwxyz", limit) == wanted
    assert both_ends("one\n  two\t three ") == "one two three"


def test_twice_as_slow_is_reported_as_twice_as_slow(planted):
    median = {case["params"]["impl"]: case["stats"]["median"] for case in planted["benchmarks"]}
    assert 1.8 < median["slow"] / median["quick"] < 2.2
    assert 0.018 < median["quick"] < 0.022


def test_no_case_is_dropped(planted):
    """Failed, too long, and not run because the process died: all are in the file, with the reason in one line."""
    failed = {case["params"]["impl"]: case for case in planted["failed"]}
    assert set(failed) == {"last_sample", "gradient", "nan", "raises", "explains", "tires", "hangs"}
    assert failed["raises"]["name"] == "test_double[raises]" and "cannot be multiplied" in failed["raises"]["reason"]
    assert "took longer than 8 s" in failed["hangs"]["reason"] and not any(
        "\n" in case["reason"] for case in failed.values()
    )
    assert [(case["name"], case["reason"]) for case in planted["skipped"]] == [
        ("test_double[dies]", "not run: the process ended before")
    ]


def test_json_schema(planted):
    facts = planted["machine_info"]["vitfast"]
    assert (
        facts["commit"] == "abc1234"
        and facts["torch"] == torch.__version__.partition("+")[0]
        and facts["device"] == "cpu"
    )
    ceilings = facts["ceilings"]
    assert set(ceilings) == {"copy", "float32"} and all(rate > 1e8 for rate in ceilings.values())
    for case in planted["benchmarks"]:
        info, median = case["extra_info"], case["stats"]["median"]
        assert (info["impl"], info["device"], info["flops"], info["bytes"]) == (
            case["params"]["impl"],
            "cpu",
            6_000_000,
            5_000,
        )
        assert (info["op"], info["shape"], info["direction"], info["dtype"]) == (
            "double",
            "cpu small B9",
            "forward",
            "float32",
        )
        floor = max(6e6 / ceilings["float32"], 5e3 / ceilings["copy"])
        assert info["floor_us"] == pytest.approx(1e6 * floor) and info["percent_of_floor"] == pytest.approx(
            100 * floor / median
        )
        assert info["tflops"] == pytest.approx(6e-6 / median) and info["gigabytes_per_second"] == pytest.approx(
            5e-6 / median
        )
        assert (
            0 <= info["error"] <= info["error_limit"] < 1e-5
            and case["stats"]["iqr"] >= 0
            and case["stats"]["rounds"] >= 5
        )


def test_every_case_on_a_cpu_says_so_and_one_that_would_start_too_late_is_recorded(tmp_path):
    run = run_pytest("bench", "--ends", 0, f"--benchmark-json={tmp_path / 'out.json'}")
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert not found["benchmarks"] and not found["failed"]
    files = {Path(case["fullname"].partition("::")[0]).name for case in found["skipped"]}
    assert files == {path.name for path in (ROOT / "bench").glob("bench_*.py")}
    for case in found["skipped"]:
        assert case["name"].partition("[")[2].startswith("cpu small"), case["name"]
        assert case["reason"].startswith("out of time")


@pytest.fixture
def gpu(monkeypatch):
    """What the benchmarks ask before they treat a device as a GPU."""
    monkeypatch.setattr(clock, "GPU", True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(shapes, "SHAPES", dict(shapes.SHAPES))
    shapes.choose("few")


def bench_conftest():
    spec = importlib.util.spec_from_file_location("bench_conftest", ROOT / "bench" / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Benchmark:
    """Stands in for pytest-benchmark's fixture: calls once, times nothing."""

    group = stats = None

    def __init__(self):
        self.extra_info = {}

    def pedantic(self, run, setup=None, rounds=1):
        run()


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
    """A compiler's `except Exception` swallows the first one; after the case it is silent, and 0 is no limit."""
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


def test_cudnn_chooses_for_the_peers_and_the_facts_say_so(gpu, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    bench_conftest().pytest_configure(types.SimpleNamespace(getoption=dict(shapes="few", dtype=None).get))
    assert torch.backends.cudnn.benchmark
    monkeypatch.setattr(clock, "GPU", False)
    facts = machine.facts.__wrapped__()
    assert facts["cudnn.benchmark"] == "on" and facts["device"] == "cpu"
    for package in ("flash-attn-3", "flash-attn-4", "nvidia-cutlass-dsl"):
        assert facts[package] == machine._version(package)
    assert machine._version("no-such-package") == "absent"


# ---- work


# Elements that move, written out: operands of every product once, results once. W1 and W2 have 147,456, Wqkv 110,592, Wproj 36,864.
FC1, FC2 = 1920 + 147_456 + 7680 + 768, 7680 + 147_456 + 1920 + 192  # forward, biases of F and D included
FC1_BACKWARD = (7680 + 147_456 + 1920) + (7680 + 1920 + 147_456 + 768)  # dX, dW
FC2_BACKWARD = (1920 + 147_456 + 3 * 7680) + (1920 + 7680 + 147_456 + 192)  # dpre: reads pre, writes dpre and act; dW
BY_HAND = {  # op: (flops, elements) of forward, training, backward
    "attention": ((38_400, 4 * 1920), (38_400, 4 * 1920), (96_000, 8 * 1920)),
    "layer_norm": ((0, 2 * 1920 + 384), (0, 2 * 1920 + 384), (0, 3 * 1920 + 576)),
    "add_layer_norm": ((0, 4 * 1920 + 384), (0, 4 * 1920 + 384), (0, 4 * 1920 + 576)),
    "linear_gelu": ((2_949_120, FC1), (2_949_120, FC1 + 7680), (5_898_240, FC1_BACKWARD + 2 * 7680)),
    "mlp": ((5_898_240, FC1 + FC2), (5_898_240, FC1 + FC2 + 7680), (11_796_480, FC1_BACKWARD + FC2_BACKWARD)),
    "mlp_block": (
        (5_898_240, 2 * 1920 + 384 + FC1 + FC2 + 1920),
        (5_898_240, 2 * 1920 + 384 + FC1 + FC2 + 1920 + 7680),
        (11_796_480, 4 * 1920 + 576 + FC1_BACKWARD + FC2_BACKWARD),
    ),
    "attention_block": (
        (2_987_520, 173_568),  # LayerNorm 4,224, qkv 118,848, attention 7,680, proj with its residual 42,816
        (2_987_520, 173_568),
        (5_994_240, 342_336),  # 8,256; 118,272 + 118,848; 15,360; 40,704 + 40,896
    ),
}


@pytest.mark.parametrize("op", BY_HAND)
def test_work_by_hand(op):
    found = getattr(costs, op)(TINY, 2)
    assert [(c.flops, c.bytes / 2) for c in (found.forward, found.training, found.backward)] == list(BY_HAND[op])
    assert found.of("both").flops == found.training.flops + found.backward.flops


def test_work_of_patch_embed_by_hand():
    """8 patches of 768 values; pixels 2 x 3 x 32 x 32 = 6,144; tokens 1,920, weight 147,456, bias, class token and 5 positions 1,344."""
    for size, pixel in ((2, 1), (4, 4)):
        found = costs.patch_embed(TINY, size, pixel)
        assert (found.forward.flops, found.forward.bytes) == (2_359_296, 6_144 * pixel + 150_720 * size)
        assert found.backward == found.forward


def test_the_floor_adds_up_kernels_one_after_the_other():
    cost = costs.Cost(((10.0, 1.0), (1.0, 10.0))) + costs.Cost(((0.0, 4.0),))
    assert cost.floor(flops_per_second=2.0, bytes_per_second=4.0) == 10 / 2 + 10 / 4 + 4 / 4
    b16 = costs.attention_block(Shape("B/16", 224, 256), 2)
    assert b16.forward.floor(790e12, 4.3e12) == pytest.approx(409e-6, rel=0.02)  # kernels' plan: 36 + 226 + 72 + 75 us
    assert b16.backward.floor(790e12, 4.3e12) == pytest.approx(819e-6, rel=0.02)  # 72 + 452 + 144 + 151


def test_model_flops_are_what_torch_counts():
    from timm.models.vision_transformer import VisionTransformer

    with torch.device("meta"):
        model, images = VisionTransformer(), torch.randn(2, 3, 224, 224)
    with FlopCounterMode(display=False) as counter:
        model(images)
    flops = costs.model_flops(Shape("B/16", 224, 2), training=False)
    assert flops == counter.get_total_flops() == 2 * 35_127_656_448
    assert costs.model_flops(Shape("B/16", 224, 2), training=True) == 3 * flops


def test_a_step_is_counted_as_vitfast_cost_counts_it():
    from vitfast import ViT, cost

    with torch.device("meta"):
        listed = cost.operations(ViT.from_preset("H/14"), 64, size=2, pixel_size=2)
    work = costs.model(Shape("H/14", 224, 64), 2)
    for ours, direction in ((work.training, "forward"), (work.backward, "backward")):
        theirs = [(op.name, op.times, kernel) for op in listed for kernel in getattr(op, direction)]
        assert ours.flops == sum(times * flops for _, times, (flops, _) in theirs)
        # Theirs has the last LayerNorm too, which only the class tokens need; ours reads the class token and the head's few operands.
        assert ours.bytes == pytest.approx(
            sum(times * moved for name, times, (_, moved) in theirs if name != "last LayerNorm"), rel=1e-4
        )


def test_datasheet_names_one_device_each():
    assert machine.datasheet_flops("NVIDIA H200") == machine.datasheet_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert (
        machine.datasheet_flops("NVIDIA A100-SXM4-80GB") == 312e12 and machine.datasheet_flops("NVIDIA L40S") == 362e12
    )
    for other in ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "cpu"):
        assert machine.datasheet_flops(other) is None


def test_largest_batch_lies_on_the_line():
    """2 GiB at batch 0, 12 GiB at batch 100: a tenth of a GiB an image. 23 usable GiB hold 210, 79 hold 770."""
    assert [bench_model.largest_batch(100, 2 << 30, 12 << 30, gib) for gib in (24, 80, 2)] == [210, 770, 0]


# ---- peers


@pytest.mark.parametrize("library", [name for name in peers.BUILDERS if name != "vitfast"])
def test_peers_compute_the_same_function(library):
    peer = peers.Peer(peers.Setting(library, "eager", "fp32"), NANO, training=True)
    assert peer.check()["error"] < 1e-5


def test_a_peer_that_computes_something_else_gets_no_time(monkeypatch):
    from timm.models.vision_transformer import VisionTransformer

    setting, size = (
        peers.Setting("timm", "eager", "fp32"),
        dict(img_size=16, patch_size=8, embed_dim=64, depth=4, num_heads=4),
    )
    for training, options in (
        (False, dict(act_layer="gelu_tanh")),
        (True, dict(norm_layer=lambda d, **_: torch.nn.LayerNorm(d, eps=1e-3))),
    ):
        monkeypatch.setitem(peers.BUILDERS, "timm", lambda s, options=options: VisionTransformer(**size, **options))
        with pytest.raises(WrongResult, match="timm eager fp32 is wrong"):
            peers.Peer(setting, NANO, training).check()
    monkeypatch.setitem(peers.BUILDERS, "timm", lambda s: VisionTransformer(**size))
    peer = peers.Peer(setting, NANO, training=True)
    peer.model.blocks[2].attn.qkv.weight.register_hook(lambda gradient: 1.01 * gradient)
    with pytest.raises(WrongResult):
        peer.check()


def test_a_peer_is_checked_again_with_the_weights_that_it_had():
    """After steps that moved them; and what has turned wrong since is found."""
    peer = peers.Peer(peers.Setting("timm", "eager", "fp32"), NANO, training=True)
    first = peer.check()
    with torch.no_grad():
        for parameter in peer.model.parameters():
            parameter.mul_(1.5)
    assert peer.check_again()["error_after"] == pytest.approx(first["error"], rel=1e-3)
    peer.model.blocks[1].mlp.fc1.weight.register_hook(lambda gradient: 1.01 * gradient)
    with pytest.raises(WrongResult, match="timm eager fp32 is wrong on .* after timing"):
        peer.check_again()


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")
def test_a_check_runs_no_backward_in_vain_and_builds_the_plain_model_once_on_the_device(monkeypatch):
    """Backward for the truth, for PyTorch's own error in that precision, and for what is timed: three."""
    backward, built = torch.Tensor.backward, []
    counted = []

    def counting(self, *arguments):
        counted.append(self.dtype)
        backward(self, *arguments)

    monkeypatch.setattr(torch.Tensor, "backward", counting)
    plain = peers.ViT.from_preset
    monkeypatch.setattr(peers.ViT, "from_preset", lambda *a, **k: (built.append(a), plain(*a, **k))[1])
    peer = peers.Peer(peers.Setting("timm", "eager", "bf16"), NANO, training=True)
    peer.check()
    assert counted == [torch.float64, torch.bfloat16, torch.bfloat16] and len(built) == 1
    peer = peers.Peer(peers.Setting("timm", "eager", "bf16"), NANO, training=True)
    monkeypatch.setattr(clock, "DEVICE", torch.device("meta"))
    assert {p.device.type for p in peer._plain().parameters()} == {"meta"}


def test_wrong_logits_in_fp32_are_found_whatever_is_timed(monkeypatch):
    """An error of 1e-4 in the last layer, which bf16 would hide."""
    build = peers.build

    def wrong(library, shape):
        model = build(library, shape)
        model.head.weight.data.mul_(1 + 1e-4)
        return model

    peer = peers.Peer(peers.Setting("timm", "eager", "bf16"), NANO, training=False)
    monkeypatch.setattr(peers, "build", wrong)
    with pytest.raises(WrongResult, match="timm eager fp32 is wrong"):
        peer.check()


def test_hugging_face_makes_no_mask(monkeypatch):
    """Neither eager nor traced: forced flash refuses one, and cuDNN would be slower for it."""
    nodes, masks = [], []

    def keep(graph, _):
        nodes.extend(node for node in graph.graph.nodes if "scaled_dot_product_attention" in str(node.target))
        return graph

    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(*args, **options):
        masks.append(options.get("attn_mask"))
        return attend(*args, **options)

    model = peers.build("huggingface", Shape("Nano/8", 16, 2)).eval()
    assert model.model.config._attn_implementation == "sdpa_plain"
    images = torch.randn(2, 3, 16, 16)
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
        expected = model(images)
    torch._dynamo.reset()
    with torch.no_grad():
        traced = torch.compile(model, backend=keep)(images)
    torch._dynamo.reset()
    layers = model.model.config.num_hidden_layers
    assert masks == [None] * layers and len(nodes) == layers
    assert all(node.kwargs.get("attn_mask") is None and len(node.args) <= 3 for node in nodes)
    torch.testing.assert_close(traced, expected)


# What the packages promise: (B, N, H, Dh) in and out, with the logsumexp too or without.
FLASH = """
import torch

def flash_attn_func(q, k, v):
    out = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
    return {result}
"""


def test_flash_attention_is_used_where_installed_and_skipped_with_a_reason_where_not(tmp_path, monkeypatch):
    monkeypatch.setitem(peers.FLASH_ATTENTION, "flash-attn 3", ("flash_attn_3", "vitfast_fake_flash"))
    monkeypatch.setitem(peers.FLASH_ATTENTION, "flash-attn 4", ("flash_attn_4", "vitfast_fake.cute"))
    for impl, package in (("flash-attn 3", "flash_attn_3"), ("flash-attn 4", "flash_attn_4")):
        with pytest.raises(pytest.skip.Exception, match=f"{package} is not installed"):
            bench_attention.peer(impl, packed=True)
    (tmp_path / "vitfast_fake" / "cute").mkdir(parents=True)
    (tmp_path / "vitfast_fake" / "cute" / "__init__.py").write_text(FLASH.format(result="out, None"))
    (tmp_path / "vitfast_fake_flash.py").write_text(FLASH.format(result="out"))
    monkeypatch.syspath_prepend(tmp_path)
    shape = Shape("Ti/16", 32, 2)
    for impl in peers.FLASH_ATTENTION:
        for packed, case in ((True, bench_attention.case_of(shape)), (False, bench_attention.separate_case_of(shape))):
            for direction in ("forward", "both"):
                function = bench_attention.peer(impl, packed)
                assert harness.Check(case, direction).error(impl, function) < 1e-5
    for direction in ("forward", "both"):
        check = harness.Check(bench_attention.separate_case_of(shape), direction)
        assert check.error("sdpa math", bench_attention.peer("sdpa math", packed=False)) < 1e-5
        with pytest.raises(WrongResult):
            check.error("swapped", lambda q, k, v: peers.sdpa_separate(q, v, k))


def test_max_autotune_takes_every_backend_that_is_there(monkeypatch):
    from torch._inductor import config

    assert set(harness.more_gemm_backends()) == {"NVGEMM", "CUTEDSL", "CUTLASS"}
    reasons = dict(NVGEMM="", CUTEDSL="too old", CUTLASS="no sources")
    monkeypatch.setattr(harness, "more_gemm_backends", lambda: reasons)
    assert harness.gemm_backends("max-autotune") == config.max_autotune_gemm_backends
    harness.compiled(len, "max-autotune all")  # torch knows the options that it is given: it refuses others
    with monkeypatch.context() as patch, config.patch(max_autotune_gemm_backends="ATEN,TRITON"):
        given = {}
        patch.setattr(torch, "compile", lambda function, **options: given.update(options))
        for how, backends in (("max-autotune", "ATEN,TRITON"), ("max-autotune all", "ATEN,TRITON,NVGEMM")):
            harness.compiled(len, how, fullgraph=True)
            mode = dict(max_autotune=True, coordinate_descent_tuning=True)
            assert given.pop("options") == dict(mode, max_autotune_gemm_backends=backends)
        harness.compiled(len, "compile", fullgraph=True)
        assert given == dict(fullgraph=True)
    reasons["NVGEMM"] = "not installed"
    with pytest.raises(pytest.skip.Exception, match="NVGEMM: not installed; CUTEDSL: too old; CUTLASS: no sources"):
        harness.implementation("max-autotune all", len, len)


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


# ---- report and script


def entry(name: str, median: float, **info) -> dict:
    common = dict(
        device="GPU",
        dtype="bfloat16",
        flops=10**9,
        bytes=10**7,
        floor_us=50.0,
        percent_of_floor=5e-3 / median,
        peak_mib=2048.0,
    )
    common.update(tflops=1e-3 / median, gigabytes_per_second=1e-2 / median)
    return dict(name=name, fullname=f"bench/{name}", stats=dict(median=median, iqr=2e-6), extra_info=common | info)


def model_entry(impl: str, speed: float, op: str = "train", shape: str = "B/16 224 B256", **more) -> dict:
    precision = "amp" if " amp" in impl else "bf16"
    info = dict(
        op=op,
        shape=shape,
        direction="both",
        impl=impl,
        precision=precision,
        batch=256,
        images_per_second=speed,
        model_flops=10**12,
    )
    info.update(
        mfu_ceiling=0.5, mfu_datasheet=0.4, attention="cudnn", largest_batch={"24 GiB": 90, "80 GiB": 310}, error=0.015
    )
    return entry(f"{op} {impl}", 256 / speed, **(info | more))


@pytest.fixture
def results(tmp_path) -> Path:
    """Two files of one GPU: attention won forward and lost in both directions, a case that failed at first and ran later, one that failed."""
    facts = dict(
        device="GPU", torch="2.11", commit="abc", ceilings=dict(copy=4e12, bfloat16=8e14), datasheet_bf16_flops=989e12
    )

    def case(impl, direction, median):
        return entry(
            f"attention {impl} {direction}",
            median,
            op="attention",
            shape="B/16 224 B256",
            direction=direction,
            impl=impl,
        )

    def missing(name, reason):
        return dict(name=name, fullname=f"bench/{name}", params={}, reason=reason)

    ours = [case("vitfast", "forward", 100e-6), case("vitfast", "both", 400e-6)]
    theirs = [
        case("sdpa cudnn", "forward", 150e-6),
        case("sdpa cudnn", "both", 200e-6),
        case("sdpa flash", "both", 300e-6),
    ]
    old = dict(
        benchmarks=ours,
        failed=[
            missing("attention sdpa cudnn both", "OutOfMemoryError: once"),
            missing("attention sdpa math both", "OutOfMemoryError: no room"),
        ],
    )
    new = dict(
        benchmarks=[*theirs, model_entry("vitfast compile bf16", 4000.0), model_entry("timm compile bf16", 5000.0)],
        failed=[],
    )
    folder = tmp_path / "results" / "h200"
    folder.mkdir(parents=True)
    for name, date, content in (("a", "2026-01-02", new), ("b", "2026-01-01", old)):
        own = dict(facts, ceilings=facts["ceilings"] | dict(copy=4e12 if name == "a" else 4.1e12))
        whole = dict(
            content, skipped=[missing("train max", "out of time")], datetime=date, machine_info=dict(vitfast=own)
        )
        (folder / f"{name}.json").write_text(json.dumps(whole))
    return tmp_path / "results"


def test_report_shows_what_is_lost_and_what_failed(results, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.START}\nold\n{report.END}\nafter\n")
    assert report.main(["--check"], results, readme) == 1
    assert report.main([], results, readme) == 0
    text = (results / "README.md").read_text()
    assert "| B/16 224 B256 forward | 100 ± 2 | 150 ± 2 | - | 50 % | 1.50 |" in text
    assert "| B/16 224 B256 both | 400 ± 2 | 200 ± 2 | 300 ± 2 | 12 % | 0.50 |" in text
    assert "copy 4,000 to 4,100 GB/s, bfloat16 800 TFLOP/s (bf16 by the data sheet: 989)" in text
    assert (
        "| attention sdpa math both | failed | OutOfMemoryError: no room |" in text
        and "OutOfMemoryError: once" not in text
    )
    assert "| train max | skipped | out of time |" in text
    assert text.index("| timm compile bf16 | 256 | 5,000 |") < text.index("| vitfast compile bf16 | 256 | 4,000 |")
    assert "| 50.0 | 40.0 | 2.0 | 90 / 310 | cudnn |" in text
    speed = readme.read_text()
    assert speed.startswith("before\n") and speed.endswith("after\n") and "old" not in speed
    assert "| train B/16 224 bf16 | 4,000 | - | 5,000 (timm compile bf16) | 0.80 | - |" in speed
    for name in ("roofline-attention", "speed-train", "memory-train"):
        assert (results / "h200" / f"{name}.svg").read_text().count("<path") > 10, name
    assert report.main(["--check"], results, readme) == 0


def test_check_finds_what_is_stale(results, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(f"{report.START}{report.END}")
    assert report.main([], results, readme) == 0 and report.main(["--check"], results, readme) == 0

    def stale(change) -> str:
        path, text = change
        before = path.read_text()
        path.write_text(text(before)) if text else path.unlink()
        assert report.main(["--check"], results, readme) == 1
        path.write_text(before)
        return capsys.readouterr().out

    assert "results/README.md is stale" in stale(
        (results / "h200" / "a.json", lambda t: t.replace("0.00015", "0.00016"))
    )
    assert "README.md is stale" in stale((readme, lambda t: t.replace("0.80", "1.80")))
    assert "speed-train.svg is stale" in stale((results / "h200" / "speed-train.svg", None))
    assert report.main(["--check"], results, readme) == 0


def row_of(text: str, what: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"| {what}"))


def test_targets_stand_beside_what_was_measured(results):
    """Numbers worked out by hand from the planted results; what has no result says so."""
    folder = results / "h200"
    (folder / "checks.json").write_text(json.dumps(dict(checks={"vitfast doctor": 0, "gpu tests": 1})))
    (folder / "curves.json").write_text(
        json.dumps(dict(curves=dict(steps=1000, distance=0.31, runs=4, planned=6, precision="amp")))
    )
    text = report.sections(report.load(folder))
    # attention: 150 / 100 us forward; nothing was measured of the backward alone, nor of flash forward
    measured = row_of(text, "attention N = 197")
    assert measured.endswith("| attention B/16 224 forward 1.50 (without sdpa flash, flash-attn 3, flash-attn 4) |")
    without = "(without max-autotune, max-autotune all)"
    wanted = f"| bf16 of timm bf16 0.80 {without} **missed**; of the data sheet's peak 40 % |"
    assert wanted in row_of(text, "B/16 224 training step")
    assert "vitfast doctor 100 %; gpu tests 0 % **missed**" in row_of(text, "gpu tests")
    assert "| amp, 1000 steps, 4 of 6 runs, largest distance in seed deviations 0.31 |" in row_of(text, "loss curves")
    assert "| bf16 of timm bf16 compiled 1.00 **missed** |" in row_of(text, "peak memory")
    for what in (
        "S/16, L/16",
        "B/16 inference",
        "residual add",
        "fc1 + GELU",
        "patch embedding",
        "`vitfast.accelerate",
    ):
        assert row_of(text, what).endswith("| not measured yet |"), what


def planted_results(*cases: dict) -> report.Results:
    machines = [dict(device="GPU", ceilings=dict(copy=4e12))]
    measured = {str(i): dict(ceilings=machines[0]["ceilings"]) | case for i, case in enumerate(cases)}
    return report.Results("h200", machines=machines, measured=measured)


def text_of(figures) -> list[str]:
    return list(map(str, figures))


def test_headlines_compare_equal_precision_and_the_slower_of_two(results):
    """amp against amp, by the pair of equal numerics; ours counts with the slower of its two runs."""
    speeds = {
        "vitfast compile bf16": 7000.0,
        "vitfast compile bf16 again": 6000.0,
        "vitfast compile amp": 6500.0,
        "vitfast.accelerate(timm) compile amp": 5200.0,
        "vitfast.accelerate(timm) compile bf16": 5960.0,
        "timm compile bf16": 4000.0,
        "timm max-autotune bf16": 3900.0,
        "timm max-autotune all bf16": 3950.0,
        "timm compile amp": 4000.0,
        "timm max-autotune amp": 4100.0,
    }
    found = planted_results(*(model_entry(impl, speed) for impl, speed in speeds.items()))
    figures = list(map(str, targets.training_step(found)))
    assert figures[0] == "bf16 of timm bf16 1.50 (stretch)"  # 6000 / 4000
    assert figures[1] == "accelerate amp of timm amp 1.27 (without max-autotune all) **missed**"  # 5200 / 4100
    assert list(map(str, targets.accelerated(found))) == ["bf16 of our own ViT 0.99", "amp of our own ViT 0.80"]
    assert list(targets.other_models(found)) == list(targets.inference(found)) == []
    row = "| train B/16 224 bf16 | 6,000 | 5,960 | 4,000 (timm compile bf16) | 1.50 | 1.49 |"
    assert row in report.speed_table(found)
    both = report.model_table(found.of("train"), "train")
    assert "| vitfast compile bf16 |" in both and "| vitfast compile bf16 again |" in both
    assert both.splitlines()[2].endswith("| error |") and "| cudnn | 1.5e-02 |" in both


def op_entry(op: str, impl: str, direction: str, microseconds: float, shape: str = "B/16 224 B256", **more) -> dict:
    info = dict(op=op, shape=shape, direction=direction, impl=impl)
    return entry(f"{op} {impl} {direction}", 1e-6 * microseconds, **(info | more))


def test_targets_of_other_models_by_hand():
    """The fastest of all peers counts, 4,000 of Hugging Face, each model against its own peers."""
    speeds = {"vitfast compile bf16": 6200.0, "timm compile bf16": 3000.0, "huggingface compile bf16": 4000.0}
    cases = [model_entry(impl, speed, shape="S/16 224 B512") for impl, speed in speeds.items()]
    cases += [model_entry("torchvision compile bf16", 9000.0, shape="L/16 224 B128")]
    cases += [model_entry("vitfast.accelerate(timm) compile amp", 1200.0, shape="H/14 224 B64")]
    cases += [model_entry("timm compile amp", 1000.0, shape="H/14 224 B64")]
    without = "(without max-autotune, max-autotune all)"
    assert text_of(targets.other_models(planted_results(*cases))) == [
        f"S/16 224 bf16 1.55 {without} (stretch)",
        f"H/14 224 accelerate amp 1.20 {without} **missed**",
    ]


def test_targets_of_inference_by_hand():
    """Throughput 1,500 / 1,000 images/s; one image in 1/500 s against 1/250 s: half the latency, 0.8 at most."""

    def cases(ours: float) -> list[dict]:
        throughput = [("vitfast", 1500.0, "throughput", 256), ("timm", 1000.0, "throughput", 128)]
        both = [*throughput, ("vitfast", ours, "latency", 1), ("timm", 250.0, "latency", 1)]
        return [model_entry(f"{of} compile bf16", speed, op, f"B/16 224 B{batch}") for of, speed, op, batch in both]

    without = "(without max-autotune, max-autotune all)"
    throughput = f"throughput 1.50 {without}"
    assert text_of(targets.inference(planted_results(*cases(500.0)))) == [
        throughput,
        f"latency of one image 0.50 {without}",
    ]
    assert text_of(targets.inference(planted_results(*cases(200.0)))) == [
        throughput,
        f"latency of one image 1.25 {without} **missed**",
    ]


def test_targets_of_memory_by_hand():
    """1,220 MiB of 2,000 (amp, at most 0.6) and of 1,900 (bf16, at most 0.65): 0.61 is missed, 0.64 is met."""
    sizes = {"vitfast compile bf16": 1220.0, "timm compile amp": 2000.0, "timm compile bf16": 1900.0}
    sizes |= {"timm eager amp": 100.0, "timm max-autotune bf16": 100.0}  # do not count: not compiled as ours is
    cases = [model_entry(impl, 9000.0 if size == 100.0 else 4000.0, peak_mib=size) for impl, size in sizes.items()]
    assert text_of(targets.memory(planted_results(*cases))) == [
        "bf16 of timm amp compiled 0.61 **missed**",
        "bf16 of timm bf16 compiled 0.64",
    ]


def test_operations_are_compared_at_the_largest_batch():
    """Smaller ones, of which each shape has some, do not count: there ours would have won by 9."""
    cases = []
    for shape, work, ours, theirs in (
        ("B/16 224 B1", 10, 1, 9),
        ("B/16 224 B256", 2560, 100, 150),
        ("B/16 224 B64", 640, 1, 9),
        ("H/14 224 B64", 99999, 100, 110),
    ):
        for impl, duration in (("vitfast", ours), ("sdpa cudnn", theirs), ("sdpa math", 2 * theirs)):
            cases.append(op_entry("attention", impl, "forward", duration, shape, bytes=work))
    without = "(without sdpa flash, flash-attn 3, flash-attn 4)"
    assert text_of(targets.attention(planted_results(*cases))) == [
        f"attention B/16 224 forward 1.50 {without}",
        f"attention H/14 224 forward 1.10 {without} **missed**",
    ]


def test_a_share_of_the_copy_rate_is_of_the_ceiling_in_the_file_of_the_case(results):
    """3,720 GB/s: 93 % where this run's copy reached 4,000 GB/s, whatever a newer file of another op has."""
    folder = results / "h200"
    content = json.loads((folder / "b.json").read_text())
    content["machine_info"]["vitfast"]["ceilings"]["copy"] = 4e12
    case = op_entry("add_layer_norm", "vitfast", "forward", 100, gigabytes_per_second=3720.0)
    lost = op_entry("add_layer_norm", "vitfast", "backward", 100, gigabytes_per_second=3400.0)
    (folder / "b.json").write_text(json.dumps(content | dict(benchmarks=[case, lost])))
    newer = json.loads((folder / "a.json").read_text())
    newer["machine_info"]["vitfast"]["ceilings"]["copy"] = 3.8e12
    (folder / "a.json").write_text(json.dumps(newer))
    found = report.load(folder)
    assert found.machines[-1]["ceilings"]["copy"] == 3.8e12
    figures = text_of(targets.layer_norm(found))
    assert figures == ["B/16 224 forward 93 %", "B/16 224 backward 85 % **missed**"]


def test_targets_of_the_mlp_checks_and_curves_by_hand():
    cases = [op_entry("mlp_block", impl, "backward", time) for impl, time in (("vitfast", 100), ("compile", 125))]
    cases += [op_entry("mlp_block", how, "backward", 121) for how in targets.AUTOTUNED]
    found = planted_results(*cases)
    assert text_of(targets.mlp(found)) == ["mlp_block B/16 224 backward 1.21"]
    found.checks.update({"gpu tests": 0, "vitfast doctor": 2})
    assert text_of(targets.checks(found)) == ["gpu tests 100 %", "vitfast doctor 0 % **missed**"]
    for distance, end in ((1.9, "1.90"), (2.1, "2.10 **missed**")):
        found.curves = dict(steps=50, distance=distance, runs=6, planned=6, precision="bf16")
        assert text_of(targets.loss_curves(found)) == [f"bf16, 50 steps, largest distance in seed deviations {end}"]


def test_a_ratio_names_the_peers_that_have_no_time():
    """There is none for the MLP before its compiled peer has a time; peers of the patch embedding unfold."""
    ours = [op_entry("linear_gelu", "vitfast", direction, 100) for direction in ("forward", "backward")]
    eager = [op_entry("linear_gelu", "eager", direction, 110) for direction in ("forward", "backward")]
    found = planted_results(*ours, *eager, op_entry("linear_gelu", "compile", "forward", 130))
    assert list(map(str, targets.mlp(found))) == [
        "linear_gelu B/16 224 forward 1.10 (without max-autotune, max-autotune all) **missed**"
    ]
    cases = [op_entry("patch_embed uint8", impl, "forward", time) for impl, time in (("vitfast", 50), ("compile", 400))]
    cases += [op_entry("patch_embed uint8", impl, "forward", 300) for impl in ("max-autotune", "max-autotune all")]
    assert list(map(str, targets.patch_embedding(planted_results(*cases)))) == [
        "patch_embed uint8 B/16 224 forward 6.00 (without compile unfold)"
    ]
    cases.append(op_entry("patch_embed uint8", "compile unfold", "forward", 100))
    assert list(map(str, targets.patch_embedding(planted_results(*cases)))) == [
        "patch_embed uint8 B/16 224 forward 2.00 **missed**"
    ]
    peers = [op_entry("attention separate", impl, "backward", 250) for impl in targets.SDPA_AND_FLASH]
    found = planted_results(op_entry("attention separate", "vitfast", "backward", 100), *peers)
    assert list(map(str, targets.attention(found))) == ["attention separate B/16 224 backward 2.50 (stretch)"]


def test_a_damaged_file_is_named_and_the_others_count(results):
    """Half written, not described, from another program; a stage without any result says so."""
    folder = results / "h200"
    (folder / "half.json").write_text((folder / "a.json").read_text()[:-100])
    (folder / "undated.json").write_text(json.dumps(dict(benchmarks=[], failed=[], skipped=[])))
    undescribed = json.loads((folder / "a.json").read_text())
    undescribed["benchmarks"][0]["extra_info"].pop("op")
    (folder / "undescribed.json").write_text(json.dumps(undescribed))
    (folder / "list.json").write_text("[1, 2]")
    checks = {"doctor": 0, "gpu tests": dict(code=3, reason="worker gw1 crashed"), "sanitizer": None}
    listed = dict(failed=[dict(name="test_x[1]", reason="illegal access")], skipped=["test_y"])
    (folder / "checks.json").write_text(json.dumps(dict(listed, checks=checks)))
    step = dict(name="train", state="timed out", code=124, seconds=230.1)
    steps = dict(
        steps=[dict(step, name="doctor", state="ok", code=0), step, dict(name="tune", state="skipped", code=None)]
    )
    (folder / "steps_first.json").write_text(json.dumps(steps))
    found = report.load(folder)
    assert set(found.damaged) == {"half.json", "undated.json", "undescribed.json"}
    assert found.checks == {"doctor": 0, "gpu tests": 3} and len(found.of("train")) == 2
    text = report.sections(found)
    assert "- half.json is left out: JSONDecodeError" in text and "attention B/16 224 forward 1.50" in text
    for row in ("gpu tests | failed | worker gw1 crashed", "test_x[1] | failed | illegal access", "test_y | skipped |"):
        assert f"| {row}" in text
    assert "| sanitizer | skipped |" in text and "step doctor" not in text
    assert "| step train | timed out | exit code 124 after 230.1 s |" in text and "| step tune | skipped |  |" in text


def state_file(folder: Path, name: str, date: str, **cases: list[dict]) -> None:
    """A result file of this date, with cases under benchmarks, failed or skipped."""
    content = dict(benchmarks=[], failed=[], skipped=[], datetime=date) | cases
    facts = dict(device="GPU", ceilings=dict(copy=4e12, bfloat16=8e14))
    (folder / f"{name}.json").write_text(json.dumps(content | dict(machine_info=dict(vitfast=facts))))


def test_the_newest_state_of_a_case_counts_but_a_skip_hides_nothing(tmp_path):
    """By the date in the files: their names are in the opposite order."""
    case = op_entry("attention", "vitfast", "forward", 100)
    wrong = dict(name=case["name"], fullname=case["fullname"], params={}, reason="WrongResult: vitfast is wrong")
    skip = wrong | dict(reason="not run: the process ended before")

    def found(*states: str) -> report.Results:
        folder = tmp_path / "-".join(states)
        folder.mkdir()
        for day, state in enumerate(states):
            of = dict(time=dict(benchmarks=[case]), failure=dict(failed=[wrong]), skip=dict(skipped=[skip]))[state]
            state_file(folder, f"{9 - day}", f"2026-01-0{day + 1}T00:00:00.5+00:00", **of)
        return report.load(folder)

    row = f"| {case['name']} | failed | WrongResult: vitfast is wrong |"
    for states in (("time", "failure"), ("time", "failure", "skip"), ("failure", "skip"), ("time", "skip", "failure")):
        results = found(*states)
        text = report.sections(results)
        assert not results.measured and not results.damaged and "100 ± 2" not in text, states
        assert row in text.partition("Without a time")[2], states
    for states in (("failure", "time"), ("time", "skip"), ("skip", "time"), ("failure", "skip", "time")):
        results = found(*states)
        assert list(results.measured) == [case["fullname"]] and not results.missing and not results.damaged, states
    assert [c["state"] for c in found("skip").missing.values()] == ["skipped"]


def test_dates_with_different_offsets_are_compared_as_moments(tmp_path):
    early, late = (op_entry("attention", "vitfast", "forward", time) for time in (100, 200))
    state_file(tmp_path, "late", "2026-01-01T23:00:00-05:00", benchmarks=[late])
    state_file(tmp_path, "early", "2026-01-02T01:00:00+00:00", benchmarks=[early])
    state_file(tmp_path, "undated", "yesterday", benchmarks=[early])
    results = report.load(tmp_path)
    assert results.measured[late["fullname"]]["stats"]["median"] == pytest.approx(200e-6)
    assert list(results.damaged) == ["undated.json"]


def without(case: dict, path: str, *value) -> dict:
    """The case without extra_info.KEY or stats.KEY, or with another value there."""
    changed = json.loads(json.dumps(case))
    part, key = path.split(".")
    changed[part].pop(key)
    if value:
        changed[part][key] = value[0]
    return changed


def test_a_file_without_a_key_that_is_used_is_named_with_the_key(tmp_path, capsys):
    """Everything else is shown: one odd file does not end the report."""
    good, train = op_entry("attention", "vitfast", "forward", 100), model_entry("vitfast compile bf16", 4000.0)
    inference = [model_entry("timm compile bf16", 4000.0, op) for op in ("throughput", "latency")]
    files = dict(op="train from JPEG files", shape="S/16 224 B256", direction="both", impl="timm")
    files.update(images_per_second=9.0, images_per_second_in_memory=10.0, waiting_for_data=0.1, workers=8)
    files = entry("files", 1.0, **files)
    state_file(tmp_path, "good", "2026-01-01", benchmarks=[good, train, *inference, files])
    odd = [(good, f"stats.{key}") for key in ("median", "iqr")]
    odd += [(good, f"extra_info.{key}") for key in result_files.INFO]
    for case, kinds in ((train, result_files.MODEL_INFO), (files, result_files.FILES_INFO)):
        odd += [(case, f"extra_info.{key}") for key in kinds if key not in ("error", "largest_batch")]
    for number, (case, path) in enumerate(odd):
        state_file(tmp_path, f"odd{number}", "2026-01-02", benchmarks=[without(case, path)])
    values = dict(median=0.0, iqr="2", images_per_second=None, impl="mine", shape="B/16", largest_batch="90")
    for key, value in values.items():
        path = f"{'stats' if key in ('median', 'iqr') else 'extra_info'}.{key}"
        state_file(tmp_path, f"value-{key}", "2026-01-02", benchmarks=[without(train, path, value)])
    for name, curves_ in (("steps", dict(distance="abc")), ("distance", "all"), ("list", [1])):
        if curves_ == "all":
            curves_ = dict(steps=9, runs=1, planned=2, precision="amp", distance="abc")
        (tmp_path / f"curves-{name}.json").write_text(json.dumps(dict(curves=curves_)))
    (tmp_path / "checks.json").write_text(json.dumps(dict(checks={"doctor": 1}, steps=[dict(state="failed")])))
    nothing = dict(datetime="2026-01-02", benchmarks=[], failed=[], skipped=[])
    (tmp_path / "no_machine.json").write_text(json.dumps(nothing))
    results = report.load(tmp_path)
    for number, (_, path) in enumerate(odd):
        assert f"{path} is missing" in results.damaged.pop(f"odd{number}.json"), path
    for key in values:
        assert f".{key} is " in results.damaged.pop(f"value-{key}.json"), key
    expected = {
        "curves-steps.json": "curves.steps is missing",
        "curves-distance.json": "curves.distance is 'abc'",
        "curves-list.json": "curves.steps is missing",
        "checks.json": "steps: name is missing",
        "no_machine.json": "machine_info is missing",
    }
    assert results.damaged == {name: f"ValueError: {why}" for name, why in expected.items()}
    assert not results.checks and not results.curves and len(results.measured) == 5
    assert report.main(["--folder", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "- curves-steps.json is left out: ValueError: curves.steps is missing" in text and "100 ± 2" in text


def test_a_target_that_cannot_be_computed_says_so_and_the_others_are_shown():
    found = planted_results(op_entry("mlp_block", "vitfast", "forward", 100))
    found.curves, found.checks = dict(distance=1.0), {"gpu tests": 0}
    rows = {what: figures for what, _, figures in targets.target_rows(found)}
    assert rows["loss curves, ours against timm"] == "cannot be computed: KeyError: 'steps'"
    assert rows["gpu tests, `vitfast doctor`, compute-sanitizer"] == "gpu tests 100 %"
    assert len(rows) == len(targets.TARGETS)


def test_a_gpu_of_damaged_files_alone_is_named_in_the_report(tmp_path):
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "cut.json").write_text('{"benchmarks": [')
    text = report.documents(tmp_path, tmp_path / "README.md")[tmp_path / "README.md"]
    assert "## h200" in text and "no result in h200\n- cut.json is left out: JSONDecodeError" in text


def test_names_and_reasons_cannot_break_a_table(tmp_path):
    case = op_entry("attention", "a|b\nc", "forward", 100)
    bad = dict(name="one|two\nthree", fullname="x", reason="first|\n\nsecond")
    state_file(tmp_path, "a", "2026-01-01", benchmarks=[case], failed=[bad])
    (tmp_path / "a|b.json").write_text("{")
    text = report.sections(report.load(tmp_path))
    assert "| one\\|two three | failed | first\\| second |" in text
    assert "| shape | a\\|b c | % floor |" in text and "- a\\|b.json is left out" in text


def test_the_targets_alone_are_printed_without_torch(results, tmp_path):
    script = "import sys, report; code = report.main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(code)"

    def printed(folder: Path) -> str:
        command = [sys.executable, "-c", script, "--folder", str(folder), "--targets"]
        run = subprocess.run(command, cwd=ROOT / "bench", capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return run.stdout

    lines = printed(results / "h200").splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == [what for what, _, _ in targets.TARGETS]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "cut.json").write_text('{"benchmarks": [')
    assert printed(tmp_path / "empty").splitlines()[0] == "no result in empty"


def test_a_folder_that_does_not_exist_is_one_line_and_exit_2(tmp_path, capsys):
    for more in ([], ["--targets"]):
        assert report.main(["--folder", str(tmp_path / "nowhere"), *more]) == 2
        out, error = capsys.readouterr()
        assert out == "" and error == f"bench/report.py: there is no folder {tmp_path / 'nowhere'}\n"


def test_loss_curves_compare_the_same_training(tmp_path):
    """The same weights, images and optimiser: on a CPU in fp32 the curves are one; and the distance is what it says."""
    assert curves.distance([[1.0, 2.0], [3.0, 2.0]], [[2.0, 2.5], [4.0, 2.5]]) == pytest.approx(
        0.5 / 1e-3
    )  # no spread there: 1e-3 at least
    assert curves.distance([[1.0], [3.0]], [[2.0], [4.0]]) == pytest.approx(1 / 2**0.5)
    generator = torch.Generator().manual_seed(0)
    images, labels = curves.gratings(generator, 64, 32)
    assert images.shape == (64, 3, 32, 32) and labels.unique().numel() > 30 and 0.9 < images.std() < 1.3
    command = [
        str(tmp_path),
        "--model",
        "Ti/16",
        "--image",
        "32",
        "--batch",
        "4",
        "--steps",
        "3",
        "--seeds",
        "1",
        "--precision",
        "fp32",
    ]
    assert curves.main(command) == 0
    found = json.loads((tmp_path / "curves.json").read_text())["curves"]
    ours, theirs = (found["losses"][name][0] for name in ("vitfast", "timm"))
    assert ours == pytest.approx(theirs, abs=1e-4) and 4 < ours[0] < 9 and found["machine"]["device"] == machine.name()


def test_loss_curves_are_kept_after_every_run(tmp_path, monkeypatch, capsys):
    """An interrupt in the fourth run leaves three, and the distance of the seed that both have run."""
    runs = iter([[4.0, 3.0], [4.0, 3.5], [9.0, 9.0]])

    def losses(setting, shape, weights, seed, steps):
        found = next(runs, None)
        if found is None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        return found

    monkeypatch.setattr(curves, "losses", losses)
    command = [str(tmp_path), "--model", "Nano/8", "--image", "16", "--batch", "2", "--steps", "100", "--seeds", "2"]
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background job
    try:
        assert curves.main(command) == 130
    finally:
        signal.signal(signal.SIGINT, previous)
    assert "3 of 4 runs done" in capsys.readouterr().err
    found = json.loads((tmp_path / "curves.json").read_text())["curves"]
    assert (found["runs"], found["planned"], found["seeds"]) == (3, 4, 2)
    assert found["losses"] == {"vitfast": [[4.0, 3.0], [9.0, 9.0]], "timm": [[4.0, 3.5]]}
    assert found["distance"] == pytest.approx(0.5 / 1e-3)  # one seed has no spread: 1e-3 at least
    assert curves.distance([[4.0]], []) is None


def test_without_a_result_the_report_says_so(tmp_path):
    (tmp_path / "results" / "local").mkdir(parents=True)
    readme = tmp_path / "README.md"
    readme.write_text(f"{report.START}{report.END}")
    assert report.main([], tmp_path / "results", readme) == 0
    assert all(
        "No GPU result is committed yet" in path.read_text() for path in (readme, tmp_path / "results" / "README.md")
    )


def test_the_committed_report_is_up_to_date():
    assert report.main(["--check"]) == 0


def test_script_without_a_gpu_is_one_line_and_exit_2(tmp_path):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    run = subprocess.run(
        ["bash", ROOT / "bench" / "gpu.sh", "ops", tmp_path / "out"], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 2 and run.stdout == "" and run.stderr.count("\n") == 1 and "no NVIDIA GPU" in run.stderr
    assert not (tmp_path / "out").exists()
    run = subprocess.run(["bash", ROOT / "bench" / "gpu.sh", "op"], env=environment, capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.count("\n") == 1 and "no stage 'op'" in run.stderr
