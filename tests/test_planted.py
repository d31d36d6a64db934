"""Bugs planted in a copy of the package are found, each by the test that is to find it."""

import pytest
from mutant import ROOT
from mutants import MUTANTS
from planted import PLANTED


@pytest.mark.long
@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.what)
def test_a_planted_bug_is_found(bug, tmp_path):
    run = bug.run(tmp_path)
    assert run.returncode == 1 and " failed" in run.stdout, run.stdout[-3000:] + run.stderr[-1000:]


def test_each_planted_bug_stands_in_the_sources():
    for bug in PLANTED:
        assert bug.old in bug.path.read_text() and bug.old != bug.new, f"{bug.what}: {bug.file} has changed"
        assert bug.test, bug.what
    for bug in MUTANTS:
        assert bug.old in (ROOT / "kernels" / bug.file).read_text(), f"{bug.what}: {bug.file} has changed"
