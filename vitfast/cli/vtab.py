"""Fine-tune or probe the same weights on many small tasks of 1000 images each, and write one table."""

import argparse
import json
from pathlib import Path

from ..errors import InputError
from .options import add_evaluation_options, evaluation_layers, unless_stopped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_evaluation_options(parser, at_once="images at once; with --method finetune, images per optimiser step")
    given = parser.add_mutually_exclusive_group(required=True)
    root = "folder that holds VTAB's data sets, such as wds_vtab-pets/"
    given.add_argument("--root", metavar="DIR", type=Path, default=None, help=root)
    tasks = "YAML list of other tasks: SPECs, or name, group, data and settings"
    given.add_argument("--tasks", metavar="FILE", type=Path, default=None, help=tasks)
    add = parser.add_argument
    output = "folder for vtab.txt, .csv and .json, and for the runs of finetune"
    add("--output", metavar="DIR", type=Path, required=True, help=output)
    methods = ("finetune", "ridge", "knn", "linear")
    add("--method", choices=methods, default="finetune", help="how each task is learned (default finetune)")
    add("--examples", metavar="N", type=int, default=1000, help="training images of each task (default 1000)")
    l2 = "regularisation of ridge and linear (default: chosen on a fifth of the images)"
    add("--l2", metavar="X", type=float, default=None, help=l2)
    add("--recipe", metavar="NAME", help="recipe of --method finetune (default finetune/vtab)")


def run(args: argparse.Namespace) -> None:
    from ..experiments.vtab import read_tasks, table, tasks_in, vtab

    output = vars(args).pop("output")  # for all tasks: they are no settings of their runs
    if len(getattr(args, "img_size", [])) > 1:
        raise InputError(f"--img-size takes one number here, got {len(args.img_size)}")
    tasks, layers = tasks_in(args.root) if args.root else read_tasks(args.tasks), evaluation_layers(args)
    result = unless_stopped(vtab, tasks, args.method, layers, output, args.examples, args.l2)
    if result:
        print(json.dumps(result) if args.json else table(result))
