"""The targets of vitfast on a GPU, and what the results say: met, missed, or not measured yet.

Read by report.py. A ratio is of two cases in equal precision; peers count with the fastest of their settings, and a
setting that should have been the strongest and has no time is named ("without max-autotune"). Of a case that was
measured twice ("again") the slower time counts.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from result_files import LIBRARIES, Results, counted, library

VITFAST, ACCELERATED, *PEERS = LIBRARIES
MAIN = "B/16 224"


@dataclass(frozen=True)
class Figure:
    """One measured number: what it is of, and its bound from below (or above)."""

    of: str
    value: float
    bound: float
    at_most: bool = False
    without: tuple[str, ...] = ()  # settings of peers that have no time

    def __str__(self) -> str:
        met = self.value <= self.bound if self.at_most else self.value >= self.bound
        missing = f" (without {', '.join(self.without)})" if self.without else ""
        return f"{self.of} {self.value:.2f}{missing}{'' if met else ' **missed**'}"


def whole_models(results: Results, op: str, model: str, libraries: list[str], precision: str, how: str = "") -> list:
    """extra_info of whole models, fastest first; how: in this setting alone."""
    infos = [i for i in counted(results.of(op)) if i["shape"].startswith(f"{model} B") and library(i) in libraries]
    infos = [i for i in infos if i["precision"] == precision and i["impl"].startswith(f"{library(i)} {how}")]
    return sorted(infos, key=lambda i: -i["images_per_second"])


def speed(op: str, model: str, precision: str, ours: str, theirs: list[str], of: str, bound: float, **more) -> Callable:
    """Figures: images per second of ours by the fastest of theirs; at_most: seconds, for a latency."""

    def figures(results: Results) -> Iterator[Figure]:
        own, others = (whole_models(results, op, model, names, precision) for names in ([ours], theirs))
        if own and others:
            ratio = own[0]["images_per_second"] / others[0]["images_per_second"]
            tuned = theirs == [VITFAST] or any(f" max-autotune {precision}" in i["impl"] for i in others)
            yield Figure(of, 1 / ratio if more else ratio, bound, without=() if tuned else ("max-autotune",), **more)

    return figures


def share_of_peak(results: Results) -> Iterator[Figure]:
    for info in whole_models(results, "train", MAIN, [VITFAST], "bf16")[:1]:
        if info["mfu_datasheet"]:
            yield Figure("share of the data sheet's peak", info["mfu_datasheet"], 0.0)


def operation(results: Results, op: str, shape: str, direction: str) -> tuple[dict | None, list[dict]]:
    """Cases of ours and the others, at the largest batch."""
    wanted = lambda info: info["direction"] == direction and info["shape"].startswith(f"{shape} B")  # noqa: E731
    found = [case for case in results.of(op) if wanted(case["extra_info"])]
    ours = [case for case in found if case["extra_info"]["impl"] == VITFAST]
    ours = max(ours, key=lambda case: case["extra_info"]["bytes"], default=None)
    if ours is None or ours["extra_info"]["shape"].endswith(" B1"):
        return None, []
    return ours, [c for c in found if c is not ours and c["extra_info"]["shape"] == ours["extra_info"]["shape"]]


def against(ops: str, strongest: str, bounds: dict[str, float], directions: str = "forward backward", needed: str = ""):
    """Figures: the best other implementation's time over ours, by operation, shape and direction.

    bounds: by shape. ops, strongest: separated by commas; of the strongest those are named that have no time. needed:
    there is no figure before an implementation whose name starts so has a time.
    """

    def figures(results: Results) -> Iterator[Figure]:
        for op, (shape, bound), direction in itertools.product(ops.split(", "), bounds.items(), directions.split()):
            ours, others = operation(results, op, shape, direction)
            times = {case["extra_info"]["impl"]: case["stats"]["median"] for case in others}
            if any(impl.startswith(needed) for impl in times):
                without = tuple(impl for impl in strongest.split(", ") if impl not in times)
                ratio = min(times.values()) / ours["stats"]["median"]
                yield Figure(f"{op} {shape} {direction}", ratio, bound, without=without)

    return figures


def layer_norm(results: Results) -> Iterator[Figure]:
    for shape, direction in itertools.product((MAIN, "L/16 224", "H/14 224"), ("forward", "backward")):
        ours, _ = operation(results, "add_layer_norm", shape, direction)
        if ours:
            share = 1e9 * ours["extra_info"]["gigabytes_per_second"] / ours["ceilings"]["copy"]
            yield Figure(f"{shape} {direction}", share, 0.9)


def memory(results: Results) -> Iterator[Figure]:
    for precision, bound in (("amp", 0.6), ("bf16", 0.65)):
        ours = whole_models(results, "train", MAIN, [VITFAST], "bf16")
        theirs = whole_models(results, "train", MAIN, ["timm"], precision, how="compile ")
        if ours and theirs and ours[0]["peak_mib"] and theirs[0]["peak_mib"]:
            share = ours[0]["peak_mib"] / theirs[0]["peak_mib"]
            yield Figure(f"bf16 of timm {precision} compiled", share, bound, at_most=True)


def checks(results: Results) -> Iterator[Figure]:
    for name, code in results.checks.items():
        yield Figure(f"{name}: exit code", code, 0, at_most=True)


def distance(ours: list[list[float]], theirs: list[list[float]]) -> float:
    """The largest difference of the two means of any window of steps; ours, theirs: seeds x windows.

    In standard deviations of a run between seeds, of 0.001 at least.
    """
    worst = 0.0
    for a, b in zip(zip(*ours), zip(*theirs)):
        spread = math.sqrt((statistics.variance(a) + statistics.variance(b)) / 2) if len(a) > 1 else 0.0
        worst = max(worst, abs(statistics.mean(a) - statistics.mean(b)) / max(spread, 1e-3))
    return worst


def loss_curves(results: Results) -> Iterator[Figure]:
    infos = [case["extra_info"] for case in results.of("loss curve")]
    for shape, precision in dict.fromkeys((info["shape"], info["precision"]) for info in infos):
        of = [info for info in infos if (info["shape"], info["precision"]) == (shape, precision)]
        ours, theirs = ({i["seed"]: i["losses"] for i in of if library(i) == name} for name in (VITFAST, "timm"))
        if seeds := sorted(set(ours) & set(theirs)):
            value = distance([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])
            yield Figure(f"{shape} {precision}, {len(seeds)} seeds, in deviations", value, 2.0, at_most=True)


OTHER_MODELS = [
    speed("train", model, precision, ours, PEERS, f"{model} {of}", 1.3)
    for model in ("S/16 224", "L/16 224", "H/14 224", "B/16 384")
    for ours, precision, of in ((VITFAST, "bf16", "bf16"), (ACCELERATED, "amp", "accelerate amp"))
]
TARGETS: tuple[tuple[str, str, list[Callable[[Results], Iterator[Figure]]]], ...] = (
    ("gpu tests, `vitfast doctor`, compute-sanitizer", "all pass", [checks]),
    (
        "B/16 224 training step, batch 256",
        "bf16 1.3x timm bf16, `accelerate(timm)` amp 1.3x timm amp (equal numerics), stretch 1.5x; "
        "beside it the share of the data sheet's peak, stretch 0.62, best published 0.29",
        [
            speed("train", MAIN, "bf16", VITFAST, ["timm"], "bf16 of timm bf16", 1.3),
            speed("train", MAIN, "amp", ACCELERATED, ["timm"], "accelerate amp of timm amp", 1.3),
            share_of_peak,
        ],
    ),
    ("S/16, L/16, H/14, B/16@384 training step", "1.3x the best peer in equal precision, stretch 1.5x", OTHER_MODELS),
    (
        "B/16 inference, bf16",
        "1.3x the best peer's throughput, 0.8x its latency (CUDA graphs)",
        [
            speed("throughput", MAIN, "bf16", VITFAST, PEERS, "throughput", 1.3),
            speed("latency", MAIN, "bf16", VITFAST, PEERS, "latency of one image", 0.8, at_most=True),
        ],
    ),
    (
        "attention N = 197, 257, 577, forward and backward",
        "1.3x, 1.3x (stretch 2x), 1.1x the best of SDPA, flash-attn 3 and 4, qkv packed and separate",
        [
            against(
                "attention, attention separate",
                "sdpa flash, sdpa cudnn, flash-attn 3, flash-attn 4",
                {MAIN: 1.3, "H/14 224": 1.3, "B/16 384": 1.1},
            )
        ],
    ),
    ("residual add + LayerNorm, D = 768, 1024, 1280", "0.9 of the copy bandwidth, stretch 0.95", [layer_norm]),
    (
        "fc1 + GELU and the MLP block, forward and backward",
        "1.2x cuBLAS + compiled pointwise",
        [against("linear_gelu, mlp_block", "max-autotune", {MAIN: 1.2}, needed="compile")],
    ),
    (
        "patch embedding from uint8",
        "3x the best of normalise + convolution and normalise + unfold",
        [against("patch_embed uint8", "compile, compile unfold, max-autotune", {MAIN: 3.0}, "forward")],
    ),
    ("peak memory of the B/16 training step", "0.6x timm amp compiled, 0.65x timm bf16 compiled", [memory]),
    (
        "`vitfast.accelerate(timm model)`",
        "within 5 % of our own ViT in bf16; amp, which keeps timm's fp32 residual, reported",
        [
            speed("train", MAIN, "bf16", ACCELERATED, [VITFAST], "bf16 of our own ViT", 0.95),
            speed("train", MAIN, "amp", ACCELERATED, [VITFAST], "amp of our own ViT", 0.0),
        ],
    ),
    ("loss curves, ours against timm", "same within seed noise over 3 seeds", [loss_curves]),
)


def target_rows(results: Results) -> list[list[str]]:
    """A row for each target: what, wanted, measured."""

    def measured(parts: list[Callable]) -> str:
        try:
            return "; ".join(str(figure) for figures in parts for figure in figures(results)) or "not measured yet"
        except Exception as error:  # whatever it is, the other targets are shown
            return f"cannot be computed: {type(error).__name__}: {error}"

    return [[what, wanted, measured(parts)] for what, wanted, parts in TARGETS]
