"""Attention backward, provider "specialized": four warpgroups with roles, a program a multiprocessor.

It serves samples of 193 to 207 tokens and heads of 64 in 16 bits on sm_90. It is written in Gluon, because in
Triton warpgroups cannot wait for one another. A program goes from head to head. With S = Q K^T, P = exp(scale S - lse),
dP = dO V^T, delta = rowsum(o do) and dS = P (dP - delta):

- Three warpgroups have 64 keys each. For 32 queries at a time they compute S^T and dP^T, then dV += P^T dO and
  dK += dS^T Q, with P^T and dS^T in registers, and they write dS^T to shared memory.
- One has the queries, 64 at a time: it loads all tensors ahead by TMA and computes delta, and dQ = dS K over all keys.
  For the last 16 keys, of which 197 tokens fill 5, it computes S, dP, dV and dK too, in 16 columns, not 64 rows.

The n-th use of a barrier, counted from 0, ends its phase n, and a wait names it by n & 1; a wait for the phase before
the first returns at once. `q_full`: q, do and o of a block of queries are loaded. `rows_full`: the block's lse and
delta are written, and its tile of dS^T, one of two, is free, because these rows are written after dQ of the block
before the last has been stored. `ds_full`: dS^T of the 192 keys is written, and no keys need the block's q and do, so
that those of the block three later may take their place. `kv_full` and `kv_free`: k and v of a head, in one of two
buffers, are loaded, or may be overwritten. There is no deadlock: rows_full of a block waits only for ds_full of the
block before the last, and ds_full only for rows_full of the same block.

The rows of P sum to one, those of dS to zero: over the keys, dV sums to the sum of dO over the queries, dK to zero.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..launch import launch
from ..rows import row_programs

warpgroup_mma, warpgroup_mma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait
# Triton 3.9 has other names for copies and for a view of shared memory in another shape and layout.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
view = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
LOG2E = gl.constexpr(1.4426950408889634)
RING = gl.constexpr(3)  # blocks of q and do in shared memory
TAIL = gl.constexpr(192)  # the first of the last 16 keys
ONES = gl.constexpr(207)  # no key: its column of P is one, so its column of dV^T = dO^T P is the sum of dO
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
LOGITS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
FEW = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
OPERAND = gl.constexpr(gl.DotOperandLayout(0, PRODUCT, 2))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
BOX = gl.constexpr(gl.NVMMASharedLayout(128, 16, 4))
WIDE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
HALF = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))  # a 64 x 64 tile is two of 64 x 32, one after the other
THIN = gl.constexpr(gl.NVMMASharedLayout(32, 16, 2))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers, each of which ends a phase after ARRIVALS arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def load_rows(box, coordinates, full, tile, ROWS: gl.constexpr):
    """Begins to copy ROWS rows of a head into a tile; rows past N come as zeros."""
    async_load(box, coordinates, full, view(tile, box.dtype, [1, 1, ROWS, 64], BOX))


@gluon.jit
def store_rows(box, coordinates, tile, x, ROWS: gl.constexpr):
    """Begins to copy x (ROWS, 64) to rows of a head by way of a tile; rows past N are left out."""
    tile.store(x)
    fence_async_shared()
    async_store(box, coordinates, view(tile, box.dtype, [1, 1, ROWS, 64], BOX))


@gluon.jit
def load_keys(boxes, tiles, full, b, h, H, buffer):
    """Begins to load k and v of a head into one of their two buffers."""
    mbarrier.expect(full, 2 * 208 * 64 * 2)
    for x in gl.static_range(2):
        for i in gl.static_range(3):
            load_rows(boxes[0], [b, (x + 1) * H + h, i * 64, 0], full, tiles[x].index(buffer * 3 + i), 64)
        load_rows(boxes[1], [b, (x + 1) * H + h, TAIL, 0], full, tiles[2].index(x * 2 + buffer), 16)


@gluon.jit
def load_queries(boxes, tiles, full, b, h, block, n):
    """Begins to load q, do and o of a head's block of queries, the n-th of the program."""
    slot = n % RING
    mbarrier.expect(full.index(slot), 3 * 64 * 64 * 2)
    load_rows(boxes[0], [b, h, block * 64, 0], full.index(slot), tiles[3].index(slot), 64)
    load_rows(boxes[2], [b, h, block * 64, 0], full.index(slot), tiles[4].index(slot), 64)
    load_rows(boxes[3], [b, h, block * 64, 0], full.index(slot), tiles[5].index(n % 2), 64)


@gluon.jit
def write_rows(tiles, rows, bars, lse_ptr, head, block, N, n):
    """Writes lse, in units of log 2, and delta of the n-th query block, once its o and do are loaded."""
    slot = n % RING
    offs = block * 64 + gl.arange(0, 64, gl.SliceLayout(1, ROWS))
    lse = gl.load(lse_ptr + head.to(gl.int64) * N + offs, mask=offs < N, other=float("inf"))  # inf makes P zero
    mbarrier.wait(bars[2].index(slot), (n // RING) & 1)
    o, do = tiles[5].index(n % 2).load(ROWS).to(gl.float32), tiles[4].index(slot).load(ROWS).to(gl.float32)
    rows.index(slot).store(lse * LOG2E)
    rows.index(RING + slot).store(gl.sum(o * do, 1))
    fence_async_shared()  # orders these reads before the next copy into o's tile
    mbarrier.arrive(bars[3].index(slot))


@gluon.jit
def _queries(boxes, tiles, rows, bars, lse_ptr, sums_ptr, heads, N, H, scale, SUMS: gl.constexpr):
    """The warpgroup of queries: does all loads, lse and delta, dQ, and dk and dv of the last 16 keys."""
    ks, _, tails, qs, dos, _, dss, few = tiles
    kv_full, kv_free, q_full, _, ds_full = bars
    DTYPE: gl.constexpr = ks.dtype
    p_tile, ds_tile = view(few.index(0), DTYPE, [64, 16], THIN), view(few.index(1), DTYPE, [64, 16], THIN)
    first, programs = gl.program_id(0), gl.num_programs(0)
    mine, b, h = gl.cdiv(heads - first, programs), first // H, first % H
    load_keys(boxes, tiles, kv_full.index(0), b, h, H, 0)
    load_queries(boxes, tiles, q_full, b, h, 0, 0)
    load_queries(boxes, tiles, q_full, b, h, 1, 1)
    write_rows(tiles, rows, bars, lse_ptr, first, 0, N, 0)
    load_queries(boxes, tiles, q_full, b, h, 2, 2)
    j, zero = 0, gl.zeros([64, 16], gl.float32, FEW)
    keys = TAIL + gl.arange(0, 16, gl.SliceLayout(0, FEW))[None, :]
    for t in range(mine):
        head, buffer, more = first + t * programs, t % 2, t + 1 < mine
        next_b, next_h = (head + programs) // H, (head + programs) % H
        if more:
            mbarrier.wait(kv_free.index(buffer ^ 1), (((t + 1) // 2) & 1) ^ 1)
            load_keys(boxes, tiles, kv_full.index(buffer ^ 1), next_b, next_h, H, buffer ^ 1)
        mbarrier.wait(kv_full.index(buffer), (t // 2) & 1)
        dk, dv = zero, zero
        sums = gl.sum(gl.zeros([64, 64], gl.float32, PRODUCT).reshape([4, 2, 8, 64]), 1) if SUMS else zero
        for block in range(4):
            slot, stage, now = j % RING, j % 2, (j // 4) % 2  # `now` equals `buffer`, but takes no registers
            q, do, k_tail, v_tail = qs.index(slot), dos.index(slot), tails.index(now), tails.index(2 + now)
            s = warpgroup_mma(q, k_tail.permute([1, 0]), zero, use_acc=False, is_async=True)
            dp = warpgroup_mma(do, v_tail.permute([1, 0]), zero, use_acc=False, is_async=True)
            lse = rows.index(slot).load(gl.SliceLayout(1, FEW))
            delta = rows.index(RING + slot).load(gl.SliceLayout(1, FEW))
            s, dp = warpgroup_mma_wait(0, [s, dp])
            p = gl.where(keys < N, gl.exp2(s * (scale * LOG2E) - lse[:, None]), 0.0)
            ds = (p * (dp - delta[:, None])).to(DTYPE)
            p_tile.store(gl.where(keys == ONES, 1.0, p).to(DTYPE))
            ds_tile.store(ds)
            fence_async_shared()
            dv = warpgroup_mma(do.permute([1, 0]), p_tile, dv, is_async=True)
            dk = warpgroup_mma(q.permute([1, 0]), ds_tile, dk, is_async=True)
            tma.store_wait(0)  # dQ of the block before has been read from its tile
            if more | (block < 3):
                after = gl.where(block == 3, head + programs, head)
                write_rows(tiles, rows, bars, lse_ptr, after, (block + 1) % 4, N, j + 1)
            mbarrier.wait(ds_full.index(stage), (j // 2) & 1)
            dq = gl.zeros([64, 64], gl.float32, PRODUCT)
            dq = warpgroup_mma(gl.convert_layout(ds, OPERAND), k_tail, dq, is_async=True)
            for i in gl.static_range(3):
                dst = view(dss.index(stage * 3 + i), DTYPE, [64, 64], HALF)
                dq = warpgroup_mma(dst.permute([1, 0]), ks.index(now * 3 + i), dq, is_async=True)
            dv, dk, dq = warpgroup_mma_wait(0, [dv, dk, dq])
            if SUMS:
                sums += gl.sum(dq.reshape([4, 2, 8, 64]), 1)  # adds the pairs of rows that one thread holds
            store_rows(boxes[4], [b, h, block * 64, 0], dss.index(stage * 3), (dq * scale).to(DTYPE), 64)
            if more | (block == 0):  # this block's q and do may be overwritten
                b3, h3 = gl.where(block > 0, next_b, b), gl.where(block > 0, next_h, h)
                load_queries(boxes, tiles, q_full, b3, h3, (block + 3) % 4, j + 3)
            j += 1
        if SUMS:
            row = sums_ptr + (b.to(gl.int64) * 3 * H + h) * 64
            cols, step = gl.arange(0, 64, gl.SliceLayout(0, ROWS)), H * 64
            gl.store(row + cols, gl.convert_layout(gl.sum(gl.sum(sums, 1), 0) * scale, gl.SliceLayout(0, ROWS)))
            gl.store(row + step + cols, gl.zeros([64], gl.float32, gl.SliceLayout(0, ROWS)))
            dv_at = row + 2 * step + gl.arange(0, 64, gl.SliceLayout(1, FEW))[:, None] + keys * 0
            gl.store(dv_at, dv, mask=keys == ONES)
        store_rows(boxes[5], [b, H + h, TAIL, 0], few.index(0), gl.permute(dk * scale, [1, 0]).to(DTYPE), 16)
        store_rows(boxes[5], [b, 2 * H + h, TAIL, 0], few.index(1), gl.permute(dv, [1, 0]).to(DTYPE), 16)
        tma.store_wait(0)
        b, h = next_b, next_h


@gluon.jit
def _keys(boxes, tiles, rows, bars, heads, N, H, scale, W: gl.constexpr):
    """Warpgroup W of keys: computes dk, dv and dS^T of keys 64 W to 64 W + 63 of every head."""
    kv_full, kv_free, q_full, rows_full, ds_full = bars
    DTYPE: gl.constexpr = tiles[0].dtype
    qs = view(tiles[3], DTYPE, [RING * 2, 32, 64], WIDE)
    dos = view(tiles[4], DTYPE, [RING * 2, 32, 64], WIDE)
    dss = view(tiles[6], DTYPE, [2 * 3 * 2, 64, 32], HALF)
    rows = view(rows, gl.float32, [2 * RING * 2, 32], LINE)
    zero = gl.zeros([64, 32], gl.float32, LOGITS)
    t, j, steps = 0, 0, gl.cdiv(N, 32)
    for head in range(gl.program_id(0), heads, gl.num_programs(0)):
        b, h, buffer = head // H, head % H, t % 2
        k, v = tiles[0].index(buffer * 3 + W), tiles[1].index(buffer * 3 + W)
        mbarrier.wait(kv_full.index(buffer), (t // 2) & 1)
        dk, dv = gl.zeros([64, 64], gl.float32, PRODUCT), gl.zeros([64, 64], gl.float32, PRODUCT)
        for step in range(steps):
            half, slot, stage = step % 2, j % RING, j % 2
            begins, ends = half == 0, (half == 1) | (step == steps - 1)
            q, do = qs.index(slot * 2 + half), dos.index(slot * 2 + half)
            mbarrier.wait(q_full.index(slot), (j // RING) & 1, pred=begins)
            s = warpgroup_mma(k, q.permute([1, 0]), zero, use_acc=False, is_async=True)
            dp = warpgroup_mma(v, do.permute([1, 0]), zero, use_acc=False, is_async=True)
            mbarrier.wait(rows_full.index(slot), (j // RING) & 1, pred=begins)
            lse = rows.index(slot * 2 + half).load(gl.SliceLayout(0, LOGITS))
            delta = rows.index((RING + slot) * 2 + half).load(gl.SliceLayout(0, LOGITS))
            s = warpgroup_mma_wait(1, [s])
            p = gl.exp2(s * (scale * LOG2E) - lse[None, :])
            dp = warpgroup_mma_wait(0, [dp])
            dv = warpgroup_mma(gl.convert_layout(p.to(DTYPE), OPERAND), do, dv, is_async=True)
            ds = (p * (dp - delta[None, :])).to(DTYPE)
            ds_tile = (stage * 3 + W) * 2 + half
            dss.index(ds_tile).store(ds)
            if begins & ends:  # there are no queries from 224 on
                dss.index(ds_tile + 1).store(gl.zeros([64, 32], DTYPE, LOGITS))
            fence_async_shared()
            dk = warpgroup_mma(gl.convert_layout(ds, OPERAND), q, dk, is_async=True)
            dv, dk = warpgroup_mma_wait(0, [dv, dk])
            if ends:
                mbarrier.arrive(ds_full.index(stage))
            j += half | ends.to(gl.int32)
        store_rows(boxes[4], [b, H + h, W * 64, 0], v, (dk * scale).to(DTYPE), 64)
        tma.store_wait(0)
        store_rows(boxes[4], [b, 2 * H + h, W * 64, 0], v, dv.to(DTYPE), 64)
        tma.store_wait(0)
        mbarrier.arrive(kv_free.index(buffer))
        t += 1


@gluon.jit
def _attention_bwd_specialized_kernel(
    qkv_box,  # descriptor of q, k and v (B, 3 H, N, Dh) in blocks of 64 rows of a head
    tail_box,  # the same in blocks of 16
    do_box,  # descriptor of (B, H, N, Dh) in blocks of 64
    o_box,  # likewise
    dqkv_box,  # descriptor of dq, dk and dv (B, 3 H, N, Dh) in blocks of 64
    dtail_box,  # the same in blocks of 16
    lse_ptr,  # (B, H, N)
    sums_ptr,  # (B, 3, H, Dh)
    heads,  # B H
    N,
    H,
    scale,
    SUMS: gl.constexpr,
):
    """Computes dq, dk and dv of every num_programs(0)-th head."""
    DTYPE: gl.constexpr = qkv_box.dtype
    tiles = (
        gl.allocate_shared_memory(DTYPE, [2 * 3, 64, 64], WIDE),  # k of two heads
        gl.allocate_shared_memory(DTYPE, [2 * 3, 64, 64], WIDE),  # v
        gl.allocate_shared_memory(DTYPE, [2 * 2, 16, 64], WIDE),  # their last 16 keys
        gl.allocate_shared_memory(DTYPE, [RING, 64, 64], WIDE),  # q
        gl.allocate_shared_memory(DTYPE, [RING, 64, 64], WIDE),  # do
        gl.allocate_shared_memory(DTYPE, [2, 64, 64], WIDE),  # o
        gl.allocate_shared_memory(DTYPE, [2 * 3, 64, 64], WIDE),  # dS^T of two blocks of queries; dQ
        gl.allocate_shared_memory(DTYPE, [2, 16, 64], WIDE),  # P and dS of the last 16 keys; their dK and dV
    )
    rows = gl.allocate_shared_memory(gl.float32, [2 * RING, 64], LINE)  # lse and delta
    bars = (barriers(2, 1), barriers(2, 3), barriers(RING, 1), barriers(RING, 1), barriers(2, 3))
    fence_async_shared()
    boxes = (qkv_box, tail_box, do_box, o_box, dqkv_box, dtail_box)
    gl.warp_specialize(
        [
            (_queries, (boxes, tiles, rows, bars, lse_ptr, sums_ptr, heads, N, H, scale, SUMS)),
            (_keys, (boxes, tiles, rows, bars, heads, N, H, scale, 0)),
            (_keys, (boxes, tiles, rows, bars, heads, N, H, scale, 1)),
            (_keys, (boxes, tiles, rows, bars, heads, N, H, scale, 2)),
        ],
        [4, 4, 4],
        [128, 128, 128],  # registers per thread; with 120, the warpgroups of keys spill, and their products wait
    )


def box(x: Tensor, heads: int, rows: int) -> TensorDescriptor:
    """A descriptor of x (B, N, H, Dh) and the memory after it, as (B, heads, N, Dh) in blocks of rows."""
    (B, N, _, D), (over_b, over_n, over_h, _) = x.shape, x.stride()
    shape, strides = [B, heads, N, D], [over_b, over_h, over_n, 1]
    return TensorDescriptor(x.as_strided(shape, strides), shape, strides, [1, 1, rows, D], BOX.value)


def readable(x: Tensor) -> Tensor:
    """Returns x (B, N, H, Dh), copied where no descriptor can describe it."""
    fits = x.stride(3) == 1 and not x.data_ptr() % 16 and all(step > 0 and step % 8 == 0 for step in x.stride()[:3])
    return x if fits else x.contiguous()


def launch_specialized(common: dict, inputs: tuple, dq: tuple, sums: Tensor) -> None:
    """Launches the kernel, with the arguments of `launch_resident`."""
    q, o, do = inputs[0][0], readable(inputs[3][0]), readable(inputs[4][0])
    B, _, H, _ = q.shape
    names = "N", "H", "scale", "lse_ptr", "SUMS", "num_warps"
    arguments = {name: common[name] for name in names} | dict(sums_ptr=sums, heads=B * H)
    boxes = dict(qkv_box=box(q, 3 * H, 64), tail_box=box(q, 3 * H, 16), do_box=box(do, H, 64), o_box=box(o, H, 64))
    boxes |= dict(dqkv_box=box(dq[0], 3 * H, 64), dtail_box=box(dq[0], 3 * H, 16))
    launch(_attention_bwd_specialized_kernel, (row_programs(q.device, 1, B * H),), **arguments, **boxes)
