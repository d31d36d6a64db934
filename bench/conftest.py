"""A time budget for pytest-benchmark, and a JSON file in which every case is found again.

The file that `--benchmark-json PATH` names has, beside pytest-benchmark's own keys, "failed" and "skipped": lists of
{name, fullname, params, reason}. It is written anew after every case, so that a run that dies keeps what it has; a case
that was not reached by then is under "skipped". `machine_info["vitfast"]` says what was measured on, and the ceilings
of the run (machine.ceilings).

Ids, for `pytest -k "words and words"` (a word is a part of the name; "B/16 and 224 and B256" is the main shape):

    test_<op>[SHAPE-DIRECTION-IMPL]                   op: the rows of bench_ops.OPS
    test_train[SHAPE-SETTING]                         SETTING: LIBRARY HOW PRECISION, such as "timm compile bf16"
    test_inference[MODEL-SETTING-latency|throughput]  MODEL: "B/16 224", without a batch
    test_attention_packed[MIX-DIRECTION-IMPL], test_train_packed[MIX-WAY-HOW]
    test_train_from_files[SHAPE-vitfast|timm], test_loss_curve[SHAPE-PRECISION-SEED-LIBRARY]
    test_embed[SHAPE-STAGE]                           STAGE: forward, memory or files

SHAPE: "B/16 224 B256", model, pixels and batch; on a CPU it starts with "cpu small". DIRECTION: forward, backward
(alone) or both. Every implementation's cases at the main shape come first; at each shape ours comes first, then what
is quick to compile, then torch.compile, then max-autotune. Whole models keep the order of bench_model.CASES.
"""

import functools
import gc
import json
import os
import sys
import time

import machine
import pytest
import shapes
import torch

from vitfast.errors import both_ends
from vitfast.run.files import write_text

LEAST_SECONDS = 15  # before the end that --ends names: with fewer left no case starts
NOT_RUN = "not run: the process ended before"
_cases: dict[str, dict] = {}  # node id -> its entry, with "state": passed, failed or skipped


def pytest_addoption(parser):
    add = parser.getgroup("vitfast benchmarks").addoption
    late = f"no case starts later than {LEAST_SECONDS} s before this moment; it is recorded as skipped"
    add("--ends", type=float, metavar="EPOCH_SECONDS", help=late)
    add("--case-limit", type=int, default=0, metavar="SECONDS", help="a longer case is recorded as failed")


def pytest_configure(config):
    torch.backends.cudnn.benchmark = machine.GPU  # the peers' convolutions run as timm's own benchmark runs them
    if not machine.GPU:
        torch.set_num_threads(1)  # the clock is the process's time, in which threads would wait for each other


def priority(params: dict) -> tuple[bool, int, int]:
    """The sort key of a case: the main shape first, at each shape ours and then the quickest to compile."""
    where, impl = str(params.get("shape", params.get("model", ""))), str(params.get("impl", ""))
    others = not (where and shapes.FOCUS.name.startswith(where))  # a model's name may lack the batch
    number = list(shapes.SHAPES).index(where) if where in shapes.SHAPES else 0
    patience = dict(vitfast=0, compile=2).get(impl.split(" ")[0], 1)
    return others, number, 3 if impl.startswith("max-autotune") else patience


def pytest_collection_modifyitems(items):
    """Sorts the cases, so that those which are missing when time runs out matter least."""
    items.sort(key=lambda item: priority(item.callspec.params if hasattr(item, "callspec") else {}))


def pytest_collection_finish(session):
    if machine.GPU:
        gc.freeze()  # what is there now stays until the end: collecting after each case takes no time
    for item in session.items:
        if "benchmark" in getattr(item, "fixturenames", ()):
            params = {k: str(v) for k, v in item.callspec.params.items()} if hasattr(item, "callspec") else {}
            entry = dict(name=item.name, fullname=item.nodeid, params=params, state="skipped", reason=NOT_RUN)
            _cases[item.nodeid] = entry


def pytest_runtest_setup(item):
    ends = item.config.getoption("ends")
    if ends is not None and time.time() > ends - LEAST_SECONDS:
        pytest.skip(f"out of time: fewer than {LEAST_SECONDS} s were left for this case")


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
    """Compiled code and memory of a case go before the next one; a broken device ends the run."""
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


def pytest_benchmark_update_machine_info(config, machine_info):
    machine_info["vitfast"] = machine.description()
    machine_info.pop("node", None)  # the host's name is nobody's business


def _save(config) -> None:
    """Writes the JSON file as it stands now, whole or not at all."""
    option = config.getoption("benchmark_json", None)
    if not option or not _cases:
        return
    # Older pytest-benchmarks open the file themselves.
    path = option if isinstance(option, (str, os.PathLike)) else option.name
    facts = dict(benchmarks=config._benchmarksession.benchmarks, include_data=True, **_constant_facts(config))
    output = config.hook.pytest_benchmark_generate_json(config=config, **facts)
    output["benchmarks"] = [b for b in output["benchmarks"] if _cases[b["fullname"]]["state"] == "passed"]
    for state in ("failed", "skipped"):
        cases = [case for case in _cases.values() if case["state"] == state]
        output[state] = [{k: v for k, v in case.items() if k != "state"} for case in cases]
    write_text(path, json.dumps(output, indent=1, default=str) + "\n")


@functools.cache
def _constant_facts(config) -> dict:
    commit_info = config.hook.pytest_benchmark_generate_commit_info(config=config)
    return dict(machine_info=config._benchmarksession.get_machine_info(), commit_info=commit_info)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    _save(item.config)  # before each case: a death in the middle of one loses that one alone


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    _save(session.config)
    gc.unfreeze()
