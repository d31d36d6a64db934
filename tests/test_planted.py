"""Bugs planted in a copy of the package are found, each by the test that is to find it."""

import pytest
from planted import MUTANTS, PLANTED


@pytest.mark.long
@pytest.mark.parametrize("bug", [bug for bug in PLANTED if bug not in MUTANTS], ids=lambda bug: bug.what)
def test_a_planted_bug_is_found(bug, tmp_path):
    run = bug.run(tmp_path)
    assert run.returncode == 1 and " failed" in run.stdout, run.stdout[-3000:] + run.stderr[-1000:]


def test_each_planted_bug_stands_in_the_sources():
    for bug in PLANTED:
        assert bug.old in bug.path.read_text() and bug.old != bug.new, f"{bug.what}: {bug.file} has changed"
