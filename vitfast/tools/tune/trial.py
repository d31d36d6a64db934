"""The trial of a tile: its launcher's result against float64 at the size timed, then its time."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...kernels.configs.tiles import Tile
from ..verify import Judge, poisoned
from ..verify.clock import cold, flush_buffer, head_start
from ..verify.launcher import Launcher, outputs


@dataclass
class Problem:
    """One tile to choose: of an operation at one shape class, and the launcher that is run with it."""

    op: str
    bits: str
    shape: str
    name: str
    launcher: Launcher
    start: Tile
    candidates: list[Tile]  # of other providers, from which the search starts too
    absent: dict[str, str]  # provider -> why it cannot run here

    @property
    def key(self) -> tuple[str, str, str]:
        return self.op, self.bits, self.shape

    def __str__(self) -> str:
        return f"{self.op} {self.shape}" + ("" if self.bits == "16" else f" {self.bits} bit")


class Trial(Judge):
    """The inputs of a problem and their truth: runs and checks its launcher with the tile now in force."""

    def __init__(self, problem: Problem, dtype: torch.dtype, device: torch.device):
        super().__init__(problem.launcher, dtype, device)
        self.problem, self.dtype, self.device = problem, dtype, device

    def run(self):
        """The launcher, once."""
        return self.problem.launcher.call(*self.inputs)

    def check(self) -> None:
        """Raises Wrong where the result is not right."""
        with poisoned():
            self.judge(outputs(self.run()))


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

    def seconds(self, problem: Problem, tile: Tile, run: Callable[[], object]) -> float:
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
