"""Tiles of matrix products and of what is fused around them."""

import dataclasses

from .tiles import KernelConfig, Rule, config


def _product(
    warps: int,
    stages: int,
    m: int,
    n: int,
    k: int,
    subtiles: int,
    provider: str = "triton",
    maxnreg: int = 0,
    ahead: int = 2,
) -> KernelConfig:
    """The configuration of a product in blocks of m rows and n columns, k numbers of the sums at a time.

    ahead: how many steps before its use the persistent product reads what its epilogue needs, or 0.
    """
    blocks = dict(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k) | (dict(AHEAD=ahead) if provider == "persistent" else {})
    return config(warps, stages, provider, maxnreg, **blocks, GROUP_M=8, SUBTILES=subtiles)


# The epilogue takes the product in SUBTILES pieces, so that two programs fit a multiprocessor and nothing spills.
_PRODUCT = (
    Rule(_product(8, 3, 128, 128, 64, 4), sm=(90, 100), bits="16"),
    Rule(_product(4, 4, 128, 128, 32, 4), bits="16"),
    Rule(_product(4, 3, 64, 64, 32, 2)),
)
_TMA = (Rule(_product(8, 3, 128, 128, 64, 4, "tma"), sm=(90, 100), bits="16"),)
# A program for each multiprocessor, whose loads for the next block hide the epilogue of this one. An H100 measured at
# ViT-B/16, batch 256, with two loops that Triton flattens ("flattened", blocks of 128 x 256): fc1 + GELU 482 us (the
# pointers above 563, descriptors 517, cuBLAS and a GELU 560), fc2 and its residual 329 (descriptors and a program for
# each block 415, cuBLASLt 320), proj and its residual 132 (139, 116). One loop ("persistent") issues a third to a half
# fewer instructions outside the product (counted, not timed; persistent.py). What is read ahead takes the shared memory
# of a fourth stage, and leaves room for a quarter of the result.
_FLAT = tuple(
    Rule(_product(8, 4, 128, 256, 64, pieces, "flattened"), sm=(90,), bits="16", variant=f"{pieces}")
    for pieces in (2, 4)
)
_PERSISTENT = (Rule(_product(8, 3, 128, 256, 64, 4, "persistent"), sm=(90,), bits="16"),)
# One image through B/16 on an H200, as a CUDA graph: 605 us with fc2 by cuBLAS, which splits the sum, 544 with proj as
# well, 497 with fc1 too and PyTorch's GELU (850 with all three by _PRODUCT; bench/results/h200/few_rows.json).
_FEW_ROWS = (Rule(config(provider="cublas"), sm=(90,), bits="16", shape="*f"),)
_MANY_ROWS = (Rule(_PERSISTENT[0].config, sm=(90,), bits="16", shape="*[0-9]"),)
_GELU = (Rule(_product(8, 4, 128, 256, 64, 2, "persistent"), sm=(90,), bits="16", shape="*[0-9]"),)
# Blocks of 128 x 128 run two programs on a multiprocessor, one's epilogue under the other's product. Flattened, they
# were faster only where 256 columns do not fit, as in S/16: fc2 and its residual 271 us (in blocks of 256 305), proj
# 105 (113). What is read ahead would leave room for one program.
_NARROW = (Rule(_product(8, 3, 128, 128, 64, 4, "persistent", ahead=0), sm=(90,), bits="16", shape="*x384"),)
# These read three quarters as much from L2, but only one program fits a multiprocessor, so nothing hides its epilogue.
_WIDE = tuple(
    Rule(_product(8, 4, 128, 256, 64, 4, provider), sm=(90, 100), bits="16", variant="wide")
    for provider in ("triton", "tma")
)
# Where BLOCK_K does not divide K, masks would spill: some tiles are for the widths of models only.
_WIDTHS = "192x* 256x* 384x* 512x* 576x* 640x* 768x* 896x* 1024x* 1152x* 1280x* 1408x* 1536x* 1664x*"
# With 128 registers two programs fit; left to itself, ptxas takes up to 134 (Triton 3.6).
_DGELU = (Rule(_product(8, 3, 128, 128, 64, 4, maxnreg=128), sm=(90,), bits="16", shape=_WIDTHS), *_PRODUCT)
# On an H100 (as above, act not written), with descriptors and a program for each block 569 us in one piece, 573 in two
# and 611 in four; the pointers of _DGELU 726, cuBLAS and a second kernel 704, the flattened loop, which read pre in its
# epilogue, at least 645. One loop that reads pre ahead issues 19 instructions an element outside the product, where
# those of 569 us issued 33 (counted, not timed), and from the slope ("s") 5. Where act is written ("a"), fewer pieces
# than eight spill; flattened blocks of 128 x 128 took 754 us.
_DGELU_PERSISTENT = tuple(
    Rule(_product(8, 3, 128, 256, 64, pieces, "persistent"), sm=(90,), bits="16", shape=shape)
    for pieces, shape in ((8, "*a"), (4, "*[0-9] *s"))
)
_DGELU_TMA = (Rule(_product(8, 3, 128, 128, 64, 2, "tma", maxnreg=128), sm=(90,), bits="16", shape="*[0-9] *s"),)
# Two products at once have blocks like _PRODUCT's, with half the columns for each. Backward reads and writes two of
# everything, so its blocks are narrower or cut into smaller pieces.
_GATED = (
    Rule(_product(8, 3, 128, 64, 64, 2), sm=(90, 100), bits="16", shape=_WIDTHS),
    Rule(_product(4, 3, 64, 64, 32, 2), bits="16"),
    # In fp32 each of the two would spill on the other's GPUs, with Triton 3.6 or with 3.9.
    Rule(_product(4, 3, 64, 32, 32, 1), sm=(120,)),
    Rule(_product(4, 3, 64, 32, 32, 2)),
)
_DGATED = (
    Rule(_product(8, 3, 128, 128, 64, 8), sm=(90, 100), bits="16"),
    Rule(_product(4, 3, 128, 64, 32, 4), bits="16"),
    _PRODUCT[-1],
)
_CUBLAS = (Rule(config(provider="cublas")),)


def _by_descriptors(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The first of `rules` with provider "tma", for every shape, since descriptors need no masks."""
    return (dataclasses.replace(rules[0], config=dataclasses.replace(rules[0].config, provider="tma"), shape="*"),)


def _split(stages: int, block_k: int, variant: str = "") -> tuple[Rule, ...]:
    """Rules for weight gradients on sm_90 and sm_100, through pointers and through descriptors.

    SPLIT_K times the blocks of the output fill whole waves of two programs on each of 132 multiprocessors (36, 108 and
    144 blocks x 7; 64 and 192 x 4), or of one program where blocks are wide (18, 54 and 72 x 7; 32, 96 and 128 x 4).
    """
    blocks = dict(BLOCK_M=64, BLOCK_N=128, BLOCK_K=block_k, GROUP_N=8, SUBTILES=4)
    return tuple(
        Rule(config(8, stages, provider, SPLIT_K=splits, **blocks), (90, 100), "16", shape, variant)
        for provider in ("triton", "tma")
        for shape, splits in (("1024x*", 4), ("*", 7))
    )


RULES: dict[str, tuple[Rule, ...]] = {
    # Products have shape class "KxN" (product.py). cuBLAS does those in which no epilogue saves a pass over memory.
    "linear_fwd": _CUBLAS,
    "input_grad": _CUBLAS,
    "linear_gelu_fwd": _FEW_ROWS + _GELU + _PRODUCT,
    "linear_residual_fwd": _FEW_ROWS + _NARROW + _MANY_ROWS + _PRODUCT,
    # On sm_89 and sm_120 a wider tile takes all 255 registers, and spills with one of Triton 3.6 and 3.9.
    "dgelu_matmul": (
        Rule(_product(4, 3, 128, 64, 32, 2), sm=(89, 120), bits="16"),
        *_DGELU_PERSISTENT,
        *_DGELU,
    ),
    # Not a launch: what forward keeps of a plain MLP where it keeps all. With the slope, fc1 + GELU takes 20
    # instructions an element in place of 14, and dGELU 5 in place of 19 (counted, not timed).
    "mlp_kept": (Rule(config(provider="pre")),),
    "gelu_bwd": (Rule(config(4, 1, BLOCK_M=64, BLOCK_N=64)),),
    "gated_linear_fwd": _GATED,
    "dgated_matmul": _DGATED,
    "gated_bwd": (Rule(config(4, 1, BLOCK_M=64, BLOCK_N=32)),),
    "weight_grad": _CUBLAS,
    "weight_grad_sum": (Rule(config(4, 1, BLOCK_N=2, BLOCK_K=512)),),
}

_OURS = _PRODUCT + _PERSISTENT + _TMA + _WIDE
CANDIDATES: dict[str, tuple[Rule, ...]] = {
    "linear_fwd": _OURS,
    "input_grad": _OURS,
    "linear_gelu_fwd": _CUBLAS + _OURS + _FLAT[:1],
    "linear_residual_fwd": (*_CUBLAS, Rule(config(provider="cublaslt"), bits="16"), *_OURS, *_FLAT[1:]),
    "dgelu_matmul": _CUBLAS + _DGELU_TMA + _WIDE[:1],  # where act is written, descriptors without a loop spill
    "mlp_kept": (Rule(config(provider="slope"), bits="16"),),
    "gated_linear_fwd": _CUBLAS + _by_descriptors(_GATED),
    "dgated_matmul": _CUBLAS + _by_descriptors(_DGATED),
    "weight_grad": (
        *_split(stages=3, block_k=128),
        Rule(config(4, 4, BLOCK_M=32, BLOCK_N=128, BLOCK_K=128, GROUP_N=8, SPLIT_K=7, SUBTILES=4), bits="16"),
        Rule(config(4, 3, BLOCK_M=32, BLOCK_N=64, BLOCK_K=64, GROUP_N=8, SPLIT_K=7, SUBTILES=2)),
        *_split(stages=4, block_k=256, variant="wide"),
    ),
}
