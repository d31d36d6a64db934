"""Stand-ins for pytest-benchmark's fixture, and bench/conftest.py as a module."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


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
