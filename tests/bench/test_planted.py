"""A run over planted implementations: no time for a wrong result, right times, nothing dropped."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vitfast.errors import both_ends

ROOT = Path(__file__).parents[2]


# Implementations of 2x, one of them right and slow, the others wrong in ways that a benchmark can miss.
PLANTED = """
import os, time
import pytest, torch
from harness import Case, bench, values
from vitfast.cost.work import Work


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
KERNELS = ((6e6, 5e3),)


@pytest.mark.parametrize("impl", IMPLS)
def test_double_is_timed(benchmark, impl):
    case = Case("double", "cpu small B9", lambda x: 2 * x, lambda: [values(9, 3)], 1, Work(KERNELS, KERNELS, KERNELS))
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
        5,
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
    """Failed, too long, not run because the process died: all are in the file, with the reason.

    In one line each.
    """
    failed = {case["params"]["impl"]: case for case in planted["failed"]}
    assert set(failed) == {"last_sample", "gradient", "nan", "raises", "explains", "tires", "hangs"}
    assert (
        failed["raises"]["name"] == "test_double_is_timed[raises]"
        and "cannot be multiplied" in failed["raises"]["reason"]
    )
    assert "took longer than 5 s" in failed["hangs"]["reason"] and not any(
        "\n" in case["reason"] for case in failed.values()
    )
    assert [(case["name"], case["reason"]) for case in planted["skipped"]] == [
        ("test_double_is_timed[dies]", "not run: the process ended before")
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
