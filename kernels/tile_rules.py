"""Frozen tile configurations per operation, GPU generation, dtype and shape class.

Chosen by measurement (or, where none is at hand yet, by offline compilation: no spills, shared memory within the
limit). Data only; the first rule that matches wins. tiles.py looks them up.
"""

import dataclasses

from . import attention_libraries, attention_rules
from .tile import GENERATIONS, SHARED_LIMIT, Rule, Tile, tile

__all__ = ["CANDIDATES", "GENERATIONS", "LIBRARIES", "RULES", "SHARED_LIMIT", "UNCHECKED", "Rule", "Tile", "tile"]

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
# Where BLOCK_K does not divide K, masks would spill: some tiles are for the widths of models only.
_WIDTHS = (192, 256, 384, 512, 576, 640, 768, 896, 1024, 1152, 1280, 1408, 1536, 1664)
# With 128 registers two programs fit; left to itself, ptxas takes up to 134 (Triton 3.6).
_DGELU, _DGELU_TMA = (
    tuple(
        Rule(
            tile(8, 3, provider, maxnreg=128, BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP_M=8, SUBTILES=4),
            sm=(90,),
            bits="16",
            shape=f"{k}x*",
        )
        for k in _WIDTHS
    )
    + rules
    for provider, rules in (("triton", _PRODUCT), ("tma", _TMA))
)
# Two products at once: the blocks and sums of _PRODUCT with half the columns for each. Backward reads and writes two of
# everything: narrower, or in smaller pieces.
_GATED = (
    *(
        Rule(
            tile(8, 3, BLOCK_M=128, BLOCK_N=64, BLOCK_K=64, GROUP_M=8, SUBTILES=2),
            sm=(90, 100),
            bits="16",
            shape=f"{k}x*",
        )
        for k in _WIDTHS
    ),
    Rule(tile(4, 3, BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, GROUP_M=8, SUBTILES=2), bits="16"),
    # In fp32 each of the two spills with one of Triton 3.6 and 3.9 where the other stands.
    Rule(tile(4, 3, BLOCK_M=64, BLOCK_N=32, BLOCK_K=32, GROUP_M=8, SUBTILES=1), sm=(120,)),
    Rule(tile(4, 3, BLOCK_M=64, BLOCK_N=32, BLOCK_K=32, GROUP_M=8, SUBTILES=2)),
)
_DGATED = (
    Rule(tile(8, 3, BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP_M=8, SUBTILES=8), sm=(90, 100), bits="16"),
    Rule(tile(4, 3, BLOCK_M=128, BLOCK_N=64, BLOCK_K=32, GROUP_M=8, SUBTILES=4), bits="16"),
    _PRODUCT[-1],
)
_CUBLAS = (Rule(tile(provider="cublas")),)


def _by_descriptors(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The first of some rules for a product, for sm_90 and newer, with "tma", which needs no masks."""
    return (dataclasses.replace(rules[0], tile=dataclasses.replace(rules[0].tile, provider="tma"), shape="*"),)


def _split(stages: int, block_k: int, variant: str = "") -> tuple[Rule, ...]:
    """Weight gradients for sm_90 and newer, through pointers and descriptors.

    SPLIT_K: the blocks of the output times it fill whole waves of two programs on each of 132 multiprocessors (36, 108
    and 144 blocks x 7; 64 and 192 x 4), or of one, where they are wide (18, 54 and 72 x 7; 32, 96 and 128 x 4).
    """
    blocks = dict(BLOCK_M=64, BLOCK_N=128, BLOCK_K=block_k, GROUP_N=8, SUBTILES=4)
    return tuple(
        Rule(tile(8, stages, provider, SPLIT_K=splits, **blocks), (90, 100), "16", shape, variant)
        for provider in ("triton", "tma")
        for shape, splits in (("1024x*", 4), ("*", 7))
    )


RULES: dict[str, tuple[Rule, ...]] = {
    # Shape classes of LayerNorm: chunks x BLOCK_D of the row (rows.layer_norm_class), with an "a" where a residual
    # (backward: its gradient) is added, an "s" where backward sums for a layer scale.
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
    **attention_rules.RULES,
    # Shape classes: "u8-even-large", see patches.patch_class. PROGRAMS: how many the split of the rows aims at.
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
        Rule(tile(8, 3, BLOCK_M=128, BLOCK_D=64, BLOCK_K=64), sm=(120,), shape="*-large"),
        Rule(tile(8, 3, BLOCK_M=128, BLOCK_D=64, BLOCK_K=128), shape="*-large"),
        Rule(tile(4, 3, BLOCK_M=64, BLOCK_D=64, BLOCK_K=32), sm=(80, 89, 120)),
        Rule(tile(4, 3, BLOCK_M=64, BLOCK_D=64, BLOCK_K=64)),
    ),
    # Products, shape class "KxN" (product.py): cuBLAS where no epilogue saves a pass (kernels.md).
    "linear_fwd": _CUBLAS,
    "input_grad": _CUBLAS,
    "linear_gelu_fwd": _PRODUCT,
    "linear_residual_fwd": _PRODUCT,
    # A wider tile takes all of 255 registers there, and spills with one of Triton 3.6 and 3.9.
    "dgelu_matmul": (
        Rule(tile(4, 3, BLOCK_M=128, BLOCK_N=64, BLOCK_K=32, GROUP_M=8, SUBTILES=2), sm=(89, 120), bits="16"),
        *_DGELU,
    ),
    "gelu_bwd": (Rule(tile(4, 1, BLOCK_M=64, BLOCK_N=64)),),
    "gated_linear_fwd": _GATED,
    "dgated_matmul": _DGATED,
    "gated_bwd": (Rule(tile(4, 1, BLOCK_M=64, BLOCK_N=32)),),
    "weight_grad": _CUBLAS,
    "weight_grad_sum": (Rule(tile(4, 1, BLOCK_N=2, BLOCK_K=512)),),
}

# Compiled and read, but run by no GPU yet: no rule may name them. `lookup` takes them from `override` and from the
# user's own table alone, into which the tuner writes them after many checks (trial.py). They leave here once a GPU has
# run them.
UNCHECKED = ("gluon",)
# Providers that launch no kernel of ours and cannot be compiled offline.
LIBRARIES = ("torch", "cublaslt", *attention_libraries.PROVIDERS)
_TORCH = (Rule(tile(provider="torch")),)

# Other tiles that can do an operation: the tuner tries them and `make codegen` compiles them, but nothing runs them
# unasked. First match for each provider and variant.
CANDIDATES: dict[str, tuple[Rule, ...]] = {
    "layer_norm_fwd": _TORCH,
    "layer_norm_bwd": _TORCH,
    **attention_rules.CANDIDATES,
    "linear_fwd": _PRODUCT + _TMA + _WIDE,
    "input_grad": _PRODUCT + _TMA + _WIDE,
    "linear_gelu_fwd": _CUBLAS + _TMA + _WIDE + _GLUON,
    "linear_residual_fwd": (*_CUBLAS, Rule(tile(provider="cublaslt"), bits="16"), *_TMA, *_WIDE),
    "dgelu_matmul": _CUBLAS + _DGELU_TMA + _WIDE + _GLUON,
    "gelu_bwd": _TORCH,
    "gated_linear_fwd": _CUBLAS + _by_descriptors(_GATED),
    "dgated_matmul": _CUBLAS + _by_descriptors(_DGATED),
    "gated_bwd": _TORCH,
    "patch_embed_fwd": _CUBLAS,
    "patch_embed_dweight": _CUBLAS,
    "patch_embed_dimages": _CUBLAS,
    "weight_grad": (
        *_split(stages=3, block_k=128),
        Rule(tile(4, 4, BLOCK_M=32, BLOCK_N=128, BLOCK_K=128, GROUP_N=8, SPLIT_K=7, SUBTILES=4), bits="16"),
        Rule(tile(4, 3, BLOCK_M=32, BLOCK_N=64, BLOCK_K=64, GROUP_N=8, SPLIT_K=7, SUBTILES=2)),
        *_split(stages=4, block_k=256, variant="wide"),
    ),
}
