"""The command line: help, precedence of settings, recipes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import run_cli


@pytest.mark.parametrize("command", ["pretrain", "finetune", "eval", "demo", "recipes"])
def test_help_explains_every_option(capsys, command):
    code, out, _ = run_cli(capsys, command, "--help")
    assert code == 0
    options = [line for line in out.splitlines() if line.strip().startswith("--")]
    assert len(options) >= 2 and "--debug" in out
    code, out, _ = run_cli(capsys, "--help")
    assert code == 0 and command in out and "examples:" in out


def test_module_and_script_are_the_same():
    for command in ([sys.executable, "-m", "vitfast"], [str(Path(sys.executable).parent / "vitfast")]):
        run = subprocess.run([*command, "--version"], capture_output=True, text=True)
        assert run.returncode == 0 and run.stdout.startswith("vitfast 0.")


def test_flags_win_over_the_config_file(capsys, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("recipe: digits\nlr: 0.5\nseed: 7\nbetas: [0.8, 0.9]\n")
    code, out, _ = run_cli(
        capsys,
        "pretrain",
        "--config",
        path,
        "--lr",
        0.25,
        "--set",
        "warmup_steps=3",
        "hflip=0.5",
        "--set",
        "seed=9",
        "--print-config",
    )
    config = yaml.safe_load(out)
    assert code == 0
    assert (config["lr"], config["seed"], config["warmup_steps"], config["hflip"], config["betas"]) == (
        0.25,
        9,
        3,
        0.5,
        [0.8, 0.9],
    )
    path.write_text(out)
    assert run_cli(capsys, "pretrain", "--config", path, "--print-config")[1] == out


def test_recipes_as_json(capsys):
    rows = json.loads(run_cli(capsys, "recipes", "--json")[1])
    fields = (
        "name model batch_size lr lr_decay warmup_steps weight_decay dropout optimizer momentum betas clip_norm "
        "img_size label_smoothing ema_decay sweep_lr"
    )
    for row in rows:
        assert set(fields.split()) <= set(row) and isinstance(row["lr"], float) and isinstance(row["img_size"], int)
        assert not any(isinstance(value, dict) for value in row.values())
    assert "digits" in run_cli(capsys, "recipes")[1]
