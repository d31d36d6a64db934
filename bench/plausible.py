"""Whether a GPU's results can be true: of the right form, complete, consistent, physically possible.

`FORMS` says what each file holds, and every value is held against it once (`check_form`). Then the numbers: FLOPs and
bytes are counted again from the shape (vitfast/tools/cost/work.py) and rates from the times, so that a number that was
changed alone is found; and what a GPU can do has limits (`within`). No time may be shorter than its FLOPs at the GPU's
peak, or its bytes at its bandwidth: the peak is what the multiprocessors can do at the highest clock, and at most
PEAK_SLACK times the data sheet's, which is of a lower clock. Of the bytes, what the L2 cache may keep is not counted:
each kernel may find as much of its inputs there and leave as much of its outputs, but the first reads from a cold one.
"""

import fnmatch
import functools
import itertools
import math
import re
import statistics
import struct
from dataclasses import dataclass, replace

import torch
from bench_model import BATCHES, EVERY, LEADING
from bench_ops import OPS
from harness import rates
from libraries import FLASH
from peers import model_rates
from pytest_benchmark.stats import Stats
from shapes import FOCUS, model_work

from vitfast import ViT, ops
from vitfast.cli.report_gpu import SAMPLED
from vitfast.tools.cost.gpus import GPUS, Gpu
from vitfast.tools.cost.work import Kernels, total_bytes, total_flops, update
from vitfast.tools.verify import ATOL, EPS, cases

PEAK_SLACK, COPY_SLACK = 1.25, 1.02
# FLOPs of a multiprocessor in a clock: dense bf16, added up in fp32, of the best GPU with this sm
FLOPS_PER_CLOCK = {80: 2048, 86: 1024, 87: 2048, 89: 1024, 90: 4096}
FLOPS_PER_CLOCK |= {100: 8192, 103: 8192, 110: 8192, 120: 1024, 121: 1024}
MOST_SPEED, MOST_COPY = 1.3, 12e12  # times the copy measured: the bandwidth of a GPU of no known data sheet; bytes/s
LEAST_ERROR = 0.01  # roundings: in a result of thousands of numbers no error is smaller
MOST_TORCH_ERROR = 16  # roundings of the dtype: PyTorch's own error has been at most 4
MOST_LIMIT = 0.1  # of a benchmark's error limit: bf16 has been at most 0.05
MOST_MFU, LEAST_MFU = 1.1, 0.1  # of the matrix product measured: of anybody's model, and of a peer's; both are near 0.6
SMALL_MEMORY = 20 * 2**30  # bytes, in which the headline's batch may not fit
LEAST_ROUNDS, STEPS = 10, 3  # times of a case; steps of a model between two events, as peers.py has it on a GPU
INFERENCE = ("latency", "throughput")
MODELS = ("train", *INFERENCE)
SETTINGS = {setting.name: setting for setting in (*LEADING, *EVERY)}
HEADLINE = [f"{library} compile {precision}" for precision in ("bf16", "amp") for library in ("vitfast", "timm")]
FILES = {  # the operations of each file of benchmarks
    "train.json": ("train",),
    "accelerate.json": ("train",),
    "inference.json": INFERENCE,
    "attention.json": ("attention",),
    "attention_separate.json": ("attention separate",),
    "blocks.json": ("attention_block", "mlp_block"),
    "norm_and_patches.json": ("add_layer_norm", "patch_embed uint8", "patch_embed float"),
}


class Refused(Exception):
    """Results are not taken; the message says why in one line."""

    def __str__(self) -> str:
        return " ".join(super().__str__().split())


# ---- the form of the files

WORDS = re.compile(r"[\w .,+/:%()\[\]-]{0,120}")  # these are shown in a page: no tags
VERSION = re.compile(r"\d+(\.\w+)+.*")
SIZES = re.compile(r"sm_(\d{2,3}), (\d{1,4}) GiB, (\d{1,4}) multiprocessors, L2 (\d{1,4}) MiB, CUDA [\d.]+")
STATES = re.compile("ok|failed|timed out|stuck|skipped|interrupted")  # of a step of gpu.sh
NUMBER = int | float
RESULT = dict(op=str, dtype=str, passed=bool, error=NUMBER, torch_error=NUMBER) | {...: object}
DOCTOR = dict(machine=dict.fromkeys(("gpu", "torch", "triton", "vitfast"), str) | {...: object})
DOCTOR |= dict(results=[RESULT], not_examined=int)
FACTS = dict.fromkeys(("torch", "triton", "timm"), VERSION) | dict(device=str, commit=str, gpu=SIZES)
FACTS |= {"driver_version": re.compile(r"\d+\.\d+(\.\d+)?"), "clocks.max.sm": re.compile(r"\d{1,5} MHz")}
FACTS |= {"datasheet_bf16_flops": NUMBER | None, ...: WORDS}
FACTS |= dict(ceilings=dict.fromkeys(("copy", "bfloat16", "float16", "float32"), NUMBER))
STATS = dict.fromkeys("rounds median min max mean q1 q3 iqr".split(), NUMBER)
MEASURED = dict.fromkeys("error error_after error_limit peak_mib".split(), NUMBER)  # the rest follows from the times
CASE = dict(name=str, fullname=str, stats=dict(data=[float]) | STATS | {...: NUMBER | str})
CASE |= {"extra_info": MEASURED | {...: NUMBER | str | None}, ...: object}
MISSED = dict(name=str, fullname=str, reason=re.compile("(?s).+")) | {...: object}
BENCHMARKS = dict(machine_info={"vitfast": FACTS, ...: object}, datetime=str, benchmarks=[CASE])
BENCHMARKS |= dict(failed=[MISSED], skipped=[MISSED]) | {...: object}
STEP = dict(name=WORDS, state=STATES, code=int | None, seconds=int)
SAMPLE = dict.fromkeys(SAMPLED, NUMBER | None) | {"clocks.sm": NUMBER, "seconds": NUMBER, "reasons": int}
MANIFEST = dict(schema=int, vitfast=re.compile(r"\d+(\.\w+)+"), commit=str | None, started=int, finished=int)
MANIFEST |= dict(device=re.compile("NVIDIA [A-Z0-9][A-Za-z0-9 .+-]{1,60}"), exit_code=int)
MANIFEST |= dict(sources={...: str}, files={...: str})
FORMS = dict.fromkeys(FILES, BENCHMARKS) | {
    "manifest.json": MANIFEST,
    "clocks.json": dict(interval=int, samples=[SAMPLE]),
    "steps_first.json": dict(stage=re.compile("first"), steps=[STEP], checks={...: int | None}),
    "smoke.json": DOCTOR,
    "doctor.json": DOCTOR,
}


def check_form(value: object, form: object, where: str) -> None:
    """Refuses a value of another form, which is one of these.

    A type (True is no number, nor is an infinity); a pattern, of the whole text; [form], of every item; a dict of forms
    by key, all of which are there, with `...` for every other key, if there may be any.
    """
    kind = {dict: dict, list: list, re.Pattern: str}.get(type(form), form)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object)):
        raise Refused(f"{where} must be of type {getattr(kind, '__name__', kind)}, got {str(value)[:60]!r}")
    if isinstance(value, (int, float)) and not -1e300 < value < 1e300:
        raise Refused(f"{where} is no number: {str(value)[:60]}")
    if isinstance(form, re.Pattern) and not form.fullmatch(value):
        raise Refused(f"{where} is {value[:60]!r}, which report-gpu does not write")
    if isinstance(form, list):
        value, form = dict(enumerate(value)), {...: form[0]}
    if isinstance(form, dict):
        if lost := [key for key in form if key is not ... and key not in value]:
            raise Refused(f"{where} lacks {', '.join(lost)}")
        if odd := [str(key) for key in value if key not in form and not (... in form and WORDS.fullmatch(str(key)))]:
            raise Refused(f"{where} has other keys than report-gpu writes: {', '.join(odd)[:80]!r}")
        for key, item in value.items():
            check_form(item, form.get(key, form.get(...)), f"{where}: {key}")


def agree(where: str, said: object, true: object) -> None:
    """Refuses what is not as it should be; floats up to their rounding."""
    same = type(said) is type(true) and said == true
    if isinstance(true, float) and isinstance(said, (int, float)):
        same = math.isclose(said, true, rel_tol=1e-6, abs_tol=1e-12)
    if not same:
        raise Refused(f"{where} is {said!r:.80}, and by everything else {true!r}")


def within(where: str, value: float, least: float, most: float, why: str) -> None:
    """Refuses a number beyond what is possible, or reasonable."""
    if not least <= value <= most:
        raise Refused(f"{where} is {value:.5g}, and may be {least:.5g} to {most:.5g}: {why}")


# ---- the machine


@dataclass(frozen=True)
class Machine:
    """The GPU that all files were measured on, by its `facts`, and what no GPU of its kind exceeds."""

    facts: dict
    sm: int
    memory: float  # bytes
    cache: float
    most_mhz: float
    peak: float  # FLOP/s
    bandwidth: float


def check_machine(measured: dict[str, dict], device: str, commit: str) -> Machine:
    """The Machine of all benchmark files, which must say the same."""
    facts = measured["train.json"]["machine_info"]["vitfast"]
    for name, content in measured.items():
        if content["machine_info"]["vitfast"] != facts:
            raise Refused(f"{name} was measured on another machine than train.json, or in another run")
    sheet = _sheet(device)
    promised = 1e12 * sheet.teraflops if sheet else None
    for key, true in dict(device=device, commit=commit, datasheet_bf16_flops=promised).items():
        agree(f"machine_info: {key}", facts[key], true)
    sm, gib, processors, mib = map(int, SIZES.fullmatch(facts["gpu"]).groups())
    mhz, ceilings = int(facts["clocks.max.sm"].split()[0]), facts["ceilings"]
    if sm not in FLOPS_PER_CLOCK:
        raise Refused(f"machine_info: sm_{sm} is no GPU that is known, from sm_80 on")
    sizes = {"gpu: multiprocessors": (processors, 256), "gpu: MiB of L2": (mib, 256), "clocks.max.sm": (mhz, 4000)}
    for what, (value, most) in sizes.items():
        within(f"machine_info: {what}", value, 1, most, "no GPU is known that has more")
    peak, bandwidth, least = processors * FLOPS_PER_CLOCK[sm] * mhz * 1e6, MOST_SPEED * ceilings["copy"], {}
    if sheet:
        within("machine_info: gpu: GiB", gib, 1, 1.03 * sheet.memory_gib, f"{device} has {sheet.memory_gib} GiB")
        peak, bandwidth = min(peak, PEAK_SLACK * promised), COPY_SLACK * sheet.gigabytes_per_second * 1e9
        least = dict(copy=bandwidth / 4, bfloat16=promised / 4)
    for key, rate in ceilings.items():
        most = min(bandwidth, MOST_COPY) if key == "copy" else peak
        why = "what a GPU of this kind can do; was it in use?"
        within(f"machine_info: ceilings: {key}", rate, least.get(key, peak / 1e4), most, why)
    return Machine(facts, sm, gib * 2**30, mib * 2**20, 1.02 * mhz, peak, bandwidth)


def _sheet(device: str) -> Gpu | None:
    """The data sheet of a GPU by its driver's name."""
    return next((g for g in GPUS.values() if any(fnmatch.fnmatchcase(device, n) for n in g.driver_names)), None)


# ---- correctness


def check_doctor(content: dict, name: str, machine: Machine, whole: bool) -> None:
    """Every operation in every dtype agrees with float64. whole: each of `vitfast doctor` must be there."""
    said, found, roundings = content["machine"], {}, {str(dtype)[6:]: eps for dtype, eps in EPS.items()}
    if not said["gpu"].startswith(f"{machine.facts['device']}, sm_{machine.sm}, "):
        raise Refused(f"{name} is of another GPU: {said['gpu'][:80]}")
    for package in ("torch", "triton"):
        agree(f"{name}: {package}", *(of[package].partition("+")[0] for of in (said, machine.facts)))
    for result in content["results"]:
        case, eps = f"{result['op']} in {result['dtype']}", roundings.get(result["dtype"])
        where, error, own = f"{name}: {case}", result["error"], result["torch_error"]
        if eps is None or case in found:
            raise Refused(f"{where} is there twice, or of an unknown dtype")
        if not result["passed"]:
            raise Refused(f"{where} has not passed: please open an issue about that")
        within(f"{where}: PyTorch's own error", own, 1e-300, MOST_TORCH_ERROR * eps, "rounding makes this")
        why = "rounding makes this; where it is wrong, please open an issue about that"
        within(f"{where}: its error", error, LEAST_ERROR * eps, max(2 * own, eps), why)
        found[case] = error
    agree(f"{name}: not_examined", content["not_examined"], 0)
    if not found:
        raise Refused(f"{name} has no results")
    wanted = [f"{op} in {dtype}" for op in cases(FOCUS.sizes, ops) for dtype in roundings] if whole else []
    if lost := [case for case in wanted if case not in found]:
        raise Refused(f"{name} lacks {lost[0]}" + f" and {len(lost) - 1} more" * (len(lost) > 1))


# ---- benchmarks


@functools.cache
def plan(name: str) -> dict[str, dict]:
    """The cases that a file may hold, by full name: the operation, implementation and direction of each."""
    found = {}
    for op in FILES[name]:
        impls = SETTINGS if op in MODELS else OPS[op].impls
        directions = dict(train=["both"], latency=["forward"], throughput=["forward"])
        for direction, impl in itertools.product(directions.get(op, ("forward", "backward", "both")), impls):
            title = f"bench_ops.py::test_{op.replace(' ', '_')}[B/16 224 B256-{direction}-{impl}]"
            if op in MODELS:
                test = f"train[B/16 224 B256-{impl}]" if op == "train" else f"inference[B/16 224-{impl}-{op}]"
                title = f"bench_model.py::test_{test}"
            found[f"bench/{title}"] = dict(op=op, impl=impl, direction=direction)
    return found


def needed(name: str) -> list[list[str]]:
    """The cases that a file must have, with a time or the reason why not: groups of peers, ours first."""
    groups = {}
    for full, planned in plan(name).items():
        op, impl = planned["op"], planned["impl"]
        if impl not in (*FLASH, "max-autotune") if op in OPS else name == "train.json" and impl in HEADLINE:
            groups.setdefault((op, planned["direction"]), []).append(full)
    return [*groups.values()]


def check_benchmarks(content: dict, name: str, machine: Machine, told: dict[str, str]) -> None:
    """All cases of a file, and that none of its peers is passed over in silence.

    told: what the files before said of each case, by full name: its state and reason; this file's cases are added.
    """
    for state in ("benchmarks", "failed", "skipped"):
        for case in content[state]:
            full, title, reason = case["fullname"], case["name"], case.get("reason", "")
            if full not in plan(name):
                raise Refused(f"{name}: the fullname {full[:120]} is of no case that report-gpu measures there")
            agree(f"{name}: the name of {full}", title, full.partition("::")[2])
            if full in told:
                raise Refused(f"{title} is there twice")
            if "WrongResult" in reason and "-vitfast" in title:
                raise Refused(f"{title} is wrong: please open an issue about that")
            if state == "benchmarks":
                check_case(case, plan(name)[full], machine)
            told[full] = f"{state}: {reason}"
    for group in needed(name):
        if lost := [full for full in group if full not in told]:
            raise Refused(f"{name} says nothing of {lost[0]}")
        timed = {full for full in group if told[full].startswith("benchmarks")}
        if timed == {group[0]} and all(told[full].startswith("failed") for full in group[1:]):
            raise Refused(f"{group[0]} has a time, and all of its peers failed")
        for full in group if name == "train.json" else ():
            too_large = machine.memory < SMALL_MEMORY and "OutOfMemoryError" in told[full]
            if full not in timed and full.endswith("bf16]") and not too_large:
                raise Refused(f"the headline is not there: {full} has no time")


@functools.cache
def _parameters() -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in ViT.from_preset("B/16").parameters())


def true_info(op: str, impl: str, direction: str, batch: int, seconds: float, machine: Machine) -> tuple[dict, Kernels]:
    """The extra_info of a case beside MEASURED, by its name and its median; and its kernels, of ViT-B/16."""
    shape, ceilings = replace(FOCUS, batch=batch), machine.facts["ceilings"]
    facts = dict(op=op, impl=impl, direction=direction, shape=f"B/16 224 B{batch}", dtype="bfloat16")
    if op in OPS:
        kernels = OPS[op].work(shape, 2).of(direction)
    else:
        setting, work = SETTINGS[impl], model_work(shape, 2)
        step = work.of("both") + update(_parameters(), size=setting.stored.itemsize)
        kernels, promised = step if op == "train" else work.forward, machine.facts["datasheet_bf16_flops"]
        facts |= dict(batch=batch, precision=setting.precision)
        facts |= model_rates(shape, op == "train", seconds, ceilings["bfloat16"], promised)
    facts |= rates(kernels, seconds, ceilings["bfloat16"], ceilings["copy"])
    return facts | dict(device=machine.facts["device"]), kernels


def least_seconds(kernels: Kernels, machine: Machine) -> float:
    """No GPU of this kind is faster."""
    moved = total_bytes(kernels) - (2 * len(kernels) - 1) * machine.cache
    return max(total_flops(kernels) / machine.peak, moved / machine.bandwidth)


def check_case(case: dict, planned: dict, machine: Machine) -> None:
    """One benchmark: all that follows from its name and its times, and what was measured beside."""
    title, info, op, impl = case["name"], case["extra_info"], planned["op"], planned["impl"]
    median, fastest = check_times(case["stats"], title, STEPS if op in ("train", "throughput") else 1)
    batches = dict(latency=(1,), throughput=BATCHES).get(op, (FOCUS.batch,))
    batch = info["batch"] if info.get("batch") in batches else batches[0]
    true, kernels = true_info(**planned, batch=batch, seconds=median, machine=machine)
    if odd := info.keys() - true.keys() - MEASURED.keys() - {"attention"}:  # such a key could enter a table unchecked
        raise Refused(f"{title} has other keys than a benchmark writes: {', '.join(sorted(odd))[:80]!r}")
    for key, value in true.items():
        agree(f"{title}: {key}", info.get(key), value)
    if op in MODELS:
        check_form(info.get("attention"), WORDS, f"{title}: attention")
    eps, limit = LEAST_ERROR * EPS[torch.bfloat16], info["error_limit"]
    within(f"{title}: error_limit", limit, ATOL[torch.bfloat16], MOST_LIMIT, "bfloat16 makes this")
    for key in ("error", "error_after"):
        within(f"{title}: {key}", info[key], eps, limit, "bfloat16 makes this")
    optimiser = 3 * _parameters() * SETTINGS[impl].stored.itemsize if op == "train" else 1
    why = "of weights and optimiser, and of the GPU"
    within(f"{title}: peak_mib", info["peak_mib"], optimiser / 2**20, machine.memory / 2**20, why)
    if op in MODELS:
        least = 0.0 if impl.startswith("vitfast") or op == "latency" else LEAST_MFU
        within(f"{title}: mfu_ceiling", info["mfu_ceiling"], least, MOST_MFU, "the speed of a matrix product")
    why = f"seconds, by its {total_flops(kernels):.3g} FLOPs and {total_bytes(kernels):.3g} bytes"
    within(f"{title}: its shortest time", fastest, least_seconds(kernels, machine), 600, why)


def _clocked(seconds: float, calls: int) -> bool:
    """Whether device events can have said this of so many calls: they count milliseconds in float32."""
    milliseconds = 1e3 * calls * seconds
    return math.isclose(milliseconds, struct.unpack("f", struct.pack("f", milliseconds))[0], rel_tol=1e-13)


def check_times(stats: dict, title: str, calls: int) -> tuple[float, float]:
    """(median, shortest) of the seconds, which a clock has said and whose statistics are right."""
    data, median = stats["data"], stats["median"]
    within(f"{title}: its number of times", len(data), LEAST_ROUNDS, 10**4, "so many rounds are measured")
    for seconds in data:
        within(f"{title}: a time", seconds, 1e-9, 600, "seconds")
        if not _clocked(seconds, calls):
            raise Refused(f"{title} has the time {seconds!r}, which no GPU's clock says: were the times scaled?")
    if odd := stats.keys() - {*Stats.fields, "data", "iterations"}:  # a case has these too, in a table
        raise Refused(f"{title} has other statistics than a benchmark writes: {', '.join(sorted(odd))[:80]!r}")
    true = dict(median=statistics.median(data), min=min(data), max=max(data), mean=statistics.fmean(data))
    for key, value in dict(true, rounds=len(data)).items():
        agree(f"{title}: {key}", stats[key], value)
    for key, least, most in (("q1", min(data), median), ("q3", median, max(data))):
        within(f"{title}: {key}", stats[key], least * (1 - 3e-9), most * (1 + 3e-9), "quartiles are in order")
    agree(f"{title}: iqr", stats["iqr"], float(stats["q3"] - stats["q1"]))
    return median, min(data)
