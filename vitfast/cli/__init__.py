"""The command line: a file for each command, which imports what it needs when it runs.

So the core works without the extra `train`, and `vitfast --help` is quick.
"""

import argparse
import logging
import signal
import sys
from importlib import import_module

from ..errors import InputError, TrainingError, both_ends, install
from ..version import __version__

# Each module is the command of its name (a dash is an underscore there): its docstring is the help,
# `add_arguments(parser)` adds the options, and `run(args)` returns the exit code, or None for 0.
COMMANDS = """
    pretrain finetune eval predict fewshot vtab demo doctor tune kernels convert export inspect cost
    embed scaling positions recipes report-gpu
""".split()

EPILOG = """examples:
  vitfast doctor                                                   check the kernels on this machine first
  vitfast demo                                                     pre-train and fine-tune on handwritten digits, \
in a minute or two on a CPU
  vitfast pretrain --recipe plain-s16/imagenet-90ep --data /data/imagenet --output runs/s16
  vitfast finetune --weights runs/s16/checkpoints/last --data torch/cifar10 --output runs/cifar10
  vitfast eval --weights runs/cifar10/checkpoints/last --data torch/cifar10
  vitfast predict photos --weights runs/cifar10/checkpoints/last --output photos.csv

If a run was cut off, the same pretrain or finetune command continues it.
VITFAST_KERNELS=off runs PyTorch in place of the kernels."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vitfast",
        description="Train, fine-tune, evaluate and use Vision Transformers on Triton kernels.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vitfast {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        command = import_module(f".{name.replace('-', '_')}", __package__)
        description = " ".join((command.__doc__ or "").split())  # python -OO has none
        summary = description[:1].lower() + description[1:].removesuffix(".")
        sub = commands.add_parser(name, help=summary, description=description, argument_default=argparse.SUPPRESS)
        sub.set_defaults(run=command.run)
        sub.add_argument("--debug", action="store_true", default=False, help="show the traceback of an error")
        command.add_arguments(sub)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one command.

    Exit codes: 0 done (or stopped and saved), 1 failed on the way, 2 wrong input, 130 interrupted.
    """
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for name in ("timm", "httpx", "datasets", "fsspec", "torch", "onnxscript", "onnx_ir"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        return args.run(args) or 0
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # another Ctrl-C ends the process without a traceback
        print("vitfast: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        text, code = _explanation(error)
        if args.debug or text is None:
            raise
        print(f"vitfast: error: {text}", file=sys.stderr)
        return code


def _explanation(error: Exception) -> tuple[str | None, int]:
    """One line for an error that a user can mend, None for others; and the exit code."""
    text = " ".join(str(error).split())
    if isinstance(error, InputError):
        return text, 2
    if isinstance(error, ImportError) and "triton" in (error.name or text):
        return f"this command runs the kernels, which need triton (pip install triton, on Linux): {text}", 2
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("vitfast"):
        return f"{error.name} is not installed, and this command needs it: {install('train')}", 2
    if isinstance(error, RuntimeError) and text.startswith("DataLoader worker"):  # PyTorch's, from anywhere
        advice = "where memory ran out, fewer loader processes may fit, such as --set workers=1"
        return f"a process that loads images has ended ({both_ends(text)}); {advice}", 1
    if isinstance(error, (TrainingError, OSError)):
        return text, 1
    return None, 1
