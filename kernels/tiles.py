"""Frozen tile configurations: per operation, GPU generation, dtype and shape class, chosen by measurement (or, where none is at hand yet, by
offline compilation: no spills, shared memory within the limit). Data only; the first rule that matches wins.

A user's own table (`vitfast tune`) comes before these rules: $VITFAST_TILES, or ~/.cache/vitfast/tiles.json.
"""

import contextlib
import dataclasses
import fnmatch
import functools
import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from . import attention_libraries, cublaslt, gluon_names

GENERATIONS = (80, 89, 90, 100, 120)
# Shared memory a program may use, bytes.
SHARED_LIMIT = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


@dataclass(frozen=True)
class Tile:
    """One launch configuration: a provider and its numbers; `blocks` are the kernel's own constexprs.

    The provider is one of our kernels or a library: "cublas" leaves a matrix product to torch, "torch" LayerNorm;
    "cublaslt" is cublaslt.py; attention's libraries are attention_libraries.PROVIDERS. maxnreg: registers a thread may
    have, so that more programs fit a multiprocessor (of 4 warps: 168 for three, 128 for four); 0 leaves it to the
    compiler.
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


def tile(num_warps: int = 4, num_stages: int = 2, provider: str = "triton", maxnreg: int = 0, **blocks: int) -> Tile:
    """`tile(8, 3, BLOCK_M=128, BLOCK_N=128)`."""
    return Tile(num_warps, num_stages, provider, tuple(sorted(blocks.items())), maxnreg)


@dataclass(frozen=True)
class Rule:
    """Applies to these GPU generations, to "32" or "16" bit dtypes ("*": both), and to shape classes that match `shape` (fnmatch).

    variant: of RIVALS, tells several tiles of one provider apart.
    """

    tile: Tile
    sm: tuple[int, ...] = GENERATIONS
    bits: str = "*"
    shape: str = "*"
    variant: str = ""


# A product in pieces: two programs fit a multiprocessor, and nothing spills.
_PRODUCT = (
    Rule(tile(8, 3, BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP_M=8, SUBTILES=4), sm=(90, 100), bits="16"),
    Rule(tile(4, 4, BLOCK_M=128, BLOCK_N=128, BLOCK_K=32, GROUP_M=8, SUBTILES=4), bits="16"),
    Rule(tile(4, 3, BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, GROUP_M=8, SUBTILES=2)),
)
_TMA = (Rule(tile(8, 3, "tma", BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP_M=8, SUBTILES=4), sm=(90, 100), bits="16"),)
# A persistent program of two times 64 rows and a warp that loads (product_gluon.py); SUBTILES: in 8 nothing spills.
_GLUON = (Rule(tile(4, 4, "gluon", BLOCK_N=256, BLOCK_K=64, GROUP_M=8, SUBTILES=8), sm=(90,), bits="16"),)
# Three quarters of the reads from L2, but one program on a multiprocessor: nothing hides its epilogue.
_WIDE = tuple(
    Rule(
        tile(8, 4, provider, BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, GROUP_M=8, SUBTILES=4),
        sm=(90, 100),
        bits="16",
        variant="wide",
    )
    for provider in ("triton", "tma")
)
# With 128 registers two programs fit; left to itself, ptxas takes up to 134 (Triton 3.6). Where BLOCK_K does not divide K,
# masks would spill: only the widths of models.
_DGELU, _DGELU_TMA = (
    tuple(
        Rule(
            tile(8, 3, provider, maxnreg=128, BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP_M=8, SUBTILES=4),
            sm=(90,),
            bits="16",
            shape=f"{k}x*",
        )
        for k in (192, 256, 384, 512, 576, 640, 768, 896, 1024, 1152, 1280, 1408, 1536, 1664)
    )
    + rules
    for provider, rules in (("triton", _PRODUCT), ("tma", _TMA))
)
_CUBLAS = (Rule(tile(provider="cublas")),)

RULES: dict[str, tuple[Rule, ...]] = {
    # Shape classes of LayerNorm: chunks x BLOCK_D of the row (rows.shape_class), with an "a" where a residual (backward: its
    # gradient) is added, an "s" where backward sums for a layer scale.
    "layer_norm_fwd": (
        Rule(tile(8, 1, BLOCK_M=1), shape="?x2048*"),
        Rule(tile(4, 1, BLOCK_M=1), shape="?x1024*"),
        Rule(tile(4, 1, BLOCK_M=2), shape="?x512*"),
        Rule(tile(4, 1, BLOCK_M=4), shape="?x256*"),
        Rule(tile(4, 1, BLOCK_M=8), shape="?x128*"),
        Rule(tile(4, 1, BLOCK_M=16)),
    ),
    # Backward: two warps share 768 or 1024 numbers of a row, so that the accumulators of three column sums leave room
    # for PER_SM programs. On their way through shared memory, of dy, z and dz: (STAGES - 1) * BLOCK_M * D * 6 bytes *
    # PER_SM = 81, 108 and 90 KiB of a multiprocessor at D = 768, 1024 and 1280, where 72, 72 and 60 were; a stage less
    # where shared memory has 99 KiB. Every program writes a row of each workspace: many small ones would write more.
    "layer_norm_bwd": (
        Rule(tile(8, 1, BLOCK_M=1, STAGES=1, PER_SM=1), bits="32", shape="?x2048*"),
        Rule(tile(8, 1, BLOCK_M=1, STAGES=2, PER_SM=1), shape="?x2048*"),
        Rule(tile(8, 1, maxnreg=128, BLOCK_M=1, STAGES=3, PER_SM=2), bits="16", shape="3x1024*"),
        Rule(tile(8, 1, BLOCK_M=1, STAGES=2, PER_SM=1), shape="?x1024*"),
        Rule(tile(4, 1, BLOCK_M=1, STAGES=2, PER_SM=2), bits="32", shape="?x512*"),
        Rule(tile(4, 1, BLOCK_M=2, STAGES=2, PER_SM=2), bits="32", shape="?x256*"),
        Rule(tile(4, 1, BLOCK_M=4, STAGES=2, PER_SM=2), bits="32", shape="?x128*"),
        Rule(tile(4, 1, BLOCK_M=8, STAGES=2, PER_SM=2), bits="32"),
        Rule(tile(4, 1, BLOCK_M=1, STAGES=3, PER_SM=2), shape="5x512*"),
        Rule(tile(4, 1, BLOCK_M=2, STAGES=4, PER_SM=2), shape="5x*"),
        Rule(tile(4, 1, maxnreg=168, BLOCK_M=1, STAGES=3, PER_SM=3), sm=(89, 120), shape="?x512*"),
        Rule(tile(4, 1, maxnreg=168, BLOCK_M=1, STAGES=4, PER_SM=3), shape="?x512*"),
        Rule(tile(4, 1, maxnreg=168, BLOCK_M=2, STAGES=3, PER_SM=3), sm=(89, 120), shape="4x256*"),
        Rule(tile(4, 1, maxnreg=168, BLOCK_M=2, STAGES=4, PER_SM=3), shape="?x256*"),
        Rule(tile(4, 1, maxnreg=168, BLOCK_M=4, STAGES=4, PER_SM=3), shape="?x128*"),
        Rule(tile(4, 1, maxnreg=168, BLOCK_M=8, STAGES=4, PER_SM=3), shape="?x64*"),
        Rule(tile(4, 1, maxnreg=168, BLOCK_M=16, STAGES=4, PER_SM=3)),
    ),
    "scale_rows": (Rule(tile(4, 1, BLOCK_M=8, BLOCK_D=256, STAGES=3, PER_SM=6)),),
    "column_sums": (Rule(tile(8, 1, BLOCK_P=256, BLOCK_D=16)),),
    # Shape classes of attention: padded head size, tokens up to 64, 128, 256, 320 or "long"; provider: which of the two paths runs.
    "attention_fwd": (
        Rule(tile(8, 1, "tiled", BLOCK_M=32, BLOCK_N=32), bits="32"),
        Rule(tile(8, 3, "tiled", BLOCK_M=128, BLOCK_N=64), sm=(90, 100), shape="*nlong"),
        Rule(tile(4, 3, "tiled", BLOCK_M=64, BLOCK_N=64), sm=(90, 100), shape="*n320"),
        Rule(tile(8, 3, "tiled", BLOCK_M=128, BLOCK_N=64), sm=(100,), shape="d128*"),
        Rule(tile(4, 1, "rows", BLOCK_M=64), sm=(90, 100)),
        Rule(tile(8, 2, "tiled", BLOCK_M=64, BLOCK_N=32), shape="d128*"),
        Rule(tile(4, 2, "tiled", BLOCK_M=64, BLOCK_N=32), shape="d96*"),
        Rule(tile(4, 2, "tiled", BLOCK_M=64, BLOCK_N=64)),
    ),
    "attention_bwd": (
        # One program of 4 warps a head: four, three or two of them on a multiprocessor, by their registers.
        Rule(tile(4, 1, "head", maxnreg=128, BLOCK_M=64, BLOCK_N=64, STAGES=2, PER_SM=4, EXACT=0), sm=(90,), bits="16", shape="d[13][26]n[1-6]*"),
        Rule(tile(4, 1, "head", maxnreg=168, BLOCK_M=64, BLOCK_N=64, STAGES=2, PER_SM=3, EXACT=0), sm=(90,), bits="16", shape="d[46][48]n[1-6]*"),
        Rule(tile(4, 1, "head", maxnreg=248, BLOCK_M=64, BLOCK_N=64, STAGES=2, PER_SM=2, EXACT=1), sm=(90,), bits="16", shape="d[89][06]n[1-6]*"),
        Rule(tile(4, 1, "head", BLOCK_M=64, BLOCK_N=64, STAGES=2, PER_SM=2, EXACT=1), sm=(100,), bits="16", shape="d[1-9][024568]n[1-6]*"),
        Rule(tile(provider="tiled")),
    ),
    "attention_bwd_dq": (
        Rule(tile(8, 1, BLOCK_M=32, BLOCK_N=32), bits="32"),
        Rule(tile(8, 2, BLOCK_M=128, BLOCK_N=32), sm=(90, 100), shape="d128*"),
        Rule(tile(4, 2, BLOCK_M=64, BLOCK_N=64), sm=(90, 100), shape="*n320"),
        Rule(tile(4, 2, BLOCK_M=64, BLOCK_N=64), sm=(90, 100), shape="*n64"),
        Rule(tile(8, 2, BLOCK_M=128, BLOCK_N=64), sm=(90, 100)),
        Rule(tile(4, 1, BLOCK_M=32, BLOCK_N=32), shape="d128*"),
        Rule(tile(8, 2, BLOCK_M=64, BLOCK_N=32), shape="d96*"),
        Rule(tile(4, 2, BLOCK_M=64, BLOCK_N=32)),
    ),
    "attention_bwd_dkdv": (
        Rule(tile(8, 1, BLOCK_M=32, BLOCK_N=32), bits="32"),
        Rule(tile(8, 2, BLOCK_M=32, BLOCK_N=128), sm=(90, 100), shape="d128*"),
        Rule(tile(8, 2, BLOCK_M=64, BLOCK_N=128), sm=(90, 100), shape="*nlong"),
        Rule(tile(4, 3, BLOCK_M=64, BLOCK_N=64), sm=(90, 100)),
        Rule(tile(8, 2, BLOCK_M=32, BLOCK_N=32), sm=(120,), shape="d128*"),
        Rule(tile(4, 2, BLOCK_M=16, BLOCK_N=64), sm=(120,), shape="d32*"),
        Rule(tile(4, 2, BLOCK_M=16, BLOCK_N=32), shape="d128*"),
        Rule(tile(8, 2, BLOCK_M=32, BLOCK_N=64), shape="d96*"),
        Rule(tile(4, 2, BLOCK_M=16, BLOCK_N=64), shape="d80*"),
        Rule(tile(4, 2, BLOCK_M=32, BLOCK_N=64)),
    ),
    # Shape classes: "u8-even-large", see patch_embed.shape_class. PROGRAMS: how many the split of the rows aims at.
    "patch_embed_fwd": (
        Rule(tile(4, 3, BLOCK_M=64, BLOCK_D=64, BLOCK_K=16), bits="32", shape="f32-even-*"),
        Rule(tile(4, 3, BLOCK_M=32, BLOCK_D=64, BLOCK_K=16), bits="32", shape="u8-*"),
        Rule(tile(4, 3, BLOCK_M=32, BLOCK_D=64, BLOCK_K=32), bits="32"),
        Rule(tile(8, 4, BLOCK_M=128, BLOCK_D=256, BLOCK_K=32), sm=(90,), shape="f32-odd-large"),
        Rule(tile(8, 3, BLOCK_M=128, BLOCK_D=256, BLOCK_K=64), sm=(90, 100), shape="*-large"),
        Rule(tile(8, 4, BLOCK_M=128, BLOCK_D=128, BLOCK_K=32), sm=(80,), shape="*-large"),
        Rule(tile(8, 3, BLOCK_M=128, BLOCK_D=128, BLOCK_K=32), shape="*-large"),
        Rule(tile(4, 3, BLOCK_M=64, BLOCK_D=64, BLOCK_K=64)),
    ),
    "patch_embed_dweight": (
        Rule(tile(4, 3, BLOCK_M=16, BLOCK_D=64, BLOCK_K=64, PROGRAMS=264), bits="32", shape="u8-*"),
        Rule(tile(4, 3, BLOCK_M=32, BLOCK_D=64, BLOCK_K=64, PROGRAMS=264), bits="32"),
        Rule(tile(8, 3, BLOCK_M=64, BLOCK_D=256, BLOCK_K=128, PROGRAMS=132), sm=(90,), shape="*-large"),
        Rule(tile(8, 2, BLOCK_M=64, BLOCK_D=256, BLOCK_K=128, PROGRAMS=132), sm=(100,), shape="*-large"),
        Rule(tile(8, 3, BLOCK_M=32, BLOCK_D=128, BLOCK_K=128, PROGRAMS=132), shape="*-large"),
        Rule(tile(4, 3, BLOCK_M=32, BLOCK_D=64, BLOCK_K=64, PROGRAMS=264), sm=(80, 89, 120)),
        Rule(tile(4, 3, BLOCK_M=64, BLOCK_D=64, BLOCK_K=64, PROGRAMS=264)),
    ),
    "patch_embed_dimages": (
        Rule(tile(4, 3, BLOCK_M=64, BLOCK_D=32, BLOCK_K=64), bits="32"),
        Rule(tile(8, 3, BLOCK_M=128, BLOCK_D=32, BLOCK_K=128), sm=(89,), shape="*-large"),
        Rule(tile(8, 3, BLOCK_M=128, BLOCK_D=64, BLOCK_K=128), shape="*-large"),
        Rule(tile(4, 3, BLOCK_M=64, BLOCK_D=64, BLOCK_K=32), sm=(80, 89, 120)),
        Rule(tile(4, 3, BLOCK_M=64, BLOCK_D=64, BLOCK_K=64)),
    ),
    # Products, shape class "KxN" (product.py): cuBLAS where no epilogue saves a pass (kernels.md).
    "linear_fwd": _CUBLAS,
    "input_grad": _CUBLAS,
    "linear_gelu_fwd": _PRODUCT,
    "linear_residual_fwd": _PRODUCT,
    "dgelu_matmul": _DGELU,
    "gelu_bwd": (Rule(tile(4, 1, BLOCK_M=64, BLOCK_N=64)),),
    "weight_grad": _CUBLAS,
    "weight_grad_sum": (Rule(tile(4, 1, BLOCK_N=2, BLOCK_K=512)),),
}

# Compiled and read, but run by no GPU yet: no rule may name them. `lookup` takes them from `override` and from the user's
# own table alone, into which the tuner writes them after many checks (trial.py). They leave here once a GPU has run them.
UNCHECKED = ("gluon",)
# Providers that launch no kernel of ours and cannot be compiled offline.
LIBRARIES = ("torch", "cublaslt", *attention_libraries.PROVIDERS)
_TORCH = (Rule(tile(provider="torch")),)
_ATTENTION = tuple(Rule(tile(provider=library)) for library in attention_libraries.PROVIDERS)

_SHORT = "d[1-6][24568]n[1-6]*"  # attention over at most 320 tokens, heads of one part or 32 + 16

# What else can do an operation: the tuner tries it, and `make codegen` compiles it, but nothing runs it unasked. First match for each provider and variant.
RIVALS: dict[str, tuple[Rule, ...]] = {
    "layer_norm_fwd": _TORCH,
    "layer_norm_bwd": _TORCH,
    "attention_fwd": (
        Rule(tile(4, 3, "tiled", BLOCK_M=64, BLOCK_N=64), sm=(90,), bits="16"),
        Rule(tile(8, 3, "tiled", BLOCK_M=128, BLOCK_N=64), sm=(100,), bits="16"),
        *_ATTENTION,
    ),
    "attention_bwd": (
        *(
            Rule(tile(warps, 1, "head", registers, BLOCK_M=64, BLOCK_N=keys, STAGES=2, PER_SM=programs, EXACT=exact), (90,), "16", _SHORT, variant)
            for variant, warps, registers, keys, programs, exact in (("exact", 4, 248, 64, 2, 1), ("wide", 8, 0, 128, 1, 0))
        ),
        Rule(tile(4, 2, "phases", BLOCK_M1=64, BLOCK_N1=64, BLOCK_M2=32, BLOCK_N2=64), sm=(90,), bits="16", shape=_SHORT),
        Rule(tile(provider="tiled")),
        *_ATTENTION,
    ),
    "linear_fwd": _PRODUCT + _TMA + _WIDE,
    "input_grad": _PRODUCT + _TMA + _WIDE,
    "linear_gelu_fwd": _CUBLAS + _TMA + _WIDE + _GLUON,
    "linear_residual_fwd": (*_CUBLAS, Rule(tile(provider="cublaslt"), bits="16"), *_TMA, *_WIDE),
    "dgelu_matmul": _CUBLAS + _DGELU_TMA + _WIDE + _GLUON,
    "gelu_bwd": _TORCH,
    "patch_embed_fwd": _CUBLAS,
    "patch_embed_dweight": _CUBLAS,
    "patch_embed_dimages": _CUBLAS,
    # SPLIT_K: the tiles times it fill whole waves of two programs on each of 132 multiprocessors (36, 108 and 144 tiles x 7;
    # 64 and 192 x 4), or of one, where they are wide (18, 54 and 72 x 7; 32, 96 and 128 x 4).
    "weight_grad": (
        *(
            Rule(
                tile(8, 3, provider, BLOCK_M=64, BLOCK_N=128, BLOCK_K=128, GROUP_N=8, SPLIT_K=splits, SUBTILES=4),
                sm=(90, 100),
                bits="16",
                shape=shape,
            )
            for provider in ("triton", "tma")
            for shape, splits in (("1024x*", 4), ("*", 7))
        ),
        Rule(tile(4, 4, BLOCK_M=32, BLOCK_N=128, BLOCK_K=128, GROUP_N=8, SPLIT_K=7, SUBTILES=4), bits="16"),
        Rule(tile(4, 3, BLOCK_M=32, BLOCK_N=64, BLOCK_K=64, GROUP_N=8, SPLIT_K=7, SUBTILES=2)),
        *(
            Rule(
                tile(8, 4, provider, BLOCK_M=64, BLOCK_N=128, BLOCK_K=256, GROUP_N=8, SPLIT_K=splits, SUBTILES=4),
                sm=(90, 100),
                bits="16",
                shape=shape,
                variant="wide",
            )
            for provider in ("triton", "tma")
            for shape, splits in (("1024x*", 4), ("*", 7))
        ),
    ),
}


def _fault(op: str, value: Tile, blocks: bool = True) -> str:
    """Why no launcher of the operation takes this tile: its provider or (`blocks`) the names of its numbers; else ""."""
    known: dict[str, list[set[str]]] = {}
    for rule in (*RULES.get(op, ()), *RIVALS.get(op, ())):
        known.setdefault(rule.tile.provider, []).append({name for name, _ in rule.tile.blocks})
    if value.provider not in known:
        return f"{op} has no provider {value.provider!r}, only {', '.join(known)}" if known else f"no operation {op!r}"
    names, wanted = {name for name, _ in value.blocks}, known[value.provider]
    if blocks and names not in wanted:
        spelt = lambda names: " ".join(sorted(names)) or "no numbers"  # noqa: E731
        return f"{op} by {value.provider} takes {spelt(wanted[0])}, not {spelt(names)}"
    return ""


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


def capability(device: torch.device) -> int:
    """90 for compute capability 9.0: what Triton compiles for."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def _generation(index: int) -> int:
    exact = capability(torch.device("cuda", index))
    return max((sm for sm in GENERATIONS if sm <= exact), default=0)


def generation(device: torch.device) -> int:
    """80, 89, 90, 100 or 120 (0: older than any of them); tensors without a GPU take sm_90's tiles."""
    if _target is not None:
        return _target
    return _generation(device.index if device.index is not None else torch.cuda.current_device()) if device.type == "cuda" else 90


_overrides: dict[tuple[str, str | None], Tile] = {}
_watched: dict[tuple[str, str, str], Tile] | None = None


@contextlib.contextmanager
def override(op: str, value: Tile, shape: str | None = None) -> Iterator[None]:
    """Uses one tile for the launches of `op` inside (of one shape class, where given): for tuning and for tests.

    Raises ValueError for an operation or a provider that does not exist.
    """
    if fault := _fault(op, value, blocks=False):
        raise ValueError(f"tiles.override: {fault}")
    before = dict(_overrides)
    _overrides[op, shape] = value
    try:
        yield
    finally:
        _overrides.clear()
        _overrides.update(before)


@contextlib.contextmanager
def watching() -> Iterator[dict[tuple[str, str, str], Tile]]:
    """Collects which tile each (operation, bits, shape class) takes inside."""
    global _watched
    before, _watched = _watched, {}
    try:
        yield _watched
    finally:
        _watched = before


def user_table_path() -> Path:
    """Where the user's own table lies."""
    return Path(os.environ.get("VITFAST_TILES") or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vitfast" / "tiles.json")


@functools.cache
def _user_table() -> dict[tuple[str, str, str, str], Tile]:
    """(op, GPU name, bits, shape class) -> Tile, as the tuning script wrote them, without those no launcher takes."""
    path = user_table_path()
    if not path.is_file():
        return {}
    try:
        rows = json.loads(path.read_text())["tiles"]
        found = {(r["op"], r["gpu"], r["bits"], r["shape"]): from_row(r) for r in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the tile table {path} is damaged ({error}); remove it") from None
    return {key: value for key, value in found.items() if not _left_out(path, key, value)}


@functools.cache
def _left_out(path: Path, key: tuple[str, str, str, str], value: Tile) -> bool:
    """Whether no launcher takes a row of the user's table, of another version of vitfast; warns of it, once."""
    op, gpu, bits, shape = key
    if fault := _fault(op, value):
        row = f"the row of {op} at {shape}, {bits} bits, {gpu}, is left out: run vitfast tune again, or remove it"
        warnings.warn(f"the tile table {path}: {fault}; {row}", stacklevel=2)
    return bool(fault)


def reload_user_table() -> None:
    """Reads the user's own table again where it has changed."""
    _user_table.cache_clear()


def lookup(op: str, x: torch.Tensor, shape: str, without: tuple[str, ...] = ()) -> Tile:
    """The tile of an operation for x's device and dtype at a shape class such as "d64" or "768x3072".

    Where the user's table names a library that cannot run on x (another dtype, a package since removed), the first rule
    that can is taken; inside `override` that is an error, so that nothing is timed or tested under another's name.
    without: providers that lack what this call asks for beyond its shape class, as cublaslt lacks a layer scale: the first
    other rule is taken, inside `override` too, since what it covers has calls with and without; `watching` tells which ran.
    """
    forced = (_overrides.get((op, shape)) or _overrides.get((op, None))) if _overrides else None
    found = forced or _find(op, x, shape)
    reason = _unsupported_reason(op, found.provider, x)
    if reason and forced:
        raise RuntimeError(f"{op}: {found.provider} cannot run here: {reason}")
    if reason or found.provider in without:
        usable = (r.tile for r in _matching(RULES[op], x, shape) if r.tile.provider not in (*UNCHECKED, *without))
        found = next(tile for tile in usable if not _unsupported_reason(op, tile.provider, x))
    if _watched is not None:
        _watched[op, _bits(x), shape] = found
    return found


def _unsupported_reason(op: str, provider: str, x: torch.Tensor) -> str | None:
    """Why a library, or Gluon, cannot do the operation on x; None where it can, and for our other kernels and cuBLAS."""
    if provider == "gluon":
        return gluon_names.unsupported_reason(x, generation(x.device))
    if provider not in LIBRARIES:
        return None
    if _target is not None or x.device.type == "meta":
        return "libraries are not compiled offline"
    if provider == "cublaslt":
        return cublaslt.unsupported_reason(x)
    return None if provider == "torch" else attention_libraries.unsupported_reason(provider, x, op == "attention_bwd")


def _bits(x: torch.Tensor) -> str:
    return "32" if x.dtype == torch.float32 else "16"


def _matching(rules: tuple[Rule, ...], x: torch.Tensor, shape: str) -> Iterator[Rule]:
    sm = generation(x.device)
    return (rule for rule in rules if sm in rule.sm and rule.bits in ("*", _bits(x)) and fnmatch.fnmatchcase(shape, rule.shape))


@functools.cache
def _gpu_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


def _find(op: str, x: torch.Tensor, shape: str) -> Tile:
    if x.is_cuda and _target is None and _user_table():
        found = _user_table().get((op, _gpu_name(x.device.index), _bits(x), shape))
        if found:
            return found
    return shipped(op, x, shape)


# (operation, generation, bits, shape class) -> the rules that were searched, and what was found: a launcher asks at every call.
_shipped: dict[tuple[str, int, str, str], tuple[tuple[Rule, ...], Tile]] = {}


def shipped(op: str, x: torch.Tensor, shape: str) -> Tile:
    """The tile of the rules, whatever the user's own table says."""
    key = op, generation(x.device), _bits(x), shape
    known = _shipped.get(key)
    if known is not None and known[0] is RULES[op]:
        return known[1]
    for rule in _matching(RULES[op], x, shape):
        if rule.tile.provider not in UNCHECKED:
            _shipped[key] = RULES[op], rule.tile
            return rule.tile
    raise KeyError(f"no tile for {op} on sm_{generation(x.device)}, {_bits(x)} bits, shape {shape}")


def rivals(op: str, x: torch.Tensor, shape: str, unchecked: bool = False) -> list[Tile]:
    """What else could do on x's device what `lookup` leaves to one tile: the first of each other provider and variant.

    unchecked: those of UNCHECKED too, for who only compiles them, or checks them before anything else.
    """
    found = {(shipped(op, x, shape).provider, ""): shipped(op, x, shape)}
    for rule in _matching(RIVALS.get(op, ()), x, shape):
        found.setdefault((rule.tile.provider, rule.variant), rule.tile)
    now, out = lookup(op, x, shape), (*absent(op, x, shape), *(() if unchecked else UNCHECKED))
    found.pop((now.provider, ""), None)
    return [tile for tile in dict.fromkeys(found.values()) if tile != now and tile.provider not in out]


def absent(op: str, x: torch.Tensor, shape: str) -> dict[str, str]:
    """What does the operation, but not on x, of libraries and Gluon, and why: {"flash_attn_3": "not installed"}."""
    rules = _matching((*RULES[op], *RIVALS.get(op, ())), x, shape)
    reasons = {provider: _unsupported_reason(op, provider, x) for provider in dict.fromkeys(rule.tile.provider for rule in rules)}
    return {provider: reason for provider, reason in reasons.items() if reason}


def as_row(op: str, gpu: str, bits: str, shape: str, value: Tile) -> dict:
    """A row of the user's table."""
    row = dataclasses.asdict(value) | {"blocks": dict(value.blocks)}
    return dict(op=op, gpu=gpu, bits=bits, shape=shape, **row)


def from_row(row: dict) -> Tile:
    """The tile of a row of the user's table."""
    return tile(row["num_warps"], row["num_stages"], row["provider"], row.get("maxnreg", 0), **row["blocks"])
