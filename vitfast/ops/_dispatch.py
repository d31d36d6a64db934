"""The choice of an implementation: the mode of a thread, what kernels cover, what autocast casts."""

import contextlib
import ctypes
import functools
import inspect
import os
import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ..errors import InputError
from ..kernels import launch
from ..kernels.launch import INTERPRETED
from . import reference as ref

try:
    import triton  # noqa: F401
except ImportError as error:  # as on macOS and Windows: the operations are plain PyTorch there
    NO_TRITON = f"triton cannot be imported ({error})"
else:
    from ..kernels.configs import tiles

    NO_TRITON = None

MODES = ("auto", "on", "off")
_START = os.environ.get("VITFAST_KERNELS") or "auto"


class _Level(NamedTuple):
    """A thread outside of all `with`, or the code inside of one: its mode, and the call that set it.

    owner: of the `with`. call: a weak reference, as an object that nobody has any more cannot be entered.
    """

    owner: Optional["use_kernels"] = None
    mode: str | None = None
    call: weakref.ref | None = None

    def without(self, call: "use_kernels") -> "_Level":
        """As if this call had not been made; later ones count on."""
        last = self.call and self.call()
        if last is call:
            return self._replace(mode=call._before, call=call._previous)
        while last is not None:
            previous = last._previous and last._previous()
            if previous is call:
                last._before, last._previous = call._before, call._previous
            last = previous
        return self


_inside: ContextVar[tuple[_Level, ...]] = ContextVar("vitfast.use_kernels", default=())
# Of each thread: `outside`, its level outside of `with`, and `latest`, the mode that any call, entry or exit left last.
# Compiled code reads and writes `latest`: Dynamo of torch 2.11 knows threads, but no context variables.
_thread = threading.local()
_KEY = "vitfast.use_kernels"  # of [`latest`] where PyTorch hands it on to the threads of autograd


def _checked(mode: str) -> str:
    if mode not in MODES:
        raise ValueError(f"use_kernels: mode must be one of {', '.join(MODES)}, got {mode!r}")
    return mode


def _outside() -> _Level:
    return getattr(_thread, "outside", None) or _Level()


def _settle(inside: tuple[_Level, ...], outside: _Level) -> None:
    """Sets this context and this thread."""
    _inside.set(inside)
    _thread.outside, _thread.latest = outside, (*inside[-1:], outside)[0].mode
    if not hasattr(_thread, "handed"):
        _thread.handed = []
    handed = _thread.handed
    handed[:] = [_thread.latest]
    if not torch._C._is_key_in_tls(_KEY):
        references = sys.getrefcount(handed)
        torch._C._stash_obj_in_tls(_KEY, handed)
        if sys.getrefcount(handed) == references:  # torch 2.11 gives back, at the thread's end, what it never took
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(handed))


def _of_thread() -> str | None:
    """The mode of this thread outside of `with`; in one of autograd's, that of the backward() call."""
    if torch._C._is_key_in_tls(_KEY):
        handed = torch._C._get_obj_in_tls(_KEY)
        if handed is not getattr(_thread, "handed", None):
            return handed[0]
    return _outside().mode


def current_mode() -> str:
    """The mode in force here; InputError where VITFAST_KERNELS has none."""
    if torch.compiler.is_compiling():
        mode = getattr(_thread, "latest", None)
    else:
        inside = _inside.get()
        mode = inside[-1].mode if inside else _of_thread()
    mode = mode or _START
    if mode not in MODES:
        raise InputError(f"VITFAST_KERNELS: must be one of {', '.join(MODES)}, got {mode!r} in the environment")
    return mode


class use_kernels:
    """Chooses between the kernels and plain PyTorch, as a context manager or a setter.

    "auto" (default): kernels where they can run, plain PyTorch elsewhere. "on": kernels, or an error that says why not.
    "off": plain PyTorch.

    `with use_kernels(mode):` holds inside, in this thread and this task of asyncio alone. `use_kernels(mode)` without
    `with` holds in this thread until the next such call, or until the `with` around it ends. Other threads begin with
    the environment variable VITFAST_KERNELS, "auto" where it is not set. Backward is that of the forward that ran,
    whatever the mode and the thread by then; where it runs forward code again (activation checkpointing), that has the
    mode of the thread that calls backward(). Compiled code has the latest mode of its thread, without regard to tasks.
    """

    def __init__(self, mode: str):
        self.mode, self._entered = _checked(mode), False
        self._found = None  # by compiled code: the thread before
        if torch.compiler.is_compiling():
            self._found = getattr(_thread, "outside", None), getattr(_thread, "latest", None)
            _thread.outside, _thread.latest = _Level(None, mode), mode
            return
        inside, outside = _inside.get(), _outside()
        level = inside[-1] if inside else outside
        self._before, self._previous = level.mode, level.call
        level = level._replace(mode=mode, call=weakref.ref(self))
        _settle((*inside[:-1], level), outside) if inside else _settle((), level)

    def _undo_call(self) -> None:
        """Undoes the call without `with`."""
        if self._found is not None:
            _settle(_inside.get(), self._found[0] or _Level())
            self._found = None
        else:
            _settle(tuple(level.without(self) for level in _inside.get()), _outside().without(self))

    def __enter__(self):
        if torch.compiler.is_compiling():
            if self._entered:
                self._found = getattr(_thread, "outside", None), getattr(_thread, "latest", None)
            elif self._found is None:  # called before it was compiled
                self._found = _Level(None, self._before), self._before
            _thread.latest = self.mode
            return self
        self._undo_call()  # it was no plain call
        self._entered = True
        _settle((*_inside.get(), _Level(self, self.mode)), _outside())
        return self

    def __exit__(self, *_):
        if torch.compiler.is_compiling():
            _thread.outside, _thread.latest = self._found
            return
        if not self._entered:  # in compiled code it was
            self._undo_call()
            return
        # Generators may leave their blocks in another order than they entered them.
        inside = list(_inside.get())
        owners = [level.owner for level in inside]
        if self in owners:
            del inside[len(owners) - 1 - owners[::-1].index(self)]
        _settle(tuple(inside), _outside())


# Never cast: factors and LayerNorm's parameters act in fp32, whatever the products run in.
_KEPT = frozenset({"layer_scale", "drop_path", "norm_weight", "norm_bias", "inner_norm_weight", "inner_norm_bias"})

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_warned: set[tuple[str, str]] = set()


@torch.compiler.assume_constant_result  # Dynamo would trace through the cache behind it: 2.14 warns, 2.11 cannot
def _too_old(device: torch.device) -> bool:
    """Whether a GPU is older than any that there are kernels for."""
    return tiles.generation(device) == 0


def _unsupported_reason(x: Tensor, unsupported: str | None) -> str | None:
    """Why no kernel can run on x, None where one can."""
    if NO_TRITON is not None:
        return NO_TRITON
    if x.device.type == "cuda":
        if _too_old(x.device):
            return "the GPU is older than compute capability 8.0"
    elif x.device.type != "cpu" or not INTERPRETED:
        return f"tensors on {x.device.type} need TRITON_INTERPRET=1 before vitfast is imported"
    elif x.dtype == torch.bfloat16 and not launch.bfloat16_mended:
        return "Triton's interpreter computes bfloat16 wrongly (vitfast.tools.interpreter.mend_bfloat16() mends it)"
    if x.dtype not in KERNEL_DTYPES:
        return f"no kernel computes in {x.dtype}"
    if ref.transformed():
        return "no kernel runs under torch.func's transforms or forward-mode differentiation"
    return unsupported


_counter: Counter | None = None


@contextlib.contextmanager
def counting() -> Iterator[Counter]:
    """Counts the operations that are called inside, by name, whatever does them."""
    global _counter
    before, _counter = _counter, Counter()
    try:
        yield _counter
    finally:
        _counter = before


def kernels_wanted(op: str, x: Tensor, unsupported: str | None = None) -> bool:
    """Whether the kernel of `op` is to run on x.

    unsupported: why no kernel covers the other arguments, if so. A CUDA case that no kernel covers runs plain PyTorch
    with one warning; in mode "on" it raises RuntimeError, as CPU tensors do outside the interpreter. Export
    (torch.export, ONNX) always traces plain PyTorch.
    """
    if _counter is not None:
        _counter[op] += 1
    # torch 2.11's Dynamo takes is_exporting() for true while it compiles; the flag behind it is right in every version.
    mode = current_mode()
    if mode == "off" or (mode == "auto" and x.device.type != "cuda") or torch.compiler._is_exporting_flag:
        return False
    reason = _unsupported_reason(x, unsupported)
    if reason is None:
        return True
    if mode == "on":
        raise RuntimeError(f"{op}: kernels are switched on, but {reason}; use_kernels('auto') runs plain PyTorch there")
    if not torch.compiler.is_compiling() and (op, reason) not in _warned:
        _warned.add((op, reason))
        warnings.warn(f"vitfast {op}: {reason}; plain PyTorch runs in its place", stacklevel=4)
    return False


def reason_for_plain(weight: Tensor) -> str | None:
    """Why operations with a weight like this run plain PyTorch now; None where they run kernels."""
    mode = current_mode()
    if mode == "off":
        return "use_kernels('off')"
    if mode == "auto" and weight.device.type != "cuda":
        return f"the weights are on {weight.device.type}"
    return _unsupported_reason(weight, None)


def needs_grad(*tensors: Tensor | None) -> bool:
    """True when backward may be asked for any of these: what it needs must be kept."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def autocasts(function=None, *, keep: tuple[str, ...] = ()):
    """Runs `function` outside autocast, on arguments cast to its dtype but for those in `keep`."""
    if function is None:
        return functools.partial(autocasts, keep=keep)
    names, kept = tuple(inspect.signature(function).parameters), _KEPT.union(keep)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        device = next((a.device.type for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), "meta")
        if device == "meta" or not torch.is_autocast_enabled(device):  # which raises for meta
            return function(*args, **kwargs)
        dtype = torch.get_autocast_dtype(device)
        stream = names[0] if kwargs.get("residual_in_fp32", False) else None

        def cast(name, a):
            floating = isinstance(a, Tensor) and a.is_floating_point()
            return a.to(dtype) if floating and name not in kept and name != stream else a

        with torch.autocast(device, enabled=False):
            # Too many arguments are for the function to refuse.
            given = [cast(names[i] if i < len(names) else "", a) for i, a in enumerate(args)]
            return function(*given, **{name: cast(name, a) for name, a in kwargs.items()})

    return wrapper
