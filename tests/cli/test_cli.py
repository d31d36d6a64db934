"""The command line: help, precedence of settings, recipes, what is missing."""

import json
import sys
from importlib.metadata import entry_points

import yaml
from commands import run_cli

from vitfast import __main__, cli
from vitfast.train.recipes import RECIPES


def test_module_and_script_are_the_same():
    (script,) = entry_points(group="console_scripts", name="vitfast")
    assert script.load() is __main__.main is cli.main


def test_flags_win_over_the_config_file(capsys, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("recipe: digits\nlr: 0.5\nseed: 7\nbetas: [0.8, 0.9]\n")
    told = ("--lr", 0.25, "--set", "warmup_steps=3", "hflip=0.5", "--set", "seed=9")
    code, out, _ = run_cli(capsys, "pretrain", "--config", path, *told, "--print-config")
    config = yaml.safe_load(out)
    wanted = dict(lr=0.25, seed=9, warmup_steps=3, hflip=0.5, betas=[0.8, 0.9])
    assert code == 0 and {name: config[name] for name in wanted} == wanted
    path.write_text(out)
    assert run_cli(capsys, "pretrain", "--config", path, "--print-config")[1] == out
    assert "\nlr: 0.25" in out and "# the learning rate after the warm-up (positive, and at most 1e9)" in out


def test_recipes_as_json(capsys):
    rows = json.loads(run_cli(capsys, "recipes", "--json")[1])
    fields = (
        "name model batch_size lr lr_decay warmup_steps weight_decay dropout optimizer momentum betas clip_norm "
        "img_size label_smoothing ema_decay sweep_lr"
    )
    assert [row["name"] for row in rows] == list(RECIPES)
    for row in rows:
        assert set(fields.split()) <= set(row) and isinstance(row["lr"], float) and isinstance(row["img_size"], int)
        assert not any(isinstance(value, dict) for value in row.values())
    assert "digits" in run_cli(capsys, "recipes")[1]


def test_missing_packages_are_named_with_a_command_that_works_today(capsys, monkeypatch):
    """From a checkout, as vitfast is not on PyPI."""
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert cli.main(["pretrain", "--recipe", "digits", "--data", "digits"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("vitfast: error: yaml is not installed") and said.count("\n") == 1
    assert "pip install '.[train]' in a checkout of vitfast" in said
