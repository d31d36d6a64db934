"""Looks up the launch configuration of an operation: the first matching rule in its family's file.

Rules are data, chosen by measurement or, where none has been made yet, by offline compilation (no spills, shared memory
within the limit). CANDIDATES are rules for other configurations that can do an operation; for each provider and variant
the first that matches counts. The tuner tries them, and nothing runs them unasked.

A user's own table (`vitfast tune`) comes before the rules: $VITFAST_TILES, or ~/.cache/vitfast/tiles.json.
"""

import contextlib
import dataclasses
import fnmatch
import functools
import importlib
import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from ..launch import batch_invariant

GENERATIONS = (80, 89, 90, 100, 120)
# Other GPUs -> the generation whose tiles they take: of those with instructions and shared memory that they have too.
# sm_86 has no more shared memory than sm_89, and less than sm_80.
TABLE_OF = {86: 89, 87: 80, 103: 100, 121: 120}
# Shared memory a program may use, bytes.
SHARED_LIMIT = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


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

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        return dict(self.blocks)

    def __getitem__(self, name: str) -> int:
        return self._numbers[name]


def config(
    num_warps: int = 4, num_stages: int = 2, provider: str = "triton", maxnreg: int = 0, **blocks: int
) -> KernelConfig:
    """Makes a KernelConfig from keywords: `config(8, 3, BLOCK_M=128, BLOCK_N=128)`."""
    return KernelConfig(num_warps, num_stages, provider, tuple(sorted(blocks.items())), maxnreg)


@dataclass(frozen=True)
class Rule:
    """A configuration and where it applies: GPU generations, bits of the dtype and shape classes.

    bits: "32", "16", or "*" for both. shape: fnmatch patterns separated by spaces, of which one must match. variant:
    tells several configurations of one provider apart in CANDIDATES.
    """

    config: KernelConfig
    sm: tuple[int, ...] = GENERATIONS
    bits: str = "*"
    shape: str = "*"
    variant: str = ""


# Family -> its operations. The family's file is imported when one of them is first looked up.
FAMILIES = {
    "layer_norm": "layer_norm_fwd layer_norm_bwd scale_rows column_sums",
    "attention": "attention_fwd attention_bwd attention_bwd_dq attention_bwd_dkdv attention_bwd_bias rope_bwd",
    "patch_embed": "patch_embed_fwd patch_embed_dweight patch_embed_dimages",
    "matmul": "linear_fwd input_grad linear_gelu_fwd linear_residual_fwd mlp_kept dgelu_matmul gelu_bwd "
    "gated_linear_fwd dgated_matmul gated_bwd weight_grad weight_grad_sum",
}


class _Rules(dict):
    """Operation -> its rules; a family's file is imported when one of its operations is first asked for."""

    def __init__(self, table: str):
        super().__init__({op: family for family, operations in FAMILIES.items() for op in operations.split()})
        self._table = table

    def __getitem__(self, op: str) -> tuple[Rule, ...]:
        found = super().__getitem__(op)
        if isinstance(found, str):
            file = importlib.import_module(f".{found}", __package__)
            found = self[op] = getattr(file, self._table).get(op, ())
        return found

    def get(self, op: str, default: tuple[Rule, ...] = ()) -> tuple[Rule, ...]:
        return self[op] if op in self else default

    def items(self) -> list[tuple[str, tuple[Rule, ...]]]:
        return [(op, self[op]) for op in self]


RULES, CANDIDATES = _Rules("RULES"), _Rules("CANDIDATES")


def _wrong_number(value: KernelConfig) -> str:
    """The first number of a configuration that no kernel runs with, as "SPLIT_K = 0", or ""."""
    numbers = dict(value.blocks, num_warps=value.num_warps, num_stages=value.num_stages, maxnreg=value.maxnreg)
    for name, number in numbers.items():
        least = 0 if name in ("maxnreg", "AHEAD") else 1
        whole = type(number) is int and number >= least
        power_of_two = name.startswith("BLOCK") or name in ("num_warps", "SUBTILES")
        if not whole or (power_of_two and number & (number - 1)):
            return f"{name} = {number!r}"
    return ""


def _fault(op: str, value: KernelConfig, blocks: bool = True) -> str:
    """Why no launcher of `op` takes a configuration: its provider, a number or (`blocks`) names; or ""."""
    known: dict[str, list[set[str]]] = {}
    for rule in (*RULES.get(op), *CANDIDATES.get(op)):
        known.setdefault(rule.config.provider, []).append({name for name, _ in rule.config.blocks})
    if value.provider not in known:
        return f"{op} has no provider {value.provider!r}, only {', '.join(known)}" if known else f"no operation {op!r}"
    names, wanted = {name for name, _ in value.blocks}, known[value.provider]
    if blocks and names not in wanted:
        spelt = lambda names: " ".join(sorted(names)) or "no numbers"  # noqa: E731
        return f"{op} by {value.provider} takes {spelt(wanted[0])}, not {spelt(names)}"
    if number := _wrong_number(value):
        return f"{op} by {value.provider} cannot run with {number}"
    return ""


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
    lookups are for this compute capability whatever the device, as in offline compilation. Raises ValueError for an
    operation or a provider that does not exist, and for a number that no kernel runs with.
    """
    global _scope
    if op and (fault := _fault(op, config, blocks=False)):
        raise ValueError(f"tiles.using: {fault}")
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


def user_table_path() -> Path:
    """The path of the user's own table."""
    return Path(
        os.environ.get("VITFAST_TILES")
        or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vitfast" / "tiles.json"
    )


@functools.cache
def _user_table() -> dict[tuple[str, str, str, str], KernelConfig]:
    """(op, GPU name, bits, shape class) -> the tuner's KernelConfig, less those that no launcher takes."""
    path = user_table_path()
    if not path.is_file():
        return {}
    try:
        records = json.loads(path.read_text())["tiles"]
        found = {(r["op"], r["gpu"], r["bits"], r["shape"]): from_record(r) for r in records}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the tile table {path} is damaged ({error}); remove it") from None
    return {key: value for key, value in found.items() if not _left_out(path, key, value)}


@functools.cache
def _left_out(path: Path, key: tuple[str, str, str, str], value: KernelConfig) -> bool:
    """Whether no launcher takes an entry of the user's table (written by another version); warns once."""
    op, gpu, bits, shape = key
    if fault := _fault(op, value):
        text = f"the row of {op} at {shape}, {bits} bits, {gpu}, is left out: run vitfast tune again, or remove it"
        warnings.warn(f"the tile table {path}: {fault}; {text}", stacklevel=2)
    return bool(fault)


def reload_user_table() -> None:
    """Makes the next lookup read the user's own table again."""
    _user_table.cache_clear()


def lookup(op: str, x: torch.Tensor, shape: str, without: tuple[str, ...] = ()) -> KernelConfig:
    """The configuration of `op` for x's device and dtype at a shape class such as "d64" or "768x3072".

    With ops.batch_invariant(True), a forward operation takes that of an INVARIANT kernel, whatever the user's table and
    `using` say.
    Where the user's table names cublaslt and it cannot run on x (another dtype, no compiler), the first rule that can
    is taken. An override of `using` that cannot run raises RuntimeError, so that nothing is timed or tested under
    another's name. without: providers that lack something this call needs beyond its shape class, as cublaslt lacks a
    layer scale. They are skipped even where one is the override, because one override may cover calls that need the
    missing feature and calls that do not; what `using` yields tells which ran.
    """
    if op.endswith("_fwd") and batch_invariant():
        found = shipped(op, x, shape, INVARIANT)
        if _scope.taken is not None:
            _scope.taken[op, _bits(x), shape] = found
        return found
    overrides = _scope.overrides
    forced = (overrides.get((op, shape)) or overrides.get((op, None))) if overrides else None
    found = forced or _find(op, x, shape)
    reason = _unsupported_reason(found.provider, x)
    if reason and forced:
        raise RuntimeError(f"{op}: {found.provider} cannot run here: {reason}")
    if reason or found.provider in without:
        usable = (r.config for r in _matching(RULES[op], x, shape) if r.config.provider not in without)
        found = next(config for config in usable if not _unsupported_reason(config.provider, x))
    if _scope.taken is not None:
        _scope.taken[op, _bits(x), shape] = found
    return found


def _unsupported_reason(provider: str, x: torch.Tensor) -> str | None:
    """Why cuBLASLt cannot run on x; None where it can, and for other providers."""
    if provider != "cublaslt":
        return None
    if _scope.sm is not None or x.device.type == "meta":
        return "it is not compiled offline"
    cublaslt = importlib.import_module("..libraries.cublaslt", __package__)  # when a rule first names it
    return cublaslt.unsupported_reason(x)


def _bits(x: torch.Tensor) -> str:
    return "32" if x.dtype == torch.float32 else "16"


def _matching(rules: tuple[Rule, ...], x: torch.Tensor, shape: str) -> Iterator[Rule]:
    sm = generation(x.device)
    alike = (rule for rule in rules if sm in rule.sm and rule.bits in ("*", _bits(x)))
    return (rule for rule in alike if any(fnmatch.fnmatchcase(shape, each) for each in rule.shape.split()))


@functools.cache
def _gpu_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


def _find(op: str, x: torch.Tensor, shape: str) -> KernelConfig:
    if x.is_cuda and _scope.sm is None and _user_table():
        found = _user_table().get((op, _gpu_name(x.device.index), _bits(x), shape))
        if found:
            return found
    return shipped(op, x, shape)


# Kernels of ours in which a row, or a query, sums in one order wherever it lies, whatever the sizes beside it.
INVARIANT = ("triton", "tiled")
# (operation, generation, bits, shape class, providers) -> the rules that were searched and what was found. It is a
# cache, since a launcher asks at every call.
_shipped: dict[tuple[str, int, str, str, tuple[str, ...]], tuple[tuple[Rule, ...], KernelConfig]] = {}


def shipped(op: str, x: torch.Tensor, shape: str, providers: tuple[str, ...] = ()) -> KernelConfig:
    """The configuration by the rules, whatever the user's own table says.

    providers: if they are given, the first configuration of one of them, by the rules or else among the candidates.
    """
    key = op, generation(x.device), _bits(x), shape, providers
    known = _shipped.get(key)
    if known is not None and known[0] is RULES[op]:
        return known[1]
    rules = _matching((*RULES[op], *CANDIDATES.get(op)) if providers else RULES[op], x, shape)
    rule = next((rule for rule in rules if not providers or rule.config.provider in providers), None)
    if rule is None:
        raise KeyError(f"no tile for {op} on sm_{generation(x.device)}, {_bits(x)} bits, shape {shape}")
    _shipped[key] = RULES[op], rule.config
    return rule.config


def candidates(op: str, x: torch.Tensor, shape: str) -> list[KernelConfig]:
    """The other configurations that could do the operation: the first of each provider and variant."""
    found = {(shipped(op, x, shape).provider, ""): shipped(op, x, shape)}
    for rule in _matching(CANDIDATES.get(op), x, shape):
        found.setdefault((rule.config.provider, rule.variant), rule.config)
    now, out = lookup(op, x, shape), absent(op, x, shape)
    found.pop((now.provider, ""), None)
    return [config for config in dict.fromkeys(found.values()) if config != now and config.provider not in out]


def absent(op: str, x: torch.Tensor, shape: str) -> dict[str, str]:
    """Which providers cannot run on x, and why: {"cublaslt": "not built: no C++ compiler"}."""
    providers = (rule.config.provider for rule in _matching((*RULES[op], *CANDIDATES.get(op)), x, shape))
    reasons = {provider: _unsupported_reason(provider, x) for provider in dict.fromkeys(providers)}
    return {provider: reason for provider, reason in reasons.items() if reason}


def to_record(op: str, gpu: str, bits: str, shape: str, value: KernelConfig) -> dict:
    """An entry of the user's table."""
    numbers = dataclasses.asdict(value) | {"blocks": dict(value.blocks)}
    return dict(op=op, gpu=gpu, bits=bits, shape=shape, **numbers)


def from_record(record: dict) -> KernelConfig:
    """The configuration in an entry of the user's table."""
    names = ("num_warps", "num_stages", "provider", "maxnreg")
    return config(*(record[name] for name in names), **record["blocks"])
