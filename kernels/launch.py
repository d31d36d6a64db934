"""Launches every kernel, on the device of its tensors; tools record launches instead of making them.

As the lowest file of all it also holds what launchers ask: the GPU's generation, and the mode in which batches must
leave a sample's bits alone.
"""

import contextlib
import ctypes
import functools
import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import torch
from torch import Tensor

# Triton reads the variable when it decorates a kernel, so its value at import decides whether kernels are interpreted.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on")
bfloat16_mended = False  # whether the interpreter computes bfloat16 rightly; vitfast/tools/interpreter.py sets it


# ---- GPU generations: those with configurations of their own (tiles.py), and what another GPU takes

GENERATIONS = (80, 89, 90, 100, 120)
# Other GPUs -> the generation whose tiles they take: of those with instructions and shared memory that they have too.
# sm_86 has no more shared memory than sm_89, and less than sm_80.
TABLE_OF = {86: 89, 87: 80, 103: 100, 121: 120}
assumed_generation: int | None = None  # the generation that tiles.using(sm=...) assumes whatever the device


def capability(device: torch.device | int) -> int:
    """The compute capability that Triton compiles for, as 90 for 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def table_of(exact: int) -> int:
    """The generation whose tiles a GPU of this compute capability takes; 0 if it is older than all."""
    return TABLE_OF.get(exact) or max((sm for sm in GENERATIONS if sm <= exact), default=0)


@functools.cache
def _generation(index: int) -> int:
    return table_of(capability(index))


def generation(device: torch.device) -> int:
    """The one of GENERATIONS whose tiles the device takes, 0 if it is older; without a GPU it is 90."""
    if assumed_generation is not None:
        return assumed_generation
    if device.type != "cuda":
        return 90
    return _generation(torch.cuda.current_device() if device.index is None else device.index)


# ---- launches


@dataclass
class Launch:
    """A recorded launch: the kernel, its grid and every keyword argument, constexprs and num_warps too."""

    kernel: object
    grid: tuple
    arguments: dict


_recorder: list[Launch] | None = None
_made = 0


def launches_made() -> int:
    """How many launches this process has made, to check that a kernel really ran."""
    return _made


def _called(code: CodeType, names: dict) -> Iterator[object]:
    """The kernels and helpers that a function's code names, comprehensions included."""
    for name in code.co_names:
        if hasattr(type(names.get(name)), "cache_key"):  # asking the object itself would compute the key
            yield names[name]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _called(constant, names)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own is made for kernels, and takes 2 us of a launcher's time."""
    return -(-a // b)


def settle(kernel) -> None:
    """Has Triton hash the functions that a kernel calls, recursively, before it hashes the kernel itself.

    Triton 3.6 takes the global values of a called function into the caller's hash only where that function was hashed
    before. Without this, a kernel's name in Triton's cache would depend on what else the process has run, and a kernel
    compiled ahead would not be found.
    """
    if kernel.hash is None:
        for function in _called(kernel.fn.__code__, kernel.fn.__globals__):
            if function is not kernel:
                settle(function)
        kernel.cache_key  # noqa: B018


def missing_for_launchers() -> str | None:
    """Why Triton cannot build its launchers, which are C, and what to install; None where it can."""
    import triton

    if triton.knobs.build.impl is not None:  # the user builds launchers in another way
        return None
    named = os.environ.get("CC")
    if named is not None and not shutil.which(named):
        return f"CC is {named!r}, which is not a program"
    if named is None and not (shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler; install gcc (on Debian: apt install gcc), or name one in CC"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton does, for Debian
    folder = sysconfig.get_paths(scheme=scheme)["include"]
    if Path(folder, "Python.h").is_file():
        return None
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    return f"there is no Python.h in {folder}; install Python's headers (on Debian: apt install {package})"


_archives_lock = threading.Lock()
# The GPUs, and the folder of Triton's cache, for which the archives that VITFAST_KERNELS_CACHE names were looked at.
_archives_seen: set[tuple[int, str]] = set()


def _add_archives(device: int) -> None:
    """Adds kernels that were compiled ahead to Triton's cache, before the first launch on a GPU.

    It does so again where the cache has moved: Inductor moves it in mid-process, unless TRITON_CACHE_DIR is set.
    """
    named = os.environ.get("VITFAST_KERNELS_CACHE")
    if not named:
        return
    from triton import knobs

    seen = device, knobs.cache.dir
    with _archives_lock:
        if seen not in _archives_seen:
            _archives_seen.add(seen)
            importlib.import_module(".archives", __package__).install_named(Path(named), device)


def watched() -> bool:
    """Whether somebody records or hooks launches, or has kernels compiled in another way for now.

    Proton does both, and knobs.runtime.debug the latter.
    """
    from triton import knobs

    at = knobs.runtime
    hooks = at.launch_enter_hook, at.launch_exit_hook, at.add_stages_inspection_hook
    changed = _recorder is not None or at.debug or knobs.compilation.instrumentation_mode
    return bool(changed) or any(getattr(hook, "calls", hook) for hook in hooks)


def on(device: torch.device) -> contextlib.AbstractContextManager:
    """Makes a GPU the current one, on which Triton launches, where it is not."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def stream(device: torch.device):
    """The current stream, as Triton takes it; None in its interpreter."""
    if INTERPRETED:
        return None
    from triton.runtime import driver

    return driver.active.get_current_stream(device.index)


class _Taping(threading.local):
    tape = None


_taping = _Taping()


@contextlib.contextmanager
def taped(tape) -> Iterator[None]:
    """Tells `tape` of every launch that this thread makes inside; None stands for nobody."""
    outer, _taping.tape = _taping.tape, tape
    try:
        yield
    finally:
        _taping.tape = outer


def no_plan(reason: str) -> None:
    """Tells the tape, if there is one, why it does not hear of all that happens."""
    if _taping.tape is not None:
        _taping.tape.reason = reason


def count(launches: int) -> None:
    """Adds to `launches_made`."""
    global _made
    _made += launches


def _tensor_of(values: Iterable[object]) -> Tensor:
    """One of the tensors in a launch's arguments."""
    for value in values:
        if isinstance(value, Tensor):
            return value
        if type(value).__name__ == "TensorDescriptor":
            return value.base
        if type(value) is tuple and (found := _tensor_of(value)) is not None:
            return found
    return None


def launch(kernel, grid: tuple[int, ...], **arguments) -> None:
    """`kernel[grid](**arguments)` on the device of its tensors; nothing for an empty grid."""
    if _recorder is not None:
        no_plan("its launches are recorded")
        _recorder.append(Launch(kernel, grid, arguments))
        return
    if 0 in grid:
        return
    count(1)
    arguments["enable_fp_fusion"] = True  # by default Triton 3.10 rounds twice in a * b + c
    compiled = kernel[grid](**arguments) if INTERPRETED else _compiled(kernel, grid, arguments)
    if _taping.tape is not None:
        _taping.tape.launched(Launch(kernel, grid, arguments), compiled)


def _compiled(kernel, grid: tuple[int, ...], arguments: dict):
    """Launches a kernel; returns what Triton compiled."""
    for function in (kernel, *arguments.values()):
        if hasattr(type(function), "cache_key"):
            settle(function)
    device = _tensor_of(arguments.values()).device
    _add_archives(device.index)
    try:
        with on(device):
            return kernel[grid](**arguments)
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        building = not isinstance(error, RuntimeError) or "C compiler" in str(error)
        missing = missing_for_launchers() if building else None
        if missing is None:
            raise
        raise RuntimeError(f"Triton cannot build what launches kernels: {missing}") from error


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collects the launches inside instead of making them; on meta tensors, those a GPU would get."""
    global _recorder
    before, _recorder = _recorder, []
    try:
        yield _recorder
    finally:
        _recorder = before


def record(run: Callable[[], object]) -> list[Launch]:
    """The launches that `run()` makes."""
    with recording() as launches:
        run()
    return launches


def fp32_precision() -> str:
    """The input precision of `tl.dot` for fp32 operands: that of torch's own products on CUDA.

    torch.get_float32_matmul_precision() would raise where torch.backends.fp32_precision was set.
    """
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


class _Value:
    """The value of one thread; None stands for that of the environment."""

    value = None


class ThreadMode:
    """A mode that belongs to one thread; other threads begin with `start`, the value of the environment.

    key: a name under which PyTorch hands the value on to the threads of autograd.
    """

    def __init__(self, key: str, start):
        self.key, self.start, self._thread = key, start, threading.local()

    def set(self, value) -> None:
        """Sets this thread's value; None takes that of the environment."""
        if not hasattr(self._thread, "held"):
            self._thread.held = _Value()
        held = self._thread.held
        held.value = value
        if not torch.compiler.is_compiling() and not torch._C._is_key_in_tls(self.key):
            references = sys.getrefcount(held)
            torch._C._stash_obj_in_tls(self.key, held)
            # When the thread ends, torch 2.11 releases a reference that it never took; this adds the missing one.
            if sys.getrefcount(held) == references:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))

    def own(self):
        """The value that this thread set, None where it set none."""
        return self._thread.held.value if hasattr(self._thread, "held") else None

    def current(self):
        """The value in force in this thread; in a thread of autograd, that of the backward() call."""
        value = self.own()
        if value is None and not torch.compiler.is_compiling() and torch._C._is_key_in_tls(self.key):
            value = torch._C._get_obj_in_tls(self.key).value
        return self.start if value is None else value


# Set by ops.batch_invariance, which documents it and reads the environment; launchers and models read it.
BATCH_INVARIANT = ThreadMode("vitfast.batch_invariant", False)


def batch_invariant() -> bool:
    """Whether bits of a sample must not depend on its batch; compiled code never runs in that mode."""
    return not torch.compiler.is_compiling() and BATCH_INVARIANT.current()
