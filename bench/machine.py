"""The machine that is measured: its clock, its memory, its description and its ceilings.

On a GPU the clock is device events around a call, on a CPU the process's own time.

Other files read `machine.GPU`, so that a test can set it. REHEARSED (`bench/gpu.sh ... --rehearse`): a CPU runs the
plan of a GPU, every case by its real name, at a toy's sizes. SMALL: a CPU runs few small cases, whose names say so.
"""

import contextlib
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import subprocess
import time
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from vitfast.kernels.archives import source_hash
from vitfast.run.files import write_text
from vitfast.tools.cost.gpus import GPUS, name_of
from vitfast.tools.doctor import ptxas_version
from vitfast.tools.verify import clock as between_calls

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
REHEARSED = not GPU and os.environ.get("VITFAST_REHEARSE") == "1"
SMALL = not (GPU or REHEARSED)
WARMUP = 3 if GPU else 1
ROUNDS = 20 if GPU else 5
MODEL_ROUNDS = 10 if GPU else 3
WARM_SECONDS = 1.0  # how long a GPU is warmed up before anything is timed
PACKAGES = ("torch", "triton", "timm", "transformers", "torchvision", "pytest-benchmark", "numpy")
PACKAGES += ("flash-attn", "flash-attn-3", "flash-attn-4")  # these are optional
ALARM_AGAIN = 5  # seconds


# ---- the clock and the memory


class Stamp:
    """A moment in the device's stream; a difference is seconds per call, and waits for the later one."""

    def __init__(self, calls: int):
        self.calls, self.event = calls, torch.cuda.Event(enable_timing=True)
        self.event.record()

    def __sub__(self, earlier: "Stamp") -> float:
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1e3 / self.calls


def clock(calls: int = 1) -> Callable:
    """A function whose readings differ by seconds per call where `calls` calls were made in between."""
    return functools.partial(Stamp, calls) if GPU else lambda: time.process_time() / calls


def wall() -> float:
    """Seconds by the wall clock, once the device is idle: for work that other processes share."""
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def warm_up(run: Callable[[], object], least: int = WARMUP, seconds: float = WARM_SECONDS) -> None:
    """Calls `run` `least` times and, on a GPU, for `seconds`, so that the chip's clocks are up."""
    run()  # what compiles on its first call does not keep the device busy
    calls, start = 1, wall()
    while calls < least or (GPU and wall() - start < seconds):
        run()
        calls += 1


@functools.cache
def _flush_buffer() -> torch.Tensor:
    return between_calls.flush_buffer(DEVICE)


def cold(lead: float = 0.0) -> None:
    """Makes the L2 cache cold and keeps the GPU busy for `lead` seconds, 0.05 at most."""
    if GPU:
        between_calls.cold(_flush_buffer(), min(lead, 0.05))


def lead_of(run: Callable[[], object]) -> float:
    """Seconds of head start that hide Python's launches of `run`, warm already; a CPU needs none."""
    return between_calls.head_start(run, margin=1e-4) if GPU else 0.0


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError inside after so many seconds; 0 is no limit.

    It rings again, as the first TimeoutError may end in somebody's `except Exception`.
    """

    def stop(number, frame):
        raise TimeoutError(f"took longer than {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, ALARM_AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def median_seconds(run: Callable[[], object], rounds: int = ROUNDS, warmup: int = WARMUP) -> float:
    """Median time of one call, cold."""
    warm_up(run, warmup)
    lead = lead_of(run)
    return statistics.median(timeit.repeat(run, lambda: cold(lead), timer=clock(), repeat=rounds, number=1))


def peak_bytes(run: Callable[[], object], before: int = 0) -> int | None:
    """The most device memory in use during `run`, less the `before` bytes; None on a CPU."""
    if not GPU:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# ---- its description and its ceilings


def name() -> str:
    """The GPU, or "cpu"."""
    return torch.cuda.get_device_name() if GPU else "cpu"


def _output(*command: str) -> str:
    options = dict(capture_output=True, text=True, timeout=20, cwd=os.path.dirname(__file__))
    try:
        return subprocess.run(command, **options).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def ask_driver(*fields: str) -> dict[str, str]:
    """The answers of nvidia-smi on the GPU that torch uses: texts, often with a unit, by field.

    The GPU is found by its PCI address, because CUDA counts the fastest GPU first and nvidia-smi goes by the bus.
    """
    p = torch.cuda.get_device_properties(0)
    gpu = f"{p.pci_domain_id:08x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
    told = _output("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "-i", gpu)
    return dict(zip(fields, told.split(", ")))


@functools.cache
def facts() -> dict[str, str]:
    """Device, driver, clocks, power limit, versions, how cuDNN chooses, and commit.

    VITFAST_COMMIT is the commit where the copy has no git; without either, a hash of the kernels tells runs apart.
    """
    found = dict(device=name(), python=platform.python_version(), **dict.fromkeys(PACKAGES, "absent"))
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    found["cudnn.benchmark"] = "on" if torch.backends.cudnn.benchmark else "off"
    commit = os.environ.get("VITFAST_COMMIT") or _output("git", "describe", "--always", "--dirty")
    found["commit"] = commit or f"unknown, kernels {source_hash()}"
    if GPU:
        p = torch.cuda.get_device_properties(0)
        found["ptxas"] = ptxas_version(10 * p.major + p.minor)
        memory, cache = f"{p.total_memory / 2**30:.0f} GiB", f"L2 {p.L2_cache_size / 2**20:.0f} MiB"
        sizes = f"{memory}, {p.multi_processor_count} multiprocessors, {cache}"
        found["gpu"] = f"sm_{p.major}{p.minor}, {sizes}, CUDA {torch.version.cuda}"
        found |= ask_driver("driver_version", "clocks.max.sm", "clocks.max.memory", "power.limit")
    return found


def promised_flops() -> float | None:
    """The data sheet's FLOP/s for dense bf16; None for a GPU that vitfast has no data sheet of."""
    gpu = name_of(name())
    return 1e12 * GPUS[gpu].teraflops if gpu else None


def description() -> dict:
    """The facts, the ceilings of this run, and the peak by the data sheet, as result files have them."""
    return facts() | dict(ceilings=ceilings(), datasheet_bf16_flops=promised_flops())


def ceilings() -> dict[str, float]:
    """This device's best rates: "copy" in bytes/s, read and written; products by dtype in FLOP/s.

    They are measured once a process, or once a run of bench/gpu.sh (`once`).
    """

    def measured() -> dict[str, float]:
        size, n = (2**31, 8192) if GPU else (2**22, 256)
        source = torch.randint(-100, 100, (size,), dtype=torch.int8, device=DEVICE)
        target = torch.empty_like(source)
        found = {"copy": 2.0 * size / median_seconds(lambda: target.copy_(source), warmup=10)}
        for dtype in ("float32",) if SMALL else ("bfloat16", "float16", "float32"):
            a, b = (torch.randn(n, n, device=DEVICE).to(getattr(torch, dtype)) for _ in range(2))
            found[dtype] = 2.0 * n**3 / median_seconds(lambda a=a, b=b: a @ b, warmup=10)
        return found

    return once("ceilings", measured)


def write_results(path: str | os.PathLike, benchmarks: list, failed: list, skipped: list, **more) -> None:
    """Writes a file for result_files.py, whole or not at all: cases, the machine and its ceilings."""
    content = dict(datetime=datetime.datetime.now(datetime.timezone.utc).isoformat())
    content |= dict(machine_info=dict(vitfast=description()), benchmarks=benchmarks, failed=failed, skipped=skipped)
    write_text(path, json.dumps(content | more, indent=1, default=str) + "\n")


_kept: dict[str, object] = {}


def once(what: str, measure: Callable[[], object]) -> object:
    """Returns the result of `measure()`, which it keeps as `what` in this process and in a file, if any.

    $VITFAST_CEILINGS names the JSON file. A run of bench/gpu.sh has such a file and removes it at its end: the first
    process measures, and later ones read results of the same run on the same machine, not of the same process.
    `measure` may call `once`.
    """
    path = Path(os.environ.get("VITFAST_CEILINGS") or os.devnull)
    if path.is_file():
        _kept.update(json.loads(path.read_text()))
    if what not in _kept:
        _kept[what] = measure()
        if path != Path(os.devnull):
            write_text(path, json.dumps(_kept) + "\n")
    return _kept[what]
