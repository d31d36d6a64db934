"""The tuner: which problems there are, what is found, refused and kept, and when it stops."""

import dataclasses
import math

import pytest
import torch
from tuning import CPU, OTHER, START, TINY, Clock, Compiler, make_tuner, problems, settled

from vitfast.kernels import tiles
from vitfast.kernels.launch import record
from vitfast.kernels.tiles import config
from vitfast.tools import tune, verify
from vitfast.tools.tune import tuner
from vitfast.tools.verify.launcher import Launcher


@pytest.mark.slow
def test_problems_are_what_a_training_step_uses_each_with_its_plainest_launcher():
    ops = [p.op for p in problems()]
    assert {*tune.OPERATIONS} == {*tiles.operations()}
    assert {*ops} == {*tune.OPERATIONS} - {"mlp_kept"}  # which is no launch
    assert len({(p.op, p.bits, p.shape) for p in problems()}) == len(ops)
    assert max(map(ops.index, tuner.INNER)) < min(map(ops.index, ("dgelu_matmul", "layer_norm_bwd")))
    for problem in problems():
        with tiles.using() as used:
            record(lambda p=problem: make_tuner(Clock())._on_meta(p.launcher))
        assert len(used) == 1 or problem.op not in ("column_sums", "gelu_bwd")
    (products,) = (p for p in problems() if p.op == "linear_gelu_fwd")
    assert {"triton", "tma"} <= {c.provider for c in (products.start, *products.candidates)}


def test_neighbours_differ_in_one_number():
    tile = config(4, 1, "tma", maxnreg=168, BLOCK_M=256, GROUPS=1)
    changed = [dict(n.meta.items() - tile.meta.items()) for n in tuner.neighbours(tile) if n.provider == "tma"]
    of_a_thread = [dict(num_warps=2), dict(num_warps=8), dict(num_stages=2), dict(maxnreg=128), dict(maxnreg=208)]
    assert changed == [dict(BLOCK_M=128), dict(GROUPS=2), *of_a_thread]
    assert list(tuner.neighbours(config(provider="cublas"))) == []


def test_a_climb_goes_to_the_top_and_each_step_is_kept_and_in_force_at_once(table, monkeypatch):
    reloads = []
    monkeypatch.setattr(tiles.user_table.read, "cache_clear", lambda: reloads.append(len(table())))
    top, slow = config(16, 1, BLOCK_M=128, BLOCK_N=64), config(1, 1, BLOCK_M=16, BLOCK_N=16)

    def planted(tile):
        far = [abs(math.log2(tile[name] / top[name])) for name in ("BLOCK_M", "BLOCK_N")]
        return 1.0 + 0.3 * sum(far, abs(math.log2(tile.num_warps / 16))) + tile.num_stages

    problem = settled(clock := Clock(planted), candidates=[slow])
    (row,) = table()
    assert problem.best == tiles.from_record(row) == top and reloads == [1, 1, 1]
    assert (row["op"], row["gpu"], row["shape"]) == ("gelu_bwd", "GPU", "d96")
    assert slow in clock.timed and not {*tuner.neighbours(slow)} & {*clock.timed}


def test_an_interruption_loses_nothing_and_the_next_run_goes_on(table):
    def interrupted(tile):
        if tile.num_stages == 3:
            raise KeyboardInterrupt
        return 1.0 / tile.num_stages

    with pytest.raises(KeyboardInterrupt):
        settled(Clock(interrupted))
    kept = tiles.from_record(table()[0])
    assert kept == dataclasses.replace(START, num_stages=2)
    with tiles.using("gelu_bwd", kept, "d96"):  # as a GPU finds it in the table
        (problem,) = (p for p in make_tuner(Clock()).problems([TINY]) if p.op == "gelu_bwd")
    assert problem.start == kept and len(problem.candidates) == 1  # the shipped one is tried again


@pytest.mark.parametrize("real", [False, True])
def test_a_lucky_measurement_is_not_kept_and_hides_no_real_gain(table, real):
    luck = iter([0.5])
    problem = settled(Clock(lambda t: next(luck, 1.0) if t == OTHER else 0.8 if t.num_stages == 2 and real else 1.0))
    assert problem.best.num_stages == 2 if real else table() == [] and problem.best == START


# Candidates that are wrong, do not run, or take the GPU with them: none is kept


def wrong(results):
    results[0][-1] *= 1.1
    return results


def raising(error):
    def fault(*_):
        raise error

    return fault


NO_MEMORY = torch.cuda.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    "at, fault, said, end",
    [
        ("run", wrong, "Wrong: error of a row", ""),
        ("run", raising(ValueError("start " + "x" * 1000 + " end")), "ValueError: start", "end"),
        ("run", raising(NO_MEMORY), "OutOfMemoryError: CUDA out of memory", "memory"),
        ("clock", raising(RuntimeError("CUDA error: not supported")), "RuntimeError: CUDA error", "not supported"),
        ("compiler", "PTXAS error", "PTXAS error", ""),
    ],
)
def test_a_candidate_with_a_fault_is_refused_and_the_rest_goes_on(table, at, fault, said, end):
    run = (lambda tile, results: fault(results) if tile == OTHER else results) if at == "run" else lambda _, r: r
    clock = Clock(lambda tile: 1.0 if tile != OTHER else fault() if at == "clock" else 0.1)
    problem = settled(clock, Compiler(fault if at == "compiler" else ""), fault=run)
    assert problem.failures.keys() == {OTHER} and table() == [] and not problem.note
    reason = problem.failures[OTHER]
    assert reason.startswith(said) and reason.endswith(end) and len(reason) < 500
    assert len(problem.times) == 8 and (OTHER in clock.timed) == (at == "clock")


def test_what_is_wrong_only_at_times_is_not_kept(table):
    """The result is compared again before an entry is written."""
    seen = []

    def second_time(tile, results):
        seen.append(tile)
        return wrong(results) if tile == OTHER and seen.count(OTHER) == 2 else results

    problem = settled(Clock(lambda tile: 0.5 if tile == OTHER else 1.0), fault=second_time)
    assert table() == [] and problem.best == START and "against float64" in problem.failures[OTHER]


def test_a_tile_in_use_that_does_not_run_is_replaced_but_not_for_lack_of_memory(table, monkeypatch):
    """It may be too large for this GPU. Without its time, no candidate can be called faster."""
    fails = lambda error: lambda tile, results: raising(error)() if tile == START else results  # noqa: E731
    lacking = [settled(clock := Clock(), fault=fails(NO_MEMORY))]
    with monkeypatch.context() as patch:
        patch.setattr(tuner, "Judge", raising(NO_MEMORY))
        lacking.append(settled(clock))
    assert all("--batch-size" in problem.note for problem in lacking) and table() == clock.timed == []
    assert settled(Clock(), fault=fails(RuntimeError("out of resource"))).best in tuner.neighbours(START)
    assert len(table()) == 1


def test_what_a_candidate_leaves_unwritten_is_found_out(monkeypatch):
    """Whose error is infinite; and no NaN passes, wherever it comes from."""

    def call(x):
        out = torch.empty_like(x)
        out[:-1] = 2 * x[:-1]
        return out

    launcher = Launcher(lambda t: (t.values(6, 3),), call, lambda x: 2 * x)
    judge, work = verify.Judge(launcher, torch.float32, CPU), make_tuner(clock := Clock())
    for said in ("inf", "nan"):
        problem = tuner.Problem("linear_gelu_fwd", "32", "", launcher, config(), [])
        right = 2 * judge.inputs[0]
        del right  # whose memory, with the right values in it, is what the next allocation gets
        assert work._seconds(problem, config(), judge) == math.inf and not clock.timed
        assert problem.failures[config()].startswith(f"Wrong: error of a row {said}")
        monkeypatch.setattr(verify, "errors", lambda *_: (math.nan, math.nan))


@pytest.mark.parametrize("takes, seconds, count", [(10, 45, 5), (0, 0.2, 6), (0, 0, 0)])
def test_the_time_ends_a_problem_and_the_wait_for_a_compilation(table, takes, seconds, count):
    problem = settled(clock := Clock(takes=takes), Compiler(None), seconds)
    assert problem.note == "the time was up" and len(clock.timed) == count
