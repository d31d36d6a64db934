"""Every launcher at the edges of its tiles under the sanitizer, the plan of those edges, and planted bugs.

Of the plan of vitfast.verify.edges `make test` runs a part, which reaches all that the plan reaches and finds every
planted bug; `make long` the rest.
"""

import dataclasses
import linecache
import re

import pytest
import torch
from mutant import NUMBERS, ROOT
from mutants import MUTANTS
from triton.tools.tensor_descriptor import TensorDescriptor

from vitfast.kernels import launch, tiles
from vitfast.verify import edges
from vitfast.verify.launchers import Draw

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="of the interpreter alone")

SLOW = ("patch embedding backward", "weight gradient, layer scale", "weight gradient, fc2", "attention backward")
NAMES = [pytest.param(name, marks=pytest.mark.slow(10) if name in SLOW else ()) for name in edges.names()]
# Tokens and head sizes beyond one block of keys: each layout, a head of one power of two, of two, padded.
LONG_SEQUENCES = {(197, 64), (197, 80), (257, 32), (257, 72), (215, 64)}


def left_for_long(case) -> bool:
    """Whether it takes seconds, while another case has its launcher at as many tiles, or its kernel at its width."""
    name, sizes = case.name, case.sizes
    if name.startswith("attention"):  # of fp32 the plan has one head size for each length
        few = sizes.tokens < 100 or case.dtype == torch.float32
        return not few and (sizes.tokens, sizes.head) not in LONG_SEQUENCES
    if "oblong" in name:
        return case.dtype == torch.float32 and case.layout == "odd"
    if name.startswith("patch"):  # at a width of 100: 92 x 92 pixels have several slices of a weight gradient
        return sizes.width > 100 and name != "patch embedding"
    if name.startswith("weight gradient"):
        return sizes.width > (384 if name == "weight gradient, fc2" else 100)
    return sizes.width > 384 and name in ("layer_norm backward in a block", "add + layer_norm backward, factors")


def plan(name: str, dtype: torch.dtype = torch.bfloat16, of=edges) -> list:
    """The cases that `make test` runs, of vitfast.verify.edges or of a copy of it.

    Long sequences have one image, but for heads of 32: there programs go on to the next head.
    """
    cases = [case for case in of.cases(name, dtype) if not left_for_long(case)]
    return [
        dataclasses.replace(case, sizes=dataclasses.replace(case.sizes, batch=1))
        if name.startswith("attention") and case.sizes.tokens > 100 and case.sizes.head != 32
        else case
        for case in cases
    ]


def check(cases) -> None:
    for case in cases:
        report = edges.check(case)
        assert report.passed, "\n".join([*report.wrong, *(f"{label}: {found}" for label, found in report.findings)])
        assert report.counts["reads"] or all(provider in edges.LIBRARIES for _, provider in report.ran)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", NAMES)
def test_every_launcher_at_the_edges_of_its_tiles(name, dtype):
    check(plan(name, dtype))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", edges.names())
def test_every_launcher_at_the_other_edges(name, dtype):
    """What `make test` leaves out of the plan."""
    short = plan(name, dtype)
    check(case for case in edges.cases(name, dtype) if case not in short)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", edges.names())
def test_every_launcher_on_more_shapes_and_layouts_with_the_tiles_of_other_generations(name, dtype):
    check(edges.cases(name, dtype, long=True))


def test_the_plan_leaves_out_no_kernel_no_provider_and_no_layout():
    """Without running it: every provider of the tables that runs here (Gluon's do not); descriptors where it is tma."""
    ran, kernels, described, layouts = set(), set(), set(), set()
    for name in edges.names():
        for case in plan(name):
            layouts.add((name, case.layout))
            inputs = edges.launchers_at(case.sizes)[name].make(
                Draw(case.dtype, edges.CPU, torch.Generator(), case.layout)
            )
            for _, used in edges.variants(case):
                made = launch.record(lambda: edges.launchers_at(case.sizes)[name].call(*inputs))  # noqa: B023
                ran.update((op, tile.provider) for (op, _, _), tile in used.items())
                kernels.update(entry.kernel.fn.__name__ for entry in made)
                if any(isinstance(value, TensorDescriptor) for entry in made for value in entry.arguments.values()):
                    described.update(op for op, _, _ in used)
    known = {
        (op, rule.tile.provider)
        for table in (tiles.RULES, tiles.CANDIDATES)
        for op, rules in table.items()
        for rule in rules
    }
    here = {
        (op, provider) for op, provider in known if provider not in (*tiles.LIBRARIES, "gluon") or provider == "torch"
    }
    assert here <= ran, here - ran
    assert {op for op, provider in known if provider == "tma"} <= described
    for name in edges.names():
        seen = {layout for of, layout in layouts if of == name}
        assert {"odd", "channels-last" if name.startswith("patch") else "contiguous"} <= seen or "oblong" in name, (
            name,
            seen,
        )
    assert {layout for _, layout in layouts} == {"contiguous", "strided", "shifted", "odd", "channels-last"}
    kernels.add("product_gluon_kernel")  # tests/kernels/test_gluon.py
    assert kernels == {
        name
        for path in (ROOT / "kernels").glob("*.py")
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.M)
    }


def test_strided_draws_are_views_of_something_wider():
    for layout, odd in (("strided", False), ("shifted", True), ("odd", True)):
        draw = Draw(torch.float32, edges.CPU, torch.Generator().manual_seed(0), layout)
        x, image = draw.values(4, 6), draw.pixels(2, 3, 5, 7)
        assert x.shape == (4, 6) and image.shape == (2, 3, 5, 7) and image.dtype == torch.uint8
        assert x.stride(0) > 6 and x.storage_offset() and x.stride(1) == image.stride(3) == 1
        assert (x.storage_offset() % 8 != 0) == odd and x.float().std() > 0.3
        assert (x.stride(0) % 8 == 6) == (layout != "odd") and draw.values(4, 6).stride() != x.stride()
        assert draw.workspace(3, 4).is_contiguous() and draw.values(0).numel() == 0
    image = Draw(torch.float32, edges.CPU, layout="channels-last").values(2, 3, 5, 7)
    assert image.is_contiguous(memory_format=torch.channels_last)


# Planted bugs


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_a_planted_bug_is_found(mutant, tmp_path):
    with mutant.made(tmp_path) as copy:
        right = True
        for case in sorted(plan(mutant.name, of=copy), key=lambda case: case.sizes.width):  # the quick ones first
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
    (path,) = tmp_path.glob(f"*/kernels/{file}")
    assert re.search(
        r"tl\.load|tl\.store|\.load\(|multiple_of|atomic", "".join(linecache.getline(str(path), int(line)))
    ), first
    if mutant.kind not in ("false hint", "atomic operation"):
        assert f"{first.tensor}[" in first.detail and " of (" in first.detail


def test_there_are_planted_bugs_of_every_kind():
    kinds = "out of bounds, write-write race, read-write race, missing barrier, two values, left unwritten, "
    kinds += "uninitialised read, false hint, atomic operation"
    assert {mutant.kind for mutant in MUTANTS} == {*kinds.split(", "), NUMBERS}
    assert len(MUTANTS) >= 20 and len({mutant.what for mutant in MUTANTS}) == len(MUTANTS)
    assert sum(mutant.silent for mutant in MUTANTS) >= 5
