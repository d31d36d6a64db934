"""What launches kernels: what Triton lacks to build it is said, and functions are hashed in one order."""

import subprocess
import sysconfig

import pytest
import torch
from triton.runtime import build

from vitfast.kernels import archives, launch

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
    said = archives.missing_for_launchers()
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
    monkeypatch.setattr(archives, "settle", lambda kernel: None)
    with pytest.raises(type(failure), match=says):
        launch.launch(Kernel(), (1,), x=torch.empty(1))


def test_a_kernel_and_functions_that_it_is_given_are_settled_before_triton_hashes_them(monkeypatch):
    """Triton hashes a function by its source, and version 3.6 by what was hashed before it."""
    calls = []

    class Function:
        cache_key = "that of its source"

    class Kernel(Function):
        def __getitem__(self, grid):
            return lambda **arguments: calls.append("launched")

    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(archives, "settle", lambda function: calls.append(type(function).__name__))
    launch.launch(Kernel(), (7,), x=torch.zeros(1), y=Function())
    assert calls == ["Kernel", "Function", "launched"]
