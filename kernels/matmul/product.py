"""The tiled matrix product that linear.py, gated.py and mlp.py wrap an epilogue around.

Programs run in groups of row blocks that share the right operand's columns in L2 (Triton's tutorial 03). Operands are
read through pointers or, with providers "tma" and "persistent" on sm_90 and newer, through tensor descriptors: one
thread asks TMA for a whole block, and no register holds addresses or masks (tutorial 09). The epilogue
takes the sums in SUBTILES pieces of columns, one after the other, which takes a fraction of the registers. In quarters,
128 x 128 leaves room for two programs per multiprocessor on sm_90, so that one's epilogue runs during the other's main
loop. With "persistent" there is one program for each multiprocessor, or two where blocks have 128 columns. It goes from
block to block and asks for the next one's operands before the epilogue of this one: on an H100 it takes as long as
cuBLAS for fc1 of ViT-B/16.

Every kernel repeats the list of a configuration's constexprs, since Triton takes them by name. The shape class of a
product is "KxN": the length it sums over and the columns it writes. cuBLAS makes those products in which no epilogue
saves a pass over memory.
"""

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..launch import cdiv, fp32_precision
from ..rows import row_programs
from ..tiles import KernelConfig, config


@triton.jit
def count_blocks(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """How many blocks the output has."""
    return tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)


@triton.jit
def block_offsets(pid, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """(index along M, first row, first column) of block `pid` of the output."""
    blocks_m, blocks_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    # column by column within GROUP_M rows of blocks
    first = pid // (GROUP_M * blocks_n) * GROUP_M
    height = min(blocks_m - first, GROUP_M)
    within = pid % (GROUP_M * blocks_n)
    index_m = first + within % height
    return index_m, index_m * BLOCK_M, within // height * BLOCK_N


@triton.jit
def product(
    a,  # (M, all K): a pointer or a descriptor
    b,  # (all K, N): a pointer or a descriptor
    first,  # row and column that this program begins at
    sizes,  # M, N, K
    strides,  # of a along M, K and of b along K, N
    LOADS: tl.constexpr,  # as `row_product` says
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_M rows and BLOCK_N columns of A B in fp32; zeros outside."""
    first_m, first_n = first[0], first[1]
    K = sizes[2]
    a_strides, b_strides = strides[0], strides[1]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if LOADS == "nn" or LOADS == "nt":
        for k in range(0, K, BLOCK_K):
            if LOADS == "nn":
                acc = tl.dot(a.load([first_m, k]), b.load([k, first_n]), acc, input_precision=PRECISION)
            else:
                acc = tl.dot(a.load([first_m, k]), tl.trans(b.load([first_n, k])), acc, input_precision=PRECISION)
    else:
        offs_m = first_m + tl.arange(0, BLOCK_M).to(tl.int64)
        offs_n = first_n + tl.arange(0, BLOCK_N).to(tl.int64)
        offs_k = tl.arange(0, BLOCK_K)
        at_k = offs_k.to(tl.int64)
        a_ptrs = a + (offs_m[:, None] * a_strides[0] + at_k[None, :] * a_strides[1])
        b_ptrs = b + (at_k[:, None] * b_strides[0] + offs_n[None, :] * b_strides[1])
        mask_m, mask_n = offs_m[:, None] < sizes[0], offs_n[None, :] < sizes[1]
        for k in range(0, K, BLOCK_K):
            if LOADS == "even":
                a_block = tl.load(a_ptrs, mask=mask_m, other=0.0)
                b_block = tl.load(b_ptrs, mask=mask_n, other=0.0)
            else:
                a_block = tl.load(a_ptrs, mask=mask_m & (offs_k[None, :] < K - k), other=0.0)
                b_block = tl.load(b_ptrs, mask=mask_n & (offs_k[:, None] < K - k), other=0.0)
            acc = tl.dot(a_block, b_block, acc, input_precision=PRECISION)
            a_ptrs += BLOCK_K * a_strides[1]
            b_ptrs += BLOCK_K * b_strides[0]
    return acc


@triton.jit
def _halves(acc):  # its columns' left and right half
    return tl.split(tl.permute(tl.reshape(acc, (acc.shape[0], 2, acc.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def split_columns(acc, SUBTILES: tl.constexpr):
    """acc cut into 1, 2, 4 or 8 pieces of equally many columns, from left to right."""
    if SUBTILES == 1:
        return (acc,)
    elif SUBTILES == 2:
        return _halves(acc)
    else:
        left, right = _halves(acc)
        a, b = _halves(left)
        c, d = _halves(right)
        if SUBTILES == 4:
            return (a, b, c, d)
        else:
            return _halves(a) + _halves(b) + _halves(c) + _halves(d)


@triton.jit
def output_block(
    pid,
    a,  # this and the next three are as in `product`
    b,
    sizes,
    strides,
    LOADS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SUBTILES: tl.constexpr,
):
    """Block `pid` of A B, computed: (index along M, rows, first column, sums in pieces of columns)."""
    index_m, first_m, first_n = block_offsets(pid, sizes[0], sizes[1], BLOCK_M, BLOCK_N, GROUP_M)
    acc = product(a, b, (first_m, first_n), sizes, strides, LOADS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)
    offs_m = first_m + tl.arange(0, BLOCK_M).to(tl.int64)
    return index_m, offs_m, first_n, split_columns(acc, SUBTILES)


@triton.jit
def load_columns(ptr, offs_n, N):
    """Loads some columns of a vector (N,) as (1, columns) in fp32, zeros outside."""
    return tl.load(ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]


@triton.jit
def load_piece(ptr, offs_m, cols, M, N, stride):
    """Loads some rows and columns of a matrix (M, N), zeros outside."""
    mask = (offs_m[:, None] < M) & (cols[None, :] < N)
    return tl.load(ptr + (offs_m[:, None] * stride + cols[None, :]), mask=mask, other=0.0)


@triton.jit
def store_piece(out, x, offs_m, cols, M, N, stride, first_m, first_n, BOX: tl.constexpr):
    """Writes x to some rows and columns of a matrix (M, N); BOX: `out` is the matrix's descriptor."""
    if BOX:
        out.store([first_m, first_n], x.to(out.dtype))
    else:
        mask = (offs_m[:, None] < M) & (cols[None, :] < N)
        tl.store(out + (offs_m[:, None] * stride + cols[None, :]), x.to(out.dtype.element_ty), mask=mask)


@triton.jit
def store_column_sums(x, sums_ptr, index_m, first_n, N, BOX: tl.constexpr):
    """Writes the column sums of x, which has been rounded, to row `index_m` of the workspace.

    Where a descriptor wrote x (BOX), they are a product with ones, whose 16 rows are equal. This takes a quarter
    of an instruction an element in place of six of shuffles and additions (counted on sm_90); elsewhere it spills.
    """
    cols = first_n + tl.arange(0, x.shape[1])
    row_ptr = sums_ptr + index_m.to(tl.int64) * N
    if BOX:
        total, row = tl.dot(tl.full((16, x.shape[0]), 1.0, x.dtype), x), tl.arange(0, 16)[:, None]
        tl.store(row_ptr + (cols[None, :] + 0 * row), total, mask=(row == 0) & (cols[None, :] < N))
    else:
        tl.store(row_ptr + cols, tl.sum(x.to(tl.float32), 0), mask=cols < N)


@triton.jit
def times_factors(out, ls_ptr, dp_ptr, rows_per_sample, offs_m, cols, M, N):
    """`out`, some rows and columns of the output, times the layer scale and the drop path's factors."""
    if ls_ptr is not None:
        out *= load_columns(ls_ptr, cols, N)
    if dp_ptr is not None:
        out *= tl.load(dp_ptr + offs_m // rows_per_sample, mask=offs_m < M, other=0.0).to(tl.float32)[:, None]
    return out


def product_class(k: int, n: int) -> str:
    """The shape class of a product that sums over k and writes n columns: "768x3072"."""
    return f"{k}x{n}"


def describable(x: Tensor) -> bool:
    """Whether a descriptor (TMA) can read blocks of a matrix: rows must start at multiples of 16 bytes."""
    apart = x.shape[0] == 1 or x.stride(0) >= x.shape[1]  # rows that overlap are left to pointers
    fits = x.numel() > 0 and x.stride(1) == 1 and apart
    return fits and x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0


def readable_early(x: Tensor | None) -> bool:
    """Whether the persistent loop can read a matrix ahead: by a descriptor, in pairs of 16-bit numbers."""
    return x is not None and x.element_size() == 2 and describable(x)


DESCRIBED = ("tma", "flattened", "persistent")  # providers that read matrices through descriptors


def unfit(*matrices: Tensor, columns: int = 0) -> tuple[str, ...]:
    """The providers that cannot read these matrices, or write a matrix of so many columns."""
    if not all(map(describable, matrices)):
        return DESCRIBED
    # 8 would do for the descriptor, but then masks of factors spill with Triton 3.6.
    return ("persistent",) if columns % 16 else ()


def described(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """The descriptor of a `describable` x in blocks of (rows, columns)."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])


def row_product(a: Tensor, b: Tensor, config: KernelConfig, kind: str) -> tuple[tuple[int], dict]:
    """(grid, common arguments) of a kernel for a (M, K) times b, (K, N) for kind "nn", (N, K) for "nt".

    For the providers DESCRIBED, a and b become descriptors, and LOADS is the kind. For others, which read through
    pointers, LOADS is "even" where BLOCK_K divides K, else "masked".
    """
    (m, k), transposed = a.shape, kind == "nt"
    rows, columns, depth = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    n, block = (b.shape[0], (columns, depth)) if transposed else (b.shape[1], (depth, columns))
    strides = (a.stride(0), 1), (1, b.stride(0)) if transposed else (b.stride(0), 1)
    programs, loads = cdiv(m, rows) * cdiv(n, columns), "masked" if k % depth else "even"
    if config.provider in ("flattened", "persistent"):
        programs = row_programs(a.device, 2 if columns == 128 else 1, programs)
    if config.provider in DESCRIBED:
        a, b, loads = described(a, rows, depth), described(b, *block), kind
    sizes = dict(M=m, N=n, K=k, strides=strides, LOADS=loads, PRECISION=fp32_precision())
    return (programs,), dict(a_ptr=a, b_ptr=b, **sizes, **config.meta)


# ---- configurations of products, of which each kernel's file takes some

CUBLAS = config(provider="cublas")


def product_config(
    warps: int, stages: int, m: int, n: int, k: int, subtiles: int, provider: str = "triton", **more: int
) -> KernelConfig:
    """Configures a product in blocks of m rows and n columns, adding k terms of its sums at a time."""
    return config(warps, stages, provider, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=8, SUBTILES=subtiles, **more)


# Blocks of 256 columns read three quarters as much from L2, but only one program fits a multiprocessor.
WIDE = product_config(8, 4, 128, 256, 64, 4)


def persistent_config(pieces: int, stages: int = 3, columns: int = 256, ahead: int = 2) -> KernelConfig:
    """Configures a program per multiprocessor that loads the next block during the epilogue of this one.

    ahead: how many steps before its use the matrix of the epilogue is read; 0: in the epilogue. What is read ahead
    takes the shared memory of a fourth stage, and leaves room for a quarter of the result (pieces=4).
    """
    return product_config(8, stages, 128, columns, 64, pieces, "persistent", AHEAD=ahead)


def pointer_config(bits: str, sm: int) -> KernelConfig:  # the default of kernels that read through pointers
    large = product_config(8, 3, 128, 128, 64, 4) if sm in (90, 100) else product_config(4, 4, 128, 128, 32, 4)
    return large if bits == "16" else product_config(4, 3, 64, 64, 32, 2)


def divides_k(shape: str) -> bool:
    """Whether a BLOCK_K of 64 divides K. Elsewhere masks would spill."""
    return int(shape.partition("x")[0]) % 64 == 0


def linear_configs(shape: str, bits: str, sm: int, best: KernelConfig = CUBLAS, pieces: int = 0) -> list[KernelConfig]:
    """`best`, then all other ways to make a product; pieces: SUBTILES of the flattened loop, 0: none."""
    pointers = pointer_config(bits, sm)
    if bits == "32" or sm not in (90, 100):
        return [best, pointers, CUBLAS]
    configs = [best, pointers, CUBLAS, WIDE, *(replace(each, provider="tma") for each in (pointers, WIDE))]
    loops = [] if best.provider == "persistent" else [persistent_config(4)]
    flattened = [product_config(8, 4, 128, 256, 64, pieces, "flattened")] if pieces else []
    return [*configs, *loops, *flattened] if sm == 90 else configs
