"""The targets of vitfast on a GPU, and what the results say: met, missed, or not measured yet.

report.py reads them. A target has several figures. A ratio is of two cases in equal precision; peers count with the
fastest of their settings, and a setting that should have been the strongest and has no time is named ("without
max-autotune"); so is reduce-overhead where ours alone has run in it. Of a case that was measured twice ("again") the
slower time counts.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from decide import predictions
from questions import BY_BACKEND, BY_EMBED, CURVES, INFERENCE, MEMORY, OTHERS, STEP
from result_files import ACCELERATED, BACKEND, PEERS, VITFAST, Results, counted, library

MAIN = "B/16 224"
GRAPHS = "reduce-overhead"  # torch's CUDA graphs


# Of whole models, in times the best peer's speed; and the share of the data sheet's peak that B/16 is to reach: in
# training the most published for a ViT (NeMo, g/14 on an H100), in inference AITemplate's on an A100.
SPEED, PEAK = 1.3, dict(train=0.29, throughput=0.59)


@dataclass(frozen=True)
class Figure:
    """One measured number `of` something, which should be at least (or, with at_most, at most) `bound`.

    value: None where it has no time yet. setting: the cases that it relates. without: settings of peers that have no
    time.
    """

    of: str
    value: float | None
    bound: float
    at_most: bool = False
    setting: str = ""
    without: Sequence[str] = ()

    @property
    def shown(self) -> str:
        """The value, bold where it keeps its bound.

        A ratio of ours as CUDA graphs to a peer that is not has a star instead.
        """
        if self.value is None:
            return "-"
        text = str(self.value) if isinstance(self.value, int) else f"{self.value:.2f}"
        if GRAPHS in self.without:
            return f"{text}\\*"
        return f"**{text}**" if (self.value <= self.bound if self.at_most else self.value >= self.bound) else text

    @property
    def wanted(self) -> str:
        """The bound as text, such as "≥ 1.2"."""
        return f"{'≤' if self.at_most else '≥'} {self.bound:g}" if self.bound else "0"

    @property
    def details(self) -> str:
        """The cases that it relates, and the settings of peers that have no time."""
        return "; ".join(filter(None, [self.setting, self.without and f"without {', '.join(self.without)}"]))


def whole_models(results: Results, op: str, model: str, libraries: list[str], precision: str) -> list:
    """The cases of whole models, fastest first."""
    cases = [c for c in counted(results.of(op)) if f"{c['shape']} B".startswith(f"{model} B")]
    cases = [c for c in cases if c["precision"] == precision]
    return sorted((c for c in cases if library(c) in libraries), key=lambda case: -case["images_per_second"])


def speed(
    results: Results, of: str, bound: float, op: str, model: str, precision: str, ours: str, theirs: list[str]
) -> Iterator[Figure]:
    """The ratio of our images per second to those of the fastest of theirs, both settings beside it.

    For a latency it is the ratio of seconds, which may be at most `bound`.
    """
    pairs = ([whole_models(run, op, model, names, precision) for names in ([ours], theirs)] for run in results.by_run())
    own, others = next(filter(all, pairs), ([], []))
    if not own:
        yield Figure(of, None, bound, op == "latency")
    else:
        first, second = (cases[0]["images_per_second"] for cases in (own, others))
        setting = f"{first:,.0f} images/s of {own[0]['impl']} by {second:,.0f} of {others[0]['impl']}"
        strongest = [] if theirs == [VITFAST] else ["max-autotune"]
        strongest += [GRAPHS] if any(f" {how} " in own[0]["impl"] for how in (GRAPHS, "graphed")) else []
        without = [how for how in strongest if not any(f" {how} {precision}" in i["impl"] for i in others)]
        ratio = second / first if op == "latency" else first / second
        yield Figure(of, ratio, bound, op == "latency", setting, without)


def peak_share(results: Results, op: str) -> Iterator[Figure]:
    """The share of the data sheet's peak that B/16 reaches."""
    cases = whole_models(results, op, MAIN, [VITFAST], "bf16")
    if cases and cases[0]["mfu_datasheet"]:
        share, impl = cases[0]["mfu_datasheet"], cases[0]["impl"]
        yield Figure("share of the peak by the data sheet", share, PEAK[op], setting=impl)


def operation(results: Results, op: str, shape: str, direction: str) -> tuple[dict | None, list[dict]]:
    """Our case at the largest batch, and the others' cases at that shape."""
    cases = [c for c in results.of(op) if c["direction"] == direction and c["shape"].startswith(f"{shape} B")]
    ours = max((c for c in cases if c["impl"] == VITFAST), key=lambda case: case["bytes"], default=None)
    return ours, [case for case in cases if ours and case is not ours and case["shape"] == ours["shape"]]


def against(
    results: Results, ops: list[str], directions: list[str], bounds: dict[str, float], strongest: list[str], needed=""
) -> Iterator[Figure]:
    """The best other implementation's time over ours, by operation, shape (of bounds) and direction.

    Those of the strongest implementations that have no time are named. needed: there is no figure until an
    implementation whose name starts with this has a time.
    """
    for op, (shape, bound), direction in itertools.product(ops, bounds.items(), directions):
        for run in results.by_run():
            ours, others = operation(run, op, shape, direction)
            times = {case["impl"]: case["median"] for case in others}
            if any(impl.startswith(needed) for impl in times):
                ratio, without = min(times.values()) / ours["median"], [i for i in strongest if i not in times]
                yield Figure(f"{op} {shape} {direction}", ratio, bound, without=without)
                break
        else:
            yield Figure(f"{op} {shape} {direction}", None, bound)


def layer_norm(results: Results) -> Iterator[Figure]:
    """The share of the copy bandwidth, which is that of the floor, as there is no matrix product."""
    for shape, direction in itertools.product((MAIN, "L/16 224", "H/14 224"), BOTH):
        ours, _ = operation(results, "add_layer_norm", shape, direction)
        if ours:
            yield Figure(f"{shape} {direction}", ours["percent_of_floor"] / 100, 0.9)


def memory(results: Results) -> Iterator[Figure]:
    for precision, bound in (("amp", 0.6), ("bf16", 0.65)):
        found = {}
        for run in results.by_run():
            theirs = [c for c in whole_models(run, "train", MAIN, ["timm"], precision) if " compile " in c["impl"]]
            for ours in whole_models(run, "train", MAIN, [VITFAST], "bf16"):
                if theirs and ours["peak_mib"] and theirs[0]["peak_mib"]:
                    name, ratio = ours["impl"].removesuffix(" again"), ours["peak_mib"] / theirs[0]["peak_mib"]
                    of, pace = f"{name} by timm {precision} compiled", f"{ours['images_per_second']:,.0f} images/s"
                    found.setdefault(name, Figure(of, ratio, bound, at_most=True, setting=pace))
        yield from found.values()


def checks(results: Results) -> Iterator[Figure]:
    for name, code in results.checks.items():
        yield Figure(f"{name}: exit code", code, 0, at_most=True)


def loss_curves(results: Results, ours: str) -> Iterator[Figure]:
    """The largest difference, over windows of steps, between our mean over seeds and timm's.

    It is in standard deviations of a run between seeds, which count as 0.001 at least.
    """
    groups, measured = results.grouped(lambda case: f"{case['shape']} {case['precision']}", "loss curve"), False
    name_of = "" if ours == VITFAST else f", {ours}"
    for name, cases in groups.items():
        runs = {(library(case), case["seed"]): case["losses"] for case in cases}
        seeds = [seed for of, seed in runs if of == ours and ("timm", seed) in runs]
        if len(seeds) > 1:
            curves, measured = np.array([[runs[of, seed] for seed in seeds] for of in (ours, "timm")]), True
            spread = np.sqrt(curves.var(1, ddof=1).mean(0))
            value = (np.abs(np.subtract(*curves.mean(1))) / np.maximum(spread, 1e-3)).max()
            yield Figure(f"{name}{name_of}, in deviations", value, 2.0, at_most=True, setting=f"{len(seeds)} seeds")
    if not measured:
        yield Figure(f"S/16 224 B128 bf16{name_of}, in deviations", None, 2.0, at_most=True)


STAGES = ("forward", "memory", "files")


def embeddings(results: Results) -> Iterator[Figure]:
    """Our images per second divided by those of a script of timm's parts, at each stage."""
    found = {f"{case['shape']}, {case['stage']}": case["ratio"] for case in results.of("embed")}
    for of in found | dict.fromkeys(f"{MAIN} B256, {stage}" for stage in STAGES):
        yield Figure(f"{of}, by a script of timm's parts", found.get(of), 1.0)


BOTH = ["forward", "backward"]
SDPA = ["sdpa flash", "sdpa cudnn", "flash-attn 3", "flash-attn 4"]
UNFOLDING = ["compile", "compile unfold", "max-autotune"]
OTHER_MODELS = [
    (speed, f"{model} {of}", SPEED, "train", model, precision, ours, PEERS)
    for model in ("S/16 224", "L/16 224", "H/14 224", "B/16 384")
    for ours, precision, of in ((VITFAST, "bf16", "bf16"), (ACCELERATED, "amp", "accelerate amp"))
]
# What -> the functions of the results that yield the figures, each with its arguments.
TARGETS: dict[str, list[tuple]] = {
    "gpu tests, `vitfast doctor`, compute-sanitizer": [(checks,)],
    STEP: [
        (speed, "bf16 by timm bf16", SPEED, "train", MAIN, "bf16", VITFAST, ["timm"]),
        (speed, "accelerate amp by timm amp", SPEED, "train", MAIN, "amp", ACCELERATED, ["timm"]),
        (peak_share, "train"),
    ],
    OTHERS: OTHER_MODELS,
    INFERENCE: [
        (speed, "throughput by the best peer's", SPEED, "throughput", MAIN, "bf16", VITFAST, PEERS),
        (peak_share, "throughput"),
        (speed, "latency of one image by the best peer's", 0.8, "latency", f"{MAIN} B1", "bf16", VITFAST, PEERS),
    ],
    "attention N = 197, 257, 577, forward and backward": [
        (against, ["attention"], BOTH, {MAIN: 1.3, "H/14 224": 1.3, "B/16 384": 1.1}, SDPA),
    ],
    "residual add + LayerNorm, D = 768, 1024, 1280": [(layer_norm,)],
    "fc1 + GELU and the MLP block, forward and backward": [
        (against, ["linear_gelu", "mlp_block"], BOTH, {MAIN: 1.2}, ["max-autotune"], "compile"),
    ],
    "patch embedding from uint8": [(against, ["patch_embed uint8"], ["forward"], {MAIN: 3.0}, UNFOLDING)],
    MEMORY: [(memory,)],
    "`vitfast.accelerate(timm model)`": [
        (speed, "bf16 by our own ViT", 0.95, "train", MAIN, "bf16", ACCELERATED, [VITFAST]),
    ],
    BY_BACKEND: [
        (speed, "bf16 by our own ViT", 0.97, "train", MAIN, "bf16", BACKEND, [VITFAST]),
        (speed, "amp by timm amp", SPEED, "train", MAIN, "amp", BACKEND, ["timm"]),
        (speed, "throughput by our own ViT", 0.97, "throughput", MAIN, "bf16", BACKEND, [VITFAST]),
    ],
    BY_EMBED: [(embeddings,)],
    CURVES: [(loss_curves, VITFAST), (loss_curves, BACKEND)],
}


def figures(results: Results) -> Iterator[tuple[str, Figure]]:
    """(the name of its target, figure) of every figure."""
    for what, parts in TARGETS.items():
        for of, *rest in parts:
            yield from ((what, figure) for figure in of(results, *rest))


def target_rows(results: Results) -> list[list[str]]:
    """A row for each figure that has a value: target, figure, what is wanted, value, and its cases."""
    found = ((what, figure) for what, figure in figures(results) if figure.value is not None)
    return [[what, figure.of, figure.wanted, figure.shown, figure.details] for what, figure in found]


def figure_rows(gpus: list[Results]) -> tuple[list[list[str]], list[str]]:
    """A row for each figure, with its value on each GPU; and the settings of peers without a time.

    A row has the target, what the figure is of, what is wanted, what a question predicts (questions.py), and the
    values. A figure without a value has a row where it is predicted.
    """
    found, without, predicted = {what: {} for what in TARGETS}, {}, predictions()
    for i, results in enumerate(gpus):
        for what, figure in figures(results):
            if figure.value is not None or (what, figure.of) in predicted:
                values = found[what].setdefault((figure.of, figure.wanted), ["-"] * len(gpus))
                values[i] = figure.shown
                without |= dict.fromkeys(figure.without)
    rows = []
    for what, by_figure in found.items():
        for title, ((of, wanted), values) in zip([what, *[""] * len(by_figure)], by_figure.items()):
            expected = predicted.get((what, of))
            rows.append([title, of, wanted, "-" if expected is None else f"{expected:.2f}", *values])
    return rows, [*without]
