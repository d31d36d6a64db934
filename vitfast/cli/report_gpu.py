"""Measure vitfast on this GPU in at most ten minutes, and leave one archive to send in."""

import argparse
import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path

from ..errors import InputError, TrainingError, install
from ..run.files import write_tar
from ..version import __version__

SCHEMA = 1
PACKAGE = Path(__file__).resolve().parents[1]
NEEDED = "triton pytest pytest_benchmark timm transformers torchvision"  # what the measurements import
FORM = "new?template=gpu_results.yml"
SAMPLED = "clocks.sm clocks.mem temperature.gpu power.draw utilization.gpu".split()
REASONS = "clocks_event_reasons.active", "clocks_throttle_reasons.active"  # of new drivers and old ones
# Of the environment, what changes results and is not asked for here: NVIDIA's containers turn TF32 on, for example.
CHANGING = re.compile(
    r"VITFAST_(?!SECONDS$|CACHE$)|(PYTEST|PYTORCH|TORCH[A-Z]*|TRITON)_(?!\w*(DIR|PATH|HOME)$)"
    r"|NVIDIA_TF32_OVERRIDE$|CUDA_LAUNCH_BLOCKING$|CUBLAS"
)
GLANCE = 2  # seconds between samples
SHOWN = {"utilization.gpu": "% busy", "clocks.sm": "MHz", "temperature.gpu": "C"}  # of every tenth
PYTEST = "[pytest]\naddopts = --import-mode=importlib\npythonpath = bench\npython_files = bench_*.py\n"
PLAN = """This measures vitfast on {device} and takes at most 10 minutes; nothing leaves this machine:
  1. every operation in bfloat16, float16 and float32, forward and backward, against float64 (about 2 minutes)
  2. the training step of ViT-B/16, ours and timm's compiled, each checked against float64 first (about 4 minutes)
  3. attention, blocks, LayerNorm and patches against their peers, then inference, as long as there is time
Nothing else should use the GPU meanwhile. Ctrl-C ends it and keeps what there is in {output}.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, output = parser.add_argument, "vitfast-gpu-results"
    add("--output", metavar="DIR", default=output, help=f"new folder for the archive (default {output})")
    rehearse = "go through it on the CPU at a toy's sizes: the times mean nothing, and nobody wants the archive"
    add("--rehearse", action="store_true", default=False, help=rehearse)


def run(args: argparse.Namespace) -> int:
    """Exit code 0: all that ran succeeded; 1: something failed, which the archive tells too."""
    device = "the CPU, as a rehearsal" if args.rehearse else _device()
    if absent := [name for name in NEEDED.split() if importlib.util.find_spec(name) is None]:
        raise InputError(f"report-gpu needs {', '.join(absent)} too: {install('bench')}")
    if absent := [name for name in ("bash", "timeout", "tar") if shutil.which(name) is None]:
        raise InputError(f"report-gpu needs the program {absent[0]}")
    if not args.rehearse and sample_clocks() is None:
        needed = "an nvidia-smi that tells the clocks and what holds them back, which results are not taken without"
        raise InputError(f"report-gpu needs {needed}: see `nvidia-smi -q -d PERFORMANCE`")
    output = Path(args.output).resolve()
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise InputError(f"--output {args.output} is there already and is not an empty folder; give another one")
    output.mkdir(parents=True, exist_ok=True)
    print(PLAN.format(device=device, output=output), flush=True)
    commit, root = _commit(), _tree(output)
    manifest = dict(schema=SCHEMA, vitfast=__version__, commit=commit, device=device, started=int(time.time()))
    try:
        code, samples = _measure(root, output, args.rehearse, commit or f"vitfast {__version__}")
    finally:
        shutil.rmtree(output / "tree", ignore_errors=True)
    results = output / "results.tar.gz"
    if not results.is_file():
        raise TrainingError(f"bench/gpu.sh ended with exit code {code} and left no results")
    manifest |= dict(finished=int(time.time()), exit_code=code, sources=digests(source_files()))
    clocks = json.dumps(dict(interval=GLANCE, samples=samples), indent=0)
    archive = output / f"vitfast-{slug(device)}-{(commit or __version__)[:12]}.tar.gz"
    pack(results, archive, manifest, {"clocks.json": clocks.encode()})
    results.unlink()
    print(f"\nThe archive: {archive} ({archive.stat().st_size / 1024:.0f} KiB)")
    print("It holds times, errors, logs and versions, and the name of the GPU; look into it before you send it.")
    print(f"Attach it to a new issue: {_form()}. Thank you!")
    return code


def slug(device: str) -> str:
    """A GPU's name as a folder: "NVIDIA H100 80GB HBM3" -> "h100-80gb-hbm3"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower().replace("nvidia", "")).strip("-")


def source_files() -> dict[str, bytes]:
    """The code that runs, by its path in the repository, wherever it is installed."""
    folders = dict(kernels=PACKAGE / "kernels", vitfast=PACKAGE, bench=_bench())
    found = {}
    for name, folder in folders.items():
        for path in sorted(folder.resolve().rglob("*")):
            inside = path.relative_to(folder.resolve())
            if path.is_file() and not (name == "vitfast" and inside.parts[0] in ("kernels", "_bench")):
                found[f"{name}/{inside.as_posix()}"] = path.read_bytes()
    return found


def digests(files: Mapping[str, bytes]) -> dict[str, str]:
    """sha256 of the code in kernels/, vitfast/ and bench/, as `source_files` gives it."""
    found = {name: hashlib.sha256() for name in ("kernels", "vitfast", "bench")}
    for path, content in sorted(files.items()):
        if path.endswith((".py", ".sh", ".cpp")):
            each = hashlib.sha256(content).hexdigest()
            found[path.split("/")[0]].update(f"{path} {each}\n".encode())
    return {name: digest.hexdigest() for name, digest in found.items()}


def pack(results: Path, archive: Path, manifest: dict, more: Mapping[str, bytes]) -> None:
    """Writes the files of gpu.sh's archive and `more`, and manifest.json with the sha256 of each."""
    with tarfile.open(results) as tar:
        files = {Path(member.name).name: tar.extractfile(member).read() for member in tar if member.isfile()}
    files |= more
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())}
    text = json.dumps(manifest | dict(files=hashes), indent=1)
    write_tar(archive, files | {"manifest.json": text.encode()}, "gz")


def _device() -> str:
    """The GPU's name; raises InputError where it cannot be measured."""
    import torch

    if not torch.cuda.is_available():
        raise InputError("report-gpu needs an NVIDIA GPU that torch can use; `--rehearse` goes through it on the CPU")
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        name = torch.cuda.get_device_name()
        raise InputError(f"report-gpu needs a GPU with sm_80 (Ampere) or newer; {name} is sm_{major}{minor}")
    return torch.cuda.get_device_name()


def _bench() -> Path:
    """The folder of the benchmarks: bench/ beside the package in a checkout, else a part of the package."""
    beside = PACKAGE.parent / "bench"
    return beside if (beside / "gpu.sh").is_file() and (PACKAGE.parent / "setup.py").is_file() else PACKAGE / "_bench"


def _tree(output: Path) -> Path:
    """The folder in which bench/gpu.sh runs: the checkout, or a copy of the package's in `output`."""
    bench = _bench()
    if bench.name == "bench":
        return bench.parent
    tree = output / "tree"
    shutil.copytree(bench, tree / "bench", ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "bench").chmod(0o755)  # the package's may be read-only
    (tree / "pytest.ini").write_text(PYTEST)
    return tree


def _commit() -> str | None:
    """The checkout's commit; None for an installed package, which knows its version alone."""
    if _bench().name != "bench":
        return None
    if changed := _git("status", "--porcelain", "--", "kernels", "vitfast", "bench"):
        changes = ", ".join(line[3:] for line in changed.splitlines()[:3])
        print(f"Not committed: {changes}. Results of changed code are not taken: measure a clean checkout for these.\n")
    return _git("rev-parse", "HEAD") or None


def _git(*command: str) -> str:
    try:
        run = subprocess.run(["git", "-C", str(PACKAGE.parent), *command], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout.rstrip() if run.returncode == 0 else ""


def _measure(root: Path, output: Path, rehearse: bool, commit: str) -> tuple[int, list[dict]]:
    """Runs bench/gpu.sh first and samples the clocks meanwhile; its exit code, and the samples."""
    command = ["bash", str(root / "bench" / "gpu.sh"), "first", str(output), *["--rehearse"] * rehearse]
    environment = {k: v for k, v in os.environ.items() if not CHANGING.match(k)}
    environment |= dict(PYTHON=sys.executable, VITFAST_COMMIT=commit, VITFAST_TILES=os.devnull)
    samples, start = [], time.monotonic()

    def interrupt(*_):
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    process = subprocess.Popen(command, env=environment)
    try:
        while process.poll() is None:
            if sample := sample_clocks():
                samples.append(dict(seconds=round(time.monotonic() - start, 1), **sample))
                if len(samples) % 10 == 0:
                    at = ", ".join(
                        f"{sample[key]:.0f} {unit}" for key, unit in SHOWN.items() if sample[key] is not None
                    )
                    print(f"   {samples[-1]['seconds']:.0f} s: the GPU is {at}", flush=True)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GLANCE)
    except BaseException:  # such as Ctrl-C, which the script has got too, or a lost connection, which it has not
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return process.returncode, samples


def sample_clocks() -> dict | None:
    """One reading of nvidia-smi: a number or None by each name in SAMPLED, and the bits of `reasons`."""
    for gpu, reasons in itertools.product(gpu_addresses(), REASONS):
        fields = ",".join((*SAMPLED, reasons))
        query = ["nvidia-smi", "-i", gpu, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
        try:
            read = subprocess.run(query, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        words = read.stdout.strip().split(", ")
        if read.returncode == 0 and len(words) == len(SAMPLED) + 1 and words[-1].startswith("0x"):
            return dict(zip(SAMPLED, map(_number, words))) | dict(reasons=int(words[-1], 16))
    return None


@functools.cache
def gpu_addresses() -> tuple[str, ...]:
    """The PCI address and the number of the GPU that torch uses, for `nvidia-smi -i`."""
    import torch

    number = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    if not torch.cuda.is_available():
        return (number,)
    gpu = torch.cuda.get_device_properties(0)
    found = [getattr(gpu, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]  # of newer torches
    return (number,) if None in found else ("{:08x}:{:02x}:{:02x}.0".format(*found), number)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:  # "[N/A]"
        return None


def _form() -> str:
    """The issue form's address, by the links of the installed package, or its name without them."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for link in importlib.metadata.metadata("vitfast").get_all("Project-URL") or []:
            address = link.split(", ", 1)[-1].rstrip("/")
            if address.endswith("/issues"):
                return f"{address}/{FORM}"
    return "the form `GPU results` of the project's issues"
