"""Tables and plots from the result files of a GPU; what is lost, failed or skipped is shown too.

    python bench/report.py              # writes bench/results/README.md, the plots, and the speed section of README.md
    python bench/report.py --check      # exit code 1 where one of these is not what the committed JSON files give
    python bench/report.py --folder DIR # prints the tables of one folder; with --targets the targets alone

Every folder of bench/results/ that holds results is a GPU, but `local`, which is not committed. What a file must have,
and which of several counts, stands in result_files.py.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from result_files import FILES_OP, MODEL_OPS, PACKED_OPS, Results, counted, library, load
from targets import ACCELERATED, VITFAST, target_rows

HERE = Path(__file__).parent
START, END = "<!-- speed -->", "<!-- /speed -->"
NOTHING = (
    "No GPU result is committed yet: there is no speed claim. `bench/gpu.sh all OUT` measures one, and\n"
    "`tar -xzf OUT/results.tar.gz -C bench/results/<gpu>` puts it here.\n"
)
HOW_TO_READ = """Written by `bench/report.py` from the JSON files beside it; how everything is measured stands in
`bench/harness.py`, `bench/peers.py` and `bench/bench_model.py`. Times are medians, ± is the interquartile range. "%
floor" is the share of the time that the work needs at least (`vitfast/tools/cost/work.py`) at the ceilings measured in
the same run: once for all processes of a stage of `bench/gpu.sh`, on the same machine. "vitfast" in the last column is
how many times faster vitfast is than the fastest other implementation: **below 1.00 it lost**. Ratios are of equal
precision, and name the settings of peers that have no time. "again" is the same case measured a second time, after
its peers: the slower of the two counts. Under amp vitfast's own ViT keeps its residual stream in bf16 where timm's
keeps fp32; `accelerate(timm)` keeps timm's, so that is the pair of equal numerics. "error" is the largest relative
error against float64, by norm, of the logits and in training of all gradients. The batch of "throughput" is each
library's best of several, searched with its eager model in bf16 (`batch_search`) and used for all its settings. Of
images of many sizes (`bench/mixes.py`) "vitfast" is packed, "padded" the share of the pairs of a query and a key, or of
a step's tokens, that are padding, and TFLOP/s count what is needed without it.
"""


def cell(text: object) -> str:
    """One line without a bare "|", which would end the cell."""
    return " ".join(str(text).split()).replace("|", "\\|")


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; the first column is text, the others numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines) + "\n"


def number(value: float | None, digits: int = 3) -> str:
    """Three digits that count, thousands apart; "-" for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def formatted(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def median(case: dict) -> float:
    return case["stats"]["median"]


def spread(case: dict, per_second: float) -> str:
    return f"{number(per_second * median(case))} ± {number(per_second * case['stats']['iqr'], 2)}"


def machine_lines(results: Results) -> str:
    """A line for each machine: versions and commit, and the ceilings of each of its runs."""
    lines = {}
    for facts in results.machines:
        facts = dict(facts)
        ceilings, device = facts.pop("ceilings"), facts.pop("device")
        sheet = facts.pop("datasheet_bf16_flops", None)
        words = ", ".join(f"{key} {value}" for key, value in facts.items())
        promised = f" (bf16 by the data sheet: {number(sheet / 1e12)})" if sheet else ""
        rates = {
            k: f"{number(r / 1e9)} GB/s" if k == "copy" else f"{number(r / 1e12)} TFLOP/s" if r else "failed"
            for k, r in ceilings.items()
        }
        measured = ", ".join(f"{key} {rate}" for key, rate in rates.items())
        lines.setdefault(cell(f"{device}: {words}"), []).append(f"{measured}{promised}")
    kept = ((words, "; ".join(dict.fromkeys(runs))) for words, runs in lines.items())
    return "".join(f"- {words}. Ceilings, measured in the same run: {runs}\n" for words, runs in kept)


def op_table(cases: list[dict], op: str) -> str:
    """A row per shape and direction: every implementation's time, share of the floor, our ratio.

    The share is ours, or the best one's without us; the ratio is that of the best other time to ours.
    """
    found, impls = {}, list(dict.fromkeys(case["extra_info"]["impl"] for case in cases))
    for case in cases:
        info = case["extra_info"]
        found.setdefault(f"{info['shape']} {info['direction']}", {})[info["impl"]] = case
    lines = []
    for name, by_impl in found.items():
        ours, others = by_impl.get(VITFAST), [case for impl, case in by_impl.items() if impl != VITFAST]
        best = min(others, key=median, default=None)
        times = [spread(by_impl[impl], 1e6) if impl in by_impl else "-" for impl in impls]
        share = f"{(ours or best)['extra_info']['percent_of_floor']:.0f} %"
        lines.append([name, *times, share, f"{median(best) / median(ours):.2f}" if ours and best else "-"])
    return f"#### {cell(op)} (µs)\n\n" + table(["shape", *impls, "% floor", VITFAST], lines)


COLUMNS: dict[str, Callable[[dict, dict], str]] = {  # header -> the cell, of a case and its extra_info
    "implementation": lambda case, info: info["impl"],
    "case": lambda case, info: f"{info['shape']} {info['impl']}",
    "batch": lambda case, info: str(info["batch"]),
    "images/s": lambda case, info: number(info["images_per_second"]),
    "the same in memory": lambda case, info: number(info["images_per_second_in_memory"]),
    "waiting for data": lambda case, info: f"{info['waiting_for_data']:.0%}",
    "loader processes": lambda case, info: str(info["workers"]),
    "ms": lambda case, info: spread(case, 1e3),
    "padded": lambda case, info: formatted(info["padded_share"], ".1%"),
    "TFLOP/s": lambda case, info: number(info.get("model_flops", info["flops"]) / median(case) / 1e12),
    "MFU of ceiling": lambda case, info: f"{info['mfu_ceiling']:.1%}",
    "MFU of data sheet": lambda case, info: formatted(info["mfu_datasheet"], ".1%"),
    "peak GiB": lambda case, info: formatted(info["peak_mib"] and info["peak_mib"] / 1024, ".1f"),
    "attention": lambda case, info: info["attention"],
    "error": lambda case, info: formatted(info.get("error"), ".1e"),
}
MODEL_COLUMNS = "implementation, batch, images/s, ms, TFLOP/s, MFU of ceiling, MFU of data sheet, peak GiB"
MODEL_COLUMNS += ", attention, error"
PACKED_COLUMNS = "implementation, ms, padded, TFLOP/s, peak GiB, error"
FILES_COLUMNS = "case, images/s, the same in memory, waiting for data, loader processes"


def case_table(cases: list[dict], title: str, columns: str) -> str:
    """A row per case, fastest first (by images/s where it has that: batches differ)."""
    slowness = lambda case: -case["extra_info"].get("images_per_second", -median(case))  # noqa: E731
    lines = [
        [COLUMNS[name](case, case["extra_info"]) or "-" for name in columns.split(", ")]
        for case in sorted(cases, key=slowness)
    ]
    return f"#### {cell(title)}\n\n" + table(columns.split(", "), lines)


def packed_groups(results: Results, op: str) -> dict[str, list[dict]]:
    """Title -> the cases of a mix and direction."""
    found = {}
    for case in results.of(op):
        info = case["extra_info"]
        sizes = f"{number(info['images'])} images, {number(info['tokens'])} tokens"
        found.setdefault(f"{op}: {info['shape']} {info['direction']} ({sizes})", []).append(case)
    return found


def damaged_lines(results: Results) -> str:
    return "".join(f"- {cell(name)} is left out: {cell(why)}\n" for name, why in results.damaged.items())


def targets_table(results: Results) -> str:
    """The targets alone; where there is no result at all, one line that says so."""
    if not (results.measured or results.checks):
        return f"no result in {results.name}\n{damaged_lines(results)}"
    return table(["what", "wanted", "measured"], target_rows(results)) + damaged_lines(results)


def sections(results: Results) -> str:
    """Everything about one GPU."""
    found = [machine_lines(results), "#### Targets\n\n" + targets_table(results)]
    for op in MODEL_OPS:
        found += [case_table(cases, f"{op}: {model}", MODEL_COLUMNS) for model, cases in results.by_model(op).items()]
    if files := results.of(FILES_OP):
        found.append(case_table(files, "Training from JPEG files", FILES_COLUMNS))
    for op in PACKED_OPS:
        found += [case_table(cases, name, PACKED_COLUMNS) for name, cases in packed_groups(results, op).items()]
    ops = dict.fromkeys(case["extra_info"]["op"] for case in results.measured.values())
    found += [op_table(results.of(op), op) for op in ops if op not in (*MODEL_OPS, *PACKED_OPS, FILES_OP, "loss curve")]
    missing = [[case["name"], case["state"], case["reason"]] for case in results.missing.values()]
    found.append("#### Without a time\n\n" + table(["case", "state", "reason"], missing) if missing else "")
    return "\n".join(found)


def speed_table(results: Results) -> str:
    """For the project's README: vitfast and `accelerate` against the fastest peer in equal precision."""
    lines = []
    for op in MODEL_OPS:
        for model, cases in results.by_model(op).items():
            for precision in dict.fromkeys(case["extra_info"]["precision"] for case in cases):
                infos = [info for info in counted(cases) if info["precision"] == precision]
                lines.append([f"{op} {model} {precision}", *speeds(infos)])
    header = ["images/s", "vitfast", "accelerate(timm)", "fastest peer", "vitfast ÷ peer", "accelerate ÷ peer"]
    whole = table(header, lines) if lines else "No whole model has been measured on it.\n"
    return f"{machine_lines(results)}\n{whole}"


def speeds(infos: list[dict]) -> list[str]:
    """Images/s of vitfast, `accelerate` and the fastest peer, and the first two's ratios to the third."""
    best = {}
    for info in sorted(infos, key=lambda info: info["images_per_second"]):
        best[library(info) if library(info) in (VITFAST, ACCELERATED) else "peer"] = info
    found = [best[name]["images_per_second"] if name in best else None for name in (VITFAST, ACCELERATED, "peer")]
    peer = f"{number(found[2])} ({best['peer']['impl']})" if found[2] else "-"
    return [*map(number, found[:2]), peer, *(f"{own / found[2]:.2f}" if own and found[2] else "-" for own in found[:2])]


def gpus(folder: Path) -> list[Results]:
    found = [load(path) for path in sorted(folder.iterdir()) if path.is_dir() and path.name != "local"]
    return [r for r in found if r.measured or r.missing or r.checks or r.damaged]


def plotted(results: Results) -> dict[str, tuple[str, str]]:
    """The plots that this GPU's results give: file name -> (kind, op)."""
    infos = [case["extra_info"] for case in results.measured.values()]
    plots = [
        ("roofline", op) for op in dict.fromkeys(i["op"] for i in infos if i["bytes"] and "images_per_second" not in i)
    ]
    plots += [(kind, op) for op in ("train", "throughput") if results.of(op) for kind in ("speed", "memory")]
    return {f"{kind}-{op}.svg".replace(" ", "-"): (kind, op) for kind, op in plots}


def documents(folder: Path, readme: Path) -> dict[Path, str]:
    """The text that every generated file should hold."""
    found = gpus(folder)
    pictures = lambda r: "".join(f"![{Path(name).stem}]({r.name}/{name})\n" for name in plotted(r))  # noqa: E731
    body = "\n".join(f"## {r.name}\n\n{sections(r)}\n{pictures(r)}" for r in found) or NOTHING
    before, rest = readme.read_text().split(START)
    more = "Everything: [bench/results](bench/results/README.md).\n"
    speed = "\n".join(f"{speed_table(r)}\n{more}" for r in found) or NOTHING
    spoken = f"{before}{START}\n\n{speed}\n{END}{rest.split(END)[1]}"
    return {folder / "README.md": f"# Results\n\n{HOW_TO_READ}\n{body}", readme: spoken}


def main(argv: list[str] | None = None, folder: Path = HERE / "results", readme: Path = HERE.parent / "README.md"):
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where something is stale")
    parser.add_argument("--folder", type=Path, help="print the tables of this folder")
    parser.add_argument("--targets", action="store_true", help="with --folder: print its targets alone")
    args = parser.parse_args(argv)
    if args.targets and not args.folder:
        parser.error("--targets needs --folder DIR")
    if args.folder:
        if not args.folder.is_dir():
            parser.error(f"there is no folder {args.folder}")
        found = load(args.folder)
        print(targets_table(found).rstrip() if args.targets else sections(found))
        return 0
    texts = documents(folder, readme)
    if args.check:
        stale = [path for path, text in texts.items() if not path.is_file() or path.read_text() != text]
        stale += [p for r in gpus(folder) for name in plotted(r) if not (p := folder / r.name / name).is_file()]
        print("\n".join(f"{path} is stale: run python bench/report.py" for path in stale) or "the report is up to date")
        return 1 if stale else 0
    for path, text in texts.items():
        path.write_text(text)
    for results in gpus(folder):
        import plots

        plots.draw(results, plotted(results), folder / results.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
