"""Machine code, read without a GPU: no shipped tile spills, takes too much shared memory or misses the tensor cores, and the table is fresh."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPT = HERE / "codegen.py"


@pytest.mark.slow(28)
@pytest.mark.parametrize("generations", [("80", "89"), ("90", "100"), ("120",)], ids=str)
def test_each_kernel_compiles_well_for(generations):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), "--quick", "--processes", "1", "--sm", *generations]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert not result["problems"], "\n".join(result["problems"])
    kernels = {row["kernel"] for row in result["rows"]}
    assert len(kernels) >= 12, kernels
    assert result["launches"] > 40  # which Triton's own front end would compile as this table does
    if "90" in generations:
        assert any(row["tensor_core"] == "HGMMA" for row in result["rows"] if row["sm"] == 90)


def test_the_committed_table_is_of_these_kernels():
    """`make codegen` writes it anew."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(HERE)!r}); import codegen; print(codegen.source_hash())"]
    now = subprocess.run(command, capture_output=True, text=True, env=env, check=True).stdout.strip()
    lines = (HERE / "codegen.csv").read_text().splitlines()
    assert lines[0].startswith(f"# kernels {now},"), f"tests/codegen.csv is stale (kernels are {now}): run make codegen"
    rows = list(csv.DictReader(lines[1:]))
    assert {row["sm"] for row in rows} == {"80", "89", "90", "100", "120"} and {row["dtype"] for row in rows} >= {"bf16", "fp32"}
    spilling = [row for row in rows if row["spills"] != "0" and row["dtype"] != "fp32"]
    assert not spilling, spilling
