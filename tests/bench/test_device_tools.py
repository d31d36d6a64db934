"""A worker ends whose GPU has failed; the order of GPU tests; what compute-sanitizer is asked."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import gpu_order
import pytest
import sanitized

from vitfast import ops
from vitfast.kernels.launch import launches_made
from vitfast.tools.doctor import SMALL_SIZES
from vitfast.tools.verify import cases as cases_of

ROOT = Path(__file__).parents[2]


BREAKS = """
import sys, types, pytest
broken = []

def synchronize():
    if broken:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

answers = dict(is_available=lambda: True, synchronize=synchronize, memory_reserved=lambda: 0)
sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(**answers))

@pytest.mark.parametrize("n", range(12))
def test_fourth_breaks(n):
    if n == 3:
        broken.append(n)  # which nobody sees before the device is waited for
    synchronize() if n != 3 else None
"""


@pytest.mark.parametrize("workers, passed", [("2", 12), ("0", 4)])
def test_a_broken_device_ends_its_worker_and_spoils_no_other_test(tmp_path, workers, passed):
    (tmp_path / "test_breaks.py").write_text(BREAKS)
    alone = dict(PYTHONPATH=str(ROOT / "tests" / "helpers"), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", COLUMNS="200")
    command = [sys.executable, *f"-m pytest -p xdist -p device_guard -n {workers} -q -ra test_breaks.py".split()]
    environment = os.environ | alone
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode != 0 and re.search(rf"\b{passed} passed", done.stdout), done.stdout + done.stderr
    assert re.search(
        r"ERROR test_breaks.py::test_fourth_breaks\[3\] - Failed: the GPU does not answer any more", done.stdout
    )
    bad = set(re.findall(r"^(?:FAILED|ERROR) test_breaks.py::test_fourth_breaks\[(\d+)\]", done.stdout, re.M))
    assert bad == {"3"}, done.stdout


def test_on_a_gpu_what_must_not_be_missed_comes_first():
    names = "test_export.py::test_aoti_package adapters/test_accelerate_gpu.py::test_dtypes"
    names += " kernels/test_gpu.py::test_every_operation kernels/test_mlp.py::test_real_shapes"
    names += " kernels/test_gpu.py::test_attention_around_tile_edges"
    names += " kernels/test_gpu.py::test_every_candidate_computes_the_same"
    names += " kernels/test_gpu.py::test_the_same_inputs_give_the_same_bits"
    names = [f"tests/{name}" for name in names.split()]
    assert sorted(names, key=gpu_order.urgency) == [names[i] for i in (6, 5, 4, 2, 3, 1, 0)]


@pytest.mark.slow(6)
def test_the_sanitizer_is_given_every_kernel_to_watch(capsys):
    """The script runs in the interpreter, tiny, with the shipped tiles and with their candidates."""
    names = list(sanitized.plan())
    assert {name.partition(",")[0] for name in names} == set(
        name.partition(",")[0] for name in cases_of(SMALL_SIZES, ops)
    )
    before = launches_made()
    sanitized.run_all("linear_gelu, tanh")
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "linear_gelu, tanh" and launches_made() - before > 3 * len(out) - 3
    assert any("provider='tma'" in line for line in out) and len(out) == len(set(out))


def test_no_kernel_of_ours_is_kept_from_racecheck():
    kernels = re.findall(r"@triton.jit\s+def (\w+)", "".join(p.read_text() for p in (ROOT / "kernels").rglob("*.py")))
    assert len(kernels) > 20
    assert [k for k in kernels if k.endswith("_kernel") and any(name in k for name in sanitized.FOREIGN)] == []


@pytest.mark.parametrize("checker", sanitized.CHECKERS)
def test_what_the_sanitizer_is_asked(tmp_path, monkeypatch, checker):
    """By a stand-in that CUDA_HOME leads to: the script runs alone first, then under it."""
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text(
        f'#!/bin/bash\necho "$PYTORCH_NO_CUDA_MEMORY_CACHING" "$@" >> {tmp_path}/asked\nexec "${{@: -1}}"\n'
    )
    tool.chmod(0o755)
    script = tmp_path / "script"
    script.write_text(f"#!/bin/bash\necho runs >> {tmp_path}/asked\nexit $(cat {tmp_path}/code)\n")
    script.chmod(0o755)
    monkeypatch.setattr(sanitized, "COMMAND", [str(script)])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert sanitized.find() == (shutil.which("compute-sanitizer") or str(tool))
    monkeypatch.setattr(sanitized, "find", lambda: str(tool))
    (tmp_path / "code").write_text("0")
    assert sanitized.check(checker) == (0, "")
    first, asked, last = (tmp_path / "asked").read_text().splitlines()
    assert first == last == "runs" and f"--tool {checker} --error-exitcode 9" in asked and asked.endswith(str(script))
    assert asked.startswith("1 ") == (checker == "memcheck")
    assert ("--kernel-name-exclude kns=gemm,kns=" in asked) == (checker == "racecheck")
    (tmp_path / "code").write_text("3")  # it fails by itself: nothing to watch
    assert sanitized.check(checker)[0] == 3 and (tmp_path / "asked").read_text().count("--tool") == 1
    (tmp_path / "code").write_text("0")
    tool.write_text("#!/bin/bash\necho as far as here\nexec sleep 60\n")
    assert sanitized.check(checker, seconds=0.5) == (None, "as far as here\n")
