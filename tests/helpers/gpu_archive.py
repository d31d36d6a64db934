"""A good archive of `vitfast report-gpu` on an H200, made up: its times are 1.6 times what the work needs at least."""

import copy
import datetime
import hashlib
import io
import json
import random
import statistics
import struct
import subprocess
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import report
from bench_ops import OPS
from shapes import Shape, model_work

from vitfast import ViT, ops
from vitfast.cli.report_gpu import digests
from vitfast.tools.cost.work import Kernels, floor_seconds, total_bytes, total_flops, update
from vitfast.tools.verify import EPS, cases

DEVICE, SIZES, SHEET = "NVIDIA H200", "sm_90, 140 GiB, 132 multiprocessors, L2 60 MiB, CUDA 13.0", 989e12
CEILINGS = dict(copy=4.29e12, bfloat16=6.72e14, float16=6.55e14, float32=5.13e13)
CODE = {"kernels/a.py": "KERNEL = 1\n", "vitfast/b.py": "OPERATION = 1\n", "bench/c.py": "CASE = 1\n"}
BLOCKS, PATCHES = ("eager", "compile"), ("eager", "compile", "compile unfold")
SDPA = tuple(f"sdpa {name}" for name in ("flash", "cudnn", "efficient", "math"))
OP_FILES = {
    "attention": {"attention": SDPA},
    "attention_separate": {"attention separate": SDPA},
    "blocks": {"attention_block": BLOCKS, "mlp_block": BLOCKS},
    "norm_and_patches": {"add_layer_norm": BLOCKS, "patch_embed uint8": PATCHES, "patch_embed float": PATCHES},
}
STARTED = int(time.time())


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


def timed(title: str, module: str, kernels: Kernels, slower: float = 1.6, **info) -> dict:
    """A case whose floor is at the ceilings; slower: times the floor."""
    floor, numbers = floor_seconds(kernels, CEILINGS["bfloat16"], CEILINGS["copy"]), random.Random(title)
    data = [slower * floor * numbers.uniform(0.98, 1.03) for _ in range(20)]
    flops, moved = total_flops(kernels), total_bytes(kernels)
    info |= dict(device=DEVICE, dtype="bfloat16", flops=int(flops), bytes=int(moved), peak_mib=2048.5)
    info |= dict(error=0.01, error_after=0.01, error_limit=0.04)
    case = dict(name=title, fullname=f"bench/{module}.py::{title}", extra_info=info, stats=dict(data=data))
    case["stats"]["data"] = clocked(case)
    return recount(case, floor)


def recount(case: dict, floor: float | None = None) -> dict:
    """Everything that follows from the case's times, made anew: what a careful forger does."""
    info, data = case["extra_info"], case["stats"]["data"]
    floor, seconds = floor or info["floor_us"] / 1e6, statistics.median(data)
    low, _, high = statistics.quantiles(data)
    case["stats"] = dict(data=data, rounds=len(data), median=seconds, min=min(data), max=max(data), q1=low, q3=high)
    case["stats"] |= dict(mean=statistics.fmean(data), iqr=high - low)
    info |= dict(floor_us=1e6 * floor, percent_of_floor=100 * floor / seconds)
    info |= dict(tflops=info["flops"] / seconds / 1e12, gigabytes_per_second=info["bytes"] / seconds / 1e9)
    if "model_flops" in info:
        speed = info["model_flops"] / seconds
        info |= dict(images_per_second=info["batch"] / seconds, mfu_ceiling=speed / CEILINGS["bfloat16"])
        info |= dict(mfu_datasheet=SHEET and speed / SHEET)
    return case


def model(op: str, impl: str, batch: int, parameters: int, **more) -> dict:
    work, precision = model_work(Shape("B/16", 224, batch), 2), impl.split()[2]
    flops = total_flops(work.forward) * (3 if op == "train" else 1)
    kernels = (
        work.of("both") + update(parameters, size=4 if precision == "amp" else 2) if op == "train" else work.forward
    )
    shape = f"B/16 224 B{batch}"
    title = f"test_train[{shape}-{impl}]" if op == "train" else f"test_inference[B/16 224-{impl}-{op}]"
    info = dict(op=op, impl=impl, shape=shape, direction="both" if op == "train" else "forward", batch=batch)
    info |= dict(precision=precision, attention="cudnn", model_flops=int(flops))
    return timed(title, "bench_model", kernels, **more | info)


def operation(op: str, impl: str, direction: str) -> dict:
    kernels = OPS[op].work(Shape("B/16", 224, 256), 2).of(direction)
    title = f"test_{op.replace(' ', '_')}[B/16 224 B256-{direction}-{impl}]"
    return timed(title, "bench_ops", kernels, op=op, impl=impl, shape="B/16 224 B256", direction=direction)


def result(op: str, dtype: str, eps: float) -> dict:
    return dict(op=op, dtype=dtype, error=0.7 * eps, torch_error=0.6 * eps, passed=True, failure="", findings=[])


def good(commit: str) -> dict[str, dict]:
    """The JSON files by name, the manifest among them; `write` hashes them."""
    facts = dict(device=DEVICE, torch="2.11.0", triton="3.6.0", timm="1.0.29", commit=commit, ceilings=CEILINGS)
    facts |= {"gpu": SIZES, "driver_version": "580.159.04"}
    facts |= {"clocks.max.sm": "1980 MHz", "power.limit": "700.00 W", "datasheet_bf16_flops": SHEET}
    parameters = sum(p.numel() for p in ViT.from_preset("B/16").parameters())
    settings = [f"{library} compile {precision}" for precision in ("bf16", "amp") for library in ("vitfast", "timm")]
    found = {"train": [model("train", impl, 256, parameters) for impl in settings]}
    found["inference"] = [model("latency", impl, 1, parameters, slower=9.0) for impl in settings[:2]]
    for name, peers in OP_FILES.items():
        found[name] = [
            operation(op, impl, direction)
            for op, impls in peers.items()
            for direction in ("forward", "backward", "both")
            for impl in ("vitfast", *impls)
        ]
    date = datetime.datetime.fromtimestamp(STARTED + 100, datetime.timezone.utc).isoformat()
    flash = dict(name="test_attention[B/16 224 B256-forward-flash-attn 3]", reason="flash_attn_3 cannot be used")
    files = {
        f"{name}.json": dict(
            machine_info=dict(vitfast=dict(facts)), datetime=date, benchmarks=of, failed=[], skipped=[]
        )
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
