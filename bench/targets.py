"""The targets of vitfast on a GPU, and what the results say: met, missed, or not measured yet.

Read by report.py. A ratio is of two cases of the same folder and in equal precision; peers count with the fastest of
their settings, and a setting that should have been the strongest and has no time is named ("without max-autotune"). Of
a case that was measured twice ("again") the slower time counts.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

LIBRARIES = ("vitfast", "vitfast.accelerate(timm)", "timm", "huggingface", "torchvision")
PEERS = LIBRARIES[2:]
VITFAST, ACCELERATED = LIBRARIES[:2]
AUTOTUNED = ("max-autotune", "max-autotune all")
MAIN, BOTH = "B/16 224", ("forward", "backward")
SDPA_AND_FLASH = ("sdpa flash", "sdpa cudnn", "flash-attn 3", "flash-attn 4")


@dataclass(frozen=True)
class Figure:
    """One measured number: what it is of, its bound from below (or above), what would be better still."""

    of: str
    value: float
    bound: float
    at_most: bool = False
    percent: bool = False
    stretch: float | None = None
    without: tuple[str, ...] = ()  # settings of peers that have no time

    def reaches(self, bound: float) -> bool:
        return self.value <= bound if self.at_most else self.value >= bound

    @property
    def met(self) -> bool:
        return self.reaches(self.bound)

    def __str__(self) -> str:
        number = f"{100 * self.value:.0f} %" if self.percent else f"{self.value:.2f}"
        missing = f" (without {', '.join(self.without)})" if self.without else ""
        stretched = self.met and self.stretch is not None and self.reaches(self.stretch)
        return f"{self.of} {number}{missing}{'' if self.met else ' **missed**'}{' (stretch)' if stretched else ''}"


def library(info: dict) -> str:
    """Whose model a case is."""
    return next(name for name in reversed(LIBRARIES) if info["impl"].startswith(f"{name} "))


def counted(infos: list[dict]) -> list[dict]:
    """extra_info of whole models, with the slower one alone of a setting that was measured again."""
    slowest = {}
    for info in infos:
        setting = info["impl"].removesuffix(" again"), info["shape"]
        if setting not in slowest or info["images_per_second"] < slowest[setting]["images_per_second"]:
            slowest[setting] = info
    return list(slowest.values())


def fastest(results, op: str, model: str, *wanted: str, precision: str, how: str = "") -> dict | None:
    """extra_info of the fastest case of these libraries in one precision; how: in this setting alone."""
    infos = counted([case["extra_info"] for case in results.of(op)])
    infos = [i for i in infos if i["shape"].startswith(f"{model} B") and i["precision"] == precision]
    infos = [i for i in infos if library(i) in wanted]
    infos = [i for i in infos if not how or i["impl"].startswith(f"{library(i)} {how} ")]
    return max(infos, key=lambda i: i["images_per_second"], default=None)


def unmeasured(results, op: str, model: str, peers: tuple[str, ...], precision: str) -> tuple[str, ...]:
    """The strongest settings that none of these peers has a time in."""
    found = [case["extra_info"] for case in results.of(op)]
    impls = {i["impl"] for i in found if i["shape"].startswith(f"{model} B") and library(i) in peers}
    return tuple(how for how in AUTOTUNED if not any(impl.endswith(f" {how} {precision}") for impl in impls))


def speed(
    results, op: str, model: str, ours: str, theirs: tuple[str, ...], precision: str, of: str, **more
) -> Iterator[Figure]:
    """Images per second of ours by those of the fastest of theirs, in one precision."""
    own, peer = (fastest(results, op, model, *names, precision=precision) for names in ((ours,), theirs))
    if own and peer:
        without = unmeasured(results, op, model, theirs, precision) if set(theirs) <= set(PEERS) else ()
        yield Figure(of, own["images_per_second"] / peer["images_per_second"], without=without, **more)


def training_step(results) -> Iterator[Figure]:
    for ours, precision, how in ((VITFAST, "bf16", ""), (ACCELERATED, "amp", "accelerate ")):
        of = f"{how}{precision} of timm {precision}"
        yield from speed(results, "train", MAIN, ours, ("timm",), precision, of, bound=1.3, stretch=1.5)
    ours = fastest(results, "train", MAIN, VITFAST, precision="bf16")
    if ours and ours["mfu_datasheet"]:
        yield Figure("of the data sheet's peak", ours["mfu_datasheet"], 0.0, percent=True, stretch=0.62)


def other_models(results) -> Iterator[Figure]:
    for model in ("S/16 224", "L/16 224", "H/14 224", "B/16 384"):
        for ours, precision, of in ((VITFAST, "bf16", "bf16"), (ACCELERATED, "amp", "accelerate amp")):
            yield from speed(results, "train", model, ours, PEERS, precision, f"{model} {of}", bound=1.3, stretch=1.5)


def inference(results) -> Iterator[Figure]:
    yield from speed(results, "throughput", MAIN, VITFAST, PEERS, "bf16", "throughput", bound=1.3)
    for figure in speed(results, "latency", MAIN, VITFAST, PEERS, "bf16", "", bound=0.0):
        yield Figure("latency of one image", 1 / figure.value, 0.8, at_most=True, without=figure.without)


def operation(results, op: str, shape: str, direction: str) -> tuple[dict | None, list[dict]]:
    """extra_info, seconds and ceilings (of its own file) of ours and the others, at the largest batch."""
    found = [c["extra_info"] | dict(seconds=c["stats"]["median"], ceilings=c["ceilings"]) for c in results.of(op)]
    found = [
        i
        for i in found
        if i["shape"].startswith(f"{shape} B") and not i["shape"].endswith(" B1") and i["direction"] == direction
    ]
    ours = max((i for i in found if i["impl"] == VITFAST), key=lambda i: i["bytes"], default=None)
    return ours, [i for i in found if i["impl"] != VITFAST and ours and i["shape"] == ours["shape"]]


def against(
    results,
    ops: tuple[str, ...],
    shapes: dict[str, tuple[float, float | None]],
    strongest: tuple[str, ...],
    needed: str = "",
    directions: tuple[str, ...] = BOTH,
) -> Iterator[Figure]:
    """The best other implementation's time over ours, by operation, shape and direction.

    shapes: each with its bound and stretch. strongest: implementations that are named where they have no time. needed:
    there is no figure before an implementation whose name starts so has a time.
    """
    for op, (shape, (bound, stretch)), direction in itertools.product(ops, shapes.items(), directions):
        ours, others = operation(results, op, shape, direction)
        times = {i["impl"]: i["seconds"] for i in others}
        if ours and times and any(impl.startswith(needed) for impl in times):
            without = tuple(impl for impl in strongest if impl not in times)
            value = min(times.values()) / ours["seconds"]
            yield Figure(f"{op} {shape} {direction}", value, bound, stretch=stretch, without=without)


ATTENTION = {MAIN: (1.3, 2.0), "H/14 224": (1.3, 2.0), "B/16 384": (1.1, None)}  # N = 197, 257, 577
PATCHES = ("compile", "compile unfold", *AUTOTUNED)
attention = functools.partial(
    against, ops=("attention", "attention separate"), shapes=ATTENTION, strongest=SDPA_AND_FLASH
)
mlp = functools.partial(
    against, ops=("linear_gelu", "mlp_block"), shapes={MAIN: (1.2, None)}, strongest=AUTOTUNED, needed="compile"
)
patch_embedding = functools.partial(
    against, ops=("patch_embed uint8",), shapes={MAIN: (3.0, None)}, strongest=PATCHES, directions=("forward",)
)


def layer_norm(results) -> Iterator[Figure]:
    for shape, direction in itertools.product((MAIN, "L/16 224", "H/14 224"), BOTH):
        ours, _ = operation(results, "add_layer_norm", shape, direction)
        if ours:
            share = 1e9 * ours["gigabytes_per_second"] / ours["ceilings"]["copy"]
            yield Figure(f"{shape} {direction}", share, 0.9, percent=True, stretch=0.95)


def memory(results) -> Iterator[Figure]:
    ours = fastest(results, "train", MAIN, VITFAST, precision="bf16")
    for precision, bound in (("amp", 0.6), ("bf16", 0.65)):
        theirs = fastest(results, "train", MAIN, "timm", precision=precision, how="compile")
        if ours and theirs and ours["peak_mib"] and theirs["peak_mib"]:
            of = f"bf16 of timm {precision} compiled"
            yield Figure(of, ours["peak_mib"] / theirs["peak_mib"], bound, at_most=True)


def accelerated(results) -> Iterator[Figure]:
    for precision, bound in (("bf16", 0.95), ("amp", 0.0)):  # amp keeps timm's fp32 residual: reported, no target
        of = f"{precision} of our own ViT"
        yield from speed(results, "train", MAIN, ACCELERATED, (VITFAST,), precision, of, bound=bound)


def checks(results) -> Iterator[Figure]:
    for name, code in results.checks.items():
        yield Figure(name, float(code == 0), 1.0, percent=True)


def loss_curves(results) -> Iterator[Figure]:
    if results.curves.get("distance") is not None:
        runs, planned = results.curves.get("runs"), results.curves.get("planned")
        part = f", {runs} of {planned} runs" if runs != planned else ""
        precision = results.curves.get("precision", "?")
        of = f"{precision}, {results.curves['steps']} steps{part}, largest distance in seed deviations"
        yield Figure(of, results.curves["distance"], 2.0, at_most=True)


TARGETS: tuple[tuple[str, str, Callable], ...] = (
    ("gpu tests, `vitfast doctor`, compute-sanitizer", "all pass", checks),
    (
        "B/16 224 training step, batch 256",
        "bf16 1.3x timm bf16, `accelerate(timm)` amp 1.3x timm amp (equal numerics), stretch 1.5x; "
        "beside it the share of the data sheet's peak, stretch 62 %, best published 29 %",
        training_step,
    ),
    ("S/16, L/16, H/14, B/16@384 training step", "1.3x the best peer in equal precision, stretch 1.5x", other_models),
    ("B/16 inference, bf16", "1.3x the best peer's throughput, 0.8x its latency (CUDA graphs)", inference),
    (
        "attention N = 197, 257, 577, forward and backward",
        "1.3x, 1.3x (stretch 2x), 1.1x the best of SDPA, flash-attn 3 and 4, qkv packed and separate",
        attention,
    ),
    ("residual add + LayerNorm, D = 768, 1024, 1280", "90 % of the copy bandwidth, stretch 95 %", layer_norm),
    ("fc1 + GELU and the MLP block, forward and backward", "1.2x cuBLAS + compiled pointwise", mlp),
    ("patch embedding from uint8", "3x the best of normalise + convolution and normalise + unfold", patch_embedding),
    ("peak memory of the B/16 training step", "0.6x timm amp compiled, 0.65x timm bf16 compiled", memory),
    ("`vitfast.accelerate(timm model)`", "within 5 % of our own ViT in bf16; amp reported", accelerated),
    ("loss curves, ours against timm", "same within seed noise over 3 seeds", loss_curves),
)


def measured(results, measure: Callable) -> str:
    """The figures of one target in words."""
    try:
        return "; ".join(map(str, measure(results))) or "not measured yet"
    except Exception as error:  # whatever it is, the other targets are shown
        return f"cannot be computed: {type(error).__name__}: {error}"


def target_rows(results) -> list[list[str]]:
    """A row for each target: what, wanted, measured."""
    return [[what, wanted, measured(results, measure)] for what, wanted, measure in TARGETS]
