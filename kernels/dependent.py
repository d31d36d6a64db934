"""Programmatic dependent launch: a kernel begins while the one before it on the stream ends.

See "Programmatic Dependent Launch and Synchronization" in the CUDA C++ Programming Guide. It saves most of the time
between two short kernels, on sm_90 and newer. A kernel that takes PDL=True keeps three rules:

- Before `wait_for_kernel_before` it writes nothing, and reads nothing but addresses: what it reads may not be written
  yet, what it writes may still be read. It may ask for weights (`ask_for_rows`), which brings them into L2, where they
  are seen as they are when they are read.
- Every program waits, so that the end of a kernel is also the end of all kernels before it.
- It lets the next kernel begin after it has waited, so that no more than two run at once.
"""

import os

import triton
import triton.language as tl
from torch import Tensor

from .launch import INTERPRETED
from .tiles import generation

MOST_ROWS = 1024  # rows up to which kernels are so short that it pays
enabled = os.environ.get("VITFAST_PDL", "1") != "0"


@triton.jit
def wait_for_kernel_before(PDL: tl.constexpr):
    """Waits until all that the kernels before this one wrote can be read, then lets the next one begin."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def ask_for_rows(ptr, first, ROWS: tl.constexpr, height, stride, start, WIDTH: tl.constexpr, width, PDL: tl.constexpr):
    """Asks for ROWS rows from `first` on, WIDTH columns from `start` on, of a matrix (height, width).

    They come into L2, and nothing is read. Rows and columns outside are replaced by the last ones. WIDTH is a power of
    2. A line has 128 bytes, 64 numbers of 16 bits.
    """
    if PDL:
        rows = tl.minimum(first + tl.arange(0, ROWS), height - 1).to(tl.int64)
        cols = tl.minimum(start + tl.arange(0, max(1, WIDTH // 64)) * 64, width - 1)
        address = (ptr + (rows[:, None] * stride + cols[None, :])).to(tl.uint64, bitcast=True)
        asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
        tl.inline_asm_elementwise(asm, "=r,l", [address], dtype=tl.uint32, is_pure=False, pack=1)


def dependent_launch(x: Tensor) -> dict[str, bool]:
    """The arguments of a launch on x's device: PDL, and launch_pdl where it is on.

    It is on where a GPU has it and VITFAST_PDL is not 0.
    """
    on = enabled and not INTERPRETED and generation(x.device) >= 90
    return dict(PDL=True, launch_pdl=True) if on else dict(PDL=False)
