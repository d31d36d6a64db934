"""Launches every kernel on the device of its tensors, or records the launches instead of making them."""

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

# Triton reads the variable when it decorates a kernel, so its value at import decides whether kernels are interpreted.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on")
bfloat16_mended = False  # whether the interpreter computes bfloat16 rightly; vitfast/tools/interpreter.py sets it


@dataclass
class Launch:
    """A recorded launch: the kernel, its grid and every keyword argument, constexprs and num_warps too."""

    kernel: object
    grid: tuple
    arguments: dict


_recorder: list[Launch] | None = None
_launches = 0


def launches_made() -> int:
    """How many launches this process has made, to check that a kernel really ran."""
    return _launches


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own is made for kernels, and takes 2 us of a launcher's time."""
    return -(-a // b)


def watched() -> bool:
    """Whether launches are recorded or hooked, or kernels are compiled for debugging or instrumentation.

    Proton hooks launches and instruments kernels; knobs.runtime.debug compiles them for debugging.
    """
    from triton import knobs

    at = knobs.runtime
    hooks = at.launch_enter_hook, at.launch_exit_hook, at.add_stages_inspection_hook
    changed = _recorder is not None or at.debug or knobs.compilation.instrumentation_mode
    return bool(changed) or any(getattr(hook, "calls", hook) for hook in hooks)


def on(device: torch.device) -> contextlib.AbstractContextManager:
    """A context in which `device`, if it is a GPU, is the current one, on which Triton launches."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


class _Taping(threading.local):
    tape = None


_taping = _Taping()


@contextlib.contextmanager
def taped(tape) -> Iterator[None]:
    """Calls `tape.launched` after every launch that this thread makes inside; None: calls nothing."""
    outer, _taping.tape = _taping.tape, tape
    try:
        yield
    finally:
        _taping.tape = outer


def no_plan(reason: str) -> None:
    """Notes on the tape, if there is one, why no plan can repeat what the operation does."""
    if _taping.tape is not None:
        _taping.tape.reason = reason


def count(launches: int) -> None:
    """Adds launches that were made elsewhere, as by a plan, to those of `launches_made`."""
    global _launches
    _launches += launches


def _tensor_of(values: Iterable[object]) -> Tensor:
    """The first tensor in a launch's arguments, their descriptors and tuples; None if there is none."""
    for value in values:
        if isinstance(value, Tensor):
            return value
        if type(value).__name__ == "TensorDescriptor":
            return value.base
        if type(value) is tuple and (inner := _tensor_of(value)) is not None:
            return inner
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
    with _disable_current_modes() if INTERPRETED else contextlib.nullcontext():  # no mode sees the interpreter's copies
        compiled = kernel[grid](**arguments) if INTERPRETED else _compiled(kernel, grid, arguments)
    if _taping.tape is not None:
        _taping.tape.launched(Launch(kernel, grid, arguments), compiled)


def _compiled(kernel, grid: tuple[int, ...], arguments: dict):
    """Launches a kernel on a GPU; returns the compiled kernel, as Triton does."""
    from . import archives  # it needs Triton

    for function in (kernel, *arguments.values()):
        if hasattr(type(function), "cache_key"):
            archives.settle(function)
    device = _tensor_of(arguments.values()).device
    archives.add_named(device.index)
    try:
        with on(device):
            return kernel[grid](**arguments)
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        building = not isinstance(error, RuntimeError) or "C compiler" in str(error)
        missing = archives.missing_for_launchers() if building else None
        if missing is None:
            raise
        raise RuntimeError(f"Triton cannot build what launches kernels: {missing}") from error


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collects the launches inside instead of making them; meta tensors give those of a GPU."""
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
