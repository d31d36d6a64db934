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


_NUMBERS = frozenset({int, bool, float, str, type(None)})


def signature(kernel, arguments: dict) -> tuple[tuple, torch.device]:
    """All that Triton compiles a kernel for, by its arguments; and the device of its tensors."""
    found = [kernel, *arguments]
    device = _describe(arguments.values(), found)
    return tuple(found), device


def _describe(values: Iterable[object], found: list) -> torch.device | None:
    """Adds to `found` what Triton sees of these values; returns the device of one of the tensors.

    It is the dtype of a tensor and whether it begins at a multiple of 16 bytes; of a descriptor its dtype and block;
    and every other value, of which Triton itself tells fewer apart. Functions for the kernel to call are settled.
    """
    device = None
    for value in values:
        kind = type(value)
        if kind in _NUMBERS:
            found += kind, value
        elif isinstance(value, Tensor):
            device = value.device
            found += value.dtype, value.data_ptr() % 16 == 0
        elif isinstance(value, tuple):
            found += kind, len(value)
            device = _describe(value, found) or device
        elif kind.__name__ == "TensorDescriptor":
            device = value.base.device
            found += value.base.dtype, value.padding, *value.block_shape
        else:
            if hasattr(kind, "cache_key"):
                settle(value)
            found += kind, value
    return device


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


# (GPU, signature) -> the kernel, compiled; emptied when it has MOST_COMPILED, as the sizes of packed samples change at
# every step.
_compiled: dict[tuple, object] = {}
MOST_COMPILED = 4096
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


def _watched(kernel) -> bool:
    """Whether somebody hooks launches, or has kernels compiled in another way for now.

    Proton does both, and knobs.runtime.debug the latter.
    """
    from triton import knobs

    at = knobs.runtime
    hooks = at.launch_enter_hook, at.launch_exit_hook, at.add_stages_inspection_hook, kernel.pre_run_hooks
    changed = at.debug or knobs.compilation.instrumentation_mode
    return bool(changed) or any(getattr(hook, "calls", hook) for hook in hooks)


def _run(kernel, grid: tuple[int, ...], arguments: dict, key: tuple) -> None:
    """`kernel[grid](**arguments)` on the current device, the first of `key`.

    Triton asks for every argument's type, for its options and for the kernel's globals at each launch. A kernel that
    has run with the same `key` before is launched without that, unless it is `_watched`.
    """
    from triton.runtime import driver

    watched = _watched(kernel)
    compiled = None if watched else _compiled.get(key)
    if compiled is None:
        _add_archives(key[0])
        compiled = kernel[grid](**arguments)
        if len(_compiled) >= MOST_COMPILED:
            _compiled.clear()
        if not watched and arguments.keys() >= set(kernel.arg_names):
            _compiled[key] = compiled
        return
    where = *(*grid, 1, 1)[:3], driver.active.get_current_stream(key[0])
    known = compiled.function, compiled.packed_metadata, None, None, None
    compiled.run(*where, *known, *[arguments[name] for name in kernel.arg_names])


def launch(kernel, grid: tuple[int, ...], **arguments) -> None:
    """`kernel[grid](**arguments)` on the device of its tensors; nothing for an empty grid."""
    global _made
    if _recorder is not None:
        _recorder.append(Launch(kernel, grid, arguments))
        return
    if 0 in grid:
        return
    _made += 1
    arguments["enable_fp_fusion"] = True  # by default Triton 3.10 rounds twice in a * b + c
    if INTERPRETED:
        return kernel[grid](**arguments)
    settle(kernel)  # first, because the hash of the key asks for the kernel's
    key, device = signature(kernel, arguments)
    key = device.index, key
    try:
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                _run(kernel, grid, arguments, key)
        else:
            _run(kernel, grid, arguments, key)
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
