"""Predicts times of kernels on GPUs that are not here, from their machine code.

A launch is compiled for sm_90 and a few of its programs are traced (trace.py), which counts how often each instruction
runs. Six ports share the work: tensor cores, MUFU (exponentials, reciprocals), issue slots, shared memory, L2, and the
GPU's memory (HBM), which reads and writes every byte once, however many arguments reach it. L2 is taken to hold what is
read again, a kernel's own results included: true where programs that run together share it, as a product's do, or have
little of it (attention's backward in one program a head reads 3 N Dh numbers a program again, 30 of 50 MB at N = 197).

    port      its work over the whole grid / its rate; of the first four, on the multiprocessor with the most programs
    busy      the longest of the ports
    alone     one program where nothing overlaps but asynchronous copies and stores: its products, then its other
              instructions (one warp of a scheduler issues every other cycle), its accesses to shared memory, the loads
              that it waits for
    predicted = launch + max(busy, alone of all / the programs that run on a multiprocessor at a time)

What the model cannot see: latencies beyond that, barriers, bank conflicts, uncoalesced access (lanes are taken to read
side by side), what TMA descriptors cost, the clock under load. 16-bit kernels alone. Every number from here is a
prediction; none was measured. An error of +-25 % is assumed; one estimate by hand lies 40 % off.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..kernels.launch import Launch
from . import LAUNCH, compiler, cubin, trace
from .cubin import Code, name_of

SM = 90


@dataclass(frozen=True)
class PortRates:
    """Rates of a GPU. Everything that is per clock is of one multiprocessor."""

    name: str
    memory_bytes_per_second: float
    multiprocessors: int = 132  # of the SXM cards (NVIDIA, Hopper architecture in depth, 2022)
    # Hz; the maximum is 1.98e9 and the data sheet's peak is at 1.83e9, long products draw it below both.
    clock: float = 1.755e9
    flops: int = 4096  # dense bf16 a clock by wgmma: 989.4e12 of the data sheet / 132 / 1.83e9
    # Share of that by mma.sync (Luo et al., 2024, "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture").
    mma_sync: float = 0.62
    # A clock (CUDA C++ Programming Guide, throughput of native arithmetic instructions, compute capability 9.0).
    mufu: int = 16
    issue: int = 4  # instructions of warps a clock: four schedulers (as above)
    shared_bytes: int = 128  # a clock: 32 banks of 4 bytes (as above)
    # 5.5 to 7e12 on a PCIe card of 114 multiprocessors (Chips and Cheese, 2023, "Nvidia's H100"); its upper x 132/114.
    l2_bytes_per_second: float = 8.1e12
    launch: float = LAUNCH  # seconds
    library_flops_per_second: float = 615e12  # cuBLAS at the shapes of ViTs: 580 to 650 published


# Copies within the memory: about 3.0 TB/s of the data sheet's 3.35 (published); about 4.3 of 4.8 (measured,
# bench/results/NOTES.md).
H100 = PortRates("H100", 3.0e12)
H200 = PortRates("H200", 4.3e12)
RATES = (H100, H200)

L1_BYTES = 64 * 1024  # a tensor up to this size is read from L2 once by each multiprocessor: its L1 keeps it (assumed)
# Neighbouring programs in the middle of the grid that are traced: the tiles of one head, the last of them cut off.
SAMPLE = 4
# Of a multiprocessor: registers, programs; by compute capability bytes of shared memory and warps.
REGISTERS, PROGRAMS = 65_536, 32
SHARED = {80: 167_936, 89: 102_400, 90: 233_472, 100: 233_472, 120: 102_400}
WARPS = {80: 64, 89: 48, 90: 64, 100: 64, 120: 48}
SHARED_ACCESS = ("LDS", "STS", "LDSM", "STSM", "LDL", "STL")  # spilled registers lie in the L1 of the same banks


@dataclass(frozen=True)
class Span:
    """Where the numbers of a launch's tensor lie."""

    bytes: int  # of its numbers
    storage: int
    start: int  # the first byte in the storage,
    end: int  # one past the last; a strided view does not fill what lies between
    box: int = field(default=0, compare=False)  # bytes that a descriptor moves at a time; 0: no descriptor

    @classmethod
    def of(cls, tensor: Tensor, block: Sequence[int] = ()) -> "Span":
        size, storage = tensor.element_size(), tensor.untyped_storage()._cdata
        extent = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride())) if tensor.numel() else 0
        start, box = tensor.storage_offset() * size, math.prod(block) * size if block else 0
        return cls(tensor.numel() * size, storage, start, start + extent * size, box)

    def meets(self, other: "Span") -> bool:
        """Whether the two may share bytes; q and k that are interleaved in one tensor count as if they did."""
        return self.storage == other.storage and self.start < other.end and other.start < self.end


@dataclass(frozen=True)
class PortLoad:
    """Cycles and bytes of a multiprocessor that one program takes on average, or bytes of the grid."""

    programs: int
    resident: int  # programs that fit a multiprocessor at a time
    warps: int  # of one program
    flops: float = 0.0  # of the tensor cores, padding included
    tensor: float = 0.0  # cycles
    mufu: float = 0.0
    issue: float = 0.0
    operands: float = 0.0  # cycles of shared memory: read by wgmma,
    accesses: float = 0.0  # by loads and stores,
    fills: float = 0.0  # filled by asynchronous copies
    l2: float = 0.0  # bytes,
    l2_waited: float = 0.0  # those of loads into registers
    once: float = 0.0  # bytes that every multiprocessor reads from L2 once
    hbm: float = 0.0  # bytes of the whole grid: each once read and once written,
    hbm_waited: float = 0.0  # those loaded into registers


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of one launch: `total` with the launch itself, the ports, which of them binds."""

    total: float
    ports: dict[str, float]
    waves: float
    binds: str


def fitting(registers: int, warps: int, shared: int, sm: int = SM) -> int:
    """Programs that fit a multiprocessor, by a thread's registers and a program's warps and bytes."""
    by_registers = REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
    return min(by_registers, WARPS[sm] // warps, SHARED[sm] // (shared + 1024), PROGRAMS)


def width(instruction: str) -> int:
    """Bytes that each lane moves: 16 of "LDG.E.128", 4 of "STS"."""
    words = instruction.split("[")[0].split(".")
    if "M88" in words or "MT88" in words:  # 8 x 8 matrices of 16 bits: a lane holds two numbers of each
        return 4 * int(words[-1].split()[0]) if words[-1].split()[0] in ("2", "4") else 4
    sizes = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
    return next((sizes[w.split()[0]] for w in words if w.split()[0] in sizes), 4)


def product_of(instruction: str) -> tuple[int, int]:
    """(FLOPs, bytes read from shared memory) of one warp's part of an HGMMA or HMMA."""
    shape = re.search(r"(?:HGMMA\.(\d+)x(\d+)x(\d+)|HMMA\.(\d\d)(\d)(\d+))", instruction).groups()
    m, n, k = (int(x) for x in (shape[:3] if shape[0] else shape[3:]))
    if not shape[0]:
        return 2 * m * n * k, 0
    operands = instruction.count("gdesc")  # of 16 bits: the right one always lies in shared memory, the left one may
    left, right = 2 * m * k, 2 * n * k
    described = re.search(r"HGMMA\S* \S+, (\S+?),", instruction).group(1).startswith("gdesc")
    both = operands == 2 or described
    return 2 * m * n * k // 4, (right + (left if both else 0)) // 4  # four warps share one


def views(launch: Launch) -> dict[str, Span]:
    """Every tensor among a launch's arguments, also those behind descriptors and in tuples ("name[0]")."""
    return dict(_views(launch.arguments))


def _views(arguments: dict) -> Iterator[tuple[str, Span]]:
    for name, value in arguments.items():
        if isinstance(value, TensorDescriptor):
            yield name, Span.of(value.base, value.block_shape)
        elif isinstance(value, Tensor):
            yield name, Span.of(value)
        elif isinstance(value, tuple):
            yield from _views({f"{name}[{i}]": item for i, item in enumerate(value)})


def distinct(found: Iterable[Span]) -> int:
    """Bytes that views reach, each counted once; of overlapping ones at most those between their ends."""
    total, together, end = 0, [], 0
    for view in [*sorted(set(found), key=lambda view: (view.storage, view.start)), None]:
        if together and (view is None or view.storage != together[0].storage or view.start >= end):
            total += min(sum(one.bytes for one in together), end - together[0].start)
            together, end = [], 0
        if view:
            together.append(view)
            end = max(end, view.end)
    return total


def measure(launch: Launch, tensors: dict[str, Span] | None = None) -> PortLoad:
    """Compiles a launch (on meta tensors) for sm_90 and counts its work.

    tensors: `views` of the launch, where its tensors are smaller stand-ins (compiler.Job). Raises trace.Untraceable
    where the kernel branches on data.
    """
    compiled = compiler.compiled(launch, SM)
    code = cubin.read(compiled.asm["cubin"])
    warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
    constants, names = trace.parameters(launch, compiled.src.signature, compiled.asm["ptx"])
    tracer = trace.Tracer(code, constants, launch.grid, warps)
    grid = PortLoad(math.prod(launch.grid), fitting(code.registers, warps, shared), warps)
    if not grid.resident:
        asked = f"{code.registers} registers, {shared} bytes"
        raise ValueError(f"no program of {launch.kernel.__name__} fits a multiprocessor: {asked}")
    sample = SAMPLE if predict(grid, H100).waves > 1 else 1  # the long programs of a single wave are alike
    first = max(0, min(launch.grid[0] // 2, launch.grid[0] - sample))
    sampled = [(x, *(n // 2 for n in launch.grid[1:])) for x in range(first, min(first + sample, launch.grid[0]))]
    return count(code, [tracer.run(*program) for program in sampled], tensors or views(launch), names, grid)


def count(
    code: Code, traces: list[trace.Trace], tensors: dict[str, Span], names: list[str], grid: PortLoad
) -> PortLoad:
    """`grid` with the work that traces of some programs show. names: of the pointer arguments, in order."""
    found: dict[str, float] = defaultdict(float)
    loaded, copied, written = set(), set(), set()  # names; what was written before it was read is no input
    for run in traces:
        for at, times in run.counts.items():
            text = code.instructions[at]
            name = name_of(text)
            found["issue"] += times / H100.issue
            if name == "MUFU":
                found["mufu"] += times * 32 / H100.mufu
            elif name in ("HGMMA", "HMMA"):
                flops, operands = product_of(text)
                found["flops"] += times * flops
                found["tensor"] += times * flops / H100.flops / (1 if name == "HGMMA" else H100.mma_sync)
                found["operands"] += times * operands / H100.shared_bytes
            elif name in SHARED_ACCESS:
                found["accesses"] += times * 32 * width(text) / H100.shared_bytes
        for (at, argument), times in run.moved.items():  # in the order of the first time
            text = code.instructions[at]
            if argument < 0:
                raise trace.Untraceable(f"nobody knows what this reaches: {text}")
            name, tensor, moved = name_of(text), names[argument], times * 32 * width(text)
            view = tensors[tensor]
            if name == "UTMASTG":  # what lies outside of the tensor is not written
                moved = min(times * view.box, view.bytes / grid.programs)
            small = view.bytes <= L1_BYTES
            if name not in ("LDG", "LDGSTS", "UTMALDG"):
                written.add(tensor)
            elif not any(view.meets(tensors[other]) for other in written):
                (loaded if name == "LDG" else copied).add(tensor)
            if name == "LDGSTS":
                found["fills"] += moved / H100.shared_bytes
            if name == "LDG" and not small:
                found["l2_waited"] += moved
            if name != "UTMALDG" and not (name == "LDG" and small):  # the bytes of UTMALDG are among those copied
                found["l2"] += moved
        found["l2"] += run.copied
        found["fills"] += run.copied / H100.shared_bytes

    def total(which: set[str]) -> int:
        return distinct(tensors[tensor] for tensor in which)

    return replace(
        grid,
        **{name: value / len(traces) for name, value in found.items()},
        once=sum(tensors[tensor].bytes for tensor in loaded if tensors[tensor].bytes <= L1_BYTES),
        hbm=total(loaded | copied) + total(written),
        hbm_waited=total(loaded),
    )


def predict(work: PortLoad, gpu: PortRates) -> Prediction:
    """How long a launch is predicted to take there."""
    most = math.ceil(work.programs / gpu.multiprocessors)  # programs on the busiest multiprocessor
    once = work.once * min(work.programs, gpu.multiprocessors)
    ports = {name: most / gpu.clock * getattr(work, name) for name in ("tensor", "mufu", "issue")}
    ports["shared"] = most / gpu.clock * (work.operands + work.accesses + work.fills)
    ports["l2"] = (work.l2 * work.programs + once) / gpu.l2_bytes_per_second
    ports["hbm"] = work.hbm / gpu.memory_bytes_per_second
    busy = max(ports.values())
    products = max(work.tensor, work.operands)
    others = max(work.issue * max(1, 2 * gpu.issue / work.warps), work.mufu)
    from_l2 = (work.l2_waited * work.programs + once) / gpu.l2_bytes_per_second
    waited = max(from_l2, work.hbm_waited / gpu.memory_bytes_per_second)
    alone = (most / gpu.clock * (products + others + work.accesses) + waited) / min(work.resident, most)
    binds = max(ports, key=ports.get) if busy >= alone else "latency"
    waves = work.programs / (work.resident * gpu.multiprocessors)
    return Prediction(gpu.launch + max(busy, alone), ports, waves, binds)


def library(flops: float, moved: int, gpu: PortRates) -> float:
    """Predicted seconds of a kernel of PyTorch's or cuBLAS's: `moved` bytes."""
    return gpu.launch + max(flops / gpu.library_flops_per_second, moved / gpu.memory_bytes_per_second)
