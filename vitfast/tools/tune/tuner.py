"""Settles problems: tries their candidates and keeps what is faster in the user's own table."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from dataclasses import dataclass, field

import torch

from ...errors import both_ends
from ...kernels import tiles
from ...kernels.launch import record
from ...kernels.tiles import KernelConfig
from ..child import Lost
from ..verify import Judge, Wrong, poisoned
from ..verify.draw import Draw, Sizes
from ..verify.launcher import Launcher, outputs
from ..verify.launchers import launchers
from . import user_table
from .search import GAIN, Search

NO_ROOM = "its tensors do not fit in the GPU's memory; give a smaller --batch-size"
AHEAD = 4  # problems whose candidates are compiled while others are timed
# Operations that run inside of others. They are settled first, so that the others are timed with the best of these.
INNER = ("column_sums", "scale_rows", "gelu_bwd", "weight_grad_sum", "attention_bwd_dq", "attention_bwd_dkdv")


@dataclass
class Problem:
    """One tile to choose, for an operation at a shape class; its search, and what came of it."""

    op: str
    bits: str
    shape: str
    name: str
    launcher: Launcher  # it is timed with this one
    start: KernelConfig
    candidates: list[KernelConfig]  # of other providers, from which the search starts too
    absent: dict[str, str]  # provider -> why it cannot run here
    compiling: dict[KernelConfig, list[Future]] = field(default_factory=dict)
    failures: dict[KernelConfig, str] = field(default_factory=dict)
    note: str = ""  # why it has ended early: the time was up, or the memory too small

    def __post_init__(self):
        self.search = Search([self.start, *self.candidates])
        self.best = self.start  # or the one put into the user's table since

    @property
    def key(self) -> tuple[str, str, str]:
        return self.op, self.bits, self.shape

    @property
    def finished(self) -> bool:
        return not self.note

    @property
    def before(self) -> float:
        """Seconds of the tile that was used at the start."""
        return self.search.time(self.start)

    @property
    def after(self) -> float:
        """Seconds of the best."""
        return self.search.time(self.best)

    def compiled(self, *candidates: KernelConfig) -> bool:
        """Whether no compilation of these is under way."""
        return all(future.done() for config in candidates for future in self.compiling.get(config, []))

    def __str__(self) -> str:
        """The times before and after, and those of each provider."""
        named = f"{self.op} {self.shape}" + ("" if self.bits == "16" else f" {self.bits} bit")
        times = self.search.times
        if not times:
            return f"{named:<34} not reached: {self.note}"
        ms = lambda seconds: "does not run" if math.isinf(seconds) else f"{1e3 * seconds:.3f} ms"  # noqa: E731
        first = f"{named:<34} {ms(self.before):>12} as it was"
        if self.start in self.failures:
            first += f" ({self.failures[self.start]})"
        if self.best != self.start:
            gain = "" if math.isinf(self.before) else f" ({self.before / self.after:.2f}x)"
            first += f", {ms(self.after)} now{gain}: {self.best}"
        said: dict[str, str] = {}
        for provider in dict.fromkeys(config.provider for config in times):
            own = [config for config in times if config.provider == provider]
            said[provider] = ms(min(map(self.search.time, own)))
            if said[provider] == ms(math.inf):  # the provider's first failure says why
                said[provider] = next(
                    (self.failures[config] for config in own if config in self.failures), said[provider]
                )
        said |= {name: reason for name, reason in self.absent.items() if name not in said}
        counts = f"    {len(times)} candidates, {len(self.failures)} of them refused"
        rest = [f"    {provider:<14} {text}" for provider, text in said.items()]
        return "\n".join([first, *rest, counts + (f"; {self.note}" if self.note else "")])


class Tuner:
    """Settles one problem after another until the time is up.

    device, clock and compiler are given, so that tests need no GPU: `clock.now()`, `clock.lost()`,
    `clock.seconds(problem, tile, run)`; `compiler.submit(launch)` -> a future of (bytes of shared memory, "" or what
    went wrong). trying: called with a candidate's entry of the table before it runs, and with None after it.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        gpu: str,
        clock,
        compiler,
        seconds: float = math.inf,
        trying: Callable[[dict | None], None] = lambda entry: None,
    ):
        self.dtype, self.device, self.gpu = dtype, device, gpu
        self.clock, self.compiler, self.trying = clock, compiler, trying
        self.deadline = clock.now() + seconds
        self.refused = user_table.refused(gpu)
        self.kept: set[tuple] = set()  # keys of the problems whose tile in the user's table was changed
        self.checks = self.timings = self.unreached = 0

    @property
    def left(self) -> float:
        return self.deadline - self.clock.now()

    def problems(self, sizes: Sizes, only: str = "") -> list[Problem]:
        """The tiles that the launchers use at these sizes, each with the plainest launcher that does.

        only: the operations whose name contains this are taken.
        """
        found: dict[tuple, tuple[int, Problem]] = {}
        for name, launcher in launchers(sizes).items():
            if launcher.variant:
                continue
            with tiles.using(sm=tiles.generation(self.device)), tiles.using() as used:
                record(lambda launcher=launcher: self._on_meta(launcher))
            for op, bits, shape in used:
                key = op, bits, shape
                if only not in op or (key in found and found[key][0] <= len(used)):
                    continue
                like = torch.empty(0, dtype=torch.float32 if bits == "32" else self.dtype, device=self.device)
                start, shipped = tiles.lookup(op, like, shape), tiles.shipped(op, like, shape)
                starts = dict.fromkeys([start, shipped, *tiles.candidates(op, like, shape)])
                absent = tiles.absent(op, like, shape)
                problem = Problem(op, bits, shape, name, launcher, start, list(starts)[1:], absent)
                found[key] = len(used), problem
        return sorted((problem for _, problem in found.values()), key=lambda p: p.op not in INNER)

    def _on_meta(self, launcher: Launcher):
        return launcher.call(*launcher.make(Draw(self.dtype, torch.device("meta"))))

    def run(self, problems: list[Problem]) -> Iterator[Problem]:
        """Yields each problem when it is settled; the user's table gets faster tiles as they are found."""
        waiting, active = deque(problems), []
        while active or (waiting and self.left > 0):
            while waiting and len(active) < AHEAD and self.left > 0:
                active.append(waiting.popleft())
                self._compile(active[-1], active[-1].search.wave)
            ready = next((p for p in active if p.compiled(*p.search.wave)), active[0])
            self._wave(ready)
            if not ready.note and self._compile(ready, ready.search.advance()):
                continue
            active.remove(ready)
            yield ready
        self.unreached = len(waiting)

    def _compile(self, p: Problem, wave: list[KernelConfig]) -> list[KernelConfig]:
        """Has the launches of a wave compiled in the background; cublaslt makes none. Returns the wave."""
        for config in wave:
            if reason := self.refused.get((*p.key, config)):
                p.failures[config] = reason
            elif config.provider != "cublaslt":
                try:
                    with tiles.using(sm=tiles.generation(self.device)), tiles.using(p.op, config, p.shape):
                        launches = record(lambda: self._on_meta(p.launcher))
                    p.compiling[config] = [self.compiler.submit(launch) for launch in launches]
                except Exception as error:
                    if config != p.start:  # p.start is what runs today, and is tried whatever the compiler says
                        p.failures[config] = both_ends(f"{type(error).__name__}: {error}")
        return wave

    def _wave(self, p: Problem) -> None:
        """Checks and times a wave's candidates, compiled ones first; keeps a faster one at once."""
        rest = list(p.search.wave)
        p.note = self._time_is_up()
        if not p.note:
            try:
                judge = Judge(p.launcher, self.dtype, self.device)
            except torch.cuda.OutOfMemoryError:
                p.note = NO_ROOM
        while rest and not p.note:
            config = next((config for config in rest if p.compiled(config)), rest[0])
            rest.remove(config)
            p.search.times[config] = self._measure(p, config, judge) if self._runs(p, config) else None
            self._keep(p, judge)
            p.note = p.note or self._time_is_up()

    def _time_is_up(self) -> str:
        return "" if self.left > 0 else "the time was up"

    def _runs(self, p: Problem, config: KernelConfig) -> bool:
        """Waits for a candidate's compilations; False, with an entry in failures, if it must not be tried."""
        limit = tiles.SHARED_LIMIT.get(tiles.generation(self.device), math.inf)
        for future in p.compiling.pop(config, []):
            try:
                shared, failure = future.result(timeout=max(0.0, self.left) if math.isfinite(self.left) else None)
            except NotDone:
                p.failures[config] = "the time was up before it was compiled"
                break
            if shared > limit:
                failure = f"needs {shared:,} bytes of shared memory, {limit:,} are there"
            if failure and config != p.start:
                p.failures[config] = failure
                break
        return config not in p.failures

    def _measure(self, p: Problem, config: KernelConfig, judge: Judge) -> float | None:
        """Checks and times a candidate; None, with an entry in failures, if it is wrong or does not run.

        Raises Lost where it has broken the GPU's context.
        """
        run = lambda: p.launcher.call(*judge.inputs)  # noqa: E731
        self.trying(tiles.to_record(p.op, self.gpu, p.bits, p.shape, config))
        seconds = None
        try:
            with tiles.using(p.op, config, p.shape):
                self.checks += 1
                with poisoned():
                    judge.judge(outputs(run()))
                self.timings += 1
                seconds = self.clock.seconds(p, config, run)
        except Exception as error:
            text = both_ends(str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}")
            p.failures[config] = text
            if not isinstance(error, Wrong) and self.clock.lost():
                raise Lost(f"has broken the GPU's context ({text})") from error
            if config == p.start and isinstance(error, torch.cuda.OutOfMemoryError):
                p.note = NO_ROOM  # without its time, no candidate can be called faster
        self.trying(None)
        return seconds

    def _keep(self, p: Problem, judge: Judge) -> None:
        """Puts the best tile into the user's table, if it is still faster when both are tried once more."""
        while (best := p.search.best) != p.best and p.search.time(best) < GAIN * p.after:
            if p.start not in p.search.times or p.note or self.left <= 0:
                return
            for config in (p.best, best):
                if p.search.times[config] is not None:
                    p.search.times[config] = self._measure(p, config, judge)
            if p.search.time(best) < GAIN * p.search.time(p.best) and not p.note:
                user_table.keep(tiles.to_record(p.op, self.gpu, p.bits, p.shape, best))
                p.best = best
                self.kept.add(p.key)
