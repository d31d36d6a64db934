"""Times the rivals of a question (questions.py) in turns: right before fast, then back to back.

    python bench/rivals.py NAME --folder DIR [--ends EPOCH_SECONDS]

Each rival is built, compared with float64 and warmed up. Then they take turns, A B A B, each for SECONDS without a
pause, so that the power limit binds as in training. At last they are compared with float64 again. A cold start
misleads: two programs of one kernel that differ by 4 % from a cold chip can be equally fast at its power limit. The
first call of a turn does not count.

DIR/NAME.json has what pytest-benchmark's files have (result_files.py reads both): a case for each rival under the name
that bench_model.py or bench_ops.py gives it, and besides "rivals", by name: milliseconds a call, those of each turn,
those of Python alone, seconds until it was ready (compiling included), errors; "missing", why a rival has no time; and
"compiled", how many kernels of ours Triton compiled. What fails or is wrong is out, and the others go on. The file is
written anew after every round.
"""

import argparse
import contextlib
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from unittest import mock

import bench_model
import bench_ops
import machine
import pytest
import torch
import triton
from asking import Rivals
from machine import wall
from questions import QUESTIONS
from result_files import ACCELERATED

from vitfast.errors import both_ends
from vitfast.kernels import dependent, tiles

SECONDS, ROUNDS = (2.0, 2) if machine.GPU else (0.02, 2)
AHEAD = 8  # calls that Python may be ahead of the device
compiled_here = []  # names of the kernels of ours that Triton compiled in this process


def configuration(op: str, provider: str) -> tiles.KernelConfig | None:
    """A configuration of a provider for 16 bits on this GPU, if possible not the shipped one, or None."""
    like = torch.empty(0, dtype=torch.bfloat16, device="cuda" if machine.GPU else "cpu")
    # products have the default below
    shapes = {"attention": "d64n256", "patch_embed": "u8-even-large", "norm_linear": "768r256"}
    shape = next((shape for word, shape in shapes.items() if op.startswith(word)), "768x3072")
    others = [*tiles.candidates(op, like, shape), tiles.shipped(op, like, shape)]
    libraries = [tiles.config(provider=provider)] if provider in ("cublaslt", "none") else []
    return next((config for config in others + libraries if config.provider == provider), None)


@contextlib.contextmanager
def overridden(name: str) -> Iterator[None]:
    """A context in which operations take the providers that the name of a rival gives."""
    with contextlib.ExitStack() as stack:
        for part in name.split(" | ")[1:]:
            op, provider = part.split("=")
            if op == "pdl":  # plans of its own, since those that there are have it
                stack.enter_context(tiles.using())
                stack.enter_context(mock.patch.object(dependent, "enabled", provider == "on"))
                continue
            if (found := configuration(op, provider)) is None:
                raise ValueError(f"{op} has no provider {provider!r} on this GPU")
            stack.enter_context(tiles.using(op, found))
        yield


class Rival:
    """One rival of a question, ready to be timed."""

    def __init__(self, of: Rivals, name: str):
        self.name, self.turns, self.lead = name, [], 0.0
        gc.collect()  # rivals that failed
        torch.cuda.empty_cache()
        began = time.monotonic()
        make = bench_ops.timed if of.operation else bench_model.timed
        self.timed = make(*(of.operation or (of.what,)), of.shape, name.split(" | ")[0])
        with self.context():
            self.timed.judge()
            self.timed.ready(0.0)
            self.host = min(self.host_seconds() for _ in range(AHEAD))
            if of.operation:
                self.lead = self.waits_for_python()
        self.ready_s = round(time.monotonic() - began, 1)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """A context to build, time and compare in: operations take the providers that the name gives."""
        with self.timed.context(), overridden(self.name):
            yield

    def host_seconds(self) -> float:
        """For how long Python is busy with a call that finds the device idle, with an empty queue."""
        prepared, start = self.timed.prepare(), wall()
        self.timed.call(*prepared)
        return time.perf_counter() - start

    def waits_for_python(self) -> float:
        """Seconds for which the device is kept busy before each call; 0 where calls take longer than Python."""
        begun = wall()
        for _ in range(AHEAD):
            self.timed.call(*self.timed.prepare())
        host = time.perf_counter() - begun
        return 1.5 * host / AHEAD if wall() - begun < 1.2 * host else 0.0

    def turn(self, seconds: float) -> None:
        """Calls without a pause for so many seconds; keeps the time of each."""
        stamps, read = [], machine.clock()
        with self.context():
            end = wall() + seconds
            while len(stamps) < 3 or time.perf_counter() < end:
                prepared = self.timed.prepare()
                if machine.GPU and self.lead:
                    torch.cuda._sleep(int(2e9 * self.lead))  # counted in clock cycles
                start = read()
                self.timed.call(*prepared)
                stamps.append((start, read()))
                if machine.GPU and len(stamps) > AHEAD:
                    stamps[-AHEAD - 1][1].event.synchronize()
            self.turns.append([last - first for first, last in stamps[1:]])

    def compare_again(self) -> None:
        with self.context():
            self.timed.judge(after=True)

    def summary(self) -> dict:
        """The numbers that the question reads: milliseconds a call and a turn, memory and errors."""
        calls, peak = sum(self.turns, []), self.timed.peak
        found = dict(ms=1e3 * statistics.median(calls), turns=[1e3 * statistics.median(turn) for turn in self.turns])
        found |= dict(calls=len(calls), lead_ms=1e3 * self.lead, ready_s=self.ready_s, peak_mib=peak and peak / 2**20)
        found |= dict(host_ms=1e3 * self.host)
        return found | self.timed.errors

    def entry(self) -> dict:
        """The numbers that the tables read."""
        calls = sum(self.turns, [])
        median, (low, _, high) = statistics.median(calls), statistics.quantiles(calls, n=4)
        stats = dict(median=median, iqr=high - low, rounds=len(calls))
        return dict(stats=stats, extra_info=self.timed.facts(median))


class Run:
    """All rivals of one question, and its result file."""

    def __init__(self, of: Rivals, path: Path):
        self.of, self.path, self.rivals, self.missing = of, path, {}, {}  # missing: name -> (state, reason)

    def each(self, names: Iterable[str], do: Callable[[str], object], limit: float = 0.0) -> None:
        """Does something for each rival; one that fails is out, with the reason."""
        for name in list(names):
            try:
                with machine.time_limit(limit):
                    do(name)
            except (Exception, pytest.skip.Exception) as error:
                skipped = isinstance(error, pytest.skip.Exception)
                reason = both_ends(str(error) if skipped else f"{type(error).__name__}: {error}")
                self.missing[name] = "skipped" if skipped else "failed", reason
                self.rivals.pop(name, None)
                print(f"{name}: {reason}", flush=True)

    def build(self, name: str, ends: float) -> None:
        """Makes a rival ready, if that ends in time."""
        left = ends - time.time()
        if left < 0:
            raise TimeoutError("too little time was left to begin")
        with machine.time_limit(left if math.isfinite(left) else 0.0):
            self.rivals[name] = Rival(self.of, name)
        print(f"{name}: right (error {self.rivals[name].timed.errors['error']:.1e}), ready", flush=True)

    def write(self) -> None:
        cases = dict(benchmarks=[], failed=[], skipped=[])
        for name, (state, reason) in self.missing.items():
            cases[state].append(self.of.case(name) | dict(reason=reason))
        timed = {name: rival for name, rival in self.rivals.items() if rival.turns}
        for name, rival in timed.items():
            # The tables show no variant, which only a question is about, and nothing that was not compared again.
            if "error_after" in rival.timed.errors and " | " not in name:
                cases["benchmarks"].append(self.of.case(name) | rival.entry())
        rivals, missing = {n: r.summary() for n, r in timed.items()}, {n: why for n, (_, why) in self.missing.items()}
        machine.write_results(self.path, **cases, rivals=rivals, missing=missing, compiled=len(compiled_here))

    def all(self, ends: float = math.inf) -> bool:
        """Whether every rival that could be tried has a time, and was right before and after."""
        timing = (ROUNDS + 1) * SECONDS * len(self.of.names) + 5  # seconds, the second comparison included
        # `accelerate` makes torch.compile forget what it has compiled
        first = sorted(self.of.names, key=lambda name: not name.startswith(ACCELERATED))
        self.each(first, lambda name: self.build(name, ends - timing))
        self.rivals = {name: self.rivals[name] for name in self.of.names if name in self.rivals}
        self.each(self.rivals, lambda name: self.rivals[name].turn(SECONDS / 4), 60)  # until the chip is warm
        for rival in self.rivals.values():
            rival.turns = []
        for _ in range(ROUNDS):
            self.each(self.rivals, lambda name: self.rivals[name].turn(SECONDS), 60)
            self.write()
        self.each(self.rivals, lambda name: self.rivals[name].compare_again())
        self.write()
        for name, rival in self.rivals.items():
            print(f"{name}: {rival.summary()}", flush=True)
        return "failed" not in (state for state, _ in self.missing.values())


def count(*, src, cache_hit: bool, **_) -> None:
    """Triton's listener: notes a kernel of ours that was compiled."""
    if not cache_hit and getattr(getattr(src, "fn", None), "__module__", "").startswith("vitfast"):
        compiled_here.append(src.name)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME", help="a question of questions.py that has rivals")
    parser.add_argument("--folder", type=Path, required=True, help="where NAME.json is written")
    parser.add_argument("--ends", type=float, default=math.inf, metavar="EPOCH_SECONDS", help="the moment of the end")
    args = parser.parse_args(argv)
    torch.backends.cudnn.benchmark, triton.knobs.compilation.listener = machine.GPU, count
    # Rivals share code, and each has its own best batch: none is compiled for any batch because another has one.
    torch._dynamo.config.automatic_dynamic_shapes = False
    machine.ceilings()
    machine.cold()  # before anybody's memory is counted: what flushes the L2 cache stays
    return 0 if Run(QUESTIONS[args.name].run, args.folder / f"{args.name}.json").all(args.ends) else 1


if __name__ == "__main__":
    sys.exit(main())
