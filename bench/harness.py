"""How everything here is measured: right before fast, on fresh random inputs, against ceilings measured in the same run.

A case builds its inputs, compares the implementation with float64, and only then is timed. On a GPU the clock is the device's own (events
around each call, the L2 cache flushed before it, a head start for Python's launches); on a CPU it is the process's time.
"""

import functools
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float32
WHERE = "" if GPU else "cpu small "  # a CPU case says so in its name
# How far a right answer may lie from float64, by norm: a few roundings of the dtype for a chain of operations.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


@dataclass
class Stamp:
    """A point on the device's clock; the difference of two is seconds, and waits for the later one."""

    event: "torch.cuda.Event" = field(default_factory=lambda: torch.cuda.Event(enable_timing=True))

    def __sub__(self, other: "Stamp") -> float:
        self.event.synchronize()
        return other.event.elapsed_time(self.event) / 1e3


def device_clock() -> Stamp:
    """Now, in the device's stream."""
    stamp = Stamp()
    stamp.event.record()
    return stamp


clock = device_clock if GPU else time.process_time


@functools.cache
def _flush_buffer() -> Tensor:
    return torch.empty(256 * 2**20 if GPU else 1, dtype=torch.int8, device=DEVICE)


def prepare() -> None:
    """Before each timed call: the cache is emptied, and the device kept busy while Python launches."""
    if GPU:
        _flush_buffer().zero_()
        torch.cuda._sleep(1_000_000)


def median_seconds(run: Callable[[], object], rounds: int = 20, warmup: int = 3) -> float:
    """Median time of one call."""
    for _ in range(warmup):
        run()
    times = []
    for _ in range(rounds):
        prepare()
        start = clock()
        run()
        times.append(clock() - start)
    return statistics.median(times)


@functools.cache
def ceilings() -> dict[str, float]:
    """What this device reaches at its best, measured now: bytes/s of a large copy (read + written), FLOP/s of a large matrix product."""
    size, n = (2**31, 8192) if GPU else (2**24, 512)
    source = torch.randint(-100, 100, (size,), dtype=torch.int8, device=DEVICE)
    a, b, target = torch.randn(n, n, device=DEVICE).to(DTYPE), torch.randn(n, n, device=DEVICE).to(DTYPE), torch.empty_like(source)
    copy, product = median_seconds(lambda: target.copy_(source)), median_seconds(lambda: a @ b)
    return dict(bytes_per_second=2 * size / copy, flops_per_second=2 * n**3 / product)


@functools.cache
def machine() -> dict[str, str]:
    """Device, driver, versions and commit, for every result."""

    def output(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            return "unknown"

    import triton

    facts = dict(device=torch.cuda.get_device_name() if GPU else "cpu", torch=torch.__version__, triton=triton.__version__, python=platform.python_version())
    facts["commit"] = output("git", "describe", "--always", "--dirty")
    if GPU:
        facts["driver, clock, power"] = output("nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader")
    return facts


@dataclass(frozen=True)
class Case:
    """What is computed: named inputs' shapes, the formula (for float64, eager and torch.compile), its cost per direction.

    `flops` and `traffic` (bytes of the dtype's elements that must move at least) are those of one forward pass; backward costs twice the
    FLOPs, and `traffic_backward` elements.
    """

    name: str
    formula: Callable[..., Tensor]
    make: Callable[[], list[Tensor]]
    flops: float
    traffic: float
    traffic_backward: float


def _norm_error(actual: list[Tensor], truth: list[Tensor]) -> float:
    return max(((a.double() - t).norm() / t.norm().clamp_min(1e-30)).item() for a, t in zip(actual, truth, strict=True))


def _gradients(function, tensors: list[Tensor], upstream: list[Tensor] | None = None) -> list[Tensor]:
    """Outputs, and the gradients of the floating inputs for one upstream gradient."""
    outputs = function(*tensors)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    leaves = [t for t in tensors if t.requires_grad]
    if upstream is None:
        return outputs
    return [*outputs, *torch.autograd.grad(outputs, leaves, [u.to(o.dtype) for u, o in zip(upstream, outputs)])]


def bench(benchmark, case: Case, impl: str, function: Callable, direction: str, tolerance: float | None = None) -> None:
    """Checks `function` against the case's formula in float64, then times it in one direction: forward, backward or both."""
    torch.manual_seed(0)
    tensors = [t.requires_grad_() if t.is_floating_point() else t for t in case.make()]
    doubles = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in tensors]
    upstream = [torch.randn(o.shape, device=DEVICE, dtype=torch.float64) for o in _gradients(case.formula, doubles)]
    error = _norm_error(_gradients(function, tensors, upstream), _gradients(case.formula, doubles, upstream))
    limit = tolerance or TOLERANCE[DTYPE]
    assert error <= limit, f"{impl} is wrong on {case.name}: error {error:.1e} against float64, limit {limit:.0e}; a wrong result gets no time"
    del doubles

    def forward():
        with torch.no_grad():
            return function(*tensors)

    leaves, cast = [t for t in tensors if t.requires_grad], None
    if direction != "forward":
        outputs = function(*tensors)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        cast = [u.to(o.dtype) for u, o in zip(upstream, outputs)]

    def backward():
        return torch.autograd.grad(outputs, leaves, cast, retain_graph=True)

    def both():
        result = function(*tensors)
        return torch.autograd.grad(result, leaves, cast)

    run = dict(forward=forward, backward=backward, both=both)[direction]
    passes = dict(forward=(1, case.traffic), backward=(2, case.traffic_backward), both=(3, case.traffic + case.traffic_backward))
    flops, moved = passes[direction][0] * case.flops, passes[direction][1] * torch.finfo(DTYPE).bits // 8
    top = ceilings()
    floor = max(flops / top["flops_per_second"], moved / top["bytes_per_second"])
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    benchmark._timer = clock
    benchmark.pedantic(run, setup=prepare, rounds=20 if GPU else 5, warmup_rounds=3 if GPU else 1)
    median = benchmark.stats.stats.median
    info = dict(
        impl=impl,
        case=case.name,
        direction=direction,
        device=machine()["device"],
        dtype=str(DTYPE).removeprefix("torch."),
        flops=flops,
        bytes=moved,
        error=error,
        median_us=1e6 * median,
        floor_us=1e6 * floor,
        percent_of_floor=100 * floor / median,
        tflops=flops / median / 1e12,
        gigabytes_per_second=moved / median / 1e9,
        peak_mib=torch.cuda.max_memory_allocated() / 2**20 if GPU else 0.0,
    )
    benchmark.extra_info.update(info, machine=machine(), ceilings=top)


def compiled(function: Callable, mode: str | None = None) -> Callable:
    """torch.compile of a formula, from a clean start."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, mode=mode)
