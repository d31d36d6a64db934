"""Shared set-up: one thread per worker (xdist runs two), fixed seeds, Triton's interpreter and no `gpu` tests where there is no GPU."""

import dataclasses
import os
from types import SimpleNamespace

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # what /proc/cpuinfo says is not tried out by a compiler and a Python for each kind of vector

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported: kernels run on CPU tensors in mode "on"


def _quick_interpreter() -> None:
    """Twice the speed: the functions of triton.language are replaced once, not at every launch and call of a helper; integers are not checked for overflow.

    Nothing else here uses triton.language, and tiny shapes cannot overflow (a GPU checks under TRITON_DEBUG only).
    """
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_once(fn):
        if id(fn.__globals__) not in patched:
            patched.add(id(fn.__globals__))
            patch(fn)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_once
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


if os.environ.get("TRITON_INTERPRET") == "1":
    _quick_interpreter()


def pytest_collection_modifyitems(items):
    """The slowest first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: -item.get_closest_marker("slow").args[0] if "slow" in item.keywords else 0)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
