"""Tables and plots from the result files of a GPU; what is lost, failed or skipped is shown too.

    python bench/report.py              # writes the plots, and what is marked in bench/results/README.md and README.md
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


def cell(text: object) -> str:
    """One line without a bare "|", which would end the cell."""
    return " ".join(str(text).split()).replace("|", "\\|")


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; the first column is text, the others numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines) + "\n"


def number(value: float | None, digits: int = 3, form: str = "") -> str:
    """Three digits that count, thousands apart, or in another form; "-" for None."""
    if value is None:
        return "-"
    return format(value, form or (",.0f" if abs(value) >= 10 ** (digits - 1) else f".{digits}g"))


def spread(case: dict, per_second: float) -> str:
    return f"{number(per_second * case['median'])} ± {number(per_second * case['iqr'], 2)}"


def machine_lines(results: Results) -> str:
    """A line for each machine: versions and commit, and the ceilings of each of its runs."""
    lines = {}
    for facts in map(dict, results.machines):
        ceilings, device, sheet = (facts.pop(key, None) for key in ("ceilings", "device", "datasheet_bf16_flops"))
        words = ", ".join(f"{key} {value}" for key, value in facts.items())
        promised = f" (bf16 by the data sheet: {number(sheet / 1e12)})" if sheet else ""
        rates = [
            f"copy {number(rate / 1e9)} GB/s" if key == "copy" else f"{key} {number(rate / 1e12)} TFLOP/s"
            for key, rate in ceilings.items()
        ]
        runs = lines.setdefault(cell(f"{device}: {words}"), {})
        runs[f"{', '.join(rates)}{promised}"] = True
    return "".join(f"- {w}. Ceilings, measured in the same run: {'; '.join(runs)}\n" for w, runs in lines.items())


def op_table(cases: list[dict], op: str) -> str:
    """A row per shape and direction: every implementation's time, share of the floor, our ratio.

    The share is ours, or the best one's without us; the ratio is that of the best other time to ours.
    """
    impls, found, lines = list(dict.fromkeys(case["impl"] for case in cases)), {}, []
    for case in cases:
        found.setdefault(f"{case['shape']} {case['direction']}", {})[case["impl"]] = case
    for name, by_impl in found.items():
        ours, others = by_impl.get(VITFAST), [case for impl, case in by_impl.items() if impl != VITFAST]
        best = min(others, key=lambda case: case["median"], default=None)
        times = [spread(by_impl[impl], 1e6) if impl in by_impl else "-" for impl in impls]
        share = f"{(ours or best)['percent_of_floor']:.0f} %"
        lines.append([name, *times, share, f"{best['median'] / ours['median']:.2f}" if ours and best else "-"])
    return f"#### {cell(op)} (µs)\n\n" + table(["shape", *impls, "% floor", VITFAST], lines)


COLUMNS: dict[str, Callable[[dict], str]] = {  # header -> the cell, of a case
    "implementation": lambda case: case["impl"],
    "case": lambda case: f"{case['shape']} {case['impl']}",
    "batch": lambda case: str(case["batch"]),
    "images/s": lambda case: number(case["images_per_second"]),
    "the same in memory": lambda case: number(case["images_per_second_in_memory"]),
    "waiting for data": lambda case: f"{case['waiting_for_data']:.0%}",
    "loader processes": lambda case: str(case["workers"]),
    "ms": lambda case: spread(case, 1e3),
    "padded": lambda case: number(case["padded_share"], form=".1%"),
    "TFLOP/s": lambda case: number(case.get("model_flops", case["flops"]) / case["median"] / 1e12),
    "MFU of ceiling": lambda case: f"{case['mfu_ceiling']:.1%}",
    "MFU of data sheet": lambda case: number(case["mfu_datasheet"], form=".1%"),
    "peak GiB": lambda case: number(case["peak_mib"] and case["peak_mib"] / 1024, form=".1f"),
    "attention": lambda case: case["attention"],
    "error": lambda case: number(case.get("error"), form=".1e"),
}
MODEL_COLUMNS = "implementation, batch, images/s, ms, TFLOP/s, MFU of ceiling, MFU of data sheet, peak GiB"
MODEL_COLUMNS += ", attention, error"
PACKED_COLUMNS = "implementation, ms, padded, TFLOP/s, peak GiB, error"
FILES_COLUMNS = "case, images/s, the same in memory, waiting for data, loader processes"


def case_table(cases: list[dict], title: str, columns: str) -> str:
    """A row per case, fastest first (by images/s where it has that: batches differ)."""
    cases = sorted(cases, key=lambda case: -case.get("images_per_second", -case["median"]))
    lines = [[COLUMNS[name](case) or "-" for name in columns.split(", ")] for case in cases]
    return f"#### {cell(title)}\n\n" + table(columns.split(", "), lines)


def mix(case: dict) -> str:
    """The title of a mix and direction."""
    sizes = f"{number(case['images'])} images, {number(case['tokens'])} tokens"
    return f"{case['op']}: {case['shape']} {case['direction']} ({sizes})"


def model(case: dict) -> str:
    """The title of a model and resolution, of any batch: each library has its own best one."""
    return f"{case['op']} {case['shape'].rpartition(' B')[0]}"


TABLES = (  # operations, the title of a case's table, its columns
    (MODEL_OPS, model, MODEL_COLUMNS),
    ((FILES_OP,), lambda case: "Training from JPEG files", FILES_COLUMNS),
    (PACKED_OPS, mix, PACKED_COLUMNS),
)


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
    for ops, title, columns in TABLES:
        groups = results.grouped(title, *ops)
        found += [case_table(cases, name, columns) for name, cases in groups.items()]
    shown = {"loss curve", *(op for ops, _, _ in TABLES for op in ops)}
    by_op = results.grouped(lambda case: case["op"])
    found += [op_table(cases, op) for op, cases in by_op.items() if op not in shown]
    missing = [[case["name"], case["state"], case["reason"]] for case in results.missing.values()]
    found.append("#### Without a time\n\n" + table(["case", "state", "reason"], missing) if missing else "")
    return "\n".join(found)


def speed_table(results: Results) -> str:
    """For the project's README: vitfast and `accelerate` against the fastest peer in equal precision."""
    groups = results.grouped(lambda case: f"{model(case)} {case['precision']}", *MODEL_OPS)
    lines = [[name, *speeds(counted(cases))] for name, cases in groups.items()]
    header = ["images/s", "vitfast", "accelerate(timm)", "fastest peer", "vitfast ÷ peer", "accelerate ÷ peer"]
    whole = table(header, lines) if lines else "No whole model has been measured on it.\n"
    return f"{machine_lines(results)}\n{whole}"


def speeds(cases: list[dict]) -> list[str]:
    """Images/s of vitfast, `accelerate` and the fastest peer, and the first two's ratios to the third."""
    best = {}
    for case in sorted(cases, key=lambda case: case["images_per_second"]):
        best[library(case) if library(case) in (VITFAST, ACCELERATED) else "peer"] = case
    found = [best[name]["images_per_second"] if name in best else None for name in (VITFAST, ACCELERATED, "peer")]
    peer = f"{number(found[2])} ({best['peer']['impl']})" if found[2] else "-"
    return [*map(number, found[:2]), peer, *(f"{own / found[2]:.2f}" if own and found[2] else "-" for own in found[:2])]


def gpus(folder: Path) -> list[Results]:
    found = [load(path) for path in sorted(folder.iterdir()) if path.is_dir() and path.name != "local"]
    return [r for r in found if r.measured or r.missing or r.checks or r.damaged]


def plotted(results: Results) -> dict[str, tuple[str, str]]:
    """The plots that this GPU's results give: file name -> (kind, op)."""
    cases = [c for c in results.measured.values() if c["bytes"] and "images_per_second" not in c]
    plots = [("roofline", op) for op in dict.fromkeys(case["op"] for case in cases)]
    plots += [(kind, op) for op in ("train", "throughput") if results.of(op) for kind in ("speed", "memory")]
    return {f"{kind}-{op}.svg".replace(" ", "-"): (kind, op) for kind, op in plots}


def documents(folder: Path, readme: Path) -> dict[Path, str]:
    """The text that every generated file should hold."""
    found = gpus(folder)
    pictures = lambda r: "".join(f"![{Path(name).stem}]({r.name}/{name})\n" for name in plotted(r))  # noqa: E731
    more = "Everything: [bench/results](bench/results/README.md).\n"
    texts = {folder / "README.md": [f"## {r.name}\n\n{sections(r)}\n{pictures(r)}" for r in found]}
    texts[readme] = [f"{speed_table(r)}\n{more}" for r in found]
    for path, parts in texts.items():
        before, rest = path.read_text().split(START)
        body = "\n".join(parts) or NOTHING
        texts[path] = f"{before}{START}\n\n{body}\n{END}{rest.split(END)[1]}"
    return texts


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
