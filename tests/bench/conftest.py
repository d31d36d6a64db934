"""Fixtures of the benchmarks' tests: a pretended GPU."""

import clock
import pytest
import shapes
import torch


@pytest.fixture
def gpu(monkeypatch):
    """The benchmarks take this device for a GPU."""
    monkeypatch.setattr(clock, "GPU", True)
    monkeypatch.setattr(clock, "SMALL", False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(shapes, "SHAPES", shapes.planned(*shapes.ON_GPU))
