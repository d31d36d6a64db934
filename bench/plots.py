"""The plots of a GPU's results: rooflines of operations, bars of speed and memory of models."""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "vitfast"  # the same data give the same file
import matplotlib.pyplot as plt  # noqa: E402
from result_files import Results, by_model, plotted  # noqa: E402

COLOURS = {"vitfast": "#0b6e4f", "vitfast.accelerate(timm)": "#6bbf59"}  # of ours; everybody else gets greys and blues
OTHERS = ("#33415c", "#5c677d", "#7d8597", "#979dac", "#a9b4c2", "#3a6ea5", "#6fa8dc", "#9fc5e8")


def colour(impl: str, others: list[str]) -> str:
    ours = next((c for name, c in reversed(COLOURS.items()) if impl == name or impl.startswith(f"{name} ")), None)
    return ours or OTHERS[others.index(impl) % len(OTHERS)]


def roofline(results: Results, op: str, axes) -> None:
    """Rate over arithmetic intensity under the measured roof; bytes/s where there is no product."""
    cases = [case for case in results.of(op) if case["extra_info"]["bytes"]]  # a ceiling of matrix products moves none
    if not cases:
        return
    ceilings, infos = cases[-1]["ceilings"], [case["extra_info"] for case in cases]
    impls, flops = list(dict.fromkeys(i["impl"] for i in infos)), all(i["flops"] for i in infos)
    xs = []
    for impl in impls:
        mine = [i for i in infos if i["impl"] == impl]
        x = [i["flops"] / i["bytes"] if flops else i["bytes"] / 1e6 for i in mine]
        y = [i["tflops" if flops else "gigabytes_per_second"] for i in mine]
        axes.scatter(x, y, label=impl, color=colour(impl, impls), alpha=0.8)
        xs += x
    ends = [min(xs) / 1.5, max(xs) * 1.5]
    steps = [ends[0] * (ends[1] / ends[0]) ** (i / 100) for i in range(101)]
    top = ceilings.get(infos[0]["dtype"])
    roof = [min(top, x * ceilings["copy"]) / 1e12 for x in steps] if flops else [ceilings["copy"] / 1e9] * len(steps)
    axes.plot(steps, roof, color="black", linewidth=1)
    axes.set(xscale="log", yscale="log" if flops else "linear", title=f"{op}, {results.name}")
    axes.set(xlabel="FLOP per byte" if flops else "MB moved", ylabel="TFLOP/s" if flops else "GB/s")
    axes.legend(fontsize="small")


def bars(results: Results, op: str, key: str, scale: float, label: str, axes) -> None:
    """A group of bars for each model, one bar for each implementation."""
    groups = by_model(results, op)
    infos = [(number, case["extra_info"]) for number, cases in enumerate(groups.values()) for case in cases]
    impls = list(dict.fromkeys(info["impl"] for _, info in infos))
    width = 0.85 / len(impls)
    for i, impl in enumerate(impls):
        found = {number: info[key] for number, info in infos if info["impl"] == impl and info[key] is not None}
        places, heights = [number + i * width for number in found], [value * scale for value in found.values()]
        axes.bar(places, heights, width, label=impl, color=colour(impl, impls))
    axes.set_xticks([g + width * (len(impls) - 1) / 2 for g in range(len(groups))], list(groups))
    axes.set(title=f"{op}, {results.name}", ylabel=label)
    axes.legend(fontsize="x-small", ncols=2)


def draw(results: Results, folder: Path) -> None:
    """Writes every plot of `plotted` into the folder."""
    for name, (kind, op) in plotted(results).items():
        figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
        if kind == "roofline":
            roofline(results, op, axes)
        elif kind == "speed":
            bars(results, op, "images_per_second", 1.0, "images/s", axes)
        else:
            bars(results, op, "peak_mib", 1 / 1024, "peak memory, GiB", axes)
        figure.savefig(folder / name, metadata={"Date": None})
        plt.close(figure)
