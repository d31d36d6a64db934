"""A worker ends whose GPU has failed; what compute-sanitizer is asked."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sanitized
import torch
from every_launcher import LIBRARIES

from vitfast import ops
from vitfast.kernels import tiles
from vitfast.kernels.launch import launches_made
from vitfast.kernels.matmul import linear, mlp
from vitfast.tools.doctor import SMALL_SIZES, own_products
from vitfast.tools.verify import cases as cases_of

ROOT = Path(__file__).parents[3]


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_sanitizer_is_given_every_kernel_to_watch(capsys):
    """The script runs in the interpreter, tiny, with the shipped tiles and with their candidates."""
    assert list(sanitized.plan()) == list(cases_of(SMALL_SIZES, ops))
    before = launches_made()
    sanitized.run_all("linear_gelu, tanh")
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "linear_gelu, tanh" and launches_made() - before > 3 * len(out) - 3
    assert any("provider='tma'" in line for line in out) and len(out) == len(set(out))


def test_no_library_computes_under_the_sanitizer():
    with own_products(torch.bfloat16), tiles.using() as used:
        x, weight = torch.randn(3, 64, dtype=torch.bfloat16), torch.randn(64, 64, dtype=torch.bfloat16)
        linear.linear_residual(linear.linear(x, weight), weight, None, linear.input_grad(x, weight), None, None, 1)
        mlp.linear_gelu(x, weight, None, "gelu", "")
    providers = {op: config.provider for (op, *_), config in used.items()}
    assert len(providers) >= 4 and not set(providers.values()) & set(LIBRARIES), providers


@pytest.mark.parametrize("checker", sanitized.CHECKERS)
def test_what_the_sanitizer_is_asked(tmp_path, monkeypatch, checker):
    """By a stand-in that CUDA_HOME leads to: the script runs alone first, then under it."""
    tool, script, asked, code = (tmp_path / name for name in ("bin/compute-sanitizer", "script", "asked", "code"))
    tool.parent.mkdir()

    def write(path: Path, text: str) -> None:
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    write(tool, f'echo "$PYTORCH_NO_CUDA_MEMORY_CACHING" "$@" >> {asked}; exec "${{@: -1}}"')
    write(script, f"echo runs >> {asked}; exit $(cat {code})")
    monkeypatch.setattr(sanitized, "COMMAND", [str(script)])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert sanitized.find() == (shutil.which("compute-sanitizer") or str(tool))
    monkeypatch.setattr(sanitized, "find", lambda: str(tool))
    code.write_text("0")
    assert sanitized.check(checker) == (0, "")
    first, told, last = asked.read_text().splitlines()
    assert first == last == "runs" and f"--tool {checker} --error-exitcode 9" in told and told.endswith(str(script))
    assert told.startswith("1 ") == (checker == "memcheck")
    write(tool, "echo ========= Invalid read; echo '=========     Host Frame: main'; seq 1000; exit 9")
    found, text = sanitized.check(checker)
    assert found == 9 and text.startswith("========= Invalid read\n") and text.endswith("1000\n") and "Host" not in text
    code.write_text("3")  # it fails by itself: nothing to watch
    assert sanitized.check(checker)[0] == 3 and asked.read_text().count("--tool") == 1
    code.write_text("0")
    write(tool, "echo as far as here; exec sleep 60")
    assert sanitized.check(checker, seconds=0.5) == (None, "as far as here\n")
