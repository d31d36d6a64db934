"""The product of product.py for sm_90 in Gluon, around an epilogue: persistent, warps specialised.

One program on each multiprocessor goes from output block to output block of 128 rows, as in CUTLASS's warp-specialised
cooperative kernels. One of its warps has the copy engine fill a ring of blocks along K; two groups of four warps
multiply, each its 64 rows, and store. The ring goes on across output blocks: while the two store, the next one's
operands come in, and either may still multiply while the other stores. Each slot has two barriers: `full`, its operands
have arrived, and `empty`, both groups have read them. Phases go 0, 1, 0, ...; the wait for phase 1 of a new barrier,
the producer's first, is none.

The epilogue is a `triton.jit` function that other kernels call too: epilogue(sums (64, columns) in fp32, *pointers,
index along M, rows, columns, M, N, *strides, ACT). It is called for 64 rows at a time, so the last may lie past M.

Gluon has no interpreter, and no GPU has run this yet (tiles.UNCHECKED). tests/kernels/test_gluon.py runs it as Python,
under a model of barriers, copy engine and wgmma in which anything may be late, and reads its machine code.
"""

import triton.language as tl
from torch import Tensor

from . import tiles
from .gluon_names import TensorDescriptor, async_load, gl, hopper, jit
from .launch import INTERPRETED, cdiv, launch, settle
from .product import split_columns
from .rows import row_programs

ROWS = tl.constexpr(64)  # of one group of warps: wgmma's
# A multiprocessor's 65,536 registers over 12 warps. One group has what is left: 12 * 168 = 4 * (240 + 240 + 24).
REGISTERS, CONSUMER, PRODUCER = 168, tl.constexpr(240), tl.constexpr(24)


@jit
def slot_and_phase(step, STAGES: tl.constexpr):
    """Where a program's operands number `step` lie in the ring, and the phase of that slot's barriers."""
    return step % STAGES, step // STAGES & 1


@jit
def block_at(number, blocks_m, blocks_n, GROUP_M: tl.constexpr):
    """Index along M and N of an output block: column by column in groups that share operands in L2."""
    first = number // (GROUP_M * blocks_n) * GROUP_M
    height = min(blocks_m - first, GROUP_M)
    within = number % (GROUP_M * blocks_n)
    return first + within % height, within // height


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
    blocks_m, blocks_n, steps = order
    step = 0
    for number in range(gl.program_id(0), blocks_m * blocks_n, gl.num_programs(0)):
        index_m, index_n = block_at(number, blocks_m, blocks_n, GROUP_M)
        for k in range(steps):
            slot, phase = slot_and_phase(step, STAGES)
            hopper.mbarrier.wait(empty.index(slot), phase ^ 1)
            # Bytes of whole blocks: outside the matrices the copy engine fills in zeros.
            hopper.mbarrier.expect(full.index(slot), (2 * ROWS + BLOCK_N) * BLOCK_K * 2)
            async_load(a, [index_m * 2 * ROWS, k * BLOCK_K], full.index(slot), a_ring.index(slot))
            if KIND == "nt":
                async_load(b, [index_n * BLOCK_N, k * BLOCK_K], full.index(slot), b_ring.index(slot))
            else:
                async_load(b, [k * BLOCK_K, index_n * BLOCK_N], full.index(slot), b_ring.index(slot))
            step += 1


@jit
def consume(
    half: tl.constexpr,  # of an output block's rows: 0 or 1
    ring,
    order,
    output,
    EPILOGUE: tl.constexpr,
    ACT: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    SUBTILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    a_ring, b_ring, full, empty = ring
    blocks_m, blocks_n, steps = order
    pointers, strides, M, N = output
    WIDTH: tl.constexpr = BLOCK_N // SUBTILES
    SUMS: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    STORED: tl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])  # 16 bytes a thread
    acc = gl.zeros((ROWS, BLOCK_N), gl.float32, SUMS)
    step = 0
    before = 0
    for number in range(gl.program_id(0), blocks_m * blocks_n, gl.num_programs(0)):
        index_m, index_n = block_at(number, blocks_m, blocks_n, GROUP_M)
        for k in range(steps):
            slot, phase = slot_and_phase(step, STAGES)
            hopper.mbarrier.wait(full.index(slot), phase)
            a = a_ring.index(slot).slice(half * ROWS, ROWS)
            b = b_ring.index(slot)
            if KIND == "nt":
                b = b.permute((1, 0))
            acc = hopper.warpgroup_mma(a, b, acc, use_acc=k > 0, is_async=True)
            # With this product alone under way the one before has ended: its slot may be filled again.
            acc = hopper.warpgroup_mma_wait(1, deps=(acc,))
            hopper.mbarrier.arrive(empty.index(before), count=1, pred=k > 0)
            before = slot
            step += 1
        acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
        hopper.mbarrier.arrive(empty.index(before), count=1)
        row_block = 2 * index_m + half
        offs_m = row_block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, STORED)).to(gl.int64)
        pieces = split_columns(acc, SUBTILES)
        for i in gl.static_range(SUBTILES):
            cols = index_n * BLOCK_N + i * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, STORED))
            EPILOGUE(gl.convert_layout(pieces[i], STORED), *pointers, row_block, offs_m, cols, M, N, *strides, ACT)


@jit(do_not_specialize=["M"])
def product_gluon_kernel(
    a,  # (M, K), a descriptor
    b,  # KIND "nn": (K, N), "nt": (N, K), a descriptor
    pointers,  # the epilogue's
    strides,  # the epilogue's
    M,
    N,
    K,
    EPILOGUE: tl.constexpr,
    ACT: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SUBTILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    gl.static_assert(gl.num_warps() == 4, "a group that multiplies has four warps")
    gl.static_assert(STAGES > 1, "a slot is freed when the next block is there")
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(i), count=1)
        hopper.mbarrier.init(empty.index(i), count=2)
    hopper.fence_async_shared()  # so that the copy engine sees them
    ring = (a_ring, b_ring, full, empty)
    order = (gl.cdiv(M, 2 * ROWS), gl.cdiv(N, BLOCK_N), gl.cdiv(K, BLOCK_K))
    output = (pointers, strides, M, N)
    gl.warp_specialize(
        [
            (consume, (0, ring, order, output, EPILOGUE, ACT, KIND, BLOCK_N, GROUP_M, SUBTILES, STAGES)),
            (consume, (1, ring, order, output, EPILOGUE, ACT, KIND, BLOCK_N, GROUP_M, SUBTILES, STAGES)),
            (produce, (a, b, ring, order, KIND, BLOCK_N, BLOCK_K, GROUP_M, STAGES)),
        ],
        [4, 1],  # warps of the second and the third
        [CONSUMER, PRODUCER],
    )


def row_blocks(m: int) -> int:
    """For how many blocks of 64 rows the epilogue is called with m rows: an even number."""
    return 2 * cdiv(m, 2 * ROWS.value)


def _descriptor(x: Tensor, rows: int, columns: int):
    """x in blocks, laid out in shared memory as wgmma reads them."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.float16)  # or any other of 16 bit
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], layout)


def launch_product(
    a: Tensor, b: Tensor, kind: str, tile: tiles.Tile, epilogue, pointers: tuple, strides: tuple, activation: str
):
    """Has `epilogue` store a (M, K) times b, (K, N) of kind "nn", or transposed, (N, K), of kind "nt"."""
    (m, k), n = a.shape, b.shape[1 if kind == "nn" else 0]
    block_n, block_k = tile["BLOCK_N"], tile["BLOCK_K"]
    if not INTERPRETED:
        settle(epilogue)
    launch(
        product_gluon_kernel,
        (row_programs(a.device, 1, row_blocks(m) // 2 * cdiv(n, block_n)),),
        a=_descriptor(a, 2 * ROWS.value, block_k),
        b=_descriptor(b, block_k, block_n) if kind == "nn" else _descriptor(b, block_n, block_k),
        pointers=pointers,
        strides=strides,
        M=m,
        N=n,
        K=k,
        EPILOGUE=epilogue,
        ACT=activation,
        KIND=kind,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        maxnreg=REGISTERS,
        **dict(tile.blocks),
    )
