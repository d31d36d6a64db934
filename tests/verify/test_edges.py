"""Every launcher at the edges of its tiles under the sanitizer, the plan that says where those are, and bugs planted for it to find."""

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", NAMES)
def test_every_launcher_at_the_edges_of_its_tiles(name, dtype):
    for case in edges.cases(name, dtype):
        report = edges.examine(case)
        assert report.passed, "\n".join([*report.wrong, *(f"{label}: {found}" for label, found in report.findings)])
        assert report.counts["reads"] or all(provider in edges.LIBRARIES for _, provider in report.ran)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", edges.names())
def test_every_launcher_on_more_shapes_and_layouts_with_the_tiles_of_other_generations(name, dtype):
    for case in edges.cases(name, dtype, long=True):
        report = edges.examine(case)
        assert report.passed, "\n".join([*report.wrong, *(f"{label}: {found}" for label, found in report.findings)])


def test_the_plan_leaves_out_no_kernel_no_provider_and_no_layout():
    """Without running it: every provider that the tables name and that runs here (Gluon's do not); descriptors where the provider is tma."""
    ran, kernels, described, layouts = set(), set(), set(), set()
    for name in edges.names():
        for case in edges.cases(name):
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
        for case in sorted(copy.cases(mutant.name), key=lambda case: case.sizes.width):  # the quick ones first
            report = copy.examine(case)
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
    kinds = "out of bounds, write-write race, read-write race, missing barrier, two values, left unwritten, uninitialised read, false hint, atomic operation"
    assert {mutant.kind for mutant in MUTANTS} == {*kinds.split(", "), NUMBERS}
    assert len(MUTANTS) >= 20 and len({mutant.what for mutant in MUTANTS}) == len(MUTANTS)
    assert sum(mutant.silent for mutant in MUTANTS) >= 5
