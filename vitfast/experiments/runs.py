"""The runs of an experiment, and the table of their results.

Each run has its own folder and goes on where it stopped, so the same command again continues the experiment.
"""

import csv
import io
import json

from ..run.config import Config
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
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]))
    writer.writeheader()
    for record in records:
        writer.writerow({k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in record.items()})
    results.write(f"{name}.csv", text.getvalue())
