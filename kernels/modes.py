"""Modes of a thread: which implementation runs (ops.use_kernels), and whether batches leave its bits alone."""

import ctypes
import sys
import threading

import torch


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
    """Whether the bits of a sample must not depend on the rest of its batch; compiled code is never asked to."""
    return not torch.compiler.is_compiling() and BATCH_INVARIANT.current()
