"""Settles problems: tries the candidates for a tile and keeps what is faster in the user's own table."""

import math
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import torch

from ...errors import both_ends
from ...kernels import tiles
from ...kernels.launch import record
from ...kernels.tiles import KernelConfig
from ..verify import Judge, poisoned
from ..verify.draw import Draw, Sizes
from ..verify.launcher import Launcher, outputs
from ..verify.launchers import launchers
from . import user_table

# What these numbers change by in one step; all others double or halve. 40 registers of a thread are one program of 4
# warps more or fewer on a multiprocessor (168 for three, 128 for four).
STEPS = {"num_stages": 1, "STAGES": 1, "PER_SM": 1, "maxnreg": 40}
LARGEST = {"BLOCK_K": 512, "PROGRAMS": 2112}  # the largest values that are tried; 256 for others
GAIN = 0.98  # a tile must take less than this share of another's time to count as faster
REACH = 1.5  # a tile that takes longer than this times the best is not climbed from
# Operations that run inside of others. They are settled first, so that the others are timed with the best of these.
INNER = ("column_sums", "scale_rows", "gelu_bwd", "attention_bwd_dq", "attention_bwd_dkdv")
KEPT = "faster tiles are kept; tune the other operations with --only NAME"


def neighbours(config: KernelConfig) -> Iterator[KernelConfig]:
    """Tiles with one number changed; none for cuBLAS, which has no numbers."""
    for name, value in config.meta.items() if config.blocks else ():
        step = STEPS.get(name)
        for near in (value - step, value + step) if step else (value // 2, value * 2):
            if 0 < near <= LARGEST.get(name, 256):
                yield tiles.config(provider=config.provider, **{**config.meta, name: near})


@dataclass
class Problem:
    """One tile to choose, for an operation at a shape class, and what came of its candidates."""

    op: str
    bits: str
    shape: str
    launcher: Launcher  # a tile is timed by this one
    start: KernelConfig
    candidates: list[KernelConfig]  # of other kernels and of cuBLAS
    times: dict[KernelConfig, float] = field(default_factory=dict)  # seconds, infinite for those in failures
    failures: dict[KernelConfig, str] = field(default_factory=dict)  # why a candidate was refused
    note: str = ""  # why it has ended early

    def __post_init__(self):
        self.best = self.start

    def __str__(self) -> str:
        return f"{self.op} {self.shape}" + ("" if self.bits == "16" else f" {self.bits} bit")


def _ms(seconds: float) -> str:
    return "does not run" if math.isinf(seconds) else f"{1e3 * seconds:.3f} ms"


class Tuner:
    """Settles one problem after another.

    device, clock and compiler are given, so that tests need no GPU: `clock.now()`, `clock.lost()`,
    `clock.seconds(problem, tile, run)`; `compiler.submit(launch)` -> a future of (bytes of shared memory, "" or what
    went wrong).
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, gpu: str, clock, compiler):
        self.dtype, self.device, self.gpu, self.clock, self.compiler = dtype, device, gpu, clock, compiler
        self.until = math.inf  # when the time of a problem ends

    def problems(self, models: Iterable[Sizes]) -> list[Problem]:
        """The tiles that launchers use at these models' sizes, each with the plainest such launcher."""
        found: dict[tuple, tuple[int, Problem]] = {}
        for launcher in (each for sizes in models for each in launchers(sizes).values()):
            with tiles.using(sm=tiles.generation(self.device)), tiles.using() as used:
                record(lambda launcher=launcher: self._on_meta(launcher))
            for op, bits, shape in used:
                if (op, bits, shape) in found and found[op, bits, shape][0] <= len(used):
                    continue
                like = torch.empty(0, dtype=torch.float32 if bits == "32" else self.dtype, device=self.device)
                start, others = tiles.lookup(op, like, shape), tiles.candidates(op, like, shape)
                found[op, bits, shape] = len(used), Problem(op, bits, shape, launcher, start, others)
        return sorted((problem for _, problem in found.values()), key=lambda p: p.op not in INNER)

    def _on_meta(self, launcher: Launcher):
        return launcher.call(*launcher.make(Draw(self.dtype, torch.device("meta"))))

    def settle(self, p: Problem, seconds: float) -> None:
        """Tries a problem's candidates for at most so long, and climbs from each."""
        self.until = self.clock.now() + seconds
        try:
            self._wait([])
            judge = Judge(p.launcher, self.dtype, self.device)
            p.times[p.start] = self._seconds(p, p.start, judge)  # even if it does not compile: it is what runs today
            print(f"    {_ms(p.times[p.start])} as it was", flush=True)
            self._try(p, p.candidates, judge)
            for config in sorted(p.times, key=p.times.get):
                self._climb(p, config, judge)
        except torch.cuda.OutOfMemoryError:
            p.note = "its tensors do not fit in the GPU's memory; give a smaller --batch-size"
        except TimeoutError as error:
            p.note = str(error)

    def _climb(self, p: Problem, at: KernelConfig, judge: Judge) -> None:
        """Goes from a tile to its fastest neighbour, for as long as that is faster and near the best."""
        # The tile that is used today is climbed from even if it does not run: it may only be too large for this GPU.
        while at == p.start or p.times[at] < REACH * p.times[p.best]:
            near = list(neighbours(at))
            self._try(p, [config for config in near if config not in p.times], judge)
            fastest = min(near, key=p.times.get, default=at)
            if not p.times[fastest] < GAIN * p.times[at]:
                break
            at = fastest

    def _try(self, p: Problem, configs: list[KernelConfig], judge: Judge) -> None:
        """Times tiles while later ones compile; keeps one that is faster twice than the best so far."""
        compiling = {config: self._compile(p, config) for config in configs}
        for config, futures in compiling.items():
            self._wait(futures)
            if failure := next((failure for _, failure in map(Future.result, futures) if failure), ""):
                p.failures[config] = failure
            p.times[config] = math.inf if config in p.failures else self._seconds(p, config, judge)
            if p.times[config] < GAIN * p.times[p.best]:
                for each in (p.best, config):
                    p.times[each] = self._seconds(p, each, judge)
                if p.times[config] < GAIN * p.times[p.best]:
                    user_table.keep(config, op=p.op, gpu=self.gpu, bits=p.bits, shape=p.shape)
                    print(f"    {_ms(p.times[config])} in place of {_ms(p.times[p.best])}: {config}", flush=True)
                    p.best = config

    def _compile(self, p: Problem, config: KernelConfig) -> list[Future]:
        """Has the launches of a tile compiled in the background."""
        try:
            with tiles.using(sm=tiles.generation(self.device)), tiles.using(p.op, config, p.shape):
                return [self.compiler.submit(launch) for launch in record(lambda: self._on_meta(p.launcher))]
        except Exception:  # what refuses the tile here refuses it again when it runs
            return []

    def _wait(self, futures: list[Future]) -> None:
        """Waits for compilations. Raises TimeoutError where the problem's time ends first."""
        left = self.until - self.clock.now()
        if left <= 0 or wait(futures, left).not_done:
            raise TimeoutError("the time was up")

    def _seconds(self, p: Problem, config: KernelConfig, judge: Judge) -> float:
        """The time of a tile whose results are right; infinite, with an entry in failures, for any other.

        Raises OutOfMemoryError for p.start, without whose time no candidate can be called faster, and an OSError, which
        the command line shows as one line, where the GPU's context is broken.
        """
        run = lambda: p.launcher.call(*judge.inputs)  # noqa: E731
        try:
            with tiles.using(p.op, config, p.shape):
                with poisoned():
                    judge.judge(outputs(run()))
                return self.clock.seconds(p, config, run)
        except Exception as error:
            text = both_ends(f"{type(error).__name__}: {error}")
            if self.clock.lost():
                raise OSError(f"{p}: {config} has broken the GPU's context ({text}); {KEPT}") from error
            if config == p.start and isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            p.failures[config] = text
            return math.inf
