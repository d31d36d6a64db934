"""Where a run comes from, and the commands that go on from it."""

import html
import os
import platform
import shlex
import sys
from pathlib import Path

import numpy
import timm
import torch

from ...model.presets import is_baseline
from ...run.config import Config
from ...version import __version__


def origin() -> dict[str, str]:
    """The command and the versions that make a page."""
    path = Path(sys.argv[0])
    program = ["python", "-m", path.parent.name] if path.name == "__main__.py" else [path.name]
    libraries = ", ".join(f"{library.__name__} {library.__version__}" for library in (torch, timm, numpy))
    versions = f"vitfast {__version__}, {libraries}, Python {platform.python_version()}"
    return dict(command=shlex.join([*program, *sys.argv[1:]]), versions=versions)


def next_commands(config: Config, summary: dict, weights: Path) -> tuple[str, str]:
    """The section of the commands to copy, quoted for a shell; `weights` is the model's folder."""
    run, weights = os.path.abspath(config.output), os.path.abspath(weights)
    folder = os.path.abspath(config.data) if Path(config.data).is_dir() else None
    lines = []

    def add(comment: str, *words: str, before: str = "vitfast") -> None:
        lines.append(f"# {comment}\n{before} {shlex.join(words)}")

    if config.objective == "masked":
        more = ["finetune", "--weights", weights, "--data", folder or config.data, "--output", f"{run}-finetuned"]
        add("fine-tune it: it has no head yet", *more)
    else:
        names = ("data_dir", "hold_out", "num_classes", *(("model",) if is_baseline(config.model) else ()))
        given = [f"{name}={value}" for name in names if (value := getattr(config, name))]
        measured = ["--data", folder or config.data, *(["--set", *given] if given else [])]
        add("the classes of images", "predict", folder or "IMAGES", "--weights", weights)
        add("accuracy on the validation images", "eval", "--weights", weights, *measured)
    if not is_baseline(config.model):
        onnx = ["--format", "onnx", "--output", f"{run}/model.onnx"]
        add("a file that runs without vitfast", "export", "--weights", weights, *onnx)
        output = ["--output", f"{run}/embeddings"]
        add("vectors of images, for search", "embed", folder or "IMAGES", "--weights", weights, *output)
    if not summary.get("stopped_early"):
        length = ["--steps", f"{2 * config.steps}"] if config.steps else ["--epochs", f"{2 * config.epochs:g}"]
        words = [config.task, "--config", f"{run}/config.yaml", "--output", run, *length, "--resume", "auto"]
        ranks = summary.get("ranks", 1)
        before = f"torchrun --nproc-per-node {ranks} -m vitfast" if ranks > 1 else "vitfast"
        if any(path and not os.path.isabs(path) for path in (config.data if folder else "", config.weights)):
            before = f"cd {shlex.quote(os.getcwd())} && {before}"
        add("go on, to twice the length", *words, before=before)
    note = "Paste them into a shell." + ("" if folder else " IMAGES stands for image files, or a folder of them.")
    return note, f"<pre>{html.escape(chr(10).join(lines))}</pre>"
