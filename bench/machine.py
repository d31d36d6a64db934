"""What the numbers were measured on: the machine in words, its data-sheet rates, and its ceilings in this run.

A run is a process, or all processes of a stage of bench/gpu.sh, which share the ceilings through a file (`ceilings`).
"""

import fnmatch
import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import clock
import torch
from clock import median_seconds

# Dense bf16 TFLOP/s with fp32 accumulation, by the name that the driver gives.
DATASHEET = {
    "NVIDIA B200": 2250.0,
    "NVIDIA H200": 989.0,
    "NVIDIA GH200 480GB": 989.0,
    "NVIDIA H100 80GB HBM3": 989.0,  # SXM
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA A100*GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA L4": 121.0,
    "NVIDIA A10": 125.0,
    "NVIDIA GeForce RTX 5090": 209.5,
    "NVIDIA GeForce RTX 4090": 165.2,
}
PACKAGES = ("torch", "triton", "timm", "transformers", "torchvision", "pytest-benchmark", "numpy")
OPTIONAL = (
    "flash-attn-3",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "cutlass-api",
    "nvidia-cutlass",
)  # peers that need not be there


def name() -> str:
    """The GPU, or "cpu"."""
    return torch.cuda.get_device_name() if clock.GPU else "cpu"


def datasheet_flops(device: str) -> float | None:
    """FLOP/s that the maker promises for dense bf16; None for a device, or a slice of one, that is not in the table."""
    return next((1e12 * peak for pattern, peak in DATASHEET.items() if fnmatch.fnmatchcase(device, pattern)), None)


def _output(*command: str) -> str:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, cwd=os.path.dirname(__file__)
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


@functools.cache
def facts() -> dict[str, str]:
    """Device, driver, clocks, power limit, versions, how cuDNN chooses, and commit.

    VITFAST_COMMIT is the commit where the copy has no git.
    """
    found = dict(
        device=name(),
        python=platform.python_version(),
        **{package: _version(package) for package in PACKAGES + OPTIONAL},
    )
    found["cudnn.benchmark"] = "on" if torch.backends.cudnn.benchmark else "off"
    found["commit"] = os.environ.get("VITFAST_COMMIT") or _output("git", "describe", "--always", "--dirty") or "unknown"
    if clock.GPU:
        p = torch.cuda.get_device_properties(0)
        size = f"{p.total_memory / 2**30:.0f} GiB, {p.multi_processor_count} multiprocessors, L2 {p.L2_cache_size / 2**20:.0f} MiB"
        found["gpu"] = f"sm_{p.major}{p.minor}, {size}, CUDA {torch.version.cuda}"
        fields = ("driver_version", "clocks.max.sm", "clocks.max.memory", "power.limit")
        values = _output("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "-i", "0").split(
            ", "
        )
        found.update(zip(fields, values))
    return found


def ceiling_runs() -> dict[str, tuple[Callable[[], Callable], float, float]]:
    """Name -> (what makes the call to time, its FLOPs, its bytes). A copy counts the bytes it reads and writes."""
    size, n = (2**31, 8192) if clock.GPU else (2**22, 256)

    def copy():
        source = torch.randint(-100, 100, (size,), dtype=torch.int8, device=clock.DEVICE)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def product(dtype):
        a, b = (torch.randn(n, n, device=clock.DEVICE).to(dtype) for _ in range(2))
        return lambda: a @ b

    def product_fp8():
        a, b = (torch.randn(n, n, device=clock.DEVICE).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=clock.DEVICE)
        return lambda: torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    makers = {
        str(d).removeprefix("torch."): functools.partial(product, d)
        for d in ((torch.bfloat16, torch.float16) if clock.GPU else ()) + (torch.float32,)
    }
    if clock.GPU and torch.cuda.get_device_capability() >= (8, 9):
        makers["float8"] = product_fp8
    return {"copy": (copy, 0.0, 2.0 * size), **{key: (make, 2.0 * n**3, 0.0) for key, make in makers.items()}}


def _measure_ceilings() -> dict[str, float | None]:
    found = {}
    for key, (make, flops, moved) in ceiling_runs().items():
        try:
            found[key] = (flops or moved) / median_seconds(make(), warmup=10)
        except RuntimeError:
            if key != "float8":  # not every build has it
                raise
            found[key] = None
    return found


def _shared_ceilings(path: Path, run: dict) -> dict[str, float | None] | None:
    """The ceilings in a file that this run wrote; None where there is none, or only one of something else."""
    try:
        content = json.loads(path.read_text())
        found = content["ceilings"]
        ours = {key: content.get(key) for key in run} == run and set(found) == set(ceiling_runs())
        rates = [rate for key, rate in found.items() if key != "float8" or rate is not None]
        return found if ours and all(rate > 0 for rate in rates) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


@functools.cache
def ceilings() -> dict[str, float | None]:
    """What this device reaches at its best: "copy" in bytes/s, matrix products by dtype in FLOP/s; None: it failed.

    Measured once a process. Where the environment variable VITFAST_CEILINGS names a file, the first process measures
    and writes it, and later ones read it: their ceilings are then of the same stage on the same machine, not of the
    same process. A file that was written for another device, torch or run (VITFAST_RUN, which bench/steps.sh sets for
    each stage) is not used but written anew.
    """
    name_of_file = os.environ.get("VITFAST_CEILINGS")
    if not name_of_file:
        return _measure_ceilings()
    path, run = Path(name_of_file), dict(device=name(), torch=torch.__version__, run=os.environ.get("VITFAST_RUN"))
    found = _shared_ceilings(path, run)
    if found is None:
        found = _measure_ceilings()
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(json.dumps(dict(run, ceilings=found)) + "\n")
            os.replace(temporary, path)
        except OSError as error:
            print(f"the ceilings cannot be shared, each process measures them: {error}", file=sys.stderr)
    return found
