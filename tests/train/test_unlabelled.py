"""Runs without labels: how they are evaluated, by which labels, and what they leave."""

import json
import math

import numpy as np
import pictures
import pytest
import torch
from runs import records, without_labels
from scipy.stats import entropy
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from vitfast import ViT
from vitfast.cli import main
from vitfast.data.loader import open_data
from vitfast.train.lejepa import LeJEPA
from vitfast.train.trainer import train
from vitfast.train.unlabelled import effective_rank, evaluate_features

CPU = torch.device("cpu")


def test_effective_rank_is_that_of_the_singular_values():
    torch.manual_seed(0)
    x = torch.randn(50, 12) * torch.logspace(0, -3, 12) + 5
    values = np.linalg.svd(x.double().numpy() - x.double().numpy().mean(0), compute_uv=False)
    assert effective_rank(x) == pytest.approx(np.exp(entropy(values / values.sum())), rel=1e-9)
    basis = torch.linalg.qr(torch.randn(40, 5))[0]
    basis = torch.linalg.qr(basis - basis.mean(0))[0]
    assert effective_rank(basis) == pytest.approx(5, rel=1e-5)
    assert effective_rank(basis[:, :1] @ torch.ones(1, 7)) == pytest.approx(1, rel=1e-3)
    assert effective_rank(torch.full((10, 4), 0.3)) == 0


def test_probes_are_those_of_scikit_learn(monkeypatch):
    config = without_labels("unused", train_images=200)
    data = open_data(config, (32, 32), (8, 8), CPU)
    model = LeJEPA(ViT.from_preset("Nano/8", img_size=32, class_token=False, global_pool="avg"), 2, 3, width=32)
    found = evaluate_features(model.train(), data)
    assert model.training and found["images"] == 360 and found["loss"] is None and found["unreadable_images"] == 0
    features = []
    for source in (data.train, data.val):
        x = torch.cat([images for images, _, _ in data.in_order(source)])
        with torch.no_grad():
            features.append(model.vit.eval()(x).double().numpy())
    (x, queries), y, truth = features, np.array(data.train.labels), np.array(data.val.labels)
    near = KNeighborsClassifier(20, metric="cosine", weights=lambda d: np.exp((1 - d) / 0.07)).fit(x, y)
    assert found["knn"] == pytest.approx(near.score(queries, truth), abs=2 / 360)
    mean, std = x.mean(0), x.std(0) + 1e-5
    probe = LogisticRegression(max_iter=3000).fit((x - mean) / std, y)
    assert found["accuracy"] == pytest.approx(probe.score((queries - mean) / std, truth), abs=2 / 360)
    values = np.linalg.svd(queries - queries.mean(0), compute_uv=False)
    assert found["rank"] == pytest.approx(np.exp(entropy(values / values.sum())), rel=1e-3)
    monkeypatch.setattr("vitfast.train.unlabelled.PROBED", 50)
    assert evaluate_features(model, data)["images"] == 50


@pytest.mark.reports
def test_a_folder_without_labels_is_enough(tmp_path, capsys, caplog):
    """By the command: what it says before and after, metrics.csv, summary.json, the report, a resumed run."""
    (tmp_path / "photos" / "more").mkdir(parents=True)
    for number in range(20):
        pictures.smooth(number, 40, 30).save(tmp_path / "photos" / "more" / f"{number}.jpg")
        pictures.smooth(100 + number, 20, 30).save(tmp_path / "photos" / f"{number}.png")
    run, options = tmp_path / "run", ["--steps", "4", "--batch-size", "20", "--img-size", "32", "--device", "cpu"]
    command = ["pretrain", "--recipe", "ssl/small", "--data", str(tmp_path / "photos"), "--output", str(run), *options]
    command += ["--set", "model=Nano/8", "projector_width=32", "workers=0", "local_crops=2", "compile=false"]
    with caplog.at_level("INFO", logger="vitfast"):
        assert main(command) == 0
    assert "It learns by LeJEPA from 2 crops of 32x32 and 2 crops of 16x16 pixels of each image" in caplog.text
    assert "the effective rank of its features alone, as there is no class for each image" in caplog.text
    assert "has 40 images for training; evaluations look at 40 images." in caplog.text
    assert capsys.readouterr().out.startswith("effective rank of features ")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["accuracy"] is summary["knn"] is summary["loss"] is None and summary["train_images"] == 40
    ranks = [float(rank) for rank in records(run, "val", "rank")]
    assert records(run, "val", "step")[0] == "0"  # random weights have features too
    assert summary["rank"] == ranks[-1] > 1 and all(
        math.isfinite(float(loss)) for loss in records(run, "train", "loss")
    )
    page = (run / "report.html").read_text()
    assert "<h2>Neighbours</h2>" in page and "images and their nearest neighbours" in page and "LABELLED" in page
    assert (
        "of the class of their image" not in page
        and "that of a linear probe" not in page
        and "effective rank of features" in page
    )
    with caplog.at_level("INFO", logger="vitfast"):
        assert main(command) == 0
    assert "run is finished: 4 steps; --resume never" in caplog.text
    assert capsys.readouterr().out.startswith("effective rank of features ")  # it had finished
    longer = [word if word != "4" else "6" for word in command]
    assert main(longer) == 2 and "finished run of 4 steps, and this one takes 6: going on" in capsys.readouterr().err
    assert main([*longer, "--resume", "auto"]) == 0 and records(run, "val", "step")[-1] == "6"
    scaling = ["scaling", "--models", "Nano/8", "--lengths", "1", *command[1:5], "--output", str(tmp_path / "s")]
    assert main([*scaling, *options[2:], *command[command.index("--set") :]]) == 2
    assert "compares accuracies, and this run has no labels: give --set probe=DIR" in capsys.readouterr().err


@pytest.mark.reports
def test_reports_of_labelled_images_judge_the_neighbours(tmp_path):
    train(without_labels(tmp_path, steps=2))
    page = (tmp_path / "report.html").read_text()
    assert "of them are of the class of their image." in page and "Accuracy in evaluations is that of a linear" in page


@pytest.mark.reports
def test_labels_of_other_images_evaluate(tmp_path):
    (tmp_path / "flat").mkdir()
    for number in range(12):
        pictures.smooth(number, 24, 24).save(tmp_path / "flat" / f"{number}.png")
    labelled = pictures.folder(tmp_path / "labelled", count=8)
    fields = dict(data=str(tmp_path / "flat"), probe=str(labelled), train_images=None, batch_size=6, steps=2)
    summary = train(without_labels(tmp_path / "run", **fields))
    assert summary["val_images"] == 16 and 0 <= summary["accuracy"] <= 1 and 0 <= summary["knn"] <= 1
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"--data {labelled}" in page and "accuracy of 20 nearest neighbours" in page and "linear probe" in page
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"best", "checkpoints", "metrics.csv"}
