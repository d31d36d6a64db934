"""Fixtures of the benchmarks' tests: a pretended GPU."""

import clock
import pytest
import shapes
import torch

from vitfast.model import activation_memory as keep


@pytest.fixture
def gpu(monkeypatch):
    """The benchmarks take this device for a GPU."""
    monkeypatch.setattr(clock, "GPU", True)
    monkeypatch.setattr(clock, "SMALL", False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(shapes, "SHAPES", shapes.planned(*shapes.ON_GPU))


@pytest.fixture
def settled(monkeypatch) -> list[int]:
    """The tokens that ViTs were settled for: this device has memory for all that their blocks may keep."""
    asked = []
    monkeypatch.setattr(keep, "DEVICES", (clock.DEVICE.type,))
    monkeypatch.setattr(keep, "choose", lambda blocks, parameters, rows, *_: asked.append(rows) or "all")
    return asked
