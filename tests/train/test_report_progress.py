"""What a report says of its run: the best evaluation, settings, results and commands."""

import dataclasses
import html
import json
import os
import re
import shlex

import pytest
from commands import make_folder, run_cli
from runs import digits, finetuning

from vitfast import ViT
from vitfast.run.config import FIELDS, Config
from vitfast.train.report import SHOWN, best_weights, commands, curves, introduction, results, settings
from vitfast.train.trainer import train


def test_the_best_evaluation_is_named(tmp_path):
    lines = ["step,epoch,split,loss,accuracy,lr,images_per_second,waiting_for_data"]
    accuracies = [0.5, "nan", 0.7, 0.6, 0.7, ""]
    lines += [f"{10 * i},{i},val,1.0,{accuracy},,," for i, accuracy in enumerate(accuracies, 1)]
    (tmp_path / "metrics.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "none").mkdir()
    told = curves({"pretrain": tmp_path, "none": tmp_path / "none"})["Curves"][0]
    assert told == "The dotted line is the best evaluation: accuracy 0.7000 at epoch 3.00 of pretrain."


def test_every_setting_is_shown_with_its_meaning():
    config = digits("<run>", lr=0.003, betas=(0.9, 0.95))
    first, rest = settings(config)[1].split("<details>")
    rows = [re.findall("<td>(.*?)</td>", row) for part in (first, rest) for row in part.split("<tr>")[2:]]
    told = {name: (value, meaning) for name, value, meaning in rows}
    assert told.keys() == set(FIELDS) - {"about"} and len(rows) == len(told)
    assert told["lr"][0] == "0.003" and told["betas"][0] == "[0.9, 0.95]" and told["output"][0] == "&lt;run&gt;"
    assert told["compile"] == ("null", "whether to use torch.compile; unset: only on cuda")
    shown = re.findall(r"<tr><td>(\w+)</td>", settings(Config())[1].split("<details>")[0])
    assert shown == [name for name in FIELDS if name in SHOWN - {"epochs", "steps"}]


def test_results_are_those_of_the_summary():
    summary = dict(finished=True, accuracy=0.5, top5=0.9, map=None, val_images=100, images_per_second=1234.5)
    assert results(summary | dict(stopped_early=False, steps=12345)) == {
        "accuracy": "0.5000 ± 0.0500",
        "top5": "0.9000",
        "val images": "100",
        "images per second": "1,234.5",
        "stopped early": "False",
        "steps": "12,345",
    }


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
    told = introduction(config := digits(tmp_path), model := ViT.from_preset("Ti/16"), better)
    assert told.startswith("Pre-training of Nano/8 (12 layers of width 192, patches of 16x16, 5,717,416 parameters) on")
    assert re.search(r" on digits by the recipe digits, finished on \d{4}-\d\d-\d\d at \d\d:\d\d \S+\. ", told)
    assert (
        "looks at the last model, of step 40, in checkpoints/last/. An earlier one was better, of step 30 with" in told
    )
    assert "accuracy 0.7500, in best/" in told and "better" not in introduction(config, model, summary)
