"""Train models of several sizes for several lengths: accuracy against compute."""

import argparse

from .options import add_run_options, experiment_config, unless_stopped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser)
    add = parser.add_argument
    models = "presets, R50x1 and the like, or timm:NAME"
    add("--models", metavar="NAME", nargs="+", required=True, help=models)
    lengths = "every model is trained this long, from the start each time"
    add("--lengths", metavar="EPOCHS", nargs="+", type=float, required=True, help=lengths)


def run(args: argparse.Namespace) -> int:
    from ..experiments.runs import scaling

    for entry in unless_stopped(scaling, experiment_config(args), args.models, args.lengths) or ():
        compute = f"{entry['epochs']:>6g} epochs  {entry['exaflops']:.4g} exaFLOPs"
        print(f"{entry['model']:<10} {compute}  accuracy {entry['accuracy']:.4f}")
    return 0
