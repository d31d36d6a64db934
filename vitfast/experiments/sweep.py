"""Fine-tuning as the paper does it: a rate chosen on held-out images, and several runs with it."""

import dataclasses
import json
import logging
import statistics
from pathlib import Path

from ..config import Config
from ..distributed import is_first_rank
from ..errors import InputError
from ..files import write_text
from .runs import finish

logger = logging.getLogger("vitfast")


def fine_tune(config: Config, resume: str = "auto", sweep: bool = False, runs: int = 1) -> dict:
    """One fine-tuning, or with `sweep` one for each rate before it, or with `runs` several after them.

    Returns the summary of the run, or of `repeat`. resume: "auto" goes on where the runs stopped, "never" starts all of
    them again.
    """
    if runs < 1:
        raise InputError(f"--runs must be positive, got {runs}")
    if sweep or runs > 1:
        _check_several(config, resume)
    tried = _try_rates(config, resume) if sweep else {}
    if tried:
        best = max(tried, key=lambda lr: (tried[lr], -lr))
        logger.info("lr %g is best; training on the whole training set", best)
        config = dataclasses.replace(config, lr=best)
    summary = finish(config, resume) if runs == 1 else repeat(config, runs, resume)
    if tried and is_first_rank():
        rows = [dict(lr=lr, held_out_accuracy=accuracy) for lr, accuracy in tried.items()]
        told = dict(lr=config.lr, hold_out=config.sweep_hold_out, tried=rows, accuracy=summary["accuracy"])
        write_text(Path(config.output) / "sweep.json", json.dumps(told, indent=2))
    return summary


def _check_several(config: Config, resume: str) -> None:
    if resume not in ("auto", "never"):
        raise InputError(f"these are several runs: --resume takes auto or never with them, got {resume}")
    if not config.output:
        raise InputError("no place for the results: add --output FOLDER")
    if Path(config.output).is_file():
        raise InputError(f"--output {config.output} is a file; give a folder")


def _try_rates(config: Config, resume: str) -> dict[float, float]:
    """The accuracy with each rate of `sweep_lr`, of runs in OUTPUT/sweep/.

    That is the paper's protocol: a share of the training set (`sweep_hold_out`) decides, the test set has no say.
    """
    if len(config.sweep_lr) < 2:
        advice = "give some with --set sweep_lr=0.003,0.01,0.03"
        raise InputError(f"recipe {config.name!r} has no learning rates to try; {advice}")
    if not config.sweep_hold_out:
        raise InputError("a sweep needs a part of the training set to choose on; set sweep_hold_out, such as 0.1")
    accuracies = {}
    for lr in config.sweep_lr:
        folder = str(Path(config.output) / "sweep" / f"lr-{lr:g}")
        one = dataclasses.replace(config, lr=lr, hold_out=config.sweep_hold_out, output=folder)
        accuracies[lr] = finish(one, resume)["accuracy"]
        logger.info("lr %g: accuracy %.4f on the held-out part", lr, accuracies[lr])
    return accuracies


def repeat(config: Config, runs: int, resume: str = "auto") -> dict:
    """The accuracies of `runs` runs in OUTPUT/seed-N, N counting from the seed; their mean and deviation.

    Table 2 of the paper: three runs of each fine-tuning. `stdev` is the deviation of a sample, with runs - 1 in the
    denominator; the paper does not say which one it gives. Writes OUTPUT/runs.json.
    """
    output, summaries = Path(config.output), []
    for seed in range(config.seed, config.seed + runs):
        summaries.append(finish(dataclasses.replace(config, seed=seed, output=str(output / f"seed-{seed}")), resume))
        logger.info("seed %d: accuracy %.4f", seed, summaries[-1]["accuracy"])
    accuracies = [summary["accuracy"] for summary in summaries]
    result = dict(
        finished=True,
        accuracy=statistics.mean(accuracies),
        stdev=statistics.stdev(accuracies),
        accuracies=accuracies,
        seeds=list(range(config.seed, config.seed + runs)),
        lr=config.lr,
        seconds=sum(summary["seconds"] for summary in summaries),
    )
    if is_first_rank():
        write_text(output / "runs.json", json.dumps(result, indent=2) + "\n")
    return result
