"""Candidates that are wrong, do not run, or take the GPU with them: none is timed or kept."""

import dataclasses

import torch
from tuning import TINY, Clock, Compiler, Done, make_tuner, with_call

from vitfast.kernels.configs import tiles
from vitfast.tools.tune.search import Search
from vitfast.tools.tune.trial import Trial
from vitfast.tools.tune.tuner import Attempt


def wrong_with(problem, wrong):
    """The problem with a launcher that is off by 10 % in its last row where the `wrong` tile is in force."""

    def call(*inputs):
        act, pre = problem.launcher.call(*inputs)
        if tiles.lookup(problem.op, act, problem.shape) == wrong and act.device.type != "meta":
            act[-1] *= 1.1
        return act, pre

    return with_call(problem, call)


def test_a_wrong_candidate_is_never_timed(table):
    work = make_tuner(clock := Clock(lambda problem, t: 0.1 if t == wrong else 1.0))
    (problem,) = work.problems(TINY, "linear_gelu")
    wrong = dataclasses.replace(problem.start, num_warps=problem.start.num_warps * 2)
    (outcome,) = work.run([wrong_with(problem, wrong)])
    assert wrong not in {t for _, t in clock.timed} and "against float64" in outcome.failures[wrong]
    assert outcome.best == problem.start and table() == [] and work.checks > work.timings
    assert "1 of them refused" in str(outcome)


def test_what_does_not_compile_or_run_is_not_timed(table):
    def fails(launch):
        return "PTXAS error" if launch.arguments.get("num_warps") == 16 else ""

    work = make_tuner(clock := Clock(), Compiler(fails))
    (problem,) = work.problems(TINY, "linear_gelu")
    broken = dataclasses.replace(problem.start, num_stages=problem.start.num_stages + 1)

    def call(*inputs):
        if inputs[0].device.type != "meta" and tiles.lookup(problem.op, inputs[0], problem.shape) == broken:
            raise ValueError("start " + "x" * 1000 + " end")
        return problem.launcher.call(*inputs)

    (outcome,) = work.run([with_call(problem, call)])
    assert not {t for _, t in clock.timed} & {t for t in outcome.failures}
    assert outcome.failures[dataclasses.replace(problem.start, num_warps=16)] == "PTXAS error"
    assert outcome.failures[broken].startswith("ValueError: start") and outcome.failures[broken].endswith("end")


def test_memory_that_a_candidate_lacks_refuses_it_and_memory_that_inputs_lack_is_said(table, monkeypatch):
    work = make_tuner(clock := Clock())
    (problem,) = work.problems(TINY, "linear_gelu")
    greedy = dataclasses.replace(problem.start, num_warps=16)

    def call(*inputs):
        if inputs[0].device.type != "meta" and tiles.lookup(problem.op, inputs[0], problem.shape) == greedy:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return problem.launcher.call(*inputs)

    (outcome,) = work.run([with_call(problem, call)])
    assert "out of memory" in outcome.failures[greedy] and greedy not in {t for _, t in clock.timed}

    def no_room(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    (outcome,) = make_tuner(Clock(), trial=no_room).run([problem])
    assert (
        not outcome.finished
        and "64x96" in str(outcome)
        and "its inputs do not fit" in str(outcome)
        and "--batch-size" in str(outcome)
    )


def test_too_much_shared_memory_is_refused_before_the_launch(table):
    class Large(Compiler):
        def submit(self, launch):
            return Done(shared=300_000 if launch.arguments.get("num_stages") == 4 else 0)

    work = make_tuner(clock := Clock(), Large())
    (outcome,) = work.run(work.problems(TINY, "linear_gelu"))
    assert any("300,000 bytes of shared memory, 232,448" in reason for reason in outcome.failures.values())
    assert all(t.num_stages != 4 or t.provider == "cublas" for _, t in clock.timed)


def test_the_tables_tile_is_tried_whatever_the_compiler_says(table):
    """Else any slower library would take its place for good."""
    work = make_tuner(
        Clock(lambda problem, t: 1.0 if t.provider == "triton" else 5.0),
        Compiler(lambda launch: "died with exit code -9"),
    )
    (outcome,) = work.run(work.problems(TINY, "linear_gelu"))
    assert outcome.before == 1.0 and outcome.best == outcome.problem.start and table() == [] and outcome.failures


def test_nothing_is_kept_where_the_tables_tile_only_lacked_memory(table):
    work = make_tuner(Clock())
    (problem,) = work.problems(TINY, "linear_gelu")

    def call(*inputs):
        if inputs[0].device.type != "meta" and tiles.lookup(problem.op, inputs[0], problem.shape) == problem.start:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return problem.launcher.call(*inputs)

    (outcome,) = work.run([with_call(problem, call)])
    assert (
        table() == []
        and "does not run as it was" in str(outcome)
        and "out of memory" in str(outcome)
        and "inf" not in str(outcome)
    )


def test_an_error_that_leaves_the_gpu_whole_refuses_the_candidate_alone(table):
    def planted(problem, t):
        if t.num_warps == 16:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED")
        return 1.0

    work = make_tuner(Clock(planted))
    (outcome,) = work.run(work.problems(TINY, "linear_gelu"))
    assert outcome.finished and {t.num_warps for t in outcome.failures} == {16} and table() == []
    assert all("NOT_SUPPORTED" in reason for reason in outcome.failures.values())


def test_inputs_that_do_not_fit_beside_the_others_are_made_again(table):
    def cramped(problem, dtype, device):
        if any(attempt.trial for attempt in work.active):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return Trial(problem, dtype, device)

    work = make_tuner(Clock(), trial=cramped)
    first, second = work.problems(TINY, "linear_residual")
    work.active = [Attempt(p, Search([p.start])) for p in (first, second)]
    for attempt, other in (work.active, reversed(work.active)):
        with work._in_force(attempt, attempt.problem.start) as trial:
            assert trial.problem is attempt.problem and other.trial is None
