"""What the tables of the pages name is there, and their numbers are the code's."""

import re
from pathlib import Path

import pytest
from commands import run_cli
from doc_blocks import ROOT

DOCS = ROOT / "docs"


def rows(page: str) -> list[list[str]]:
    """The rows of all tables of a page, without their heads."""
    lines = [line for line in (DOCS / page).read_text().splitlines() if line.startswith("|")]
    rules = {i for i, line in enumerate(lines) if line.startswith("|---")}
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for i, line in enumerate(lines)
        if i not in rules and i + 1 not in rules
    ]


def test_every_name_beside_a_flag_of_timm_is_one_that_pretrain_takes(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("FILE").write_text("lr: 0.5\n")
    flags, given = [], []
    for timm, ours, *_ in rows("tutorials/timm-train.md"):
        flags += re.findall(r"`(-[^`]+)`", timm)
        names = re.findall(r"`([^`]+)`", ours)
        assert names or ours == "not there", timm
        given += names
    assert len(flags) == len({*flags}) > 170 and len(given) > 60
    for text in sorted({*given}):
        words = text.split() if text.startswith("--") else ["--set", text.replace("=N", "=3")]
        code, _, err = run_cli(capsys, "pretrain", "--data", "digits", *words, "--print-config")
        assert code == 0, f"{text}: {err}"


def test_settings_in_the_notes_on_timm_exist(capsys):
    notes = " ".join(row[2] for row in rows("tutorials/timm-train.md") if len(row) > 2)
    for text in re.findall(r"`(\w+=[^`]+)`", notes):
        code, _, err = run_cli(capsys, "pretrain", "--set", text.replace("=N", "=3"), "--print-config")
        assert code == 0, f"{text}: {err}"
