"""Train models of several sizes for several lengths, and compare accuracy with compute."""

import argparse

from .options import add_run_options, add_set, run_config, unless_stopped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser)
    add = parser.add_argument
    models = "presets, ResNets such as R50x1, or timm:NAME"
    add("--models", metavar="NAME", nargs="+", required=True, help=models)
    lengths = "train every model for each of these lengths, each time from the start"
    add("--lengths", metavar="EPOCHS", nargs="+", type=float, required=True, help=lengths)
    transfer = "data sets, as for --data, to which each trained model is transferred; the mean accuracy is reported"
    add("--transfer", metavar="SPEC", nargs="+", default=(), help=transfer)
    methods = "fewshot: least squares on frozen features of 5 images of each class (default); finetune"
    add("--transfer-method", choices=("fewshot", "finetune"), default="fewshot", help=methods)
    add_set(parser, "settings of the transfer, such as recipe=finetune/cifar10", "--transfer-set")


def run(args: argparse.Namespace) -> None:
    from ..experiments.scaling import scaling

    how = (args.transfer, args.transfer_method, dict(getattr(args, "transfer_set", [])))
    for entry in unless_stopped(scaling, run_config(args), args.models, args.lengths, *how) or ():
        compute = f"{entry['epochs']:>6g} epochs  {entry['exaflops']:.4g} exaFLOPs"
        told = f"accuracy {entry['accuracy']:.4f}"
        if args.transfer:
            told += f"  transfer {entry['transfer_accuracy']:.4f}"
        print(f"{entry['model']:<10} {compute}  {told}")
