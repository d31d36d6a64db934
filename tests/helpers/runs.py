"""Small runs on the digits, and what they leave."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from vitfast.config import Config
from vitfast.train.recipes import resolve
from vitfast.train.step import TrainStep


def digits(output: Path | str = "unused", **fields) -> Config:
    """Pre-training on the digits by their recipe, on the CPU."""
    settings = dict(recipe="digits", data="digits", output=str(output), device="cpu", batch_size=32)
    return resolve("pretrain", settings | fields)


def finetuning(pretrained: Path, output: Path, **fields) -> Config:
    """Fine-tuning on the digits, on the CPU, of the model that the run `pretrained` kept."""
    kept = str(pretrained / "checkpoints" / "last")
    return resolve("finetune", dict(data="digits", weights=kept, output=str(output), device="cpu", **fields))


def pretraining_command(output: Path, **options) -> list[str]:
    """The arguments of `vitfast` that pre-train on the digits; options such as save_every=3."""
    given = dict(recipe="digits", data="digits", device="cpu", batch_size=32, output=output) | options
    return ["pretrain", *(text for k, v in given.items() for text in (f"--{k.replace('_', '-')}", str(v)))]


def weights(run: Path) -> dict:
    """The tensors of the model that a run kept."""
    return load_file(run / "checkpoints" / "last" / "model.safetensors")


def training_tensors(run: Path) -> dict:
    """The tensors that a run needs to continue."""
    return load_file(run / "checkpoints" / "last" / "state" / "state.safetensors")


def same(a: dict, b: dict) -> bool:
    """Whether both have the same names and, bit for bit, the same tensors."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def cut_at(monkeypatch, step: int) -> None:
    """Every run raises KeyError in place of this step (from 0), until `monkeypatch.undo()`."""
    call = TrainStep.__call__

    def cut(self, images, labels, number, total, **count):
        if number == step:
            raise KeyError("power cut")
        return call(self, images, labels, number, total, **count)

    monkeypatch.setattr(TrainStep, "__call__", cut)


def content(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder with its bytes, every folder with None."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}
