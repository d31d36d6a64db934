"""Accuracy against pre-training compute: the paper's Figure 5."""

import dataclasses
import itertools
import logging
from pathlib import Path

import torch
from matplotlib.figure import Figure

from ..baselines import baseline, is_baseline
from ..config import Config
from ..cost import forward_flops
from ..distributed import is_first_rank
from ..model import ViT
from ..presets import preset
from ..train.setup import model_arguments
from .runs import finish, write_records

logger = logging.getLogger("vitfast")


def training_flops(config: Config, classes: int) -> float:
    """FLOPs per training image: 3 times a forward pass, 2 for each multiply-add."""
    with torch.device("meta"):
        if is_baseline(config.model):
            model = baseline(config.model, classes, (config.img_size, config.img_size))
        else:
            model = ViT(**{**preset(config.model), **model_arguments(config)}, num_classes=classes)
    return 3.0 * forward_flops(model.eval(), (3, config.img_size, config.img_size))


def scaling(config: Config, models: list[str], lengths: list[float]) -> list[dict]:
    """Trains each model for each number of epochs. Returns a record of each run.

    Writes scaling.csv and scaling.json (accuracy and exaFLOPs) and scaling.png, which has the axes of Figure 5.
    """
    records, output = [], Path(config.output)
    for model, epochs in itertools.product(models, lengths):
        run = output / f"{model.replace('/', '-').replace(':', '-')}-{epochs:g}ep"
        one = dataclasses.replace(config, model=model, epochs=epochs, steps=None, output=str(run))
        summary = finish(one)
        flops = training_flops(one, summary["classes"]) * summary["steps"] * config.batch_size
        record = dict(
            model=model,
            epochs=epochs,
            parameters=summary["parameters"],
            exaflops=flops / 1e18,
            accuracy=summary["accuracy"],
            seconds=summary["seconds"],
        )
        records.append(record)
        logger.info("%s, %g epochs: %.4g exaFLOPs, accuracy %.4f", model, epochs, flops / 1e18, record["accuracy"])
    write_records(output / "scaling", records)
    if is_first_rank():
        draw(records).savefig(output / "scaling.png", dpi=120, bbox_inches="tight")
    return records


def draw(records: list[dict]) -> Figure:
    """Accuracy against pre-training compute, one line a model."""
    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    for model in dict.fromkeys(record["model"] for record in records):
        points = sorted((record["exaflops"], record["accuracy"]) for record in records if record["model"] == model)
        axes.plot(*zip(*points), marker="o", label=model)
    axes.set(xscale="log", xlabel="total pre-training compute [exaFLOPs]", ylabel="accuracy")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
