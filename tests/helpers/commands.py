"""A command in this process, and small folders of images for it."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from vitfast.cli import main

CLASSES = ("cat", "dog", "eel")


def picture(seed: int, size: int = 20) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size, size + 4, 3), dtype=np.uint8))


def make_folder(root: Path, splits=("train", "val"), classes=CLASSES, count: int = 6, first: int = 0) -> Path:
    """Class folders of noise, each image of another seed: those of class k from `first` + 100 k on."""
    for split in splits:
        for number, name in enumerate(classes):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                picture(first + 100 * number + i).save(folder / f"{i}.png")
    return root


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def run_cli(capsys, *args) -> tuple[int, str, str]:
    try:
        code = main([str(a) for a in args])
    except SystemExit as stop:
        code = stop.code
    out = capsys.readouterr()
    return code, out.out, out.err


def works(capsys, *args) -> str:
    """What a command prints that ends well."""
    code, out, err = run_cli(capsys, *args)
    assert code == 0, err
    return out


def refuses(capsys, says: str, *args) -> str:
    """The one line of a command that ends with exit code 2, which has this text."""
    code, _, err = run_cli(capsys, *args)
    assert code == 2 and says in err and err.count("\n") == 1 and "Traceback" not in err, err
    return err


RUN = ("--model", "Nano/8", "--img-size", 16, "--steps", 2, "--batch-size", 4, "--device", "cpu", "--set", "workers=0")
