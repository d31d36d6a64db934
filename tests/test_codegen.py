"""Machine code, read without a GPU: no shipped tile spills, takes too much shared memory or misses the tensor cores, and the table is fresh."""

import json
import os
import subprocess
import sys

import pytest
import triton

import vitfast.doctor  # noqa: F401  before the script: kernels stay interpreted in this process


def measured(row: dict) -> tuple:
    """A row without the call it was met in: calls share kernels."""
    return tuple(sorted((k, v) for k, v in row.items() if k != "case"))


@pytest.fixture(scope="module")
def codegen():
    """The script as a module, for what it does not compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TRITON_INTERPRET", "")  # which it drops: put back afterwards
        import codegen
    return codegen


@pytest.mark.slow(50)
@pytest.mark.parametrize("generations", [("80", "89", "120"), ("90", "100")], ids=str)
def test_each_kernel_compiles_well_for(codegen, generations):
    """The same Triton makes of every kernel what the table says, which has more sizes."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(codegen.__file__), "--quick", "--processes", "1", "--sm", *generations]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert not result["problems"], "\n".join(result["problems"])
    kernels = {row["kernel"] for row in result["rows"]}
    assert len(kernels) >= 12, kernels
    assert result["launches"] > 40  # which Triton's own front end would compile as this table does
    if f"triton {triton.__version__};" in codegen.TABLE.read_text().partition("\n")[0]:
        committed = {measured(row) for row in codegen.committed()}
        assert not [row for row in result["rows"] if measured(row) not in committed]
    for sm, instruction in ((90, "HGMMA"), (100, "UTCHMMA")):
        assert str(sm) not in generations or any(row["tensor_core"] == instruction for row in result["rows"])


def test_the_committed_table_is_of_these_kernels(codegen):
    """`make codegen` writes it anew."""
    now, rows = codegen.source_hash(), codegen.committed()
    assert codegen.TABLE.read_text().startswith(f"# kernels {now},"), f"tests/codegen.csv is stale (kernels are {now}): run make codegen"
    assert {row["sm"] for row in rows} == {80, 89, 90, 100, 120} and {row["dtype"] for row in rows} >= {"bf16", "fp32"}
    problems = codegen.problems(rows)
    assert not problems, "\n".join(problems)
