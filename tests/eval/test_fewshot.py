"""Frozen features: few-shot least squares, k-NN and the linear probe, against scikit-learn and by hand."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from commands import refuses, run_cli
from frozen import evaluation, save_tiny
from sklearn.neighbors import KNeighborsClassifier

from vitfast import InputError, ViT
from vitfast.data.loader import open_data
from vitfast.data.sources import Subset
from vitfast.eval import fewshot

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def digits_weights(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("weights"))


def cloud(count: int, width: int, classes: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Overlapping classes, columns of very different size, one of them constant."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(99))
    y = torch.arange(count) % classes
    x = (centres[y] + 1.5 * torch.randn(count, width, generator=generator)) * torch.logspace(-2, 2, width) + 3
    x[:, 0] = 5.0
    return x, y


@pytest.mark.parametrize("count, width", [(300, 20), (16, 40)], ids=["more images", "more features"])
def test_ridge_is_least_squares_on_whitened_features_and_a_constant(count, width):
    """By the normal equations of features and constant, solved by NumPy."""
    (x, y), (queries, _) = cloud(count, width), cloud(80, width, seed=1)

    def design(f):
        a = x.numpy().astype(np.float64)
        return np.concatenate([(f.numpy() - a.mean(0)) / (a.std(0) + 1e-5), np.full((len(f), 1), 100.0)], axis=1)

    for l2 in (0.5, 2.0**10, 2.0**16):
        a, target = design(x), np.eye(4)[y.numpy()] * 2 - 1
        truth = design(queries) @ np.linalg.solve(a.T @ a + l2 * np.eye(a.shape[1]), a.T @ target)
        assert np.array_equal(fewshot.ridge(x, y, queries, 4, l2).numpy(), truth.argmax(1))
    assert torch.equal(fewshot.classify("ridge", x, y, queries, 4), fewshot.ridge(x, y, queries, 4, 1024.0))


def test_images_of_one_class_are_all_of_it():
    x, _ = cloud(8, 20)
    assert fewshot.classify("ridge", x, torch.zeros(8, dtype=torch.long), x[:3], 1).tolist() == [0, 0, 0]


def test_draws_are_of_every_class_and_nested():
    labels = np.random.default_rng(3).integers(0, 5, 400)
    labels[labels == 4][3:] = 0
    labels[np.flatnonzero(labels == 4)[3:]] = 0  # three images of the last class are left
    for seed in range(2):
        one, five = (fewshot.draw_shots(labels, 5, n, seed) for n in (1, 5))
        assert np.bincount(labels[one]).tolist() == [1] * 5 and np.bincount(labels[five]).tolist() == [5, 5, 5, 5, 3]
        assert set(one) <= set(five) and len(set(five)) == 23
    assert set(fewshot.draw_shots(labels, 5, 5, 0)) != set(fewshot.draw_shots(labels, 5, 5, 1))


def test_knn_is_scikit_learns_with_the_same_weights(monkeypatch):
    monkeypatch.setattr(fewshot, "CHUNK", 33)
    (x, y), (queries, _) = cloud(200, 12), cloud(100, 12, seed=1)
    for k, temperature in ((20, 0.07), (5, 1.0)):
        weights = lambda distance, t=temperature: np.exp((1 - distance) / t)  # noqa: E731
        theirs = KNeighborsClassifier(k, metric="cosine", weights=weights).fit(x.double().numpy(), y.numpy())
        found = fewshot.knn(x, y, queries, 4, k, temperature).numpy()
        assert np.array_equal(found, theirs.predict(queries.double().numpy()))
    assert fewshot.knn(x[:3], y[:3], queries, 4).max() <= 2  # fewer images than neighbours


def test_the_linear_probe_is_logistic_regression():
    """The same objective minimised by torch's L-BFGS in float64, written out."""
    (x, y), (queries, _) = cloud(200, 12), cloud(300, 12, seed=1)
    a = x.numpy().astype(np.float64)
    whiten = lambda f: torch.from_numpy((f.numpy() - a.mean(0)) / (a.std(0) + 1e-5))  # noqa: E731
    for l2 in (1.0, 100.0):
        w, b = (torch.zeros(size, dtype=torch.float64, requires_grad=True) for size in ((4, 12), (4,)))
        options = dict(max_iter=300, tolerance_grad=1e-9, tolerance_change=0, line_search_fn="strong_wolfe")
        optimizer = torch.optim.LBFGS([w, b], **options)

        def closure(w=w, b=b, l2=l2, optimizer=optimizer):
            optimizer.zero_grad()
            loss = F.cross_entropy(whiten(x) @ w.T + b, y, reduction="sum") + l2 / 2 * w.square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        logits = (whiten(queries) @ w.T + b).detach()
        first, second = logits.topk(2).values.unbind(1)
        clear = first - second > 1e-2
        found = fewshot.linear(x, y, queries, 4, l2)
        assert clear.sum() > 280 and torch.equal(found[clear], logits.argmax(1)[clear])
    with pytest.raises(InputError, match="two classes at least"):
        fewshot.linear(x[y == 0], y[y == 0], queries, 4)


def own_features(weights, source, transform) -> torch.Tensor:
    """Each image alone through the pieces of the model, up to the last linear layer."""
    model = ViT.from_pretrained(weights).eval()
    rows = []
    with torch.no_grad():
        for i in range(len(source)):
            image = torch.from_numpy(np.asarray(transform(source[i][0])))[None]
            rows.append(model.pre_logits.fc(model.forward_features(image)[:, 0]).tanh())
    return torch.cat(rows)


@pytest.mark.slow
def test_few_shot_from_weights_to_accuracy(digits_weights, monkeypatch, capsys):
    """The whole way, against features taken one image at a time."""
    config = evaluation(digits_weights)
    result = fewshot.few_shot(config, shots=[2, 10], seeds=2)
    data = open_data(config, (16, 16), (8, 8), CPU)
    x, queries = (own_features(digits_weights, source, data.eval_transform) for source in (data.train, data.val))
    labels, truth = np.array(data.train.labels), np.array(data.val.labels)
    assert result["method"] == "ridge" and result["l2"] == 1024 and result["images"] == 360
    for row in result["results"]:
        for seed, accuracy in enumerate(row["accuracies"]):
            generator = np.random.default_rng(seed)
            classes = [generator.permutation(np.where(labels == k)[0]) for k in range(10)]
            chosen = np.concatenate([order[: row["shots"]] for order in classes])
            found = fewshot.ridge(x[chosen], torch.from_numpy(labels[chosen]), queries, 10, 1024)
            assert accuracy == pytest.approx((found.numpy() == truth).mean(), abs=2 / 360)
        assert row["accuracy"] == pytest.approx(np.mean(row["accuracies"]))
    assert 0.1 < result["results"][0]["accuracy"] < result["results"][1]["accuracy"]

    def opened(*args, open_weights=fewshot.open_weights):
        model, data = open_weights(*args)
        data.train = Subset(data.train, range(len(data.train)))
        return model, data

    monkeypatch.setattr(fewshot, "open_weights", opened)
    monkeypatch.setattr(Subset, "labels", None)  # of a source whose labels are not known every image is read
    assert fewshot.few_shot(config, shots=[2, 10], seeds=2) == result
    command = ("fewshot", "--weights", digits_weights, "--data", "digits", "--device", "cpu")
    code, out, _ = run_cli(capsys, *command, "--shots", 10, "all", "--seeds", 2, "--json")
    told = json.loads(out)["results"]
    assert code == 0 and told[0] == result["results"][1]
    assert told[1]["shots"] == "all" and len(told[1]["accuracies"]) == 1
    for method in ("knn", "linear"):
        code, out, _ = run_cli(capsys, *command, "--method", method)
        assert code == 0 and out.startswith(" all images a class: accuracy 0.")
        assert float(out.split()[5]) > told[0]["accuracy"]


def test_the_result_is_written_where_it_is_asked_for(digits_weights, tmp_path, capsys):
    base = ("fewshot", "--weights", digits_weights, "--data", "digits", "--device", "cpu", "--seeds", 2)
    base += ("--set", "train_images=300")
    table, whole = tmp_path / "new" / "a.csv", tmp_path / "new" / "a.json"
    code, out, err = run_cli(capsys, *base, "--shots", 2, 5, "--output", whole, "--json")
    assert code == 0 and json.loads(whole.read_text()) == json.loads(out), err
    result = json.loads(out)["results"]
    assert run_cli(capsys, *base, "--shots", 2, 5, "--output", table)[0] == 0
    rows = list(csv.DictReader(open(table)))
    assert [(row["shots"], row["draw"]) for row in rows] == [("2", "0"), ("2", "1"), ("5", "0"), ("5", "1")]
    assert [float(row["accuracy"]) for row in rows] == result[0]["accuracies"] + result[1]["accuracies"]
    assert [float(row["mean_accuracy"]) for row in rows][::2] == [row["accuracy"] for row in result]
    assert {(row["weights"], row["method"], row["l2"]) for row in rows} == {(str(digits_weights), "ridge", "1024.0")}
    assert run_cli(capsys, *base, "--shots", 3, "--output", whole, "--force")[0] == 0
    assert json.loads(whole.read_text())["results"][0]["shots"] == 3
    assert sorted(path.name for path in whole.parent.iterdir()) == ["a.csv", "a.json"]


WRONG = [
    ("--output OUT/a.json", "a.json: is there already; add --force"),
    ("--output OUT/a.txt", "a.txt: the result is written as .json or .csv"),
    ("--output OUT/folder.json", "folder.json: a folder is in the way"),
    *((flags, "positive numbers of shots and seeds") for flags in ("--shots 0", "--seeds 0")),
    *((flags, "l2 must be positive") for flags in ("--l2 -1", "--l2 inf")),
    ("--method knn --l2 1", "knn has no l2; it is for ridge and linear"),
]


@pytest.mark.parametrize("flags, says", WRONG)
def test_wrong_settings_are_named_before_anything_is_computed(tmp_path, capsys, monkeypatch, flags, says):
    monkeypatch.setattr(fewshot, "open_weights", lambda *_: pytest.fail("something was computed"))
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "a.json").write_text("old")
    words = flags.replace("OUT", str(tmp_path)).split()
    refuses(capsys, says, "fewshot", "--weights", "W", "--data", "digits", *words)
    assert (tmp_path / "a.json").read_text() == "old" and not (tmp_path / "a.txt").exists()
