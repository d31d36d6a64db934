"""A command in this process, and small folders of images for it."""

from pathlib import Path

import numpy as np
from PIL import Image

from vitfast.cli import main

CLASSES = ("cat", "dog", "eel")


def picture(seed: int, size: int = 20) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size, size + 4, 3), dtype=np.uint8))


def make_folder(root: Path, splits=("train", "val"), classes=CLASSES, count: int = 6) -> Path:
    for split in splits:
        for number, name in enumerate(classes):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                picture(100 * number + i).save(folder / f"{i}.png")
    return root


def run_cli(capsys, *args) -> tuple[int, str, str]:
    try:
        code = main([str(a) for a in args])
    except SystemExit as stop:
        code = stop.code
    out = capsys.readouterr()
    return code, out.out, out.err


RUN = ("--model", "Nano/8", "--img-size", 16, "--steps", 2, "--batch-size", 4, "--device", "cpu", "--set", "workers=0")
