"""Where a run comes from, and the commands that go on from it."""

import html
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import numpy
import timm
import torch

from ...model.baselines import is_baseline
from ...run.config import UNLABELLED, Config
from ...version import __version__

PACKAGE = Path(__file__).resolve().parents[2]


def program() -> list[str]:
    """The words that start vitfast in the way that this process was started."""
    path = Path(sys.argv[0])
    return ["python", "-m", path.parent.name] if path.name == "__main__.py" else [path.name]


def origin() -> dict[str, str]:
    """The command, the versions and the commit that a page was made with."""
    libraries = ", ".join(f"{library.__name__} {library.__version__}" for library in (torch, timm, numpy))
    versions = f"vitfast {__version__}{_commit()}, {libraries}, Python {platform.python_version()}"
    return dict(command=shlex.join([*program(), *sys.argv[1:]]), versions=versions)


def _commit() -> str:
    """ " (commit ...)" of a git checkout of vitfast, "-dirty" where files differ from it; "" elsewhere."""
    if not (PACKAGE.parent / ".git").exists():
        return ""
    command = ["git", "-C", str(PACKAGE.parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
    return f" (commit {told})"


def cpu_name() -> str:
    """The name of this machine's CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def next_commands(config: Config, summary: dict, weights: Path) -> tuple[str, str]:
    """The section of the commands to copy, quoted for a shell; `weights` is the model's folder."""
    run, weights = os.path.abspath(config.output), os.path.abspath(weights)
    folder = os.path.abspath(config.data) if Path(config.data).is_dir() else None
    start = program() if program() == ["python", "-m", "vitfast"] else ["vitfast"]
    lines = []

    def add(comment: str, *words: str, before: str = "", launch: list[str] = start) -> None:
        lines.append(f"# {comment}\n{before}{shlex.join([*launch, *words])}")

    if config.objective in UNLABELLED:
        own = "LABELLED" if summary.get("classes") == 1 else folder or config.data
        labelled = ["--weights", weights, "--data", config.probe or own]
        add("fine-tune it: it has no head yet", "finetune", *labelled, "--output", f"{run}-finetuned")
        add("accuracy of its frozen features, by a linear probe", "fewshot", *labelled, "--method", "linear")
    else:
        add("the classes of images", "predict", folder or "IMAGES", "--weights", weights)
        names = ("data_dir", "hold_out", "num_classes", *(("model",) if is_baseline(config.model) else ()))
        given = [f"{name}={value}" for name in names if (value := getattr(config, name))]
        same = ["--data", folder or config.data, *(["--set", *given] if given else [])]
        add("accuracy on the validation images", "eval", "--weights", weights, *same)
    if not is_baseline(config.model):
        onnx = ["--format", "onnx", "--output", f"{run}/model.onnx"]
        add("a file that runs without vitfast", "export", "--weights", weights, *onnx)
        output = ["--output", f"{run}/embeddings"]
        add("vectors of images, for search", "embed", folder or "IMAGES", "--weights", weights, *output)
    if not summary.get("stopped_early"):
        length = ["--steps", f"{2 * config.steps}"] if config.steps else ["--epochs", f"{2 * config.epochs:g}"]
        words = [config.task, "--config", f"{run}/config.yaml", "--output", run, *length, "--resume", "auto"]
        ranks = summary.get("ranks", 1)
        torchrun = ["torchrun", "--nproc-per-node", str(ranks), "-m", "vitfast"]
        paths = [path for path in (config.data if folder else "", config.weights) if path and not os.path.isabs(path)]
        before = f"cd {shlex.quote(os.getcwd())} && " if paths else ""
        add("go on, to twice the length", *words, before=before, launch=torchrun if ranks > 1 else start)
    note = "Paste them into a shell." + ("" if folder else " IMAGES stands for image files, or a folder of them.")
    return note, f"<pre>{html.escape(chr(10).join(lines))}</pre>"
