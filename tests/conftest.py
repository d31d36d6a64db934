"""Shared set-up: one thread per worker, fixed seeds; without a GPU Triton's interpreter and no `gpu` tests."""

import os
import sys
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # last: children find a test's function by its module, tests.eval.x
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor believes /proc/cpuinfo: it would try each kind of vector with a compiler and another Python.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported: kernels run on CPU tensors in mode "on"

# On a GPU: first what a run that is cut off must not miss, last what compiles for long.
GPU_ORDER = ("_same_bits", "_computes_the_same", "_around_tile_edges", "kernels/test_gpu.py", "tests/kernels/")
GPU_ORDER += ("tests/adapters/", "test_export")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
WITH_PLANS = "test_plan", "test_routes"  # tests of what the sanitizer, whose memory is poisoned, would keep away
if INTERPRETED:
    from known_types import remember_types
    from sanitizer import Sanitizer

    from vitfast.tools import interpreter

    interpreter.quicken()
    remember_types()
    interpreter.mend_bfloat16()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    """The sanitizer watches what the kernels' own tests launch: a finding fails the test."""
    own_code = not item.path.stem.startswith(WITH_PLANS)
    if not (INTERPRETED and own_code and item.path.parent.name in ("kernels", "ops")):
        yield
        return
    with Sanitizer() as watch:
        outcome = yield
    if watch.findings:
        item.add_report_section("call", "sanitizer", str(watch))
        if outcome.excinfo is None:
            outcome.force_exception(AssertionError(f"the sanitizer found:\n{watch}"))


def pytest_configure(config):
    if torch.cuda.is_available() and not config.pluginmanager.has_plugin("device_guard"):
        config.pluginmanager.import_plugin("device_guard")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items):
    """Cases behind the n-th of `quick(n)` are slow; those that are slow anyway do not count.

    Tests of a GPU are skipped without one, or run by their urgency.
    """
    cases = Counter()
    for item in items:
        if (quick := item.get_closest_marker("quick")) and not item.get_closest_marker("slow"):
            cases[item.function] += 1
            if cases[item.function] > quick.args[0]:
                item.add_marker("slow")
    if torch.cuda.is_available():
        last = len(GPU_ORDER) - 2
        place = lambda name: next((i for i, part in enumerate(GPU_ORDER) if part in name), last)  # noqa: E731
        items.sort(key=lambda item: place(item.nodeid) if "gpu" in item.keywords else -1)
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_reports(request, monkeypatch):
    """Runs draw no report.html, half a second each, but in tests that are marked to be about them."""
    if "vitfast.train.trainer" in sys.modules and "reports" not in request.keywords:
        for name in ("write_report", "complete"):
            monkeypatch.setattr(f"vitfast.train.trainer.{name}", lambda *_: None)
