"""A limit for each case of pytest-benchmark, and a JSON file in which every case is found again.

The file that `--benchmark-json PATH` names has "benchmarks" as pytest-benchmark's, and "failed" and "skipped": lists of
{name, fullname, params, state, reason}. It is written anew after every case, so that a run that dies keeps what it has;
a case that was not reached by then is under "skipped".

Ids, for `pytest -k "words and words"` (a word is a part of the name; "B/16 and 224 and B256" is the main shape):

    test_<op>[SHAPE-DIRECTION-IMPL]                   op: the rows of bench_ops.OPS
    test_train[SHAPE-SETTING]                         SETTING: LIBRARY HOW PRECISION, such as "timm compile bf16"
    test_latency[SHAPE-SETTING]                       one, two, four and eight images
    test_throughput[MODEL-SETTING]                    MODEL: "B/16 224", without a batch
    test_attention_packed[MIX-DIRECTION-IMPL], test_train_packed[MIX-WAY-HOW]
    test_train_from_files[SHAPE-vitfast|timm], test_loss_curve[SHAPE-PRECISION-SEED-LIBRARY]
    test_embed[SHAPE-STAGE]                           STAGE: forward, memory or files

SHAPE: "B/16 224 B256", model, pixels and batch; on a CPU it starts with "cpu small". DIRECTION: forward, backward
(alone) or both.
"""

import gc
import os
import sys

import machine
import pytest
import torch

from vitfast.errors import both_ends

NOT_RUN = "not run: the process ended before"
_cases: dict[str, dict] = {}  # node id -> its entry, with "state": passed, failed or skipped


def pytest_addoption(parser):
    add = parser.getgroup("vitfast benchmarks").addoption
    add("--case-limit", type=int, default=0, metavar="SECONDS", help="a longer case is recorded as failed")


def pytest_configure(config):
    torch.backends.cudnn.benchmark = machine.GPU  # the peers' convolutions run as timm's own benchmark runs them
    if not machine.GPU:
        torch.set_num_threads(1)  # the clock is the process's time, in which threads would wait for each other


def pytest_collection_finish(session):
    for item in session.items:
        if "benchmark" in getattr(item, "fixturenames", ()):
            params = {k: str(v) for k, v in item.callspec.params.items()} if hasattr(item, "callspec") else {}
            entry = dict(name=item.name, fullname=item.nodeid, params=params, state="skipped", reason=NOT_RUN)
            _cases[item.nodeid] = entry


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    with machine.time_limit(item.config.getoption("case_limit")):
        return (yield)


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
        case.update(state="failed", reason=both_ends(crash.message if crash else str(report.longrepr)))


@pytest.fixture(autouse=True)
def _leave_nothing_behind(request):
    """Frees a case's compiled code and memory before the next one; a broken device ends the run."""
    yield
    torch._dynamo.reset()
    if not machine.GPU:
        return
    sys.last_value = sys.last_traceback = sys.last_exc = None  # the frames of a failed case hold its tensors
    gc.collect()
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        request.session.shouldstop = f"the device does not answer any more: {error}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    _save(item.config)  # before each case: a run that dies in the middle of one loses only that one


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    _save(session.config)


def _save(config) -> None:
    """Writes the JSON file as it stands now, in place of pytest-benchmark's."""
    option = config.getoption("benchmark_json", None)
    if not option or not _cases:
        return
    # Older pytest-benchmarks open the file themselves.
    path = option if isinstance(option, (str, os.PathLike)) else option.name
    passed = [case for case in config._benchmarksession.benchmarks if _cases[case.fullname]["state"] == "passed"]
    cases = {state: [case for case in _cases.values() if case["state"] == state] for state in ("failed", "skipped")}
    machine.write_results(path, [case.as_dict(include_data=False) for case in passed], **cases)
