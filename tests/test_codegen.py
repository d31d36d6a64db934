"""Machine code, read without a GPU: no shipped tile spills, takes too much shared memory or misses the tensor cores, and the table is fresh."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

HERE = Path(__file__).parent
SCRIPT = HERE / "codegen.py"


def run(*command: str) -> str:
    """What Python prints where kernels are compiled, not interpreted."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def measured(row: dict) -> tuple:
    """A row without the call it was met in: calls share kernels."""
    return tuple(sorted((k, v) for k, v in row.items() if k != "case"))


@pytest.fixture(scope="module")
def table() -> dict:
    """The committed table, and the hash of the kernels now."""
    script = f"import json, sys; sys.path.insert(0, {str(HERE)!r}); import codegen as c; rows = c.committed()\n"
    now = json.loads(run("-c", script + "print(json.dumps(dict(hash=c.source_hash(), rows=rows, problems=c.problems(rows))))"))
    return now | dict(title=(HERE / "codegen.csv").read_text().partition("\n")[0])


@pytest.mark.slow(30)
@pytest.mark.parametrize("generations", [("80", "89", "120"), ("90", "100")], ids=str)
def test_each_kernel_compiles_well_for(table, generations):
    """The same Triton makes of every kernel what the table says, which has more sizes."""
    result = json.loads(run(str(SCRIPT), "--quick", "--processes", "1", "--sm", *generations))
    assert not result["problems"], "\n".join(result["problems"])
    kernels = {row["kernel"] for row in result["rows"]}
    assert len(kernels) >= 12, kernels
    assert result["launches"] > 40  # which Triton's own front end would compile as this table does
    if f"triton {triton.__version__};" in table["title"]:
        committed = {measured(row) for row in table["rows"]}
        assert not [row for row in result["rows"] if measured(row) not in committed]
    for sm, instruction in ((90, "HGMMA"), (100, "UTCHMMA")):
        assert str(sm) not in generations or any(row["tensor_core"] == instruction for row in result["rows"])


def test_the_committed_table_is_of_these_kernels(table):
    """`make codegen` writes it anew."""
    assert table["title"].startswith(f"# kernels {table['hash']},"), f"tests/codegen.csv is stale (kernels are {table['hash']}): run make codegen"
    rows = table["rows"]
    assert {row["sm"] for row in rows} == {80, 89, 90, 100, 120} and {row["dtype"] for row in rows} >= {"bf16", "fp32"}
    assert not table["problems"], "\n".join(table["problems"])
