"""Tiny weights for evaluations on frozen features, and the command line in this process."""

from pathlib import Path

import torch
from checks import randomize

from vitfast import ViT
from vitfast.cli import main
from vitfast.train.recipes import resolve


def run_cli(capsys, *args) -> tuple[int, str, str]:
    code = main([str(a) for a in args])
    out = capsys.readouterr()
    return code, out.out, out.err


def save_tiny(folder: Path) -> Path:
    """Writes random weights of a ViT for 10 classes of 16 x 16 pixels into the folder."""
    torch.manual_seed(0)
    model = ViT(img_size=16, patch_size=8, embed_dim=32, depth=1, num_heads=2, num_classes=10, representation_size=24)
    randomize(model, std=0.3).save_pretrained(folder)
    return folder


def evaluation(weights, data="digits", **settings):
    return resolve("eval", dict(weights=str(weights), data=str(data), device="cpu", workers=0, **settings))
