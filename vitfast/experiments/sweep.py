"""The learning rate of a fine-tuning, chosen as the paper does: on held-out training images."""

import dataclasses
import json
import logging
from pathlib import Path

from ..config import Config
from ..distributed import is_first_rank
from ..errors import InputError
from ..files import write_text
from .runs import finish

logger = logging.getLogger("vitfast")


def sweep(config: Config, resume: str = "auto") -> dict:
    """Fine-tunes with each rate of `sweep_lr`, then with the best on all images. Returns its summary.

    That is the paper's protocol: a share of the training set (`sweep_hold_out`) decides, the test set has no say. The
    runs are in OUTPUT/sweep/, sweep.json has their accuracies. resume: "auto" goes on where the runs stopped, "never"
    starts all of them again.
    """
    if resume not in ("auto", "never"):
        raise InputError(f"a sweep is several runs: --resume takes auto or never with it, got {resume}")
    if len(config.sweep_lr) < 2:
        advice = "give some with --set sweep_lr=0.003,0.01,0.03"
        raise InputError(f"recipe {config.name!r} has no learning rates to try; {advice}")
    if not config.sweep_hold_out:
        raise InputError("a sweep needs a part of the training set to choose on; set sweep_hold_out, such as 0.1")
    output, accuracies = Path(config.output), {}
    for lr in config.sweep_lr:
        folder = str(output / "sweep" / f"lr-{lr:g}")
        one = dataclasses.replace(config, lr=lr, hold_out=config.sweep_hold_out, output=folder)
        accuracies[lr] = finish(one, resume)["accuracy"]
        logger.info("lr %g: accuracy %.4f on the held-out part", lr, accuracies[lr])
    best = max(accuracies, key=lambda lr: (accuracies[lr], -lr))
    logger.info("lr %g is best; training on the whole training set", best)
    summary = finish(dataclasses.replace(config, lr=best), resume)
    tried = [dict(lr=lr, held_out_accuracy=accuracy) for lr, accuracy in accuracies.items()]
    result = dict(lr=best, hold_out=config.sweep_hold_out, tried=tried, accuracy=summary["accuracy"])
    if is_first_rank():
        write_text(output / "sweep.json", json.dumps(result, indent=2))
    return summary
