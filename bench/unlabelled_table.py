"""Means, differences and the Markdown table of what bench/unlabelled.py measured."""

import json
import math
import statistics
from pathlib import Path

from unlabelled_data import NAMES as DATA

NAMES = dict(linear="linear probe", knn="20 nearest neighbours", few="5 labels a class", accuracy="own head")
ORDER = ("lejepa", "masked", "random", "supervised", "few")
RIVALS = ("random", "masked")
CERTAIN = 3.0  # standard errors


def summary(runs: list[dict]) -> dict:
    """{method: {measure: {mean, stdev, seeds}}} of the runs of one data set."""
    found = {}
    for method in ORDER:
        of_method = sorted((each for each in runs if each["method"] == method), key=lambda each: each["seed"])
        for measure in (*NAMES, "rank", "loss", "cpu_seconds"):
            values = [each[measure] for each in of_method if measure in each]
            if values:
                stdev = statistics.stdev(values) if len(values) > 1 else math.nan
                found.setdefault(method, {})[measure] = dict(mean=statistics.mean(values), stdev=stdev, seeds=values)
    return found


def difference(of: dict, over: dict) -> dict:
    """The difference of two means, its standard error over seeds, and how many of these it is."""
    error = math.hypot(*(each["stdev"] / math.sqrt(len(each["seeds"])) for each in (of, over)))
    change = of["mean"] - over["mean"]
    return dict(difference=change, standard_error=error, standard_errors=change / error if error else math.inf)


def differences(means: dict) -> list[dict]:
    """LeJEPA over its rivals in each measure; with 5 labels also over training from scratch."""
    pairs = [(rival, measure, measure) for rival in RIVALS for measure in ("linear", "knn", "few")]
    found = []
    for rival, ours, theirs in [*pairs, ("few", "few", "accuracy")]:
        if ours in means.get("lejepa", {}) and theirs in means.get(rival, {}):
            change = difference(means["lejepa"][ours], means[rival][theirs])
            found.append(dict(over=rival, measure=ours) | change | dict(ahead=change["standard_errors"] > CERTAIN))
    return found


def cell(value: dict | None, digits: int = 3) -> str:
    """A mean with each seed in brackets."""
    if value is None:
        return "-"
    return f"{value['mean']:.{digits}f} ({', '.join(f'{each:.{digits}f}' for each in value['seeds'])})"


def table(results: list[dict]) -> str:
    """The Markdown tables of all data sets: every seed's number, and the differences."""
    lines = []
    for result in results:
        pictures, means = result["pictures"], result["means"]
        lines += [f"## {result['data']}", ""]
        kept = (
            f"{pictures['train']} training and {pictures['test']} test pictures of {len(pictures['classes'])} classes"
        )
        cost = f"{result['cpu_seconds'] / 60:.0f} minutes of one core"
        lines += [f"{kept}; {cost}; settings of commit {result['commit']}.", ""]
        measures = [m for m in NAMES if any(m in values for values in means.values())]
        heads = [*(NAMES[m] for m in measures), "effective rank", "CPU s a run"]
        lines += ["| method | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
        for method, values in means.items():
            cells = [cell(values.get(m)) for m in measures]
            cells += [cell(values.get("rank"), 1), f"{values['cpu_seconds']['mean']:.0f}"]
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
        lines += ["", "| LeJEPA over | in | difference | standard errors | more than 3 |", "|---|---|---|---|---|"]
        for each in result["differences"]:
            error = f"{each['difference']:+.3f} ± {each['standard_error']:.3f}"
            told = [each["over"], NAMES[each["measure"]], error, f"{each['standard_errors']:.1f}"]
            lines.append("| " + " | ".join([*told, "yes" if each["ahead"] else "**no**"]) + " |")
        lines.append("")
    minutes = sum(result["cpu_seconds"] for result in results) / 60
    lines.append(f"All runs took {minutes:.0f} minutes of one core, so {minutes / 2:.0f} minutes of two.")
    return "\n".join(lines) + "\n"


def load(folder: Path) -> list[dict]:
    """The results that a folder has, by data set."""
    paths = [folder / f"{name}.json" for name in DATA]
    return [json.loads(path.read_text()) for path in paths if path.exists()]
