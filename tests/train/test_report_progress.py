"""What a report says of evaluations, settings, commands and origin, from generated metrics and configs."""

import dataclasses
import html
import json
import os
import re
import shlex
import subprocess

import numpy as np
import pytest
from commands import make_folder, run_cli
from runs import digits, finetuning

from vitfast import ViT
from vitfast.data.loader import open_data
from vitfast.run.config import FIELDS, Config
from vitfast.train.report import best_weights, commands, introduction, progress, words
from vitfast.train.trainer import train


def records(val, training, accuracy) -> list[dict]:
    """Those of metrics.csv with these losses, one evaluation an epoch of ten steps."""
    found = []
    for i, (t, v, a) in enumerate(zip(training, val, accuracy), 1):
        found.append(dict(step=10 * i, epoch=float(i), split="train", loss=t, accuracy=0.5))
        found.append(dict(step=10 * i, epoch=float(i), split="val", loss=v, accuracy=a))
    return found


@pytest.mark.slow
def test_the_best_evaluation_is_marked_among_few_of_many(tmp_path, monkeypatch):
    accuracy, loss = np.full(400, 0.5), np.full(400, 1.0)
    accuracy[[123, 300]], loss[7] = 0.7, np.nan
    told = [record | dict(lr=0.1) for record in records(loss, np.full(400, 1.5), accuracy)]
    monkeypatch.setattr(progress, "read_metrics", lambda run: told)
    config = digits(tmp_path)
    sections = progress.progress_sections(config)
    table = sections["Evaluations"][1]
    marked = re.findall("<tr class=marked>(.*?)</tr>", table)
    assert len(marked) == 1 and "<td class=n>124.00</td><td class=n>1,240</td>" in marked[0] and ">best<" in marked[0]
    assert 40 <= table.count("<tr") <= 45 and "<td class=n>400.00</td>" in table
    assert sections["Curves"][0] == "The dotted line is the best evaluation."


def test_every_setting_has_words():
    config = digits("<run>", lr=0.003, betas=(0.9, 0.95))
    both = [row for part in words.settings(config) for row in part]
    assert {field for *_, field in both} == set(FIELDS) - {"about"} and words.FIELDS.keys() <= set(FIELDS)
    assert not [text for text, value, _ in both if "_" in text or value in ("None", "", "[]", "True", "False")]
    told = {field: (text, value) for text, value, field in both}
    assert told["lr"] == ("learning rate", "0.003") and told["betas"][1] == "0.9, 0.95"
    assert told["compile"][1] == "default" and told["layer_decay"][1] == "unset" and told["hidden_head"][1] == "yes"
    assert len({text for text, *_ in both}) == len(both)
    for model, value in (("B/16", "that of the weights"), ("timm:resnet18", "timm:resnet18")):
        assert ("model", value, "model") in words.settings(digits("run", model=model, weights="w"))[0]
    shown = [field for *_, field in words.settings(Config())[0]]
    assert shown == [name for name in FIELDS if name in words.SHOWN - {"epochs", "steps"}]


def test_results_are_words_with_units():
    summary = dict(finished=True, accuracy=0.5, top5=0.9, map=None, val_images=100, images_per_second=1234.5)
    told = words.results(summary | dict(seconds=3725.2, waiting_for_data=0.14, stopped_early=False))
    assert told == {
        "accuracy": "0.5000 ± 0.0500",
        "top-5 accuracy": "0.9000",
        "validation images": "100",
        "training speed": "1,234 images/s",
        "time": "1 h 2 min",
        "time spent waiting for data": "14%",
        "stopped early": "no",
    }
    assert [words.duration(seconds) for seconds in (3.14, 59.7, 125)] == ["3.1 s", "1 min 0 s", "2 min 5 s"]


@pytest.mark.reports
@pytest.mark.slow
def test_commands_of_a_report_run_as_they_stand(tmp_path, monkeypatch, capsys):
    """In a folder whose name needs quotes, from another folder, on data that was named by a relative path."""
    home = tmp_path / "it's <a> folder"
    make_folder(home / "my data")
    monkeypatch.chdir(home)
    config = digits("a run", data="my data", steps=2, img_size=16, batch_size=4, workers=0)
    summary = train(config)
    monkeypatch.chdir(tmp_path)
    text = (home / "a run" / "report.html").read_text()
    lines = html.unescape(re.search("<pre>(.*?)</pre>", text, re.S)[1]).splitlines()
    said = {}
    for line in lines[1::2]:
        words = shlex.split(line)
        if words[0] == "cd":
            monkeypatch.chdir(words[1])
            words = words[words.index("&&") + 1 :]
        assert words[0] == "vitfast"
        code, said[words[1]], err = run_cli(capsys, *words[1:])
        assert code == 0, err
    assert list(said) == ["predict", "eval", "export", "embed", "pretrain"]
    assert said["predict"].count(".png") == 36 and f"accuracy {summary['best_accuracy']:.4f}" in said["eval"]
    assert json.loads((home / "a run" / "summary.json").read_text())["steps"] == 4
    assert (home / "a run" / "model.onnx").exists() and (home / "a run" / "embeddings" / "manifest.json").exists()


def test_commands_suit_the_run(tmp_path):
    def said(config, **summary) -> str:
        return html.unescape(commands.next_commands(config, dict(steps=2) | summary, tmp_path / "best")[1])

    run = os.path.abspath(tmp_path)
    assert f"vitfast pretrain --config {run}/config.yaml --output {run} --epochs 88 --resume auto</pre>" in said(
        digits(run)
    )
    assert "--steps 20" in said(digits(run, steps=10)) and f"--weights {run}/best" in said(digits(run))
    assert "torchrun --nproc-per-node 4 -m vitfast pretrain" in said(digits(run), ranks=4)
    assert "config.yaml" not in said(digits(run, early_stop=2), stopped_early=True)
    assert "--data digits --set hold_out=0.2\n" in said(digits(run, hold_out=0.2))
    assert f"finetune --weights {run}/best --data digits --output {run}-finetuned" in said(
        digits(run, objective="masked")
    )
    resnet = said(digits(run, model="timm:resnet10t"))
    assert "export" not in resnet and "eval" in resnet and "--set model=timm:resnet10t" in resnet
    relative = said(dataclasses.replace(finetuning(tmp_path, tmp_path), weights="some/weights"))
    assert f"\ncd {shlex.quote(os.getcwd())} && vitfast finetune --config" in relative


def test_the_best_model_is_taken_where_it_is_better(tmp_path):
    summary, last = dict(steps=40, accuracy=0.7, device="cpu"), tmp_path / "checkpoints" / "last"
    better = summary | dict(best_step=30, best_accuracy=0.75)
    assert best_weights(tmp_path, better) == tmp_path / "best"
    assert best_weights(tmp_path, summary) == best_weights(tmp_path, better | dict(best_accuracy=0.7)) == last
    (tmp_path / "summary.json").touch()
    config = digits(tmp_path)
    data = open_data(config, (16, 16), (8, 8), None)
    told = introduction(config, model := ViT.from_preset("Ti/16"), data, better)
    assert told.startswith("Pre-training of Nano/8 (12 layers of width 192, patches of 16x16, 5,717,416 parameters) on")
    assert " on images of 16x16 pixels of digits by the recipe digits, finished on " in told
    assert (
        "looks at the last model, of step 40, in checkpoints/last/. An earlier one was better, of step 30 with" in told
    )
    assert "accuracy 0.7500, in best/" in told and "better" not in introduction(config, model, data, summary)


def test_origin_names_the_commit_of_a_checkout(tmp_path, monkeypatch):
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *who, "-C", tmp_path, *words], capture_output=True, text=True, check=True).stdout

    monkeypatch.setattr(commands, "PACKAGE", tmp_path / "vitfast")
    assert "commit" not in commands.origin()["versions"]
    git("init")
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-m", "one")
    commit = git("rev-parse", "HEAD")[:12]
    assert f" (commit {commit}), torch" in commands.origin()["versions"]
    (tmp_path / "file").write_text("b")
    assert f" (commit {commit}-dirty), torch" in commands.origin()["versions"]
    monkeypatch.setenv("PATH", "")  # no git
    assert "commit" not in commands.origin()["versions"]
