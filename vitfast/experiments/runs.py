"""The runs of an experiment, and the table of their results.

Each run has its own folder and goes on where it stopped, so the same command again continues the experiment.
"""

import csv
import io
import json
from pathlib import Path

from ..config import Config
from ..distributed import is_first_rank
from ..files import write_text
from ..train.trainer import train


class Stopped(Exception):
    """A run of the experiment was asked to stop, and is saved."""


def finish(config: Config, resume: str = "auto") -> dict:
    """The summary of a run, trained to its end. Raises Stopped."""
    summary = train(config, resume)
    if not summary["finished"]:
        raise Stopped(config.output)
    return summary


def write_records(stem: Path, records: list[dict]) -> None:
    """Writes stem.json and stem.csv (there lists are joined by spaces), on the first rank alone."""
    if not is_first_rank():
        return
    write_text(stem.with_suffix(".json"), json.dumps(records, indent=2) + "\n")
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]))
    writer.writeheader()
    for record in records:
        writer.writerow({k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in record.items()})
    write_text(stem.with_suffix(".csv"), text.getvalue())
