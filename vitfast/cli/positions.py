"""Train with every kind of position embedding (the paper's Table 8)."""

import argparse

from .options import add_run_options, run_config, unless_stopped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser)
    parser.add_argument("--seeds", metavar="N", type=int, default=3, help="number of runs for each kind (default 3)")


def run(args: argparse.Namespace) -> None:
    from ..experiments.positions import positions, positions_table

    entries = unless_stopped(positions, run_config(args), args.seeds)
    print(positions_table(entries) if entries else "", end="")
