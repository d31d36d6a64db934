"""The trial of a tile: its launcher's result against float64 at the size that is timed, then its time."""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .kernels.tiles import Tile
from .launchers import Draw, Launcher, outputs

# What rounding the result alone may cost: half a unit in the last place, of numbers just above a power of two.
EPS = {torch.float32: 2e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
# What several roundings one after the other may cost a whole model or a training step, where benchmarks compare them.
ATOL = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
ELEMENT = 10  # times what a row may be off by its norm, a single number may be off by the sum of its size and the row's average


def errors(actual: Tensor, truth: Tensor) -> tuple[float, float]:
    """The largest errors of any row (of the first axis) and of any number, infinite where not finite.

    Of a row by norm, relative to its own or to the average one; of a number relative to its size plus the average size in its row. Not of the
    whole, whose norm hardly changes at full size when a tile is lost.
    """
    if actual.shape != truth.shape or not actual.isfinite().all():
        return math.inf, math.inf
    rows = 1 if truth.dim() == 1 else truth.shape[0]
    a, t = actual.reshape(rows, -1), truth.reshape(rows, -1)
    norms = t.norm(dim=1, dtype=torch.float64)
    norms = norms.clamp_min(norms.square().mean().sqrt().clamp_min(1e-30))
    by_row = by_number = 0.0
    for x, y, norm in zip(a.split(4096), t.split(4096), norms.split(4096)):
        off = (x.double() - y.double()).abs()
        by_row = max(by_row, (off.norm(dim=1) / norm).max().item())
        by_number = max(by_number, (off / (y.double().abs() + norm[:, None] / t.shape[1] ** 0.5)).max().item())
    return by_row, by_number


@contextlib.contextmanager
def exact_fp32() -> Iterator[None]:
    """PyTorch's own fp32 results are fp32 inside: by default its convolutions may take TF32, and so would any error judged by theirs."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fresh memory is NaN inside: what a candidate does not write is found out, and not taken for what another has left there."""
    empty, empty_like = torch.empty, torch.empty_like

    def fill(x: Tensor) -> Tensor:
        return x.fill_(math.nan) if x.is_floating_point() and x.device.type != "meta" else x

    torch.empty, torch.empty_like = (lambda *a, **k: fill(empty(*a, **k))), (lambda *a, **k: fill(empty_like(*a, **k)))
    try:
        yield
    finally:
        torch.empty, torch.empty_like = empty, empty_like


class Wrong(Exception):
    """A candidate does not compute what it should. error: its largest, of a row."""

    def __init__(self, text: str, error: float = math.inf):
        super().__init__(text)
        self.error = error


@dataclass
class Problem:
    """One tile to choose: of an operation at one shape class, and the launcher that is run with it."""

    op: str
    bits: str
    shape: str
    name: str
    launcher: Launcher
    start: Tile
    rivals: list[Tile]
    absent: dict[str, str]  # provider -> why it cannot run here
    larger: Launcher | None = None  # the launcher at twice the batch and one more

    @property
    def key(self) -> tuple[str, str, str]:
        return self.op, self.bits, self.shape

    def __str__(self) -> str:
        return f"{self.op} {self.shape}" + ("" if self.bits == "16" else f" {self.bits} bit")


class Judge:
    """The inputs of a launcher and their truth in float64, made once; judges results by PyTorch's own in the same dtype."""

    def __init__(
        self, launcher: Launcher, dtype: torch.dtype, device: torch.device, layout: str = "contiguous", seed: int = 0
    ):
        generator = torch.Generator(device).manual_seed(seed)
        self.inputs = launcher.make(Draw(dtype, device, generator, layout))
        doubles = [t.double() if t.is_floating_point() else t for t in self.inputs]
        with torch.no_grad(), exact_fp32():
            self.truth = outputs(launcher.formula(*doubles))
            plain = outputs(launcher.formula(*self.inputs))
        self.plain = [errors(result, truth) for result, truth in zip(plain, self.truth, strict=True)]
        self.limits = []
        for by_row, by_number in self.plain:
            by_row = max(2 * by_row, EPS[dtype])
            self.limits.append((by_row, max(2 * by_number, ELEMENT * by_row)))

    def judge(self, results: list[Tensor]) -> tuple[float, float]:
        """The error of a row and PyTorch's own, of the result that comes nearest to its limit. Raises Wrong beyond: twice
        PyTorch's own, or what one rounding costs where PyTorch has none."""
        if len(results) != len(self.truth):
            raise Wrong(f"{len(results)} results in place of {len(self.truth)}")
        found = []
        for result, truth, limits, plain in zip(results, self.truth, self.limits, self.plain):
            of_result = errors(result, truth)
            for error, limit, of in zip(of_result, limits, ("a row", "a number")):
                if not error <= limit:
                    raise Wrong(f"error of {of} {error:.1e} against float64, limit {limit:.1e}", of_result[0])
            found.append((of_result[0] / limits[0], of_result[0], plain[0]))
        return max(found)[1:]


class Bench(Judge):
    """The inputs of a problem and their truth; checks a tile and times it."""

    def __init__(self, problem: Problem, dtype: torch.dtype, device: torch.device):
        super().__init__(problem.launcher, dtype, device)
        self.problem, self.dtype, self.device = problem, dtype, device

    def run(self):
        """The launcher, once."""
        return self.problem.launcher.call(*self.inputs)

    def check(self) -> None:
        """Raises Wrong where the result with the tile now in force is not right."""
        with poisoned():
            self.judge(outputs(self.run()))

    def check_unchecked(self, runs: int = 5) -> None:
        """Raises Wrong where other inputs, at a larger size too, do not give what they should, to the same bits in each run.

        For tiles of tiles.UNCHECKED: a race may leave a single result right.
        """
        for seed, launcher in enumerate((self.problem.launcher, self.problem.larger or self.problem.launcher), 1):
            judge = Judge(launcher, self.dtype, self.device, seed=seed)
            with poisoned():
                first = outputs(launcher.call(*judge.inputs))
                judge.judge(first)
                for _ in range(runs - 1):
                    if not all(map(torch.equal, first, outputs(launcher.call(*judge.inputs)))):
                        raise Wrong("the same inputs give other bits")


class DeviceClock:
    """Times on the device: events around a call that is launched while the device is still busy, so that Python does not count."""

    def __init__(self, device: torch.device, rounds: int = 15):
        self.rounds = rounds
        self.flushed = torch.empty(256 * 2**20, dtype=torch.int8, device=device)  # twice the largest L2 there is
        square, begun = torch.randn(4096, 4096, dtype=torch.float16, device=device), self.now()
        while self.now() - begun < 1.0:  # until the chip has its clocks up
            square @ square
            torch.cuda.synchronize()

    def now(self) -> float:
        return time.monotonic()

    def lost(self) -> bool:
        """Whether the device has stopped answering: an illegal access breaks all that follows in a process, whoever made it."""
        try:
            torch.cuda.synchronize()
            return torch.ones(1, device=self.flushed.device).item() != 1
        except Exception:
            return True

    def seconds(self, problem: Problem, tile: Tile, run: Callable[[], object]) -> float:
        """The median of one call's seconds, warm, from cold caches."""
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        lead = int(
            2e9 * min(0.02, 2 * (time.perf_counter() - begun) + 5e-5)
        )  # in clock cycles: twice what Python takes to launch it
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.rounds)]
        for start, end in events:
            self.flushed.zero_()
            torch.cuda._sleep(lead)
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3
