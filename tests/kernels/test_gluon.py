"""The product in Gluon without a GPU: run as Python under gluon_model.py; its machine code read."""

import contextlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import gluon_model
import pytest
import torch
import triton
import triton.language as tl

from vitfast import ref
from vitfast.kernels import gluon_names, launch, mlp, product_gluon, rows, tiles
from vitfast.kernels.tiles import Rule, tile
from vitfast.tune import user_table
from vitfast.tune.search import Search
from vitfast.tune.trial import Problem
from vitfast.tune.tuner import Attempt, Tuner
from vitfast.verify.draw import Draw, Sizes
from vitfast.verify.launcher import Launcher

BF16 = torch.bfloat16
CASES = {"fc1": "linear_gelu_fwd", "dgelu": "dgelu_matmul"}


def gluon_tile(op: str) -> tiles.Tile:
    with tiles.targeting(90):
        like = torch.empty(0, dtype=BF16, device="meta")
        (found,) = (t for t in tiles.candidates(op, like, "768x3072", unchecked=True) if t.provider == "gluon")
    return found


# ---- the schedule


def product_of(
    bug: tuple[str, ...], kind: str, m: int, n: int, k: int, programs: int, seed: int, stages: int = 3, group: int = 2
) -> None:
    """Runs the kernel with an epilogue that stores sums, and compares; output blocks of 4 x 64."""
    copy, generator = gluon_model.module(*bug, rows=2), torch.Generator().manual_seed(seed)
    a = torch.randn(m, k, generator=generator).half()
    b = torch.randn(*((k, n) if kind == "nn" else (n, k)), generator=generator).half()
    out, stored = torch.full((m, n), torch.nan, dtype=torch.float64), torch.zeros(m, n)

    def epilogue(sums, out, row_block, offs_m, cols, m, n, stride, activation):
        assert (
            sums.shape == (2, 16)
            and (offs_m == 2 * row_block + torch.arange(2)).all()
            and (stride, activation) == (n, "gelu")
        )
        offs_m, cols = offs_m[offs_m < m], cols[cols < n]
        out[offs_m[:, None], cols] = sums[: len(offs_m), : len(cols)]
        stored[offs_m[:, None], cols] += 1

    small = tile(4, stages, "gluon", BLOCK_N=64, BLOCK_K=64, GROUP_M=group, SUBTILES=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_multiprocessors", lambda device: programs)
        (made,) = launch.record(lambda: copy.launch_product(a, b, kind, small, epilogue, (out,), (n,), "gelu"))
    assert made.grid == (min(programs, -(-m // 4) * -(-n // 64)),)
    gluon_model.run(copy, made, seed)
    assert (stored == 1).all(), "a tile is left out, or stored twice"
    torch.testing.assert_close(out, a.double() @ (b if kind == "nn" else b.t()).double())


@pytest.mark.parametrize("kind", ["nt", "nn"])
def test_every_schedule_gives_the_product(kind):
    """Rings shorter and longer than K; M, N and K that end inside blocks; one block a program or several."""
    shapes = [(25, 136, 200), (4, 64, 64), (10, 192, 136)]
    for seed, (stages, programs) in enumerate([(2, 1), (2, 2), (3, 2), (4, 3), (7, 1)] * 2):
        product_of((), kind, *shapes[seed % 3], programs, seed, stages, group=1 + seed % 3)


def test_a_ring_of_one_slot_would_wait_for_ever():
    with pytest.raises(ValueError, match="a slot is freed when the next block is there"):
        product_of((), "nt", 4, 64, 128, 1, 0, stages=1)
    with pytest.raises(gluon_model.Deadlock):
        product_of(("STAGES > 1", "True"), "nt", 4, 64, 128, 1, 0, stages=1)


BUGS = {
    "the producer waits for a round too many": ("phase ^ 1)", "phase)"),
    "phases do not alternate": ("step // STAGES & 1", "0 * step"),
    "one group frees a slot for both": ("empty.index(i), count=2", "empty.index(i), count=1"),
    "a slot is freed while it is read": ("hopper.warpgroup_mma_wait(1", "hopper.warpgroup_mma_wait(2"),
    "a slot is freed twice": ("pred=k > 0)", "pred=step > 0)"),
    "the last slot is not freed": (
        "empty.index(before), count=1)\n        row",
        "empty.index(before), count=1, pred=False)\n        row",
    ),
    "what came is not waited for": ("hopper.mbarrier.wait(full.index(slot), phase)", "pass"),
    "sums go on from the last tile": ("use_acc=k > 0", "use_acc=step > 0"),
    "too few bytes are expected": ("(2 * ROWS + BLOCK_N) * BLOCK_K * 2", "(ROWS + BLOCK_N) * BLOCK_K * 2"),
    "both groups take the upper rows": ("slice(half * ROWS, ROWS)", "slice(0, ROWS)"),
    "a group of row blocks is not cut at the last": ("min(blocks_m - first, GROUP_M)", "GROUP_M"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug):
    with pytest.raises(AssertionError):
        for seed in range(20):
            product_of(BUGS[bug], "nt", 25, 136, 200, programs=1, seed=seed)


@pytest.mark.parametrize("blocks_m, blocks_n, group", [(1, 1, 8), (13, 3, 8), (16, 12, 8), (7, 5, 3), (395, 12, 8)])
def test_every_block_is_visited_once(blocks_m, blocks_n, group):
    visited = [product_gluon.block_at.fn(i, blocks_m, blocks_n, group) for i in range(blocks_m * blocks_n)]
    assert sorted(visited) == [(m, n) for m in range(blocks_m) for n in range(blocks_n)]
    assert len({m for m, _ in visited[: min(blocks_m, group) * blocks_n]}) == min(blocks_m, group)


@triton.jit
def epilogue_kernel(
    sums_ptr, p0, p1, p2, p3, index_m, first_m, first_n, M, N, s0, s1, ACT: tl.constexpr, WIDTH: tl.constexpr
):
    offs_m, cols = first_m + tl.arange(0, 64).to(tl.int64), first_n + tl.arange(0, WIDTH)
    sums = tl.load(sums_ptr + tl.arange(0, 64)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])
    if s1 is None:
        mlp.store_gelu(sums, p0, p1, p2, index_m, offs_m, cols, M, N, s0, ACT)
    else:
        mlp.store_dgelu(sums, p0, p1, p2, p3, index_m, offs_m, cols, M, N, s0, s1, ACT)


def interpreted(sums, *rest):
    """The epilogue of fc1 or of dGELU, whichever has these arguments, in Triton's interpreter."""
    count = 4 if len(rest) == 12 else 3
    pointers, (row_block, offs_m, cols, m, n), (*strides, activation) = (
        rest[:count],
        rest[count : count + 5],
        rest[count + 5 :],
    )
    (p0, p1, p2, p3), (s0, s1) = (*pointers, None)[:4], (*strides, None)[:2]
    first = dict(index_m=row_block, first_m=int(offs_m[0]), first_n=int(cols[0]), M=m, N=n)
    assert len(offs_m) == 64
    sums = sums.float().contiguous()
    epilogue_kernel[(1,)](sums, p0, p1, p2, p3, **first, s0=s0, s1=s1, ACT=activation, WIDTH=len(cols))


@pytest.fixture
def on_cpu(monkeypatch):
    """The launchers of mlp.py record Gluon's product on CPU tensors, with a copy that can be run."""
    copy = gluon_model.module()
    monkeypatch.setattr(gluon_names, "unsupported_reason", lambda x, generation: None)
    monkeypatch.setattr(mlp, "launch_product", copy.launch_product)
    monkeypatch.setattr(rows, "_multiprocessors", lambda device: 2)
    return copy


def made(copy, call, seed: int):
    """The results of a launcher: Gluon's product runs in the model, what follows it in the interpreter."""
    results = []
    found = launch.record(lambda: results.extend(call()))
    assert found[0].kernel is copy.product_gluon_kernel
    found[0].arguments["EPILOGUE"] = interpreted
    for tensor in (t for t in found[0].arguments["pointers"] if t is not None and t.numel() and t.is_floating_point()):
        if any(tensor is r for r in results) or tensor.dim() == 2 and tensor.dtype == torch.float32:
            tensor.fill_(torch.nan)
    gluon_model.run(copy, found[0], seed)
    for later in found[1:]:
        launch.launch(later.kernel, later.grid, **later.arguments)
    return results


@pytest.mark.parametrize(
    "activation, full", [("gelu", True), ("gelu_tanh", False), ("quick_gelu", True), ("silu", True)]
)
def test_fc1_matches_ref(on_cpu, activation, full):
    x, w, b = (torch.randn(*shape).half() for shape in ((197, 72), (264, 72), (264,)))
    with tiles.override("linear_gelu_fwd", gluon_tile("linear_gelu_fwd")):
        act, pre = made(on_cpu, lambda: mlp.linear_gelu(x, w, b if full else None, activation, full), 0)
    want = x.double() @ w.double().t() + (b.double() if full else 0)
    torch.testing.assert_close(act.double(), ref.ACTIVATIONS[activation](want), atol=1e-2, rtol=2e-3)
    assert pre.numel() == (want.numel() if full else 0)
    if full:
        torch.testing.assert_close(pre.double(), want, atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize(
    "activation, full", [("gelu", True), ("gelu_tanh", False), ("quick_gelu", True), ("silu", True)]
)
def test_dgelu_matches_ref(on_cpu, activation, full):
    """165 rows: the last row tile of 64 lies past them whole, and its column sums are written."""
    g, w2 = torch.randn(165, 72).half(), torch.randn(72, 264).half()
    pre = torch.randn(165, 272).half()[:, :264]
    with tiles.override("dgelu_matmul", gluon_tile("dgelu_matmul")):
        dpre, act, dbias = made(on_cpu, lambda: mlp.dgelu_matmul(g, w2, pre, activation, full, full), 1)
    leaf = pre.double().requires_grad_()
    want = ref.ACTIVATIONS[activation](leaf)
    (slope,) = torch.autograd.grad(want, leaf, g.double() @ w2.double())
    torch.testing.assert_close(dpre.double(), slope, atol=2e-2, rtol=2e-3)
    assert (act is None, dbias is None) == (not full, not full)
    if full:
        torch.testing.assert_close(act.double(), want.detach(), atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(dbias.double(), slope.sum(0), atol=2e-2, rtol=1e-3)


# ---- the machine code

COMPILED = """
import json, sys
sys.path.insert(0, {tests!r})
import codegen
from vitfast.machine_code import compiler, cubin
from vitfast.kernels import tiles
from vitfast.verify.draw import Draw, Sizes
from vitfast.verify.launchers import launchers

work, facts, same = {{}}, [], []
with tiles.targeting(90):
    for name, op in (("linear + gelu", "linear_gelu_fwd"), ("dgelu", "dgelu_matmul")):
        keys = set()
        for batch, width in ((256, 768), (128, 1024), (512, 192)):
            s = Sizes(batch=batch, tokens=197, width=width, heads=3, hidden=4 * width, image=32, patch=16)
            shape = f"{{width}}x{{4 * width}}"
            like = codegen.torch.empty(0, dtype=codegen.torch.bfloat16, device=codegen.META)
            (tile,) = (t for t in tiles.candidates(op, like, shape, unchecked=True) if t.provider == "gluon")
            launcher = launchers(s)[name]
            with tiles.override(op, tile):
                found = codegen.record(lambda: launcher.call(*launcher.make(Draw(like.dtype, codegen.META))))[0]
            job = compiler.Job.of(found)
            keys.add(compiler.key_of(job.launch(), 90))
            same.append(compiler.key_of(job.launch(), 90) == compiler.key_of(found, 90))
        work[name] = (f"{{name}} (gluon)", 90, "bf16", job)
        facts.append(dict(kernels=len(keys), grid=found.grid))
if __name__ == "__main__":
    rows = codegen.rows_of(work, 2, 1)
    for (_, _, _, job), fact in zip(work.values(), facts):
        code = cubin.read(compiler.compiled(job.launch(), 90).asm["cubin"])  # from Triton's cache
        names = [cubin.name_of(i) for i in code.instructions]
        marks = [m for i in code.instructions for m in ("DEPBAR", "BAR.SYNC", "SYNCS.ARRIVE") if m in i]
        marks = [b for a, b in zip(["", *marks], marks) if a != "BAR.SYNC" or b != a]  # several in a row are one
        fact["freed"] = [marks[i + 1 : i + 3] for i, mark in enumerate(marks) if mark == "DEPBAR"]
        fact |= dict(limits=code.count("USETMAXREG"), copies=code.count("UTMALDG"))
        fact["products"] = [n for n in (names[x.first : x.last + 1].count("HGMMA") for x in code.loops) if n]
    print(json.dumps(dict(rows=[a | b for a, b in zip(rows, facts)], same=same, problems=codegen.problems(rows))))
"""


@pytest.mark.slow(25)
def test_it_compiles_to_what_it_was_written_for():
    """B/16, L/16 and a width of 192 share their code: wgmma not serialised, no spill, setmaxnreg."""
    if gluon_names.MISSING:
        pytest.skip(gluon_names.MISSING)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = COMPILED.format(tests=str(Path(__file__).parents[1]))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert not result["problems"] and all(result["same"]), result
    for row in result["rows"]:
        assert row["kernels"] == 1 and row["kernel"] == "product_gluon_kernel" and row["grid"] == [132]
        assert row["hgmma"] == 8 and row["waits"] == 0 and row["hmma"] == 0 and not row["notes"]
        assert row["spills"] == row["stack"] == 0 and row["registers"] <= product_gluon.REGISTERS
        assert row["limits"] >= 4 and row["copies"] >= 2, (
            "no warp gives registers up, or the copy engine copies nothing"
        )
        assert 4 * 48 * 2**10 < row["shared"] <= tiles.SHARED_LIMIT[90] and row["warps"] == 12
        # One thread frees a slot for its group: after a barrier, so after the wait of each of its warps.
        assert row["freed"] == [["BAR.SYNC", "SYNCS.ARRIVE"]] * 4
        assert row["products"][0] == 4  # of the innermost loop: a block of 64 along K, 16 at a time


# ---- where it may run


@pytest.mark.parametrize("op", CASES.values())
def test_nothing_takes_it_unasked(op, monkeypatch):
    for table in tiles.RULES.values():
        assert not any(rule.tile.provider in tiles.UNCHECKED for rule in table)
    meta = torch.empty(0, dtype=BF16, device="meta")
    chosen = gluon_tile(op)
    for x in (meta, torch.empty(0, dtype=BF16)):
        assert tiles.lookup(op, x, "768x3072").provider != "gluon"
        assert "gluon" not in [t.provider for t in tiles.candidates(op, x, "768x3072")]
    before = tiles.lookup(op, meta, "768x3072")
    monkeypatch.setitem(tiles.RULES, op, (Rule(chosen), *tiles.RULES[op]))
    assert tiles.lookup(op, meta, "768x3072") == tiles.shipped(op, meta, "768x3072") == before
    monkeypatch.setattr(tiles, "_find", lambda *_: chosen)  # the user's own table
    assert (
        tiles.lookup(op, meta, "768x3072") == chosen
        and tiles.lookup(op, torch.empty(0, dtype=BF16), "768x3072") == before
    )


def test_where_it_cannot_run_it_says_why():
    half, whole = torch.empty(0, dtype=BF16), torch.empty(0)
    op, chosen = CASES["fc1"], gluon_tile(CASES["fc1"])
    assert tiles.absent(op, half, "768x3072") == {"gluon": "Gluon has no interpreter"}
    with (
        tiles.override(op, chosen),
        pytest.raises(RuntimeError, match="gluon cannot run here: Gluon has no interpreter"),
    ):
        tiles.lookup(op, half, "768x3072")
    with tiles.targeting(100), tiles.override(op, chosen), pytest.raises(RuntimeError, match="sm_90 and 16 bit"):
        tiles.lookup(op, half.to("meta"), "768x3072")
    with tiles.override(op, chosen), pytest.raises(RuntimeError, match="sm_90 and 16 bit"):
        tiles.lookup(op, whole.to("meta"), "768x3072")
    for sm in (80, 89, 100, 120):
        with tiles.targeting(sm):
            assert not any(
                t.provider == "gluon" for t in tiles.candidates(op, half.to("meta"), "768x3072", unchecked=True)
            )


def test_another_gluon_is_a_reason_and_no_error():
    script = """
import sys, types
sys.modules["triton.experimental.gluon.language.nvidia.hopper"] = types.ModuleType("hopper")
import torch, triton
import vitfast
from vitfast.kernels import tiles
x = torch.empty(0, dtype=torch.bfloat16, device="meta")
assert tiles.lookup("dgelu_matmul", x, "768x3072").provider == "triton"
assert tiles.absent("dgelu_matmul", x, "768x3072")["gluon"] == f"this Triton ({triton.__version__}) has another Gluon"
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_strides_that_descriptors_cannot_take_leave_it_to_the_shipped_tile():
    meta = torch.device("meta")
    for width, kernel in ((768, "product_gluon_kernel"), (764, "dgelu_matmul_kernel")):
        g, w2, pre = (
            torch.empty(*shape, dtype=BF16, device=meta) for shape in ((300, width), (width, 3072), (300, 3072))
        )
        with tiles.targeting(90), tiles.override("dgelu_matmul", gluon_tile("dgelu_matmul")):
            found = launch.record(lambda: mlp.dgelu_matmul(g, w2, pre, "gelu", True))[0]  # noqa: B023
        assert found.kernel.fn.__name__ == kernel
        if width == 768:
            assert found.grid == (36,) and found.arguments["pointers"][3].shape == (6, 3072)
            assert found.arguments["a"].block_shape == [128, 64] and found.arguments["b"].block_shape == [64, 256]
        else:
            assert found.arguments["sums_ptr"].shape == (3, 3072)


def test_a_launch_finds_the_device_of_tensors_in_tuples():
    x, y = torch.empty(1), torch.empty(2)
    assert [t.numel() for t in launch._tensors(dict(a=1, pointers=(None, x, y)).values())] == [1, 2]


# ---- the tuner


@pytest.mark.parametrize("wrong", ["", "other inputs", "a later run", "a larger size"])
def test_the_tuner_checks_it_many_times_before_it_is_timed(wrong, monkeypatch):
    calls, timed = [], []

    def launcher(batch: int) -> Launcher:
        def call(x):
            calls.append((batch, float(x[0, 0])))
            off = dict(
                zip(("other inputs", "a later run", "a larger size"), (len(calls) == 2, len(calls) == 4, batch == 5))
            )
            return (x * 2 + (1e-4 if wrong == "a later run" else 1.0) * off.get(wrong, False),)

        return Launcher(lambda t: (t.values(batch, 64),), call, lambda x: (x * 2,), False)

    unchecked = gluon_tile("dgelu_matmul")
    problem = Problem("dgelu_matmul", "16", "768x3072", "dgelu", launcher(2), tile(), [], {}, launcher(5))
    clock = types.SimpleNamespace(now=lambda: 0.0, lost=lambda: False, seconds=lambda *_: timed.append(1) or 1.0)
    tuner = Tuner(torch.float32, torch.device("cpu"), "GPU", clock, None)
    attempt = Attempt(problem, Search([tile()]))
    monkeypatch.setattr(user_table, "trying", lambda entry: contextlib.nullcontext())
    assert (tuner._measure(attempt, unchecked) is None) == bool(wrong) and len(timed) == (not wrong)
    if not wrong:
        assert [batch for batch, _ in calls] == [2] * 6 + [5] * 5 and len({first for _, first in calls}) == 3
        attempt.search.times[unchecked] = 1.0
        tuner._measure(attempt, unchecked)
        assert len(calls) == 12  # when it is timed again, once
    else:
        assert attempt.failures[unchecked]
    calls.clear()
    wrong = ""
    tuner._measure(attempt, tile())
    assert len(calls) == 1


def test_the_tuner_offers_it_with_its_larger_size():
    sizes = Sizes(batch=2, tokens=5, width=64, heads=2, hidden=96, image=16, patch=8)
    clock = types.SimpleNamespace(now=lambda: 0.0)
    tuner = Tuner(BF16, torch.device("meta"), "GPU", clock, None)
    with tiles.targeting(90):
        (problem,) = tuner.problems(sizes, "dgelu_matmul")
    assert "gluon" in [t.provider for t in problem.candidates]
    g, *_ = problem.larger.make(Draw(BF16, torch.device("meta")))
    assert g.shape == (25, 64)
