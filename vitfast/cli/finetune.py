"""Adapt trained weights to other data: the head is replaced by a zero linear layer."""

import argparse

from .options import add_training_options
from .pretrain import run

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_training_options(parser, "file, folder or hf-hub:owner/name (required)")
    sweep = "try the recipe's learning rates on a held-out part of the training set first"
    parser.add_argument("--sweep", action="store_true", default=False, help=sweep)
