"""The machine that the numbers were measured on, in words, and its ceilings in this run.

A run is a process, or all processes of a stage of bench/gpu.sh, which share the ceilings through a file (`ceilings`).
"""

import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path

import clock
import torch
from clock import median_seconds

from vitfast.run.files import write_text
from vitfast.tools.machine_code import ptxas_version

PACKAGES = ("torch", "triton", "timm", "transformers", "torchvision", "pytest-benchmark", "numpy")
PACKAGES += ("flash-attn", "flash-attn-3", "flash-attn-4")  # which need not be there


def name() -> str:
    """The GPU, or "cpu"."""
    return torch.cuda.get_device_name() if clock.GPU else "cpu"


def _output(*command: str) -> str:
    options = dict(capture_output=True, text=True, timeout=20, cwd=os.path.dirname(__file__))
    try:
        return subprocess.run(command, **options).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


@functools.cache
def facts() -> dict[str, str]:
    """Device, driver, clocks, power limit, versions, how cuDNN chooses, and commit.

    VITFAST_COMMIT is the commit where the copy has no git.
    """
    found = dict(device=name(), python=platform.python_version(), **dict.fromkeys(PACKAGES, "absent"))
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    found["cudnn.benchmark"] = "on" if torch.backends.cudnn.benchmark else "off"
    found["commit"] = os.environ.get("VITFAST_COMMIT") or _output("git", "describe", "--always", "--dirty") or "unknown"
    if clock.GPU:
        p = torch.cuda.get_device_properties(0)
        found["ptxas"] = ptxas_version(10 * p.major + p.minor)
        memory, cache = f"{p.total_memory / 2**30:.0f} GiB", f"L2 {p.L2_cache_size / 2**20:.0f} MiB"
        sizes = f"{memory}, {p.multi_processor_count} multiprocessors, {cache}"
        found["gpu"] = f"sm_{p.major}{p.minor}, {sizes}, CUDA {torch.version.cuda}"
        fields = ("driver_version", "clocks.max.sm", "clocks.max.memory", "power.limit")
        query = ("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "-i", "0")
        found.update(zip(fields, _output(*query).split(", ")))
    return found


@functools.cache
def ceilings() -> dict[str, float]:
    """This device's best rates: "copy" in bytes/s, read and written; products by dtype in FLOP/s.

    Measured once a process. Where the environment variable VITFAST_CEILINGS names a file, as in a stage of
    bench/gpu.sh, which ends with it, the first process measures and writes it, and later ones read it: their ceilings
    are then of the same stage on the same machine, not of the same process.
    """
    path = os.environ.get("VITFAST_CEILINGS")
    if path and Path(path).is_file():
        return json.loads(Path(path).read_text())
    size, n = (2**31, 8192) if clock.GPU else (2**22, 256)
    source = torch.randint(-100, 100, (size,), dtype=torch.int8, device=clock.DEVICE)
    target = torch.empty_like(source)
    found = {"copy": 2.0 * size / median_seconds(lambda: target.copy_(source), warmup=10)}
    for dtype in ("float32",) if clock.SMALL else ("bfloat16", "float16", "float32"):
        a, b = (torch.randn(n, n, device=clock.DEVICE).to(getattr(torch, dtype)) for _ in range(2))
        found[dtype] = 2.0 * n**3 / median_seconds(lambda a=a, b=b: a @ b, warmup=10)
    if path:
        write_text(path, json.dumps(found) + "\n")
    return found
