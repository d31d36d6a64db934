"""Measure a model's frozen features: a closed-form classifier from few images, k-NN or
a linear probe.
"""

import argparse
import json

from .options import add_evaluation_options, evaluation_layers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    data = "as for pretrain; learned on its training split, measured on its validation split"
    add_evaluation_options(parser, data=data)
    add = parser.add_argument
    ridge = "ridge: regularised least squares (default)"
    add("--method", choices=("ridge", "knn", "linear"), default="ridge", help=ridge)
    shots = "training images a class, or all (ridge: 1 5 10 25, others: all)"
    add("--shots", metavar="N", nargs="+", type=_shots, default=None, help=shots)
    add("--seeds", metavar="N", type=int, default=3, help="draws of each number of images (default 3)")
    add("--l2", metavar="X", type=float, default=None, help="regularisation (default ridge: 1024, linear: 1)")


def run(args: argparse.Namespace) -> int:
    from ..eval.fewshot import few_shot
    from ..train.recipes import resolve

    options = dict(method=args.method, shots=args.shots, seeds=args.seeds, l2=args.l2)
    result = few_shot(resolve("eval", *evaluation_layers(args)), img_size=getattr(args, "img_size", None), **options)
    if args.json:
        print(json.dumps(result))
        return 0
    for entry in result["results"]:
        each = " ".join(f"{accuracy:.4f}" for accuracy in entry["accuracies"])
        print(f"{entry['shots']:>4} images a class: accuracy {entry['accuracy']:.4f} ({each})")
    return 0


def _shots(text: str) -> int | None:
    return None if text == "all" else int(text)
