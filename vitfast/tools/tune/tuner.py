"""Settles problems: tries their candidates and keeps what is faster in the user's own table."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from dataclasses import dataclass, field

import torch

from ...errors import both_ends
from ...kernels.configs import tiles
from ...kernels.configs.tiles import KernelConfig
from ...kernels.launch import record
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
    """One tile to choose, for an operation at a shape class, and the launcher that is timed with it."""

    op: str
    bits: str
    shape: str
    name: str
    launcher: Launcher
    start: KernelConfig
    candidates: list[KernelConfig]  # of other providers, from which the search starts too
    absent: dict[str, str]  # provider -> why it cannot run here

    @property
    def key(self) -> tuple[str, str, str]:
        return self.op, self.bits, self.shape

    def __str__(self) -> str:
        return f"{self.op} {self.shape}" + ("" if self.bits == "16" else f" {self.bits} bit")


@dataclass
class Attempt:
    """A problem being searched, its candidates' compilations; and in the end what came of it."""

    problem: Problem
    search: Search
    best: KernelConfig  # the tile used at the start, or the one put into the user's table since
    compiling: dict[KernelConfig, list[Future]] = field(default_factory=dict)
    failures: dict[KernelConfig, str] = field(default_factory=dict)
    note: str = ""  # why it has ended early: the time was up, or the memory too small

    @property
    def finished(self) -> bool:
        return not self.note

    @property
    def tried(self) -> int:
        return len(self.search.times)

    @property
    def before(self) -> float:
        """Seconds of the tile that was used at the start."""
        return self.search.time(self.problem.start)

    @property
    def after(self) -> float:
        """Seconds of the best."""
        return self.search.time(self.best)

    def compiled(self, *candidates: KernelConfig) -> bool:
        """Whether no compilation of these is under way."""
        return all(future.done() for config in candidates for future in self.compiling.get(config, []))

    def __str__(self) -> str:
        p = self.problem
        if not self.tried:
            return f"{str(p):<34} not reached: {self.note}"
        ms = lambda seconds: "does not run" if math.isinf(seconds) else f"{1e3 * seconds:.3f} ms"  # noqa: E731
        first = f"{str(p):<34} {ms(self.before):>12} as it was"
        if p.start in self.failures:
            first += f" ({self.failures[p.start]})"
        if self.best != p.start:
            gain = "" if math.isinf(self.before) else f" ({self.before / self.after:.2f}x)"
            first += f", {ms(self.after)} now{gain}: {self.best}"
        said: dict[str, str] = {}
        for provider in dict.fromkeys(config.provider for config in self.search.times):
            own = [config for config in self.search.times if config.provider == provider]
            said[provider] = ms(min(map(self.search.time, own)))
            if said[provider] == ms(math.inf):  # the provider's first failure says why
                said[provider] = next(
                    (self.failures[config] for config in own if config in self.failures), said[provider]
                )
        said |= {name: reason for name, reason in p.absent.items() if name not in said}
        counts = f"    {self.tried} candidates, {len(self.failures)} of them refused"
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

    def run(self, problems: list[Problem]) -> Iterator[Attempt]:
        """Yields each problem when it is settled; the user's table gets faster tiles as they are found."""
        waiting, active = deque(problems), []
        while active or (waiting and self.left > 0):
            while waiting and len(active) < AHEAD and self.left > 0:
                problem = waiting.popleft()
                search = Search([problem.start, *problem.candidates])
                active.append(Attempt(problem, search, problem.start))
                self._compile(active[-1], search.wave)
            ready = next((attempt for attempt in active if attempt.compiled(*attempt.search.wave)), active[0])
            self._wave(ready)
            if not ready.note and self._compile(ready, ready.search.advance()):
                continue
            active.remove(ready)
            yield ready
        self.unreached = len(waiting)

    def _compile(self, attempt: Attempt, wave: list[KernelConfig]) -> list[KernelConfig]:
        """Has the launches of a wave compiled in the background; a library makes none. Returns the wave."""
        p = attempt.problem
        for config in wave:
            if reason := self.refused.get((*p.key, config)):
                attempt.failures[config] = reason
            elif config.provider not in tiles.LIBRARIES:
                try:
                    with tiles.using(sm=tiles.generation(self.device)), tiles.using(p.op, config, p.shape):
                        launches = record(lambda: self._on_meta(p.launcher))
                    attempt.compiling[config] = [self.compiler.submit(launch) for launch in launches]
                except Exception as error:
                    if config != p.start:  # p.start is what runs today, and is tried whatever the compiler says
                        attempt.failures[config] = both_ends(f"{type(error).__name__}: {error}")
        return wave

    def _wave(self, attempt: Attempt) -> None:
        """Checks and times a wave's candidates, compiled ones first; keeps a faster one at once."""
        rest = list(attempt.search.wave)
        attempt.note = self._time_is_up()
        if not attempt.note:
            try:
                judge = Judge(attempt.problem.launcher, self.dtype, self.device)
            except torch.cuda.OutOfMemoryError:
                attempt.note = NO_ROOM
        while rest and not attempt.note:
            config = next((config for config in rest if attempt.compiled(config)), rest[0])
            rest.remove(config)
            attempt.search.times[config] = (
                self._measure(attempt, config, judge) if self._runs(attempt, config) else None
            )
            self._keep(attempt, judge)
            attempt.note = attempt.note or self._time_is_up()

    def _time_is_up(self) -> str:
        return "" if self.left > 0 else "the time was up"

    def _runs(self, attempt: Attempt, config: KernelConfig) -> bool:
        """Waits for a candidate's compilations; False, with an entry in failures, if it must not be tried."""
        limit = tiles.SHARED_LIMIT.get(tiles.generation(self.device), math.inf)
        for future in attempt.compiling.pop(config, []):
            try:
                shared, failure = future.result(timeout=max(0.0, self.left) if math.isfinite(self.left) else None)
            except NotDone:
                attempt.failures[config] = "the time was up before it was compiled"
                break
            if shared > limit:
                failure = f"needs {shared:,} bytes of shared memory, {limit:,} are there"
            if failure and config != attempt.problem.start:
                attempt.failures[config] = failure
                break
        return config not in attempt.failures

    def _measure(self, attempt: Attempt, config: KernelConfig, judge: Judge) -> float | None:
        """Checks and times a candidate; None, with an entry in failures, if it is wrong or does not run.

        Raises Lost where it has broken the GPU's context.
        """
        p = attempt.problem
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
            attempt.failures[config] = text
            if not isinstance(error, Wrong) and self.clock.lost():
                raise Lost(f"has broken the GPU's context ({text})") from error
            if config == p.start and isinstance(error, torch.cuda.OutOfMemoryError):
                attempt.note = NO_ROOM  # without its time, no candidate can be called faster
        self.trying(None)
        return seconds

    def _keep(self, attempt: Attempt, judge: Judge) -> None:
        """Puts the best tile into the user's table, if it is still faster when both are tried once more."""
        search, p = attempt.search, attempt.problem
        while (best := search.best) != attempt.best and search.time(best) < GAIN * attempt.after:
            if p.start not in search.times or attempt.note or self.left <= 0:
                return
            for config in (attempt.best, best):
                if search.times[config] is not None:
                    search.times[config] = self._measure(attempt, config, judge)
            if search.time(best) < GAIN * search.time(attempt.best) and not attempt.note:
                user_table.keep(tiles.to_record(p.op, self.gpu, p.bits, p.shape, best))
                attempt.best = best
                self.kept.add(p.key)
