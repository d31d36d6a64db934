"""Kernels or plain PyTorch: the mode of a thread, and of the code inside a `with`."""

import ctypes
import os
import sys
import threading
import weakref
from contextvars import ContextVar
from typing import NamedTuple, Optional

import torch

from ..errors import InputError

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
