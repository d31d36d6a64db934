"""Tiny ViTs, and evaluations of them: their settings, on one of two ranks, and by the command line as JSON."""

import json
from pathlib import Path

import torch
from checks import randomize
from commands import run_cli

from vitfast import ViT
from vitfast.data.loader import open_data
from vitfast.eval.accuracy import evaluate
from vitfast.run.distributed import join, leave
from vitfast.train.recipes import resolve


def tiny(classes: int = 10, std: float = 0.5, seed: int = 0, **options) -> ViT:
    """A ViT of 16 x 16 pixels in patches of 8 x 8 with random values in every parameter."""
    torch.manual_seed(seed)
    shape = dict(img_size=16, patch_size=8, embed_dim=32, depth=1, num_heads=2, num_classes=classes)
    return randomize(ViT(**shape | options), std).eval()


def save_tiny(folder: Path) -> Path:
    """Writes random weights of a ViT for 10 classes into the folder."""
    tiny(std=0.3, representation_size=24).save_pretrained(folder)
    return folder


def evaluation(weights, data="digits", **settings):
    return resolve("eval", dict(weights=str(weights), data=str(data), device="cpu", workers=0, **settings))


def of_two(weights: str, data: str, output: Path) -> None:
    """One of two ranks evaluates 16 x 16 images in patches of 8 x 8; the first writes what both found."""
    group, device = join(torch.device("cpu"))
    opened = open_data(evaluation(weights, data, eval_batch_size=3), (16, 16), (8, 8), device, group)
    found = evaluate(ViT.from_pretrained(weights), opened)
    if group.first:
        output.write_text(json.dumps(found))
    leave()


def result(capsys, command: str, weights, data, *more) -> dict:
    """What a command prints as JSON, on the CPU without workers."""
    flags = ("--weights", weights, "--data", data, "--device", "cpu", "--json", *more)
    code, out, err = run_cli(capsys, command, *flags, "--set", "workers=0", "eval_batch_size=3")
    assert code == 0, err
    return json.loads(out)
