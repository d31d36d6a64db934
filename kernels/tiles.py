"""Looks up the launch configuration of an operation.

Beside the kernels of each family lies a file configs.py with a function for each operation: (shape class, "16" or "32"
bits, GPU generation) -> configurations. The best is the first, as measured or, where nothing has been timed yet, as
compiled offline (no spills, shared memory within the limit). The others are for calls that the first cannot do, and for
whoever looks for a faster one: `vitfast tune`, whose table of a user's own ($VITFAST_TILES, or
~/.cache/vitfast/tiles.json) comes before all.
"""

import contextlib
import functools
import importlib
import itertools
import json
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from . import launch
from .launch import batch_invariant

# Kernels of ours in which a row, or a query, sums in one order wherever it lies, whatever the sizes beside it.
INVARIANT = ("triton", "tiled")


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
        """Keyword arguments for the launch; not to be changed."""
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


@functools.cache
def operations() -> dict[str, Callable[[str, str, int], list[KernelConfig]]]:
    """Operation -> its function."""
    families = ("attention", "layer_norm", "matmul", "patch_embed")
    files = (importlib.import_module(f".{family}.configs", __package__) for family in families)
    return {name: function for file in files for name, function in file.OPERATIONS.items()}


# What `using` has set: configurations by operation, and shape class or None; and what the open ones yield.
_overrides: dict[tuple[str, str | None], KernelConfig] = {}
_watching: list[dict] = []
# The number of the user's table that is read, and that of the innermost `using`: lookups may differ where these do.
state = 0, 0
_numbers = itertools.count(1)


@contextlib.contextmanager
def using(
    op: str = "", config: KernelConfig | None = None, shape: str | None = None, *, sm: int | None = None
) -> Iterator[dict[tuple[str, str, str], KernelConfig]]:
    """Changes the lookups inside; yields what they take: (operation, bits, shape class) -> KernelConfig.

    op, config: the launches of `op` take this configuration, or those of one shape class where `shape` is given. sm:
    lookups are for this compute capability whatever the device, as in offline compilation.
    """
    global _overrides, state
    if op and op not in operations():
        raise ValueError(f"tiles.using: no operation {op!r}")
    outer, taken = (_overrides, launch.assumed_generation, state[1]), {}
    _overrides = _overrides | ({(op, shape): config} if op else {})
    launch.assumed_generation = launch.assumed_generation if sm is None else launch.table_of(sm)
    state = state[0], next(_numbers)
    _watching.append(taken)
    try:
        yield taken
    finally:
        _watching.pop()
        _overrides, launch.assumed_generation, number = outer
        state = state[0], number


def _case(x: torch.Tensor, shape: str) -> tuple[str, str, int]:
    """The arguments of an operation's function for x."""
    return shape, "32" if x.dtype == torch.float32 else "16", launch.generation(x.device)


@functools.cache  # since a launcher asks at every call
def _configs(op: str, shape: str, bits: str, sm: int) -> list[KernelConfig]:
    if sm not in launch.GENERATIONS:
        raise KeyError(f"no configuration of {op} for a GPU older than sm_{launch.GENERATIONS[0]}")
    return list(dict.fromkeys(operations()[op](shape, bits, sm)))


def lookup(op: str, x: torch.Tensor, shape: str, without: tuple[str, ...] = ()) -> KernelConfig:
    """The configuration of `op` for x's device and dtype at a shape class such as "d64" or "768x3072".

    With ops.batch_invariant(True), a forward operation takes that of an INVARIANT kernel, whatever the user's table and
    `using` say. without: providers that lack something this call needs beyond its shape class, as cublaslt lacks a
    layer scale. They are skipped even where one is the override, because one override may cover calls that need the
    missing feature and calls that do not; what `using` yields tells which ran.
    """
    case = _case(x, shape)
    if op.endswith("_fwd") and batch_invariant():
        found = shipped(op, x, shape, INVARIANT)
    else:
        found = _overrides.get((op, shape)) or _overrides.get((op, None)) or _of_user(op, x, *case)
        if found is None or found.provider in without:
            found = next(config for config in _configs(op, *case) if config.provider not in without)
    for taken in _watching:
        taken[op, case[1], shape] = found
    return found


def shipped(op: str, x: torch.Tensor, shape: str, providers: tuple[str, ...] = ()) -> KernelConfig:
    """The best configuration, by one of `providers` if any are given, whatever the user's table says."""
    known = _configs(op, *_case(x, shape))
    return next(config for config in known if not providers or config.provider in providers)


def candidates(op: str, x: torch.Tensor, shape: str) -> list[KernelConfig]:
    """The configurations that could do the operation in place of what `lookup` returns."""
    now = lookup(op, x, shape)
    return [config for config in _configs(op, *_case(x, shape)) if config != now]


def user_table_path() -> Path:
    """The path of the user's own table."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(os.environ.get("VITFAST_TILES") or cache / "vitfast" / "tiles.json")


@functools.cache
def user_table(gpu: int) -> dict[tuple[str, str, str], KernelConfig]:
    """(op, shape class, bits) -> the tuner's KernelConfig for this GPU, given by its index."""
    path = user_table_path()
    if not path.is_file():
        return {}
    try:
        name, records = torch.cuda.get_device_name(gpu), json.loads(path.read_text())["tiles"]
        return {(r["op"], r["shape"], r["bits"]): from_record(r) for r in records if r["gpu"] == name}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the tile table {path} is damaged ({error}); remove it") from None


def forget_user_table() -> None:
    """Has the user's own table read again."""
    global state
    user_table.cache_clear()
    state = next(_numbers), state[1]


def _of_user(op: str, x: torch.Tensor, shape: str, bits: str, sm: int) -> KernelConfig | None:
    """The configuration in the user's own table, if a launcher of this version takes it."""
    row = user_table(x.device.index).get((op, shape, bits)) if x.is_cuda and launch.assumed_generation is None else None
    return row if row and _fits(row, op, shape, bits, sm) else None


def _wrong_number(row: KernelConfig) -> str:
    """The first number of a configuration that no kernel runs with, as "BLOCK_M = 0", or ""."""
    for name, number in {"maxnreg": row.maxnreg, **row.meta}.items():
        whole = type(number) is int and number >= (0 if name in ("maxnreg", "AHEAD") else 1)
        power_of_two = name.startswith("BLOCK") or name in ("num_warps", "SUBTILES")
        if not whole or (power_of_two and number & (number - 1)):
            return f"{name} = {number!r}"
    return ""


@functools.cache
def _fits(row: KernelConfig, *case) -> bool:
    """Whether a launcher takes a row of the user's table in a case of `_configs`; warns once if not."""
    form, *known = ((each.provider, *dict(each.blocks)) for each in (row, *_configs(*case)))
    if wrong := " ".join(form) if form not in known else _wrong_number(row):
        text = f"{'{} at {}, {} bits,'.format(*case)} takes no {wrong}; run vitfast tune again, or remove the row"
        warnings.warn(f"the tile table {user_table_path()}: {text}", stacklevel=2)
    return not wrong


def from_record(record: dict) -> KernelConfig:
    """The configuration in an entry of the user's table."""
    numbers = (record[name] for name in ("num_warps", "num_stages", "provider"))
    return config(*numbers, record.get("maxnreg", 0), **record["blocks"])
