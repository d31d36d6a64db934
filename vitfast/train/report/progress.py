"""How a run went: its curves, its evaluations, and whether its model collapsed."""

import itertools
import math
from pathlib import Path

from ...eval.inspect.page import columns, picture, sentences
from ...run.config import Config
from ..lejepa import COLLAPSED
from ..log import read_metrics

ROWS = 40  # in the table of evaluations


def curves(runs: dict[str, Path]) -> dict[str, tuple[str, str]]:
    """The section of the curves in metrics.csv of the named run folders, side by side."""
    from ...eval.inspect.figures import as_png, draw_curves

    records = {name: read_metrics(run) for name, run in runs.items()}
    best = {name: found["epoch"] for name, each in records.items() if (found := best_evaluation(each))}
    figure = draw_curves(records, best)
    note = "The dotted line is the best evaluation." if best else ""
    known = {
        (each["split"], name) for run in records.values() for each in run for name in each if each[name] is not None
    }
    if ("val", "rank") in known:
        note += " Accuracy in evaluations is that of a linear probe." * (("val", "accuracy") in known)
        note += " In training it is the share of patches whose colours are right." * (("train", "accuracy") in known)
        note += " The rank is that of the features, and in training that of the projections."
    return {"Curves": (note, picture(as_png(figure), "loss, accuracy and learning rate against epochs", chart=True))}


def progress_sections(config: Config) -> dict[str, tuple[str, str]]:
    """The sections of the curves and of the evaluations of a run."""
    records = read_metrics(Path(config.output))
    sections = curves({config.task: Path(config.output)})
    evaluations = [record for record in records if record["split"] == "val"]
    if not evaluations:
        return sections
    return sections | {"Evaluations": ("", sentences(collapse(records, config)) + _table(records, evaluations))}


def _table(records: list[dict], evaluations: list[dict]) -> str:
    best = best_evaluation(records)
    every, last = -(-len(evaluations) // ROWS), len(evaluations) - 1
    shown = [each for i, each in enumerate(evaluations) if i % every == 0 or i == last or each is best]
    names = dict(loss="validation loss", accuracy="validation accuracy", knn="k-NN accuracy", rank="effective rank")
    measured = [name for name in names if any(each.get(name) is not None for each in evaluations)]
    training = {record["step"]: record for record in records if record["split"] == "train"}
    rows = []
    for each in shown:
        numbers = training.get(each["step"], {}).get("loss"), *(each[name] for name in measured)
        cells = ("" if value is None else f"{value:.4f}" for value in numbers)
        rows.append((f"{each['epoch']:.2f}", f"{each['step']:,}", *cells, "best" if each is best else ""))
    header = ("epoch", "step", "training loss", *(names[name] for name in measured), "")
    return columns(header, rows, left=0, marked=shown.index(best) if best else None)


def best_evaluation(records: list[dict]) -> dict | None:
    """The first evaluation of the best accuracy, as early stopping takes it."""
    return max(with_number(records, "val", "accuracy"), key=lambda each: each["accuracy"], default=None)


def with_number(records: list[dict], split: str, name: str) -> list[dict]:
    """The records of a split in which `name` is a finite number."""
    own = (each for each in records if each["split"] == split)
    return [each for each in own if each.get(name) is not None and math.isfinite(each[name])]


def collapse(records: list[dict], config: Config) -> str:
    """A sentence on a run by LeJEPA whose projections are at the end on a point or a line; else ""."""
    ranks = with_number(records, "train", "rank") if config.objective == "lejepa" else []
    fallen = list(itertools.takewhile(lambda each: each["rank"] < COLLAPSED, reversed(ranks)))
    if not fallen or fallen[0]["epoch"] - fallen[-1]["epoch"] < 1:
        return ""
    told = f"The model has collapsed: from epoch {fallen[-1]['epoch']:.4g} on all images have nearly the same"
    return f"{told} projections ({fallen[0]['rank']:.2f} effective dimensions of {config.projector_dim})."
