"""Triton's own launcher gives every kernel what its machine code expects, on a libcuda that records."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton

HELPERS = Path(__file__).parents[2] / "helpers"
INCLUDE = Path(triton.__file__).parent / "backends" / "nvidia" / "include"


@pytest.mark.long
@pytest.mark.slow(90)
def test_every_parameter_arrives(tmp_path):
    """Pointers, strides in tuples, scalars and tensor maps of each kernel, in grids that a GPU takes."""
    library = tmp_path / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", f"-I{INCLUDE}"]
    subprocess.run([*command, HELPERS / "libcuda_stub.c", "-o", library], check=True, capture_output=True)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | dict(LD_LIBRARY_PATH=str(tmp_path))
    script = [sys.executable, HELPERS / "real_launches.py", tmp_path, "90"]
    done = subprocess.run(script, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["triton"] == triton.__version__ and not found["faults"], found["faults"]
    assert len(found["launched"]) >= 28
    assert re.match(r"parameter \d+ of \d+ is \w{16}, not \w{16}$", found["control"]), found["control"]
