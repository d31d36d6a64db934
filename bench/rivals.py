"""Times the rivals of a question (questions.py) in turns: right before fast, then back to back.

    python bench/rivals.py NAME [NAME...] --folder DIR [--ends EPOCH_SECONDS]

Each rival is built, compared with float64 and warmed up. Then they take turns, A B A B, each for SECONDS without a
pause, so that the power limit binds as in training; clock and power are read meanwhile. At last they are compared with
float64 again. A cold start misleads: two programs of one kernel that differ by 4 % from a cold chip can be equally fast
at its power limit. The first call of a turn does not count.

DIR/NAME.json has what pytest-benchmark's files have (result_files.py reads both): a case for each rival under the name
that bench_model.py or bench_ops.py gives it, and besides "rivals", by name: milliseconds a call, those of each turn,
watts, MHz, seconds until it was ready (compiling included), errors; "missing", why a rival has no time; and "compiled",
how many kernels of ours Triton compiled. What fails or is wrong is out, and the others go on. The file is written anew
after every round.
"""

import argparse
import contextlib
import datetime
import gc
import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import bench_model
import bench_ops
import harness
import machine
import peers
import pytest
import torch
import triton
from asking import Rivals
from harness import Call, Check, description
from machine import allocated, captured, cold, peak_bytes, wall, warm_up
from questions import QUESTIONS
from shapes import WHERE, Shape, planned

from vitfast import ops
from vitfast.cli.report_gpu import sample_clocks
from vitfast.errors import both_ends
from vitfast.kernels.configs import tiles
from vitfast.run.files import write_text

SECONDS, ROUNDS = (2.0, 2) if machine.GPU else (0.02, 2)
AHEAD = 8  # calls that Python may be ahead of the device
SAMPLED = dict(watts="power.draw", mhz="clocks.sm")
SETTINGS = bench_model.CASES | bench_model.ONCE
compiled_here = []  # names of the kernels of ours that Triton compiled in this process


def shape_of(name: str) -> Shape:
    """The shape of a name such as "B/16 224 B256"; on a CPU a toy under that name."""
    model, image, batch = name.split(" ")
    return next(iter(planned(Shape(model, int(image), int(batch[1:]))).values()))


def sample(found: list[dict], stop: threading.Event) -> None:
    """Reads clock and power until it is stopped, or a reading takes too long."""
    took = 0.0
    while machine.GPU and took < 1 and not stop.wait(0.25):
        begun = time.monotonic()
        found.append(sample_clocks() or dict.fromkeys(SAMPLED.values()))
        took = time.monotonic() - begun


def free_memory() -> None:
    gc.collect()
    if machine.GPU:
        torch.cuda.empty_cache()


class Rival:
    """One of those that are compared, in the state in which it is timed.

    A subclass has `build`, `judge` (compares with float64, before timing and after), `ready` (after the first
    comparison), `prepare` (before each call, not timed), `call`, and `facts` for the tables.
    """

    def __init__(self, of: Rivals, name: str):
        self.of, self.name, self.turns, self.samples, self.lead = of, name, [], [], 0.0
        self.setting, *overrides = name.split(" | ")
        self.overrides = [override.split("=") for override in overrides]
        free_memory()  # of rivals that failed
        began, self.before, self.peak = time.monotonic(), allocated(), None
        self.build()
        with self.context():
            self.errors = self.judge()
            self.ready()
        self.ready_s = round(time.monotonic() - began, 1)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Around everything: kernels of ours must run, and operations take the providers that the name says."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(ops.use_kernels(self.kernels))
            for op, provider in self.overrides:
                stack.enter_context(tiles.using(op, tiles.config(provider=provider)))
            yield

    def turn(self, seconds: float) -> None:
        """Calls without a pause for so many seconds; keeps the time of each."""
        stamps, samples, stop, read = [], [], threading.Event(), machine.clock()
        reader = threading.Thread(target=sample, args=(samples, stop), daemon=True)
        reader.start()
        try:
            with self.context():
                end = wall() + seconds
                while len(stamps) < 3 or time.perf_counter() < end:
                    prepared = self.prepare()
                    start = read()
                    self.call(prepared)
                    stamps.append((start, read()))
                    if machine.GPU and len(stamps) > AHEAD:
                        stamps[-AHEAD - 1][1].event.synchronize()
                self.turns.append([last - first for first, last in stamps[1:]])
        finally:
            stop.set()
            reader.join(1)
        self.samples += samples[len(samples) // 2 :]  # power is an average over the second before

    def summary(self) -> dict:
        calls = sum(self.turns, [])
        found = dict(ms=1e3 * statistics.median(calls), turns=[1e3 * statistics.median(turn) for turn in self.turns])
        for name, key in SAMPLED.items():
            read = [sampled[key] for sampled in self.samples if sampled[key] is not None]
            found[name] = statistics.median(read) if read else None
        peak = self.peak and self.peak / 2**20
        return (
            found | dict(calls=len(calls), lead_ms=1e3 * self.lead, ready_s=self.ready_s, peak_mib=peak) | self.errors
        )

    def entry(self) -> dict:
        """Its case for the tables."""
        calls = sum(self.turns, [])
        median, (low, _, high) = statistics.median(calls), statistics.quantiles(calls, n=4)
        stats = dict(median=median, iqr=high - low, rounds=len(calls))
        return self.of.case(self.name) | dict(stats=stats, extra_info=self.facts(median))


class ModelRival(Rival):
    """A whole model in a setting of bench_model: a training step, or inference."""

    kernels = property(lambda self: self.peer.kernels)

    def build(self) -> None:
        setting, model = SETTINGS[self.setting], WHERE + self.of.shape.rpartition(" ")[0]
        if self.of.what == "train":
            self.peer = peers.Peer(setting, shape_of(self.of.shape), training=True)
        else:
            self.peer = bench_model.inference_peer(setting, model, self.of.what)
        step, self.work = bench_model.work_of(self.peer)
        self.run = lambda: step(self.peer.images)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        with super().context(), self.peer.mode(), torch.inference_mode(not self.peer.training):
            yield

    def judge(self, after: bool = False) -> dict:
        return self.peer.check_again() if after else self.peer.check()

    def ready(self) -> None:
        warm_up(self.run, seconds=0.0)
        self.peak = peak_bytes(self.run, self.before) if self.peer.setting.peak_known else None
        self.timed = captured(self.run) if bench_model.as_graph(self.peer, self.of.what) else self.run

    def prepare(self) -> None:
        if self.of.what == "latency":
            cold()

    def call(self, prepared: None) -> None:
        self.timed()

    def facts(self, seconds: float) -> dict:
        facts = peers.peer_facts(self.peer, self.of.what, seconds, **self.errors)
        return description(self.setting, self.work, seconds, self.peer.setting.dtype, self.peak, **facts)


class OperationRival(Rival):
    """An implementation of a row of bench_ops, forward or backward alone."""

    kernels = property(lambda self: "on" if machine.GPU and self.setting == "vitfast" else "auto")

    def build(self) -> None:
        (op, self.direction), shape = self.of.operation, shape_of(self.of.shape)
        self.case = bench_ops.case_of(op, shape)
        self.function, self.more = bench_ops.timed_function(op, shape, self.setting, self.direction)
        self.check = Check(self.case, self.direction)

    def judge(self, after: bool = False) -> dict:
        errors = self.check.judge(self.setting, self.function, " after timing" * after)
        return dict(error_after=errors["error"]) if after else errors

    def ready(self) -> None:
        sets = [Call(self.case, self.function, self.direction) for _ in range(harness.SETS)]
        self.next = itertools.cycle(sets).__next__
        warm_up(sets[0].whole, seconds=0.0)
        self.peak, begun = peak_bytes(sets[0].whole, self.before), wall()
        for _ in range(AHEAD):
            self.call(self.prepare())
        host = time.perf_counter() - begun
        if wall() - begun < 1.2 * host:  # the device would wait for Python, which is not what is asked
            self.lead = 1.5 * host / AHEAD

    def prepare(self) -> tuple:
        call = self.next()
        prepared = call.prepare()
        if machine.GPU and self.lead:
            torch.cuda._sleep(int(2e9 * self.lead))  # in clock cycles
        return call, prepared

    def call(self, prepared: tuple) -> None:
        Call.timed(*prepared)

    def facts(self, seconds: float) -> dict:
        facts = dict(op=self.case.op, shape=self.case.shape, direction=self.direction, **self.errors, **self.more)
        work = self.case.work.of(self.direction)
        return description(self.setting, work, seconds, harness.DTYPE, self.peak, **facts)


class Run:
    """All rivals of one question, and its result file."""

    def __init__(self, of: Rivals, path: Path):
        self.of, self.path, self.rivals, self.failed, self.skipped = of, path, {}, {}, {}

    def each(self, names: Iterable[str], do: Callable[[str], object], limit: float = 0.0) -> None:
        """Does something for each rival; one that fails is out, with the reason."""
        for name in list(names):
            try:
                with machine.time_limit(limit):
                    do(name)
            except (Exception, pytest.skip.Exception) as error:
                skipped = isinstance(error, pytest.skip.Exception)
                reason = both_ends(str(error) if skipped else f"{type(error).__name__}: {error}")
                (self.skipped if skipped else self.failed)[name] = reason
                self.rivals.pop(name, None)
                print(f"{name}: {reason}", flush=True)

    def build(self, name: str) -> None:
        self.rivals[name] = (OperationRival if self.of.operation else ModelRival)(self.of, name)
        print(f"{name}: right (error {self.rivals[name].errors['error']:.1e}), ready", flush=True)

    def too_late(self, name: str) -> None:
        raise TimeoutError("too little time was left to begin")

    def again(self, name: str) -> None:
        with self.rivals[name].context():
            self.rivals[name].errors |= self.rivals[name].judge(after=True)

    def write(self) -> None:
        timed = {name: rival for name, rival in self.rivals.items() if rival.turns}
        content = dict(datetime=datetime.datetime.now(datetime.timezone.utc).isoformat())
        content |= dict(machine_info=dict(vitfast=machine.description()))
        # no case of the tables: a variant, which only a question asks about, and what was not compared after timing
        right = [rival for rival in timed.values() if "error_after" in rival.errors and not rival.overrides]
        content["benchmarks"] = [rival.entry() for rival in right]
        for state, reasons in (("failed", self.failed), ("skipped", self.skipped)):
            content[state] = [self.of.case(name) | dict(params={}, reason=why) for name, why in reasons.items()]
        content |= dict(rivals={name: rival.summary() for name, rival in timed.items()})
        content |= dict(missing=self.failed | self.skipped, compiled=len(compiled_here))
        write_text(self.path, json.dumps(content, indent=1, default=str) + "\n")

    def all(self, ends: float) -> bool:
        """Whether every rival that could be tried has a time, and was right before and after."""
        timing = (ROUNDS + 1) * SECONDS * len(self.of.names) + 5  # seconds, the second comparison included
        # `accelerate` makes torch.compile forget what it has compiled
        for name in sorted(self.of.names, key=lambda name: not name.startswith(peers.ACCELERATED)):
            left = ends - time.time() - timing if ends else 0.0
            self.each([name], self.build if left >= 0 else self.too_late, max(left, 0.0))
        self.rivals = {name: self.rivals[name] for name in self.of.names if name in self.rivals}
        self.each(self.rivals, lambda name: self.rivals[name].turn(SECONDS / 4), 60)  # until the chip is warm
        for rival in self.rivals.values():
            rival.turns, rival.samples = [], []
        for _ in range(ROUNDS):
            self.each(self.rivals, lambda name: self.rivals[name].turn(SECONDS), 60)
            self.write()
        self.each(self.rivals, self.again)
        self.write()
        for name, rival in self.rivals.items():
            print(f"{name}: {rival.summary()}", flush=True)
        return not self.failed


def count(*, src, cache_hit: bool, **_) -> None:
    """Triton's listener: notes a kernel of ours that was compiled."""
    if not cache_hit and getattr(getattr(src, "fn", None), "__module__", "").startswith("vitfast"):
        compiled_here.append(src.name)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", help="questions of questions.py that have rivals")
    parser.add_argument("--folder", type=Path, required=True, help="where NAME.json is written")
    parser.add_argument("--ends", type=float, default=0.0, metavar="EPOCH_SECONDS", help="the moment of the end")
    args = parser.parse_args(argv)
    torch.backends.cudnn.benchmark, triton.knobs.compilation.listener = machine.GPU, count
    # Rivals share code, and each has its own best batch: none is compiled for any batch because another has one.
    torch._dynamo.config.automatic_dynamic_shapes = False
    machine.ceilings()  # before anybody's memory is counted: what flushes the L2 cache stays
    good = True
    for name in args.names:
        good &= Run(QUESTIONS[name].run, args.folder / f"{name}.json").all(args.ends)
        torch._dynamo.reset()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
