"""Small runs on the digits, and what they leave."""

import csv
import dataclasses
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from vitfast.run.config import Config
from vitfast.train.recipes import resolve
from vitfast.train.step import TrainStep

QUICK = dict(img_size=16, batch_size=16, save_every=2, ema_decay=0.9)
FOLDER = dict(data="data", model="Nano/8", img_size=16, batch_size=4, save_every=1, workers=0, steps=2)


def digits(output: Path | str = "unused", **fields) -> Config:
    """Pre-training on the digits by their recipe, on the CPU."""
    settings = dict(recipe="digits", data="digits", output=str(output), device="cpu", batch_size=32)
    return resolve("pretrain", settings | fields)


def finetuning(pretrained: Path, output: Path, **fields) -> Config:
    """Fine-tuning on the digits, on the CPU, of the model that the run `pretrained` kept."""
    kept = str(pretrained / "checkpoints" / "last")
    return resolve("finetune", dict(data="digits", weights=kept, output=str(output), device="cpu", **fields))


def without_labels(output: Path | str = "unused", **fields) -> Config:
    """A short pre-training on the digits by LeJEPA, on the CPU."""
    settings = dict(recipe="ssl/small", data="digits", output=str(output), device="cpu", model="Nano/8", img_size=32)
    settings |= dict(batch_size=48, projector_width=64, local_crops=3, train_images=300, epochs=None, steps=12)
    return resolve("pretrain", settings | dict(workers=0, compile=False, log_every=2, warmup_ratio=0.1) | fields)


def pretraining_command(output: Path, resume: str | Path = "auto", **fields) -> list[str]:
    """The arguments of `vitfast` that pre-train on the digits, with the settings of `digits`."""
    given = dict(recipe="digits", data="digits", device="cpu", output=output, resume=resume, batch_size=32) | fields
    flags = [(f"--{name}", str(given.pop(name))) for name in ("recipe", "data", "device", "output", "resume")]
    settings = [f"{name}={'none' if value is None else value}" for name, value in given.items()]
    return ["pretrain", *(text for flag in flags for text in flag), "--set", *settings]


def weights(run: Path) -> dict:
    """The tensors of the model that a run kept."""
    return load_file(run / "checkpoints" / "last" / "model.safetensors")


def training_tensors(run: Path) -> dict:
    """The tensors that a run needs to continue, without those that say which images it has."""
    found = load_file(run / "checkpoints" / "last" / "state" / "state.safetensors")
    return {name: tensor for name, tensor in found.items() if not name.startswith("images.")}


def same(a: dict, b: dict) -> bool:
    """Whether both have the same names and, bit for bit, the same tensors."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def same_runs(a: Path, b: Path) -> bool:
    """Whether two runs kept, bit for bit, the same model and the same training state."""
    return same(weights(a), weights(b)) and same(training_tensors(a), training_tensors(b))


def records(run: Path, split: str, *columns: str) -> list:
    """A column of the records of a split in metrics.csv, or tuples of several."""
    with open(run / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == split]
    return [row[columns[0]] if len(columns) == 1 else tuple(row[name] for name in columns) for row in rows]


def cut_at(monkeypatch, step: int) -> None:
    """Every run raises KeyError in place of this step (from 0), until `monkeypatch.undo()`."""
    call = TrainStep.__call__

    def cut(self, images, labels, number, total, **count):
        if number == step:
            raise KeyError("power cut")
        return call(self, images, labels, number, total, **count)

    monkeypatch.setattr(TrainStep, "__call__", cut)


def changed(config: Config, **fields) -> Config:
    """The config with other values."""
    return dataclasses.replace(config, **fields)


def wait_for(path: Path, *processes, seconds: float = 120) -> None:
    """Returns once there is such a file; fails where a process has ended before."""
    end = time.time() + seconds
    while not path.exists():
        assert time.time() < end and all(process.poll() is None for process in processes), f"{path} never came"
        time.sleep(0.02)


def content(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder with its bytes, every folder with None."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}
