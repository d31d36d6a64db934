"""Times the rivals of a question (questions.py) in turns: right before fast, then back to back.

    python bench/rivals.py NAME [NAME...] --folder DIR [--ends EPOCH_SECONDS]

Each rival is built, compared with float64 and warmed up. Then they take turns, A B A B, each for SECONDS without a
pause, so that the power limit binds as in training; clock and power are read meanwhile. At last they are compared with
float64 again. A cold start misleads: two programs of one kernel that differ by 4 % from a cold chip can be equally fast
at its power limit. The first call of a turn does not count.

DIR/NAME.json has what pytest-benchmark's files have (result_files.py reads both): a case for each rival under the name
that bench_model.py or bench_ops.py gives it, and besides "rivals", by name: milliseconds a call, those of each turn,
watts, MHz, seconds until it was ready (compiling included) and how many kernels of ours Triton compiled. A rival that
fails, or is wrong, is under "failed" with the reason, and the others go on. The file is written anew after every round.
"""

import argparse
import contextlib
import datetime
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
import questions
import torch
import triton
from harness import Call, Check, description
from machine import allocated, captured, clock, cold, peak_bytes, wall, warm_up
from shapes import WHERE, Shape, planned

from vitfast import ops
from vitfast.cli.report_gpu import sample_clocks
from vitfast.errors import both_ends
from vitfast.kernels.configs import tiles
from vitfast.run.files import write_text

SECONDS, ROUNDS = (2.0, 2) if machine.GPU else (0.02, 2)
AHEAD = 8  # calls that Python may be ahead of the device
SETTINGS = bench_model.CASES | bench_model.ONCE
compiled_here = []  # names of the kernels of ours that Triton compiled in this process


def shape_of(name: str) -> Shape:
    """The shape of a name such as "B/16 224 B256"; on a CPU a toy under that name."""
    model, image, batch = name.split(" ")
    return next(iter(planned(Shape(model, int(image), int(batch[1:]))).values()))


@contextlib.contextmanager
def _overrides(given: list[str]) -> Iterator[None]:
    """Inside, operations take other providers than the tables say: "linear_residual_fwd=cublaslt"."""
    with contextlib.ExitStack() as stack:
        for op, provider in (each.split("=") for each in given):
            stack.enter_context(tiles.using(op, tiles.config(provider=provider)))
        yield


def _sample(found: list[dict], stop: threading.Event) -> None:
    """Reads clock and power until it is stopped."""
    while machine.GPU and not stop.wait(0.25):
        if sample := sample_clocks():
            found.append(sample)


class Rival:
    """One of those that are compared. `turn` times it; `entry` is its case in the result file.

    A subclass has `check` and `check_again` (dictionaries of errors), `prepare` (before each call, not timed), `call`,
    `context` (around all of them) and `facts`.
    """

    def __init__(self, of: questions.Rivals, name: str):
        self.of, self.name, self.seconds, self.turns, self.samples = of, name, [], [], []
        self.base, *self.given = name.split(" | ")
        began, self.peak = time.monotonic(), None
        self.before = allocated()
        self.build()
        with self.context():
            self.errors = self.check()
            self.ready()
        self.ready_s = time.monotonic() - began

    def turn(self, seconds: float) -> None:
        """Calls without a pause for so many seconds; keeps the time of each."""
        stamps, samples, stop, read = [], [], threading.Event(), clock()
        reader = threading.Thread(target=_sample, args=(samples, stop), daemon=True)
        with self.context():
            reader.start()
            end = wall() + seconds
            while len(stamps) < 3 or time.perf_counter() < end:
                prepared = self.prepare()
                start = read()
                self.call(prepared)
                stamps.append((start, read()))
                if machine.GPU and len(stamps) > AHEAD:
                    stamps[-AHEAD - 1][1].event.synchronize()
            found = [last - first for first, last in stamps[1:]]
            stop.set()
            reader.join()
        self.seconds += found
        self.turns.append(1e3 * statistics.median(found))
        self.samples += samples[len(samples) // 2 :]  # power is an average over the second before

    def summary(self) -> dict:
        middle = lambda key: [s[key] for s in self.samples if s[key] is not None]  # noqa: E731
        read = {name: statistics.median(middle(key) or [0]) or None for name, key in SAMPLED.items()}
        found = dict(ms=1e3 * statistics.median(self.seconds), turns=self.turns, ready_s=round(self.ready_s, 1)) | read
        return found | dict(peak_mib=self.peak and self.peak / 2**20, calls=len(self.seconds)) | self.errors

    def entry(self) -> dict:
        median, (low, _, high) = statistics.median(self.seconds), statistics.quantiles(self.seconds, n=4)
        stats = dict(median=median, iqr=high - low, rounds=len(self.seconds))
        test, parameters = self.of.case(self.base)
        names = dict(name=f"{test.partition('::')[2]}[{parameters}]", fullname=f"bench/{test}[{parameters}]")
        return names | dict(stats=stats, extra_info=self.facts(median))


SAMPLED = dict(watts="power.draw", mhz="clocks.sm")


class ModelRival(Rival):
    """A whole model in a setting of bench_model: a training step, or inference."""

    def build(self) -> None:
        what, setting = self.of.what, SETTINGS[self.base]
        if what == "train":
            self.peer = peers.Peer(setting, shape_of(self.of.shape), training=True)
        else:
            model = WHERE + self.of.shape.rpartition(" ")[0]
            self.peer = bench_model.inference_peer(setting, model, what)
        self.step, self.kernels = bench_model.work_of(self.peer)
        self.run = lambda: self.step(self.peer.images)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        inference = contextlib.nullcontext() if self.peer.training else torch.inference_mode()
        with ops.use_kernels(self.peer.kernels), self.peer.mode(), inference, _overrides(self.given):
            yield

    def check(self) -> dict:
        return self.peer.check()

    def check_again(self) -> dict:
        return self.peer.check_again()

    def ready(self) -> None:
        warm_up(self.run, seconds=0.0)
        self.peak = peak_bytes(self.run, self.before) if self.peer.setting.peak_known else None
        self.replayed = captured(self.run) if bench_model.as_graph(self.peer, self.of.what) else self.run

    def prepare(self) -> None:
        if self.of.what == "latency":
            cold()

    def call(self, prepared: None) -> None:
        self.replayed()

    def facts(self, seconds: float) -> dict:
        facts = peers.peer_facts(self.peer, self.of.what, seconds, **self.errors)
        return description(self.base, self.kernels, seconds, self.peer.setting.dtype, self.peak, **facts)


class OperationRival(Rival):
    """An implementation of a row of bench_ops, forward or backward alone."""

    def build(self) -> None:
        op, self.direction = self.of.operation
        self.shape = shape_of(self.of.shape)
        self.case = bench_ops.case_of(op, self.shape)
        self.function = bench_ops.function_of(op, self.shape, self.base)
        self.judge = Check(self.case, self.direction)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        with ops.use_kernels("on" if machine.GPU and self.base == "vitfast" else "auto"), _overrides(self.given):
            yield

    def check(self) -> dict:
        return self.judge.judge(self.base, self.function)

    def check_again(self) -> dict:
        return dict(error_after=self.judge.judge(self.base, self.function, " after timing")["error"])

    def ready(self) -> None:
        sets = [Call(self.case, self.function, self.direction) for _ in range(harness.SETS)]
        self.next = itertools.cycle(sets).__next__
        warm_up(sets[0].whole, seconds=0.0)
        self.peak = peak_bytes(sets[0].whole, self.before)

    def prepare(self) -> tuple:
        call = self.next()
        return call, call.prepare()

    def call(self, prepared: tuple) -> None:
        Call.timed(*prepared)

    def facts(self, seconds: float) -> dict:
        facts = dict(op=self.case.op, shape=self.case.shape, direction=self.direction, **self.errors)
        work = self.case.work.of(self.direction)
        return description(self.base, work, seconds, harness.DTYPE, self.peak, **facts)


class Run:
    """All rivals of one question, and its result file."""

    def __init__(self, question: questions.Question, path: Path):
        self.of, self.path, self.rivals, self.missing = question.run, path, {}, {}

    def each(self, names: Iterable[str], do: Callable[[str], None], limit: float = 0.0) -> None:
        """Does something for each rival; one that fails is out, with the reason."""
        for name in list(names):
            try:
                with machine.time_limit(limit):
                    do(name)
            except (Exception, pytest.skip.Exception) as error:
                state = "skipped" if isinstance(error, pytest.skip.Exception) else "failed"
                reason = both_ends(f"{type(error).__name__}: {error}" if state == "failed" else str(error))
                test, parameters = self.of.case(name)
                names = dict(name=f"{test.partition('::')[2]}[{parameters}]", fullname=f"bench/{test}[{parameters}]")
                self.missing[name] = names | dict(params={}, reason=reason, state=state)
                self.rivals.pop(name, None)
                print(f"{name}: {reason}", flush=True)

    def build(self, name: str) -> None:
        kind = ModelRival if self.of.operation is None else OperationRival
        self.rivals[name] = kind(self.of, name)
        print(f"{name}: right (error {self.rivals[name].errors['error']:.1e}), ready", flush=True)

    def too_late(self, name: str) -> None:
        raise TimeoutError("too little time was left to begin")

    def again(self, name: str) -> None:
        rival = self.rivals[name]
        with rival.context():
            rival.errors |= rival.check_again()

    def write(self) -> None:
        timed = {name: rival for name, rival in self.rivals.items() if rival.seconds}
        # what is no setting of a table, but a variant that a question asks about, is no case of the tables
        cases = [rival.entry() for name, rival in timed.items() if " | " not in name]
        content = dict(datetime=datetime.datetime.now(datetime.timezone.utc).isoformat())
        content |= dict(machine_info=dict(vitfast=machine.description()), benchmarks=cases)
        for state in ("failed", "skipped"):
            found = {name: case for name, case in self.missing.items() if case["state"] == state}
            content[state] = [{k: v for k, v in case.items() if k != "state"} for case in found.values()]
        content["rivals"] = {name: rival.summary() for name, rival in timed.items()}
        content["missing"] = {name: case["reason"] for name, case in self.missing.items()}
        content["compiled"] = len(compiled_here)
        write_text(self.path, json.dumps(content, indent=1, default=str) + "\n")

    def all(self, ends: float) -> bool:
        """Whether every rival that could be tried has a time, and was right before and after."""
        timing = (ROUNDS + 1) * SECONDS * len(self.of.names) + 5  # seconds, checks included
        # `accelerate` makes torch.compile forget what it has compiled
        for name in sorted(self.of.names, key=lambda name: not name.startswith(peers.ACCELERATED)):
            left = ends - time.time() - timing if ends else 0.0
            self.each([name], self.build if left >= 0 else self.too_late, max(left, 0.0))
        self.rivals = {name: self.rivals[name] for name in self.of.names if name in self.rivals}
        machine.ceilings()
        with machine.alone():
            self.each(self.rivals, lambda name: self.rivals[name].turn(SECONDS / 4))  # until the chip is warm
            for rival in self.rivals.values():
                rival.seconds, rival.turns, rival.samples = [], [], []
            for _ in range(ROUNDS):
                self.each(self.rivals, lambda name: self.rivals[name].turn(SECONDS))
                self.write()
        self.each(self.rivals, self.again)
        self.write()
        for name, rival in self.rivals.items():
            print(f"{name}: {rival.summary()}", flush=True)
        return not any(case["state"] == "failed" for case in self.missing.values())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", help="questions of questions.py that have rivals")
    parser.add_argument("--folder", type=Path, required=True, help="where NAME.json is written")
    parser.add_argument("--ends", type=float, default=0.0, metavar="EPOCH_SECONDS", help="the moment of the end")
    args = parser.parse_args(argv)
    torch.backends.cudnn.benchmark = machine.GPU
    triton.knobs.compilation.listener = _count
    good = True
    for name in args.names:
        good &= Run(questions.QUESTIONS[name], args.folder / f"{name}.json").all(args.ends)
        torch._dynamo.reset()
    return 0 if good else 1


def _count(*, src, cache_hit: bool, **_) -> None:
    if not cache_hit and getattr(getattr(src, "fn", None), "__module__", "").startswith("vitfast"):
        compiled_here.append(src.name)


if __name__ == "__main__":
    sys.exit(main())
