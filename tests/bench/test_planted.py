"""A run over planted implementations: no time for a wrong result, right times, nothing dropped."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
# Implementations of 2x, one of them right and slow, the others wrong in ways that a benchmark can miss.
PLANTED = """
import os, time
import pytest, torch
from harness import Case, Operation, bench
from vitfast.tools.cost.work import Work


def taking(seconds):
    def double(x):
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass
        return 2 * x
    return double


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


IMPLS = dict(quick=taking(0.02), slow=taking(0.04), gradient=Backward.apply, nan=lambda x: 2 * x / 0)
IMPLS |= dict(last_sample=lambda x: torch.cat([2 * x[:-1], 2.01 * x[-1:]]), raises=lambda x: x @ x)
IMPLS |= dict(explains=explains, tires=Tires(), hangs=lambda x: time.sleep(60), dies=lambda x: os._exit(9))
KERNELS = ((6e6, 5e3),)


@pytest.mark.parametrize("impl", IMPLS)
def test_double_is_timed(benchmark, impl):
    work = Work(KERNELS, KERNELS, KERNELS)
    case = Case("double", "cpu small B9", lambda x: 2 * x, [("values", (9, 3))], 1, work)
    bench(benchmark, Operation(case, impl, IMPLS[impl], "backward" if impl == "gradient" else "forward"))
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> dict:
    """The JSON file of a run over the planted implementations, the last of which ends the process."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "bench_planted.py").write_text(PLANTED)
    # xdist's worker would switch benchmarks off
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= dict(PYTHONPATH=str(ROOT / "bench"), CUDA_VISIBLE_DEVICES="", VITFAST_COMMIT="abc1234")
    environment |= dict(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    command = "-m pytest -q --benchmark-only -p no:cacheprovider -p pytest_benchmark.plugin -p conftest --case-limit 5"
    files = [folder / "bench_planted.py", f"--benchmark-json={folder / 'out.json'}"]
    run = subprocess.run([sys.executable, *command.split(), *files], cwd=ROOT, env=environment, capture_output=True)
    assert run.returncode == 9, run.stdout + run.stderr
    return json.loads((folder / "out.json").read_text())


@pytest.mark.slow
def test_no_case_is_dropped_and_a_wrong_result_gets_no_time(planted):
    """Failed, too long, not run because the process died: all are in the file, with the reason, in one line each."""
    failed = {case["params"]["impl"]: case for case in planted["failed"]}
    reasons = {impl: case["reason"] for impl, case in failed.items()}
    said = dict(last_sample="last_sample is wrong on double cpu small B9 forward", raises="cannot be multiplied")
    said |= dict(gradient="gradient is wrong on double cpu small B9 backward", hangs="took longer than 5 s")
    said |= dict(nan="nan is wrong on double cpu small B9 forward", explains="RuntimeError: Compilation failed. ")
    said |= dict(tires="tires is wrong on double cpu small B9 forward after timing")
    assert set(failed) == set(said) and failed["nan"]["name"] == "test_double_is_timed[nan]"
    for impl, text in said.items():
        assert text in reasons[impl] and "\n" not in reasons[impl], reasons[impl]
        assert ("it gets no time" in reasons[impl]) == ("is wrong" in text)
    assert reasons["explains"].endswith("the last line says why") and len(reasons["explains"]) == 400
    assert {case["params"]["impl"] for case in planted["benchmarks"]} == {"quick", "slow"}
    not_run = ("test_double_is_timed[dies]", "not run: the process ended before")
    assert [(case["name"], case["reason"]) for case in planted["skipped"]] == [not_run]


@pytest.mark.slow
def test_twice_as_slow_is_reported_as_twice_as_slow(planted):
    median = {case["params"]["impl"]: case["stats"]["median"] for case in planted["benchmarks"]}
    assert 1.8 < median["slow"] / median["quick"] < 2.2 and 0.018 < median["quick"] < 0.022


@pytest.mark.slow
def test_json_schema(planted):
    facts = planted["machine_info"]["vitfast"]
    assert (facts["commit"], facts["device"]) == ("abc1234", "cpu")
    assert facts["torch"] == torch.__version__.partition("+")[0] and facts["cudnn.benchmark"] == "off"
    assert "flash-attn-4" in facts
    ceilings = facts["ceilings"]
    assert set(ceilings) == {"copy", "float32"} and all(rate > 1e8 for rate in ceilings.values())
    for case in planted["benchmarks"]:
        info, stats = case["extra_info"], case["stats"]
        floor = max(6e6 / ceilings["float32"], 5e3 / ceilings["copy"])
        wanted = dict(impl=case["params"]["impl"], device="cpu", flops=6_000_000, bytes=5_000, op="double")
        wanted |= dict(shape="cpu small B9", direction="forward", dtype="float32", floor_us=pytest.approx(1e6 * floor))
        wanted |= dict(percent_of_floor=pytest.approx(100 * floor / stats["median"]), error_after=info["error"])
        wanted |= dict(tflops=pytest.approx(6e-6 / stats["median"]))
        wanted |= dict(gigabytes_per_second=pytest.approx(5e-6 / stats["median"]))
        assert {key: info[key] for key in wanted} == wanted
        assert 0 <= info["error"] <= info["error_limit"] < 1e-5 and stats["iqr"] >= 0 and stats["rounds"] >= 5
