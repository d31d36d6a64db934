"""Looks up an operation's launch configuration, by GPU generation and batch invariance.

Beside the kernels of each family stands a function for each operation: (shape class, "16" or "32" bits, GPU generation)
-> configurations. The best is the first, as measured or, where nothing has been timed yet, as compiled offline (no
spills, shared memory within the limit). The others are for calls that the first cannot do, and for `vitfast tune`,
which times all of them: what it writes into the table of a user (user_table.py) comes before the order of the code.
"""

import contextlib
import ctypes
import functools
import importlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from . import user_table

# Providers whose kernels add up a row (or a query) in an order that depends neither on the row's place in the batch nor
# on the other sizes.
INVARIANT = ("triton", "tiled")


GENERATIONS = (80, 89, 90, 100, 120)  # of GPUs, with configurations of their own
# Other GPUs -> the generation whose tiles they take: one that needs no instructions or shared memory that they lack.
# sm_86 has no more shared memory than sm_89, and less than sm_80.
TABLE_OF = {86: 89, 87: 80, 103: 100, 121: 120}
_assumed_generation: int | None = None  # the generation that `using(sm=...)` assumes whatever the device


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
    """The one of GENERATIONS whose tiles a device takes: 0 for an older GPU, 90 for the CPU."""
    if _assumed_generation is not None:
        return _assumed_generation
    if device.type != "cuda":
        return 90
    return _generation(torch.cuda.current_device() if device.index is None else device.index)


class _Value:
    value = None  # stands for the value of the environment


class ThreadMode:
    """A mode that each thread sets for itself; it begins as `start`, the value of the environment.

    key: the name under which PyTorch hands the value on to the threads of autograd.
    """

    def __init__(self, key: str, start):
        self.key, self.start, self._thread = key, start, threading.local()

    def set(self, value) -> None:
        """Sets this thread's value; None restores that of the environment."""
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

    def set_here(self):
        """The value that this thread has set; None if it has set none."""
        return self._thread.held.value if hasattr(self._thread, "held") else None

    def current(self):
        """The value in force in this thread; in a thread of autograd, that of whoever called backward()."""
        value = self.set_here()
        if value is None and not torch.compiler.is_compiling() and torch._C._is_key_in_tls(self.key):
            value = torch._C._get_obj_in_tls(self.key).value
        return self.start if value is None else value


# Set by ops.batch_invariance, which documents it and reads the environment; launchers and models read it.
BATCH_INVARIANT = ThreadMode("vitfast.batch_invariant", False)


def batch_invariant() -> bool:
    """Whether a sample's bits must not depend on its batch; False while torch.compile traces."""
    return not torch.compiler.is_compiling() and BATCH_INVARIANT.current()


@dataclass(frozen=True)
class KernelConfig:
    """One launch configuration: a provider and its numbers; `blocks` are the kernel's own constexprs.

    The provider is a kernel of ours, "cublas", which leaves a matrix product to torch, or "cublaslt".
    maxnreg: registers that a thread may have, so that more programs fit a multiprocessor (with 4 warps each, 168 for
    three programs and 128 for four); 0 leaves it to the compiler.
    """

    num_warps: int = 4
    num_stages: int = 2
    provider: str = "triton"
    blocks: tuple[tuple[str, int], ...] = ()
    maxnreg: int = 0

    @functools.cached_property
    def meta(self) -> dict:
        """The launch's keyword arguments, as one dict for all launches, which no caller may change."""
        limit = {"maxnreg": self.maxnreg} if self.maxnreg else {}
        return {**dict(self.blocks), "num_warps": self.num_warps, "num_stages": self.num_stages, **limit}

    def __getitem__(self, name: str) -> int:
        return self.meta[name]


def config(
    num_warps: int = 4, num_stages: int = 2, provider: str = "triton", maxnreg: int = 0, **blocks: int
) -> KernelConfig:
    """Makes a KernelConfig from keywords: `config(8, 3, BLOCK_M=128, BLOCK_N=128)`."""
    return KernelConfig(num_warps, num_stages, provider, tuple(sorted(blocks.items())), maxnreg)


def first(*branches: tuple) -> object:
    """The value of the first branch (condition, value) whose condition holds."""
    return next(value for holds, value in branches if holds)


_FILES = "attention.configs layer_norm matmul.few_rows matmul.gated matmul.linear matmul.mlp matmul.scaled".split()
_FILES += ["patch_embed.configs"]
Candidates = Callable[[str, str, int], list[KernelConfig]]  # (shape class, bits, generation) -> configurations
_operations: dict[str, Candidates] = {}  # those of the families that are imported


def configures(operation: str) -> Callable[[Candidates], Candidates]:
    """Decorates the function that lists an operation's configurations."""

    def register(candidates: Candidates) -> Candidates:
        _operations[operation] = candidates
        return candidates

    return register


def operations() -> dict[str, Candidates]:
    """Operation -> the function that lists its configurations, of all families."""
    for file in _FILES:
        importlib.import_module(f".{file}", __package__)
    return _operations


# What `using` has set: configurations by (operation, shape class or None); and the dicts that open calls yielded.
_overrides: dict[tuple[str, str | None], KernelConfig] = {}
_watching: list[dict] = []
# Numbers that change where lookups may: one with each reading of the user's table, one with each `using`.
state = 0, 0
_numbers = itertools.count(1)


@contextlib.contextmanager
def using(
    op: str = "", config: KernelConfig | None = None, shape: str | None = None, *, sm: int | None = None
) -> Iterator[dict[tuple[str, str, str], KernelConfig]]:
    """Changes lookups inside; yields a dict of what they return, by (operation, bits, shape class).

    op, config: the launches of `op` take this configuration, or those of one shape class where `shape` is given. sm:
    lookups are for this compute capability whatever the device, as in offline compilation. Without both, none changes.
    """
    global _overrides, _assumed_generation, state
    if op and op not in operations():
        raise ValueError(f"tiles.using: no operation {op!r}")
    outer, taken = (_overrides, _assumed_generation, state[1]), {}
    _overrides = _overrides | ({(op, shape): config} if op else {})
    _assumed_generation = _assumed_generation if sm is None else table_of(sm)
    state = state[0], next(_numbers)
    _watching.append(taken)
    try:
        yield taken
    finally:
        _watching.pop()
        _overrides, _assumed_generation, number = outer
        state = state[0], number


def _case(op: str, x: torch.Tensor, shape: str) -> tuple[str, str, str, int]:
    """(operation, shape class, bits, generation) for x: the arguments of `_configs`."""
    return op, shape, "32" if x.dtype == torch.float32 else "16", generation(x.device)


@functools.cache  # since a launcher asks at every call
def _configs(op: str, shape: str, bits: str, sm: int) -> tuple[KernelConfig, ...]:
    if sm not in GENERATIONS:
        raise KeyError(f"no configuration of {op} for a GPU older than sm_{GENERATIONS[0]}")
    return tuple(dict.fromkeys(_operations[op](shape, bits, sm)))


def _of_user(x: torch.Tensor, *case) -> KernelConfig | None:
    """The configuration in the user's own table, or None if it has none that this version can launch."""
    rows = user_table.read(x.device.index, from_record) if x.is_cuda and _assumed_generation is None else {}
    row = rows.get(case[:3])
    return row if row and user_table.fits(row, case, _configs(*case)) else None


def forget_user_table() -> None:
    """Makes the next lookup read the user's own table again."""
    global state
    user_table.read.cache_clear()
    state = next(_numbers), state[1]


def lookup(op: str, x: torch.Tensor, shape: str, without: tuple[str, ...] = ()) -> KernelConfig:
    """The configuration of `op` for x's device and dtype at a shape class such as "d64" or "768x3072".

    With ops.batch_invariant(True), a forward operation takes that of an INVARIANT kernel, whatever the user's table and
    `using` say. without: providers that lack something this call needs beyond its shape class, as cublaslt lacks a
    layer scale. They are skipped even where one is the override, because one override may cover calls that need the
    missing feature and calls that do not; what `using` yields tells which ran.
    """
    case = _case(op, x, shape)
    if op.endswith("_fwd") and batch_invariant():
        chosen = shipped(op, x, shape, INVARIANT)
    else:
        chosen = _overrides.get((op, shape)) or _overrides.get((op, None)) or _of_user(x, *case)
        if chosen is None or chosen.provider in without:
            chosen = next(config for config in _configs(*case) if config.provider not in without)
    for taken in _watching:
        taken[op, case[2], shape] = chosen
    return chosen


def shipped(op: str, x: torch.Tensor, shape: str, providers: tuple[str, ...] = ()) -> KernelConfig:
    """The best configuration in the code, by one of `providers` if any, whatever the user's table says."""
    configs = _configs(*_case(op, x, shape))
    return next(config for config in configs if not providers or config.provider in providers)


def candidates(op: str, x: torch.Tensor, shape: str) -> list[KernelConfig]:
    """The configurations in the code for a case, without the one that `lookup` returns now."""
    now = lookup(op, x, shape)
    return [config for config in _configs(*_case(op, x, shape)) if config != now]


def from_record(record: dict) -> KernelConfig:
    """The KernelConfig that an entry of the user's table describes."""
    numbers = (record[name] for name in ("num_warps", "num_stages", "provider"))
    return config(*numbers, record.get("maxnreg", 0), **record["blocks"])
