"""Looks up the launch configuration of an operation.

Beside the kernels of each family lies a file configs.py with a function for each operation: (shape class, "16" or "32"
bits, GPU generation) -> configurations. The best is the first, as measured or, where nothing has been timed yet, as
compiled offline (no spills, shared memory within the limit). The others are for calls that the first cannot do, and for
whoever looks for a faster one: `vitfast tune`, whose table of a user's own ($VITFAST_TILES, or
~/.cache/vitfast/tiles.json) comes before all.
"""

import contextlib
import dataclasses
import functools
import importlib
import json
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from .launch import batch_invariant

GENERATIONS = (80, 89, 90, 100, 120)
# Other GPUs -> the generation whose tiles they take: of those with instructions and shared memory that they have too.
# sm_86 has no more shared memory than sm_89, and less than sm_80.
TABLE_OF = {86: 89, 87: 80, 103: 100, 121: 120}
# Shared memory a program may use, bytes.
SHARED_LIMIT = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
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


class _Scope(NamedTuple):
    """The settings of `using` for the lookups inside it."""

    sm: int | None = None
    overrides: dict[tuple[str, str | None], KernelConfig] = {}  # by operation, and shape class or None
    taken: dict[tuple[str, str, str], KernelConfig] | None = None


_scope = _Scope()


@contextlib.contextmanager
def using(
    op: str = "", config: KernelConfig | None = None, shape: str | None = None, *, sm: int | None = None
) -> Iterator[dict[tuple[str, str, str], KernelConfig]]:
    """Changes the lookups inside; yields what they take: (operation, bits, shape class) -> KernelConfig.

    op, config: the launches of `op` take this configuration, or those of one shape class where `shape` is given. sm:
    lookups are for this compute capability whatever the device, as in offline compilation.
    """
    global _scope
    if op and op not in operations():
        raise ValueError(f"tiles.using: no operation {op!r}")
    overrides = _scope.overrides | ({(op, shape): config} if op else {})
    outer, _scope = _scope, _Scope(_scope.sm if sm is None else table_of(sm), overrides, {})
    try:
        yield _scope.taken
    finally:
        if outer.taken is not None:
            outer.taken.update(_scope.taken)
        _scope = outer


def capability(device: torch.device) -> int:
    """The compute capability that Triton compiles for, as 90 for 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def table_of(exact: int) -> int:
    """The generation whose tiles a GPU of this compute capability takes; 0 if it is older than all."""
    return TABLE_OF.get(exact) or max((sm for sm in GENERATIONS if sm <= exact), default=0)


@functools.cache
def _generation(index: int) -> int:
    return table_of(capability(torch.device("cuda", index)))


def generation(device: torch.device) -> int:
    """The one of GENERATIONS whose tiles the device takes, 0 if it is older; without a GPU it is 90."""
    if _scope.sm is not None:
        return _scope.sm
    if device.type != "cuda":
        return 90
    return _generation(torch.cuda.current_device() if device.index is None else device.index)


def _bits(x: torch.Tensor) -> str:
    return "32" if x.dtype == torch.float32 else "16"


def lookup(op: str, x: torch.Tensor, shape: str, without: tuple[str, ...] = ()) -> KernelConfig:
    """The configuration of `op` for x's device and dtype at a shape class such as "d64" or "768x3072".

    With ops.batch_invariant(True), a forward operation takes that of an INVARIANT kernel, whatever the user's table and
    `using` say. without: providers that lack something this call needs beyond its shape class, as cublaslt lacks a
    layer scale. They are skipped even where one is the override, because one override may cover calls that need the
    missing feature and calls that do not; what `using` yields tells which ran.
    """
    if op.endswith("_fwd") and batch_invariant():
        found = shipped(op, x, shape, INVARIANT)
    else:
        overrides = _scope.overrides
        found = (overrides.get((op, shape)) or overrides.get((op, None))) if overrides else None
        found = found or _of_user(op, x, shape)
        if found is None or found.provider in without:
            found = next(c for c in _configs(op, shape, _bits(x), generation(x.device)) if c.provider not in without)
    if _scope.taken is not None:
        _scope.taken[op, _bits(x), shape] = found
    return found


@functools.cache  # since a launcher asks at every call
def _configs(op: str, shape: str, bits: str, sm: int) -> list[KernelConfig]:
    if sm not in GENERATIONS:
        raise KeyError(f"no configuration of {op} for a GPU older than sm_{GENERATIONS[0]}")
    return list(dict.fromkeys(operations()[op](shape, bits, sm)))


def shipped(op: str, x: torch.Tensor, shape: str, providers: tuple[str, ...] = ()) -> KernelConfig:
    """The best configuration, by one of `providers` if any are given, whatever the user's table says."""
    known = _configs(op, shape, _bits(x), generation(x.device))
    return next(config for config in known if not providers or config.provider in providers)


def candidates(op: str, x: torch.Tensor, shape: str) -> list[KernelConfig]:
    """The configurations that could do the operation in place of what `lookup` returns."""
    now = lookup(op, x, shape)
    return [config for config in _configs(op, shape, _bits(x), generation(x.device)) if config != now]


def user_table_path() -> Path:
    """The path of the user's own table."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(os.environ.get("VITFAST_TILES") or cache / "vitfast" / "tiles.json")


@functools.cache
def _user_table() -> dict[tuple[str, str, str, str], KernelConfig]:
    """(op, GPU name, bits, shape class) -> the tuner's KernelConfig."""
    path = user_table_path()
    if not path.is_file():
        return {}
    try:
        records = json.loads(path.read_text())["tiles"]
        return {(r["op"], r["gpu"], r["bits"], r["shape"]): from_record(r) for r in records}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the tile table {path} is damaged ({error}); remove it") from None


def reload_user_table() -> None:
    """Makes the next lookup read the user's own table again."""
    _user_table.cache_clear()


@functools.cache
def _gpu_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


def _of_user(op: str, x: torch.Tensor, shape: str) -> KernelConfig | None:
    if not x.is_cuda or _scope.sm is not None or not _user_table():
        return None
    found = _user_table().get((op, _gpu_name(x.device.index), _bits(x), shape))
    return found if found and _fits(found, op, shape, _bits(x), generation(x.device)) else None


@functools.cache
def _fits(row: KernelConfig, op: str, shape: str, bits: str, sm: int) -> bool:
    """Whether a launcher of this version takes a row of the user's table; warns once where none does."""
    form = lambda config: (config.provider, *(name for name, _ in config.blocks))  # noqa: E731
    fits = form(row) in map(form, _configs(op, shape, bits, sm))
    if not fits:
        text = (
            f"{op} at {shape}, {bits} bits, takes no {' '.join(form(row))}; run vitfast tune again, or remove the row"
        )
        warnings.warn(f"the tile table {user_table_path()}: {text}", stacklevel=2)
    return fits


def to_record(op: str, gpu: str, bits: str, shape: str, value: KernelConfig) -> dict:
    """An entry of the user's table."""
    return dict(op=op, gpu=gpu, bits=bits, shape=shape, **dataclasses.asdict(value) | {"blocks": dict(value.blocks)})


def from_record(record: dict) -> KernelConfig:
    """The configuration in an entry of the user's table."""
    return config(*(record[name] for name in ("num_warps", "num_stages", "provider", "maxnreg")), **record["blocks"])
