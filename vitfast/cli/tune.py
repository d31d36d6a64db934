"""Find the fastest kernel configurations for this GPU, and keep them in your own table."""

import argparse

from .options import add_shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    model = "models whose sizes are timed: S/16 B/16 'B/16 384' L/16 H/14 (default B/16)"
    add("--model", metavar="NAME", nargs="+", default=["B/16"], help=model)
    add_shared(parser, "--dtype", default="bfloat16", help="dtype that is timed (default bfloat16)")
    only = "tune only operations whose name contains this, such as attention or gelu; can be repeated (default: all)"
    add("--only", metavar="NAME", action="append", default=[], help=only)
    seconds = "time limit in all (default 400 seconds for each model); what is found by then is kept"
    add("--seconds", metavar="N", type=float, default=None, help=seconds)
    batch_size = "images in a batch that is timed (default: 48 to 240, depending on the model)"
    add("--batch-size", metavar="N", type=int, default=None, help=batch_size)


def run(args: argparse.Namespace) -> None:
    import torch

    from ..tools.tune import tune

    tune(args.model, getattr(torch, args.dtype), args.only, args.seconds, args.batch_size)
