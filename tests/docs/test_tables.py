"""What the tables of the pages name is there, and their numbers are the code's."""

import ast
import inspect
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from commands import run_cli
from doc_blocks import ROOT

from vitfast import ViT, ops
from vitfast.kernels import tiles
from vitfast.kernels.attention.launchers import HEAD_SIZES
from vitfast.kernels.layer_norm import MAX_WIDTH
from vitfast.ops import dispatch
from vitfast.ops.attention import head_unsupported

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


@pytest.mark.slow
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


REQUIREMENTS = "reference/requirements.md"
GPUS = [row for row in rows(REQUIREMENTS) if re.fullmatch(r"\d+\.\d", row[1])]


@pytest.mark.parametrize("name, capability, what", GPUS, ids=[row[1] for row in GPUS])
def test_a_gpu_runs_what_the_requirements_say(name, capability, what):
    """By a capability that is made up: what kernels are looked up for, or that there are none."""
    with mock.patch.object(torch.cuda, "get_device_capability", lambda *_: tuple(map(int, capability.split(".")))):
        found = tiles._generation.__wrapped__(0)
    own = f"{found // 10}.{found % 10}"
    expected = f"kernels, compiled for {own}" if own == capability else f"kernels, with the configurations of {own}"
    assert what == (expected if found else "PyTorch")


def test_every_generation_has_its_row():
    assert {int(row[1].replace(".", "")) for row in GPUS} >= {*tiles.GENERATIONS}


def test_the_limits_of_kernels_are_the_codes():
    limits = {row[0]: row[1] for row in rows(REQUIREMENTS) if len(row) == 3}
    assert limits["dtypes"].split(", ") == [str(dtype).removeprefix("torch.") for dtype in dispatch.KERNEL_DTYPES]
    assert limits["head size"] == f"{HEAD_SIZES[0]}, {HEAD_SIZES[1]}, ..., {HEAD_SIZES[-1]}"
    assert limits["width of a norm"] == f"up to {MAX_WIDTH}"
    with pytest.raises(ValueError) as refused:
        ops.mlp(*torch.ones(3, 2, 2).unbind()[:2], None, torch.ones(2, 2), None, activation="none of them")
    assert re.findall(r"`(\w+)`", limits["activation of an MLP"]) == re.findall(r"'(\w+)'", str(refused.value))


def test_versions_are_those_that_setup_asks_for():
    found = re.findall(r"[\" ](\w+)(?:>=|=\">=)([\d.]+)", (ROOT / "setup.py").read_text())
    floors = dict(reversed(found))  # the first one counts: the tests ask for a later timm
    told = {row[0]: row[1] for row in rows(REQUIREMENTS) if len(row) == 3}
    names = dict(Python="python_requires", PyTorch="torch", timm="timm", transformers="transformers")
    assert {name: told[name] for name in names} == {name: f"{floors[key]} or newer" for name, key in names.items()}
    tritons = re.search(r"TRITONS \?= (.+)", (ROOT / "Makefile").read_text())[1]
    assert all(version.removesuffix(".0") in told["Triton"] for version in tritons.split())


def test_the_warning_of_the_requirements_is_the_one_that_comes():
    text = (DOCS / REQUIREMENTS).read_text()
    assert f"vitfast attention: {head_unsupported(20, 1.0)}; plain PyTorch runs in its place" in text


@pytest.mark.slow
def test_the_messages_of_the_troubleshooting_page_are_the_codes():
    """Each part of a message that does not change is in one string of the source."""
    strings = set()
    for path in (*(ROOT / "vitfast").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.add(re.sub(r"%[\d.,]*[a-z]|\s+", " ", node.value))
    source, messages = "\0".join(strings), []
    for told, *rest in (row for row in rows("troubleshooting.md") if len(row) == 3):
        assert all(rest), told
        messages += re.findall(r"`([^`]+)`", told) if told.startswith("`") and told.endswith("`") else []
    missing = [
        part
        for message in messages
        for part in re.split(r"\.\.\.", message)
        if len(part.strip(" ;:()")) > 3 and re.sub(r"\s+", " ", part.strip(" ;:()")) not in source
    ]
    assert len(messages) > 30 and not missing


def test_the_arguments_that_timm_lacks_are_named():
    timm = pytest.importorskip("timm.models.vision_transformer")
    ours, theirs = (inspect.signature(each).parameters for each in (ViT, timm.VisionTransformer))
    told = (DOCS / "reference/vit.md").read_text().partition("it lacks:")[2].partition("(")[0]
    assert re.findall(r"`(\w+)`", told) == [name for name in ours if name not in theirs]
