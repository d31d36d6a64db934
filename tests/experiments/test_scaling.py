"""Accuracy, of the pre-training or of a transfer, against compute."""

import csv
import json

import pytest
from commands import run_cli
from frozen import evaluation
from runs import digits

from vitfast.eval.fewshot import few_shot
from vitfast.experiments import runs as experiments
from vitfast.experiments import scaling as module
from vitfast.experiments.scaling import scaling, training_flops
from vitfast.train.recipes import resolve


def test_scaling_counts_compute_as_the_paper_does(tmp_path):
    config = resolve("pretrain", dict(recipe="vit-l16/jft-14ep"))
    exaflops = training_flops(config, 1000) * 14 * 303e6 / 1e18
    assert exaflops == pytest.approx(1567, rel=0.03)  # Table 6
    rows = scaling(digits(tmp_path, eval_batch_size=360), ["Nano/8", "timm:test_vit"], [0.05])
    assert [row["model"] for row in rows] == ["Nano/8", "timm:test_vit"] and rows[0]["exaflops"] > 0
    assert (tmp_path / "scaling.png").stat().st_size > 5000
    assert len(list(csv.DictReader(open(tmp_path / "scaling.csv")))) == 2


def command(output, *models, lengths=(0.02,)):
    recipe = ("--recipe", "digits", "--data", "digits", "--device", "cpu", "--batch-size", 32)
    return ("scaling", *recipe, "--output", output, "--models", *models, "--lengths", *lengths)


def test_transfer_accuracy_is_what_few_shot_evaluation_of_the_weights_says(tmp_path, capsys):
    code, out, err = run_cli(capsys, *command(tmp_path, "Nano/8", "timm:test_resnet"), "--transfer", "digits")
    assert code == 0, err
    rows = json.loads((tmp_path / "scaling.json").read_text())
    table = list(csv.DictReader(open(tmp_path / "scaling.csv")))
    for row, line, run in zip(rows, table, ("Nano-8-0.02ep", "timm-test_resnet-0.02ep")):
        weights = tmp_path / run / "checkpoints" / "last"
        (told,) = few_shot(evaluation(weights), shots=[5])["results"]
        assert row["transfer to digits"] == row["transfer_accuracy"] == told["accuracy"] != row["accuracy"]
        assert float(line["transfer_accuracy"]) == told["accuracy"] and row["transfer_method"] == "5-shot accuracy"
        assert f"transfer {told['accuracy']:.4f}" in out
    axes = module.draw(rows).axes[0]
    assert axes.get_ylabel() == "5-shot accuracy, digits" and axes.get_xscale() == "log"
    assert [line.get_ydata()[0] for line in axes.lines] == [row["transfer_accuracy"] for row in rows]


def test_transfer_by_fine_tuning_has_the_settings_it_is_given(tmp_path, capsys):
    flags = ("--transfer", "digits", "synthetic", "--transfer-method", "finetune", "--set", "workers=0", "early_stop=9")
    settings = ("recipe=finetune/digits", "steps=1", "batch_size=8", "img_size=24", "lr=0.02")
    code, _, err = run_cli(capsys, *command(tmp_path, "Nano/8"), *flags, "--transfer-set", *settings)
    assert code == 0, err
    (row,) = json.loads((tmp_path / "scaling.json").read_text())
    run = tmp_path / "Nano-8-0.02ep"
    found = [json.loads((run / f"finetune-{spec}/summary.json").read_text()) for spec in ("digits", "synthetic")]
    assert row["transfer_accuracy"] == pytest.approx(sum(summary["accuracy"] for summary in found) / 2)
    assert row["transfer to digits"] == found[0]["accuracy"] and found[0]["steps"] == 1
    config = (run / "finetune-digits" / "config.yaml").read_text()
    for told in ("img_size: 24", "lr: 0.02", f"weights: {run / 'best'}", "optimizer: adamw"):
        assert told in config
    assert module._label(row) == "accuracy after fine-tuning, mean of 2 data sets"


@pytest.mark.parametrize(
    "models, lengths, flags, message",
    [
        (["Nano/8", "nope"], [0.02], [], "unknown preset 'nope'"),
        (["Nano/8", "timm:nope"], [0.02], [], "timm cannot build 'nope'"),
        (["Nano/8"], [0.02, -1], [], "epochs must be positive, and at most a million, got -1.0"),
        (["Nano/8", "B/16"], [0.02], ["--img-size", 24], "image size 24 x 24 is no multiple of the patch size 16 x 16"),
        (["Nano/8", "R50x1"], [0.02], ["--set", "objective=masked"], "objective=masked trains vitfast's ViTs only"),
        (["Nano/8"], [0.02], ["--transfer", "digits", "nowhere"], "no folder nowhere"),
        (["Nano/8"], [0.02], ["--transfer", "digits", "--transfer-set", "learning_rat=1"], "setting 'learning_rat'"),
        (
            ["Nano/8", "B/32"],
            [0.02],
            ["--transfer", "digits", "--transfer-method", "finetune"],  # at 48 px by finetune/digits
            "image size 48 x 48 is no multiple of the patch size 32 x 32",
        ),
    ],
    ids=str,
)
def test_every_run_is_looked_at_before_the_first_begins(tmp_path, capsys, monkeypatch, models, lengths, flags, message):
    monkeypatch.setattr(experiments, "train", lambda *_: pytest.fail("a training began"))
    code, _, err = run_cli(capsys, *command(tmp_path / "out", *models, lengths=lengths), *flags)
    assert code == 2 and message in err and err.count("\n") == 1 and not (tmp_path / "out").exists(), err
