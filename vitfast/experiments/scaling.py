"""Accuracy against pre-training compute: the paper's Figure 5."""

import dataclasses
import io
import itertools
import logging
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure

from ..data.loader import open_data
from ..eval.fewshot import few_shot
from ..model.baselines import sizes
from ..run.config import Config, as_plain, course
from ..run.device import choose_device
from ..run.results import Results
from ..train.expectation import training_flops
from ..train.recipes import resolve
from ..train.run_folder import kept_weights
from ..train.setup import new_model
from .runs import finish, output_of, write_records

logger = logging.getLogger("vitfast")

SHOTS = 5  # images of each class for the few-shot accuracies in the paper's figures
METHODS = {"fewshot": f"{SHOTS}-shot accuracy", "finetune": "accuracy after fine-tuning"}
# Settings of a pre-training that its transfers share.
SHARED = "seed device amp compile workers eval_batch_size data_dir decode parallel max_pixels max_unreadable".split()


def scaling(
    config: Config,
    models: list[str],
    lengths: list[float],
    transfer: Sequence[str] = (),
    method: str = "fewshot",
    settings: dict | None = None,
) -> list[dict]:
    """Pre-trains each model for each number of epochs. Returns a record of each run.

    transfer: SPECs of data; each pre-training is followed by few-shot evaluation on them ("fewshot") or by fine-tuning
    to them ("finetune"), with these `settings` of its config, such as its recipe; the figure shows their mean accuracy.
    Writes scaling.csv and scaling.json (accuracies and exaFLOPs) and scaling.png, which has the axes of Figure 5.
    Raises InputError, before the first run begins, if anything is wrong with any of them.
    """
    output, runs, records = output_of(config), [], []
    for model, epochs in itertools.product(models, lengths):
        folder = output / f"{model.replace('/', '-').replace(':', '-')}-{epochs:g}ep"
        runs.append(dataclasses.replace(config, model=model, epochs=epochs, steps=None, output=str(folder)))
    own = dict(models=models, lengths=lengths, transfer=list(transfer), method=method, transfer_set=settings or {})
    files = [f"scaling.{suffix}" for suffix in ("csv", "json", "png")]
    results = Results(output, "scaling", course(as_plain(config)) | own, files)
    for one in runs:
        training_flops(one, 1)  # raises where there is no such model, or it cannot take the images
        for spec in transfer:  # raises where there is no such data, or the model does not take its images
            own = _transfer_config(one, spec, method, settings or {})
            with torch.device("meta"):
                model = new_model(dataclasses.replace(one, img_size=own.img_size), 1)
            open_data(own, *sizes(model), choose_device(own.device))
    for one in runs:
        summary = finish(one)
        flops = training_flops(one, summary["classes"]) * summary["steps"] * config.batch_size
        record = dict(
            model=one.model,
            epochs=one.epochs,
            parameters=summary["parameters"],
            exaflops=flops / 1e18,
            accuracy=summary["accuracy"],
            seconds=summary["seconds"],
        )
        if transfer:
            accuracies = {}
            for spec in transfer:
                own = _transfer_config(one, spec, method, settings or {})
                ended = finish(own) if method == "finetune" else few_shot(own, shots=[SHOTS])["results"][0]
                accuracies[spec] = ended["accuracy"]
            record |= dict(transfer_accuracy=statistics.mean(accuracies.values()), transfer_method=METHODS[method])
            record |= {f"transfer to {spec}": accuracy for spec, accuracy in accuracies.items()}
        records.append(record)
        said = f"accuracy {record.get('transfer_accuracy', record['accuracy']):.4f}"
        logger.info("%s, %g epochs: %.4g exaFLOPs, %s", one.model, one.epochs, flops / 1e18, said)
    write_records(results, "scaling", records)
    draw(records).savefig(png := io.BytesIO(), dpi=120, bbox_inches="tight")
    results.write("scaling.png", png.getvalue())
    return records


def _transfer_config(config: Config, spec: str, method: str, settings: dict) -> Config:
    """The Config of a transfer from the weights that the pre-training of `config` keeps."""
    shared = {name: getattr(config, name) for name in SHARED}
    folder = f"{method}-{''.join(c if c.isalnum() else '-' for c in spec)}"
    own = dict(data=spec, weights=str(kept_weights(Path(config.output))), output=str(Path(config.output) / folder))
    if method == "fewshot":
        return resolve("eval", shared, settings, own, dict(img_size=config.img_size))
    return resolve("finetune", shared, settings, own)


def draw(records: list[dict]) -> Figure:
    """Draws accuracy (of the transfer, if there is one) against pre-training compute, one line a model."""
    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    key = "transfer_accuracy" if "transfer_accuracy" in records[0] else "accuracy"
    for model in dict.fromkeys(record["model"] for record in records):
        points = sorted((record["exaflops"], record[key]) for record in records if record["model"] == model)
        axes.plot(*zip(*points), marker="o", label=model)
    axes.set(xscale="log", xlabel="total pre-training compute [exaFLOPs]", ylabel=_label(records[0]))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _label(record: dict) -> str:
    if "transfer_accuracy" not in record:
        return "accuracy of the pre-training"
    specs = [name.removeprefix("transfer to ") for name in record if name.startswith("transfer to ")]
    return f"{record['transfer_method']}, {specs[0] if len(specs) == 1 else f'mean of {len(specs)} data sets'}"
