"""Launch configurations of matrix products and of what is fused around them.

Products have shape class "KxN", with an "f" for few rows (product.py). cuBLAS does those in which no epilogue saves a
pass over memory. An epilogue takes a product in SUBTILES pieces, so that two programs fit a multiprocessor and nothing
spills.
"""

from dataclasses import replace

from ..tiles import KernelConfig, config

CUBLAS = config(provider="cublas")


def _product(
    warps: int, stages: int, m: int, n: int, k: int, subtiles: int, provider: str = "triton", **more: int
) -> KernelConfig:
    """A product in blocks of m rows and n columns, k numbers of the sums at a time."""
    return config(warps, stages, provider, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=8, SUBTILES=subtiles, **more)


# Blocks of 256 columns read three quarters as much from L2, but only one program fits a multiprocessor.
WIDE = _product(8, 4, 128, 256, 64, 4)


def _persistent(pieces: int, stages: int = 3, columns: int = 256, ahead: int = 2) -> KernelConfig:
    """A program for each multiprocessor, whose loads for the next block hide the epilogue of this one.

    ahead: how many steps before its use it reads what its epilogue needs, or 0. What is read ahead takes the shared
    memory of a fourth stage, and leaves room for a quarter of the result.
    """
    return _product(8, stages, 128, columns, 64, pieces, "persistent", AHEAD=ahead)


def _pointers(bits: str, sm: int) -> KernelConfig:
    large = _product(8, 3, 128, 128, 64, 4) if sm in (90, 100) else _product(4, 4, 128, 128, 32, 4)
    return large if bits == "16" else _product(4, 3, 64, 64, 32, 2)


def _unmasked(shape: str) -> bool:
    """Whether a BLOCK_K of 64 divides K. Elsewhere masks would spill."""
    return int(shape.partition("x")[0]) % 64 == 0


def _linear(shape: str, bits: str, sm: int, best: KernelConfig = CUBLAS, pieces: int = 0) -> list[KernelConfig]:
    """A product by `best` and by all others; pieces: of the result in the flattened loop, if it has one."""
    pointers = _pointers(bits, sm)
    if bits == "32" or sm not in (90, 100):
        return [best, pointers, CUBLAS]
    found = [best, pointers, CUBLAS, WIDE, *(replace(config, provider="tma") for config in (pointers, WIDE))]
    loops = [] if best.provider == "persistent" else [_persistent(4)]
    flattened = [_product(8, 4, 128, 256, 64, pieces, "flattened")] if pieces else []
    return [*found, *loops, *flattened] if sm == 90 else found


def linear_gelu_fwd(shape: str, bits: str, sm: int) -> list[KernelConfig]:
    """fc1 + GELU: 482 us in two loops that Triton flattens, on an H100 at ViT-B/16, batch 256.

    The pointers took 563, descriptors 517, cuBLAS and a GELU 560. One loop ("persistent") issues a third to a half
    fewer instructions outside the product (counted, not timed; persistent.py).

    One image through B/16 on an H200, as a CUDA graph: 605 us with fc2 by cuBLAS, which splits the sum, 544 with proj
    as well, 497 with fc1 too and PyTorch's GELU (850 with all three by pointers; bench/results/h200/few_rows.json).
    """
    best = CUBLAS if shape.endswith("f") else _persistent(2, stages=4)
    return _linear(shape, bits, sm, best if sm == 90 and bits == "16" else _pointers(bits, sm), pieces=2)


def linear_residual_fwd(shape: str, bits: str, sm: int) -> list[KernelConfig]:
    """fc2 and its residual: flattened 329 us, where it was measured as above; cuBLASLt 320.

    Descriptors and a program for each block took 415. proj and its residual took 132 (139, 116). Blocks of 128 x 128
    run two programs on a multiprocessor, one's epilogue under the other's product. Flattened, they were faster only
    where 256 columns do not fit, as in S/16: fc2 and its residual 271 us (in blocks of 256 305), proj 105 (113). What
    is read ahead would leave room for one program.
    """
    narrow = shape.endswith("x384")
    best = CUBLAS if shape.endswith("f") else _persistent(4, columns=128, ahead=0) if narrow else _persistent(4)
    return _linear(shape, bits, sm, best if sm == 90 and bits == "16" else _pointers(bits, sm), pieces=4)


def dgelu_matmul(shape: str, bits: str, sm: int) -> list[KernelConfig]:
    """dGELU: by descriptors, a program for each block, 569 us in one piece, as above, act not written.

    In two pieces it was 573 and in four 611; the pointers 726, cuBLAS and a second kernel 704, the flattened loop,
    which read pre in its epilogue, at least 645. One loop that reads pre ahead issues 19 instructions an element
    outside the product, where those of 569 us issued 33 (counted, not timed), and from the slope ("s") 5. Where act is
    written ("a"), fewer pieces than eight spill, and so do descriptors without a loop; flattened blocks of 128 x 128
    took 754.
    """
    pointers, act = _pointers(bits, sm), shape.endswith("a")
    if bits == "32" or sm not in (90, 100):
        # A wider tile takes all 255 registers on sm_89 and sm_120, and spills with one of Triton 3.6 and 3.9.
        return [_product(4, 3, 128, 64, 32, 2) if bits == "16" and sm != 80 else pointers, CUBLAS]
    if sm == 100:
        return [pointers, CUBLAS, WIDE]
    # With 128 registers two programs fit; left to itself, ptxas takes up to 134 (Triton 3.6).
    pointers = replace(pointers, maxnreg=128) if _unmasked(shape) else pointers
    described = [] if act else [_product(8, 3, 128, 128, 64, 2, "tma", maxnreg=128)]
    return [_persistent(8 if act else 4), pointers, CUBLAS, WIDE, *described]


def _gated(best: KernelConfig, widest: KernelConfig, bits: str, sm: int) -> list[KernelConfig]:
    """Descriptors need no masks, so they take the widest blocks for every shape."""
    return [best, CUBLAS, *([replace(widest, provider="tma")] if bits == "16" and sm in (90, 100) else [])]


def gated_linear_fwd(shape: str, bits: str, sm: int) -> list[KernelConfig]:
    """Two products at once have blocks like one product's, with half the columns for each."""
    widest = _product(8, 3, 128, 64, 64, 2)
    half = widest if sm in (90, 100) and _unmasked(shape) else _product(4, 3, 64, 64, 32, 2)
    # In fp32 each of the two would spill on the other's GPUs, with Triton 3.6 or with 3.9.
    return _gated(half if bits == "16" else _product(4, 3, 64, 32, 32, 1 if sm == 120 else 2), widest, bits, sm)


def dgated_matmul(shape: str, bits: str, sm: int) -> list[KernelConfig]:
    """It reads and writes two of everything, so its blocks are narrower or cut into smaller pieces."""
    half = _product(8, 3, 128, 128, 64, 8) if sm in (90, 100) else _product(4, 3, 128, 64, 32, 4)
    return _gated(half if bits == "16" else _pointers(bits, sm), half, bits, sm)


def mlp_kept(shape: str, bits: str, sm: int) -> list[KernelConfig]:
    """Not a launch: what forward keeps of a plain MLP where it keeps all.

    With the slope, fc1 + GELU takes 20 instructions an element in place of 14, and dGELU 5 in place of 19 (counted, not
    timed).
    """
    return [config(provider=kept) for kept in (("pre", "slope") if bits == "16" else ("pre",))]


OPERATIONS = {
    "linear_fwd": _linear,
    "input_grad": _linear,
    "linear_gelu_fwd": linear_gelu_fwd,
    "linear_residual_fwd": linear_residual_fwd,
    "mlp_kept": mlp_kept,
    "dgelu_matmul": dgelu_matmul,
    "gelu_bwd": lambda *_: [config(4, 1, BLOCK_M=64, BLOCK_N=64)],
    "gated_linear_fwd": gated_linear_fwd,
    "dgated_matmul": dgated_matmul,
    "gated_bwd": lambda *_: [config(4, 1, BLOCK_M=64, BLOCK_N=32)],
    "scaled_weight_grad": lambda *_: [config(4, 1, BLOCK_N=2, BLOCK_K=512)],
}
