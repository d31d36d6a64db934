"""Several runs for one answer: the learning rate of a fine-tuning, accuracy against compute (the paper's Figure 5), position embeddings (its Table 8).

Every run has its own folder and goes on where it stopped, so the same command again continues the experiment.
"""

import csv
import dataclasses
import io
import itertools
import json
import logging
import os
import statistics
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from ..baselines import baseline, is_baseline
from ..config import Config
from ..errors import InputError
from ..model import ViT
from ..presets import preset
from ..train.build import model_arguments
from ..train.log import write_text
from ..train.trainer import train

logger = logging.getLogger("vitfast")
# The rows of Table 8, and where the learned ones are added.
POSITIONS = ("none", "learn", "learn2d", "relative")
PLACES = ("stem", "layers", "layers_shared")
NAMES = {"none": "no positions", "learn": "1-D", "learn2d": "2-D", "relative": "relative"}


class Stopped(Exception):
    """A run of the experiment was asked to stop, and is saved."""


def _finished(config: Config, resume: str = "auto") -> dict:
    """The summary of a run. Raises Stopped."""
    summary = train(config, resume)
    if not summary["finished"]:
        raise Stopped(config.output)
    return summary


def sweep(config: Config, resume: str = "auto") -> dict:
    """Fine-tunes with each rate of `sweep_lr` on a part of the training set, keeps the one that is best on the rest, then trains on all of it.

    That is the paper's protocol: the test set has no say. The runs are in OUTPUT/sweep/, sweep.json has their accuracies. Returns the final summary.
    resume: "auto" goes on where the runs stopped, "never" starts all of them again.
    """
    if resume not in ("auto", "never"):
        raise InputError(f"a sweep is several runs: --resume takes auto or never with it, got {resume}")
    if len(config.sweep_lr) < 2:
        raise InputError(
            f"recipe {config.name!r} has no learning rates to try; give some with --set sweep_lr=0.003,0.01,0.03"
        )
    if not config.sweep_hold_out:
        raise InputError("a sweep needs a part of the training set to choose on; set sweep_hold_out, such as 0.1")
    output, accuracies = Path(config.output), {}
    for lr in config.sweep_lr:
        tried = dataclasses.replace(
            config, lr=lr, hold_out=config.sweep_hold_out, output=str(output / "sweep" / f"lr-{lr:g}")
        )
        accuracies[lr] = _finished(tried, resume)["accuracy"]
        logger.info("lr %g: accuracy %.4f on the held-out part", lr, accuracies[lr])
    best = max(accuracies, key=lambda lr: (accuracies[lr], -lr))
    logger.info("lr %g is best; training on the whole training set", best)
    summary = _finished(dataclasses.replace(config, lr=best), resume)
    tried = [dict(lr=lr, held_out_accuracy=accuracy) for lr, accuracy in accuracies.items()]
    _write(
        output / "sweep.json",
        json.dumps(dict(lr=best, hold_out=config.sweep_hold_out, tried=tried, accuracy=summary["accuracy"]), indent=2),
    )
    return summary


def training_flops(config: Config, classes: int) -> float:
    """FLOPs per training image: 3 times a forward pass, 2 for each multiply-add, counted by torch on a model without memory."""
    with torch.device("meta"):
        if is_baseline(config.model):
            model = baseline(config.model, classes, (config.img_size, config.img_size))
        else:
            model = ViT(**{**preset(config.model), **model_arguments(config)}, num_classes=classes)
        images = torch.empty(1, 3, config.img_size, config.img_size)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(images)
    return 3.0 * counter.get_total_flops()


def scaling(config: Config, models: list[str], lengths: list[float]) -> list[dict]:
    """Trains each model for each number of epochs. Writes scaling.csv and scaling.json (accuracy and exaFLOPs) and scaling.png, the axes of Figure 5."""
    rows, output = [], Path(config.output)
    for model, epochs in itertools.product(models, lengths):
        run = output / f"{model.replace('/', '-').replace(':', '-')}-{epochs:g}ep"
        one = dataclasses.replace(config, model=model, epochs=epochs, steps=None, output=str(run))
        summary = _finished(one)
        flops = training_flops(one, summary["classes"]) * summary["steps"] * config.batch_size
        row = dict(
            model=model,
            epochs=epochs,
            parameters=summary["parameters"],
            exaflops=flops / 1e18,
            accuracy=summary["accuracy"],
            seconds=summary["seconds"],
        )
        rows.append(row)
        logger.info("%s, %g epochs: %.4g exaFLOPs, accuracy %.4f", model, epochs, row["exaflops"], row["accuracy"])
    _write_rows(output / "scaling", rows)
    _plot(output / "scaling.png", rows)
    return rows


def positions(config: Config, seeds: int = 3) -> list[dict]:
    """Table 8: every kind of position embedding, at every place it has, mean and spread over seeds. Writes positions.csv, .json and .md."""
    rows, output = [], Path(config.output)
    for kind, place in itertools.product(POSITIONS, PLACES):
        if place != "stem" and kind not in ("learn", "learn2d"):
            continue
        accuracies = []
        for seed in range(config.seed, config.seed + seeds):
            run = output / f"{kind}-{place}-seed{seed}"
            accuracies.append(
                _finished(dataclasses.replace(config, pos_embed=kind, pos_embed_at=place, seed=seed, output=str(run)))[
                    "accuracy"
                ]
            )
        spread = statistics.stdev(accuracies) if seeds > 1 else 0.0
        rows.append(
            dict(positions=kind, at=place, accuracy=statistics.mean(accuracies), stdev=spread, accuracies=accuracies)
        )
        logger.info("%s at %s: accuracy %.4f", NAMES[kind], place, rows[-1]["accuracy"])
    _write_rows(output / "positions", rows)
    _write(output / "positions.md", positions_table(rows))
    return rows


def positions_table(rows: list[dict]) -> str:
    """Table 8 in Markdown: a row for each kind, a column for each place."""
    found = {(row["positions"], row["at"]): row for row in rows}
    lines = ["| positions | at the stem | at every layer | at every layer, shared |", "|---|---|---|---|"]
    for kind in POSITIONS:
        cells = [
            f"{r['accuracy']:.4f} ± {r['stdev']:.4f}" if (r := found.get((kind, place))) else "" for place in PLACES
        ]
        lines.append(f"| {NAMES[kind]} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _write(path: Path, text: str) -> None:
    if os.environ.get("RANK", "0") != "0":
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


def _write_rows(stem: Path, rows: list[dict]) -> None:
    """Rows as JSON and CSV."""
    _write(stem.with_suffix(".json"), json.dumps(rows, indent=2) + "\n")
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows({k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in row.items()} for row in rows)
    _write(stem.with_suffix(".csv"), text.getvalue())


def _plot(path: Path, rows: list[dict]) -> None:
    """Accuracy against pre-training compute, one line a model."""
    if os.environ.get("RANK", "0") != "0":
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for model in dict.fromkeys(row["model"] for row in rows):
        points = sorted((row["exaflops"], row["accuracy"]) for row in rows if row["model"] == model)
        axes.plot(*zip(*points), marker="o", label=model)
    axes.set(xscale="log", xlabel="total pre-training compute [exaFLOPs]", ylabel="accuracy")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
