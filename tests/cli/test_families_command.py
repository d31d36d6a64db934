"""`vitfast families`, and the page of the documentation that it makes."""

import json
from pathlib import Path

import pytest
from commands import run_cli
from torch import nn

from vitfast import InputError
from vitfast.adapters.families import FAMILIES, Family
from vitfast.cli.families import markdown
from vitfast.tools.families import SAME, chosen, judge

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
    assert markdown([row]).splitlines()[-1] in PAGE.read_text().splitlines()


def test_the_page_has_no_other_rows():
    rows = [line.split(" | ")[:2] for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert [(a.removeprefix("| "), b) for a, b in rows[1:]] == [(f.library, f.name) for f in FAMILIES]
    assert len(NAMES) == len(FAMILIES) >= 40


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
        chosen("keras")
    code, _, err = run_cli(capsys, "families", "--library", "keras")
    assert code == 2 and err.count("\n") == 1
