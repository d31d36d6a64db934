"""One launch configuration of a kernel, and the rule that says where it applies."""

import functools
from dataclasses import dataclass

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
    """A tile and where it applies: GPU generations, bits of the dtype and shape classes.

    bits: "32", "16", or "*" for both; shape: a pattern (fnmatch). variant: of CANDIDATES, tells several tiles of one
    provider apart.
    """

    tile: Tile
    sm: tuple[int, ...] = GENERATIONS
    bits: str = "*"
    shape: str = "*"
    variant: str = ""
