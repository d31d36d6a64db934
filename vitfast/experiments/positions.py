"""Position embeddings of every kind at every place: the paper's Table 8."""

import dataclasses
import logging
import statistics

from ..errors import InputError
from ..run.config import Config, as_plain, course
from ..run.results import Results
from .runs import finish, output_of, write_records

logger = logging.getLogger("vitfast")

NAMES = {"none": "no positions", "learn": "1-D", "learn2d": "2-D", "relative": "relative"}
PLACES = ("stem", "layers", "layers_shared")  # where learned positions are added; the others have one place
VARIANTS = [(kind, place) for kind in NAMES for place in (PLACES if kind.startswith("learn") else PLACES[:1])]


def positions(config: Config, seeds: int = 3) -> list[dict]:
    """Trains every variant of Table 8. Returns their accuracies, with mean and spread over seeds.

    Writes positions.csv, positions.json and positions.md.
    """
    if seeds < 1:
        raise InputError(f"--seeds must be positive, got {seeds}")
    records, output = [], output_of(config)
    files = [f"positions.{suffix}" for suffix in ("csv", "json", "md")]
    results = Results(output, "positions", course(as_plain(config), length=True) | dict(seeds=seeds), files)
    for kind, place in VARIANTS:
        accuracies = []
        for seed in range(config.seed, config.seed + seeds):
            run = str(output / f"{kind}-{place}-seed{seed}")
            one = dataclasses.replace(config, pos_embed=kind, pos_embed_at=place, seed=seed, output=run)
            accuracies.append(finish(one)["accuracy"])
        mean, stdev = statistics.mean(accuracies), statistics.stdev(accuracies) if seeds > 1 else 0.0
        records.append(dict(positions=kind, at=place, accuracy=mean, stdev=stdev, accuracies=accuracies))
        logger.info("%s at %s: accuracy %.4f", NAMES[kind], place, mean)
    write_records(results, "positions", records)
    results.write("positions.md", positions_table(records))
    return records


def positions_table(records: list[dict]) -> str:
    """Table 8 in Markdown: a line for each kind, a column for each place."""
    cells = {(r["positions"], r["at"]): f"{r['accuracy']:.4f} ± {r['stdev']:.4f}" for r in records}
    lines = ["| positions | at the stem | at every layer | at every layer, shared |", "|---|---|---|---|"]
    for kind, name in NAMES.items():
        lines.append(f"| {name} | {' | '.join(cells.get((kind, place), '') for place in PLACES)} |")
    return "\n".join(lines) + "\n"
