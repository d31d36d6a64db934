"""Shared set-up: one thread per worker (xdist runs two), fixed seeds, Triton's interpreter and no `gpu` tests where there is no GPU."""

import inspect
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported: kernels run on CPU tensors in mode "on"


def _patch_language_once_a_launch() -> None:
    """The interpreter replaces the functions of triton.language anew for every call of a helper in a kernel, a third of its time: once a launch is enough."""
    from triton.runtime import interpreter

    patch, language, patched = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core), set()

    def patch_once(fn):
        modules = tuple(m for m in fn.__globals__.values() if inspect.ismodule(m) and m in language)
        if modules in patched:
            return None  # a helper's call: only the launch restores
        scope = patch(fn)
        restore, outermost = scope.restore, not patched
        scope.restore = lambda: (patched.clear() if outermost else None, restore())
        patched.add(modules)
        return scope

    interpreter._patch_lang = patch_once


if os.environ.get("TRITON_INTERPRET") == "1":
    _patch_language_once_a_launch()


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
