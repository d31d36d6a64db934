"""`vitfast families`, and the page of the documentation that it makes."""

import json
from pathlib import Path

import pytest
import torch
from commands import run_cli
from torch import nn

from vitfast import InputError
from vitfast.adapters.families import FAMILIES, Family
from vitfast.cli.families import coverage_markdown, markdown
from vitfast.tools.encoders import ENCODERS, Encoder
from vitfast.tools.families import SAME, cover, installed, judge

PAGE = Path(__file__).parents[2] / "docs/reference/families.md"
NAMES = {f"{family.library} {family.name}": family for family in FAMILIES}


# One of each library; tests/adapters holds every family to its library's numbers.
FEW = ("timm ViT", "transformers ViT", "torchvision ViT", "torch nn.TransformerEncoder", "open_clip CLIP")


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.long) for n in NAMES])
def test_a_family_has_the_row_of_the_page(name):
    family = NAMES[name]
    pytest.importorskip(family.library)
    row = judge(family)
    assert row.right and max(row.logits, row.gradients) < 1e-5 and row.seconds < 1, row
    assert rows_of(markdown([row]))[0] in rows_of_the_page(0)


def rows_of(text: str) -> list[list[str]]:
    """The rows of the tables below each heading of a library, which is the first cell of each."""
    rows = []
    for section in text.split("### ")[1:]:
        library, *lines = section.splitlines()
        rows += [[library, *line.strip("| ").split(" | ")] for line in lines if line.startswith("| ")][1:]
    return rows


def rows_of_the_page(part: int) -> list[list[str]]:
    return rows_of(PAGE.read_text().split("## With torch.compile")[part])


def by_library(families) -> list[tuple[str, str]]:
    """Library and name of each, libraries together, in the order in which each comes first."""
    libraries = list(dict.fromkeys(library for library, _ in families))
    return sorted(families, key=lambda family: libraries.index(family[0]))


def test_the_page_has_no_other_rows_and_one_section_for_each_library():
    named = [(f.library, f.name) for f in FAMILIES]
    assert [tuple(row[:2]) for row in rows_of_the_page(0)] == by_library(named)
    assert len(NAMES) == len(FAMILIES) >= 40
    headings = [line for line in PAGE.read_text().splitlines() if line.startswith("### ")]
    assert len(headings) == 2 * len({library for library, _ in named})


ENCODER_NAMES = {f"{encoder.library} {encoder.family.name}": encoder for encoder in ENCODERS}
FEW_ENCODERS = ("timm cait_xxs24_224", "transformers BlipVisionModel", "torch as in MAE's repository")


@pytest.mark.parametrize(
    "name", [n if n in FEW_ENCODERS else pytest.param(n, marks=pytest.mark.long) for n in ENCODER_NAMES]
)
def test_a_compiled_encoder_has_the_row_of_the_page(name):
    encoder = ENCODER_NAMES[name]
    pytest.importorskip(encoder.library)
    row = cover(encoder)
    assert row.right and row.attention[0] <= row.attention[1] and row.mlp[0] <= row.mlp[1], row
    assert rows_of(coverage_markdown([row]))[0] in rows_of_the_page(1)


def test_nine_of_ten_blocks_are_replaced_whole_on_the_page():
    rows = rows_of_the_page(1)
    assert [tuple(row[:2]) for row in rows] == by_library([(e.library, e.family.name) for e in ENCODERS])
    halves = [cell.split(" of ") for row in rows for cell in row[2:4] if cell]
    done, of = (sum(int(half[i]) for half in halves) for i in range(2))
    assert len(ENCODER_NAMES) == len(ENCODERS) >= len(FAMILIES) + 60 and done >= 0.9 * of
    assert f"{done} of {of} blocks" in PAGE.read_text()


def test_the_command_compiles(capsys):
    code, out, _ = run_cli(capsys, "families", "--compile", "--library", "torchvision", "--device", "cpu")
    assert code == 0 and "torchvision ViT: 2 of 2 attention blocks, 2 of 2 MLP blocks, patch embedding" in out
    assert "4 of 4 blocks that an operation could compute are replaced whole (100.0%)." in out


def test_a_compiled_model_of_other_numbers_is_wrong():
    class Doubling(nn.Module):
        def forward(self, x):
            return x * (2.0 if torch.compiler.is_compiling() else 1.0)

    make = lambda: nn.Sequential(nn.Linear(32, 4), Doubling())  # noqa: E731
    row = cover(Encoder(Family("torch", "doubling", make, lambda: dict(input=torch.randn(2, 5, 32)))))
    assert not row.right and row.error > 0.1 and not row.failure
    assert cover(Encoder(Family("torch", "broken", lambda: 1 / 0, dict))).failure.startswith("ZeroDivisionError")


def test_the_command_prints_lines_and_json(capsys):
    code, out, _ = run_cli(capsys, "families", "--library", "torchvision", "--device", "cpu")
    assert code == 0 and "torchvision ViT: patch_embed, 2 x attention_block" in out and "wrong: none" in out
    code, out, _ = run_cli(capsys, "families", "--library", "torchvision", "--device", "cpu", "--json")
    (row,) = json.loads(out)
    assert code == 0 and row["right"] and row["operations"]["mlp_block"] == 2 and row["logits"] <= SAME


class Flickering(nn.Module):
    """Another factor in a copy of it."""

    factor = 1.0

    def __deepcopy__(self, memo):
        copied = Flickering()
        copied.factor = 2.0
        return copied

    def forward(self, x):
        return x * self.factor


def test_what_is_wrong_is_said_and_fails():
    named = NAMES["torch nn.TransformerEncoder"]

    def make():
        model = named.make()
        model.norm = nn.Sequential(model.norm, Flickering())
        return model

    row = judge(Family("torch", "flickering", make, named.batch))
    assert not row.right and row.logits > SAME
    broken = judge(Family("torch", "broken", lambda: 1 / 0, named.batch))
    assert not broken.right and broken.failure == "ZeroDivisionError: division by zero"
    nothing = judge(Family("torch", "nothing", lambda: nn.Linear(32, 2), lambda: dict(input=named.batch()["src"])))
    assert not nothing.right and not nothing.operations


def test_an_unknown_library_is_one_line(capsys):
    with pytest.raises(InputError, match="library must be one of open_clip, timm"):
        installed(FAMILIES, "keras")
    code, _, err = run_cli(capsys, "families", "--library", "keras")
    assert code == 2 and err.count("\n") == 1
