"""Fine-tuning as the paper does it: a rate chosen on held-out images, and several runs with it."""

import dataclasses
import json
import logging
import statistics
from pathlib import Path

from ..errors import InputError, TrainingError
from ..run.config import Config, as_plain, course
from ..run.results import Results
from ..train.resume import check_settings
from ..train.run_folder import check_output, find_checkpoint, read_settings, read_summary
from .runs import attempt, finish, output_of

logger = logging.getLogger("vitfast")


def fine_tune(config: Config, resume: str = "auto", sweep: bool = False, runs: int = 1) -> dict:
    """Fine-tunes once, or `runs` times; with `sweep` it first tries each rate and then takes the best.

    Returns the summary of the run, or of `repeat`. resume: "auto" goes on where the runs stopped, "never" starts all of
    them again. A sweep writes OUTPUT/sweep.json as it goes.
    """
    if runs < 1:
        raise InputError(f"--runs must be positive, got {runs}")
    if (sweep or runs > 1) and resume not in ("auto", "never"):
        raise InputError(f"--sweep and --runs start several runs, so --resume takes auto or never, got {resume}")
    output, settings = output_of(config), course(as_plain(config), length=True) | dict(runs=runs)
    table = Results(output, "sweep", settings, ["sweep.json"]) if sweep else None
    mean = Results(output, "runs", settings, ["runs.json"]) if runs > 1 else None
    if table:
        _check_rates(config)
        for one in _of_seeds(config, runs) if mean else [config]:
            _check_output(one, resume)
        told = _try_rates(config, resume, table)
        logger.info("lr %g is best; training on the whole training set", told["lr"])
        config = dataclasses.replace(config, lr=told["lr"], sweep_lr=())
    summary = repeat(config, resume, runs, mean) if mean else finish(config, resume)
    if table:
        table.write("sweep.json", json.dumps(told | dict(accuracy=summary["accuracy"]), indent=2) + "\n")
    return summary


def _check_rates(config: Config) -> None:
    """Raises InputError where there are no rates to try, or no held-out images to try them on."""
    if len(config.sweep_lr) < 2:
        advice = "give some with --set sweep_lr=0.003,0.01,0.03"
        raise InputError(f"recipe {config.name!r} has no learning rates to try; {advice}")
    if not config.sweep_hold_out:
        raise InputError("a sweep needs a part of the training set to choose on; set sweep_hold_out, such as 0.1")


def _check_output(config: Config, resume: str) -> None:
    """Raises InputError, before hours of a sweep, where the run after it will be refused in any case."""
    run = Path(config.output)
    check_output(run)
    settings = read_settings(run) if resume == "auto" and (find_checkpoint(run) or read_summary(run)) else None
    if settings:
        lr = settings.get("lr") if settings.get("lr") in config.sweep_lr else config.sweep_lr[0]
        check_settings(dataclasses.replace(config, lr=lr, sweep_lr=()), settings, run)


def _try_rates(config: Config, resume: str, results: Results) -> dict:
    """The content of sweep.json: the accuracy of each `sweep_lr`, by runs in OUTPUT/sweep/, and the best.

    That is the paper's protocol: a share of the training set (`sweep_hold_out`) decides, the test set has no say. A
    rate that diverges has accuracy 0, and its row says how. Raises TrainingError where every one does.
    """
    told = dict(lr=None, hold_out=config.sweep_hold_out, tried=[], accuracy=None)
    for lr in config.sweep_lr:
        folder = str(Path(config.output) / "sweep" / f"lr-{lr:g}")
        one = dataclasses.replace(config, lr=lr, sweep_lr=(), hold_out=config.sweep_hold_out, output=folder)
        summary = attempt(one, resume, f"lr {lr:g} on the held-out part")
        diverged = {name: summary[name] for name in ("diverged",) if name in summary}
        told["tried"].append(dict(lr=lr, held_out_accuracy=summary["accuracy"], **diverged))
        results.write("sweep.json", json.dumps(told, indent=2) + "\n")
    best = max(told["tried"], key=lambda row: ("diverged" not in row, row["held_out_accuracy"], -row["lr"]))
    if "diverged" in best:
        raise TrainingError(f"with every rate of sweep_lr the training diverged, at {best['lr']:g}: {best['diverged']}")
    return told | dict(lr=best["lr"])


def _of_seeds(config: Config, runs: int) -> list[Config]:
    """The Configs of `runs` runs, one for each seed N from the config's on, in OUTPUT/seed-N."""
    seeds = range(config.seed, config.seed + runs)
    return [dataclasses.replace(config, seed=n, output=str(Path(config.output) / f"seed-{n}")) for n in seeds]


def repeat(config: Config, resume: str, runs: int, results: Results) -> dict:
    """The accuracies of `runs` runs in OUTPUT/seed-N, N counting from the seed; their mean and deviation.

    Table 2 of the paper: three runs of each fine-tuning. `stdev` is the deviation of a sample, with runs - 1 in the
    denominator; the paper does not say which one it gives. Writes OUTPUT/runs.json. Raises TrainingError after the last
    run if any run diverged, because there is no mean then.
    """
    summaries = {one.seed: attempt(one, resume, f"seed {one.seed}") for one in _of_seeds(config, runs)}
    diverged = {seed: summary["diverged"] for seed, summary in summaries.items() if "diverged" in summary}
    accuracies = {seed: summary["accuracy"] for seed, summary in summaries.items() if seed not in diverged}
    if diverged:
        others = ", ".join(f"{seed}: {accuracy:.4f}" for seed, accuracy in accuracies.items()) or "none"
        said = f"{len(diverged)} of {runs} runs diverged, with seed {', '.join(map(str, diverged))}"
        first = next(iter(diverged.values()))
        raise TrainingError(f"{said}, so that there is no mean (accuracy of the others by seed: {others}); {first}")
    result = dict(
        finished=True,
        accuracy=statistics.mean(accuracies.values()),
        stdev=statistics.stdev(accuracies.values()),
        accuracies=list(accuracies.values()),
        seeds=list(accuracies),
        lr=config.lr,
        seconds=sum(summary["seconds"] for summary in summaries.values()),
    )
    results.write("runs.json", json.dumps(result, indent=2) + "\n")
    return result
