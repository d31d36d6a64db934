"""`vitfast families`, and the page of the documentation that it makes."""

import json
from pathlib import Path

import pytest
from torch import nn

from vitfast import InputError
from vitfast.adapters.families import FAMILIES, Family, families
from vitfast.cli import main
from vitfast.cli.families import markdown
from vitfast.tools.families import SAME, chosen, judge

PAGE = Path(__file__).parents[2] / "docs/reference/families.md"
NAMES = {f"{family.library} {family.name}": family for family in FAMILIES}


def test_there_are_forty_families_of_every_library():
    assert len(NAMES) == len(FAMILIES) >= 40
    assert {family.library for family in FAMILIES} == {"timm", "transformers", "torchvision", "torch", "open_clip"}


@pytest.mark.parametrize("name", NAMES)
def test_a_family_has_the_librarys_numbers_and_the_row_of_the_page(name):
    family = NAMES[name]
    pytest.importorskip(family.library)
    row = judge(family)
    assert row.right and max(row.logits, row.gradients) < 1e-5, row
    assert row.seconds < 1, f"{row.seconds:.1f} s of a CPU to build"
    assert markdown([row]).splitlines()[-1] in PAGE.read_text().splitlines()


def test_the_page_has_no_other_rows():
    rows = [line.split(" | ")[:2] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert [(a.removeprefix("| "), b) for a, b in rows[1:]] == [(f.library, f.name) for f in FAMILIES]


def test_the_command_prints_lines_and_json(capsys):
    pytest.importorskip("torchvision")
    assert main(["families", "--library", "torchvision", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "torchvision ViT: patch_embed, 2 x attention_block" in out and "wrong: none" in out
    assert main(["families", "--library", "torchvision", "--device", "cpu", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["right"] and row["operations"]["mlp_block"] == 2 and row["logits"] <= SAME


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


class Flickering(nn.Module):
    """Another factor in a copy of it."""

    def __init__(self):
        super().__init__()
        self.factor = 1.0

    def __deepcopy__(self, memo):
        copied = Flickering()
        copied.factor = 2.0
        return copied

    def forward(self, x):
        return x * self.factor


def test_an_unknown_library_is_one_line(capsys):
    with pytest.raises(InputError, match="library must be one of open_clip, timm"):
        chosen("keras")
    assert main(["families", "--library", "keras"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert len(chosen()) == len(families())
