"""The clock of a trial: device events around calls from cold caches."""

import statistics
import time
from collections.abc import Callable

import torch

from ..verify.clock import cold, flush_buffer, head_start


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

    def seconds(self, problem, tile, run: Callable[[], object]) -> float:
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
