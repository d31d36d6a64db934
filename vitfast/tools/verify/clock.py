"""Times calls on a GPU, from cold caches, by device events.

The device is kept busy before each call, so that Python's launches are not timed.
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

    The written memory alone would be written back during the timed call, so other memory is read to replace it.
    """
    written, read = flushed
    written.zero_()
    read.sum()
    torch.cuda._sleep(int(2e9 * lead))  # counted in clock cycles


def head_start(run: Callable[[], object], margin: float) -> float:
    """Seconds that hide Python's launches of `run`, which has run before: twice their time, and a margin."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    run()
    return 2 * (time.perf_counter() - begun) + margin


class DeviceClock:
    """Times calls by device events. The device is busy while Python launches, so that is not timed."""

    def __init__(self, device: torch.device, rounds: int = 15):
        self.rounds, self.flushed = rounds, flush_buffer(device)
        square, begun = torch.randn(4096, 4096, dtype=torch.float16, device=device), self.now()
        while self.now() - begun < 1.0:  # until the chip has raised its clock rates
            square @ square
            torch.cuda.synchronize()

    def now(self) -> float:
        return time.monotonic()

    def lost(self) -> bool:
        """Whether the device has stopped answering: after an illegal access, all later calls fail."""
        try:
            torch.cuda.synchronize()
            return torch.ones(1, device=self.flushed.device).item() != 1
        except Exception:
            return True

    def seconds(self, problem, config, run: Callable[[], object]) -> float:
        """The median seconds of a call that has run before, from cold caches."""
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
