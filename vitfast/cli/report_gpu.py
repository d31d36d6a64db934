"""Measure vitfast on this GPU in at most ten minutes, and leave one archive to send in."""

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ..errors import InputError, TrainingError, install
from ..run.files import write_tar
from ..version import __version__

PACKAGE = Path(__file__).resolve().parents[1]
NEEDED = "triton pytest pytest_benchmark timm transformers torchvision"  # what the measurements import
# Variables that change results and are not set for that here: NVIDIA's containers, for example, turn TF32 on.
CHANGING = r"VITFAST_(?!SECONDS$|CACHE$)|(PYTEST|PYTORCH|TORCH[A-Z]*|TRITON)_(?!\w*(DIR|PATH|HOME)$)"
CHANGING += r"|NVIDIA_TF32_OVERRIDE$|CUDA_LAUNCH_BLOCKING$|CUBLAS"
PYTEST = "[pytest]\naddopts = --import-mode=importlib\npythonpath = bench\npython_files = bench_*.py\n"
PLAN = """This measures vitfast on {device} and takes at most 10 minutes; nothing leaves this machine:
  1. training and inference of ViT-B/16 and operations beside timm and PyTorch, each checked against float64 first:
     the questions of bench/questions.py, those first that decide most
  2. among them every operation in bfloat16, float16 and float32, forward and backward, against float64
Nothing else should use the GPU meanwhile. Ctrl-C ends it and keeps what there is in {output}.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, output = parser.add_argument, "vitfast-gpu-results"
    add("--output", metavar="DIR", default=output, help=f"new folder for the archive (default {output})")
    rehearse = "go through it on the CPU at a toy's sizes: the times mean nothing, and nobody wants the archive"
    add("--rehearse", action="store_true", default=False, help=rehearse)


def run(args: argparse.Namespace) -> int:
    """Returns exit code 0 if all that ran succeeded, 1 if anything failed; the archive says so too."""
    device = "the CPU, as a rehearsal" if args.rehearse else _device()
    if absent := [name for name in NEEDED.split() if importlib.util.find_spec(name) is None]:
        raise InputError(f"report-gpu needs {', '.join(absent)} too: {install('bench')}")
    if shutil.which("bash") is None:
        raise InputError("report-gpu needs the program bash")
    output = Path(args.output).resolve()
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise InputError(f"--output {args.output} is there already and is not an empty folder; give another one")
    output.mkdir(parents=True, exist_ok=True)
    print(PLAN.format(device=device, output=output), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        root, started, results = _root(Path(folder)), int(time.time()), output / "results"
        git = "git --git-dir=.git describe --always --dirty --abbrev=40 --exclude='*'"  # silent without .git
        commit = subprocess.run(["bash", "-c", git], cwd=root, capture_output=True, text=True).stdout.strip() or None
        if commit and commit.endswith("-dirty"):
            print("Files differ from the commit, as the archive says: send in those of a clean checkout.\n", flush=True)
        code = _measure(root, results, args.rehearse, commit or f"vitfast {__version__}")
    files = {str(path.relative_to(results)): path.read_bytes() for path in results.rglob("*") if path.is_file()}
    if not files:
        raise TrainingError(f"bench/gpu.sh ended with exit code {code} and left no results")
    manifest = dict(schema=1, vitfast=__version__, commit=commit, device=device, started=started)
    manifest |= dict(finished=int(time.time()), exit_code=code)
    gpu = re.sub(r"[^a-z0-9]+", "-", device.lower().replace("nvidia", "")).strip("-")  # such as h100-80gb-hbm3
    archive = output / f"vitfast-{gpu}-{(commit or __version__)[:12]}.tar.gz"
    write_tar(archive, files | {"manifest.json": json.dumps(manifest, indent=1).encode()}, "gz")
    print(f"\nThe archive: {archive} ({archive.stat().st_size / 1024:.0f} KiB)")
    if not args.rehearse:
        print("It holds times, errors, logs and versions, and the name of the GPU; look into it before you send it.")
        print("Send the JSON files in it in a pull request to bench/results/<gpu>/. Thank you!")
    return code


def _device() -> str:
    """The GPU's name; raises InputError where it cannot be measured."""
    from torch import cuda

    if not cuda.is_available():
        raise InputError("report-gpu needs an NVIDIA GPU that torch can use; `--rehearse` goes through it on the CPU")
    name, (major, minor) = cuda.get_device_name(), cuda.get_device_capability()
    if major < 8:
        raise InputError(f"report-gpu needs a GPU with sm_80 (Ampere) or newer; {name} is sm_{major}{minor}")
    return name


def _root(folder: Path) -> Path:
    """Where bench/gpu.sh runs: the checkout, or `folder` with a copy of the installed package's bench."""
    if (PACKAGE.parent / "bench" / "gpu.sh").is_file():
        return PACKAGE.parent
    shutil.copytree(PACKAGE / "_bench", folder / "bench", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "bench").chmod(0o755)  # the package's folder may be read-only
    (folder / "pytest.ini").write_text(PYTEST)
    for name, target in (("vitfast", PACKAGE), ("kernels", PACKAGE / "kernels")):  # the results name their files
        (folder / name).symlink_to(target)
    return folder


def _measure(root: Path, output: Path, rehearse: bool, commit: str) -> int:
    """Runs bench/gpu.sh and returns its exit code; an interrupt of this process ends the script too."""
    command = ["bash", str(root / "bench" / "gpu.sh"), "decide", str(output), *["--rehearse"] * rehearse]
    environment = {k: v for k, v in os.environ.items() if not re.match(CHANGING, k)}
    environment |= dict(PYTHON=sys.executable, VITFAST_COMMIT=commit, VITFAST_TILES=os.devnull)
    caught = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]  # nohup ignores HUP
    before = {number: signal.signal(number, signal.default_int_handler) for number in caught}
    process = subprocess.Popen(command, env=environment)
    try:
        return process.wait()
    finally:
        process.terminate()  # Ctrl-C has reached the script too, other signals have not
        process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
