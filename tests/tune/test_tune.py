"""The tuner, watched with a clock and a compiler that the tests control: what it tries, refuses, keeps, and how long it takes."""

import dataclasses
import heapq
import json
import math
import os
import random
import threading
import time
from concurrent.futures import TimeoutError as NotDone
from types import SimpleNamespace

import pytest
import torch

from vitfast import verify as trial
from vitfast.kernels import tiles
from vitfast.kernels.launch import launches_made
from vitfast.kernels.tiles import tile
from vitfast.tune import search
from vitfast.tune import tuner as tune
from vitfast.tune import user_table as tuned
from vitfast.verify import EPS, errors
from vitfast.verify.launchers import Draw, Launcher, Sizes, launchers

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

    def cancel(self) -> None: ...


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

    def __init__(self, planted=lambda problem, tile: 1.0, stop_after: float = math.inf):
        self.planted, self.stop_after, self.timed, self.time, self.broken = planted, stop_after, [], 0.0, False

    def now(self) -> float:
        return self.time

    def lost(self) -> bool:
        return self.broken

    def seconds(self, problem, tile, run) -> float:
        if len(self.timed) >= self.stop_after:
            raise KeyboardInterrupt
        self.timed.append((problem.key, tile))
        return self.planted(problem, tile)


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A user's own table, read on a CPU too."""
    monkeypatch.setenv("VITFAST_TILES", str(tmp_path / "tiles.json"))
    monkeypatch.setattr(
        tiles,
        "_find",
        lambda op, x, shape: tiles._user_table().get((op, "GPU", tiles._bits(x), shape)) or tiles.shipped(op, x, shape),
    )
    tiles.reload_user_table()
    yield (
        lambda: (
            json.loads((tmp_path / "tiles.json").read_text())["tiles"] if (tmp_path / "tiles.json").is_file() else []
        )
    )
    tiles.reload_user_table()


def tuner(clock, compiler=None, dtype=torch.float16, **options) -> tune.Tuner:
    return tune.Tuner(dtype, CPU, "GPU", clock, compiler or Compiler(), **options)


# ---- the search


def test_search_climbs_past_what_is_wrong_and_stops_at_the_top():
    search, top = tune.Search([tile(4, 2, BLOCK_M=32)]), tile(8, 3, BLOCK_M=128)
    while search.wave:
        for t in search.wave:
            far = abs(math.log2(t["BLOCK_M"] / 128)) + abs(math.log2(t.num_warps / 8)) + abs(t.num_stages - 3)
            search.times[t] = None if t["BLOCK_M"] == 256 else 1.0 + far
        search.advance()
    assert search.best == top and search.times[top] == 1.0 and len(search.times) < 30


def test_search_keeps_the_tables_tile_within_noise_and_gives_up_slow_providers():
    start, cublas, slow = tile(4, 2, BLOCK_M=32), tile(provider="cublas"), tile(4, 2, "tma", BLOCK_M=32)
    search = tune.Search([start, cublas, slow])
    search.times |= {start: 1.0, cublas: 0.99, slow: 2.1}
    wave = search.advance()
    assert (
        search.best == start and wave and {t.provider for t in wave} == {"triton"}
    )  # nothing of cuBLAS or of the slow one to vary
    search.times |= dict.fromkeys(wave, 1.0)
    assert search.advance() == [] and search.best == start
    search.times[cublas] = 0.9
    assert search.best == cublas
    search = tune.Search([start, cublas, slow])  # the table's own is looked around however slow it is as it stands
    search.times |= {start: 1.0, cublas: 0.3, slow: 0.5}
    assert {t.provider for t in search.advance()} == {"triton", "tma"}
    search.times |= {t: 0.29 if t.provider == "triton" and t["BLOCK_M"] == 64 else 0.5 for t in search.wave}
    assert {t.provider for t in search.advance()} == {"triton"} and search.best["BLOCK_M"] == 64


def test_search_varies_the_limit_of_registers_where_a_tile_has_one():
    limits = lambda t: sorted(n.maxnreg for n in search.neighbours(t) if n.maxnreg != t.maxnreg)  # noqa: E731
    assert limits(tile(4, 2, BLOCK_M=64)) == [] and limits(tile(4, 2, maxnreg=168, BLOCK_M=64)) == [128, 248]
    assert limits(tile(4, 2, maxnreg=128, BLOCK_M=64)) == [168]


def test_search_goes_on_from_a_tile_that_does_not_run():
    search, start = tune.Search([tile(8, 4, BLOCK_M=256)]), tile(8, 4, BLOCK_M=256)
    search.times[start] = None
    search.times |= {t: 1.0 if t["BLOCK_M"] == 128 else None for t in search.advance()}
    assert search.best == tile(8, 4, BLOCK_M=128)


def test_a_flag_is_turned():
    flags = [{n["EXACT"] for n in search.neighbours(tile(4, 1, "head", BLOCK_M=64, EXACT=flag))} for flag in (0, 1)]
    turned = [
        [n for n in search.neighbours(tile(4, 1, EXACT=flag)) if n.num_warps == 4 and n.num_stages == 1]
        for flag in (0, 1)
    ]
    assert flags == [{0, 1}] * 2 and turned == [[tile(4, 1, EXACT=1)], [tile(4, 1, EXACT=0)]]


# ---- right or wrong


def test_a_lost_row_and_a_wrong_number_are_seen_however_many_there_are():
    truth = torch.randn(100_000, 8, dtype=torch.float64)
    lost = truth.float()
    lost[77_777] = 0
    assert (lost - truth).norm() / truth.norm() < 0.01  # which the norm of the whole would let pass
    assert max(errors(truth.float(), truth)) < 1e-6 and errors(lost, truth)[0] > 0.2
    assert errors(truth.float().index_fill(0, torch.tensor([3]), math.nan), truth) == (math.inf, math.inf)
    assert errors(truth[:-1].float(), truth) == (math.inf, math.inf)
    sums = torch.ones(40_000, dtype=torch.float64)  # a bias gradient: one row
    missing = sums.clone()
    missing[123] = 0
    by_row, by_number = errors(missing, sums)
    assert by_row == pytest.approx(0.005) and by_number == pytest.approx(0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_result_that_is_off_by_a_percent_is_wrong(dtype):
    """What PyTorch itself loses in this dtype is let pass, a percent is not, nor is one number of many."""
    launcher = launchers(Sizes(batch=3, tokens=197, width=256, heads=4, hidden=512, image=224, patch=16))["linear, qkv"]
    bench = tune.Bench(tune.Problem("", "", "", "linear, qkv", launcher, tile(), [], {}), dtype, CPU)
    (truth,) = bench.truth

    def judged(result):
        bench.problem = dataclasses.replace(
            bench.problem, launcher=dataclasses.replace(launcher, call=lambda *_: result)
        )
        bench.check()

    judged(truth.to(dtype))
    for wrong in (
        (1.012 * truth).to(dtype),
        truth.to(dtype).index_put((torch.tensor(77), torch.tensor(3)), torch.tensor(9.0, dtype=dtype)),
    ):
        with pytest.raises(tune.Wrong, match="against float64"):
            judged(wrong)
    assert bench.limits[0][0] < 4 * EPS[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", launchers(TINY))
def test_every_launcher_computes_its_formula(name, dtype):
    """In float64, within twice PyTorch's own error; and what it does not write is found out."""
    problem = tune.Problem("", "", "", name, launchers(TINY)[name], tile(), [], {})
    bench = tune.Bench(problem, dtype, CPU)
    before = launches_made()
    bench.check()
    assert launches_made() > before or name.startswith(("input gradient", "linear, qkv", "weight gradient"))  # cuBLAS's
    assert not any(t.is_floating_point() and not t.isfinite().all() for t in bench.truth)
    bench.problem = dataclasses.replace(
        problem, launcher=dataclasses.replace(problem.launcher, call=lambda *t: tuple(1.2 * o for o in bench.truth))
    )
    with pytest.raises(tune.Wrong, match="against float64"):
        bench.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_rival_computes_the_same(table, dtype):
    """Every provider that runs here, libraries among them, at every problem of a small model."""
    seen = set()
    for problem in tuner(Clock(), dtype=dtype).problems(TINY):
        bench = tune.Bench(problem, dtype, CPU)
        for rival in problem.rivals:
            with tiles.override(problem.op, rival, problem.shape):
                bench.check()
            seen.add((problem.op, rival.provider))
    wanted = {
        ("attention_fwd", "flash"),
        ("attention_bwd", "flash"),
        ("layer_norm_fwd", "torch"),
        ("layer_norm_bwd", "torch"),
    }
    wanted |= {
        ("gelu_bwd", "torch"),
        ("patch_embed_fwd", "cublas"),
        ("patch_embed_dweight", "cublas"),
        ("patch_embed_dimages", "cublas"),
    }
    wanted |= {(op, "triton") for op in ("linear_fwd", "input_grad", "weight_grad")} | {("dgelu_matmul", "cublas")}
    assert wanted <= seen, wanted - seen


def test_what_a_candidate_leaves_unwritten_is_found_out():
    def call(x):
        out = torch.empty_like(x)
        out[:-1] = 2 * x[:-1]
        return out

    launcher = Launcher(lambda t: (t.values(6, 3),), call, lambda x: 2 * x)
    bench = tune.Bench(tune.Problem("", "", "", "double", launcher, tile(), [], {}), torch.float32, CPU)
    right = 2 * bench.inputs[0]
    del right  # whose memory, with the right values in it, is what the next allocation gets
    with pytest.raises(tune.Wrong, match="error of a row inf"):
        bench.check()


# ---- the tuner


def test_problems_are_what_a_training_step_uses_each_with_its_plainest_launcher(table):
    found = {(p.op, p.name) for p in tuner(Clock()).problems(TINY)}
    ops = {op for op, _ in found}
    assert ops == set(tiles.RULES), ops ^ set(tiles.RULES)
    assert {
        ("column_sums", "column sums, layer_norm"),
        ("attention_bwd", "attention backward"),
        ("weight_grad_sum", "weight gradient, fc2, sum"),
    } <= found
    keys = [p.key for p in tuner(Clock()).problems(TINY)]
    assert len(keys) == len(set(keys))
    only = tuner(Clock()).problems(TINY, "gelu", frozenset(key for key in keys if key[0] == "gelu_bwd"))
    assert {p.op for p in only} == {"linear_gelu_fwd", "dgelu_matmul"}


def test_the_shapes_found_are_those_of_the_size_that_is_timed():
    """B/16's patch embedding is "large" at its batch, which a batch of 2 would not show."""
    shapes = {p.key for p in tuner(Clock()).problems(tune.MODELS["B/16"]) if p.op.startswith("patch_embed")}
    assert {shape for _, _, shape in shapes} == {"u8-even-large", "f16-even-large"}


def test_a_planted_gain_of_ten_percent_in_one_product_is_found_and_kept(table):
    def planted(problem, t):
        if problem.op == "linear_gelu_fwd" and t.provider == "triton" and t["GROUP_M"] == 16:
            return 0.9
        return 1.0 if t in (problem.start, *problem.rivals) else 1.01

    clock = Clock(planted)
    work = tuner(clock)
    settled = list(work.run(work.problems(TINY, "linear")))
    (row,) = table()
    assert (row["op"], row["gpu"], row["shape"], row["blocks"]["GROUP_M"]) == ("linear_gelu_fwd", "GPU", "64x96", 16)
    changed = [s for s in settled if s.best != s.problem.start]
    assert [s.problem.op for s in changed] == ["linear_gelu_fwd"] and changed[0].before / changed[
        0
    ].after == pytest.approx(1 / 0.9)
    assert "1.11x" in str(changed[0]) and all(s.finished for s in settled)
    assert (
        tiles.lookup("linear_gelu_fwd", torch.empty(0, dtype=torch.float16), "64x96")["GROUP_M"] == 16
    )  # in force at once


def wrong_with(problem, wrong):
    """The problem with a launcher that is off by 10 % in its last row where the `wrong` tile is in force."""

    def call(*inputs):
        act, pre = problem.launcher.call(*inputs)
        if tiles.lookup(problem.op, act, problem.shape) == wrong and act.device.type != "meta":
            act[-1] *= 1.1
        return act, pre

    return dataclasses.replace(problem, launcher=dataclasses.replace(problem.launcher, call=call))


def test_a_wrong_candidate_is_never_timed(table):
    work = tuner(clock := Clock(lambda problem, t: 0.1 if t == wrong else 1.0))
    (problem,) = work.problems(TINY, "linear_gelu")
    wrong = dataclasses.replace(problem.start, num_warps=problem.start.num_warps * 2)
    (settled,) = work.run([wrong_with(problem, wrong)])
    assert wrong not in {t for _, t in clock.timed} and "against float64" in settled.failures[wrong]
    assert settled.best == problem.start and table() == [] and work.checks > work.timings
    assert "1 of them refused" in str(settled)


def test_what_does_not_compile_or_run_is_not_timed(table):
    def fails(launch):
        return "PTXAS error" if launch.arguments.get("num_warps") == 16 else ""

    work = tuner(clock := Clock(), Compiler(fails))
    (problem,) = work.problems(TINY, "linear_gelu")
    broken = dataclasses.replace(problem.start, num_stages=problem.start.num_stages + 1)

    def call(*inputs):
        if inputs[0].device.type != "meta" and tiles.lookup(problem.op, inputs[0], problem.shape) == broken:
            raise ValueError("start " + "x" * 1000 + " end")
        return problem.launcher.call(*inputs)

    (settled,) = work.run([dataclasses.replace(problem, launcher=dataclasses.replace(problem.launcher, call=call))])
    assert not {t for _, t in clock.timed} & {t for t in settled.failures}
    assert settled.failures[dataclasses.replace(problem.start, num_warps=16)] == "PTXAS error"
    assert settled.failures[broken].startswith("ValueError: start") and settled.failures[broken].endswith("end")


def test_memory_that_a_candidate_lacks_refuses_it_and_memory_that_inputs_lack_is_said(table, monkeypatch):
    work = tuner(clock := Clock())
    (problem,) = work.problems(TINY, "linear_gelu")
    greedy = dataclasses.replace(problem.start, num_warps=16)

    def call(*inputs):
        if inputs[0].device.type != "meta" and tiles.lookup(problem.op, inputs[0], problem.shape) == greedy:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return problem.launcher.call(*inputs)

    (settled,) = work.run([dataclasses.replace(problem, launcher=dataclasses.replace(problem.launcher, call=call))])
    assert "out of memory" in settled.failures[greedy] and greedy not in {t for _, t in clock.timed}

    def no_room(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    (settled,) = tuner(Clock(), bench=no_room).run([problem])
    assert (
        not settled.finished
        and "64x96" in str(settled)
        and "its inputs do not fit" in str(settled)
        and "--batch-size" in str(settled)
    )


def test_too_much_shared_memory_is_refused_before_the_launch(table):
    class Large(Compiler):
        def submit(self, launch):
            return Done(shared=300_000 if launch.arguments.get("num_stages") == 4 else 0)

    work = tuner(clock := Clock(), Large())
    (settled,) = work.run(work.problems(TINY, "linear_gelu"))
    assert any("300,000 bytes of shared memory, 232,448" in reason for reason in settled.failures.values())
    assert all(t.num_stages != 4 or t.provider == "cublas" for _, t in clock.timed)


def test_an_interruption_loses_nothing_and_the_next_run_goes_on(table):
    def planted(problem, t):  # each further stage gains
        return (
            1.0
            if t.provider != "triton" or problem.op != "linear_gelu_fwd"
            else 2.0 - 0.2 * t.num_stages - 0.1 * math.log2(t["GROUP_M"])
        )

    work = tuner(Clock(planted, stop_after=30))
    with pytest.raises(KeyboardInterrupt):
        list(work.run(work.problems(TINY, "linear_gelu")))
    (row,) = table()
    kept = tiles.from_record(row)
    assert (
        json.loads(tiles.user_table_path().read_text())["trying"] == []
    )  # the interruption is not the candidate's fault
    again = tuner(Clock(planted))
    (problem,) = again.problems(TINY, "linear_gelu")
    assert problem.start == kept and tiles.shipped(*problem_key(problem)) in problem.rivals
    (settled,) = again.run([problem])
    assert settled.before == planted(problem, kept) and settled.after == pytest.approx(
        planted(problem, tile(1, 6, GROUP_M=32)), abs=1e-9
    )


def test_what_is_faster_is_kept_before_the_next_candidate_is_tried(table):
    clock = Clock(
        lambda problem, t: 0.5 if t.provider == "cublas" else 1.0, stop_after=4
    )  # the start, cuBLAS, and both again
    work = tuner(clock)
    with pytest.raises(KeyboardInterrupt):
        list(work.run(work.problems(TINY, "linear_gelu")))
    assert [row["provider"] for row in table()] == ["cublas"] and [t.provider for _, t in clock.timed] == [
        "triton",
        "cublas",
    ] * 2


def test_the_shipped_tile_is_tried_again_when_the_table_has_another(table):
    work = tuner(Clock())
    (problem,) = work.problems(TINY, "linear_gelu")
    far = dataclasses.replace(problem.start, num_warps=1, num_stages=6)
    tuned.keep(tiles.to_record(problem.op, "GPU", problem.bits, problem.shape, far))
    again = tuner(Clock(lambda p, t: 0.5 if t == problem.start else 1.0))
    (settled,) = again.run(again.problems(TINY, "linear_gelu"))
    assert (
        settled.problem.start == far and settled.best == problem.start and tiles.from_record(table()[0]) == problem.start
    )


def problem_key(problem):
    return problem.op, torch.empty(0, dtype=torch.float16), problem.shape


def test_a_lucky_measurement_is_not_kept_and_hides_no_real_gain(table):
    luck = iter([0.5])

    def planted(problem, t):
        return next(luck, 1.0) if t.num_warps == 16 else 0.8 if t.num_stages == 4 and real else 1.0

    for real in (False, True):
        luck = iter([0.5])
        work = tuner(Clock(planted))
        (settled,) = work.run(work.problems(TINY, "linear_gelu"))
        assert (
            (settled.best.num_stages == 4 and settled.after == 0.8)
            if real
            else (settled.best == settled.problem.start and table() == [])
        )


def test_what_is_wrong_only_at_times_is_not_kept(table):
    """The result is compared again before a row is written."""
    work = tuner(Clock(lambda problem, t: 0.5 if t == shaky else 1.0))
    (problem,) = work.problems(TINY, "linear_gelu")
    seen, shaky = [], dataclasses.replace(problem.start, num_warps=16)

    def call(*inputs):
        act, pre = problem.launcher.call(*inputs)
        if act.device.type != "meta" and tiles.lookup(problem.op, act, problem.shape) == shaky:
            seen.append(act)
            act *= 1.0 + 0.1 * (len(seen) == 2)
        return act, pre

    (settled,) = work.run([dataclasses.replace(problem, launcher=dataclasses.replace(problem.launcher, call=call))])
    assert (
        table() == [] and settled.best == problem.start and "against float64" in next(iter(settled.failures.values()))
    )


def test_the_tables_tile_is_tried_whatever_the_compiler_says(table):
    """Else any slower library would take its place for good."""
    work = tuner(
        Clock(lambda problem, t: 1.0 if t.provider == "triton" else 5.0),
        Compiler(lambda launch: "died with exit code -9"),
    )
    (settled,) = work.run(work.problems(TINY, "linear_gelu"))
    assert settled.before == 1.0 and settled.best == settled.problem.start and table() == [] and settled.failures


def test_nothing_is_kept_where_the_tables_tile_only_lacked_memory(table):
    work = tuner(Clock())
    (problem,) = work.problems(TINY, "linear_gelu")

    def call(*inputs):
        if inputs[0].device.type != "meta" and tiles.lookup(problem.op, inputs[0], problem.shape) == problem.start:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return problem.launcher.call(*inputs)

    (settled,) = work.run([dataclasses.replace(problem, launcher=dataclasses.replace(problem.launcher, call=call))])
    assert (
        table() == []
        and "does not run as it was" in str(settled)
        and "out of memory" in str(settled)
        and "inf" not in str(settled)
    )


def test_parts_are_settled_before_what_runs_them(table):
    ops = [p.op for p in tuner(Clock()).problems(TINY)]
    assert max(ops.index(op) for op in tune.PARTS) < min(
        ops.index(op) for op in ("weight_grad", "dgelu_matmul", "attention_bwd", "layer_norm_bwd")
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

    work = tuner(clock := Clock(), Stuck(), seconds=50)
    (settled,) = work.run(work.problems(TINY, "linear_gelu"))
    assert len(clock.timed) > 10 and clock.time == 50 and not settled.finished
    assert [t.num_warps for t in settled.failures] == [16] and "before it was compiled" in next(
        iter(settled.failures.values())
    )


def test_when_the_time_is_up_nothing_more_is_begun(table):
    class Slow(Clock):
        def seconds(self, problem, t, run):
            self.time += 10.0
            return super().seconds(problem, t, run)

    work = tuner(clock := Slow(), compiler := Compiler(), seconds=45)
    problems = work.problems(TINY)
    settled = list(work.run(problems))
    assert len(clock.timed) <= 6 and clock.time <= 60 and not any(s.finished for s in settled)
    assert len(settled) + work.unreached == len(problems) and work.unreached > 10
    assert "the time was up" in str(settled[0]) and "not reached" in str(settled[-1])
    assert len(compiler.jobs) < 60


def test_a_candidate_that_breaks_the_gpu_is_not_tried_again(table):
    """Whatever words the error has: the device is asked."""
    work = tuner(clock := Clock())
    (problem,) = work.problems(TINY, "linear_gelu")
    bad = dataclasses.replace(problem.start, num_warps=16)

    def call(*inputs):
        if inputs[0].device.type != "meta" and tiles.lookup(problem.op, inputs[0], problem.shape) == bad:
            clock.broken = True
            raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
        return problem.launcher.call(*inputs)

    broken = dataclasses.replace(problem, launcher=dataclasses.replace(problem.launcher, call=call))
    with pytest.raises(tune.DeviceLost, match="illegal memory access"):
        list(work.run([broken]))
    tuned.keep(tiles.to_record("x", "GPU", "16", "y", bad))  # which changes nothing about what is refused
    (settled,) = tuner(clock := Clock()).run([broken])
    assert bad not in {t for _, t in clock.timed} and "illegal" in settled.failures[bad] and settled.finished


def test_an_error_that_leaves_the_gpu_whole_refuses_the_candidate_alone(table):
    def planted(problem, t):
        if t.num_warps == 16:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED")
        return 1.0

    work = tuner(Clock(planted))
    (settled,) = work.run(work.problems(TINY, "linear_gelu"))
    assert settled.finished and {t.num_warps for t in settled.failures} == {16} and table() == []
    assert all("NOT_SUPPORTED" in reason for reason in settled.failures.values())


def test_a_candidate_that_breaks_the_gpu_when_it_is_timed_again_is_refused_too(table):
    times = iter([0.5])

    def planted(problem, t):
        if t.num_warps != 16:
            return 1.0
        if time := next(times, 0):
            return time
        clock.broken = True
        raise RuntimeError("CUDA error: unspecified launch failure")

    work = tuner(clock := Clock(planted))
    with pytest.raises(tune.DeviceLost):
        list(work.run(work.problems(TINY, "linear_gelu")))
    assert [key[3].num_warps for key in tuned.refused("GPU")] == [16] and table() == []


def test_a_candidate_that_hangs_is_noticed_and_not_tried_again(table):
    hung, go_on = threading.Event(), threading.Event()

    def planted(problem, t):
        if t.num_warps == 16:
            assert hung.wait(10)
            rows = json.loads(tiles.user_table_path().read_text())["trying"]
            assert [row["num_warps"] for row in rows] == [16] and rows[0]["pid"] == os.getpid()
            go_on.set()
        return 1.0

    work = tuner(Clock(planted), hung=hung.set, hangs=0.3)
    (settled,) = work.run(work.problems(TINY, "linear_gelu"))
    assert go_on.is_set() and settled.finished
    path = tiles.user_table_path()
    left = tiles.to_record("linear_gelu_fwd", "GPU", "16", "64x96", tile(16, 1, BLOCK_M=16)) | {
        "pid": 2**22 + 1
    }  # of no process
    path.write_text(json.dumps(json.loads(path.read_text()) | {"trying": [left]}))
    assert list(tuned.refused("GPU")) == [("linear_gelu_fwd", "16", "64x96", tile(16, 1, BLOCK_M=16))]
    assert json.loads(path.read_text())["trying"] == []


def test_inputs_that_do_not_fit_beside_the_others_are_made_again(table):
    def cramped(problem, dtype, device):
        if any(attempt.bench for attempt in work.active):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return tune.Bench(problem, dtype, device)

    work = tuner(Clock(), bench=cramped)
    first, second = work.problems(TINY, "linear_residual")
    work.active = [tune.Attempt(p, tune.Search([p.start])) for p in (first, second)]
    for attempt, other in (work.active, reversed(work.active)):
        with work._in_force(attempt, attempt.problem.start) as bench:
            assert bench.problem is attempt.problem and other.bench is None


def two_writers(path: str, name: str, count: int) -> None:
    os.environ["VITFAST_TILES"] = path
    for i in range(count):
        tuned.keep(tiles.to_record("x", name, "16", str(i), tile(4, 2, BLOCK_M=16)))


def test_two_processes_that_write_the_table_lose_nothing(table, tmp_path):
    from processes import Child, done

    path = str(tmp_path / "tiles.json")
    done([Child(two_writers, path, name, 40) for name in ("a", "b")])
    assert sorted((r["gpu"], int(r["shape"])) for r in table()) == [(name, i) for name in ("a", "b") for i in range(40)]


def test_one_tuner_at_a_time(table):
    held = tuned.only_one("GPU-1")
    assert tuned.only_one("GPU-2")
    with pytest.raises(tune.InputError, match="another vitfast tune runs on this GPU"):
        tuned.only_one("GPU-1")
    held.close()
    assert tuned.only_one("GPU-1")


def test_the_clock_takes_the_median_of_calls_that_are_launched_behind_a_busy_device(monkeypatch):
    """Every timed call comes after a flush and a lead longer than its launch, and events stand around it alone."""
    told, times = [], iter([5.0, 1.0, 9.0])

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            told.append("event")

        def elapsed_time(self, end):
            return next(times)  # in milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: told.append("wait"))
    monkeypatch.setattr(
        torch.cuda, "_sleep", lambda cycles: told.append("lead" if cycles > 2e9 * 0.01 else "short lead")
    )
    clock = trial.DeviceClock.__new__(trial.DeviceClock)
    clock.rounds, clock.flushed = 3, SimpleNamespace(zero_=lambda: told.append("flush"))

    def run():
        told.append("run")
        time.sleep(0.005)

    assert clock.seconds(None, None, run) == pytest.approx(5e-3)
    assert told == ["run", "run", "wait", "run", *(["flush", "lead", "event", "run", "event"] * 3), "wait"]


# ---- how long it takes


class World:
    """A machine in which compiling takes `compile_s` of one of 14 processes, and checking and timing what they take on a GPU."""

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
        """Launches that differ in nothing share a compilation, as in offline.Compiler."""
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
        """A landscape with one top for each provider, up to a third faster than where the table stands; 2 % of noise."""
        self.timings += 1
        draw = random.Random(f"{self.seed} {problem.key} {t.provider}")
        base = 3e-4 * draw.uniform(0.9, 1.3)
        numbers = dict(t.blocks) | dict(num_warps=t.num_warps, num_stages=t.num_stages) if t.blocks else {}
        like = next((s for s in (problem.start, *problem.rivals) if s.provider == t.provider), t)
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
    """In the place of a Bench: everything is right, and takes time."""

    def __init__(self, problem, dtype, device):
        self.run = None

    def check(self) -> None:
        Looked.world.time += Looked.world.check_s


@pytest.mark.parametrize("seed", [0, 1])
def test_b16_is_settled_in_400_seconds_by_its_own_count(table, seed):
    """2 s a compilation, which is twice what they take on a slow core, 14 processes."""
    world = Looked.world = World(seed)
    work = tune.Tuner(torch.bfloat16, CPU, "GPU", world, world, seconds=400, bench=Looked)
    problems = work.problems(tune.MODELS["B/16"])
    settled = list(work.run(problems))
    print(
        f"{len(problems)} problems, {world.compilations} compilations, {work.checks} checks, {work.timings} timings, {world.time:.0f} s"
    )
    assert len(settled) == len(problems) > 25 and all(s.finished for s in settled)
    assert world.time < 400 and work.timings == world.timings
    gains = [s.before / s.after for s in settled]
    assert sum(g > 1.05 for g in gains) > len(gains) // 3 and min(gains) > 0.99
    assert len(table()) == sum(s.best != s.problem.start for s in settled)


def test_drawn_inputs_are_random_but_on_meta():
    draw = Draw(torch.float16, CPU, torch.Generator().manual_seed(0))
    assert draw.values(50, 50).std() == pytest.approx(1, abs=0.1) and draw.weight(10, 400).std() == pytest.approx(
        0.05, abs=0.01
    )
    assert 0.5 <= draw.factors(100).min() and draw.factors(100).max() <= 1.5 and draw.pixels(99).dtype == torch.uint8
    assert Draw(torch.float16, torch.device("meta")).pixels(2, 3).shape == (2, 3)


# ---- the command


def test_the_command_says_what_is_wrong(capsys):
    from vitfast.cli import main

    for given, said in (
        (["--model", "B/61"], "unknown model 'B/61'; did you mean B/16"),
        (["--seconds", "0"], "--seconds must be positive, got 0"),
        (["--batch-size", "-1"], "--batch-size must be positive, got -1"),
    ):
        assert main(["tune", *given]) == 2
        assert said in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["tune"]) == 2
        assert "there is none here" in capsys.readouterr().err


def command(monkeypatch, clock, *given) -> int:
    """`vitfast tune` on a machine whose GPU is this clock."""
    from vitfast.cli import main

    monkeypatch.setattr(tune, "machine", lambda: (CPU, "GPU", clock, Compiler()))
    monkeypatch.setitem(tune.MODELS, "B/16", TINY)
    return main(["tune", "--dtype", "float16", *given])


def test_the_command_keeps_what_it_finds_and_tells_its_own_count(table, monkeypatch, capsys):
    clock = Clock(lambda problem, t: 0.5 if t.num_warps == 16 else 1.0)
    assert command(monkeypatch, clock, "--only", "linear_gelu") == 0
    out = capsys.readouterr().out
    assert "1.000" not in out.splitlines()[0] and "1000.000 ms as it was, 500.000 ms now (2.00x)" in out
    assert f"{len(clock.timed)} timings" in out and "1 tiles faster than before, kept in" in out and len(table()) == 1
    assert command(monkeypatch, Clock(), "--only", "nonsense") == 2
    assert "no operation has 'nonsense' in its name; there are layer_norm_fwd" in capsys.readouterr().err


def test_the_command_says_when_the_time_was_up(table, monkeypatch, capsys):
    class Slow(Clock):
        def seconds(self, problem, t, run):
            self.time += 1.0
            return super().seconds(problem, t, run)

    assert command(monkeypatch, Slow(), "--seconds", "3") == 0
    assert "the same command goes on from here" in capsys.readouterr().out


def test_the_command_goes_on_in_a_new_process_when_a_candidate_breaks_the_gpu(table, monkeypatch, capsys):
    def breaks(problem, t):
        clock.time += 1.0
        if problem.op == "linear_gelu_fwd" and t.num_warps == 16:
            clock.broken = True
            raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
        return 1.0

    became = []
    monkeypatch.setattr(tune.os, "execv", lambda path, command: became.append(command))
    monkeypatch.setenv(tune.GOES_ON, "{}")
    clock = Clock(breaks)
    try:
        command(monkeypatch, clock, "--only", "gelu", "--seconds", "500", "--batch-size", "2", "--deterministic")
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
    wanted = [
        "-m",
        "vitfast",
        "tune",
        "--model",
        "B/16",
        "--dtype",
        "float16",
        "--only",
        "gelu",
        "--batch-size",
        "2",
        "--deterministic",
    ]
    assert became[0][1:] == wanted and "has broken the GPU's context" in capsys.readouterr().err
    state = json.loads(os.environ[tune.GOES_ON])
    assert (
        state["left"] == 500 - clock.time and [key[0] for key in state["done"]] == ["gelu_bwd"] and state["kept"] == []
    )
    assert [key[3].num_warps for key in tuned.refused("GPU")] == [16]
    assert command(monkeypatch, again := Clock(), "--only", "gelu") == 0  # which takes up what was handed over
    assert {key[0] for key, _ in again.timed} == {"linear_gelu_fwd", "dgelu_matmul"} and tune.GOES_ON not in os.environ


def test_a_problem_that_one_model_did_not_reach_is_the_next_ones(table, monkeypatch, capsys):
    class Slow(Clock):
        def seconds(self, problem, t, run):
            self.time += 1.0
            return super().seconds(problem, t, run)

    monkeypatch.setitem(tune.MODELS, "S/16", TINY)
    assert (
        command(monkeypatch, clock := Slow(), "--only", "linear_gelu", "--seconds", "20", "--model", "B/16", "S/16")
        == 0
    )
    out = capsys.readouterr().out
    assert out.count("linear_gelu_fwd") == 2 and "the same command goes on from here" in out and 20 <= clock.time <= 22


def test_deterministic_leaves_out_libraries_that_may_add_in_any_order(table, monkeypatch, capsys):
    try:
        assert (
            command(
                monkeypatch,
                Clock(lambda problem, t: 0.5 if t.provider == "flash" else 1.0),
                "--only",
                "attention",
                "--deterministic",
            )
            == 0
        )
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
    assert [(row["op"], row["provider"]) for row in table()] == [("attention_fwd", "flash")]
    assert "its backward may add in any order" in capsys.readouterr().out


def test_a_damaged_table_is_one_line(table, monkeypatch, capsys):
    tiles.user_table_path().write_text('{"tiles": [{"op": 1}]}')
    assert command(monkeypatch, Clock()) == 2
    assert "tiles.json is damaged" in capsys.readouterr().err
    tiles.user_table_path().write_text(
        '{"tiles": [], "refused": [{"num_warps": 4, "num_stages": 2, "provider": "x", "blocks": {}}]}'
    )
    assert command(monkeypatch, Clock()) == 2
    assert "tiles.json is damaged (KeyError: 'op'); remove it" in capsys.readouterr().err


def test_an_interrupted_command_says_what_was_kept(table, monkeypatch, capsys):
    assert (
        command(monkeypatch, Clock(lambda problem, t: 1 / t.num_warps, stop_after=40), "--only", "linear_gelu") == 130
    )
    said = capsys.readouterr()
    assert "1 tiles faster than before, kept in" in said.out and "interrupted" in said.err and len(table()) == 1
