"""Whether a GPU's results can be true: correct, complete, consistent, and physically possible.

FLOPs and bytes are counted again from the shape (vitfast/tools/cost/work.py) and rates from the times, so that a number
that was changed alone is found. No time may be shorter than its FLOPs at the GPU's peak, or its bytes at its bandwidth:
the peak is what the multiprocessors can do at the highest clock, and at most PEAK_SLACK times the data sheet's, which
is of a lower clock. Of the bytes, what the L2 cache may keep is not counted: each kernel may find as much of its inputs
there and leave as much of its outputs, but the first reads from a cold one.
"""

import datetime
import fnmatch
import functools
import math
import re
import statistics
import struct
from dataclasses import dataclass

import torch
from bench_model import BATCHES, EVERY, LEADING
from bench_ops import OPS
from shapes import FOCUS, Shape, model_work

from vitfast import ViT, ops
from vitfast.tools.cost.gpus import GPUS, datasheet_flops
from vitfast.tools.cost.work import Kernels, floor_seconds, total_bytes, total_flops, update
from vitfast.tools.verify import ATOL, EPS, cases

PEAK_SLACK, COPY_SLACK = 1.25, 1.02
# FLOPs of a multiprocessor in a clock: dense bf16, added up in fp32, of the best GPU with this sm
FLOPS_PER_CLOCK = {
    80: 2048,
    86: 1024,
    87: 2048,
    89: 1024,
    90: 4096,
    100: 8192,
    103: 8192,
    110: 8192,
    120: 1024,
    121: 1024,
}
MOST_SPEED = 1.3  # times the copy measured: the bandwidth of a GPU whose data sheet is not known
THROTTLED = {  # nvidia-smi's clocks_event_reasons; a power cap is how a GPU is sold
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
THROTTLED_SHARE = 0.1
LEAST_ERROR = 0.01  # roundings: in a result of thousands of numbers no error is smaller
MOST_TORCH_ERROR = 16  # roundings of the dtype: PyTorch's own error has been at most 4
MOST_LIMIT = 0.1  # of a benchmark's error limit: bf16 has been at most 0.05
MOST_MFU, LEAST_MFU = 1.1, 0.1  # of the matrix product measured: of anybody's model, and of a peer's; both are near 0.6
SMALL_MEMORY = 20 * 2**30  # bytes, in which the headline's batch may not fit
STEPS = 3  # of a model between two events, as peers.py has it on a GPU
MAIN = "B/16 224 B256"
WORDS = re.compile(r"[\w .,+/:%()\[\]-]{0,120}")  # these are shown in a page: no tags
DIRECTIONS = ("forward", "backward", "both")
SDPA = ("sdpa flash", "sdpa cudnn", "sdpa efficient", "sdpa math")
BLOCK = ("eager", "compile")
# The operations of each file, each with the peers of which it must say a time, a failure or why they did not run.
PEERS = {
    "attention.json": {"attention": SDPA},
    "attention_separate.json": {"attention separate": SDPA},
    "blocks.json": {"attention_block": BLOCK, "mlp_block": BLOCK},
    "norm_and_patches.json": {
        "add_layer_norm": BLOCK,
        "patch_embed uint8": (*BLOCK, "compile unfold"),
        "patch_embed float": (*BLOCK, "compile unfold"),
    },
}
MODELS = {  # the operations of the other files
    "train.json": ("train",),
    "accelerate.json": ("train",),
    "inference.json": ("latency", "throughput"),
}
KNOWN = set(  # keys of extra_info; in a table any other could take the place of a number that was checked
    "op impl shape direction device dtype flops bytes floor_us percent_of_floor tflops gigabytes_per_second error "
    "error_after error_limit peak_mib attention batch precision images_per_second model_flops mfu_ceiling "
    "mfu_datasheet".split()
)
STATS = set(
    "data rounds iterations min max mean median stddev q1 q3 iqr total ops outliers iqr_outliers stddev_outliers "
    "ld15iqr hd15iqr".split()
)
STORED = dict(bf16=2, amp=4)  # bytes of a weight
SETTINGS = {setting.name for setting in (*LEADING, *EVERY)}
INFERENCE = ("latency", "throughput")
HEADLINE = [f"{library} compile {precision}" for precision in ("bf16", "amp") for library in ("vitfast", "timm")]


class Refused(ValueError):
    """Results are not taken; the message says why in one line."""


def take(content: dict, key: str, kind: type, where: str):
    """The value of a key, of this very type; a float may be written as an integer."""
    if not isinstance(content, dict) or key not in content:
        raise Refused(f"{where} lacks {key}")
    value = content[key]
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise Refused(f"{where}: {key} must be of type {kind.__name__}, got {str(value)[:60]!r}")
    return value


def agree(where: str, what: str, said: float, true: float) -> None:
    if not math.isclose(said, true, rel_tol=1e-6, abs_tol=1e-12):
        raise Refused(f"{where}: {what} is {said:.6g}, and by its times and its shape {true:.6g}")


# ---- the machine


@dataclass(frozen=True)
class Machine:
    """The GPU that all files were measured on, its ceilings, and what no GPU of its kind exceeds."""

    device: str
    driver: str
    sm: int
    memory: float  # bytes
    cache: float
    most_mhz: float
    facts: dict
    ceilings: dict
    peak: float
    bandwidth: float


def _find(pattern: str, facts: dict, key: str) -> re.Match:
    if not (found := re.fullmatch(pattern, take(facts, key, str, "machine_info"))):
        raise Refused(f"machine_info: {key} is {facts[key]!r}, which no machine says")
    return found


def check_machine(measured: dict[str, dict], device: str, commit: str) -> Machine:
    """The Machine of all benchmark files, which must say the same."""
    every = {name: content["machine_info"]["vitfast"] for name, content in measured.items()}
    facts = every["train.json"]
    if odd := [name for name, other in every.items() if other != facts]:
        raise Refused(f"{odd[0]} was measured on another machine than train.json, or in another run")
    if not re.fullmatch("NVIDIA [A-Z0-9][A-Za-z0-9 .+-]{1,60}", device) or facts.get("device") != device:
        raise Refused(f"it was measured on {facts.get('device')!r}, the manifest says {device!r}: no NVIDIA GPU")
    for key, value in facts.items():
        text = key if key in ("ceilings", "datasheet_bf16_flops") else value
        if not (WORDS.fullmatch(key) and type(text) is str and WORDS.fullmatch(text)):
            raise Refused(f"machine_info: {key[:60]!r} holds what is no version or size")
    for package in ("torch", "triton", "timm"):
        _find(r"\d+\.\d+.*", facts, package)
    if take(facts, "commit", str, "machine_info") != commit:
        raise Refused(f"machine_info has commit {facts['commit']!r}, the manifest {commit!r}")
    driver = _find(r"\d+\.\d+(\.\d+)?", facts, "driver_version")[0]
    gpu = _find(r"sm_(\d+), (\d+) GiB, (\d+) multiprocessors, L2 (\d+) MiB, CUDA [\d.]+", facts, "gpu")
    sm, gib, processors, mib = map(int, gpu.groups())
    mhz = int(_find(r"(\d+) MHz", facts, "clocks.max.sm")[1])
    if sm < 80:
        raise Refused(f"sm_{sm} is older than sm_80")
    if sm not in FLOPS_PER_CLOCK or not (0 < processors <= 256 and 0 < mib <= 256 and 300 < mhz < 4000):
        raise Refused(f"no GPU is known that is {facts['gpu']} at {mhz} MHz")
    peak, sheet = processors * FLOPS_PER_CLOCK[sm] * mhz * 1e6, _sheet(device)
    ceilings = take(facts, "ceilings", dict, "machine_info")
    rates = {key: take(ceilings, key, float, "ceilings") for key in ("copy", "bfloat16", "float16", "float32")}
    if odd := ceilings.keys() - rates.keys():
        raise Refused(f"there are unknown ceilings: {', '.join(sorted(odd))[:60]!r}")
    bandwidth = sheet.gigabytes_per_second * 1e9 * COPY_SLACK if sheet else MOST_SPEED * rates["copy"]
    if sheet:
        peak = min(peak, PEAK_SLACK * sheet.teraflops * 1e12)
        if gib > 1.03 * sheet.memory_gib:
            raise Refused(f"{device} has {sheet.memory_gib} GiB, not {gib}")
        if rates["copy"] < bandwidth / 4 or rates["bfloat16"] < sheet.teraflops * 1e12 / 4:
            raise Refused("a ceiling is less than a quarter of the data sheet's: was the GPU in use?")
    if facts.get("datasheet_bf16_flops") != datasheet_flops(device):
        raise Refused(f"the data sheet's FLOP/s are {datasheet_flops(device)}, not {facts.get('datasheet_bf16_flops')}")
    for key, rate in rates.items():
        if not peak / 1e4 < rate <= (bandwidth if key == "copy" else peak) or rates["copy"] > 12e12:
            raise Refused(f"the ceiling {key}, {rate:.3g}, is not what a GPU of this kind can do")
    return Machine(device, driver, sm, gib * 2**30, mib * 2**20, 1.02 * mhz, facts, rates, peak, bandwidth)


def _sheet(device: str):
    """The data sheet of a GPU by its driver's name, or None."""
    return next((g for g in GPUS.values() if any(fnmatch.fnmatchcase(device, n) for n in g.driver_names)), None)


# ---- correctness


def check_doctor(content: dict, name: str, machine: Machine, whole: bool) -> None:
    """Every operation in every dtype agrees with float64. whole: each of `vitfast doctor` must be there."""
    facts = take(content, "machine", dict, name)
    if not take(facts, "gpu", str, name).startswith(f"{machine.device}, sm_{machine.sm}, "):
        raise Refused(f"{name} is of another GPU: {facts['gpu']}")
    for package in ("torch", "triton"):
        if take(facts, package, str, name).partition("+")[0] != machine.facts[package].partition("+")[0]:
            raise Refused(f"{name} has {package} {facts[package]}, machine_info {machine.facts[package]}")
    found = set()
    for result in take(content, "results", list, name):
        op, dtype = take(result, "op", str, name), take(result, "dtype", str, name)
        where, eps = f"{name}: {op} in {dtype}", EPS.get(getattr(torch, dtype, None))
        if eps is None or (op, dtype) in found:
            raise Refused(f"{where} is there twice, or of an unknown dtype")
        if not take(result, "passed", bool, where):
            raise Refused(f"{where} has not passed: please open an issue about that")
        error, own = (take(result, key, float, where) for key in ("error", "torch_error"))
        if error > max(2 * own, eps):
            raise Refused(f"{where} is wrong: error {error:.1e}, PyTorch's {own:.1e}: please open an issue about that")
        if not (LEAST_ERROR * eps < error and 0 < own <= MOST_TORCH_ERROR * eps):
            raise Refused(f"{where} has errors {error:.1e} and {own:.1e} (PyTorch's), which rounding does not make")
        found.add((op, dtype))
    if take(content, "not_examined", int, name) != 0 or not found:
        raise Refused(f"{name}: {content['not_examined'] or 'all'} checks were not made")
    wanted = {(op, str(dtype)[6:]) for op in cases(FOCUS.sizes, ops) for dtype in EPS} if whole else set()
    if lost := sorted(wanted - found):
        raise Refused(f"{name} lacks {lost[0][0]} in {lost[0][1]}" + f" and {len(lost) - 1} more" * (len(lost) > 1))


# ---- benchmarks


def check_date(content: dict, name: str, started: int, finished: int) -> None:
    at = datetime.datetime.fromisoformat(take(content, "datetime", str, name))
    if at.tzinfo is None or not started - 5 <= at.timestamp() <= finished + 5:
        raise Refused(f"{name} is of {at}, and the run was at another time")


def check_benchmarks(content: dict, name: str, machine: Machine, told: dict[str, str]) -> None:
    """All cases of a file, and that none of its peers is passed over in silence.

    told: what the files before said of each case, "timed" or why it has no time; this file's cases are added.
    """
    if name == "train_peers.json":
        raise Refused("the device broke in a training step of ours: please open an issue about that")
    if name not in PEERS | MODELS:
        raise Refused(f"{name} is not a file of this stage")
    for case in take(content, "benchmarks", list, name):
        if (title := check_case(case, name, machine)) in told:
            raise Refused(f"{title} is there twice")
        told[title] = "timed"
    module = "ops" if name in PEERS else "model"
    tests = {f"test_{'inference' if op in INFERENCE else op.replace(' ', '_')}" for op in (PEERS | MODELS)[name]}
    for state in ("failed", "skipped"):
        for case in take(content, state, list, name):
            title, reason = take(case, "name", str, name), take(case, "reason", str, name)
            named = take(case, "fullname", str, name) == f"bench/bench_{module}.py::{title}"
            if not (WORDS.fullmatch(title) and named and title.partition("[")[0] in tests):
                raise Refused(f"{name}: {title[:80]!r} is not the name of a case, or not that of its fullname")
            if "WrongResult" in reason and "-vitfast" in title:
                raise Refused(f"{title} is wrong: please open an issue about that")
            if title in told or not reason:
                raise Refused(f"{title} is there twice, or without a reason")
            told[title] = f"{state}: {reason}"
    for op, peers in PEERS.get(name, {}).items():
        for direction in DIRECTIONS:
            titles = [f"test_{op.replace(' ', '_')}[{MAIN}-{direction}-{impl}]" for impl in ("vitfast", *peers)]
            if lost := [title for title in titles if title not in told]:
                raise Refused(f"{name} says nothing of {lost[0]}")
            if told[titles[0]] == "timed" and all(told[title].startswith("failed") for title in titles[1:]):
                raise Refused(f"{titles[0]} has a time, and all of its peers failed")
    for setting in HEADLINE if name == "train.json" else ():
        if (title := f"test_train[{MAIN}-{setting}]") not in told:
            raise Refused(f"{name} says nothing of {title}")
        too_large = machine.memory < SMALL_MEMORY and "OutOfMemoryError" in told[title]
        if told[title] != "timed" and setting.endswith("bf16") and not too_large:
            raise Refused(f"the headline is not there: {title} has no time")


@functools.cache
def _parameters() -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in ViT.from_preset("B/16").parameters())


def expected(op: str, batch: int, direction: str, precision: str) -> Kernels:
    """The kernels of a case, which is of ViT-B/16 at 224 pixels."""
    shape = Shape("B/16", 224, batch)
    if op == "train":
        return model_work(shape, 2).of("both") + update(_parameters(), size=STORED[precision])
    return model_work(shape, 2).forward if op in ("latency", "throughput") else OPS[op].work(shape, 2).of(direction)


def least_seconds(kernels: Kernels, machine: Machine) -> float:
    """No GPU of this kind is faster."""
    moved = total_bytes(kernels) - (2 * len(kernels) - 1) * machine.cache
    return max(total_flops(kernels) / machine.peak, moved / machine.bandwidth)


def check_case(case: dict, name: str, machine: Machine) -> str:
    """One benchmark; returns its name."""
    title, info = take(case, "name", str, name), take(case, "extra_info", dict, name)
    op, impl, shape, direction = (take(info, key, str, title) for key in ("op", "impl", "shape", "direction"))
    whole = op in ("train", *INFERENCE)
    if odd := (info.keys() - KNOWN) | (take(case, "stats", dict, title).keys() - STATS):
        raise Refused(f"{title} has other keys than a benchmark writes: {', '.join(sorted(odd))[:80]!r}")
    if op not in MODELS.get(name, PEERS.get(name, ())) or direction not in DIRECTIONS:
        raise Refused(f"{title} of {name} is of the operation {op!r} {direction}, which is not in that file")
    known = impl in SETTINGS if whole else impl in OPS[op].impls
    if not (known and WORDS.fullmatch(take(info, "attention", str, title) if whole else "")):
        raise Refused(f"{name}: {impl[:60]!r} is not the name of an implementation")
    if whole and direction != ("both" if op == "train" else "forward"):
        raise Refused(f"{title} has the direction {direction}")
    batches = dict(latency=(1,), throughput=BATCHES).get(op, (256,))
    batch = next((b for b in batches if shape == f"B/16 224 B{b}"), None)
    if batch is None:
        raise Refused(f"{title} is of the shape {shape!r}, which this stage does not measure")
    if op == "train":
        wanted = f"test_train[{shape}-{impl}]"
    else:
        inference = f"test_inference[B/16 224-{impl}-{op}]"
        wanted = inference if whole else f"test_{op.replace(' ', '_')}[{shape}-{direction}-{impl}]"
    full = f"bench/bench_{'model' if whole else 'ops'}.py::{wanted}"
    if title != wanted or take(case, "fullname", str, title) != full:
        raise Refused(f"{title} is by its extra_info {full}")
    if take(info, "device", str, title) != machine.device or take(info, "dtype", str, title) != "bfloat16":
        raise Refused(f"{title} is of {info['device']} in {info['dtype']}")
    seconds, fastest = check_times(case["stats"], title, STEPS if op in ("train", "throughput") else 1)
    kernels = expected(op, batch, direction, take(info, "precision", str, title) if whole else "")
    check_rates(info, title, kernels, seconds, machine)
    if whole:
        check_model(info, title, batch, seconds, machine)
    check_errors(info, title)
    peak = take(info, "peak_mib", float, title)
    if not 0 < peak * 2**20 <= machine.memory:
        raise Refused(f"{title}: a peak of {peak:.0f} MiB does not fit into the GPU's {machine.memory / 2**30:.0f} GiB")
    if op == "train" and peak * 2**20 < 3 * _parameters() * STORED[info["precision"]]:
        raise Refused(f"{title}: a peak of {peak:.0f} MiB does not even hold weights and optimiser")
    if fastest < (least := least_seconds(kernels, machine)):
        work = f"{total_flops(kernels):.3g} FLOPs and {total_bytes(kernels):.3g} bytes"
        raise Refused(f"{title}: {1e6 * fastest:.1f} us are impossible: its {work} take {1e6 * least:.1f} us at least")
    return title


def _clocked(seconds: float, calls: int) -> bool:
    """Whether device events can have said this of so many calls: they count milliseconds in float32."""
    milliseconds = 1e3 * calls * seconds
    return math.isclose(milliseconds, struct.unpack("f", struct.pack("f", milliseconds))[0], rel_tol=1e-13)


def check_times(stats: dict, title: str, calls: int) -> tuple[float, float]:
    """(median, shortest) of the seconds, which a clock has said and whose statistics are right."""
    data = take(stats, "data", list, title)
    if len(data) < 10 or take(stats, "rounds", int, title) != len(data):
        raise Refused(f"{title} has {len(data)} times in {stats['rounds']} rounds, where 10 at least are measured")
    if not all(type(value) is float and 0 < value < 600 for value in data):
        raise Refused(f"{title} has times that are no seconds")
    if odd := [value for value in data if not _clocked(value, calls)]:
        raise Refused(f"{title} has the time {odd[0]!r}, which no GPU's clock says: were the times scaled?")
    for key, of in dict(median=statistics.median, min=min, max=max, mean=statistics.fmean).items():
        agree(title, key, take(stats, key, float, title), of(data))
    q1, q3, iqr = (take(stats, key, float, title) for key in ("q1", "q3", "iqr"))
    if not min(data) <= q1 <= stats["median"] * (1 + 1e-9) <= q3 * (1 + 2e-9) <= max(data) * (1 + 3e-9):
        raise Refused(f"{title}: its quartiles are out of order")
    agree(title, "iqr", iqr, q3 - q1)
    return stats["median"], min(data)


def check_rates(info: dict, title: str, kernels: Kernels, seconds: float, machine: Machine) -> None:
    """FLOPs and bytes are those of the shape, and the rates those of the times."""
    flops, moved = total_flops(kernels), total_bytes(kernels)
    for key, true in dict(flops=int(flops), bytes=int(moved)).items():
        if take(info, key, int, title) != true:
            raise Refused(f"{title}: {key} is {info[key]}, and by its shape {true}")
    floor = floor_seconds(kernels, machine.ceilings["bfloat16"], machine.ceilings["copy"])
    rates = dict(floor_us=1e6 * floor, percent_of_floor=100 * floor / seconds)
    rates |= dict(tflops=flops / seconds / 1e12, gigabytes_per_second=moved / seconds / 1e9)
    for key, true in rates.items():
        agree(title, key, take(info, key, float, title), true)


def check_model(info: dict, title: str, batch: int, seconds: float, machine: Machine) -> None:
    flops = (3 if info["op"] == "train" else 1) * total_flops(model_work(Shape("B/16", 224, batch), 2).forward)
    if take(info, "batch", int, title) != batch or info["precision"] not in info["impl"].split():
        raise Refused(f"{title} has batch {info['batch']} and precision {info['precision']!r}")
    numbers = dict(images_per_second=batch / seconds, model_flops=flops)
    numbers |= dict(mfu_ceiling=flops / seconds / machine.ceilings["bfloat16"])
    if promised := datasheet_flops(machine.device):
        numbers |= dict(mfu_datasheet=flops / seconds / promised)
    elif info.get("mfu_datasheet", 0) is not None:
        raise Refused(f"{title} has an MFU of a data sheet that is not known")
    for key, true in numbers.items():
        agree(title, key, take(info, key, float, title), true)
    least = 0.0 if info["impl"].startswith("vitfast") or info["op"] == "latency" else LEAST_MFU
    if not least <= (share := numbers["mfu_ceiling"]) <= MOST_MFU:
        raise Refused(f"{title} has {share:.2f} of the speed of a matrix product, which is not a peer's, or anybody's")


def check_errors(info: dict, title: str) -> None:
    limit = take(info, "error_limit", float, title)
    for key in ("error", "error_after"):
        if (
            not LEAST_ERROR * EPS[torch.bfloat16] < take(info, key, float, title) <= limit <= MOST_LIMIT
            or limit < ATOL[torch.bfloat16]
        ):
            raise Refused(f"{title}: {key} {info[key]:.1e} of at most {limit:.1e} is not what bfloat16 makes")
