"""Measure a model's accuracy on the validation split of some data, or on any folder."""

import argparse
import json

from .options import add_evaluation_options, evaluation_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    data = "as for pretrain, or any folder of class folders: val/ of it is measured, or else all of it"
    add_evaluation_options(parser, data=data, sizes=True)
    real = "also measure by ImageNet's reassessed labels: FILE is their real.json (default: timm's copy of it)"
    split = "without val/: all images, or val: the tenth that training holds out (default: val of its own run's data)"
    parser.add_argument("--split", choices=("all", "val"), default="", help=split)
    parser.add_argument("--real", metavar="FILE", nargs="?", const="", help=real)


def run(args: argparse.Namespace) -> None:
    from ..eval.accuracy import evaluate_weights
    from ..run.distributed import is_first_rank

    options = {"real": args.real} if hasattr(args, "real") else {}
    result = evaluate_weights(*evaluation_config(args), split=args.split, **options)
    if is_first_rank():  # every process of torchrun has the same result
        text = ", ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in result.items())
        print(json.dumps(result) if args.json else text)
