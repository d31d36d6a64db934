"""How a run went: its curves, its best evaluation, and what its losses tell."""

import itertools
import math
import statistics
from pathlib import Path

from ...data.loader import Data
from ...eval.inspect.page import columns, picture, sentences
from ...model.baselines import is_baseline
from ...run.config import Config
from ..lejepa import COLLAPSED
from ..log import read_metrics

ROWS = 40  # in the table of evaluations
RISE = 0.02  # the least rise of a validation loss that counts, as a share of its minimum


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


def progress_sections(config: Config, data: Data) -> dict[str, tuple[str, str]]:
    """The sections of the curves and of the evaluations of a run."""
    records = read_metrics(Path(config.output))
    sections = curves({config.task: Path(config.output)})
    evaluations = [record for record in records if record["split"] == "val"]
    if not evaluations:
        return sections
    told = sentences(collapse(records, config), overfitting(records), about_losses(records, harder(config, data)))
    return sections | {"Evaluations": ("", told + _table(records, evaluations))}


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
    told = f"The model has collapsed: from epoch {_epoch(fallen[-1])} on all images have nearly the same projections"
    return f"{told} ({fallen[0]['rank']:.2f} effective dimensions of {config.projector_dim})."


def overfitting(records: list[dict]) -> str:
    """A sentence on whether the validation loss rises; "" where that cannot be told.

    Medians of three neighbours are compared: the loss rises if the last one exceeds the lowest by more than RISE and by
    more than four standard deviations of one value, estimated by second differences, which do not hold the trend.
    """
    evaluations = with_number(records, "val", "loss")
    losses = [each["loss"] for each in evaluations]
    if len(losses) < 4:
        return ""
    threes = list(zip(losses, losses[1:], losses[2:]))
    medians = [statistics.median(three) for three in threes]
    noise = statistics.median(abs(a - 2 * b + c) for a, b, c in threes) / (0.6745 * 6**0.5)
    first = medians.index(min(medians))  # the first of the three values around the lowest median
    lowest, end = min(range(first, first + 3), key=losses.__getitem__), medians[-1]
    if end - medians[first] <= max(RISE * abs(losses[lowest]), 4 * noise) or lowest == len(losses) - 1:
        return "The validation loss does not rise: there is no sign of overfitting."
    at, now = evaluations[lowest], evaluations[-1]
    told = f"The validation loss is lowest at epoch {_epoch(at)} ({at['loss']:.4f}) and rises to {end:.4f}"
    before, after = (_training_loss(records, each["step"]) for each in (at, now))
    if before is None or after is None or after >= before:
        return f"{told}, and the training loss does not fall either: a lower learning rate may help."
    accuracy = ""
    if len(with_number([at, now], "val", "accuracy")) == 2:
        accuracy = f"Accuracy goes from {at['accuracy']:.4f} to {now['accuracy']:.4f} meanwhile."
    told += f", while the training loss falls from {before:.4f} to {after:.4f}: the model overfits from epoch"
    return f"{told} {_epoch(evaluations[lowest + 1])} on. {accuracy}".rstrip()


def _epoch(record: dict) -> str:
    return f"{round(record['epoch'], 1):g}"


def _training_loss(records: list[dict], step: int) -> float | None:
    """The last training loss that was recorded up to a step."""
    known = [each["loss"] for each in with_number(records, "train", "loss") if each["step"] <= step]
    return known[-1] if known else None


def about_losses(records: list[dict], reasons: list[str]) -> str:
    """A sentence on why the training loss ends above the validation loss; "" where it does not.

    reasons: those of `harder`.
    """
    evaluations = with_number(records, "val", "loss")
    training = _training_loss(records, evaluations[-1]["step"]) if evaluations else None
    if training is None or training <= evaluations[-1]["loss"]:
        return ""
    told = f"The training loss ({training:.4f}) lies above the validation loss ({evaluations[-1]['loss']:.4f}) because"
    if reasons:
        return f"{told} training is made harder than evaluation: {', '.join(reasons)}."
    return f"{told} it is a mean over the steps before the evaluation, in which the model was still learning."


def harder(config: Config, data: Data) -> list[str]:
    """The settings that make a training loss higher than that of an evaluation of the same images."""
    vit = not is_baseline(config.model)
    low, high = config.crop_scale
    other_loss = config.objective == "sigmoid" and not data.multi_label
    augmented = not data.train.transformed
    found = {
        "its loss is the sigmoid's, summed over the classes, and the validation loss is the softmax's": other_loss,
        f"label smoothing {config.label_smoothing:g}": config.label_smoothing,
        f"mixup {config.mixup:g}": config.mixup,
        f"cutmix {config.cutmix:g}": config.cutmix,
        f"dropout {config.dropout:g}": config.dropout and vit,
        f"drop path {config.drop_path:g}": config.drop_path,
        f"random crops of {low:.0%} to {high:.0%} of an image": augmented and low < 1,
        f"sizes of {config.sizes} pixels": config.sizes,
        f"{config.drop_tokens:.0%} of the patches dropped": config.drop_tokens,
        f"augmentation policy {config.auto_augment}": augmented and config.auto_augment,
        f"colour jitter {config.color_jitter:g}": augmented and config.color_jitter,
        f"random erasing of {config.random_erasing:.0%} of the images": augmented and config.random_erasing,
        f"the averaged weights (EMA, decay {config.ema_decay}) are evaluated": config.ema_decay,
    }
    return [text for text, used in found.items() if used]
