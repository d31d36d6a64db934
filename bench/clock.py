"""The clock: device events around a call on a GPU, the process's own time on a CPU (so that other processes do not count)."""

import functools
import statistics
import time
from collections.abc import Callable

import torch

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
WARMUP = 3 if GPU else 1
ROUNDS = 20 if GPU else 5


class Stamp:
    """A moment in the device's stream. The difference of two is seconds per call, and waits for the later one."""

    def __init__(self, calls: int = 1):
        self.calls, self.event = calls, torch.cuda.Event(enable_timing=True)
        self.event.record()

    def __sub__(self, earlier: "Stamp") -> float:
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1e3 / self.calls


def clock(calls: int = 1) -> Callable:
    """A function whose readings differ by seconds per call where `calls` calls were made in between."""
    return functools.partial(Stamp, calls) if GPU else lambda: time.process_time() / calls


def wall() -> float:
    """Seconds by the clock on the wall, the device idle: for what other processes work on too, such as a loader's."""
    synchronize()
    return time.perf_counter()


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


@functools.cache
def _flush_buffer() -> torch.Tensor:
    return torch.empty(256 * 2**20, dtype=torch.int8, device=DEVICE)  # twice the largest L2 there is


def cold(lead: float = 0.0) -> None:
    """Before a timed call on a GPU: overwrites the L2 cache, then keeps the device busy for `lead` seconds while Python launches the call."""
    if GPU:
        _flush_buffer().zero_()
        torch.cuda._sleep(int(2e9 * min(lead, 0.05)))  # in clock cycles


def lead_of(run: Callable[[], object]) -> float:
    """Seconds of head start that hide Python's launches of `run`, warm already: twice what they take."""
    synchronize()
    start = time.perf_counter()
    run()
    return 2 * (time.perf_counter() - start) + 1e-4


def captured(run: Callable[[], object]) -> Callable[[], None]:
    """`run` as a CUDA graph: what it launched when captured is replayed, without Python."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # capture wants its lazy initialisations done, and not on the default stream
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def median_seconds(run: Callable[[], object], rounds: int = ROUNDS, warmup: int = WARMUP) -> float:
    """Median time of one call, cold."""
    for _ in range(warmup):
        run()
    lead, now, times = lead_of(run), clock(), []
    for _ in range(rounds):
        cold(lead)
        start = now()
        run()
        times.append(now() - start)
    return statistics.median(times)


def allocated() -> int:
    """Bytes of device memory in use now; 0 on a CPU."""
    return torch.cuda.memory_allocated() if GPU else 0


def peak_bytes(run: Callable[[], object], before: int = 0) -> int | None:
    """The most device memory in use during `run`, without the `before` bytes that are not its own; None on a CPU."""
    if not GPU:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
