"""A clock and a compiler that a test of the tuner controls."""

import dataclasses
import math

import torch

from vitfast.kernels import tiles
from vitfast.tools.tune.tuner import Tuner
from vitfast.tools.verify.draw import Sizes

TINY = Sizes(batch=2, tokens=5, width=64, heads=2, hidden=96, image=16, patch=8)
CPU = torch.device("cpu")


class Done:
    """A compilation that has ended."""

    def __init__(self, failure: str = "", shared: int = 0):
        self.answer = shared, failure

    def done(self) -> bool:
        return True

    def result(self, timeout=None):
        return self.answer


class Compiler:
    """Compiles nothing, and fails where it is told to."""

    def __init__(self, fails=lambda launch: ""):
        self.fails, self.jobs = fails, []

    @property
    def compilations(self) -> int:
        return len(self.jobs)

    def close(self) -> None: ...

    def submit(self, launch) -> Done:
        self.jobs.append(launch)
        return Done(self.fails(launch))


class Clock:
    """Tells the planted time of a tile, in a world where nothing else takes any."""

    def __init__(self, planted=lambda problem, config: 1.0, stop_after: float = math.inf):
        self.planted, self.stop_after, self.timed, self.time, self.broken = planted, stop_after, [], 0.0, False

    def now(self) -> float:
        return self.time

    def lost(self) -> bool:
        return self.broken

    def seconds(self, problem, config, run) -> float:
        if len(self.timed) >= self.stop_after:
            raise KeyboardInterrupt
        self.timed.append((problem.key, config))
        return self.planted(problem, config)


def make_tuner(clock, compiler=None, dtype=torch.float16, **options) -> Tuner:
    return Tuner(dtype, CPU, "GPU", clock, compiler or Compiler(), **options)


def with_fault(problem, config, fault):
    """The problem with a launcher whose results go through `fault` where this tile is in force."""

    def call(*inputs):
        results = problem.launcher.call(*inputs)
        like = results[0]
        if like.device.type != "meta" and tiles.lookup(problem.op, like, problem.shape) == config:
            return fault(results)
        return results

    return dataclasses.replace(problem, launcher=dataclasses.replace(problem.launcher, call=call))
