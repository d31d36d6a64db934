"""Every launcher at the edges of its tiles under the sanitizer, the plan of those edges, and planted bugs.

Of the plan of edges.py `make test` runs a part, which reaches every kernel, provider and layout that
the plan reaches, and a tenth of the planted bugs; `make long` the rest. Beside it, how errors are measured and drawn.
"""

import dataclasses
import linecache
import math
import re

import edges
import pytest
import torch
from every_launcher import every_launcher, variants
from known_configs import providers
from layouts import LaidOut
from planted import MUTANTS, NUMBERS, ROOT
from sanitizer import Sanitizer
from triton.tools.tensor_descriptor import TensorDescriptor

from vitfast.kernels import launch, tiles
from vitfast.kernels.attention.launchers import HEAD_SIZES, MANY_HEADS, attention_bwd, attention_fwd
from vitfast.kernels.attention.options import AttentionOptions
from vitfast.kernels.matmul import scaled
from vitfast.tools.verify import Judge, Wrong, errors
from vitfast.tools.verify.draw import Draw, Sizes
from vitfast.tools.verify.launcher import Launcher

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="of the interpreter alone")

CPU, BF16, FP32 = torch.device("cpu"), torch.bfloat16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
# Tokens and head sizes: each layout, a head of one power of two, of two, padded; few and many blocks of keys.
ATTENTIONS = {(5, 32), (50, 64), (197, 72), (257, 80), (215, 64)}
VARIANTS = {*variants(edges.ROWS[0])}


def in_short(case) -> bool:
    """Whether `make test` runs it: the quickest cases that reach what the plan reaches; of fp32 one each."""
    name, s, single = case.name, case.sizes, case.dtype == FP32
    if name.startswith("attention"):
        return (s.tokens, s.head) == (50, 64) if single else (s.tokens, s.head) in ATTENTIONS
    if name.startswith("patch"):  # at a width of 100: 92 x 92 pixels have several slices of the weight gradient
        small = s.width <= 100 or name == "patch embedding" or "oblong" in name
        return small and not (single and (s.image != 28 or case.layout != "odd" or not name.endswith("backward")))
    if single:
        return s.tokens == 577
    described = s.width == 384 and (name == "dgelu, act kept" or name not in VARIANTS)
    return s.width == 100 or described


def plan(name: str, dtype: torch.dtype = BF16) -> list:
    """The cases that `make test` runs; long sequences with one image."""
    cases = [case for case in edges.cases(name, dtype) if in_short(case)]
    one = {case: dataclasses.replace(case, sizes=dataclasses.replace(case.sizes, batch=1)) for case in cases}
    return [one[case] if name.startswith("attention") and case.sizes.tokens > 100 else case for case in cases]


# For `make long`: heads of other sizes, long sequences and many short ones; wide layers.
MORE_ATTENTION = ((2, 17, 3, 24), (1, 64, 1, 88), (1, 130, 2, 48), (2, 300, 1, 128), (1, 577, 2, 64), (520, 1, 1, 16))
MORE_ROWS = (
    Sizes(batch=1, tokens=257, width=1280, heads=16, hidden=520, image=42, patch=14),
    Sizes(batch=7, tokens=5, width=1000, heads=8, hidden=264, image=60, patch=10),
    Sizes(batch=70, tokens=1, width=72, heads=1, hidden=768, image=16, patch=8),
    Sizes(batch=3, tokens=65, width=384, heads=6, hidden=520, image=64, patch=32),
)


def long_plan(name: str, dtype: torch.dtype):
    """More shapes, each in two other layouts, in the second with the tiles of another GPU generation."""
    more = edges.attention_sizes(*MORE_ATTENTION) if name.startswith("attention") else MORE_ROWS
    along_rows = any(word in name for word in ("norm", "rows", "column"))
    for i, sizes in enumerate([*edges.sizes_of(name), *more]):
        if sizes.tokens == 1 and name.endswith("of a bias"):
            continue  # with a single key its gradient is 0, and what is computed rounding alone
        if sizes.width < (2000 if along_rows else 1000):
            turn, heads = i + 2 * (i // 4), (1, MANY_HEADS)[i // 2 % 2]
            layouts = [edges.layouts_of(name)[(turn + step) % 4] for step in (1, 2)]
            yield edges.Case(name, sizes, dtype, layouts[0], many_heads=heads)
            yield edges.Case(name, sizes, dtype, layouts[1], tiles.GENERATIONS[turn % 5], heads)


def check(cases) -> None:
    for case in cases:
        report = edges.check(case)
        found = [*report.wrong, *(f"{label}: {found}" for label, found in report.findings)]
        assert report.runs and not found, "\n".join(found)


# `make test` runs fp32, and no variants ("attention, packed").
@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [pytest.param(BF16, marks=pytest.mark.slow), FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * ("," in n)) for n in edges.names()])
def test_every_launcher_at_the_edges_of_its_tiles(name, dtype):
    check(plan(name, dtype))


@pytest.mark.long
@DTYPES
@pytest.mark.parametrize("name", edges.names())
def test_every_launcher_at_the_other_edges(name, dtype):
    """What `make test` leaves out of the plan."""
    short = plan(name, dtype)
    check(case for case in edges.cases(name, dtype) if case not in short)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", edges.names())
def test_every_launcher_on_more_shapes_and_layouts_with_the_tiles_of_other_generations(name, dtype):
    check(long_plan(name, dtype))


@pytest.mark.long
@pytest.mark.parametrize("head", HEAD_SIZES)
def test_attention_at_every_head_size(head):
    sizes = Sizes(2, 37, 2 * head, 2, hidden=16, image=16, patch=8)
    names = ("attention", "attention backward", "attention, rotary", "attention backward, rotary")
    check(edges.Case(name, sizes, dtype, "odd") for name in names for dtype in (BF16, FP32))


@pytest.mark.slow
def test_the_plan_leaves_out_no_kernel_no_provider_and_no_layout():
    """Without running it: every provider of the tables that runs here; descriptors where it is tma."""
    ran, kernels, described, layouts = set(), set(), set(), set()
    for name in edges.names():
        for case in plan(name):
            layouts.add((name, case.layout))
            launcher = every_launcher(case.sizes)[name]
            inputs = launcher.make(LaidOut(case.dtype, CPU, torch.Generator(), case.layout))
            for _, used in edges.variants(case):
                made = launch.record(lambda: launcher.call(*inputs))  # noqa: B023
                ran.update((op, config.provider) for (op, _, _), config in used.items())
                kernels.update(entry.kernel.fn.__name__ for entry in made)
                if any(isinstance(value, TensorDescriptor) for entry in made for value in entry.arguments.values()):
                    described.update(op for op, _, _ in used)
    known = providers()
    here = {(op, by) for op, by in known if by != "specialized" and op != "mlp_kept"}  # Gluon; and no launch
    assert here <= ran, here - ran
    assert {op for op, provider in known if provider == "tma"} <= described
    for name in edges.names():
        seen = {layout for of, layout in layouts if of == name}
        wanted = {"odd", "channels-last" if name.startswith("patch") else "contiguous"}
        assert wanted <= seen or "oblong" in name, (name, seen)
    assert {layout for _, layout in layouts} == {"contiguous", "strided", "shifted", "odd", "channels-last"}
    sources = [path.read_text() for path in (ROOT / "kernels").rglob("*.py")]
    # of integers: tests/kernels/test_resize.py compares bits, under the sanitizer; of Gluon, which is not interpreted
    elsewhere = {"resize_pass_kernel", "_attention_bwd_specialized_kernel"}
    named = {name for text in sources for name in re.findall(r"^def (\w+_kernel)\(", text, re.M)}
    assert kernels == named - elsewhere and elsewhere <= named


# Planted bugs


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "mutant",
    [pytest.param(m, marks=pytest.mark.long if i % 10 else ()) for i, m in enumerate(MUTANTS)],
    ids=lambda mutant: mutant.what,
)
def test_a_planted_bug_is_found(mutant, tmp_path):
    with mutant.made(tmp_path) as copy:
        right = True
        cases = [*copy.cases(mutant.name)]
        for case in sorted(cases, key=lambda case: (not in_short(case), case.sizes.width)):  # the quick ones first
            report = copy.check(case)
            right &= not report.wrong
            found = [finding for _, finding in report.findings if finding.kind == mutant.kind]
            if found or (mutant.kind == NUMBERS and report.wrong):
                break
        else:
            pytest.fail(f"not found in {mutant.name}; {report.wrong}")
    assert right or not mutant.silent
    if mutant.kind == NUMBERS:
        assert not report.findings
        return
    first = found[0]
    assert first.kernel.endswith("_kernel") and first.count >= 1
    if mutant.kind == "left unwritten":
        assert first.program is None and re.search(r"\[\d+(, \d+)*\] of \(\d+.*\), \d+ elements", first.detail)
        return
    assert len(first.program) == 3
    file, line = first.source.split(" < ")[0].split(":")
    (path,) = tmp_path.glob(f"*/**/{file}")
    source = linecache.getline(str(path), int(line))
    assert re.search(r"\.(load|store)\(|multiple_of|atomic", source), first
    if mutant.kind not in ("false hint", "atomic operation"):
        assert f"{first.tensor}[" in first.detail and " of (" in first.detail


def test_there_are_planted_bugs_of_every_kind():
    kinds = "out of bounds, write-write race, read-write race, missing barrier, two values, left unwritten, "
    kinds += "uninitialised read, false hint, atomic operation"
    assert {mutant.kind for mutant in MUTANTS} == {*kinds.split(", "), NUMBERS}
    assert len({mutant.what for mutant in MUTANTS}) == len(MUTANTS) >= 65


def test_an_error_an_overwritten_input_a_wrong_number_and_no_kernel_are_said(monkeypatch):
    case, right = next(edges.cases("sum of rows")), scaled.scale_rows
    assert not edges.check(case).wrong
    for said, wrong in (
        ("ZeroDivisionError: division by zero at verify/test_edges.py:", lambda *_, **__: 1 / 0),
        ("input 0 is overwritten", lambda x, *rest, **options: (right(x, *rest, **options), x.neg_())[0]),
        ("error of a row 1.2e-02", lambda x, *rest, **options: (None, 1.012 * right(x, *rest, **options)[1])),
        ("no kernel ran", lambda x, *_, **__: (tiles.lookup("scale_rows", x, "d100"), x.float().sum(0))[1]),
    ):
        monkeypatch.setattr(scaled, "scale_rows", wrong)
        assert said in edges.check(case).wrong[0]


@pytest.mark.parametrize("offsets", [[0, 90, 30, 70], [5, 5, 5, 5], [-9, 40, 2**31 - 1, 12], [70, 0, 70, 0]])
def test_offsets_that_lie_stay_within_the_tensors(offsets):
    """Samples may overlap and leave tokens out: the numbers are nonsense."""
    q, k, v, do = torch.randn(4, 1, 70, 2, 16).unbind(0)
    logits = AttentionOptions(offsets=torch.tensor(offsets, dtype=torch.int32), longest=70)
    with Sanitizer() as watch:
        o, lse = attention_fwd(q, k, v, 0.2, logits)
        attention_bwd(q, k, v, torch.zeros_like(o), torch.zeros_like(lse), do, 0.2, False, logits)
    assert watch.counts["launches"] == 6
    assert {finding.kind for finding in watch.findings} <= {"left unwritten", "write-write race"}, str(watch)


# Errors and draws


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


def test_infinities_are_judged_too_and_nan_never_passes():
    """The logarithm of a sum over no keys is infinite, in the truth as in the result."""
    truth = torch.tensor([[1.0, math.inf], [2.0, 3.0]], dtype=torch.float64)
    assert max(errors(truth.float(), truth)) < 1e-6
    for wrong in ([[1.0, 5.0], [2.0, 3.0]], [[1.0, -math.inf], [2.0, 3.0]], [[1.0, math.inf], [2.0, math.nan]]):
        assert errors(torch.tensor(wrong), truth) == (math.inf, math.inf)
    assert errors(torch.ones(2, 2), truth * math.nan) == (math.inf, math.inf)
    assert errors(torch.tensor([[1.5, math.inf], [2.0, 3.0]]), truth)[0] > 0.1
    judge = Judge(Launcher(lambda t: (t.values(3, 5),), torch.neg, torch.neg), FP32, CPU)
    judge.judge([-judge.inputs[0]])
    with pytest.raises(Wrong, match="error of a row inf"):
        judge.judge([-judge.inputs[0] * math.nan])


def test_drawn_inputs_are_random_views_of_something_wider():
    for layout, odd in (("strided", False), ("shifted", True), ("odd", True)):
        draw = LaidOut(FP32, CPU, torch.Generator().manual_seed(0), layout)
        x, image = draw.values(4, 6), draw.pixels(2, 3, 5, 7)
        assert x.shape == (4, 6) and image.shape == (2, 3, 5, 7) and x.stride(1) == image.stride(3) == 1
        assert x.stride(0) > 6 and (x.storage_offset() % 8 != 0) == odd and x.float().std() > 0.3
        assert (x.stride(0) % 8 == 6) == (layout != "odd") and draw.values(4, 6).stride() != x.stride()
        assert draw.workspace(3, 4).is_contiguous() and draw.values(0).numel() == 0
    image = LaidOut(FP32, CPU, layout="channels-last").values(2, 3, 5, 7)
    assert image.is_contiguous(memory_format=torch.channels_last)
    draw = Draw(torch.float16, CPU, torch.Generator().manual_seed(0))
    assert draw.weight(10, 400).std() == pytest.approx(0.05, abs=0.01)
    assert 0.5 <= draw.factors(100).min() and draw.factors(100).max() <= 1.5
