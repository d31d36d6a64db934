"""Fixtures of the benchmarks' tests: a pretended GPU, and the hooks of bench/conftest.py."""

import importlib.util
from pathlib import Path

import machine
import pytest
import shapes
import torch


@pytest.fixture
def gpu(monkeypatch):
    """The benchmarks take this device for a GPU."""
    monkeypatch.setattr(machine, "GPU", True)
    monkeypatch.setattr(machine, "SMALL", False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(shapes, "SHAPES", shapes.here(*shapes.MAIN, *shapes.MORE))


@pytest.fixture
def hooks():
    """bench/conftest.py, under a name of its own."""
    path = Path(__file__).parents[2] / "bench" / "conftest.py"
    spec = importlib.util.spec_from_file_location("conftest_of_bench", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
