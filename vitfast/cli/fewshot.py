"""Measure a model's frozen features: fit a classifier on a few images of each class, or on all,
and print its accuracy.
"""

import argparse
import json
from pathlib import Path

from ..errors import InputError
from .options import add_evaluation_options, add_shared, evaluation_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    data = "as for pretrain; the training split fits the classifier, the validation split measures it"
    add_evaluation_options(parser, data=data)
    add = parser.add_argument
    ridge = "ridge: regularised least squares in closed form (default); knn: nearest neighbours; linear: a linear probe"
    add("--method", choices=("ridge", "knn", "linear"), default="ridge", help=ridge)
    shots = "training images of each class, or all (default ridge: 1 5 10 25, others: all)"
    add("--shots", dest="per_class", metavar="N", nargs="+", type=_shots, default=None, help=shots)
    add("--seeds", metavar="N", type=int, default=3, help="random draws for each number of images (default 3)")
    add("--l2", metavar="X", type=float, default=None, help="regularisation (default ridge: 1024, linear: 1)")
    add("--output", metavar="FILE", type=Path, default=None, help="also write the result to this .json or .csv file")
    add_shared(parser, "--force")


def run(args: argparse.Namespace) -> None:
    from ..eval.fewshot import few_shot
    from ..model.checkpoint.files import check_free
    from ..run.files import write_text

    output = vars(args).pop("output")  # where the result goes: it is no setting
    if output:
        if output.suffix not in (".json", ".csv"):
            raise InputError(f"--output {output}: the result is written as .json or .csv")
        if output.is_dir():
            raise InputError(f"--output {output}: a folder is in the way")
        check_free(output, args.force)
    options = dict(method=args.method, shots=args.per_class, seeds=args.seeds, l2=args.l2)
    config, size = evaluation_config(args)
    result = few_shot(config, img_size=size, **options)
    if args.json:
        print(json.dumps(result))
    else:
        for entry in result["results"]:
            each = " ".join(f"{accuracy:.4f}" for accuracy in entry["accuracies"])
            print(f"{entry['shots']:>4} images a class: accuracy {entry['accuracy']:.4f} ({each})")
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_text(output, _table(result) if output.suffix == ".csv" else json.dumps(result, indent=2) + "\n")


def _table(result: dict) -> str:
    """The result as CSV: a line for each draw of images, which repeats the mean over all draws."""
    from ..run.files import as_csv

    same = {name: result.get(name, "") for name in ("weights", "data", "method", "l2")}
    rows = [
        same | dict(shots=row["shots"], draw=draw, accuracy=accuracy, mean_accuracy=row["accuracy"])
        for row in result["results"]
        for draw, accuracy in enumerate(row["accuracies"])
    ]
    return as_csv(rows[0], rows)


def _shots(text: str) -> int | None:
    try:
        return None if text == "all" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"give whole numbers of images a class, or all; got {text!r}") from None
