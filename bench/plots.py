"""The plots of a GPU's results: rooflines of operations, bars of speed and memory of models."""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "vitfast"  # the same data give the same file
import matplotlib.pyplot as plt  # noqa: E402
from result_files import Results  # noqa: E402

OURS = {"vitfast.accelerate(timm)": "#6bbf59", "vitfast": "#0b6e4f"}  # everybody else gets greys and blues
OTHERS = ("#33415c", "#5c677d", "#7d8597", "#979dac", "#a9b4c2", "#3a6ea5", "#6fa8dc", "#9fc5e8")


def colours(impls: list[str]) -> dict[str, str]:
    """A colour for each implementation."""
    return {impl: OURS.get(impl.split()[0], OTHERS[i % len(OTHERS)]) for i, impl in enumerate(impls)}


def roofline(results: Results, op: str, axes) -> None:
    """Rate over arithmetic intensity under the measured roof; bytes/s where there is no product."""
    cases = [case for case in results.of(op) if case["bytes"]]  # a product's ceiling moves none
    flops, xs = all(case["flops"] for case in cases), []
    for impl, colour in colours(list(dict.fromkeys(case["impl"] for case in cases))).items():
        mine = [case for case in cases if case["impl"] == impl]
        x = [case["flops"] / case["bytes"] if flops else case["bytes"] / 1e6 for case in mine]
        y = [case["tflops" if flops else "gigabytes_per_second"] for case in mine]
        axes.scatter(x, y, label=impl, color=colour, alpha=0.8)
        xs += x
    ends = [min(xs) / 1.5, max(xs) * 1.5]
    steps = [ends[0] * (ends[1] / ends[0]) ** (i / 100) for i in range(101)]
    top, copy = (cases[-1]["ceilings"][key] for key in (cases[0]["dtype"], "copy"))
    axes.plot(steps, [min(top, x * copy) / 1e12 if flops else copy / 1e9 for x in steps], color="black", linewidth=1)
    axes.set(xscale="log", yscale="log" if flops else "linear", title=f"{op}, {results.name}")
    axes.set(xlabel="FLOP per byte" if flops else "MB moved", ylabel="TFLOP/s" if flops else "GB/s")
    axes.legend(fontsize="small")


def bars(results: Results, op: str, key: str, scale: float, label: str, axes) -> None:
    """A group of bars for each model, one bar for each implementation."""
    groups = results.grouped(lambda case: case["shape"].rpartition(" B")[0], op)
    numbered = [(number, case) for number, cases in enumerate(groups.values()) for case in cases]
    impls = colours(list(dict.fromkeys(case["impl"] for _, case in numbered)))
    width = 0.85 / len(impls)
    for i, (impl, colour) in enumerate(impls.items()):
        found = {number: case[key] for number, case in numbered if case["impl"] == impl and case[key] is not None}
        heights = [value * scale for value in found.values()]
        axes.bar([number + i * width for number in found], heights, width, label=impl, color=colour)
    axes.set_xticks([g + width * (len(impls) - 1) / 2 for g in range(len(groups))], list(groups))
    axes.set(title=f"{op}, {results.name}", ylabel=label)
    axes.legend(fontsize="x-small", ncols=2)


def draw(results: Results, plots: dict[str, tuple[str, str]], folder: Path) -> None:
    """Writes the plots (file name -> kind, op) into the folder."""
    for name, (kind, op) in plots.items():
        figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
        if kind == "roofline":
            roofline(results, op, axes)
        elif kind == "speed":
            bars(results, op, "images_per_second", 1.0, "images/s", axes)
        else:
            bars(results, op, "peak_mib", 1 / 1024, "peak memory, GiB", axes)
        figure.savefig(folder / name, metadata={"Date": None})
        plt.close(figure)
