"""What pytest-benchmark does not do: a time budget, and a JSON file in which every case is found again.

The file that `--benchmark-json PATH` names has, beside pytest-benchmark's own keys, "failed" and "skipped": lists of
{name, fullname, params, reason}. It is written anew after every case, so that a run that dies keeps what it has; a case that was not
reached by then is under "skipped". `machine_info["vitfast"]` says what was measured on, and the ceilings of the run.
"""

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path

import clock
import harness
import machine
import pytest
import shapes
import torch

START = time.monotonic()
NOT_RUN = "not run: the process ended before"
_cases: dict[str, dict] = {}  # node id -> its entry, with "state": passed, failed or skipped
_constant: dict = {}


def pytest_addoption(parser):
    group = parser.getgroup("vitfast benchmarks")
    group.addoption("--shapes", choices=("few", "all"), default="few", help="which shapes the operations are measured at on a GPU (default few)")
    group.addoption("--dtype", choices=("bfloat16", "float16", "float32"), help="of the operations (default: bfloat16 on a GPU, float32 on a CPU)")
    group.addoption("--budget", type=float, metavar="SECONDS", help="no case starts later than this after the start; it is recorded as skipped")
    group.addoption("--case-limit", type=int, default=0, metavar="SECONDS", help="a case that takes longer is recorded as failed")


def pytest_configure(config):
    shapes.choose(config.getoption("shapes"))
    if config.getoption("dtype"):
        harness.DTYPE = getattr(torch, config.getoption("dtype"))


def pytest_collection_modifyitems(items):
    """Operations whose compilation takes longest come last: where time runs out, they are what is missing."""

    def patience(item) -> int:
        impl = str(item.callspec.params.get("impl")) if hasattr(item, "callspec") else ""
        return 1 if impl.startswith("compile") else 2 if impl.startswith("max-autotune") else 0

    items.sort(key=patience)


def pytest_collection_finish(session):
    if clock.GPU:
        gc.freeze()  # what is there now stays until the end: collecting after each case takes no time
    for item in session.items:
        if "benchmark" in getattr(item, "fixturenames", ()):
            params = {k: str(v) for k, v in item.callspec.params.items()} if hasattr(item, "callspec") else {}
            _cases[item.nodeid] = dict(name=item.name, fullname=item.nodeid, params=params, state="skipped", reason=NOT_RUN)


def pytest_runtest_setup(item):
    budget = item.config.getoption("budget")
    if budget is not None and time.monotonic() - START > budget:
        pytest.skip(f"out of time: the budget of {budget:.0f} s was spent before this case")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    limit = item.config.getoption("case_limit")

    def stop(number, frame):
        raise TimeoutError(f"took longer than {limit} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def pytest_runtest_logreport(report):
    case = _cases.get(report.nodeid)
    if case is None or (report.passed and report.when != "call"):
        return
    if report.passed:
        case.update(state="passed", reason="")
    elif report.skipped:
        case.update(state="skipped", reason=report.longrepr[2].removeprefix("Skipped: "))
    else:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash else str(report.longrepr)
        case.update(state="failed", reason=" ".join(text.split())[:400])


@pytest.fixture(autouse=True)
def _leave_nothing_behind(request):
    """Compiled code and memory of a case are gone before the next one; a device that a case has broken ends the run."""
    yield
    if not clock.GPU:
        return
    torch._dynamo.reset()
    sys.last_value = sys.last_traceback = sys.last_exc = None  # the frames of a failed case hold its tensors
    gc.collect()
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        request.session.shouldstop = f"the device does not answer any more: {error}"


def pytest_benchmark_update_machine_info(config, machine_info):
    machine_info["vitfast"] = dict(machine.facts(), ceilings=machine.ceilings(), datasheet_bf16_flops=machine.datasheet_flops(machine.name()))


def pytest_benchmark_update_json(config, benchmarks, output_json):
    bad = {nodeid for nodeid, case in _cases.items() if case["state"] != "passed"}
    output_json["benchmarks"] = [b for b in output_json["benchmarks"] if b["fullname"] not in bad]
    for state in ("failed", "skipped"):
        output_json[state] = [{k: v for k, v in case.items() if k != "state"} for case in _cases.values() if case["state"] == state]


def _save(config) -> None:
    """Writes the JSON file as it stands now, whole or not at all."""
    option = config.getoption("benchmark_json", None)
    if not option or not _cases:
        return
    path = Path(option if isinstance(option, (str, os.PathLike)) else option.name)  # older pytest-benchmarks open the file themselves
    hook = config.hook
    if not _constant:
        _constant.update(machine_info=hook.pytest_benchmark_generate_machine_info(config=config))
        _constant.update(commit_info=hook.pytest_benchmark_generate_commit_info(config=config))
        hook.pytest_benchmark_update_machine_info(config=config, machine_info=_constant["machine_info"])
    benchmarks = config._benchmarksession.benchmarks
    output = hook.pytest_benchmark_generate_json(config=config, benchmarks=benchmarks, include_data=True, **_constant)
    hook.pytest_benchmark_update_json(config=config, benchmarks=benchmarks, output_json=output)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(output, indent=1, default=str) + "\n")
    os.replace(temporary, path)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    _save(item.config)  # before each case: a death in the middle of one loses that one alone


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    _save(session.config)
    gc.unfreeze()
