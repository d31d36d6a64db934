"""The runs of an experiment, and the table of their results.

Each run has its own folder and goes on where it stopped, so the same command again continues the experiment.
"""

import json
import logging
from pathlib import Path

from ..errors import Diverged, InputError
from ..run.config import Config
from ..run.distributed import is_first_rank
from ..run.files import as_csv
from ..run.results import Results
from ..train.trainer import train

logger = logging.getLogger("vitfast")


class Stopped(Exception):
    """A run of the experiment was asked to stop, and is saved."""


def output_of(config: Config) -> Path:
    """The folder of an experiment and of its runs. Raises InputError where the config names none."""
    if not config.output:
        raise InputError("no place for the results: add --output FOLDER")
    return Path(config.output)


def finish(config: Config, resume: str = "auto") -> dict:
    """The summary of a run, trained to its end; `accuracy` is the best of early stopping. Raises Stopped."""
    summary = ended(train(config, resume))
    return summary | (dict(accuracy=summary["best_accuracy"]) if config.early_stop else {})


def ended(summary: dict) -> dict:
    """Returns the summary of a finished run. Raises Stopped if it is unfinished or was asked to stop.

    Raises InputError for a run without accuracy.
    """
    if not summary["finished"] or summary.get("asked_to_stop"):
        raise Stopped
    if summary["accuracy"] is None:
        raise InputError("an experiment compares accuracies, and this run has no labels: give --set probe=DIR")
    return summary


def attempt(config: Config, resume: str, name: str) -> dict:
    """Calls `finish` and logs it as `name`; a run that diverges gives accuracy 0 and why, `diverged`."""
    try:
        summary = finish(config, resume)
    except Diverged as error:
        if is_first_rank():
            logger.warning("%s diverged: %s", name, error)
        return dict(accuracy=0.0, diverged=str(error))
    logger.info("%s: accuracy %.4f", name, summary["accuracy"])
    return summary


def write_records(results: Results, name: str, records: list[dict]) -> None:
    """Writes NAME.json and NAME.csv, in which lists are joined by spaces."""
    results.write(f"{name}.json", json.dumps(records, indent=2) + "\n")
    joined = ({k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in each.items()} for each in records)
    results.write(f"{name}.csv", as_csv(records[0], joined))
