"""report.html of a finished run: one file that opens offline, its pictures inside."""

import dataclasses
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import torch
from torch import Tensor, nn

from ...data.loader import Data
from ...errors import InputError
from ...eval.accuracy import Answers, Collector, evaluate, open_weights
from ...eval.inspect.measures import attention_rollout, position_similarity
from ...eval.inspect.page import columns, fold, page, picture
from ...model.baselines import load_any
from ...model.vit import ViT
from ...run.config import Config, described
from ...run.distributed import is_first_rank
from ...run.files import write_atomically
from ..introduction import model_in_words
from ..log import read_metrics
from ..run_folder import BEST, LAST
from .answers import answer_sections, first_images
from .commands import next_commands, origin

ATTENDED = 8  # validation images with attention
# The settings that the report shows even where they are the defaults.
SHOWN = frozenset("model img_size epochs steps batch_size optimizer lr lr_decay weight_decay seed".split())
logger = logging.getLogger("vitfast")


@contextmanager
def optional() -> Iterator[None]:
    """Turns an error in the block into one warning: a run counts as finished without a report too."""
    try:
        yield
    except ModuleNotFoundError as error:
        logger.warning("no report.html: %s is not installed", error.name)
    except Exception as error:
        logger.warning("no report.html: %s", " ".join(f"{type(error).__name__}: {error}".split()))


@optional()
def write_report(
    config: Config, data: Data, summary: dict, device: torch.device, answers: Answers | None = None
) -> None:
    """Writes report.html into the folder of a run that has its checkpoint, or says why not.

    answers: those of the run's last evaluation; None for a model without a head.
    """
    run, last = Path(config.output), Path(config.output) / "checkpoints" / LAST
    model = load_any(config.model, last).to(device).eval()  # not compiled, not sharded
    sections = curves({config.task: run})
    sections |= answer_sections(answers, data) if answers else {}
    sections |= _inside(model, first_images(data, ATTENDED)) if isinstance(model, ViT) else {}
    sections |= many_sizes(summary)
    sections["Next commands"] = next_commands(config, summary, best_weights(run, summary))
    sections["Settings"] = settings(config)
    sections["Origin"] = ("", columns(("", ""), origin().items(), left=2))
    text = page(f"vitfast {config.task}", results(summary), sections, introduction(config, model, summary))
    content = text.encode(errors="replace")  # names of folders need not be valid text
    write_atomically(run / "report.html", lambda temporary: temporary.write_bytes(content))


@optional()
def complete(config: Config, summary: dict) -> None:
    """Writes the report that a finished run lacks, as after a kill."""
    run = Path(config.output)
    if not is_first_rank() or (run / "report.html").exists():
        return
    model, data, device, dtype = open_weights(dataclasses.replace(config, weights=str(run / "checkpoints" / LAST)))
    answers = None
    if getattr(model, "num_classes", 0):  # a ViT that learned by masked patches has no head
        collector = Collector(config.objective)
        evaluate(model, data, device, dtype, collector.add)
        answers = collector.gather(data)
    write_report(config, data, summary, device, answers)


def introduction(config: Config, model: nn.Module, summary: dict) -> str:
    """The sentences below the title: what was trained when, and the model of the report."""
    run = Path(config.output)
    what = "Fine-tuning" if config.task == "finetune" else "Pre-training"
    told = f"{what} of {model_in_words(config, model)} on {config.data}"
    told += f" by the recipe {config.name}" if config.name else ""
    finished = datetime.fromtimestamp((run / "summary.json").stat().st_mtime).astimezone()
    told += f", finished on {finished:%Y-%m-%d at %H:%M %Z}. ± is the standard error. This report looks at the last "
    told += f"model, of step {summary['steps']:,}, in checkpoints/{LAST}/."
    if best_weights(run, summary).name != BEST:
        return told
    better = f"of step {summary['best_step']:,} with accuracy {summary['best_accuracy']:.4f}, in {BEST}/"
    return f"{told} An earlier one was better, {better}: the commands below take that."


def best_weights(run: Path, summary: dict) -> Path:
    """The folder of a run's best model, which is the last one where none was better."""
    last, best = run / "checkpoints" / LAST, summary.get("best_accuracy")
    return run / BEST if best is not None and best > summary["accuracy"] else last


def results(summary: dict) -> dict[str, str]:
    """The entries of a run's summary as text, the accuracy with its standard error."""
    found = {}
    for name, value in summary.items():
        text = str(value)
        if isinstance(value, float):
            text = f"{value:,.4f}" if abs(value) < 10 else f"{value:,.1f}"
        elif type(value) is int:
            text = f"{value:,}"
        if value is not None and name not in ("finished", "task", "sizes"):
            found[name.replace("_", " ")] = text
    if summary.get("top5") is not None:  # the accuracy of masked patches is no share of images
        found["accuracy"] = with_error(summary["accuracy"], summary["val_images"])
    return found


def with_error(accuracy: float, images: int) -> str:
    """An accuracy on so many images, as text with its binomial standard error."""
    return f"{accuracy:.4f} ± {(accuracy * (1 - accuracy) / images) ** 0.5:.4f}"


def settings(config: Config) -> tuple[str, str]:
    """The section of all settings: first those in SHOWN, and those other than the defaults."""
    defaults, shown, rest = Config(), [], []
    for name, value, meaning in described(config):
        own = getattr(config, name)
        part = shown if own != getattr(defaults, name) or (name in SHOWN and own is not None) else rest
        if name != "about":
            part.append((name, value, meaning))
    header = ("setting", "value", "meaning")
    folded = fold(f"{len(rest)} more, at their defaults", columns(header, rest, left=3))
    return "They are in config.yaml; --set FIELD=VALUE changes one.", columns(header, shown, left=3) + folded


def curves(runs: dict[str, Path]) -> dict[str, tuple[str, str]]:
    """The section of the curves in metrics.csv of the named run folders, side by side."""
    from ...eval.inspect.figures import as_png, draw_curves

    records = {name: read_metrics(run) for name, run in runs.items()}
    best, told = {}, []
    for name, each in records.items():
        known = [row for row in each if row["split"] == "val" and math.isfinite(row["accuracy"] or math.nan)]
        if known:  # the first of the best, as early stopping takes it
            first = max(known, key=lambda row: row["accuracy"])
            best[name] = first["epoch"]
            told.append(f"accuracy {first['accuracy']:.4f} at epoch {first['epoch']:.2f} of {name}")
    note = f"The dotted line is the best evaluation: {', '.join(told)}." if told else ""
    drawn = picture(as_png(draw_curves(records, best)), "loss, accuracy and learning rate against epochs", chart=True)
    return {"Curves": (note, drawn)}


def many_sizes(summary: dict) -> dict[str, tuple[str, str]]:
    """The section of a run on images of many sizes; other runs have none."""
    if not summary.get("sizes"):
        return {}
    from ...eval.inspect.figures import as_png, draw_counts

    saved, each = summary["padding_not_computed"], summary["patches_per_image"]
    note = (
        f"Each image got a random size, the side of a square of its area, and had {each:,.1f} patches on average. "
        f"If every image were filled up to the longest of its batch, {saved:.1%} of all patches would be padding. "
        "None of it was computed."
    )
    figure = draw_counts({int(side): count for side, count in summary["sizes"].items()}, "pixels", "images")
    return {"Sizes": (note, picture(as_png(figure), "how many images got each size", chart=True))}


def _inside(model: ViT, images: Tensor) -> dict[str, tuple[str, str]]:
    """Attention rollout and position embeddings, as `vitfast inspect` draws them."""
    from ...eval.inspect.figures import as_png, draw_attention, draw_similarity
    from ...eval.inspect.report import SECTIONS

    figures = dict(rollout=draw_attention(images.numpy(), attention_rollout(model, images).cpu().numpy()))
    with suppress(InputError):  # the model adds no positions to its patches
        figures["positions"] = draw_similarity(position_similarity(model).cpu().numpy(), pixels=400)
    return {
        heading: (note, picture(as_png(figures[name]), heading)) if name in figures else (absent, "")
        for name, (heading, note, absent) in SECTIONS.items()
        if name in ("rollout", "positions")
    }
