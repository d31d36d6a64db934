"""What a run says before its first step, its warnings, and fine-tuning of a folder that names no recipe."""

import dataclasses
import json
import logging
import re
import shutil

import pytest
import torch
from commands import make_folder, run_cli
from runs import content, digits, records

from vitfast import ViT
from vitfast.run.distributed import Ranks
from vitfast.train import introduction
from vitfast.train.setup import set_up
from vitfast.train.trainer import train


def say(caplog, config) -> str:
    with caplog.at_level(logging.INFO, "vitfast"):
        train(config)
    return caplog.text


@pytest.mark.slow
def test_a_run_says_what_it_does_before_its_first_step(tmp_path, caplog):
    config = digits(tmp_path / "run", img_size=16, steps=6, batch_size=90, train_images=90, workers=0)
    said = say(caplog, config)
    parameters = sum(p.numel() for p in ViT.from_pretrained(tmp_path / "run" / "best").parameters())
    for part in (
        f"pre-trains Nano/8 (4 layers of width 64, patches of 8x8, {parameters:,} parameters) on images of 16x16",
        "digits has 90 images for training and 360 for validation, in 10 classes (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)",
        "takes 6 steps of 90 images, which is 6 epochs, by recipe digits. It computes on the CPU in float32, and",
        f"and writes to {tmp_path / 'run'}.",
    ):
        assert part in said
    assert said.index("This run") < said.index("validation accuracy") and "WARNING" not in said


@pytest.mark.slow
def test_it_says_what_is_special_about_a_run(tmp_path, caplog):
    options = dict(img_size=16, steps=1, batch_size=1, train_images=1, workers=0)
    said = say(caplog, digits(tmp_path / "one", **options))
    assert "has 1 image for training" in said and "takes 1 step of 1 image, which is 1 epoch, by" in said
    assert "It learns" not in said
    said = say(caplog, digits(tmp_path / "masked", **options, objective="masked", hidden_head=False))
    assert "It learns by masked patches, and no classes; it is evaluated by a linear probe and" in said
    many = options | dict(sizes="16:40", tokens_per_step=350, train_images=None)
    said = say(caplog, digits(tmp_path / "sizes", **many))
    assert "on images of sizes 16:40 and, in evaluations, 16x16 pixels." in said
    assert re.search(r"takes 1 step of about 2\d images, which is about 0.01\d* epochs", said)


def test_names_of_classes_are_short_and_in_one_line_and_the_first_rank_alone_says_them(tmp_path, caplog):
    root = tmp_path / "photos"
    make_folder(root, classes=("new\nline", "x" * 200))
    config = digits(tmp_path / "run", data=str(root), img_size=16, batch_size=100, steps=1, workers=0)
    model, data = set_up(config, torch.device("cpu"))
    for rank, lines in ((1, 0), (0, 2)):
        ranked = dataclasses.replace(data, ranks=Ranks(rank, 2))
        with caplog.at_level(logging.INFO, "vitfast"):
            caplog.clear()
            introduction.introduce(config, model, ranked)
        assert len(caplog.records) == lines
    assert r"in 2 classes (new\nline, xxxxxxxxxxxxxxxxxx ... xxxxxxxxxxxxxxxxx). The run" in caplog.text


@pytest.mark.slow
def test_batches_larger_than_the_data_and_very_many_epochs_are_warned_of(tmp_path, caplog, monkeypatch):
    said = say(caplog, digits(tmp_path / "a", img_size=16, steps=2, batch_size=64, train_images=40, workers=0))
    assert "a step takes 64 images and the data has 40, so each step repeats images: set --batch-size, such" in said
    caplog.clear()
    monkeypatch.setattr(introduction, "MOST_EPOCHS", 2)
    said = say(caplog, digits(tmp_path / "b", img_size=16, steps=6, batch_size=16, train_images=40, workers=0))
    assert "this run passes over its data 2 times: set --epochs" in said and "batch-size" not in said


@pytest.mark.slow
def test_a_folder_without_a_recipe_is_fine_tuned_at_the_size_of_the_weights_and_keeps_its_best(
    tmp_path, capsys, caplog
):
    data, fine = make_folder(tmp_path / "photos", count=12), tmp_path / "fine"
    given = dict(img_size=24, patch_size=8, embed_dim=32, depth=2, num_heads=2, mean=(0.4, 0.5, 0.6), std=0.3)
    ViT(**given, num_classes=7).save_pretrained(tmp_path / "weights")
    command = ["finetune", "--weights", tmp_path / "weights", "--data", data, "--output", fine, "--device", "cpu"]
    with caplog.at_level(logging.INFO, "vitfast"):
        code, out, err = run_cli(capsys, *command, "--epochs", 3, "--set", "workers=0")
    assert code == 0, err
    said = caplog.text
    summary = json.loads((fine / "summary.json").read_text())
    assert f"accuracy {summary['accuracy']:.4f} (" in out and "in best/)" in out
    assert "fine-tunes a ViT (2 layers of width 32" in said and "in 3 classes (cat, dog, eel)" in said
    assert "by recipe finetune/small" in said and "images of 24x24 pixels" in said
    evaluated = {int(step): float(accuracy) for step, accuracy in records(fine, "val", "step", "accuracy")}
    assert summary["best_accuracy"] == max(evaluated.values()) == evaluated[summary["best_step"]]
    model = ViT.from_pretrained(fine / "best")
    assert model.patch_embed.img_size == (24, 24) and model.mean == (0.4, 0.5, 0.6) and model.std == (0.3,) * 3
    assert model.class_names == ("cat", "dog", "eel")
    assert "finetune/small, or finetune/imagenet for more than 102,400" in " ".join(
        run_cli(capsys, "finetune", "--help")[1].split()
    )
    code, _, err = run_cli(capsys, "pretrain", "--recipe", "finetune/small", "--data", data, "--output", tmp_path / "x")
    assert code == 2 and "img_size 0 stands for the size of the weights, and this run has none" in err


@pytest.mark.slow
def test_a_finished_run_goes_on_to_another_length_only_where_it_is_told_to(tmp_path, capsys, caplog):
    run = tmp_path / "run"
    flags = "--recipe digits --data digits --device cpu --img-size 16 --batch-size 16 --set workers=0".split()
    command = ["pretrain", *flags, "--output", run]
    assert run_cli(capsys, *command, "--steps", 2)[0] == 0
    before = content(run)
    caplog.set_level(logging.INFO, "vitfast")
    code, _, err = run_cli(capsys, *command, "--steps", 4)
    assert code == 2 and content(run) == before
    assert (
        f"{run} holds a finished run of 2 steps (accuracy " in err and "and this one takes 4: going on replaces" in err
    )
    assert "add --resume auto to go on from it, or take another --output" in err
    for steps in (1, 2):  # nothing is left to do
        assert run_cli(capsys, *command, "--steps", steps)[0] == 0 and content(run) == before
    assert caplog.text.count("is finished: 2 steps") == 2
    assert run_cli(capsys, *command, "--steps", 4, "--resume", "auto")[0] == 0
    assert "resumed from step 2" in caplog.text
    assert json.loads((run / "summary.json").read_text())["steps"] == 4


@pytest.mark.long
@pytest.mark.parametrize("name", ["photos", "shapes", "textures"])
def test_the_recipe_for_small_data_beats_a_linear_probe_of_the_frozen_weights(
    name, small_weights, tmp_path, capsys, caplog
):
    """20 images a class, by a model of 200,000 parameters that has seen handwritten digits alone."""
    from small_sets import write_set

    data = write_set(name, tmp_path, train=20, val=50)
    told = run_cli(capsys, "fewshot", "--weights", small_weights, "--data", data, "--method", "linear", "--json")
    floor = json.loads(told[1])["results"][-1]["accuracy"]
    command = ["finetune", "--weights", small_weights, "--data", data, "--output", tmp_path / "fine", "--device", "cpu"]
    caplog.set_level(logging.INFO, "vitfast")
    code, _, err = run_cli(capsys, *command, "--set", "workers=0")
    assert code == 0 and "recipe finetune/small" in caplog.text, err
    accuracy = json.loads((tmp_path / "fine" / "summary.json").read_text())["accuracy"]
    assert accuracy > floor > 1 / 8, (accuracy, floor)
    shutil.rmtree(tmp_path)


@pytest.fixture(scope="session")
def small_weights(tmp_path_factory):
    """Weights of the recipe `digits`, pre-trained whole."""
    run = tmp_path_factory.mktemp("digits") / "run"
    assert train(digits(run, batch_size=48, workers=0))["accuracy"] > 0.97
    return run / "checkpoints" / "last"
