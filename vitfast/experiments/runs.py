"""The runs of an experiment, and the table of their results.

Each run has its own folder and goes on where it stopped, so the same command again continues the experiment.
"""

import json

from ..run.config import Config
from ..run.files import as_csv
from ..run.results import Results
from ..train.trainer import train


class Stopped(Exception):
    """A run of the experiment was asked to stop, and is saved."""


def finish(config: Config, resume: str = "auto") -> dict:
    """The summary of a run, trained to its end; `accuracy` is the best of early stopping. Raises Stopped."""
    summary = train(config, resume)
    if not summary["finished"]:
        raise Stopped(config.output)
    return summary | dict(accuracy=summary.get("best_accuracy", summary["accuracy"]))


def write_records(results: Results, name: str, records: list[dict]) -> None:
    """Writes NAME.json and NAME.csv (there lists are joined by spaces)."""
    results.write(f"{name}.json", json.dumps(records, indent=2) + "\n")
    joined = ({k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in each.items()} for each in records)
    results.write(f"{name}.csv", as_csv(records[0], joined))
