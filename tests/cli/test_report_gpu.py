"""`vitfast report-gpu`: what it refuses, and the archive that it leaves of a run with a scripted bench/gpu.sh."""

import json
import os
import re
import signal
import subprocess
import tarfile

import pytest
import torch
from commands import run_cli

from vitfast.cli import report_gpu

SCRIPT = """mkdir -p "$2/answers" && cd "$(dirname "$0")/.." && cp pytest.ini "$2/report.md" && cd "$2" || exit 1
echo '{}' > train.json && echo log > train.log && echo '{}' > answers/train.json
echo "== train of $VITFAST_COMMIT with ${VITFAST_KERNELS:-the defaults} and ${3:-a GPU}"
exit 1
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The gpu.sh of an installed package."""
    path = tmp_path / "site" / "vitfast" / "_bench" / "gpu.sh"
    path.parent.mkdir(parents=True)
    path.write_text(SCRIPT)
    monkeypatch.setattr(report_gpu, "PACKAGE", path.parents[1])
    monkeypatch.setenv("VITFAST_KERNELS", "off")
    return path


def test_the_archive_has_what_the_script_left_and_a_manifest(script, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(report_gpu, "_device", lambda: "NVIDIA H100 80GB HBM3")
    out = tmp_path / "out"
    code, said, _ = run_cli(capfd, "report-gpu", "--output", out)
    archive = out / "vitfast-h100-80gb-hbm3-0.1.0.tar.gz"
    assert code == 1 and sorted(os.listdir(out)) == ["results", archive.name]  # the script's own exit code
    train = "== train of vitfast 0.1.0 with the defaults and a GPU"
    for part in ("at most 10 minutes", train, f"The archive: {archive}", "pull request to bench/results/<gpu>/"):
        assert part in said, said
    assert "python_files = bench_" in (out / "results" / "report.md").read_text()
    with tarfile.open(archive) as tar:
        found = ["answers/train.json", "manifest.json", "report.md", "train.json", "train.log"]
        assert sorted(tar.getnames()) == found
        manifest = json.load(tar.extractfile("manifest.json"))
    assert manifest.pop("started") <= manifest.pop("finished")
    assert manifest == dict(schema=1, vitfast="0.1.0", commit=None, device="NVIDIA H100 80GB HBM3", exit_code=1)
    code, _, error = run_cli(capfd, "report-gpu", "--output", out, "--rehearse")
    assert code == 2 and "is not an empty folder" in error


def test_in_a_checkout_the_archive_names_the_commit_and_that_files_differ(script, tmp_path, capfd):
    script.parent.rename(script.parents[2] / "bench")
    git = "git init -q; touch pytest.ini; git add -A; git -c user.name=a -c user.email=a commit -qm a"
    commit = subprocess.check_output(f"{git}; git rev-parse HEAD", shell=True, cwd=script.parents[2], text=True).strip()
    for changes in ("", "-dirty"):
        out = tmp_path / f"out{changes}"
        _, said, _ = run_cli(capfd, "report-gpu", "--output", out, "--rehearse")
        assert f"== train of {commit}{changes} with the defaults and --rehearse" in said and "pull request" not in said
        assert ("Files differ" in said) == bool(changes) and len([*out.glob(f"*-{commit[:12]}.tar.gz")]) == 1
        (script.parents[2] / "pytest.ini").write_text("[pytest]\n")


@pytest.mark.quick(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_ends_the_script_and_leaves_nothing_running(number, script, tmp_path, capfd):
    ends = 'mkdir "$2"; trap "touch $2/ended; exit 130" TERM'
    script.write_text(f"{ends}; sleep 0.5; kill -{int(number)} $PPID; for _ in {{1..99}}; do sleep 0.1; done\n")
    # as in a fresh process: an interrupt of another test leaves SIG_DFL, and nohup SIG_IGN
    earlier = signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    try:
        code, _, error = run_cli(capfd, "report-gpu", "--output", tmp_path / "out", "--rehearse")
        assert code == 130 and "interrupted" in error and os.listdir(tmp_path / "out" / "results") == ["ended"]
        assert signal.getsignal(number) == signal.SIG_DFL  # after Ctrl-C it is the command line's
    finally:
        signal.signal(number, earlier)


def test_what_the_environment_sets_for_other_work_does_not_reach_the_script(script, tmp_path, capfd, monkeypatch):
    """NVIDIA's containers turn TF32 on, for one; where caches and compilers lie stays."""
    script.write_text('cd "$(dirname "$2")" && env > environment && stat -c %a "$(dirname "$0")" > mode\n')
    script.parent.chmod(0o555)
    dropped = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE NVIDIA_TF32_OVERRIDE PYTEST_ADDOPTS TORCHDYNAMO_DISABLE"
    dropped += " TRITON_INTERPRET CUDA_LAUNCH_BLOCKING PYTORCH_NO_CUDA_MEMORY_CACHING VITFAST_BATCH_INVARIANT"
    kept = "TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR TRITON_PTXAS_PATH TORCH_HOME VITFAST_CACHE"
    for name in (*dropped.split(), *kept.split()):
        monkeypatch.setenv(name, "1")
    code, _, error = run_cli(capfd, "report-gpu", "--output", tmp_path / "out", "--rehearse")
    assert code == 1 and "bench/gpu.sh ended with exit code 0 and left no results" in error
    found = re.findall(r"^[^=\n]*", (tmp_path / "out" / "environment").read_text(), flags=re.MULTILINE)
    assert not {*found} & {*dropped.split()} and {*found} >= {*kept.split()}
    assert (tmp_path / "out" / "mode").read_text() == "755\n"  # a read-only package is copied to be written into


def test_what_cannot_be_measured_is_refused(tmp_path, capfd, monkeypatch):
    def refused(reason: str, **gpu) -> None:
        for name, value in gpu.items():
            monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
        code, _, error = run_cli(capfd, "report-gpu", "--output", tmp_path / "out")
        assert code == 2 and reason in error and not (tmp_path / "out").exists()

    refused("needs an NVIDIA GPU that torch can use; `--rehearse`", is_available=False)
    refused("Tesla T4 is sm_75", is_available=True, get_device_name="Tesla T4", get_device_capability=(7, 5))
    monkeypatch.setattr(report_gpu, "NEEDED", "triton no_such_package")
    refused("needs no_such_package too: pip install", get_device_capability=(8, 0))
    monkeypatch.setattr(report_gpu, "NEEDED", "triton")
    monkeypatch.setenv("PATH", str(tmp_path))
    refused("needs the program bash")
