"""The command line. Each command imports what it needs when it runs, so that the core works without the extra `train`."""

import argparse
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

from . import __version__
from .errors import InputError

EPILOG = """examples:
  vitfast demo                                                     the whole way on handwritten digits, in a minute or two on a CPU
  vitfast pretrain --recipe plain-s16/imagenet-90ep --data /data/imagenet --output runs/s16
  vitfast finetune --weights runs/s16/checkpoints/last --data torch/cifar10 --output runs/cifar10
  vitfast eval --weights runs/cifar10/checkpoints/last --data torch/cifar10

The same pretrain or finetune command again continues a run that was cut off."""


def _set_pair(text: str) -> tuple[str, str]:
    field, equals, value = text.partition("=")
    if not equals or not field:
        raise argparse.ArgumentTypeError(f"expected FIELD=VALUE, got {text!r}")
    return field.strip().replace("-", "_"), value.strip()


def _add_run_options(parser: argparse.ArgumentParser, weights_help: str) -> None:
    add = parser.add_argument
    add("--config", metavar="FILE", help="YAML file of settings, such as a run folder's config.yaml; flags win over it")
    add("--recipe", metavar="NAME", help="where the settings start from; `vitfast recipes` lists them")
    add("--model", metavar="NAME", help="preset: Ti/16 S/16 S/32 B/16 B/32 L/16 L/32 H/14")
    add("--data", metavar="SPEC", help="folder with train/<class>/* and val/<class>/*, 'digits', 'synthetic', or torch/..., hfds/..., wds/...")
    add("--output", metavar="DIR", help="run folder: settings, metrics, checkpoints, summary.json")
    add("--weights", metavar="PATH", help=weights_help)
    add("--img-size", metavar="N", type=int, help="side of the images in pixels; positions are interpolated where it changes")
    add("--batch-size", metavar="N", type=int, help="images per optimiser step, over all devices")
    add("--epochs", metavar="N", type=float, help="length of the run in passes over the data")
    add("--steps", metavar="N", type=int, help="length of the run in optimiser steps")
    add("--lr", metavar="X", type=float, help="learning rate after the warm-up")
    add("--seed", metavar="N", type=int, help="of initialisation, order and augmentation (default 0)")
    add("--save-every", metavar="STEPS", type=int, help="steps between checkpoints (default: at each evaluation)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--compile", action=argparse.BooleanOptionalAction, help="torch.compile (default: on cuda)")
    add("--set", metavar="FIELD=VALUE", nargs="+", action="extend", type=_set_pair, help="any other setting; --print-config shows them")
    parser.add_argument("--resume", metavar="auto|never|PATH", default="auto", help="auto: go on where the run folder stopped (default)")
    parser.add_argument("--print-config", action="store_true", default=False, help="print the settings of this run as YAML and stop")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vitfast", description="Vision Transformers, trained and run fast.", epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"vitfast {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, text: str, run) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", argument_default=argparse.SUPPRESS)
        sub.set_defaults(run=run)
        sub.add_argument("--debug", action="store_true", default=False, help="show the traceback of an error")
        return sub

    _add_run_options(
        command("pretrain", "train a ViT, from scratch or from weights whose head it keeps", _train), "start from these weights instead of from scratch"
    )
    sub = command("finetune", "adapt trained weights to other data: the head is replaced by a zero linear layer", _train)
    _add_run_options(sub, "file, folder or hf-hub:owner/name (required)")
    sub = command("eval", "measure a model's accuracy on the validation split of some data", _eval)
    sub.add_argument("--weights", metavar="PATH", required=True, help="file, folder or hf-hub:owner/name")
    sub.add_argument("--data", metavar="SPEC", required=True, help="as for pretrain; its validation split is used")
    sub.add_argument("--img-size", metavar="N", type=int, help="default: the model's own")
    sub.add_argument("--batch-size", metavar="N", type=int, help="default 256")
    sub.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    sub.add_argument("--set", metavar="FIELD=VALUE", nargs="+", action="extend", type=_set_pair, help="such as amp=none or data_dir=/data")
    sub.add_argument("--json", action="store_true", default=False, help="print the result as JSON")
    sub = command("demo", "pre-train and fine-tune a small ViT on handwritten digits, and write a report", _demo)
    sub.add_argument("--output", metavar="DIR", default="runs/demo", help="default runs/demo")
    sub.add_argument("--seed", metavar="N", type=int, default=0, help="default 0")
    sub.add_argument("--device", choices=("cpu", "cuda"), default="", help="default: cuda where there is one")
    sub = command("doctor", "check every kernel on this machine against float64, and time it on a GPU", _doctor)
    sub.add_argument("--json", action="store_true", default=False, help="print the results as JSON")
    sub = command("recipes", "list the recipes", _recipes)
    sub.add_argument("--json", action="store_true", default=False, help="as a list of objects with every field")
    return parser


def _layers(args: argparse.Namespace) -> list[dict]:
    """Settings from the weakest to the strongest: config file, flags, --set."""
    import yaml

    given = {k: v for k, v in vars(args).items() if k not in ("command", "run", "debug", "resume", "print_config", "config", "set", "json")}
    layers = [given, dict(getattr(args, "set", []))]
    if getattr(args, "config", None):
        path = Path(args.config)
        try:
            content = yaml.safe_load(path.read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise InputError(f"--config {path} cannot be read as YAML: {str(error).splitlines()[0]}") from None
        if not isinstance(content, dict):
            raise InputError(f"--config {path} must hold settings such as 'lr: 0.001', got {type(content).__name__}")
        layers.insert(0, content)
    return layers


def _train(args: argparse.Namespace) -> int:
    from .train.recipes import resolve

    config = resolve(args.command, *_layers(args))
    if args.print_config:
        import yaml

        from .train.recipes import as_plain

        print(yaml.safe_dump(as_plain(config), sort_keys=False), end="")
        return 0
    from .train.loop import train

    summary = train(config, args.resume)
    if summary["finished"]:
        print(f"accuracy {summary['accuracy']:.4f}, {summary['images_per_second']:,.0f} images/s, {summary['seconds']:.0f} s, in {config.output}")
    return 0


def _eval(args: argparse.Namespace) -> int:
    from .train.evaluate import evaluate_weights
    from .train.recipes import resolve

    layers = _layers(args)
    if hasattr(args, "batch_size"):
        layers.append({"eval_batch_size": args.batch_size})
    result = evaluate_weights(resolve("eval", *layers), getattr(args, "img_size", None))
    text = ", ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in result.items())
    print(json.dumps(result) if args.json else text)
    return 0


def _demo(args: argparse.Namespace) -> int:
    from .train.demo import demo

    demo(Path(args.output), args.seed, args.device)
    return 0


def _doctor(args: argparse.Namespace) -> int:
    import torch

    from .kernels.launch import INTERPRETED

    if not torch.cuda.is_available() and not INTERPRETED:  # the interpreter has to be chosen before the kernels are imported
        command = [sys.executable, "-m", "vitfast", "doctor", *(["--json"] if args.json else [])]
        return subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}).returncode
    from .doctor import doctor

    return doctor(args.json)


def _recipes(args: argparse.Namespace) -> int:
    import dataclasses

    from .train.recipes import RECIPES

    rows = [dataclasses.asdict(recipe) for recipe in RECIPES.values()]
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        length = f"{row['steps']} steps" if row["steps"] else f"{row['epochs']:g} epochs"
        print(f"{row['name']:<26} {row['model']:<8} {row['img_size']:>4} px  batch {row['batch_size']:<5} {length:<12} {row['optimizer']:<6} lr {row['lr']:g}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Exit codes: 0 done (or stopped and saved), 1 failed on the way, 2 wrong input, 130 interrupted."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for name in ("timm", "httpx", "datasets", "fsspec", "torch"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("vitfast: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if args.debug:
            raise
        return _tell(error)


def _tell(error: Exception) -> int:
    """One line for an error that a user can mend, the exception itself for the others."""
    text = " ".join(str(error).split())
    if isinstance(error, InputError):
        print(f"vitfast: error: {text}", file=sys.stderr)
        return 2
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("vitfast"):
        print(f"vitfast: error: {error.name} is not installed; this command needs pip install 'vitfast[train]'", file=sys.stderr)
        return 2
    if type(error).__name__ == "TrainingError" or isinstance(error, OSError):
        print(f"vitfast: error: {text}", file=sys.stderr)
        return 1
    raise error


if __name__ == "__main__":
    sys.exit(main())
