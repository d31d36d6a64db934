"""The tuner: which problems there are, what is found, refused and kept, and when it stops."""

import dataclasses
import math
from concurrent.futures import TimeoutError as NotDone

import pytest
import torch
from tuning import CPU, TINY, Clock, Compiler, Done, make_tuner, with_fault

from vitfast.kernels import tiles
from vitfast.kernels.tiles import config
from vitfast.tools import verify
from vitfast.tools.tune import tuner, user_table
from vitfast.tools.verify.launcher import Launcher


def test_problems_are_what_a_training_step_uses_each_with_its_plainest_launcher(table):
    found = {(p.op, p.name) for p in make_tuner(Clock()).problems(TINY)}
    ops = {op for op, _ in found}
    assert ops == {*tiles.RULES} - {"mlp_kept"}, ops ^ {*tiles.RULES}  # which is no launch
    assert {
        ("column_sums", "column sums, layer_norm"),
        ("attention_bwd", "attention backward"),
        ("weight_grad_sum", "weight gradient, fc2, sum"),
    } <= found
    keys = [p.key for p in make_tuner(Clock()).problems(TINY)]
    assert len(keys) == len(set(keys))
    names = [op for op, _, _ in keys]
    assert max(map(names.index, tuner.INNER)) < min(
        names.index(op) for op in ("weight_grad", "dgelu_matmul", "layer_norm_bwd")
    )


@pytest.mark.slow
def test_a_planted_gain_of_ten_percent_in_one_product_is_found_and_kept(table):
    def planted(problem, t):
        if problem.op == "linear_gelu_fwd" and t.provider == "triton" and t["GROUP_M"] == 16:
            return 0.9
        return 1.0 if t in (problem.start, *problem.candidates) else 1.01

    clock = Clock(planted)
    work = make_tuner(clock)
    outcomes = list(work.run(work.problems(TINY, "linear")))
    (row,) = table()
    assert (row["op"], row["gpu"], row["shape"], row["blocks"]["GROUP_M"]) == ("linear_gelu_fwd", "GPU", "64x96f", 16)
    changed = [s for s in outcomes if s.best != s.start]
    assert [s.op for s in changed] == ["linear_gelu_fwd"] and changed[0].before / changed[0].after == pytest.approx(
        1 / 0.9
    )
    assert "1.11x" in str(changed[0]) and all(s.finished for s in outcomes)
    assert (
        tiles.lookup("linear_gelu_fwd", torch.empty(0, dtype=torch.float16), "64x96f")["GROUP_M"] == 16
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
    shipped = tiles.shipped(problem.op, torch.empty(0, dtype=torch.float16), problem.shape)
    assert problem.start == kept and shipped in problem.candidates
    (outcome,) = again.run([problem])
    best = planted(problem, config(1, 6, GROUP_M=32))
    assert outcome.before == planted(problem, kept) and outcome.after == pytest.approx(best, abs=1e-9)


def test_the_shipped_tile_is_tried_again_when_the_table_has_another(table):
    (problem,) = make_tuner(Clock()).problems(TINY, "linear_gelu")
    far = dataclasses.replace(problem.start, num_warps=1, num_stages=6)
    user_table.keep(tiles.to_record(problem.op, "GPU", problem.bits, problem.shape, far))
    again = make_tuner(Clock(lambda p, t: 0.5 if t == problem.start else 1.0))
    (outcome,) = again.run(again.problems(TINY, "linear_gelu"))
    assert outcome.start == far and outcome.best == tiles.from_record(table()[0]) == problem.start


@pytest.mark.parametrize("real", [False, True])
def test_a_lucky_measurement_is_not_kept_and_hides_no_real_gain(table, real):
    luck = iter([0.5])

    def planted(problem, t):
        return next(luck, 1.0) if t.num_warps == 16 else 0.8 if t.num_stages == 4 and real else 1.0

    work = make_tuner(Clock(planted))
    (outcome,) = work.run(work.problems(TINY, "linear_gelu"))
    assert (outcome.best.num_stages == 4 and outcome.after == 0.8) if real else table() == []
    assert real or outcome.best == outcome.start


# Candidates that are wrong, do not run, or take the GPU with them: none is timed or kept


def wrong(results):
    results[0][-1] *= 1.1
    return results


def raising(error):
    def fault(results):
        raise error

    return fault


LONG = ValueError("start " + "x" * 1000 + " end")
NO_MEMORY = torch.cuda.OutOfMemoryError("CUDA out of memory")
WHOLE = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED")  # which leaves the GPU as it was


@pytest.mark.parametrize(
    "at, fault, said, end",
    [
        ("run", wrong, "error of a row", ""),
        ("run", raising(LONG), "ValueError: start", "end"),
        ("run", raising(NO_MEMORY), "OutOfMemoryError: CUDA out of memory", "memory"),
        ("clock", raising(WHOLE), "RuntimeError: CUDA error", "CUBLAS_STATUS_NOT_SUPPORTED"),
        ("compiler", Done("PTXAS error"), "PTXAS error", ""),
        ("compiler", Done(shared=300_000), "needs 300,000 bytes of shared memory, 232,448 are there", ""),
    ],
)
@pytest.mark.slow
def test_a_candidate_with_a_fault_is_refused_and_the_rest_goes_on(table, at, fault, said, end):
    class Failing(Compiler):
        def submit(self, launch):
            return fault if at == "compiler" and launch.arguments.get("num_warps") == 16 else Done()

    work = make_tuner(clock := Clock(lambda p, t: fault(()) if at == "clock" and t == faulty else 1.0), Failing())
    (problem,) = work.problems(TINY, "linear_gelu")
    faulty = dataclasses.replace(problem.start, num_warps=16)
    (outcome,) = work.run([with_fault(problem, faulty, fault) if at == "run" else problem])
    (reason,) = set(outcome.failures.values())
    assert {t.num_warps for t in outcome.failures} == {16} and faulty in outcome.failures
    assert reason.startswith(said) and reason.endswith(end) and len(reason) < 500
    assert outcome.finished and outcome.best == problem.start and table() == [] and len(clock.timed) > 10
    assert at == "clock" or faulty not in {t for _, t in clock.timed}
    assert f"{len(outcome.failures)} of them refused" in str(outcome)


def test_what_is_wrong_only_at_times_is_not_kept(table):
    """The result is compared again before an entry is written."""
    work = make_tuner(Clock(lambda problem, t: 0.5 if t == shaky else 1.0))
    (problem,) = work.problems(TINY, "linear_gelu")
    seen, shaky = [], dataclasses.replace(problem.start, num_warps=16)

    def second_time(results):
        seen.append(results)
        return wrong(results) if len(seen) == 2 else results

    (outcome,) = work.run([with_fault(problem, shaky, second_time)])
    assert table() == [] and outcome.best == problem.start and "against float64" in outcome.failures[shaky]


def test_the_tables_tile_is_tried_whatever_the_compiler_says(table):
    """Else any slower provider would take its place for good."""
    clock = Clock(lambda problem, t: 1.0 if t.provider == "triton" else 5.0)
    work = make_tuner(clock, Compiler(lambda launch: "died with exit code -9"))
    (outcome,) = work.run(work.problems(TINY, "linear_gelu"))
    assert outcome.before == 1.0 and outcome.best == outcome.start and table() == [] and outcome.failures


def test_nothing_is_kept_where_the_tables_tile_only_lacked_memory(table):
    work = make_tuner(Clock())
    (problem,) = work.problems(TINY, "linear_gelu")
    (outcome,) = work.run([with_fault(problem, problem.start, raising(NO_MEMORY))])
    assert table() == [] and "does not run as it was" in str(outcome) and "out of memory" in str(outcome)


def test_memory_that_the_inputs_lack_is_said(table, monkeypatch):
    def no_room(*_):
        raise NO_MEMORY

    monkeypatch.setattr(tuner, "Judge", no_room)
    work = make_tuner(Clock())
    (outcome,) = work.run(work.problems(TINY, "linear_gelu"))
    assert not outcome.finished and "its tensors do not fit" in str(outcome) and "--batch-size" in str(outcome)


def test_what_a_candidate_leaves_unwritten_is_found_out(table, monkeypatch):
    """Whose error is infinite; and no NaN passes, wherever it comes from."""

    def call(x):
        out = torch.empty_like(x)
        out[:-1] = 2 * x[:-1]
        return out

    launcher = Launcher(lambda t: (t.values(6, 3),), call, lambda x: 2 * x)
    judge, work = verify.Judge(launcher, torch.float32, CPU), make_tuner(clock := Clock())
    for said in ("inf", "nan"):
        problem = tuner.Problem("linear_gelu_fwd", "32", "", "double", launcher, config(), [], {})
        right = 2 * judge.inputs[0]
        del right  # whose memory, with the right values in it, is what the next allocation gets
        assert work._measure(problem, config(), judge) is None and not clock.timed
        assert problem.failures[config()].startswith(f"error of a row {said}")
        monkeypatch.setattr(verify, "errors", lambda *_: (math.nan, math.nan))


# Time


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
