"""Accuracy, of the pre-training or of a transfer, against compute; Table 8's positions from every seed."""

import csv
import json

import pytest
from commands import run_cli, works
from frozen import evaluation
from runs import digits

from vitfast.eval.fewshot import few_shot
from vitfast.experiments import runs as experiments
from vitfast.experiments import scaling as module
from vitfast.experiments.scaling import scaling, training_flops
from vitfast.train.recipes import resolve


@pytest.mark.slow
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


@pytest.mark.slow
def test_transfer_accuracy_is_what_few_shot_evaluation_of_the_weights_says(tmp_path, capsys):
    out = works(capsys, *command(tmp_path, "Nano/8", "timm:test_resnet"), "--transfer", "digits")
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


@pytest.mark.slow
def test_transfer_by_fine_tuning_has_the_settings_it_is_given(tmp_path, capsys):
    flags = ("--transfer", "digits", "synthetic", "--transfer-method", "finetune", "--set", "workers=0", "early_stop=9")
    settings = ("recipe=finetune/digits", "steps=1", "batch_size=8", "img_size=24", "lr=0.02")
    works(capsys, *command(tmp_path, "Nano/8"), *flags, "--transfer-set", *settings)
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


# ---- Table 8


def test_every_variant_is_trained_from_every_seed_and_has_its_cell(tmp_path, capsys, monkeypatch):
    seen = []

    def run(config, resume):
        seen.append((config.pos_embed, config.pos_embed_at, config.seed))
        return dict(finished=True, accuracy=len(seen) / 100)

    monkeypatch.setattr(experiments, "train", run)
    flags = "--recipe digits --data digits --device cpu --seed 4 --seeds 2".split()
    out = works(capsys, "positions", *flags, "--output", tmp_path)
    three = ["stem", "layers", "layers_shared"]
    places = {"none": ["stem"], "learn": three, "learn2d": three, "relative": ["stem"]}
    variants = [(kind, place) for kind, some in places.items() for place in some]
    assert seen == [(*variant, seed) for variant in variants for seed in (4, 5)]
    cells = [f"{2 * i / 100 + 0.015:.4f} ± 0.0071" for i in range(8)]
    rows = [
        ["no positions", cells[0], "", ""],
        ["1-D", *cells[1:4]],
        ["2-D", *cells[4:7]],
        ["relative", cells[7], "", ""],
    ]
    assert out.splitlines()[2:] == [f"| {' | '.join(row)} |" for row in rows]
    assert out == (tmp_path / "positions.md").read_text()
    written = list(csv.DictReader(open(tmp_path / "positions.csv")))
    assert [(row["positions"], row["at"]) for row in written] == variants and written[0]["accuracies"] == "0.01 0.02"
