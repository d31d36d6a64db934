"""The product of product.py for sm_90 in Gluon: persistent, warp-specialised, around the epilogue that it is given.

One program on each multiprocessor goes from tile to tile of 128 rows. Its warps have parts of their own (as CUTLASS calls them: warp-specialised,
cooperative): one asks the copy engine for a ring of blocks along K, two groups of four multiply, each the upper or the lower 64 rows, and store. The ring
runs on from tile to tile: while the two store, the blocks of the next tile come in; and each group stores while the other may still multiply.

Each slot of the ring has two barriers. `full`: its blocks have arrived. `empty`: both groups have read them. A barrier's phase alternates; waiting for the
phase before the first one, as the producer does at its first round, ends at once.

Registers: 12 warps with REGISTERS each are what a multiprocessor has. The producer's four (one runs, a register budget is for four) give theirs up, so that
the two groups have 240 each: 128 of them hold sums.

The epilogue is a `triton.jit` function that other kernels call too: epilogue(sums (64, columns) in fp32, *pointers, row tile, its rows, its columns, M, N,
*strides, TANH). Row tiles are of 64 rows, two to a program's tile, so the last one may lie past M as a whole.

Gluon has no interpreter. tests/test_gluon.py runs the functions below as Python, under a model of the barriers and the copy engine, and reads the machine
code; no GPU has run them yet (tiles.UNCHECKED).
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from . import tiles
from .gluon_names import (
    Swizzled,
    TensorDescriptor,
    async_load,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    warp_specialize,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .launch import launch
from .product import column_parts
from .rows import row_programs

ROWS = tl.constexpr(64)  # of a group of four warps: what wgmma multiplies
REGISTERS = 168  # 65,536 of a multiprocessor over 12 warps of 32, in eights


@jit
def slot_and_phase(step, STAGES: tl.constexpr):
    # Where block number `step` of a program lies in the ring, and in which phase of that slot's barriers.
    return step % STAGES, step // STAGES & 1


@jit
def tile_at(number, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    # Row tile and column tile, column by column within GROUP_M row tiles, which share the right operand in L2.
    first = number // (GROUP_M * tiles_n) * GROUP_M
    height = min(tiles_m - first, GROUP_M)
    within = number % (GROUP_M * tiles_n)
    return first + within % height, within // height


@jit
def pieces(acc, SUBTILES: tl.constexpr):
    # acc cut into equally many columns, from left to right
    if SUBTILES == 8:
        left, right = column_parts(acc, 2)
        return column_parts(left, 4) + column_parts(right, 4)
    else:
        return column_parts(acc, SUBTILES)


@jit
def produce(
    a,
    b,
    ring,
    order,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
):
    a_ring, b_ring, full, empty = ring
    tiles_m, tiles_n, steps = order
    step = 0
    for number in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_at(number, tiles_m, tiles_n, GROUP_M)
        for k in range(steps):
            slot, phase = slot_and_phase(step, STAGES)
            mbarrier.wait(empty.index(slot), phase ^ 1)
            # Whole blocks arrive: what lies outside is zeros, and counts.
            mbarrier.expect(full.index(slot), (2 * ROWS + BLOCK_N) * BLOCK_K * 2)
            async_load(a, [tile_m * 2 * ROWS, k * BLOCK_K], full.index(slot), a_ring.index(slot))
            if KIND == "nt":
                async_load(b, [tile_n * BLOCK_N, k * BLOCK_K], full.index(slot), b_ring.index(slot))
            else:
                async_load(b, [k * BLOCK_K, tile_n * BLOCK_N], full.index(slot), b_ring.index(slot))
            step += 1


@jit
def consume(
    half: tl.constexpr,  # 0: the upper 64 rows, 1: the lower
    ring,
    order,
    output,
    EPILOGUE: tl.constexpr,
    TANH: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    SUBTILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    a_ring, b_ring, full, empty = ring
    tiles_m, tiles_n, steps = order
    pointers, strides, M, N = output
    WIDTH: tl.constexpr = BLOCK_N // SUBTILES
    SUMS: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    STORED: tl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])  # 16 bytes a thread
    acc = gl.zeros((ROWS, BLOCK_N), gl.float32, SUMS)
    step = 0
    before = 0
    for number in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_at(number, tiles_m, tiles_n, GROUP_M)
        for k in range(steps):
            slot, phase = slot_and_phase(step, STAGES)
            mbarrier.wait(full.index(slot), phase)
            a = a_ring.index(slot).slice(half * ROWS, ROWS)
            b = b_ring.index(slot)
            if KIND == "nt":
                b = b.permute((1, 0))
            acc = warpgroup_mma(a, b, acc, use_acc=k > 0, is_async=True)
            # The one before has ended when at most this one runs: only then may its slot be filled again.
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(before), count=1, pred=k > 0)
            before = slot
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(before), count=1)
        row_tile = 2 * tile_m + half
        offs_m = row_tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, STORED)).to(gl.int64)
        parts = pieces(acc, SUBTILES)
        for i in gl.static_range(SUBTILES):
            cols = tile_n * BLOCK_N + i * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, STORED))
            EPILOGUE(gl.convert_layout(parts[i], STORED), *pointers, row_tile, offs_m, cols, M, N, *strides, TANH)


@jit
def product_gluon_kernel(
    a,  # (M, K), a descriptor
    b,  # (N, K) of KIND "nt", (K, N) of "nn", a descriptor
    pointers,  # of the epilogue
    strides,  # of the epilogue
    M,
    N,
    K,
    EPILOGUE: tl.constexpr,
    TANH: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SUBTILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    gl.static_assert(gl.num_warps() == 4, "a group that multiplies has four warps")
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()  # the copy engine sees the barriers as they are now
    ring = (a_ring, b_ring, full, empty)
    order = (gl.cdiv(M, 2 * ROWS), gl.cdiv(N, BLOCK_N), gl.cdiv(K, BLOCK_K))
    output = (pointers, strides, M, N)
    warp_specialize(
        [
            (consume, (0, ring, order, output, EPILOGUE, TANH, KIND, BLOCK_N, GROUP_M, SUBTILES, STAGES)),
            (consume, (1, ring, order, output, EPILOGUE, TANH, KIND, BLOCK_N, GROUP_M, SUBTILES, STAGES)),
            (produce, (a, b, ring, order, KIND, BLOCK_N, BLOCK_K, GROUP_M, STAGES)),
        ],
        [4, 1],  # warps of the second and the third, and their registers; the first has num_warps and what is left
        [240, 24],
    )


def row_tiles(m: int) -> int:
    """Row tiles of 64 that the epilogue is called with for m rows, two to each tile of a program."""
    return 2 * triton.cdiv(m, 2 * ROWS.value)


def _descriptor(x: Tensor, rows: int, columns: int):
    """x as blocks of 128-byte rows, swizzled as wgmma reads them."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], Swizzled(128, 16, 2))


def launch_product(
    a: Tensor, b: Tensor, kind: str, tile: tiles.Tile, epilogue: Callable, pointers: tuple, strides: tuple[int, ...], tanh: bool
) -> None:
    """Has `epilogue` store a b: a (M, K) and b (K, N), kind "nn", or its transpose (N, K), "nt"; both as product.describable wants them."""
    (m, k), n = a.shape, b.shape[1 if kind == "nn" else 0]
    block_n, block_k = tile["BLOCK_N"], tile["BLOCK_K"]
    meta = {name: value for name, value in tile.meta.items() if name != "num_stages"}
    launch(
        product_gluon_kernel,
        (row_programs(a.device, 1, triton.cdiv(m, 2 * ROWS.value) * triton.cdiv(n, block_n)),),
        a=_descriptor(a, 2 * ROWS.value, block_k),
        b=_descriptor(b, block_n, block_k) if kind == "nt" else _descriptor(b, block_k, block_n),
        pointers=pointers,
        strides=strides,
        M=m,
        N=n,
        K=k,
        EPILOGUE=epilogue,
        TANH=tanh,
        KIND=kind,
        STAGES=tile.num_stages,
        maxnreg=REGISTERS,
        **meta,
    )
