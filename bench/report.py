"""Tables from the result files of a GPU; what is lost, failed or skipped is shown too.

    python bench/report.py              # writes what is marked in bench/results/README.md, README.md and
                                        # docs/tutorials/fast-settings.md, and vitfast/tools/cost/measured.csv
    python bench/report.py --check      # exit code 1 where one of these is not what the committed JSON files give, or
                                        # one of them is damaged; names answers that are older than their files

Every folder of bench/results/ that holds results is a GPU, but `local`, which is not committed. What a file must have,
and which of several counts, stands in result_files.py.
"""

import argparse
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path

import decide
import speeds
from result_files import WHOLE_MODELS, Results, load
from targets import GRAPHS, VITFAST, figure_rows, target_rows

HERE = Path(__file__).parent
START, END = "<!-- speed -->", "<!-- /speed -->"
NOTHING = (
    "No GPU result is committed yet: there is no speed claim. `pytest bench/ --benchmark-only --benchmark-json=FILE`\n"
    "measures one: the file belongs into `bench/results/<gpu>`. `vitfast report-gpu` takes ten minutes, and leaves an\n"
    "archive of such files.\n"
)


def cell(text: object) -> str:
    """One line without a bare "|", which would end the cell, without tags and links."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;").replace("](", "]\\(")


def table(header: list[str], rows: list[list[str]], texts: int = 1) -> str:
    """A Markdown table; the first columns, `texts` of them, are text, the others numbers."""
    lines = [header, ["---"] * texts + ["---:"] * (len(header) - texts), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines) + "\n"


def number(value: float | None, digits: int = 3, form: str = "") -> str:
    """A number with `digits` significant digits, thousands apart, or in `form`; "-" for None."""
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

    The share is ours, or the best one's where we have no time; the ratio is that of the best other time to ours.
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
    return f"#### {cell(op)} (µs)\n\n" + table(["shape", *impls, "% floor", "ratio"], lines)


# Header -> the key that all cases of a table must have for this column, and the cell of a case.
COLUMNS: dict[str, tuple[str, Callable[[dict], str]]] = {
    "implementation": ("impl", lambda case: case["impl"]),
    "batch": ("batch", lambda case: str(case["batch"])),
    "images/s": ("images_per_second", lambda case: number(case["images_per_second"])),
    "the same in memory": ("images_per_second_in_memory", lambda case: number(case["images_per_second_in_memory"])),
    "waiting for data": ("waiting_for_data", lambda case: f"{case['waiting_for_data']:.0%}"),
    "loader processes": ("workers", lambda case: str(case["workers"])),
    "ms": ("median", lambda case: spread(case, 1e3)),
    "padded": ("padded_share", lambda case: f"{case['padded_share']:.1%}"),
    "TFLOP/s": ("model_flops", lambda case: number(case["model_flops"] / case["median"] / 1e12)),
    "MFU of ceiling": ("mfu_ceiling", lambda case: f"{case['mfu_ceiling']:.1%}"),
    "MFU of data sheet": ("mfu_datasheet", lambda case: number(case["mfu_datasheet"], form=".1%")),
    "peak GiB": ("peak_mib", lambda case: number(case["peak_mib"] and case["peak_mib"] / 1024, form=".1f")),
    "attention": ("attention", lambda case: case["attention"]),
    "error": ("error", lambda case: number(case["error"], form=".1e")),
}


def model(case: dict) -> str:
    """The title of a model and resolution, of any batch: each library has its own best one."""
    return f"{case['op']} {re.sub(' B[0-9]+$', '', case['shape'])}"


def model_table(cases: list[dict], title: str) -> str:
    """A row for each case, fastest first: by images/s, as batches differ."""
    cases = sorted(cases, key=lambda case: -case["images_per_second"])
    shown = {header: text for header, (needed, text) in COLUMNS.items() if all(needed in case for case in cases)}
    return f"#### {cell(title)}\n\n" + table([*shown], [[text(case) for text in shown.values()] for case in cases])


def answers_table(results: Results) -> str:
    """The answered questions: what was predicted, what was measured, and what follows."""
    rows = [[a["asks"], a["predicted"], a["measured"], a["follows"]] for a in results.answers]
    return table(["question", "predicted", "measured", "what follows"], rows, texts=4) if rows else "no answer yet\n"


def stale_answers(gpus: list[Results]) -> str:
    """A line for each answer that is older than files that its question speaks of."""
    lines = ""
    for results, answer in ((gpu, answer) for gpu in gpus for answer in gpu.answers):
        if files := decide.changed(answer):
            more = f" and {len(files) - 3} more" if len(files) > 3 else ""
            lines += f"{results.name}: the answer to {answer['question']} is older than {', '.join(files[:3])}{more}\n"
    return lines


def targets_table(results: Results) -> str:
    """The targets, or one line that there is no result; then the files that do not count."""
    damaged = "".join(f"- {cell(name)} is left out: {cell(why)}\n" for name, why in results.damaged.items())
    if not (results.measured or results.checks):
        return f"no result in {results.name}\n{damaged}"
    rows = target_rows(results)
    return table(["target", "figure", "wanted", "measured", "of"], rows, texts=2) + damaged if rows else damaged


def sections(results: Results) -> str:
    """Everything about one GPU; loss curves are in the targets alone."""
    found = [machine_lines(results), "#### Targets\n\n" + targets_table(results)]
    found += ["#### Questions (`bench/questions.py`)\n\n" + answers_table(results)] if results.answers else []
    models = results.grouped(model, *WHOLE_MODELS)
    found += [model_table(cases, title) for title, cases in models.items()]
    operations = results.grouped(lambda case: case["op"])
    found += [op_table(cases, op) for op, cases in operations.items() if op not in (*WHOLE_MODELS, "loss curve")]
    missing = [[case["name"], case["state"], case["reason"]] for case in results.missing.values()]
    found.append("#### Without a time\n\n" + table(["case", "state", "reason"], missing) if missing else "")
    return "\n".join(found)


# What the README says of a machine; bench/results/README.md has all.
FACTS = {"driver_version": "driver", "torch": "torch", "triton": "triton", "timm": "timm"}
OVERVIEW = """\
A ratio ("A by B") is our speed divided by the best peer's, in equal precision and in one run. Of latency and memory,
less is better. **Bold** figures are as wanted, and "-" is not measured yet. "Predicted" is what a question
([bench/questions.py](bench/questions.py)) expects of the next run. [bench/results](bench/results/README.md) has every
time, setting and failed case, and [what was learned](bench/results/NOTES.md).
"""


def overview(gpus: list[Results]) -> str:
    """The figures of all GPUs side by side, after their machines and the settings that have no time."""
    rows, without = figure_rows(gpus)
    machines = {}
    for facts in itertools.chain(*(results.machines for results in gpus)):
        words = [facts["device"], *(f"{word} {facts[key]}" for key, word in FACTS.items() if key in facts)]
        machines.setdefault(", ".join(words), {})[facts.get("commit")] = True
    lines = [f"{words}, commits {', '.join(commits)}" for words, commits in machines.items()]
    lines += [f"Peers without a time: {', '.join(without)}"] if without else []
    graphs = f"\\*: ours ran as CUDA graphs ({GRAPHS}), and its peer has no time so: never bold"
    lines += [graphs] if GRAPHS in without else []
    listed = "".join(f"- {cell(line)}\n" for line in lines)
    header = ["target", "figure", "wanted", "predicted", *(results.name for results in gpus)]
    return f"{OVERVIEW}\n{listed}\n{table(header, rows, texts=2)}"


def gpus(folder: Path) -> list[Results]:
    found = [load(path) for path in sorted(folder.iterdir()) if path.is_dir() and path.name != "local"]
    return [r for r in found if r.measured or r.missing or r.checks or r.damaged or r.answers]


def speed_table(found: list[Results]) -> str:
    """Images/s by GPU and model, and the files of those that were measured."""
    header, rows, files = speeds.table_rows(speeds.measured(found))
    return f"{table(header, rows)}\n" + "".join(f"- {cell(line)}\n" for line in files)


def documents(found: list[Results], folder: Path, readme: Path, page: Path) -> dict[Path, str]:
    """The text that every generated file should hold, but for measured.csv, which comes first."""
    texts = {folder / "README.md": [f"## {r.name}\n\n{sections(r)}" for r in found]}
    texts[readme] = [overview(found)] if found else []
    texts[page] = [speed_table(found)]
    for path, parts in texts.items():
        before, rest = path.read_text().split(START)
        body = "\n".join(parts) or NOTHING
        texts[path] = f"{before}{START}\n\n{body}\n{END}{rest.split(END)[1]}"
    return texts


def main(argv: list[str] | None = None, folder: Path = HERE / "results", root: Path = HERE.parent) -> int:
    """Writes or checks the tables below `folder` and `root`, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where something is stale")
    args = parser.parse_args(argv)
    found = gpus(folder)
    shipped = {root / "vitfast/tools/cost/measured.csv": speeds.as_csv(speeds.measured(found))}
    if not args.check:  # first, since the estimates rest on it
        write(shipped)
    texts = shipped | documents(found, folder, root / "README.md", root / "docs/tutorials/fast-settings.md")
    if args.check:
        stale = [path for path, text in texts.items() if path.read_text() != text]
        wrong = [f"{path} is stale: run python bench/report.py" for path in stale]
        wrong += [f"{results.name}/{name}: {why}" for results in found for name, why in results.damaged.items()]
        print(end=stale_answers(found))
        print("\n".join(wrong or ["the report is up to date"]))
        return 1 if wrong else 0
    write(texts)
    return 0


def write(texts: dict[Path, str]) -> None:
    for path, text in texts.items():
        path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
