"""Fixtures of the benchmarks' tests: a pretended GPU, the hooks of bench/conftest.py, a place for archives."""

import copy
import importlib.util
from pathlib import Path

import gpu_archive
import machine
import pytest
import report
import shapes
import torch


@pytest.fixture
def gpu(monkeypatch):
    """The benchmarks take this device for a GPU."""
    monkeypatch.setattr(machine, "GPU", True)
    monkeypatch.setattr(machine, "SMALL", False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(shapes, "SHAPES", shapes.planned(*shapes.MAIN, *shapes.MORE))


@pytest.fixture
def hooks():
    """bench/conftest.py, under a name of its own."""
    path = Path(__file__).parents[2] / "bench" / "conftest.py"
    spec = importlib.util.spec_from_file_location("conftest_of_bench", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """A repository, and the files of a good archive of its commit."""
    root = tmp_path_factory.mktemp("repository")
    return root, gpu_archive.good(gpu_archive.repository(root))


@pytest.fixture
def place(origin):
    """The repository with an empty report, and a copy of the good files."""
    root, files = origin
    results = root / "bench" / "results"
    results.mkdir(exist_ok=True)
    for path in (results / "README.md", root / "README.md"):
        path.write_text(f"{report.START}\nold\n{report.END}\n")
    yield root, copy.deepcopy(files)
    for path in sorted(results.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
