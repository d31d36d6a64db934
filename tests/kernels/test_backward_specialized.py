"""Attention's backward by roles: its numbers and its waiting, in a model of asynchrony; on a GPU its results.

Gluon has no interpreter, so a model runs the kernel's own source: the four warpgroups take turns by chance, wherever
they may affect each other. Copies and products happen early or late, and a tile that a copy is to fill holds NaN until
then. So whoever reads or writes too early computes NaN or another number, and whoever waits in vain is found.
"""

import ast
import inspect
import json
import random
from types import SimpleNamespace as Names

import attention_cases as cases
import cubin
import pytest
import torch
import triton
from hazards import hazards
from processes import uninterpreted

from vitfast.kernels.attention import backward_specialized as specialized
from vitfast.kernels.launch import record
from vitfast.tools.machine_code import compiler

GIVES_WAY = {"mbarrier.wait", "mbarrier.arrive", "tma.store_wait", "async_load", "async_store", "fence_async_shared"}
GIVES_WAY |= {"warpgroup_mma", "warpgroup_mma_wait"}


class Tile:
    """Elements `at` of shared memory; rows of a matrix lie in pieces of `width` columns, piece behind piece."""

    def __init__(self, data, at):
        self.data, self.at, self.dtype = data, at, data.dtype
        self.index, self.permute = lambda i: Tile(data, at[int(i)]), lambda order: Tile(data, at.permute(order))
        self.load, self.float = lambda _: data[at], lambda: data[at].float()

    def places(shape, width):
        *lead, rows, columns = shape
        at = torch.arange(torch.Size(shape).numel())
        at = at.view(*lead, columns // width, rows, width).movedim(-3, -2) if width else at
        return at.reshape(shape)

    def reinterpret(self, _, shape, width):
        return Tile(self.data, self.at.min() + Tile.places(shape, width))

    def store(self, x):
        self.data[self.at] = x.to(self.dtype)


class Barrier:
    phase = copying = 0

    def arrive(self, count=1, copied=0):
        self.left, self.copying = self.left - count, self.copying - copied
        assert self.left >= 0, "more arrivals than the barrier counts"
        if self.left == self.copying == 0:
            self.phase, self.left = self.phase + 1, self.count


class Pointer(Names):
    def __add__(self, offset):
        return Pointer(data=self.data, at=self.at + offset)

    def store(self, x, mask=True):
        at, x, mask = torch.broadcast_tensors(self.at, x, torch.as_tensor(mask))
        self.data[at[mask]] = x[mask].to(self.data.dtype)


class Model:
    """A program of the kernel: its turns, copies and products, and what its source calls `gl`, `tma` and so on."""

    def __init__(self, seed, pid, programs):
        self.chance, self.copies, self.products = random.Random(seed), [], {}
        given = {name: getattr(torch, name) for name in "float32 int32 int64 where exp2 sum permute".split()}
        layouts = ("NVMMADistributedLayout", "DotOperandLayout", "BlockedLayout", "SliceLayout", "SwizzledSharedLayout")
        given |= dict.fromkeys(layouts, lambda *_: 0) | dict(NVMMASharedLayout=lambda width, *_: width // 2)
        given |= dict(constexpr=lambda x: x, static_range=range, shared_memory_descriptor=Tile, store=Pointer.store)
        given |= dict(arange=lambda a, b, _: torch.arange(a, b), convert_layout=lambda x, _: x)
        given |= dict(zeros=lambda shape, dtype, _: torch.zeros(shape, dtype=dtype), cdiv=lambda a, b: -(-a // b))
        given |= dict(program_id=lambda _: torch.tensor(pid), num_programs=lambda _: torch.tensor(programs))
        given |= dict(load=lambda x, mask, other: torch.where(mask, x.data[x.at * mask], other))
        given |= dict(allocate_shared_memory=self.allocate, warp_specialize=self.run)
        bars = Names(MBarrierLayout=lambda: None, wait=self.wait, arrive=self.arrive)
        bars.init = lambda bar, count: vars(bar).update(count=count, left=count)
        bars.expect = lambda bar, size: bar.arrive(1, -size)
        tma = Names(async_load=self.copy_in, async_store=self.copy_out, store_wait=self.copied_out)
        steps = lambda *ends: map(torch.tensor, range(*map(int, ends)))  # noqa: E731
        self.names = dict(gl=Names(**given), gluon=Names(jit=lambda f: f), tma=tma, mbarrier=bars, range=steps)
        self.names |= dict(warpgroup_mma=self.multiply, warpgroup_mma_wait=self.multiplied)
        self.names |= dict(fence_async_shared=self.fence)

    def allocate(self, dtype, shape, width):
        if dtype == torch.int64:
            return Names(index=[Barrier() for _ in range(shape[0])].__getitem__)
        return Tile(torch.full(shape, float("nan"), dtype=dtype).flatten(), Tile.places(shape, width))

    def run(self, roles, *_):
        turns = {i: (function(*arguments), lambda: True) for i, (function, arguments) in enumerate(roles)}
        speeds, copies = [10 ** -self.chance.uniform(0, 2) for _ in roles], 10 ** -self.chance.uniform(0, 2)
        while turns:
            able = [i for i, (_, ready) in turns.items() if ready()]
            assert able or self.copies, "all wait in vain"
            if self.copies and (not able or self.chance.random() < copies):
                self.copies.pop(self.chance.randrange(len(self.copies)))[1]()
                continue
            self.now = self.chance.choices(able, [speeds[i] for i in able])[0]
            ready = next(turns[self.now][0], None)
            turns[self.now] = turns[self.now][0], ready
            if ready is None:
                del turns[self.now]

    def fence(self):
        yield lambda: True

    def wait(self, bar, phase, pred=True):
        if pred:
            yield lambda: bar.phase % 2 != phase

    def arrive(self, bar, pred=True):
        yield lambda: True
        if pred:
            bar.arrive()

    def copy_in(self, box, at, full, tile):
        def copy():
            tile.store(block(box, at))
            full.arrive(0, tile.at.numel() * 2)

        tile.data[tile.at] = float("nan")
        self.copies.append((None, copy))
        yield lambda: True

    def copy_out(self, box, at, tile):
        self.copies.append((self.now, lambda: block(box, at, tile.data[tile.at])))
        yield lambda: True

    def copied_out(self, _):
        me = self.now
        yield lambda: all(owner != me for owner, _ in self.copies)

    def multiply(self, a, b, acc, use_acc=True, is_async=False):
        done, queue = Names(), self.products.setdefault(self.now, [])
        queue.append(lambda: vars(done).update(value=a.float() @ b.float() + use_acc * getattr(acc, "value", acc)))
        while queue and self.chance.random() < 0.5:
            queue.pop(0)()
        yield lambda: True
        return done

    def multiplied(self, left, results):
        queue = self.products[self.now]
        while len(queue) > left:
            queue.pop(0)()
        yield lambda: True
        return results[0].value if len(results) == 1 else [result.value for result in results]


def block(box, at, given=None):
    """Rows of x (B, heads, N, 64) as (1, 1, size, 64), zeros past N; or writes them."""
    b, h, n, _ = map(int, at)
    part = box.x[b, h, n : n + box.size]
    if given is not None:
        part.copy_(given[0, 0, : len(part)])
    return torch.nn.functional.pad(part, (0, 0, 0, box.size - len(part)))[None, None]


class Steps(ast.NodeTransformer):
    """Makes generators of the kernel's functions, which yield what they wait for."""

    def __init__(self, tree):
        self.names = GIVES_WAY | {f.name for f in tree.body if isinstance(f, ast.FunctionDef)}

    def visit_Call(self, node):
        self.generic_visit(node)
        return ast.YieldFrom(node) if ast.unparse(node.func) in self.names else node

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        node.body += ast.parse("if False: yield").body
        return node


def judged(run, N, dtype, seed=0, device="cpu", sums=True):
    """run(qkv, do, o, lse, dqkv, totals) gives the gradients of five heads as exactly as PyTorch; returns them."""
    torch.manual_seed(seed)
    qkv, do = cases.random(1, N, 5, 64, dtype, device)
    truth, theirs = cases.by_autograd(qkv.double(), do.double()), cases.by_autograd(qkv, do)
    q, k, _ = qkv.double().unbind(2)
    lse = (torch.einsum("bnhd,bmhd->bhnm", q, k) * cases.SCALE).logsumexp(-1).float()
    dqkv, totals = torch.full_like(qkv, float("nan")), torch.full((1, 3, 5, 64), float("nan"), device=device)
    run(qkv, do, truth.pop("o").to(dtype), lse, dqkv, totals)
    truth = truth if sums else {"dqkv": truth["dqkv"]}
    cases.compare({"dqkv": dqkv, "bias gradient": totals.sum(0).flatten()}, theirs, truth, dtype)
    return dqkv, totals


def modelled(N, dtype, seed=0, programs=1, sums=True, fault=("", "")):
    """The same in the model; fault: what the source has, and what is planted in its place."""
    source = inspect.getsource(specialized)
    assert fault[0] in source
    tree = ast.parse(source[source.index("async_load =") : source.index("def box(")].replace(*fault, 1))
    code = compile(ast.fix_missing_locations(Steps(tree).visit(tree)), specialized.__file__, "exec")

    def run(qkv, do, o, lse, dqkv, totals):
        boxes = ((qkv, 64), (qkv, 16), (do, 64), (o, 64), (dqkv, 64), (dqkv, 16))
        boxes = [Names(x=x.flatten(2, -2).transpose(1, 2), size=size, dtype=dtype) for x, size in boxes]
        pointers = [Pointer(data=x.view(-1), at=0) for x in (lse, totals)]
        for pid in range(programs):
            names = Model(seed + pid, pid, programs).names
            exec(code, names)
            list(names["_attention_bwd_specialized_kernel"](*boxes, *pointers, 5, N, 5, cases.SCALE, sums))

    return judged(run, N, dtype, seed, sums=sums)


def launched(qkv, do, o, lse, dqkv, totals):
    N, H = qkv.shape[1], qkv.shape[3]
    common = dict(N=N, H=H, scale=cases.SCALE, lse_ptr=lse, SUMS=True, num_warps=4)
    inputs = tuple((x, x.stride()[:3]) for x in (*qkv.unbind(2), o, do))
    specialized.launch_specialized(common, inputs, (dqkv[:, :, 0], dqkv[:, :, 0].stride()[:3]), totals)


@pytest.mark.slow
@pytest.mark.parametrize("N", [193, 197, 207])
def test_in_any_order_of_events(N):
    for seed, dtype in enumerate((torch.bfloat16, torch.float16) * 3):
        modelled(N, dtype, seed, programs=1 + seed // 4, sums=seed < 5)


FAULTS = {  # what the source has, and in its place
    "k and v of the head before": ("mbarrier.wait(kv_free.index(buffer ^ 1), (((t + 1) // 2) & 1) ^ 1)", "pass"),
    "k and v too early": ("mbarrier.wait(kv_full.index(buffer), (t // 2) & 1)\n        dk,", "dk,"),
    "queries too early": ("mbarrier.wait(q_full.index(slot), (j // RING) & 1, pred=begins)", "pass"),
    "lse too early": ("mbarrier.wait(rows_full.index(slot), (j // RING) & 1, pred=begins)", "pass"),
    "dS too early": ("mbarrier.wait(ds_full.index(stage), (j // 2) & 1)", "pass"),
    "dS in use": ("tma.store_wait(0)  # the block before has left its tile", "pass"),
    "dQ not stored yet": ("tma.store_wait(0)\n        b, h =", "b, h ="),
    "dK not stored yet": ("tma.store_wait(0)\n        store_rows", "store_rows"),
    "dS of no queries": ("dss.index(ds_tile + 1).store(gl.zeros([64, 32], DTYPE, LOGITS))", "pass"),
    "the ones": ("keys == ONES, 1.0, p", "keys == ONES, p, p"),
    "a phase": ("mbarrier.wait(ds_full.index(stage), (j // 2) & 1)", "mbarrier.wait(ds_full.index(stage), j & 1)"),
    "products in flight": ("dv, dk = warpgroup_mma_wait(0, [dv, dk])\n            if ends", "if ends"),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    with pytest.raises((AssertionError, TypeError)):
        for seed in range(8):
            modelled(197, torch.float16, seed, fault=FAULTS[fault])


@pytest.mark.gpu
@pytest.mark.parametrize("N", [193, 197, 207])
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="for sm_90")
def test_on_a_gpu_the_same_bits_twice(N):
    for dtype in (torch.bfloat16, torch.float16):
        for one, two in zip(*(judged(launched, N, dtype, device="cuda") for _ in range(2))):
            assert torch.equal(one, two)


@pytest.mark.slow
def test_machine_code():
    registers, spills, hgmma, waits, touched, setmaxnreg, notes = json.loads(uninterpreted(__file__))
    assert registers <= 128 and spills <= (27 if triton.__version__ >= "3.9" else 0) and not touched and setmaxnreg
    assert hgmma > 3 * waits and not notes  # serialised, each would wait


if __name__ == "__main__":
    x = torch.empty(256, 197, 3, 12, 64, dtype=torch.bfloat16, device="meta")
    floats = [torch.empty(shape, device="meta") for shape in ((256, 12, 197), (256, 3, 12, 64))]
    (launch,) = record(lambda: launched(x, x[:, :, 0].contiguous(), x[:, :, 0].contiguous(), floats[0], x, floats[1]))
    compiled = compiler.compiled(launch, 90)
    code = cubin.read(compiled.asm["cubin"])
    found = [code.registers, code.spills, code.count("HGMMA"), code.waits, len(hazards(code)), code.count("USETMAXREG")]
    print(json.dumps([*found, cubin.assembler_notes(compiled.asm["ptx"], 90)]))
