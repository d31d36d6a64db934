"""Settles problems: tries their candidates and keeps what is faster in the user's own table."""

import contextlib
import gc
import math
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from dataclasses import dataclass, field

import torch

from ...errors import both_ends
from ...kernels.configs import tiles
from ...kernels.configs.tiles import Tile
from ...kernels.launch import Launch, record
from ..verify import Wrong
from ..verify.draw import Draw, Sizes
from ..verify.launcher import Launcher
from ..verify.launchers import launchers
from . import user_table
from .search import GAIN, Search
from .trial import Problem, Trial

AHEAD = 4  # problems whose candidates are compiled while others are timed
# Operations that run inside of others: settled first, so that those are timed with the best there is.
INNER = ("column_sums", "scale_rows", "gelu_bwd", "weight_grad_sum", "attention_bwd_dq", "attention_bwd_dkdv")


class DeviceLost(RuntimeError):
    """The candidate that was tried last has broken the GPU's context: nothing more runs in this process."""


class NoRoom(RuntimeError):
    """The inputs of a problem do not fit in the GPU's memory."""


@dataclass
class Attempt:
    """A problem being searched, its candidates' compilations; and in the end what came of it."""

    problem: Problem
    search: Search
    best: Tile  # in force from the start, or put into the user's table since
    compiling: dict[Tile, list[Future]] = field(default_factory=dict)
    trial: Trial | None = None
    failures: dict[Tile, str] = field(default_factory=dict)
    unsure: bool = False  # the table's own tile failed for want of memory: nothing is known to be faster than it
    note: str = ""  # why it has ended early: the time was up, or the memory too small

    @property
    def finished(self) -> bool:
        return not self.note

    @property
    def tried(self) -> int:
        return len(self.search.times)

    @property
    def before(self) -> float:
        """Seconds of the table's tile."""
        return self.search.time(self.problem.start)

    @property
    def after(self) -> float:
        """Seconds of the best."""
        return self.search.time(self.best)

    def __str__(self) -> str:
        if not self.tried:
            return f"{str(self.problem):<34} not reached: {self.note}"
        ms = lambda seconds: "does not run" if math.isinf(seconds) else f"{1e3 * seconds:.3f} ms"  # noqa: E731
        lines = [f"{str(self.problem):<34} {ms(self.before):>12} as it was"]
        if self.problem.start in self.failures:
            lines[0] += f" ({self.failures[self.problem.start]})"
        if self.best != self.problem.start:
            gain = "" if math.isinf(self.before) else f" ({self.before / self.after:.2f}x)"
            lines[0] += f", {ms(self.after)} now{gain}: {self.best}"
        providers: dict[str, float] = {}
        for tile in self.search.times:
            providers[tile.provider] = min(self.search.time(tile), providers.get(tile.provider, math.inf))
        rest = {name: ms(seconds) for name, seconds in providers.items()}
        rest |= {name: reason for name, reason in self.problem.absent.items() if name not in rest}
        for tile in (self.problem.start, *self.problem.candidates):
            if math.isinf(providers.get(tile.provider, 0.0)) and tile in self.failures:
                rest[tile.provider] = self.failures[tile]
        lines += [f"    {name:<14} {said}" for name, said in rest.items()]
        counts = f"    {self.tried} candidates, {len(self.failures)} of them refused"
        lines.append("; ".join([counts, *([self.note] if self.note else [])]))
        return "\n".join(lines)


class Tuner:
    """Settles one problem after another until the time is up.

    device, clock and compiler are given, so that it can be watched without a GPU: `clock.now()`, `clock.lost()`,
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
        trial: Callable[[Problem, torch.dtype, torch.device], Trial] = Trial,
        trying: Callable[[dict | None], None] = lambda entry: None,
    ):
        self.dtype, self.device, self.gpu = dtype, device, gpu
        self.clock, self.compiler, self.trial = clock, compiler, trial
        self.trying = trying
        self.deadline = clock.now() + seconds
        self.refused = user_table.refused(gpu)
        self.kept: set[tuple] = set()  # keys of the problems whose tile in the user's table was changed
        self.active: list[Attempt] = []
        self.checks = self.timings = self.unreached = 0

    @property
    def left(self) -> float:
        return self.deadline - self.clock.now()

    def problems(self, sizes: Sizes, only: str = "") -> list[Problem]:
        """The tiles that the launchers use at these sizes, each with the plainest launcher that does.

        only: those of operations whose name contains it.
        """
        found: dict[tuple, tuple[int, Problem]] = {}
        for name, launcher in launchers(sizes).items():
            if launcher.variant:
                continue
            with tiles.targeting(tiles.generation(self.device)), tiles.watching() as used:
                record(lambda launcher=launcher: self._on_meta(launcher))
            for (op, bits, shape), _ in used.items():
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
        waiting, active = deque(problems), self.active
        while active or (waiting and self.left > 0):
            while waiting and len(active) < AHEAD and self.left > 0:
                problem = waiting.popleft()
                search = Search([problem.start, *problem.candidates])
                active.append(Attempt(problem, search, problem.start))
                self._compile(active[-1], search.wave)
            ready = next((a for a in active if all(map(_done, a.compiling.values()))), active[0])
            try:
                if self.left > 0:
                    self._wave(ready)
                if self.left > 0 and self._compile(ready, ready.search.advance()):
                    continue
                ready.note = "" if self.left > 0 else "the time was up"
            except NoRoom as error:
                ready.note = str(error)
            active.remove(ready)
            ready.trial = None
            yield ready
        self.unreached = len(waiting)

    def _compile(self, attempt: Attempt, wave: list[Tile]) -> list[Tile]:
        """Has a wave compiled in the background."""
        p = attempt.problem
        for tile in wave:
            if reason := self.refused.get((*p.key, tile)):
                attempt.failures[tile] = reason
                continue
            try:
                attempt.compiling[tile] = [self.compiler.submit(launch) for launch in self._launches(p, tile)]
            except Exception as error:
                if tile != p.start:  # which is tried whatever the compiler says: it is what runs today
                    attempt.failures[tile] = both_ends(f"{type(error).__name__}: {error}")
        return wave

    def _launches(self, problem: Problem, tile: Tile) -> list[Launch]:
        """The launches that a candidate would make; none for a library."""
        if tile.provider in tiles.LIBRARIES:
            return []
        with tiles.targeting(tiles.generation(self.device)), tiles.override(problem.op, tile, problem.shape):
            return record(lambda: self._on_meta(problem.launcher))

    def _wave(self, attempt: Attempt) -> None:
        """Checks and times the candidates of a wave, compiled ones first, and keeps what is faster at once."""
        rest = list(attempt.search.wave)
        while rest and self.left > 0:
            tile = next((t for t in rest if _done(attempt.compiling.get(t, []))), rest[0])
            rest.remove(tile)
            attempt.search.times[tile] = self._try(attempt, tile)
            self._keep(attempt)

    def _try(self, attempt: Attempt, tile: Tile) -> float | None:
        """Seconds of a candidate, None where it is refused: it does not compile, does not run, or is wrong."""
        if tile in attempt.failures:
            return None
        try:
            self._compiled(attempt.compiling.pop(tile, []))
        except NotDone:
            attempt.failures[tile] = "the time was up before it was compiled"
            return None
        except RuntimeError as error:
            if tile != attempt.problem.start:
                attempt.failures[tile] = str(error)
                return None
        return self._measure(attempt, tile)

    def _compiled(self, futures: list[Future]) -> None:
        """Waits for compilations; raises RuntimeError with what went wrong."""
        limit = tiles.SHARED_LIMIT.get(tiles.generation(self.device), math.inf)
        for future in futures:
            shared, failure = future.result(timeout=max(0.0, self.left) if math.isfinite(self.left) else None)
            if failure:
                raise RuntimeError(failure)
            if shared > limit:
                raise RuntimeError(f"needs {shared:,} bytes of shared memory, {limit:,} are there")

    def _measure(self, attempt: Attempt, tile: Tile) -> float | None:
        """Checks and times a candidate; None, and why among the failures, where it is wrong or does not run."""
        p = attempt.problem
        self.trying(tiles.to_record(p.op, self.gpu, p.bits, p.shape, tile))
        seconds = None
        try:
            with self._in_force(attempt, tile) as trial:
                self.checks += 1
                trial.check()
                self.timings += 1
                seconds = self.clock.seconds(p, tile, trial.run)
        except NoRoom:
            self.trying(None)
            raise
        except Exception as error:
            text = both_ends(str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}")
            attempt.failures[tile] = text
            attempt.unsure |= tile == p.start and isinstance(error, torch.cuda.OutOfMemoryError)
            if not isinstance(error, Wrong) and self.clock.lost():
                raise DeviceLost(f"has broken the GPU's context ({text})") from error
        self.trying(None)
        return seconds

    @contextlib.contextmanager
    def _in_force(self, attempt: Attempt, tile: Tile) -> Iterator[Trial]:
        """The problem's trial, with this tile inside; others' inputs go where memory is short."""
        p = attempt.problem
        for last in (False, True) if attempt.trial is None else ():
            try:
                attempt.trial = self.trial(p, self.dtype, self.device)
                break
            except torch.cuda.OutOfMemoryError:
                if last:
                    raise NoRoom("its inputs do not fit in the GPU's memory; give a smaller --batch-size") from None
                for other in self.active:
                    other.trial = None  # to be made again
            gc.collect()  # once the error, which holds its frames, is gone
            torch.cuda.empty_cache()
        with tiles.override(p.op, tile, p.shape):
            yield attempt.trial

    def _keep(self, attempt: Attempt) -> None:
        """Puts the best tile into the user's table, if it is still faster when both are tried once more."""
        search, p = attempt.search, attempt.problem
        while (best := search.best) != attempt.best and search.time(best) < GAIN * attempt.after:
            if p.start not in search.times or attempt.unsure or self.left <= 0:
                return
            for tile in (attempt.best, best):
                if search.times[tile] is not None:
                    search.times[tile] = self._measure(attempt, tile)
            if search.time(best) < GAIN * search.time(attempt.best) and not attempt.unsure:
                user_table.keep(tiles.to_record(p.op, self.gpu, p.bits, p.shape, best))
                attempt.best = best
                self.kept.add(p.key)


def _done(futures: list[Future]) -> bool:
    return all(future.done() for future in futures)
