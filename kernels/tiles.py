"""Frozen tile configurations: per operation, GPU generation, dtype and shape class, chosen by measurement (or, where none is at hand yet, by
offline compilation: no spills, shared memory within the limit). Data only; the first rule that matches wins.

A user's own table (`python -m vitfast.tune`) comes before these rules: $VITFAST_TILES, or ~/.cache/vitfast/tiles.json.
"""

import contextlib
import dataclasses
import fnmatch
import functools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

GENERATIONS = (80, 89, 90, 100, 120)
# Shared memory a program may use, bytes.
SHARED_LIMIT = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


@dataclass(frozen=True)
class Tile:
    """One launch configuration. `provider` "cublas" leaves the matrix product to torch; `blocks` are the kernel's own constexprs."""

    num_warps: int = 4
    num_stages: int = 2
    provider: str = "triton"
    blocks: tuple[tuple[str, int], ...] = ()

    @property
    def meta(self) -> dict:
        """Keyword arguments for the launch."""
        return {**dict(self.blocks), "num_warps": self.num_warps, "num_stages": self.num_stages}

    def __getitem__(self, name: str) -> int:
        return dict(self.blocks)[name]


def tile(num_warps: int = 4, num_stages: int = 2, provider: str = "triton", **blocks: int) -> Tile:
    """`tile(8, 3, BLOCK_M=128, BLOCK_N=128)`."""
    return Tile(num_warps, num_stages, provider, tuple(sorted(blocks.items())))


@dataclass(frozen=True)
class Rule:
    """Applies to these GPU generations, to "32" or "16" bit dtypes ("*": both), and to shape classes that match `shape` (fnmatch)."""

    tile: Tile
    sm: tuple[int, ...] = GENERATIONS
    bits: str = "*"
    shape: str = "*"


RULES: dict[str, tuple[Rule, ...]] = {}

_target: int | None = None


@contextlib.contextmanager
def targeting(sm: int) -> Iterator[None]:
    """Tiles of this GPU generation are looked up inside, whatever the device: for offline compilation."""
    global _target
    before, _target = _target, sm
    try:
        yield
    finally:
        _target = before


@functools.cache
def _capability(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    exact = 10 * major + minor
    return max((sm for sm in GENERATIONS if sm <= exact), default=0)


def generation(device: torch.device) -> int:
    """80, 89, 90, 100 or 120 (0: older than any of them); tensors without a GPU take sm_90's tiles."""
    if _target is not None:
        return _target
    return _capability(device.index if device.index is not None else torch.cuda.current_device()) if device.type == "cuda" else 90


_overrides: dict[str, Tile] = {}


@contextlib.contextmanager
def override(op: str, value: Tile) -> Iterator[None]:
    """Uses one tile for every launch of `op` inside: for tuning and for tests."""
    before = _overrides.get(op)
    _overrides[op] = value
    try:
        yield
    finally:
        _overrides.pop(op)
        if before is not None:
            _overrides[op] = before


def user_table_path() -> Path:
    """Where the user's own table lies."""
    return Path(os.environ.get("VITFAST_TILES") or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vitfast" / "tiles.json")


@functools.cache
def _user_table() -> dict[tuple[str, str, str, str], Tile]:
    """(op, GPU name, bits, shape class) -> Tile, as the tuning script wrote them."""
    path = user_table_path()
    if not path.is_file():
        return {}
    try:
        rows = json.loads(path.read_text())["tiles"]
        return {(r["op"], r["gpu"], r["bits"], r["shape"]): tile(r["num_warps"], r["num_stages"], r["provider"], **r["blocks"]) for r in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the tile table {path} is damaged ({error}); remove it or run python -m vitfast.tune again") from None


def lookup(op: str, x: torch.Tensor, shape: str) -> Tile:
    """The tile of an operation for x's device and dtype at a shape class such as "d64" or "768x3072"."""
    if op in _overrides:
        return _overrides[op]
    bits = "32" if x.dtype == torch.float32 else "16"
    if x.is_cuda and _target is None and _user_table():
        found = _user_table().get((op, torch.cuda.get_device_name(x.device), bits, shape))
        if found:
            return found
    sm = generation(x.device)
    for rule in RULES[op]:
        if sm in rule.sm and rule.bits in ("*", bits) and fnmatch.fnmatchcase(shape, rule.shape):
            return rule.tile
    raise KeyError(f"no tile for {op} on sm_{sm}, {bits} bits, shape {shape}")


def as_row(op: str, gpu: str, bits: str, shape: str, value: Tile) -> dict:
    """A row of the user's table."""
    row = dataclasses.asdict(value) | {"blocks": dict(value.blocks)}
    return dict(op=op, gpu=gpu, bits=bits, shape=shape, **row)
