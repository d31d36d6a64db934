"""The clock of a GPU: device events around calls from cold caches.

A head start hides Python's launches.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor


def flush_buffer(device: torch.device) -> Tensor:
    """The memory that `cold` overwrites and the memory that it reads: each twice the largest L2 there is."""
    return torch.empty(2, 64 * 2**20, dtype=torch.int32, device=device)


def cold(flushed: Tensor, lead: float) -> None:
    """Makes the L2 cache cold, then keeps the device busy for `lead` seconds while Python launches.

    Written memory alone would be written back during the timed call: other memory, which is read, takes its place.
    """
    written, read = flushed
    written.zero_()
    read.sum()
    torch.cuda._sleep(int(2e9 * lead))  # in clock cycles


def head_start(run: Callable[[], object], margin: float) -> float:
    """Seconds that hide Python's launches of `run`, warm already: twice what they take, and a margin."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    run()
    return 2 * (time.perf_counter() - begun) + margin


class DeviceClock:
    """Times calls by device events; the device is busy while Python launches, which thus does not count."""

    def __init__(self, device: torch.device, rounds: int = 15):
        self.rounds, self.flushed = rounds, flush_buffer(device)
        square, begun = torch.randn(4096, 4096, dtype=torch.float16, device=device), self.now()
        while self.now() - begun < 1.0:  # until the chip has its clocks up
            square @ square
            torch.cuda.synchronize()

    def now(self) -> float:
        return time.monotonic()

    def lost(self) -> bool:
        """Whether the device has stopped answering: an illegal access breaks all that follows in a process."""
        try:
            torch.cuda.synchronize()
            return torch.ones(1, device=self.flushed.device).item() != 1
        except Exception:
            return True

    def seconds(self, problem, config, run: Callable[[], object]) -> float:
        """The median of one call's seconds, warm, from cold caches."""
        for _ in range(2):
            run()
        lead = min(0.02, head_start(run, margin=5e-5))
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.rounds)]
        for start, end in events:
            cold(self.flushed, lead)
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3
