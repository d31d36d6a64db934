"""Print the most probable classes of image files."""

import argparse
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import InputError
from .options import add_evaluation_options, add_shared, evaluation_config

TEXT = dict(encoding="utf-8", errors="surrogateescape")  # names that are no UTF-8 go out as they came in
logger = logging.getLogger("vitfast")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    images = "image files, folders of them at any depth, lists of paths (.txt, .lst: one in each line; .csv, .tsv: in "
    images += "a column), or - for a list from the standard input"
    add("images", metavar="IMAGE", nargs="+", help=images)
    add_evaluation_options(parser, sizes=True)
    output = ".csv or .json file; an interrupted command leaves none (default: print CSV line by line)"
    add("--output", metavar="FILE", type=Path, default=None, help=output)
    add_shared(parser, "--force", "--graphs")
    add("--top-k", metavar="N", type=int, default=5, help="number of classes for each image (default 5)")
    sigmoid = "--sigmoid: each class has its own probability; --no-sigmoid: all add up to 1 (default: as the run "
    sigmoid += "trained, if its state/ is beside the weights; else --no-sigmoid)"
    add("--sigmoid", action=argparse.BooleanOptionalAction, default=None, help=sigmoid)


def run(args: argparse.Namespace) -> int:
    """Returns 0 where at least one image has an answer, else 1."""
    from ..data.lists import is_list
    from ..eval.accuracy import compare_pillow, run_record
    from ..eval.predict import predict, write_csv, write_json
    from ..model.baselines import load_any
    from ..model.checkpoint.files import check_free
    from ..run.device import choose_device
    from ..run.files import staged

    output = vars(args).pop("output")  # no setting of a run
    suffix = ".json" if output is None and args.json else ".csv" if output is None else output.suffix
    if suffix not in (".csv", ".json") or (args.json and suffix == ".csv") or (output and output.is_dir()):
        raise InputError(f"--output {output}: give a file that ends in .csv or .json, with --json in .json")
    if output is not None:
        check_free(output, args.force)
    total = None if any(map(is_list, args.images)) else sum(1 for _ in _paths(args.images, say=False))
    config, size = evaluation_config(args)
    model = load_any(config.model, config.weights, size).to(choose_device(config.device))
    compare_pillow(config.weights)
    sigmoid = args.sigmoid
    if sigmoid is None and (sigmoid := run_record(config.weights).get("settings", {}).get("objective") == "sigmoid"):
        logger.info("each class has its own probability, because the weights were trained with objective=sigmoid")
    options, counts = dict(top_k=args.top_k, sigmoid=sigmoid, graphs=args.graphs), Counter()
    answers = predict(model, _paths(args.images), config, **options)

    def write(file) -> None:
        records = _watched(answers, counts, total, file)
        if suffix == ".json":
            write_json(records, file)
        else:
            write_csv(records, file, min(args.top_k, model.num_classes))

    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        with staged(output.parent, output) as scratch, open(scratch / output.name, "w", newline="", **TEXT) as file:
            write(file)
    else:
        sys.stdout.reconfigure(**TEXT)
        try:
            write(sys.stdout)
        except BrokenPipeError:  # `| head` has read enough; Python would complain when it closes the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    place = f", in {output}" if output else ""
    print(f"{counts.total()} images, {counts['failed']} of them without an answer{place}", file=sys.stderr)
    return 0 if counts["answered"] else 1


def _paths(images: list[str], say: bool = True) -> Iterator[str]:
    """The image files that the arguments name, in their order."""
    from ..data.image_files import image_files
    from ..data.lists import is_list, read_paths

    for name in images:
        if is_list(name):
            yield from (path for _, path in read_paths(name))
        else:
            yield from image_files(name, say)


def _watched(records: Iterable[dict], counts: Counter, total: int | None, file) -> Iterator[dict]:
    """Yields the records and counts them; shows progress, and warns of each that has no answer."""
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    off = not sys.stderr.isatty() or file.isatty()  # rows on the same terminal are progress enough
    with logging_redirect_tqdm(), tqdm(total=total, unit="image", dynamic_ncols=True, disable=off) as bar:
        for record in records:
            if "error" in record:
                logger.warning("no answer: %s", record["error"])
            counts["failed" if "error" in record else "answered"] += 1
            yield record
            bar.update()
            if file is sys.stdout:
                file.flush()
