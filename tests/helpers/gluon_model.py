"""Runs kernels/product_gluon.py as Python: partitions as threads, one at a time, in a random order.

A model of what the PTX ISA promises and no more: mbarriers with phases, copies that arrive whenever they like, and
products that read their blocks from their issue up to the wait that ends them. A block that is being filled is NaN.
"""

import random
import threading
import types
from pathlib import Path

import torch
import triton

from vitfast.kernels import product_gluon


class Deadlock(AssertionError):
    """Every partition waits, and no copy is under way."""


class Ended(BaseException):
    """Another partition has failed."""


class Barrier:
    """An mbarrier: `done` phases are complete; a phase ends with its last arrival and its last byte."""

    def init(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = self.done = 0

    def arrive(self) -> None:
        assert self.pending > 0, "more arrivals than a phase has"
        self.pending -= 1
        self.complete()

    def complete(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.done, self.pending = self.done + 1, self.count


class Memory:
    """Shared memory, or a view of it."""

    def __init__(self, data):
        self.data = data

    def index(self, i: int):
        assert 0 <= i < len(self.data)
        found = self.data[i]
        return found if isinstance(found, Barrier) else Memory(found)

    def slice(self, start, length) -> "Memory":
        return Memory(self.data[int(start) : int(start) + int(length)])

    def permute(self, order) -> "Memory":
        return Memory(self.data.permute(order))


class Sums:
    """Accumulators: their value, and the products that are under way, oldest first."""

    def __init__(self, value, under_way=()):
        self.value, self.under_way = value, under_way

    def chunk(self, count: int) -> tuple:
        assert not self.under_way, "sums are taken while products are under way"
        return self.value.chunk(count, 1)


class Program:
    """One program of the kernel. `run` makes it; every call into Gluon may let another partition go on."""

    def __init__(self, number: int, programs: int, seed: int):
        self.number, self.programs, self.random = number, programs, random.Random(seed)
        self.copies: list[tuple] = []
        self.turn, self.failure = threading.Semaphore(0), None
        self.here = threading.local()

    # ---- the scheduler

    def pause(self, ready=lambda: True) -> None:
        """Lets others go on until it is this partition's turn, not before `ready()`."""
        me = self.here.partition
        me.ready = ready
        self.turn.release()
        me.go.acquire()
        if self.failure:
            raise Ended

    def warp_specialize(self, functions, warps, registers) -> None:
        partitions = [
            types.SimpleNamespace(go=threading.Semaphore(0), ready=lambda: True, over=False) for _ in functions
        ]

        def body(partition, function, arguments):
            self.here.partition = partition
            partition.go.acquire()
            try:
                if not self.failure:
                    function(*arguments)
            except Ended:
                pass
            except BaseException as error:
                self.failure = error
            partition.over = True
            self.turn.release()

        threads = [threading.Thread(target=body, args=(p, *call)) for p, call in zip(partitions, functions)]
        for thread in threads:
            thread.start()
        while left := [p for p in partitions if not p.over]:
            able = left if self.failure else [p for p in left if p.ready()]
            if not able and not self.copies:
                self.failure = Deadlock("every partition waits")
            elif self.copies and (not able or self.random.random() < 0.3):
                self.arrive(self.copies.pop(self.random.randrange(len(self.copies))))
            else:
                self.random.choice(able).go.release()
                self.turn.acquire()
        for thread in threads:
            thread.join()
        if self.failure:
            raise self.failure
        assert not self.copies, "a copy has not arrived when the program ends"

    # ---- the copy engine

    def load(self, source, corner, barrier, target: Memory) -> None:
        block = torch.zeros(target.data.shape, dtype=torch.float64)
        rows, columns = (slice(c, c + n) for c, n in zip(map(int, corner), block.shape))
        found = source.matrix[rows, columns]
        block[: found.shape[0], : found.shape[1]] = found
        target.data.fill_(torch.nan)
        self.copies.append((block, target.data, barrier))
        self.pause()

    def arrive(self, copy) -> None:
        block, target, barrier = copy
        target.copy_(block)
        barrier.bytes -= 2 * block.numel()
        barrier.complete()

    # ---- what the kernel calls

    def wait(self, barrier, phase) -> None:
        self.pause(lambda: barrier.done & 1 != phase)

    def expect(self, barrier, count) -> None:
        barrier.bytes += int(count)
        barrier.arrive()
        self.pause()

    def signal(self, barrier, count: int, pred: bool = True) -> None:
        if pred:
            barrier.arrive()
        self.pause()

    def multiply(self, a, b, sums: Sums, use_acc, is_async) -> Sums:
        at_issue = a.data @ b.data
        self.pause()
        return Sums(sums.value, (*sums.under_way, (a.data, b.data, at_issue, use_acc)))

    def finish(self, left: int, deps) -> Sums:
        value, under_way = deps[0].value, deps[0].under_way
        self.pause()
        while len(under_way) > left:
            (a, b, at_issue, use_acc), *under_way = under_way
            assert torch.equal(a @ b, at_issue), "a block has changed, or was not there, while it was multiplied"
            value = at_issue + value if use_acc else at_issue
        return Sums(value, tuple(under_way))

    def allocate(self, dtype, shape, layout) -> Memory:
        shape = [int(n) for n in shape]
        if dtype is torch.int64:
            return Memory([Barrier() for _ in range(shape[0])])
        return Memory(torch.full(shape, torch.nan, dtype=torch.float64))


class Source:
    """A descriptor."""

    def __init__(self, descriptor):
        self.matrix, self.dtype, self.layout = descriptor.base.double(), descriptor.base.dtype, descriptor.layout
        self.block_type = types.SimpleNamespace(shape=list(descriptor.block_shape))


def module(old: str = "", new: str = "", rows: int = 64):
    """A copy of product_gluon for one `run`: a piece of its text replaced, ROWS of another size."""
    path = Path(product_gluon.__file__)
    text = path.read_text()
    assert text.count(old) == 1 or not old, f"{old!r} is {text.count(old)} times in {path}"
    copy = types.ModuleType("vitfast.kernels.product_gluon_copy")
    copy.__dict__.update(__package__="vitfast.kernels", __file__=str(path))
    exec(compile(text.replace(old, new) if old else text, str(path), "exec"), copy.__dict__)
    copy.ROWS = triton.language.constexpr(rows)
    return copy


def refuse(condition, text) -> None:
    if not condition:
        raise ValueError(text)


def run(copy, launch, seed: int) -> None:
    """Makes a recorded launch of `module()`'s kernel, one program after the other."""
    functions = {name: getattr(copy, name).fn for name in ("slot_and_phase", "block_at", "produce", "consume")}
    arguments = {k: v for k, v in launch.arguments.items() if k not in ("num_warps", "maxnreg")}
    arguments |= dict(a=Source(arguments["a"]), b=Source(arguments["b"]))
    copy.__dict__.update(functions, ROWS=int(copy.ROWS.value), split_columns=Sums.chunk)
    for number in range(launch.grid[0]):
        program = Program(number, launch.grid[0], seed + number)
        ignored = lambda *_, **__: None  # noqa: E731
        copy.gl = types.SimpleNamespace(
            program_id=lambda axis, program=program: program.number,
            num_programs=lambda axis, program=program: program.programs,
            num_warps=lambda: 4,
            static_assert=refuse,
            static_range=range,
            cdiv=lambda a, b: -(-int(a) // int(b)),
            zeros=lambda shape, dtype, layout: Sums(torch.zeros([int(n) for n in shape], dtype=torch.float64)),
            arange=lambda start, end, layout: torch.arange(int(start), int(end)),
            convert_layout=lambda value, layout: value,
            allocate_shared_memory=program.allocate,
            warp_specialize=program.warp_specialize,
            **dict(NVMMADistributedLayout=ignored, BlockedLayout=ignored, SliceLayout=ignored),
            **dict(int64=torch.int64, float32=torch.float32),
        )
        barriers = dict(wait=program.wait, expect=program.expect, arrive=program.signal, MBarrierLayout=ignored)
        barriers["init"] = lambda barrier, count: barrier.init(count)
        copy.hopper = types.SimpleNamespace(
            mbarrier=types.SimpleNamespace(**barriers),
            warpgroup_mma=program.multiply,
            warpgroup_mma_wait=program.finish,
            fence_async_shared=ignored,
        )
        copy.async_load = program.load
        copy.product_gluon_kernel.fn(**arguments)
