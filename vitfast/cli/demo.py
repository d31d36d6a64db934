"""Pre-train and fine-tune a small ViT on handwritten digits, and write a report."""

import argparse
from pathlib import Path

from .options import add_shared, unless_stopped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    output = "runs/demo"
    parser.add_argument("--output", metavar="DIR", default=output, help=f"folder of the results (default {output})")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="seed of both runs (default 0)")
    add_shared(parser, "--device", default="")


def run(args: argparse.Namespace) -> None:
    from ..experiments.demo import demo

    unless_stopped(demo, Path(args.output), args.seed, args.device)
