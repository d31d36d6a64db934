"""Compiles launches without making them, for `make codegen`, its archives and the tuner.

Triton's own front end decides what a launch is compiled for, under a driver that knows only the GPU generation. So the
compiled kernel lies in Triton's cache (TRITON_CACHE_DIR) under the very key by which a later launch on a GPU looks for
it.
"""

import contextlib
import copyreg
import dataclasses
import importlib
import os
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

from ...errors import InputError, both_ends
from ...kernels.archives import settle
from ...kernels.launch import INTERPRETED, Launch
from ..child import Children, Lost

SECONDS = 25  # by default, a compilation that takes longer counts as failed; one or two are usual
triton_key()  # takes half a second; it is done here, so that processes that are forked later need not do it


@contextlib.contextmanager
def _front_end(capability: int, device: int) -> Iterator[None]:
    """Gives Triton's front end a target without a GPU, and the device whose table of kernels it uses."""
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: device,
        get_current_stream=lambda device: 0,
    )
    config = triton.runtime.driver
    before = config._active  # its own reset looks for a GPU
    config.set_active(driver)
    try:
        yield
    finally:
        config._active = before


def _is_jit_function(value: object) -> bool:
    return hasattr(type(value), "cache_key")


def _warm_up(launch: Launch):
    """Does all that `launch` in kernels/launch.py would do before the launch itself."""
    for value in (*launch.arguments.values(), launch.kernel):
        if _is_jit_function(value):
            settle(value)
    return launch.kernel.warmup(grid=launch.grid, **launch.arguments, enable_fp_fusion=True)


def compiled(launch: Launch, capability: int):
    """Triton's compiled kernel of a launch, from its cache where it is there. capability: 90 for 9.0."""
    with _front_end(capability, capability):
        return _warm_up(launch)


def key_of(launch: Launch, capability: int) -> tuple[str, str]:
    """(kernel, specialisation): launches with the same key share their machine code. Compiles nothing."""
    _go_by_name(type(launch.kernel))  # Gluon's kernels are of a kind of their own
    for value in filter(_is_jit_function, launch.arguments.values()):
        settle(value)
    # Keys replace functions, which JSON cannot hold: as JSON, Triton 3.6 hands the specialisation to the hook.
    named = {k: v.cache_key if _is_jit_function(v) else v for k, v in launch.arguments.items()}
    seen, runtime = [], triton.knobs.runtime
    before = runtime.jit_cache_hook
    runtime.jit_cache_hook = lambda **details: seen.append(str(details["key"])) or True  # True: go no further
    try:
        with _front_end(capability, -capability):  # a table of its own, in which nothing is ever compiled
            _warm_up(Launch(launch.kernel, launch.grid, named))
    finally:
        runtime.jit_cache_hook = before
    return f"{launch.kernel.fn.__module__}.{launch.kernel.__name__}", seen[0]


def _function(module: str, name: str):
    return getattr(importlib.import_module(module), name)


def _go_by_name(kind: type) -> None:
    """Has kernels and helpers of a kind pickled as names, so that launches can go to other processes."""
    copyreg.pickle(kind, lambda function: (_function, (function.fn.__module__, function.fn.__name__)))


_go_by_name(JITFunction)


def detached(launch: Launch) -> Launch:
    """The launch with tensors detached from autograd: only such can be sent to other processes."""

    def free(value):
        if type(value) is tuple:
            return tuple(map(free, value))
        if type(value).__name__ == "TensorDescriptor":  # Triton's or Gluon's
            return dataclasses.replace(value, base=value.base.detach())
        return value.detach() if isinstance(value, torch.Tensor) else value

    return dataclasses.replace(launch, arguments={name: free(value) for name, value in launch.arguments.items()})


def _compile(launch: Launch, capability: int, cache: Path | None) -> tuple[int, str]:
    """(bytes of shared memory, "" or what went wrong) of compiling a launch."""
    if cache is not None:
        triton.knobs.cache.dir = str(cache)
    try:
        return compiled(launch, capability).metadata.shared, ""
    except BaseException as error:  # whatever a compiler raises is this candidate's end, not the tuner's
        return 0, both_ends(f"{type(error).__name__}: {error}")


class Compiler:
    """Compiles ahead, each launch in a process of its own, so that one that dies does no other harm.

    `submit(launch)`, a launch on meta tensors, returns a future of (bytes of shared memory, "" or what went wrong).
    Launches that share machine code share a future.
    """

    def __init__(self, capability: int, processes: int = 0, cache: Path | None = None, seconds: float = SECONDS):
        """`processes`: how many compile at a time; unless given, one for each core but two, from 1 to 14.

        cache: the folder of Triton's cache, in place of TRITON_CACHE_DIR. seconds: what takes longer counts as failed.
        """
        if INTERPRETED:
            raise InputError("TRITON_INTERPRET is set: kernels would be interpreted, not compiled; unset it")
        self.capability, self.cache, self.seconds = capability, cache, seconds
        self.children = Children(__name__, processes or max(1, min(14, len(os.sched_getaffinity(0)) - 2)))
        self.futures: dict[tuple, Future] = {}

    def submit(self, launch: Launch) -> "Future[tuple[int, str]]":
        """Begins to compile a launch. Raises what Triton's front end raises where it refuses the launch."""
        key = key_of(launch, self.capability)
        if key not in self.futures:
            self.futures[key] = self.children.threads.submit(self.run, launch)
        return self.futures[key]

    def run(self, launch: Launch) -> tuple[int, str]:
        """Compiles a launch in a process of its own, and waits for it."""
        try:
            return self.children.run(self.seconds, _compile, detached(launch), self.capability, self.cache)
        except Lost as lost:
            return 0, f"the compiler {lost}"

    def close(self) -> None:
        """Drops the compilations that have not begun, and stops those that have."""
        self.children.close()
