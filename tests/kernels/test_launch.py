"""What launches kernels: what Triton lacks to build it is said, and a kernel known already is launched at once."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from triton import knobs
from triton._C.libtriton import native_specialize_impl as specialized
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import build, driver
from triton.tools.tensor_descriptor import TensorDescriptor

from vitfast.kernels import launch

HERE = sysconfig.get_paths()["include"]


@pytest.mark.parametrize(
    "compiler, path, include, message",
    [
        (None, None, HERE, None),
        (None, None, "/nowhere", "there is no Python.h in /nowhere; install Python's headers (on Debian: apt install "),
        ("no-such-compiler", None, HERE, "CC is 'no-such-compiler', which is not a program"),
        (None, "", HERE, "there is no C compiler; install gcc (on Debian: apt install gcc), or name one in CC"),
    ],
)
def test_what_triton_lacks_to_build_a_launcher_is_said_where_it_cannot(
    compiler, path, include, message, monkeypatch, tmp_path
):
    """Triton's own build fails where something is said to be missing, and there alone."""
    source = tmp_path / "launcher.c"
    source.write_text("#include <Python.h>\n")
    for name, value in (("CC", compiler), ("PATH", path)):
        if value is not None:
            monkeypatch.setenv(name, value)
    if compiler is None:
        monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_paths", lambda **_: dict(include=include))
    if hasattr(build, "_find_compiler"):  # in Triton 3.6 nothing remembers the compiler
        build._find_compiler.cache_clear()
    try:
        build._build("launcher", str(source), str(tmp_path), [], [], [], [])
        builds = True
    except (RuntimeError, OSError, subprocess.CalledProcessError):
        builds = False
    said = launch.missing_for_launchers()
    assert builds == (message is None) == (said is None) and (said or "").startswith(message or "")


@pytest.mark.parametrize(
    "failure, says",
    [
        (RuntimeError("Failed to find C compiler."), "^Triton cannot build what launches kernels: there is no C comp"),
        (torch.OutOfMemoryError("CUDA out of memory"), "^CUDA out of memory$"),  # what it says itself
    ],
)
def test_a_launch_says_what_is_missing(failure, says, monkeypatch):
    class Kernel:
        pre_run_hooks = ()

        def __getitem__(self, grid):
            raise failure

    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "settle", lambda kernel: None)
    with pytest.raises(type(failure), match=says):
        launch.launch(Kernel(), (1,), x=torch.empty(1))


def known_kernel(monkeypatch):
    """A kernel of x, y and z, its calls through Triton, and those of what Triton compiled."""
    through, at_once = [], []

    class Kernel:
        arg_names, hash, pre_run_hooks = ["x", "y", "z"], "known", []

        def __getitem__(self, grid):
            def run(**arguments):
                through.append(arguments)
                return SimpleNamespace(function="f", packed_metadata="m", run=lambda *values: at_once.append(values))

            return run

    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "_compiled", {})
    stream = SimpleNamespace(get_current_stream=lambda device: f"stream of {device}")
    monkeypatch.setattr(driver, "_active", stream)
    return Kernel(), through, at_once


X = torch.zeros(64)
GIVEN = dict(z=(1, X), x=X, y=1, num_warps=4)
OTHERS = (
    dict(y=2),
    dict(y=True),
    dict(y=1.0),
    dict(y=None),
    dict(x=X.half()),
    dict(x=X[1:]),
    dict(x=None),
    dict(z=(1, X[1:])),
    dict(z=(True, X)),
    dict(z=(X, 1)),
    dict(num_warps=8),
    dict(x=TensorDescriptor(X, [64], [1], [16])),
    dict(x=TensorDescriptor(X, [64], [1], [32])),
)


def test_triton_looks_at_a_launch_once_and_again_at_what_differs(monkeypatch):
    kernel, through, at_once = known_kernel(monkeypatch)
    launch.launch(kernel, (7,), **GIVEN)
    assert len(through) == 1 and not at_once
    y = torch.ones(64)
    launch.launch(kernel, (8, 9), **GIVEN | dict(x=y))
    (values,) = at_once
    assert len(through) == 1 and values[:9] == (8, 9, 1, "stream of None", "f", "m", None, None, None)
    assert values[9] is y and values[10:] == (1, GIVEN["z"])
    for other in OTHERS:
        before = len(through)
        launch.launch(kernel, (7,), **GIVEN | other)
        assert len(through) == before + 1, other
        launch.launch(kernel, (7,), **GIVEN | other)
        assert len(through) == before + 1, other


WATCHED = [
    (knobs.runtime, "launch_enter_hook", lambda metadata: None),
    (knobs.runtime, "launch_exit_hook", lambda metadata: None),
    (knobs.runtime, "add_stages_inspection_hook", lambda: ("", "")),
    (knobs.runtime, "debug", True),
    (knobs.compilation, "instrumentation_mode", "default"),
]


@pytest.mark.parametrize("where, name, value", WATCHED, ids=[name for _, name, _ in WATCHED])
@pytest.mark.parametrize("known", [True, False])
def test_hooks_and_other_compilers_see_every_launch_and_nothing_of_theirs_is_kept(
    where, name, value, known, monkeypatch
):
    kernel, through, at_once = known_kernel(monkeypatch)
    if known:
        launch.launch(kernel, (7,), **GIVEN)
    with mock.patch.object(where, name, value):
        for _ in range(2):
            launch.launch(kernel, (7,), **GIVEN)
    assert len(through) == 2 + known and not at_once, "Triton itself makes these launches"
    launch.launch(kernel, (7,), **GIVEN)
    assert (len(through), len(at_once)) == ((3, 1) if known else (3, 0)), "a profiler's kernel runs no longer than it"


def test_a_kernel_and_functions_that_it_is_given_are_settled_before_they_are_hashed(monkeypatch):
    """Triton hashes a function by its source, and version 3.6 by what was hashed before it."""
    kernel, _, _ = known_kernel(monkeypatch)
    calls = []

    class Function:
        cache_key = "that of its source"

        def __hash__(self):
            calls.append("hashed")
            return 1

    type(kernel).__hash__ = Function.__hash__
    monkeypatch.setattr(launch, "settle", lambda function: calls.append(type(function).__name__))
    launch.launch(kernel, (7,), **GIVEN | dict(y=Function()))
    assert calls[:3] == ["Kernel", "Function", "hashed"]


@pytest.mark.slow
def test_a_launch_at_once_hands_a_compiled_kernel_what_triton_hands_it(tmp_path):
    """For each kind of argument, with Triton's own front end and compiler, under a driver without a GPU."""
    file = Path(__file__).parents[1] / "helpers" / "known_launches.py"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= dict(TRITON_CACHE_DIR=str(tmp_path), PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run([sys.executable, file], env=env, capture_output=True, text=True)
    assert done.stdout == "21 at once, 0 through Triton\n", done.stderr


def test_what_triton_tells_apart_the_signature_tells_apart():
    """Of every two values: where the signatures are the same, Triton compiles the same."""
    numbers = (0, 1, True, False, -1, 15, 16, 2**31 - 1, 2**31, 2**63, 0.0, -0.0, 1.0, 16.0, float("inf"), None)
    tensors = (X, X[1:], X[4:], X[:0], X.half(), X.half()[1:], X.bool(), X.to(torch.int8), X.view(torch.int32))
    boxes = [TensorDescriptor(x, [32], [1], [rows]) for x in (X, X[4:], X.half()) for rows in (16, 32)]
    single = (*numbers, *tensors, *boxes)
    values = [*single, *((one,) for one in single), *((1, one) for one in single), ((1, X), 1), (1, X, 1), ()]
    seen = {}
    for value in values:
        found = specialized(CUDABackend, value, False, True, True)
        assert seen.setdefault(launch.signature("kernel", dict(x=value))[0], found) == found, value
    assert len(seen) > 70


def test_memory_stays_bounded(monkeypatch):
    kernel, through, at_once = known_kernel(monkeypatch)
    monkeypatch.setattr(launch, "MOST_COMPILED", 3)
    for y in range(10):
        launch.launch(kernel, (7,), **GIVEN | dict(y=y))
        assert len(launch._compiled) <= 3
