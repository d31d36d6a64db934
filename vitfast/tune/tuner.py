"""Finds the fastest tiles on this very GPU: `vitfast tune`. Never runs by itself.

Every tile that a training step or a single operation uses at a model's sizes is one problem. Its candidates are the tile of the table, its
rivals (other providers: cuBLAS, tensor descriptors, another path of attention, the libraries that are installed) and the neighbours of
each (one number doubled or halved, more or fewer warps and stages), a wave at a time for as long as that gets faster (search.py). A
candidate is compiled in a process of its own while others are timed (offline.py), then compared with float64 at the size that is timed (one
that is wrong gets no time; a provider of tiles.UNCHECKED is compared many times, at a larger size too), then timed: its
launcher alone, the caches flushed (trial.py). What is faster, and still is when both are tried once more, goes into the
user's own table (tuned.py) at once, and the operations use it from then on; a run that is interrupted keeps what it found,
and the next one goes on from there.
"""

import contextlib
import dataclasses
import gc
import json
import math
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from dataclasses import dataclass, field

import torch

from ..errors import InputError, both_ends, unknown
from ..kernels import tiles
from ..kernels.launch import Launch, record
from ..kernels.tiles import Tile
from ..verify import Wrong
from ..verify.launchers import Draw, Launcher, Sizes, launchers
from . import user_table as tuned
from .search import GAIN, Search
from .trial import Bench, DeviceClock, Problem

# The batch: its rows fill whole tiles but for the last one, so that what reaches past the end is seen.
MODELS = {
    "S/16": Sizes(batch=240, tokens=197, width=384, heads=6, hidden=1536, image=224, patch=16),
    "B/16": Sizes(batch=112, tokens=197, width=768, heads=12, hidden=3072, image=224, patch=16),
    "B/16 384": Sizes(batch=48, tokens=577, width=768, heads=12, hidden=3072, image=384, patch=16),
    "L/16": Sizes(batch=80, tokens=197, width=1024, heads=16, hidden=4096, image=224, patch=16),
    "H/14": Sizes(batch=48, tokens=257, width=1280, heads=16, hidden=5120, image=224, patch=14),
}
SECONDS = 400  # for each model
AHEAD = 4  # problems whose candidates are compiled while others are timed
HANGS = 60  # seconds after which a candidate's trial, which takes a tenth of one, is given up with its process
# What others run too comes first, so that they are judged with the best there is.
PARTS = ("column_sums", "scale_rows", "gelu_bwd", "weight_grad_sum", "attention_bwd_dq", "attention_bwd_dkdv")
GOES_ON = "VITFAST_TUNE_GOES_ON"  # environment: what a process that lost its GPU hands to the one it becomes


class DeviceLost(RuntimeError):
    """A candidate has broken the GPU's context: nothing more runs in this process."""


class NoRoom(RuntimeError):
    """The inputs of a problem do not fit in the GPU's memory."""


@dataclass
class Attempt:
    """A problem being searched: its candidates' compilations, and what came of them."""

    problem: Problem
    search: Search
    compiling: dict[Tile, list[Future]] = field(default_factory=dict)
    bench: Bench | None = None
    kept: Tile | None = None  # in the user's table, or in force from the start
    failures: dict[Tile, str] = field(default_factory=dict)
    unsure: bool = False  # the table's own tile failed for want of memory: nothing is known to be faster than it


@dataclass
class Settled:
    """What came of a problem: the table's tile and the best one with their seconds, each provider's best, and what could not be tried."""

    problem: Problem
    before: float
    after: float
    best: Tile
    providers: dict[str, float]
    failures: dict[Tile, str]
    candidates: int
    finished: bool  # False where the time was up, or the memory too small
    note: str = ""

    def __str__(self) -> str:
        if not self.candidates:
            return f"{str(self.problem):<34} not reached: {self.note}"
        ms = lambda seconds: "does not run" if math.isinf(seconds) else f"{1e3 * seconds:.3f} ms"  # noqa: E731
        lines = [f"{str(self.problem):<34} {ms(self.before):>12} as it was"]
        if self.problem.start in self.failures:
            lines[0] += f" ({self.failures[self.problem.start]})"
        if self.best != self.problem.start:
            gain = "" if math.isinf(self.before) else f" ({self.before / self.after:.2f}x)"
            lines[0] += f", {ms(self.after)} now{gain}: {self.best}"
        rest = {name: ms(seconds) for name, seconds in self.providers.items()}
        rest |= {name: reason for name, reason in self.problem.absent.items() if name not in rest}
        for tile in (self.problem.start, *self.problem.rivals):
            if math.isinf(self.providers.get(tile.provider, 0.0)) and tile in self.failures:
                rest[tile.provider] = self.failures[tile]
        lines += [f"    {name:<14} {said}" for name, said in rest.items()]
        counts = f"    {self.candidates} candidates, {len(self.failures)} of them refused"
        lines.append("; ".join([counts, *([self.note] if self.note else [])]))
        return "\n".join(lines)


class Tuner:
    """Settles one problem after another until the time is up.

    device, clock and compiler are given, so that it can be watched without a GPU: `clock.now()`, `clock.lost()`,
    `clock.seconds(problem, tile, run)`; `compiler.submit(launch)` -> a future of (bytes of shared memory, "" or what went wrong).
    hung: called in a thread of its own when a trial takes longer than `hangs` seconds.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        gpu: str,
        clock,
        compiler,
        seconds: float = math.inf,
        bench: type = Bench,
        hung: Callable[[], None] | None = None,
        hangs: float = HANGS,
    ):
        self.dtype, self.device, self.gpu, self.clock, self.compiler, self.bench = (
            dtype,
            device,
            gpu,
            clock,
            compiler,
            bench,
        )
        self.hung, self.hangs = hung, hangs
        self.deadline = clock.now() + seconds
        self.refused = tuned.refused(gpu)
        self.kept: set[tuple] = set()  # keys of the problems whose tile in the user's table was changed
        self.active: list[Attempt] = []
        self.checks = self.timings = self.unreached = 0

    @property
    def left(self) -> float:
        return self.deadline - self.clock.now()

    def problems(self, sizes: Sizes, only: str = "", done: frozenset = frozenset()) -> list[Problem]:
        """Every tile that the launchers use at these sizes (whose operation's name contains `only`), each with the plainest one that does."""
        found: dict[tuple, tuple[int, Problem]] = {}
        larger = launchers(dataclasses.replace(sizes, batch=2 * sizes.batch + 1))
        for name, launcher in launchers(sizes).items():
            if launcher.variant:
                continue
            with tiles.targeting(tiles.generation(self.device)), tiles.watching() as used:
                record(lambda launcher=launcher: self._on_meta(launcher))
            for (op, bits, shape), _ in used.items():
                key = op, bits, shape
                if only not in op or key in done or (key in found and found[key][0] <= len(used)):
                    continue
                like = torch.empty(0, dtype=torch.float32 if bits == "32" else self.dtype, device=self.device)
                start, shipped = tiles.lookup(op, like, shape), tiles.shipped(op, like, shape)
                starts = dict.fromkeys([start, shipped, *tiles.candidates(op, like, shape, unchecked=True)])
                absent = tiles.absent(op, like, shape)
                problem = Problem(op, bits, shape, name, launcher, start, list(starts)[1:], absent, larger[name])
                found[key] = len(used), problem
        return sorted((problem for _, problem in found.values()), key=lambda p: p.op not in PARTS)

    def _on_meta(self, launcher: Launcher):
        return launcher.call(*launcher.make(Draw(self.dtype, torch.device("meta"))))

    def run(self, problems: list[Problem]) -> Iterator[Settled]:
        """Yields each problem when it is settled; rows for the user's table are kept as soon as they are found."""
        waiting, active = deque(problems), self.active
        while active or (waiting and self.left > 0):
            while waiting and len(active) < AHEAD and self.left > 0:
                active.append(self._begin(waiting.popleft()))
            ready = next((a for a in active if all(map(_done, a.compiling.values()))), active[0])
            note = ""
            try:
                if self.left > 0:
                    self._wave(ready)
                if self.left > 0 and self._compile(ready, ready.search.advance()):
                    continue
                note = "" if self.left > 0 else "the time was up"
            except NoRoom as error:
                note = str(error)
            active.remove(ready)
            yield self._settled(ready, note)
        self.unreached = len(waiting)

    def _begin(self, problem: Problem) -> Attempt:
        attempt = Attempt(problem, Search([problem.start, *problem.rivals]), kept=problem.start)
        self._compile(attempt, attempt.search.wave)
        return attempt

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
        """What a candidate would launch; nothing for a library."""
        if tile.provider in tiles.LIBRARIES:
            return []
        with tiles.targeting(tiles.generation(self.device)), tiles.override(problem.op, tile, problem.shape):
            return record(lambda: self._on_meta(problem.launcher))

    def _wave(self, attempt: Attempt) -> None:
        """Checks and times the candidates of a wave, those that are compiled first, and keeps what is faster at once."""
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
        return self._trial(attempt, tile)

    def _compiled(self, futures: list[Future]) -> None:
        """Waits for compilations; raises RuntimeError with what went wrong."""
        limit = tiles.SHARED_LIMIT.get(tiles.generation(self.device), math.inf)
        for future in futures:
            shared, failure = future.result(timeout=max(0.0, self.left) if math.isfinite(self.left) else None)
            if failure:
                raise RuntimeError(failure)
            if shared > limit:
                raise RuntimeError(f"needs {shared:,} bytes of shared memory, {limit:,} are there")

    def _trial(self, attempt: Attempt, tile: Tile) -> float | None:
        """Checks a candidate and times it; None, and the reason among the failures, where it is wrong or does not run."""
        p = attempt.problem
        row = tiles.to_record(p.op, self.gpu, p.bits, p.shape, tile)
        with tuned.trying(row), self._watched():
            try:
                with self._in_force(attempt, tile) as bench:
                    self.checks += 1
                    bench.check()
                    if tile.provider in tiles.UNCHECKED and tile not in attempt.search.times:
                        bench.check_unchecked()
                    self.timings += 1
                    return self.clock.seconds(p, tile, bench.run)
            except NoRoom:
                raise
            except Exception as error:
                text = both_ends(str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}")
                attempt.failures[tile] = text
                attempt.unsure |= tile == p.start and isinstance(error, torch.cuda.OutOfMemoryError)
                if not isinstance(error, Wrong) and self.clock.lost():
                    tuned.refuse(row, text)
                    raise DeviceLost(
                        f"{p}: {tile} has broken the GPU's context ({text}); it is not tried again"
                    ) from error
                return None

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Calls `hung` where the block does not end."""
        timer = threading.Timer(self.hangs, self.hung) if self.hung else None
        if timer:
            timer.daemon = True
            timer.start()
        try:
            yield
        finally:
            if timer:
                timer.cancel()

    @contextlib.contextmanager
    def _in_force(self, attempt: Attempt, tile: Tile) -> Iterator[Bench]:
        p = attempt.problem
        if attempt.bench is None:
            attempt.bench = self._bench(p)
        with tiles.override(p.op, tile, p.shape):
            yield attempt.bench

    def _bench(self, problem: Problem) -> Bench:
        """Inputs and truth; where there is no room, those of the other problems go, to be made again."""
        try:
            return self.bench(problem, self.dtype, self.device)
        except torch.cuda.OutOfMemoryError:
            for other in self.active:
                other.bench = None
        gc.collect()
        torch.cuda.empty_cache()
        try:
            return self.bench(problem, self.dtype, self.device)
        except torch.cuda.OutOfMemoryError:
            raise NoRoom("its inputs do not fit in the GPU's memory; give a smaller --batch-size") from None

    def _keep(self, attempt: Attempt) -> None:
        """Puts the best tile so far into the user's table, if it is still faster when both are tried once more, one after the other."""
        search, p = attempt.search, attempt.problem
        while (best := search.best) != attempt.kept and search.time(best) < GAIN * search.time(attempt.kept):
            if p.start not in search.times or attempt.unsure or self.left <= 0:
                return
            for tile in (attempt.kept, best):
                if search.times[tile] is not None:
                    search.times[tile] = self._trial(attempt, tile)
            if search.time(best) < GAIN * search.time(attempt.kept) and not attempt.unsure:
                tuned.keep(tiles.to_record(p.op, self.gpu, p.bits, p.shape, best))
                attempt.kept = best
                self.kept.add(p.key)

    def _settled(self, attempt: Attempt, note: str) -> Settled:
        search, p = attempt.search, attempt.problem
        providers: dict[str, float] = {}
        for tile in search.times:
            providers[tile.provider] = min(search.time(tile), providers.get(tile.provider, math.inf))
        before, after = search.time(p.start), search.time(attempt.kept)
        return Settled(p, before, after, attempt.kept, providers, attempt.failures, len(search.times), not note, note)


def _done(futures: list[Future]) -> bool:
    return all(future.done() for future in futures)


# ---- the command


def machine() -> tuple:
    """(device, the GPU's name, clock, compiler) of this machine.

    Raises InputError without a GPU, in Triton's interpreter, and where another process tunes this GPU.
    """
    from ..machine_code.compiler import Compiler

    if not torch.cuda.is_available():
        raise InputError("tuning measures times on a GPU, and there is none here")
    device = torch.device("cuda")
    compiler = Compiler(tiles.capability(device))
    compiler.lock = tuned.only_one(str(torch.cuda.get_device_properties(device).uuid))
    return device, torch.cuda.get_device_name(), DeviceClock(device), compiler


def tune(
    models: list[str],
    dtype: torch.dtype,
    only: str = "",
    seconds: float | None = None,
    batch_size: int | None = None,
    deterministic: bool = False,
) -> int:
    """Tunes these models on this GPU in `seconds` (SECONDS for each unless given), and prints what came of it. Returns the exit code.

    deterministic: libraries whose backward may add in any order are no candidates.

    Raises InputError for what `machine` refuses, for wrong options, and for an `only` that no operation has in its name.
    """
    for name in models:
        if name not in MODELS:
            raise unknown("model", name, MODELS)
    for name, value in (("seconds", seconds), ("batch-size", batch_size)):
        if value is not None and not value > 0:
            raise InputError(f"--{name} must be positive, got {value:g}")
    device, gpu, clock, compiler = machine()
    if deterministic:  # which the libraries' own predicate asks for (kernels/attention_libraries.py)
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(True, warn_only=True)
    earlier = json.loads(os.environ.pop(GOES_ON, "{}"))
    done: set[tuple] = {tuple(key) for key in earlier.get("done", [])}
    kept: set[tuple] = {tuple(key) for key in earlier.get("kept", [])}
    end = clock.now() + earlier.get("left", seconds or SECONDS * len(models))
    finished, found, tuner = True, bool(done), None

    def go_on() -> None:
        """Becomes a new process that tunes what is left: this one's GPU does not answer any more."""
        compiler.close()
        state = dict(done=[*done], kept=[*kept | tuner.kept], left=max(1.0, end - clock.now()))
        os.environ[GOES_ON] = json.dumps(state)
        command = [sys.executable, "-m", "vitfast", "tune", "--model", *models[models.index(model) :]]
        command += ["--dtype", str(dtype).removeprefix("torch."), *(["--only", only] if only else [])]
        command += [] if batch_size is None else ["--batch-size", str(batch_size)]
        command += ["--deterministic"] if deterministic else []
        sys.stdout.flush()
        os.execv(sys.executable, command)

    def hung() -> None:
        print(f"vitfast: a candidate has not ended after {HANGS} s; it is not tried again", file=sys.stderr, flush=True)
        go_on()

    try:
        for number, model in enumerate(models):
            begun = clock.now()
            sizes = MODELS[model] if batch_size is None else dataclasses.replace(MODELS[model], batch=batch_size)
            tuner = Tuner(dtype, device, gpu, clock, compiler, (end - begun) / (len(models) - number), hung=hung)
            problems = tuner.problems(sizes, only, frozenset(done))
            if not problems and not found:
                raise InputError(f"no operation has {only!r} in its name; there are {', '.join(tiles.RULES)}")
            found = True
            with _bar(len(problems), model) as (bar, say):
                for settled in tuner.run(problems):
                    if settled.finished:
                        done.add(settled.problem.key)
                    finished &= settled.finished
                    say(str(settled))
                    bar.update()
                    bar.set_postfix_str(
                        f"{len(tuner.kept)} faster, {tuner.timings} timed, at most {max(0.0, tuner.left):.0f} s more"
                    )
            finished &= not tuner.unreached
            kept |= tuner.kept
            took = clock.now() - begun
            print(
                f"{model}: {compiler.compilations} compilations, {tuner.checks} results checked, {tuner.timings} timings, {took:.0f} s"
            )
    except DeviceLost as error:
        print(f"vitfast: {error}", file=sys.stderr, flush=True)
        go_on()
    finally:
        compiler.close()
        kept |= tuner.kept if tuner else set()
        print(f"{len(kept)} tiles faster than before, kept in {tiles.user_table_path()}", flush=True)
    if not finished:
        print("Not everything was tried: the same command goes on from here.")
    return 0


@contextlib.contextmanager
def _bar(total: int, name: str):
    """A progress bar with the time left, on a terminal that has tqdm, and a print that does not disturb it."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        yield _NoBar(), print
        return
    with tqdm(total=total, desc=name, unit="tile", dynamic_ncols=True, disable=not sys.stderr.isatty()) as bar:
        yield bar, lambda text: tqdm.write(text, file=sys.stdout)


class _NoBar:
    def update(self) -> None: ...

    def set_postfix_str(self, text: str) -> None: ...
