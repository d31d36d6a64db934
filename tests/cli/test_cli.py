"""The command line: help, precedence of settings, recipes, what is missing; commands one after the other."""

import csv
import json
import shutil
import sys
from importlib.metadata import entry_points

import pytest
import torch
import yaml
from commands import RUN, make_folder, run_cli, works

from vitfast import ViT, __main__, cli
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


@pytest.mark.slow
def test_folder_pretrain_finetune_eval(capsys, tmp_path):
    data, tuned = make_folder(tmp_path / "data"), tmp_path / "b"
    command = ("pretrain", "--recipe", "digits", "--data", data, "--output", tmp_path / "a")
    code, out, err = run_cli(capsys, *command, *RUN)
    assert code == 0 and "accuracy" in out, err
    last = tmp_path / "a" / "checkpoints" / "last"
    flags = ("--weights", last, "--data", data, "--output", tuned, "--img-size", 24, *RUN[4:])
    works(capsys, "finetune", *flags)
    flags = ("--weights", tuned / "checkpoints" / "last", "--data", data, "--device", "cpu", "--json")
    out = works(capsys, "eval", *flags)
    result, row = json.loads(out), list(csv.DictReader(open(tuned / "metrics.csv")))[-1]
    assert result["images"] == 18 and result["accuracy"] == float(row["accuracy"])
    assert result["loss"] == pytest.approx(float(row["loss"]))
    assert ViT.from_pretrained(tuned / "checkpoints" / "last").patch_embed.img_size == (24, 24)
    code, _, err = run_cli(capsys, "eval", "--weights", last, "--data", "digits")
    assert code == 2 and "3 classes" in err and "10" in err


@pytest.mark.slow
def test_a_bare_file_of_images_that_are_not_square_is_measured_at_its_size(capsys, tmp_path):
    """A height and a width reach every command that reads images; the config.json of a folder says the same."""
    data, shared = make_folder(tmp_path / "data"), ("--device", "cpu", "--json")
    model = ViT.from_preset("Nano/8", img_size=(24, 40), num_classes=3)
    torch.nn.init.normal_(model.pos_embed)
    model.save_pretrained(tmp_path / "w")
    bare = tmp_path / "bare.safetensors"
    shutil.copy(tmp_path / "w" / "model.safetensors", bare)
    commands = {
        "eval": ("--data", data),
        "fewshot": ("--data", data, "--method", "ridge", "--shots", 2),
        "predict": (data / "val",),
    }
    for command, given in commands.items():
        found = []
        for weights, size in ((tmp_path / "w", ()), (bare, ("--img-size", 24, 40))):
            out = works(capsys, command, *given, "--weights", weights, *size, *shared)
            rows = json.loads(out) if command == "predict" else [json.loads(out)]
            found.append([{k: v for k, v in row.items() if "second" not in k and k != "weights"} for row in rows])
        assert found[0] == found[1], command
        code, _, err = run_cli(capsys, command, *given, "--weights", bare, *shared)
        assert code == 2 and "16 entries is 3 x 5 + 1 (img_size=(24, 40), no_embed_class=False) or 4 x 4 + 0" in err
    code, _, err = run_cli(capsys, "eval", "--data", data, "--weights", bare, "--img-size", 24, 40, 3)
    assert code == 2 and "--img-size takes one number or two, got 3" in err
