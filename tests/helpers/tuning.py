"""A clock and a compiler that a test of the tuner controls."""

import dataclasses
import functools
from concurrent.futures import Future

import torch

from vitfast.kernels import tiles
from vitfast.tools.tune.tuner import Problem, Tuner
from vitfast.tools.verify.draw import Sizes

TINY = Sizes(batch=2, tokens=5, width=64, heads=2, hidden=96, image=16, patch=8)
CPU = torch.device("cpu")
# What gelu_bwd starts from, which is quick to interpret and has seven neighbours, and one of these.
START = tiles.config(4, 1, BLOCK_M=64, BLOCK_N=64)
OTHER = tiles.config(8, 1, BLOCK_M=64, BLOCK_N=64)


class Compiler:
    """Compiles nothing; OTHER fails with `failure`, or never ends where that is None."""

    def __init__(self, failure: str | None = ""):
        self.failure = failure

    def submit(self, launch) -> Future:
        future, failure = Future(), self.failure if launch.arguments.get("num_warps") == OTHER.num_warps else ""
        if failure is not None:
            future.set_result((0, failure))
        return future


class Clock:
    """Tells the planted time of a tile, in a world where each timing `takes` so long and nothing else takes any."""

    def __init__(self, planted=lambda tile: 1.0, takes: float = 0.0):
        self.planted, self.takes, self.timed, self.time, self.broken = planted, takes, [], 0.0, False

    def now(self) -> float:
        return self.time

    def lost(self) -> bool:
        return self.broken

    def seconds(self, problem, tile, run) -> float:
        self.time += self.takes
        self.timed.append(tile)
        return self.planted(tile)


def make_tuner(clock, compiler=None) -> Tuner:
    return Tuner(torch.float16, CPU, "GPU", clock, compiler or Compiler())


@functools.cache
def problems() -> list[Problem]:
    return make_tuner(Clock()).problems([TINY, TINY])


def settled(clock, compiler=None, seconds: float = 1e6, fault=lambda tile, results: results, candidates=()) -> Problem:
    """The problem of gelu_bwd, settled with a launcher whose results go through `fault`."""
    (problem,) = (problem for problem in problems() if problem.op == "gelu_bwd")

    def call(*inputs):
        results = problem.launcher.call(*inputs)
        meta = results[0].device.type == "meta"
        return results if meta else fault(tiles.lookup("gelu_bwd", results[0], problem.shape), results)

    launcher = dataclasses.replace(problem.launcher, call=call)
    found = Problem("gelu_bwd", problem.bits, problem.shape, launcher, START, list(candidates))
    make_tuner(clock, compiler).settle(found, seconds)
    return found
