"""What vitfast wants to reach on a GPU, each target beside what the committed results say: measured and met, measured and missed, or not measured yet.

Read by report.py. A ratio is of two cases of the same folder; peers count with the fastest of their settings.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

LIBRARIES = ("vitfast", "vitfast.accelerate(timm)", "timm", "huggingface", "torchvision")


@dataclass(frozen=True)
class Figure:
    """One measured number: what it is of, the number, what it should be at least (or at most)."""

    of: str
    value: float
    bound: float
    at_most: bool = False
    percent: bool = False

    @property
    def met(self) -> bool:
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    def __str__(self) -> str:
        number = f"{100 * self.value:.0f} %" if self.percent else f"{self.value:.2f}"
        return f"{self.of} {number}{'' if self.met else ' **missed**'}"


def library(info: dict) -> str:
    """Whose model a case is."""
    return next(name for name in reversed(LIBRARIES) if info["impl"].startswith(f"{name} "))


def fastest(results, op: str, model: str, *wanted: str, precision: str | None = None) -> dict | None:
    """extra_info of the fastest case of these libraries, in one precision or in any."""
    infos = [case["extra_info"] for case in results.of(op)]
    infos = [i for i in infos if i["shape"].startswith(f"{model} B") and library(i) in wanted and precision in (None, i["precision"])]
    return max(infos, key=lambda i: i["images_per_second"], default=None)


PEERS = LIBRARIES[2:]


def ratio(ours: dict | None, theirs: dict | None, of: str, bound: float, key: str = "images_per_second", at_most: bool = False) -> Iterator[Figure]:
    if ours and theirs and ours.get(key) and theirs.get(key):
        yield Figure(of, ours[key] / theirs[key], bound, at_most)


def training_step(results) -> Iterator[Figure]:
    model, ours = "B/16 224", fastest(results, "train", "B/16 224", "vitfast", precision="bf16")
    yield from ratio(ours, fastest(results, "train", model, "timm", precision="amp"), "of timm amp", 1.5)
    yield from ratio(ours, fastest(results, "train", model, "timm", precision="bf16"), "of timm bf16", 1.3)
    if ours and ours["mfu_datasheet"]:
        yield Figure("of the data sheet's peak", ours["mfu_datasheet"], 0.55, percent=True)


def other_models(results) -> Iterator[Figure]:
    for model in ("S/16 224", "L/16 224", "H/14 224", "B/16 384"):
        yield from ratio(fastest(results, "train", model, "vitfast"), fastest(results, "train", model, *PEERS), model, 1.3)


def inference(results) -> Iterator[Figure]:
    model = "B/16 224"
    yield from ratio(fastest(results, "throughput", model, "vitfast", precision="bf16"), fastest(results, "throughput", model, *PEERS), "throughput", 1.3)
    ours, theirs = fastest(results, "latency", model, "vitfast"), fastest(results, "latency", model, *PEERS)
    if ours and theirs:
        yield Figure("latency of one image", theirs["images_per_second"] / ours["images_per_second"], 0.8, at_most=True)


def operation(results, op: str, shape: str, direction: str) -> tuple[dict | None, list[dict]]:
    """extra_info and seconds of ours and of all others."""
    found = [c["extra_info"] | dict(seconds=c["stats"]["median"]) for c in results.of(op)]
    found = [i for i in found if i["shape"].startswith(f"{shape} B") and not i["shape"].endswith(" B1") and i["direction"] == direction]
    ours = max((i for i in found if i["impl"] == "vitfast"), key=lambda i: i["bytes"], default=None)
    return ours, [i for i in found if i["impl"] != "vitfast" and ours and i["shape"] == ours["shape"]]


def against(results, op: str, shapes: dict[str, float], directions: tuple[str, ...], peers: Callable[[str], bool] = lambda impl: True) -> Iterator[Figure]:
    for shape, bound in shapes.items():
        for direction in directions:
            ours, others = operation(results, op, shape, direction)
            times = [i["seconds"] for i in others if peers(i["impl"])]
            if ours and times:
                yield Figure(f"{op} {shape} {direction}", min(times) / ours["seconds"], bound)


def attention(results) -> Iterator[Figure]:
    shapes = {"B/16 224": 1.3, "H/14 224": 1.3, "B/16 384": 1.1}  # N = 197, 257, 577
    yield from against(results, "attention", shapes, ("forward", "backward", "both"))
    ours, _ = operation(results, "attention", "B/16 224", "forward")
    if ours:
        floor = ours["bytes"] / results.machines[-1]["ceilings"]["copy"]
        yield Figure("forward at 197, times its memory floor", ours["seconds"] / floor, 1.8, at_most=True)


def layer_norm(results) -> Iterator[Figure]:
    for shape in ("B/16 224", "L/16 224", "H/14 224"):
        for direction in ("forward", "backward"):
            ours, _ = operation(results, "add_layer_norm", shape, direction)
            if ours:
                share = 1e9 * ours["gigabytes_per_second"] / results.machines[-1]["ceilings"]["copy"]
                yield Figure(f"{shape} {direction}", share, 0.9, percent=True)


def mlp(results) -> Iterator[Figure]:
    for op in ("linear_gelu", "mlp_block"):
        yield from against(results, op, {"B/16 224": 1.2}, ("forward", "both"), lambda impl: impl.startswith(("compile", "max-autotune")))


def patch_embedding(results) -> Iterator[Figure]:
    yield from against(results, "patch_embed uint8", {"B/16 224": 3.0}, ("forward",), lambda impl: not impl.endswith("unfold"))


def memory(results) -> Iterator[Figure]:
    ours = fastest(results, "train", "B/16 224", "vitfast", precision="bf16")
    for precision, bound in (("amp", 0.6), ("bf16", 0.65)):
        theirs = fastest(results, "train", "B/16 224", "timm", precision=precision)
        yield from ratio(ours, theirs, f"of timm {precision}", bound, "peak_mib", at_most=True)


def accelerated(results) -> Iterator[Figure]:
    for precision, bound in (("bf16", 0.95), ("amp", 0.0)):  # amp keeps timm's fp32 residual: reported, no target
        pair = (fastest(results, "train", "B/16 224", name, precision=precision) for name in ("vitfast.accelerate(timm)", "vitfast"))
        yield from ratio(*pair, f"{precision} of our own ViT", bound)


def checks(results) -> Iterator[Figure]:
    for name, code in results.checks.items():
        yield Figure(name, float(code == 0), 1.0, percent=True)


def loss_curves(results) -> Iterator[Figure]:
    if results.curves:
        yield Figure(f"{results.curves['steps']} steps, largest distance in seed deviations", results.curves["distance"], 2.0, at_most=True)


TARGETS: tuple[tuple[str, str, Callable], ...] = (
    ("gpu tests, `vitfast doctor`, compute-sanitizer", "all pass", checks),
    ("B/16 224 training step, batch 256, bf16", "1.5x timm amp, 1.3x timm bf16, 55 % of the data sheet's peak", training_step),
    ("S/16, L/16, H/14, B/16@384 training step", "1.3x the best peer", other_models),
    ("B/16 inference, bf16", "1.3x the best peer's throughput, 0.8x its latency", inference),
    ("attention N = 197, 257, 577", "1.3x, 1.3x, 1.1x the best SDPA backend; forward at 197 within 1.8x of its memory floor", attention),
    ("residual add + LayerNorm, D = 768, 1024, 1280", "90 % of the copy bandwidth", layer_norm),
    ("fc1 + GELU and the MLP half", "1.2x cuBLAS + compiled pointwise", mlp),
    ("patch embedding from uint8", "3x normalise + convolution", patch_embedding),
    ("peak memory of the B/16 training step", "0.6x timm amp, 0.65x timm bf16", memory),
    ("`vitfast.accelerate(timm model)`", "within 5 % of our own ViT in bf16; amp reported", accelerated),
    ("loss curves, ours against timm in bf16", "same within seed noise over 3 seeds", loss_curves),
)


def target_rows(results) -> list[list[str]]:
    """A row for each target: what, wanted, measured."""
    return [[what, wanted, "; ".join(map(str, measure(results))) or "not measured yet"] for what, wanted, measure in TARGETS]
