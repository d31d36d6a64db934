"""The tuner: which problems there are, what is found and kept, and when it stops."""

import dataclasses
import heapq
import math
import random
from concurrent.futures import TimeoutError as NotDone

import pytest
import torch
from tuning import CPU, TINY, Clock, Compiler, Done, make_tuner, with_call

from vitfast.kernels.configs import tiles
from vitfast.kernels.configs.tiles import tile
from vitfast.tools.tune import command, user_table
from vitfast.tools.tune.tuner import INNER, Tuner


def test_problems_are_what_a_training_step_uses_each_with_its_plainest_launcher(table):
    found = {(p.op, p.name) for p in make_tuner(Clock()).problems(TINY)}
    ops = {op for op, _ in found}
    assert ops == set(tiles.RULES), ops ^ set(tiles.RULES)
    assert {
        ("column_sums", "column sums, layer_norm"),
        ("attention_bwd", "attention backward"),
        ("weight_grad_sum", "weight gradient, fc2, sum"),
    } <= found
    keys = [p.key for p in make_tuner(Clock()).problems(TINY)]
    assert len(keys) == len(set(keys))
    names = [op for op, _, _ in keys]
    assert max(map(names.index, INNER)) < min(
        names.index(op) for op in ("weight_grad", "dgelu_matmul", "layer_norm_bwd")
    )


def test_a_planted_gain_of_ten_percent_in_one_product_is_found_and_kept(table):
    def planted(problem, t):
        if problem.op == "linear_gelu_fwd" and t.provider == "triton" and t["GROUP_M"] == 16:
            return 0.9
        return 1.0 if t in (problem.start, *problem.candidates) else 1.01

    clock = Clock(planted)
    work = make_tuner(clock)
    outcomes = list(work.run(work.problems(TINY, "linear")))
    (row,) = table()
    assert (row["op"], row["gpu"], row["shape"], row["blocks"]["GROUP_M"]) == ("linear_gelu_fwd", "GPU", "64x96", 16)
    changed = [s for s in outcomes if s.best != s.problem.start]
    assert [s.problem.op for s in changed] == ["linear_gelu_fwd"] and changed[0].before / changed[
        0
    ].after == pytest.approx(1 / 0.9)
    assert "1.11x" in str(changed[0]) and all(s.finished for s in outcomes)
    assert (
        tiles.lookup("linear_gelu_fwd", torch.empty(0, dtype=torch.float16), "64x96")["GROUP_M"] == 16
    )  # in force at once


def test_an_interruption_loses_nothing_and_the_next_run_goes_on(table):
    def planted(problem, t):  # each further stage gains
        return (
            1.0
            if t.provider != "triton" or problem.op != "linear_gelu_fwd"
            else 2.0 - 0.2 * t.num_stages - 0.1 * math.log2(t["GROUP_M"])
        )

    work = make_tuner(Clock(planted, stop_after=30))
    with pytest.raises(KeyboardInterrupt):
        list(work.run(work.problems(TINY, "linear_gelu")))
    (row,) = table()
    kept = tiles.from_record(row)
    again = make_tuner(Clock(planted))
    (problem,) = again.problems(TINY, "linear_gelu")
    assert problem.start == kept and tiles.shipped(*problem_key(problem)) in problem.candidates
    (outcome,) = again.run([problem])
    assert outcome.before == planted(problem, kept) and outcome.after == pytest.approx(
        planted(problem, tile(1, 6, GROUP_M=32)), abs=1e-9
    )


def test_the_shipped_tile_is_tried_again_when_the_table_has_another(table):
    work = make_tuner(Clock())
    (problem,) = work.problems(TINY, "linear_gelu")
    far = dataclasses.replace(problem.start, num_warps=1, num_stages=6)
    user_table.keep(tiles.to_record(problem.op, "GPU", problem.bits, problem.shape, far))
    again = make_tuner(Clock(lambda p, t: 0.5 if t == problem.start else 1.0))
    (outcome,) = again.run(again.problems(TINY, "linear_gelu"))
    assert (
        outcome.problem.start == far
        and outcome.best == problem.start
        and tiles.from_record(table()[0]) == problem.start
    )


def problem_key(problem):
    return problem.op, torch.empty(0, dtype=torch.float16), problem.shape


def test_a_lucky_measurement_is_not_kept_and_hides_no_real_gain(table):
    luck = iter([0.5])

    def planted(problem, t):
        return next(luck, 1.0) if t.num_warps == 16 else 0.8 if t.num_stages == 4 and real else 1.0

    for real in (False, True):
        luck = iter([0.5])
        work = make_tuner(Clock(planted))
        (outcome,) = work.run(work.problems(TINY, "linear_gelu"))
        assert (
            (outcome.best.num_stages == 4 and outcome.after == 0.8)
            if real
            else (outcome.best == outcome.problem.start and table() == [])
        )


def test_what_is_wrong_only_at_times_is_not_kept(table):
    """The result is compared again before an entry is written."""
    work = make_tuner(Clock(lambda problem, t: 0.5 if t == shaky else 1.0))
    (problem,) = work.problems(TINY, "linear_gelu")
    seen, shaky = [], dataclasses.replace(problem.start, num_warps=16)

    def call(*inputs):
        act, pre = problem.launcher.call(*inputs)
        if act.device.type != "meta" and tiles.lookup(problem.op, act, problem.shape) == shaky:
            seen.append(act)
            act *= 1.0 + 0.1 * (len(seen) == 2)
        return act, pre

    (outcome,) = work.run([with_call(problem, call)])
    assert (
        table() == [] and outcome.best == problem.start and "against float64" in next(iter(outcome.failures.values()))
    )


def test_one_compilation_that_takes_long_does_not_hold_up_the_others(table):
    """Those that are compiled are timed first, and the wait ends with the time."""

    class Never(Done):
        def done(self):
            return False

        def result(self, timeout=None):
            clock.time += timeout
            raise NotDone

    class Stuck(Compiler):
        def submit(self, launch):
            super().submit(launch)
            return Never() if launch.arguments.get("num_warps") == 16 else Done()

    work = make_tuner(clock := Clock(), Stuck(), seconds=50)
    (outcome,) = work.run(work.problems(TINY, "linear_gelu"))
    assert len(clock.timed) > 10 and clock.time == 50 and not outcome.finished
    assert [t.num_warps for t in outcome.failures] == [16] and "before it was compiled" in next(
        iter(outcome.failures.values())
    )


def test_when_the_time_is_up_nothing_more_is_begun(table):
    class Slow(Clock):
        def seconds(self, problem, t, run):
            self.time += 10.0
            return super().seconds(problem, t, run)

    work = make_tuner(clock := Slow(), compiler := Compiler(), seconds=45)
    problems = work.problems(TINY)
    outcomes = list(work.run(problems))
    assert len(clock.timed) <= 6 and clock.time <= 60 and not any(s.finished for s in outcomes)
    assert len(outcomes) + work.unreached == len(problems) and work.unreached > 10
    assert "the time was up" in str(outcomes[0]) and "not reached" in str(outcomes[-1])
    assert len(compiler.jobs) < 60


class World:
    """A machine whose 14 processes take `compile_s` a compilation; checking and timing take what they do on a GPU."""

    def __init__(self, seed: int, compile_s: float = 2.0, processes: int = 14, check_s: float = 0.03):
        self.time, self.compile_s, self.check_s, self.seed = 0.0, compile_s, check_s, seed
        self.free = [0.0] * processes
        self.jobs: dict[str, Pending] = {}
        self.timings = 0

    def now(self) -> float:
        return self.time

    def lost(self) -> bool:
        return False

    @property
    def compilations(self) -> int:
        return len(self.jobs)

    def submit(self, launch):
        """Launches that differ in nothing share a compilation, as in machine_code.compiler.Compiler."""
        seen = {
            name: value.dtype if isinstance(value, torch.Tensor) else value for name, value in launch.arguments.items()
        }
        key = f"{launch.kernel.__name__} {sorted(seen.items(), key=str)}"
        if key in self.jobs:
            return self.jobs[key]
        begun = max(self.time, heapq.heappop(self.free))
        heapq.heappush(self.free, begun + self.compile_s)
        blocks = [launch.arguments.get(name, 1) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_stages")]
        self.jobs[key] = Pending(self, begun + self.compile_s, 2 * (blocks[0] + blocks[1]) * blocks[2] * blocks[3])
        return self.jobs[key]

    def seconds(self, problem, t, run) -> float:
        """A landscape with one top for each provider, up to a third faster than the table's tile; 2 % of noise."""
        self.timings += 1
        draw = random.Random(f"{self.seed} {problem.key} {t.provider}")
        base = 3e-4 * draw.uniform(0.9, 1.3)
        numbers = dict(t.blocks) | dict(num_warps=t.num_warps, num_stages=t.num_stages) if t.blocks else {}
        like = next((s for s in (problem.start, *problem.candidates) if s.provider == t.provider), t)
        start = dict(like.blocks) | dict(num_warps=like.num_warps, num_stages=like.num_stages)
        for name in sorted(numbers):
            top = math.log2(start[name]) + draw.choice((-1, 0, 0, 0, 1))
            base *= 1 + 0.08 * abs(math.log2(numbers[name]) - top)
        took = base * random.Random(f"{self.seed} {self.timings}").uniform(0.99, 1.01)
        self.time += (
            18 * (took + 3e-4) + 0.02
        )  # two to warm up, one for the lead, fifteen rounds, each after a flush and a lead
        return took


class Pending:
    def __init__(self, world: World, ready: float, shared: int):
        self.world, self.ready, self.shared = world, ready, shared

    def done(self) -> bool:
        return self.world.time >= self.ready

    def result(self, timeout=None):
        if timeout is not None and self.ready > self.world.time + timeout:
            self.world.time += timeout
            raise NotDone
        self.world.time = max(self.world.time, self.ready)
        return self.shared, ""

    def cancel(self) -> None: ...


class Looked:
    """In the place of a Trial: everything is right, and takes time."""

    def __init__(self, problem, dtype, device):
        self.run = None

    def check(self) -> None:
        Looked.world.time += Looked.world.check_s


@pytest.mark.slow(7)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_b16_is_settled_in_400_seconds_by_its_own_count(table, seed):
    """2 s a compilation, which is twice what they take on a slow core, 14 processes."""
    world = Looked.world = World(seed)
    work = Tuner(torch.bfloat16, CPU, "GPU", world, world, seconds=400, trial=Looked)
    problems = work.problems(command.MODELS["B/16"])
    outcomes = list(work.run(problems))
    counts = f"{world.compilations} compilations, {work.checks} checks, {work.timings} timings"
    print(f"{len(problems)} problems, {counts}, {world.time:.0f} s")
    assert len(outcomes) == len(problems) > 25 and all(s.finished for s in outcomes)
    assert world.time < 400 and work.timings == world.timings
    gains = [s.before / s.after for s in outcomes]
    assert sum(g > 1.05 for g in gains) > len(gains) // 3 and min(gains) > 0.99
    assert len(table()) == sum(s.best != s.problem.start for s in outcomes)
