"""The page of families is what accelerated and compiled encoders compute: tests/helpers/coverage_of.py makes it."""

import re
from pathlib import Path

import pytest
import torch
from checks import slow_but
from coverage_of import accelerated, compiled, page, row, shares
from torch import nn
from vision_encoders import ENCODERS
from vision_families import FAMILIES, Family

PAGE = Path(__file__).parents[2] / "docs/reference/families.md"
NAMES = {f"{encoder.library} {encoder.name}": encoder for encoder in ENCODERS}
HANDWRITTEN = [name for name in NAMES if name.startswith("torch as ")]
FEW = ("torchvision ViT", *HANDWRITTEN[3:6])


def rows_of(text: str) -> list[list[str]]:
    """The rows of the tables below each heading of a library, which is the first cell of each."""
    rows = []
    for section in text.split("\n## ")[1:]:
        library, *lines = section.splitlines()
        rows += [[library, *line[2:-2].split(" | ")] for line in lines if line.startswith("| ")][1:]
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(FEW, NAMES))
def test_an_encoder_has_the_row_of_the_page(name):
    encoder = NAMES[name]
    pytest.importorskip(encoder.library)
    assert [encoder.library, *row(encoder)] in rows_of(PAGE.read_text())


@pytest.mark.slow
def test_the_page_has_every_encoder_and_the_share_of_blocks():
    rows = rows_of(PAGE.read_text())
    libraries = list(dict.fromkeys(encoder.library for encoder in ENCODERS))
    named = sorted(((e.library, e.name) for e in ENCODERS), key=lambda e: libraries.index(e[0]))
    assert [tuple(cells[:2]) for cells in rows] == named and len(NAMES) == len(ENCODERS) >= len(FAMILIES) + 140
    last = PAGE.read_text().splitlines()[-1]
    assert last == shares([cells[1:] for cells in rows])
    in_place, compiled_ones = map(float, re.findall(r"([\d.]+)%", last))
    assert in_place >= 98 and compiled_ones >= 92, "packed images of vision language models are cut when compiled"
    first = page([NAMES["torch as in MAE's repository"]]).split("\n## ")[0]
    assert PAGE.read_text().startswith(first)


class Doubled(nn.Module):
    """Another number in compiled code, and in a copy."""

    factor = 1.0

    def __deepcopy__(self, memo):
        found = Doubled()
        found.factor = 2.0
        return found

    def forward(self, x):
        return x * (2.0 if torch.compiler.is_compiling() else self.factor)


def test_other_numbers_are_wrong():
    make = lambda: nn.Sequential(nn.Linear(32, 4), Doubled())  # noqa: E731
    encoder = Family("torch", "doubling", make, lambda: dict(input=torch.randn(2, 5, 32)))
    assert all(door(encoder).error > 0.1 for door in (accelerated, compiled))
    with pytest.raises(AssertionError, match="doubling"):
        row(encoder)
