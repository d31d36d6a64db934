"""Tables and plots from the result files of a GPU; what is lost, failed or skipped is shown too.

    python bench/report.py              # writes bench/results/README.md, the plots, and the speed section of README.md
    python bench/report.py --check      # exit code 1 where one of these is not what the committed JSON files give
    python bench/report.py --folder DIR # prints the tables of one folder; with --targets the targets alone

Every folder of bench/results/ that holds JSON files is a GPU, but `local`, which is not committed. What a file must
have, and which of several counts, stands in result_files.py.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from result_files import Results, by_model, load, plotted
from targets import ACCELERATED, VITFAST, counted, library, target_rows

HERE = Path(__file__).parent
PACKED_OPS = ("train packed", "packed attention")
MODEL_OPS, OURS = ("train", "throughput", "latency"), (VITFAST, ACCELERATED)
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
images of many sizes (`bench/mixes.py`) "vitfast" is packed, "of vitfast's" is a time over the fastest packed one's,
"padded" the share of the work that is padding by the tiles that are launched (`bench/padding.py`), "-" where these are
not ours to know, and TFLOP/s count what is needed without it.
"""


# ---- tables


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


def _us(case: dict) -> float:
    return 1e6 * case["stats"]["median"]


def _spread(case: dict, per_second: float = 1e6) -> str:
    return f"{number(per_second * case['stats']['median'])} ± {number(per_second * case['stats']['iqr'], 2)}"


def machine_lines(results: Results) -> str:
    """A line for each machine, versions and commit, with the range of each ceiling over its files."""
    runs = {}
    for facts in results.machines:
        others = ("ceilings", "device", "datasheet_bf16_flops")
        words = ", ".join(f"{key} {value}" for key, value in facts.items() if key not in others)
        sheet = facts.get("datasheet_bf16_flops")
        promised = f" (bf16 by the data sheet: {number(sheet / 1e12)})" if sheet else ""
        runs.setdefault((facts["device"], words, promised), []).append(facts["ceilings"])
    lines = []
    for (device, words, promised), ceilings in runs.items():
        rates = []
        for key in ceilings[0]:
            found = [c[key] / (1e9 if key == "copy" else 1e12) for c in ceilings if c.get(key)]
            span = " to ".join(dict.fromkeys(number(rate) for rate in (min(found), max(found)))) if found else "failed"
            rates.append(f"{key} {span} {'GB/s' if key == 'copy' else 'TFLOP/s'}")
        measured = f"Ceilings, measured in the same run: {', '.join(rates)}{promised}"
        lines.append(f"- {cell(f'{device}: {words}')}. {measured}\n")
    return "".join(lines)


def op_table(cases: list[dict], op: str) -> str:
    """A row per shape and direction: every implementation's time, share of the floor, our ratio.

    The share is ours, or the best one's without us; the ratio is that of the best other time to ours.
    """
    found, impls = {}, list(dict.fromkeys(c["extra_info"]["impl"] for c in cases))
    for case in cases:
        info = case["extra_info"]
        found.setdefault(f"{info['shape']} {info['direction']}", {})[info["impl"]] = case
    lines = []
    for name, by_impl in found.items():
        ours, others = by_impl.get("vitfast"), [c for impl, c in by_impl.items() if impl != "vitfast"]
        best = min(others, key=_us, default=None)
        line = [name] + [_spread(by_impl[impl]) if impl in by_impl else "-" for impl in impls]
        line.append(f"{(ours or best)['extra_info']['percent_of_floor']:.0f} %")
        lines.append(line + ([f"{_us(best) / _us(ours):.2f}" if ours and best else "-"] if "vitfast" in impls else []))
    header = ["shape", *impls, "% floor", *(["vitfast"] if "vitfast" in impls else [])]
    return f"#### {cell(op)} (µs)\n\n" + table(header, lines)


def _or_dash(value: float | None, form: str, scale: float = 1) -> str:
    return "-" if value is None else format(scale * value, form)


MODEL_COLUMNS: dict[str, Callable[[dict, dict], str]] = {  # header -> the cell, of a case and its extra_info
    "implementation": lambda case, info: info["impl"],
    "batch": lambda case, info: str(info["batch"]),
    "images/s": lambda case, info: number(info["images_per_second"]),
    "ms": lambda case, info: _spread(case, 1e3),
    "TFLOP/s": lambda case, info: number(info["model_flops"] / case["stats"]["median"] / 1e12),
    "MFU % of ceiling": lambda case, info: f"{100 * info['mfu_ceiling']:.1f}",
    "MFU % of data sheet": lambda case, info: _or_dash(info["mfu_datasheet"], ".1f", 100),
    "peak GiB": lambda case, info: _or_dash(info["peak_mib"], ".1f", 1 / 1024),
    "largest batch in 24 / 80 GiB": lambda case, info: " / ".join(map(str, (info.get("largest_batch") or {}).values())),
    "attention": lambda case, info: info["attention"],
    "error": lambda case, info: _or_dash(info.get("error"), ".1e"),
}


def model_table(cases: list[dict], title: str) -> str:
    """A row per implementation of one model and task, fastest first."""
    fastest_first = sorted(cases, key=lambda case: -case["extra_info"]["images_per_second"])
    lines = [[of(case, case["extra_info"]) or "-" for of in MODEL_COLUMNS.values()] for case in fastest_first]
    return f"#### {cell(title)}\n\n" + table(list(MODEL_COLUMNS), lines)


def files_table(cases: list[dict]) -> str:
    header = ["case", "images/s", "the same in memory", "waiting for data", "loader processes"]
    lines = []
    for info in (case["extra_info"] for case in cases):
        speeds = [number(info[key]) for key in ("images_per_second", "images_per_second_in_memory")]
        waiting = f"{info['waiting_for_data']:.0%}"
        lines.append([f"{info['shape']} {info['impl']}", *speeds, waiting, str(info["workers"])])
    return "#### Training from JPEG files\n\n" + table(header, lines)


PACKED_COLUMNS: dict[
    str, Callable[[dict, dict, dict | None], str]
] = {  # the same; and our packed case, if it has a time
    "implementation": lambda case, info, ours: info["impl"],
    "ms": lambda case, info, ours: _spread(case, 1e3),
    "of vitfast's": lambda case, info, ours: "-" if ours is None else f"{_us(case) / _us(ours):.2f}",
    "padded": lambda case, info, ours: _or_dash(info["padded_share"], ".1%"),
    "TFLOP/s": lambda case, info, ours: number(info["tflops"]),
    "peak GiB": lambda case, info, ours: _or_dash(info["peak_mib"], ".1f", 1 / 1024),
    "error": lambda case, info, ours: _or_dash(info.get("error"), ".1e"),
}


def packed_tables(cases: list[dict], op: str) -> str:
    """For each mix and direction a row per implementation, fastest first."""
    found, tables = {}, []
    for case in cases:
        info = case["extra_info"]
        sizes = f"{number(info['images'])} images, {number(info['tokens'])} tokens"
        found.setdefault(f"{op}: {info['shape']} {info['direction']} ({sizes})", []).append(case)
    for title, group in found.items():
        fastest_first = sorted(group, key=_us)
        packed = (
            c for c in fastest_first if c["extra_info"]["impl"].removeprefix(VITFAST) in ("", " compile", " eager")
        )
        ours = next(packed, None)
        lines = [[of(case, case["extra_info"], ours) for of in PACKED_COLUMNS.values()] for case in fastest_first]
        tables.append(f"#### {cell(title)}\n\n" + table(list(PACKED_COLUMNS), lines))
    return "\n".join(tables)


def damaged_lines(results: Results) -> str:
    return "".join(f"- {cell(name)} is left out: {cell(why)}\n" for name, why in results.damaged.items())


def targets_table(results: Results) -> str:
    """The targets alone; where there is no result at all, one line that says so."""
    if not (results.measured or results.checks or results.curves):
        return f"no result in {results.name}\n{damaged_lines(results)}"
    return table(["what", "wanted", "measured"], target_rows(results)) + damaged_lines(results)


def sections(results: Results) -> str:
    """Everything about one GPU."""
    found = [machine_lines(results), "#### Targets\n\n" + targets_table(results)]
    for op in MODEL_OPS:
        found += [model_table(cases, f"{op}: {model}") for model, cases in by_model(results, op).items()]
    if files := results.of("train from JPEG files"):
        found.append(files_table(files))
    found += [packed_tables(cases, op) for op in PACKED_OPS if (cases := results.of(op))]
    ops = dict.fromkeys(case["extra_info"]["op"] for case in results.measured.values())
    shown = (*MODEL_OPS, *PACKED_OPS, "train from JPEG files")
    found += [op_table(results.of(op), op) for op in ops if op not in shown]
    missing = [[case["name"], case["state"], case.get("reason") or ""] for case in results.missing.values()]
    found.append("#### Without a time\n\n" + table(["case", "state", "reason"], missing) if missing else "")
    return "\n".join(found)


def speed_table(results: Results) -> str:
    """For the project's README: vitfast and `accelerate` against the fastest peer in equal precision."""
    lines = []
    for op in MODEL_OPS:
        for model, cases in by_model(results, op).items():
            infos = counted([case["extra_info"] for case in cases])
            for precision in dict.fromkeys(info["precision"] for info in infos):
                lines.append([f"{op} {model} {precision}", *_speeds([i for i in infos if i["precision"] == precision])])
    header = ["images/s", "vitfast", "accelerate(timm)", "fastest peer", "vitfast ÷ peer", "accelerate ÷ peer"]
    whole = table(header, lines) if lines else "No whole model has been measured on it.\n"
    return f"{machine_lines(results)}\n{whole}"


def _speeds(infos: list[dict]) -> list[str]:
    """Images/s of vitfast, `accelerate` and the fastest peer, and the first two's ratios to the third."""
    best = {}
    for info in sorted(reversed(infos), key=lambda info: info["images_per_second"]):
        best[library(info) if library(info) in OURS else "peer"] = info
    speeds = {key: info["images_per_second"] for key, info in best.items()}
    peer = f"{number(speeds['peer'])} ({best['peer']['impl']})" if "peer" in best else "-"
    ratios = [f"{speeds[name] / speeds['peer']:.2f}" if {name, "peer"} <= set(speeds) else "-" for name in OURS]
    return [*(number(speeds.get(name)) for name in OURS), peer, *ratios]


# ---- files


def gpus(folder: Path) -> list[Results]:
    folders = sorted(folder.iterdir()) if folder.is_dir() else []
    found = [load(path) for path in folders if path.is_dir() and path.name != "local"]
    return [r for r in found if r.measured or r.missing or r.checks or r.curves or r.damaged]


def documents(folder: Path, readme: Path) -> dict[Path, str]:
    """The text that every generated file should hold."""
    found = gpus(folder)
    pictures = lambda r: "".join(f"![{Path(name).stem}]({r.name}/{name})\n" for name in plotted(r))  # noqa: E731
    body = "\n".join(f"## {r.name}\n\n{sections(r)}\n{pictures(r)}" for r in found) or NOTHING
    wanted = {folder / "README.md": f"# Results\n\n{HOW_TO_READ}\n{body}"}
    text = readme.read_text() if readme.is_file() else ""
    if START in text and END in text:
        more = "Everything: [bench/results](bench/results/README.md).\n"
        speed = "\n".join(f"{speed_table(r)}\n{more}" for r in found) or NOTHING
        wanted[readme] = text[: text.index(START) + len(START)] + f"\n\n{speed}\n" + text[text.index(END) :]
    return wanted


def stale(folder: Path, readme: Path) -> list[str]:
    """The files that have to be written again."""
    wanted = documents(folder, readme)
    texts = [str(path) for path, text in wanted.items() if not path.is_file() or path.read_text() != text]
    plots = [folder / r.name / name for r in gpus(folder) for name in plotted(r)]
    return texts + [str(path) for path in plots if not path.is_file()]


def main(
    argv: list[str] | None = None, folder: Path = HERE / "results", readme: Path = HERE.parent / "README.md"
) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where something is stale")
    parser.add_argument("--folder", type=Path, help="print the tables of this folder")
    parser.add_argument("--targets", action="store_true", help="with --folder: print its targets alone")
    args = parser.parse_args(argv)
    if args.targets and not args.folder:
        parser.error("--targets needs --folder DIR")
    if args.folder and not args.folder.is_dir():
        print(f"bench/report.py: there is no folder {args.folder}", file=sys.stderr)
        return 2
    if args.folder:
        found = load(args.folder)
        print(targets_table(found).rstrip() if args.targets else sections(found))
    elif args.check:
        found = stale(folder, readme)
        print("\n".join(f"{name} is stale: run python bench/report.py" for name in found) or "the report is up to date")
        return 1 if found else 0
    else:
        for path, text in documents(folder, readme).items():
            path.write_text(text)
        for results in gpus(folder):
            import plots

            plots.draw(results, folder / results.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
