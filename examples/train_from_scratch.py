"""A ViT trained from scratch on a folder of images, by vitfast's training loop.

    python examples/train_from_scratch.py                      # scikit-learn's digits: a minute on a CPU
    python examples/train_from_scratch.py --data /data/imagenet --recipe plain-s16/imagenet-90ep --output runs/s16
    torchrun --nproc-per-node 8 examples/train_from_scratch.py --data ...

--data has the folders train/CLASS/ and val/CLASS/. The recipe sets model, augmentation and optimiser (`vitfast recipes`
lists them). If the run was cut off, the same command continues it. `vitfast pretrain` does the same on the command
line; from Python you can change settings and log each row of the metrics.
"""

import argparse
import logging
import os

from tqdm import tqdm

from vitfast.train.recipes import resolve
from vitfast.train.trainer import train


def show(row: dict) -> None:
    """Prints a row of metrics.csv above the progress bar; wandb.log or another logger may stand here."""
    tqdm.write(f"step {row['step']:6} {row['split']:5} loss {row['loss']:.4f} accuracy {row['accuracy']:.4f}")


def main(argv: list[str] | None = None) -> dict:
    """Trains; returns the summary of the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits", help="a folder, digits, or a data set of timm (default digits)")
    parser.add_argument("--recipe", default="digits", help="the name of a recipe (default digits)")
    parser.add_argument("--output", default="runs/scratch", help="the run's folder (default runs/scratch)")
    parser.add_argument("--epochs", type=float, help="the length of the run (default: the recipe's)")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # what vitfast says about the run
    settings = dict(recipe=args.recipe, data=args.data, output=args.output)
    changes = dict(log_every=20)  # any setting of docs/reference/settings.md
    if args.epochs is not None:
        changes["epochs"] = args.epochs
    summary = train(resolve("pretrain", settings, changes), on_metrics=show)
    if summary["finished"] and os.environ.get("RANK", "0") == "0":  # one of torchrun's processes
        print(
            f"accuracy {summary['accuracy']:.4f}; ViT.from_pretrained({args.output + '/checkpoints/last'!r}) loads it"
        )
    return summary


if __name__ == "__main__":
    main()
