"""Fixtures that several files of the kernels' tests use."""

import contextlib

import pytest
import torch
from layer_norm_cases import DEVICE

from vitfast import ops
from vitfast.kernels import cublaslt, tiles


@pytest.fixture
def poisoned():
    """Uninitialised memory is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def kernels_on_nan(monkeypatch):
    """Kernels on, and what torch.empty hands out is NaN: reading it shows."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        t = empty(*args, **kwargs)
        return t.fill_(float("nan")) if t.is_floating_point() and t.device.type != "meta" else t

    monkeypatch.setattr(torch, "empty", poisoned)
    with ops.use_kernels("on"):
        yield


@pytest.fixture
def few_sums():
    """One program for 1024 column sums: the interpreter pays per program. A GPU takes the shipped tiles."""
    one = tiles.override("column_sums", tiles.tile(8, 1, BLOCK_P=256, BLOCK_D=1024))
    with one if DEVICE == "cpu" else contextlib.nullcontext():
        yield


@pytest.fixture
def few_programs():
    """Blocks of 64 rows for LayerNorm, in the interpreter."""
    if DEVICE == "cuda":
        yield
        return
    backward = tiles.tile(4, 1, BLOCK_M=64, STAGES=1, PER_SM=1)
    with tiles.override("layer_norm_fwd", tiles.tile(4, 1, BLOCK_M=64)), tiles.override("layer_norm_bwd", backward):
        yield


@pytest.fixture
def afresh():
    """Nothing is known of the cuBLASLt extension, before and after."""
    cublaslt._library.cache_clear()
    cublaslt._chosen.cache_clear()
    yield
    cublaslt._library.cache_clear()
    cublaslt._chosen.cache_clear()
