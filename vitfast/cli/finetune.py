"""Adapt trained weights to other data; the head becomes a new linear layer of zeros."""

import argparse
from functools import partial

from .options import add_training_options
from .pretrain import train_as_told


def add_arguments(parser: argparse.ArgumentParser) -> None:
    recipe = "finetune/digits for --data digits, else finetune/small, or finetune/imagenet for more than 102,400 images"
    add_training_options(parser, "file, folder or hf-hub:owner/name (required)", recipe)
    sweep = "try the recipe's learning rates on a held-out part of the training set first"
    parser.add_argument("--sweep", action="store_true", default=False, help=sweep)
    runs = "number of runs with different seeds, from --seed on, in OUTPUT/seed-N; runs.json has their mean (default 1)"
    parser.add_argument("--runs", metavar="N", type=int, default=1, help=runs)


def run(args: argparse.Namespace) -> None:
    from ..experiments.sweep import fine_tune

    train_as_told(args, partial(fine_tune, sweep=args.sweep, runs=args.runs))
