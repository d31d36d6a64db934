"""`vitfast report-gpu`: what it refuses, and the archive that it leaves of a run with a scripted bench/gpu.sh."""

import hashlib
import json
import os
import signal
import tarfile
import types

import pytest
import torch
from commands import run_cli

from vitfast.cli import report_gpu

SCRIPT = """#!/bin/bash
cd "$(dirname "$0")/.." && cat pytest.ini > "$2/report.md"
echo "== train of $VITFAST_COMMIT with ${VITFAST_KERNELS:-the defaults} and ${3:-a GPU}"
sleep 1.5
mkdir "$2/made" && echo '{"benchmarks": []}' > "$2/made/train.json" && echo log > "$2/made/train.log"
tar -czf "$2/results.tar.gz" -C "$2/made" . && rm -r "$2/made"
exit 1
"""
SMI = """#!/bin/bash
case "$*" in *clocks_event_reasons*) echo 'Field "clocks_event_reasons.active" is not a valid field'; exit 2;; esac
echo "1755, 2619, 61, [N/A], 98, 0x0000000000000024"
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package whose gpu.sh is scripted, and an nvidia-smi of an older driver."""
    root = tmp_path / "site" / "vitfast"
    for name, text in {"kernels/a.py": "A = 1\n", "b.py": "B = 1\n", "_bench/c.py": "C = 1\n"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for path, text in ((root / "_bench" / "gpu.sh", SCRIPT), (tmp_path / "bin" / "nvidia-smi", SMI)):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    monkeypatch.setattr(report_gpu, "PACKAGE", root)
    monkeypatch.setattr(report_gpu, "GLANCE", 0.05)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("VITFAST_KERNELS", "off")
    return root


def test_the_archive_has_what_the_script_left_the_clocks_and_the_hashes(package, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(report_gpu, "_device", lambda: "NVIDIA H100 80GB HBM3")
    out = tmp_path / "out"
    code, said, _ = run_cli(capfd, "report-gpu", "--output", out)
    archive = out / "vitfast-h100-80gb-hbm3-0.1.0.tar.gz"
    assert code == 1 and sorted(os.listdir(out)) == ["report.md", archive.name]  # the script's own exit code
    for part in ("at most 10 minutes", "== train of vitfast 0.1.0 with the defaults and a GPU", str(archive), "issue"):
        assert part in said, said
    assert "the GPU is 98 % busy, 1755 MHz, 61 C" in said and "python_files = bench_" in (out / "report.md").read_text()
    with tarfile.open(archive) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}
    manifest = json.loads(files.pop("manifest.json"))
    assert set(files) == {"train.json", "train.log", "clocks.json"}
    assert manifest["files"] == {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    assert manifest["commit"] is None and manifest["exit_code"] == 1 and manifest["device"] == "NVIDIA H100 80GB HBM3"
    line = f"kernels/a.py {hashlib.sha256((package / 'kernels' / 'a.py').read_bytes()).hexdigest()}\n"
    assert manifest["sources"]["kernels"] == hashlib.sha256(line.encode()).hexdigest()
    samples = json.loads(files["clocks.json"])["samples"]
    assert len(samples) >= 5 and samples[0]["clocks.sm"] == 1755 and samples[0]["power.draw"] is None
    assert samples[0]["reasons"] == 0x24
    code, _, error = run_cli(capfd, "report-gpu", "--output", out, "--rehearse")
    assert code == 2 and "is not an empty folder" in error


def test_any_code_that_is_changed_has_another_hash(package):
    before = report_gpu.digests(report_gpu.source_files())
    for path, changed in (("kernels/a.py", "kernels"), ("b.py", "vitfast"), ("_bench/gpu.sh", "bench")):
        (package / path).write_text("X = 1\n")
        after = report_gpu.digests(report_gpu.source_files())
        assert [name for name in before if before[name] != after[name]] == [changed]
        before = after


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_ends_the_script_and_leaves_nothing_running(number, package, tmp_path, capfd, monkeypatch):
    (package / "_bench" / "gpu.sh").write_text('trap "touch \\"$2/ended\\"; exit 130" TERM\nsleep 20 & wait\n')

    # As in a fresh process: an interrupt of another test leaves SIG_DFL, and nohup SIG_IGN.
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        before = signal.getsignal(number)
        monkeypatch.setattr(report_gpu, "sample_clocks", lambda: os.kill(os.getpid(), number))
        code, _, error = run_cli(capfd, "report-gpu", "--output", tmp_path / "out", "--rehearse")
        assert code == 130 and "interrupted" in error and os.listdir(tmp_path / "out") in (["ended"], [])
        assert signal.getsignal(number) in (before, signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGINT, earlier)


def test_what_the_environment_sets_for_other_work_does_not_reach_the_script(package, tmp_path, capfd, monkeypatch):
    """NVIDIA's containers turn TF32 on, for one; where caches and compilers lie stays."""
    (package / "_bench" / "gpu.sh").write_text('env > "$2/environment"\n')
    dropped = (
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE NVIDIA_TF32_OVERRIDE PYTEST_ADDOPTS TORCHDYNAMO_DISABLE TRITON_INTERPRET"
    )
    dropped = [*dropped.split(), "CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING", "VITFAST_BATCH_INVARIANT"]
    kept = ["TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_PTXAS_PATH", "TORCH_HOME", "VITFAST_CACHE"]
    for name in (*dropped, *kept):
        monkeypatch.setenv(name, "1")
    run_cli(capfd, "report-gpu", "--output", tmp_path / "out", "--rehearse")
    found = {line.partition("=")[0] for line in (tmp_path / "out" / "environment").read_text().splitlines()}
    assert found.isdisjoint(dropped) and found.issuperset(kept)


def test_a_package_that_is_read_only_leaves_nothing_behind(package, tmp_path, capfd):
    (package / "_bench" / "gpu.sh").write_text('stat -c %a "$(dirname "$0")" > "$2/mode"\n')
    (package / "_bench").chmod(0o555)
    run_cli(capfd, "report-gpu", "--output", tmp_path / "out", "--rehearse")
    assert os.listdir(tmp_path / "out") == ["mode"] and (tmp_path / "out" / "mode").read_text() == "755\n"


def test_the_clocks_are_those_of_the_gpu_that_torch_uses(package, tmp_path, monkeypatch):
    """Which is found by its PCI bus: CUDA counts the fastest GPU first, nvidia-smi by the bus."""
    (tmp_path / "bin" / "nvidia-smi").write_text(
        '#!/bin/bash\n[[ $2 == 0001:3b:00.0 || $2 == 00000001:3b:00.0 ]] && echo "1, 2, 3, 4, [N/A], 0x0" || exit 6\n'
    )
    gpu = types.SimpleNamespace(pci_domain_id=1, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    report_gpu.gpu_addresses.cache_clear()
    try:
        sample = report_gpu.sample_clocks()
    finally:
        report_gpu.gpu_addresses.cache_clear()
    assert sample["clocks.sm"] == 1 and sample["utilization.gpu"] is None and sample["reasons"] == 0


def test_what_cannot_be_measured_is_refused(tmp_path, capfd, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, error = run_cli(capfd, "report-gpu", "--output", out)
    assert code == 2 and "needs an NVIDIA GPU" in error and "--rehearse" in error
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    code, _, error = run_cli(capfd, "report-gpu", "--output", out)
    assert code == 2 and "Tesla T4 is sm_75" in error
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(report_gpu, "NEEDED", "triton no_such_package")
    code, _, error = run_cli(capfd, "report-gpu", "--output", out)
    assert code == 2 and "needs no_such_package too: pip install" in error and not out.exists()
    monkeypatch.setattr(report_gpu, "NEEDED", "triton")
    monkeypatch.setattr(report_gpu, "sample_clocks", lambda: None)
    code, _, error = run_cli(capfd, "report-gpu", "--output", out)
    assert code == 2 and "needs an nvidia-smi that tells the clocks" in error and not out.exists()
