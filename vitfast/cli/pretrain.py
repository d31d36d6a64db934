"""Train a ViT from scratch, or from weights whose head is kept."""

import argparse
from collections.abc import Callable

from ..run.config import commented
from .options import add_training_options, run_config, unless_stopped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    recipe = "digits for --data digits, else vit-b16/imagenet"
    add_training_options(parser, "start from these weights instead of from scratch", recipe)


def run(args: argparse.Namespace) -> None:
    from ..train.trainer import train

    train_as_told(args, train)


def train_as_told(args: argparse.Namespace, train: Callable) -> None:
    """Calls train(config, resume) and prints its result; with --print-config it only prints the settings."""
    config = run_config(args, args.command)
    if args.print_config:
        print(commented(config))
        return
    from ..run.distributed import is_first_rank
    from ..train.resume import check_unfinished

    if args.resume is None:
        check_unfinished(config)
    summary = unless_stopped(train, config, args.resume or "auto")
    if summary and summary["finished"] and is_first_rank():
        print(f"{_told(summary)}, in {config.output}")


def _told(summary: dict) -> str:
    if "accuracies" in summary:
        each = " ".join(f"{accuracy:.4f}" for accuracy in summary["accuracies"])
        return f"accuracy {summary['accuracy']:.4f} ± {summary['stdev']:.4f} ({each}), {summary['seconds']:.0f} s"
    speed = f"{summary['images_per_second']:,.0f} images/s, {summary['seconds']:.0f} s"
    if summary.get("rank") is not None:
        from ..train.log import in_words

        return f"{in_words(summary)}, {speed}"
    best = ""
    if "best_step" in summary:
        last = summary["best_step"] == summary["steps"]
        best = " (the best" if last else f" (best {summary['best_accuracy']:.4f} at step {summary['best_step']}"
        best += ", in best/)"
    return f"accuracy {summary['accuracy']:.4f}{best}, {speed}"
