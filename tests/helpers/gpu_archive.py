"""A good archive of `vitfast report-gpu` on an H200, made up: its times are 1.6 times what the work needs at least."""

import copy
import datetime
import hashlib
import io
import json
import random
import struct
import subprocess
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import plausible
import report
from pytest_benchmark.stats import Stats
from shapes import Shape

from vitfast import ops
from vitfast.cli.report_gpu import digests
from vitfast.tools.verify import EPS, cases

DEVICE, SIZES, SHEET = "NVIDIA H200", "sm_90, 140 GiB, 132 multiprocessors, L2 60 MiB, CUDA 13.0", 989e12
CEILINGS = dict(copy=4.29e12, bfloat16=6.72e14, float16=6.55e14, float32=5.13e13)
CODE = {"kernels/a.py": "KERNEL = 1\n", "vitfast/b.py": "OPERATION = 1\n", "bench/c.py": "CASE = 1\n"}
PLANNED = {full: planned for name in plausible.FILES for full, planned in plausible.plan(name).items()}
STARTED, INFERENCE = int(time.time()), "inference.json"


def repository(folder: Path) -> str:
    """A git repository with a little code; returns its commit."""
    for name, text in CODE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "code"]):
        subprocess.run([*git, *command], check=True)
    return subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()


def clocked(case: dict, factor: float = 1.0) -> list[float]:
    """The case's times, `factor` times as long, as device events count them: in float32 milliseconds."""
    calls = 3 if case["extra_info"]["op"] in ("train", "throughput") else 1
    counts = [struct.pack("f", 1e3 * calls * factor * t) for t in case["stats"]["data"]]
    return [struct.unpack("f", count)[0] / 1e3 / calls for count in counts]


def facts(commit: str = "") -> dict:
    """What machine_info says."""
    found = dict(device=DEVICE, torch="2.11.0", triton="3.6.0", timm="1.0.29", commit=commit, ceilings=CEILINGS)
    found |= {"gpu": SIZES, "driver_version": "580.159.04"}
    return found | {"clocks.max.sm": "1980 MHz", "power.limit": "700.00 W", "datasheet_bf16_flops": SHEET}


def timed(full: str, slower: float = 1.6) -> dict:
    """A case, `slower` times as slow as its floor at the ceilings."""
    info = dict(PLANNED[full], batch=1 if "-latency]" in full else 256, peak_mib=2048.5, attention="cudnn")
    info |= dict(error=0.01, error_after=0.01, error_limit=0.04)
    case = dict(name=full.partition("::")[2], fullname=full, extra_info=info, stats=dict(data=[1.0]))
    floor, numbers = recount(case)["extra_info"]["floor_us"] / 1e6, random.Random(full)
    case["stats"]["data"] = [slower * floor * numbers.uniform(0.98, 1.03) for _ in range(20)]
    case["stats"]["data"] = clocked(case)
    return recount(case)


def recount(case: dict) -> dict:
    """Everything that follows from the case's times, made anew: what a careful forger does."""
    stats = Stats()
    stats.data = case["stats"]["data"]
    case["stats"] = dict(stats.as_dict(), data=stats.data)
    machine, batch = SimpleNamespace(facts=facts()), case["extra_info"].get("batch", 256)
    planned = PLANNED[case["fullname"]]
    true, _ = plausible.true_info(**planned, batch=batch, seconds=stats.median, machine=machine)
    case["extra_info"] = {k: v for k, v in case["extra_info"].items() if k != "batch"} | true
    return case


def result(op: str, dtype: str, eps: float) -> dict:
    return dict(op=op, dtype=dtype, error=0.7 * eps, torch_error=0.6 * eps, passed=True, failure="", findings=[])


def good(commit: str) -> dict[str, dict]:
    """The JSON files by name, the manifest among them; `write` hashes them."""
    wanted = {name: plausible.needed(name) for name in plausible.FILES if name not in ("accelerate.json", INFERENCE)}
    found = {name: [timed(full) for group in groups for full in group] for name, groups in wanted.items()}
    latency = "bench/bench_model.py::test_inference[B/16 224-{} compile bf16-latency]"
    found[INFERENCE] = [timed(latency.format(library), slower=9.0) for library in ("vitfast", "timm")]
    date = datetime.datetime.fromtimestamp(STARTED + 100, datetime.timezone.utc).isoformat()
    flash = dict(name="test_attention[B/16 224 B256-forward-flash-attn 3]", reason="flash_attn_3 cannot be used")
    files = {
        name: dict(machine_info=dict(vitfast=facts(commit)), datetime=date, benchmarks=of, failed=[], skipped=[])
        for name, of in found.items()
    }
    files["attention.json"]["skipped"] = [flash | dict(fullname=f"bench/bench_ops.py::{flash['name']}")]
    machine = dict(vitfast="0.1.0", gpu=f"{DEVICE}, {SIZES[:14]}", torch="2.11.0+cu130", triton="3.6.0")
    operations = cases(Shape("B/16", 224, 1).sizes, ops)
    results = [result(op, str(dtype)[6:], eps) for op in operations for dtype, eps in EPS.items()]
    files["doctor.json"] = dict(machine=machine, results=results, not_examined=0)
    files["smoke.json"] = copy.deepcopy(dict(machine=machine, results=results[:1], not_examined=0))
    names = "prepare smoke doctor train attention blocks norm_and_patches inference attention_separate".split()
    steps = [dict(name=name, state="ok", code=0, seconds=50) for name in names]
    files["steps_first.json"] = dict(stage="first", steps=steps, checks={"smoke": 0, "vitfast doctor": 0})
    sample = {"clocks.sm": 1700.0, "clocks.mem": 3201.0, "temperature.gpu": 60.0, "utilization.gpu": 99.0, "reasons": 4}
    samples = [sample | {"seconds": 6.0 * i, "power.draw": 650.0} for i in range(90)]
    files["clocks.json"] = dict(interval=5, samples=samples)
    sources = digests({name: text.encode() for name, text in CODE.items()})
    files["manifest.json"] = dict(schema=1, vitfast="0.1.0", commit=commit, device=DEVICE, exit_code=0, sources=sources)
    files["manifest.json"] |= dict(started=STARTED, finished=STARTED + 560)
    return files


def put(path: str, value: object) -> Callable[[dict], None]:
    """A change of the files: sets what lies at "file/key/0/key", or changes it by a function."""

    def change(files: dict) -> None:
        name, *keys = (int(key) if key.isdecimal() else key for key in path.split("/"))
        at = files[f"{name}.json"]
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = value(at[keys[-1]]) if callable(value) else value

    return change


def fact(key: str, value: object) -> Callable[[dict], None]:
    """A change of one fact of the machine, in every file."""

    def change(files: dict) -> None:
        for name in [name.removesuffix(".json") for name, file in files.items() if "machine_info" in file]:
            put(f"{name}/machine_info/vitfast/{key}", value)(files)

    return change


def fails(name: str, *impls: str, reason: str = "RuntimeError: no kernel") -> Callable[[dict], None]:
    """These are listed as failed."""

    def change(files: dict) -> None:
        file = files[f"{name}.json"]
        for c in [c for c in file["benchmarks"] if c["extra_info"]["impl"] in impls]:
            file["benchmarks"].remove(c)
            file["failed"].append(dict(name=c["name"], fullname=c["fullname"], reason=reason))

    return change


def add(root: Path, archive: Path, *options: str) -> int:
    """`report.py --add` in a repository; its exit code."""
    return report.main(["--add", str(archive), *options], root / "bench" / "results", root / "README.md")


Member = tuple[tarfile.TarInfo, bytes]


def member(name: str, content: bytes = b"{}", **facts) -> Member:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in facts.items():
        setattr(info, key, value)
    return info, content


def members(files: dict) -> list[Member]:
    """The files, given as objects or as bytes, with the manifest's hashes made anew where it has none."""
    contents = {name: file if isinstance(file, bytes) else json.dumps(file).encode() for name, file in files.items()}
    manifest = files.get("manifest.json")
    if isinstance(manifest, dict) and "files" not in manifest:
        hashes = {n: hashlib.sha256(c).hexdigest() for n, c in contents.items() if n != "manifest.json"}
        contents["manifest.json"] = json.dumps(manifest | dict(files=hashes)).encode()
    return [member(name, content) for name, content in contents.items()]


def write(path: Path, of: list[Member]) -> None:
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        for info, content in of:
            tar.addfile(info, io.BytesIO(content))
