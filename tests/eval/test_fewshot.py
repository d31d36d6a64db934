"""Frozen features: few-shot least squares, k-NN, linear probe, VTAB-style tables and ImageNet's reassessed labels, against scikit-learn and by hand."""

import csv
import dataclasses
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checks import assert_close, randomize
from PIL import Image
from sklearn.linear_model import Ridge as SklearnRidge
from sklearn.neighbors import KNeighborsClassifier

from vitfast import InputError, ViT
from vitfast.cli import main
from vitfast.data.loader import open_data
from vitfast.eval import fewshot, probe
from vitfast.experiments import vtab
from vitfast.train.recipes import resolve

CPU = torch.device("cpu")


def run_cli(capsys, *args) -> tuple[int, str, str]:
    code = main([str(a) for a in args])
    out = capsys.readouterr()
    return code, out.out, out.err


def cloud(count: int, width: int, classes: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Overlapping classes, columns of very different size, one of them constant."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(99))
    y = torch.arange(count) % classes
    x = (centres[y] + 1.5 * torch.randn(count, width, generator=generator)) * torch.logspace(-2, 2, width) + 3
    x[:, 0] = 5.0
    return x, y


@pytest.fixture(scope="module")
def digits_weights(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(0)
    randomize(
        ViT(img_size=16, patch_size=8, embed_dim=32, depth=1, num_heads=2, num_classes=10, representation_size=24),
        std=0.3,
    ).save_pretrained(folder)
    return folder


def evaluation(weights, data="digits", **settings):
    return resolve("eval", dict(weights=str(weights), data=str(data), device="cpu", workers=0, **settings))


# ---- the closed form


@pytest.mark.parametrize("count, width", [(300, 20), (16, 40)], ids=["more images", "more features"])
def test_ridge_is_scikit_learns_on_whitened_features_and_a_constant(count, width):
    (x, y), (queries, _) = cloud(count, width), cloud(80, width, seed=1)
    solver = fewshot.Ridge(x, y, 4)

    def design(f):
        a = x.numpy().astype(np.float64)
        return np.concatenate([(f.numpy() - a.mean(0)) / (a.std(0) + 1e-5), np.full((len(f), 1), 100.0)], axis=1)

    for l2 in (0.5, 2.0**10, 2.0**16):
        theirs = SklearnRidge(alpha=l2, fit_intercept=False, solver="cholesky").fit(
            design(x), np.eye(4)[y.numpy()] * 2 - 1
        )
        assert_close(solver.weights(l2), torch.from_numpy(theirs.coef_.T), atol=1e-9, rtol=1e-6, name=f"l2 {l2}")
        assert np.array_equal(solver.predict(queries, l2).numpy(), theirs.predict(design(queries)).argmax(1))
    assert torch.equal(fewshot.ridge(x, y, queries, 4), solver.predict(queries, 1024.0))


def test_draws_are_of_every_class_and_nested():
    labels = np.random.default_rng(3).integers(0, 5, 400)
    labels[labels == 4][3:] = 0
    labels[np.flatnonzero(labels == 4)[3:]] = 0  # three images of the last class are left
    for seed in range(2):
        one, five = (fewshot.draw(labels, 5, n, seed) for n in (1, 5))
        assert np.bincount(labels[one]).tolist() == [1] * 5 and np.bincount(labels[five]).tolist() == [5, 5, 5, 5, 3]
        assert set(one) <= set(five) and len(set(five)) == 23
    assert set(fewshot.draw(labels, 5, 5, 0)) != set(fewshot.draw(labels, 5, 5, 1))


# ---- k-NN and the linear probe


def test_knn_is_scikit_learns_with_the_same_weights(monkeypatch):
    monkeypatch.setattr(probe, "CHUNK", 33)
    (x, y), (queries, _) = cloud(200, 12), cloud(100, 12, seed=1)
    for k, temperature in ((20, 0.07), (5, 1.0)):
        theirs = KNeighborsClassifier(
            k, metric="cosine", weights=lambda distance, t=temperature: np.exp((1 - distance) / t)
        )
        theirs.fit(x.double().numpy(), y.numpy())
        assert np.array_equal(
            probe.knn(x, y, queries, 4, k, temperature).numpy(), theirs.predict(queries.double().numpy())
        )
    assert probe.knn(x[:3], y[:3], queries, 4).max() <= 2  # fewer images than neighbours


def test_the_linear_probe_is_logistic_regression():
    """The same objective minimised by torch's L-BFGS in float64, written out."""
    (x, y), (queries, _) = cloud(200, 12), cloud(300, 12, seed=1)
    a = x.numpy().astype(np.float64)
    whiten = lambda f: torch.from_numpy((f.numpy() - a.mean(0)) / (a.std(0) + 1e-5))  # noqa: E731
    for l2 in (1.0, 100.0):
        w, b = (
            torch.zeros(4, 12, dtype=torch.float64, requires_grad=True),
            torch.zeros(4, dtype=torch.float64, requires_grad=True),
        )
        optimizer = torch.optim.LBFGS(
            [w, b], max_iter=300, tolerance_grad=1e-9, tolerance_change=0, line_search_fn="strong_wolfe"
        )

        def closure(w=w, b=b, l2=l2, optimizer=optimizer):
            optimizer.zero_grad()
            loss = F.cross_entropy(whiten(x) @ w.T + b, y, reduction="sum") + l2 / 2 * w.square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        logits = (whiten(queries) @ w.T + b).detach()
        first, second = logits.topk(2).values.unbind(1)
        clear = first - second > 1e-2
        found = probe.linear(x, y, queries, 4, l2)
        assert clear.sum() > 280 and torch.equal(found[clear], logits.argmax(1)[clear])
    with pytest.raises(InputError, match="two classes at least"):
        probe.linear(x[y == 0], y[y == 0], queries, 4)


# ---- from weights and data to accuracies


def own_features(weights, source, transform) -> torch.Tensor:
    """Each image alone through the pieces of the model, up to the last linear layer."""
    model = ViT.from_pretrained(weights).eval()
    rows = []
    with torch.no_grad():
        for i in range(len(source)):
            image = torch.from_numpy(np.asarray(transform(source[i][0])))[None]
            rows.append(model.pre_logits.fc(model.forward_features(image)[:, 0]).tanh())
    return torch.cat(rows)


def test_few_shot_from_weights_to_accuracy(digits_weights, monkeypatch, capsys):
    """The whole way, against scikit-learn on features taken one image at a time."""
    config = evaluation(digits_weights)
    result = fewshot.few_shot(config, shots=[2, 10], seeds=2)
    data = open_data(config, (16, 16), (8, 8), CPU)
    x, queries = (
        own_features(digits_weights, source, data.eval_transform).double().numpy() for source in (data.train, data.val)
    )
    labels, truth = np.array(data.train.labels), np.array(data.val.labels)
    assert result["method"] == "ridge" and result["l2"] == 1024 and result["images"] == 360
    for row in result["results"]:
        for seed, accuracy in enumerate(row["accuracies"]):
            generator = np.random.default_rng(seed)
            chosen = np.concatenate(
                [generator.permutation(np.where(labels == k)[0])[: row["shots"]] for k in range(10)]
            )
            a = x[chosen]
            design = [
                np.pad((f - a.mean(0)) / (a.std(0) + 1e-5), ((0, 0), (0, 1)), constant_values=100.0)
                for f in (a, queries)
            ]
            theirs = SklearnRidge(alpha=1024, fit_intercept=False).fit(design[0], np.eye(10)[labels[chosen]] * 2 - 1)
            assert accuracy == pytest.approx((theirs.predict(design[1]).argmax(1) == truth).mean(), abs=2 / 360)
        assert row["accuracy"] == pytest.approx(np.mean(row["accuracies"]))
    assert 0.1 < result["results"][0]["accuracy"] < result["results"][1]["accuracy"]

    monkeypatch.setattr(
        fewshot, "known_labels", lambda source: None
    )  # a source that does not tell its labels: every image is read
    assert fewshot.few_shot(config, shots=[2, 10], seeds=2) == result
    code, out, _ = run_cli(
        capsys,
        "fewshot",
        "--weights",
        digits_weights,
        "--data",
        "digits",
        "--device",
        "cpu",
        "--shots",
        10,
        "all",
        "--seeds",
        2,
        "--json",
    )
    assert code == 0
    told = json.loads(out)["results"]
    assert told[0] == result["results"][1] and told[1]["shots"] == "all" and len(told[1]["accuracies"]) == 1
    for method in ("knn", "linear"):
        code, out, _ = run_cli(
            capsys, "fewshot", "--weights", digits_weights, "--data", "digits", "--device", "cpu", "--method", method
        )
        assert (
            code == 0
            and out.startswith(" all images a class: accuracy 0.")
            and float(out.split()[5]) > told[0]["accuracy"]
        )


def test_wrong_few_shot_settings_are_named(digits_weights, capsys):
    for flags in (["--shots", "0"], ["--seeds", "0"], ["--l2", "-1"]):
        code, _, err = run_cli(capsys, "fewshot", "--weights", digits_weights, "--data", "digits", *flags)
        assert code == 2 and "positive numbers of shots and seeds" in err and err.count("\n") == 1
    code, _, err = run_cli(
        capsys, "fewshot", "--weights", digits_weights, "--data", "digits", "--method", "knn", "--l2", 1
    )
    assert code == 2 and "knn has no l2; it is for ridge and linear" in err


# ---- VTAB


def striped(root: Path, split: str, count: int, seed: int) -> None:
    """Two classes that are easy to tell: stripes along and across."""
    generator = np.random.default_rng(seed)
    for name, axis in (("along", 0), ("across", 1)):
        folder = root / split / name
        folder.mkdir(parents=True)
        for i in range(count):
            stripes = np.broadcast_to((np.arange(16) // 2 % 2 * 150)[:, None], (16, 16))
            noise = generator.integers(0, 100, (16, 16, 3))
            Image.fromarray(((stripes if axis == 0 else stripes.T)[..., None] + noise).astype(np.uint8)).save(
                folder / f"{i}.png"
            )


@pytest.fixture(scope="module")
def stripes(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("vtab") / "dtd"
    striped(root, "train", 20, 0)
    striped(root, "test", 10, 1)
    return root


def test_vtab_is_one_table_of_several_tasks(digits_weights, stripes, tmp_path, capsys):
    tasks = tmp_path / "tasks.yaml"
    tasks.write_text(
        f"- digits\n- {{name: stripes, group: structured, data: {stripes}}}\n- {{name: more, group: structured, data: {stripes}}}\n"
    )
    flags = ("--weights", digits_weights, "--tasks", tasks, "--device", "cpu", "--set", "workers=0")
    code, out, err = run_cli(
        capsys, "vtab", *flags, "--method", "ridge", "--examples", 200, "--output", tmp_path / "a", "--json"
    )
    assert code == 0, err
    result = json.loads(out)
    assert result == json.loads((tmp_path / "a" / "vtab.json").read_text())
    digits, first, second = result["tasks"]
    assert (digits["train_images"], digits["test_images"], digits["group"]) == (200, 360, "tasks")
    assert (first["train_images"], first["test_images"]) == (40, 20) and first["accuracy"] == second["accuracy"] >= 0.9
    assert result["groups"] == {"tasks": digits["accuracy"], "structured": pytest.approx(first["accuracy"])}
    assert result["mean"] == pytest.approx((digits["accuracy"] + 2 * first["accuracy"]) / 3)
    rows = list(csv.DictReader(open(tmp_path / "a" / "vtab.csv")))
    assert [(r["task"], r["group"]) for r in rows[:3]] == [
        ("digits", "tasks"),
        ("stripes", "structured"),
        ("more", "structured"),
    ]
    assert [(r["task"], r["group"]) for r in rows[3:]] == [("mean", "tasks"), ("mean", "structured"), ("mean", "all")]
    assert [float(r["accuracy"]) for r in rows] == [t["accuracy"] for t in result["tasks"]] + [
        *result["groups"].values(),
        result["mean"],
    ]
    assert (tmp_path / "a" / "vtab.txt").read_text().splitlines()[-1].split() == [
        "mean",
        "all",
        f"{result['mean']:.4f}",
    ]

    # the number itself: 200 images drawn once, the regularisation that four fifths of them show to be best on the rest
    data = open_data(evaluation(digits_weights), (16, 16), (8, 8), CPU)
    x, y = probe.features(
        ViT.from_pretrained(digits_weights),
        dataclasses.replace(data, val=vtab.take(data.train, 200)).eval_batches(),
        CPU,
        None,
    )
    queries, truth = probe.features(ViT.from_pretrained(digits_weights), data.eval_batches(), CPU, None)
    held = {l2: int((fewshot.ridge(x[:160], y[:160], x[160:], 10, l2) == y[160:]).sum()) for l2 in vtab.L2["ridge"]}
    assert held[digits["l2"]] == max(held.values()) > min(held.values())
    assert digits["accuracy"] == pytest.approx(
        (fewshot.ridge(x, y, queries, 10, digits["l2"]) == truth).double().mean().item(), abs=2 / 360
    )


def test_vtab_fine_tunes_on_its_examples_and_goes_on_where_it_stopped(digits_weights, stripes, tmp_path, capsys):
    tasks = tmp_path / "tasks.yaml"
    tasks.write_text(
        f"- {{name: stripes, group: natural, data: {stripes}, crop_scale: [1, 1], lr: 0.05}}\n- {{data: digits}}\n"
    )
    command = (
        "vtab",
        "--weights",
        digits_weights,
        "--tasks",
        tasks,
        "--device",
        "cpu",
        "--recipe",
        "finetune/digits",
        "--examples",
        32,
        "--output",
        tmp_path / "a",
    )
    settings = ("--img-size", 16, "--batch-size", 16, "--set", "workers=0", "steps=12", "warmup_steps=0")
    code, out, err = run_cli(capsys, *command, *settings)
    assert code == 0, err
    result = json.loads((tmp_path / "a" / "vtab.json").read_text())
    assert [(t["train_images"], t["test_images"]) for t in result["tasks"]] == [(32, 20), (32, 360)]
    assert result["tasks"][0]["accuracy"] >= 0.8 and out == (tmp_path / "a" / "vtab.txt").read_text()
    summary = json.loads((tmp_path / "a" / "stripes-32" / "summary.json").read_text())
    assert (
        summary["steps"] == 12
        and summary["accuracy"] == result["tasks"][0]["accuracy"]
        and summary["train_images"] == 32
    )
    code, _, err = run_cli(capsys, *command, *settings)  # nothing is trained again
    assert code == 0 and json.loads((tmp_path / "a" / "vtab.json").read_text()) == result


def test_vtab_takes_the_first_images_of_shards(digits_weights, stripes, tmp_path):
    pytest.importorskip("webdataset")
    root = tmp_path / "wds_vtab-pets"
    for split, count in (("train", 12), ("test", 6)):
        (root / split).mkdir(parents=True)
        with tarfile.open(root / split / "0.tar", "w") as tar:
            for i in range(count):
                label, picture = i % 2, (stripes / "train" / ("across", "along")[i % 2] / f"{i}.png").read_bytes()
                for suffix, content in (("png", picture), ("cls", str(label).encode())):
                    info = tarfile.TarInfo(f"s{i:07d}.{suffix}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    (tmp_path / "dtd").symlink_to(stripes)
    found = vtab.tasks_in(tmp_path)
    assert [(t.name, t.group, t.settings["data"]) for t in found] == [
        ("dtd", "natural", str(tmp_path / "dtd")),
        ("pets", "natural", f"wds/{root}"),
    ]
    data = open_data(evaluation(digits_weights, f"wds/{root}"), (16, 16), (8, 8), CPU)
    taken = vtab.take(data.train, 8)
    assert len(taken) == 8 and {label for _, label in taken.samples} == {0, 1} and taken[0][0].size == (16, 16)
    result = vtab.evaluate_frozen(evaluation(digits_weights, f"wds/{root}"), "knn", 8)
    assert result["train_images"] == 8 and result["test_images"] == 6


def test_wrong_tasks_are_named(digits_weights, tmp_path, capsys, monkeypatch):
    path = tmp_path / "tasks.yaml"
    base = ("vtab", "--weights", digits_weights, "--output", tmp_path / "a", "--method", "knn")
    for content, message in (
        ("pets: 1", "must hold a list of tasks"),
        ("- {name: pets}", "a task without data"),
        ("- digits\n- digits", "two tasks have the same name"),
        ("- [", "cannot be read as YAML"),
        ("- {data: digits, colour: red}", "unknown setting 'colour'"),
    ):
        path.write_text(content)
        code, _, err = run_cli(capsys, *base, "--tasks", path)
        assert code == 2 and message in err and err.count("\n") == 1 and not (tmp_path / "a").exists()
    code, _, err = run_cli(capsys, *base, "--root", tmp_path)
    assert code == 2 and "no task of VTAB" in err and "hf download" in err
    path.write_text("- digits")
    for flags, message in (
        (["--examples", 0], "positive number of examples"),
        (["--method", "ridge", "--l2", 0], "positive l2"),
    ):
        code, _, err = run_cli(capsys, *base, "--tasks", path, *flags)
        assert code == 2 and message in err
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = run_cli(capsys, *base, "--tasks", path)
    assert code == 2 and "start it without torchrun" in err
    assert sum(map(len, vtab.VTAB.values())) == 19 and list(map(len, vtab.VTAB.values())) == [7, 4, 8]


# ---- ImageNet's reassessed labels


def test_real_labels_leave_out_what_has_none(tmp_path, capsys):
    torch.manual_seed(1)
    randomize(
        ViT(img_size=16, patch_size=8, embed_dim=32, depth=1, num_heads=2, num_classes=3), std=0.5
    ).save_pretrained(tmp_path / "w")
    model = ViT.from_pretrained(tmp_path / "w").eval()
    number, found = 0, []  # ImageNet's numbers do not follow the class folders
    order = np.random.default_rng(0).permutation(12) + 1
    for split in ("train", "val"):
        for k, name in enumerate(("n01", "n02", "n03")):
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for _ in range(4):
                pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
                file = f"ILSVRC2012_val_{order[number % 12]:08d}.JPEG"
                Image.fromarray(pixels).save(folder / file, format="PNG")
                if split == "val":
                    with torch.no_grad():
                        guess = model(torch.from_numpy(pixels).permute(2, 0, 1)[None]).argmax().item()
                    found.append((order[number % 12], guess, k))
                number += 1
    guesses = {n: guess for n, guess, _ in found}
    assert len(set(guesses.values())) > 1
    labels = [
        [guesses[n]] if n <= 3 else [] if n <= 5 else [(guesses[n] + 1) % 3] if n <= 9 else [0, 1, 2]
        for n in range(1, 13)
    ]
    path = tmp_path / "real.json"
    path.write_text(json.dumps(labels))
    flags = (
        "eval",
        "--weights",
        tmp_path / "w",
        "--data",
        tmp_path / "data",
        "--device",
        "cpu",
        "--set",
        "workers=0",
        "eval_batch_size=5",
        "--json",
    )
    code, out, err = run_cli(capsys, *flags, "--real", path)
    assert code == 0, err
    result = json.loads(out)
    assert result["real_images"] == 10 and result["real_accuracy"] == pytest.approx(6 / 10) and result["images"] == 12
    assert result["accuracy"] == pytest.approx(np.mean([guess == k for _, guess, k in found]))
    assert "real_accuracy" not in json.loads(run_cli(capsys, *flags)[1])

    for content, message in (
        ("[[1], [2]]", "labels for another number of images than the 12"),
        ("nothing", "cannot be read"),
        ("[" + "1," * 11 + "1]", "one list"),
    ):
        path.write_text(content)
        code, _, err = run_cli(capsys, *flags, "--real", path)
        assert code == 2 and message in err and err.count("\n") == 1
    code, _, err = run_cli(capsys, *flags, "--real")  # timm's copy, of 50,000 images
    assert code == 2 and "another number of images than the 12" in err
    path.write_text(json.dumps(labels))
    file = next((tmp_path / "data" / "val" / "n01").iterdir())
    file.rename(file.with_name("cat.JPEG"))
    code, _, err = run_cli(capsys, *flags, "--real", path)
    assert code == 2 and "has cat.JPEG" in err
