"""Images with any number of classes: the loss, the metrics and mixup against scikit-learn and by hand, and a run."""

import json
import math
import shutil

import numpy as np
import pictures
import pytest
import torch
from commands import run_cli, works
from frozen import evaluation, of_two, result, tiny
from PIL import Image
from processes import done, ranks
from sklearn.metrics import average_precision_score
from timm.data import Mixup

from vitfast import ViT
from vitfast.data.loader import open_data
from vitfast.data.samples import seed_everything
from vitfast.eval.accuracy import evaluate, mean_average_precision
from vitfast.train import losses

CPU = torch.device("cpu")
NAMES = ("red", "green", "blue")


def bright(root, split: str, count: int, seed: int):
    """Noise in which any number of the three colours is bright in a corner of its own: `labels.csv` says which."""
    rng, lines = np.random.default_rng(seed), []
    (root / split).mkdir(parents=True)
    for i in range(count):
        pixels, present = rng.integers(0, 60, (16, 16, 3), dtype=np.uint8), rng.random(3) < 0.5
        for channel in np.flatnonzero(present):
            pixels[8 * (channel // 2) :, 8 * (channel % 2) :, channel][:8, :8] += 150
        Image.fromarray(pixels).save(root / split / f"{i}.png")
        lines.append(f"{i}.png,{';'.join(np.array(NAMES)[present])}\n")
    (root / split / "labels.csv").write_text("".join(lines))
    return root


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("labels")
    bright(root, "train", 64, 0)
    pictures.truncate(bright(root, "val", 30, 1) / "val" / "0.png")  # ranks fill up with the first
    return root


@pytest.mark.slow
def test_a_run_learns_several_classes_an_image(data, capsys, tmp_path):
    flags = ("--recipe", "digits", "--data", data, "--device", "cpu", "--img-size", 16)
    settings = ("workers=0", "batch_size=16", "steps=60", "warmup_steps=5", "objective=sigmoid", "eval_every=60")
    settings += ("crop_scale=1,1", "mixup=0.1", "cutmix=0.1", "accumulate=2")
    works(capsys, "pretrain", *flags, "--output", tmp_path / "run", "--set", *settings)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["map"] > 0.95 and summary["val_images"] == 29 and summary["val_unreadable_images"] == 1
    weights = tmp_path / "run" / "checkpoints" / "last"
    found = result(capsys, "eval", weights, data)
    assert found["map"] == pytest.approx(summary["map"]) and "top5" not in found
    assert (found["accuracy"], found["loss"]) == pytest.approx((summary["accuracy"], summary["loss"]))

    # by hand: each image alone, the loss with plain logarithms, the metric by scikit-learn
    source = open_data(evaluation("", data), (16, 16), (8, 8), CPU).val
    model, rows = ViT.from_pretrained(weights).eval(), []
    with torch.no_grad():
        for i in range(30):
            if i != 0:
                pixels, target = source[[source.files.index(f) for f in source.files if f.endswith(f"/{i}.png")][0]]
                rows.append(
                    (model(torch.from_numpy(np.asarray(pixels)).permute(2, 0, 1)[None])[0].double().numpy(), target)
                )
    scores, truth = map(np.array, zip(*rows))
    assert found["map"] == pytest.approx(average_precision_score(truth, scores, average="macro"), abs=1e-6)
    assert found["accuracy"] == pytest.approx(np.mean([y[s.argmax()] for s, y in rows]))
    share = 1 / (1 + np.exp(-scores))
    assert found["loss"] == pytest.approx(-np.log(np.where(truth == 1, share, 1 - share)).sum(1).mean(), rel=1e-4)

    # the first image, as `predict` tells it: each class by itself, unless the user or bare weights say otherwise
    image, shares = data / "val" / "1.png", np.exp(scores[0])
    wanted = dict(sigmoid=shares / (1 + shares), softmax=shares / shares.sum())
    wanted = {kind: dict(zip(sorted(NAMES), values)) for kind, values in wanted.items()}
    bare = tmp_path / "bare"
    shutil.copytree(weights, bare, ignore=shutil.ignore_patterns("state"))
    for source, flag, kind in (
        (weights, (), "sigmoid"),
        (tmp_path / "run", (), "sigmoid"),
        (weights, ("--no-sigmoid",), "softmax"),
        (bare, (), "softmax"),
        (bare, ("--sigmoid",), "sigmoid"),
    ):
        code, out, _ = run_cli(capsys, "predict", image, "--weights", source, "--device", "cpu", "--json", *flag)
        said = {p["label"]: p["probability"] for p in json.loads(out)[0]["predictions"]}
        assert code == 0 and said == pytest.approx(wanted[kind], abs=1e-5), (source, flag)

    for command, more in (("fewshot", ()), ("fewshot", ("--method", "knn"))):
        code, _, err = run_cli(capsys, command, "--weights", weights, "--data", data, "--device", "cpu", *more)
        assert code == 2 and "have several classes; features are classified by one" in err


def test_the_metric_is_scikit_learns_over_the_classes_there_are():
    generator = torch.Generator().manual_seed(0)
    scores, targets = torch.randn(50, 6, generator=generator), torch.rand(50, 6, generator=generator).gt(0.7).float()
    scores[:20] = scores[:20].round()  # ties
    assert mean_average_precision(scores, targets) == pytest.approx(average_precision_score(targets, scores))
    targets[:, 2] = 0  # nothing to be found: scikit-learn would count it as 0
    each = [average_precision_score(targets[:, k], scores[:, k]) for k in (0, 1, 3, 4, 5)]
    assert mean_average_precision(scores, targets) == pytest.approx(np.mean(each))
    assert mean_average_precision(scores, torch.zeros(50, 6)) is None
    scores[3, 3] = float("nan")
    assert mean_average_precision(scores, targets) is None


@pytest.mark.slow
def test_two_ranks_have_one_metric(data, tmp_path):
    model = tiny(3)
    model.save_pretrained(tmp_path / "w")
    config = evaluation("", data, eval_batch_size=7)
    alone = evaluate(model, open_data(config, (16, 16), (8, 8), CPU))
    told = done(ranks(2, of_two, str(tmp_path / "w"), str(data), tmp_path / "result.json"))
    assert json.loads((tmp_path / "result.json").read_text()) == pytest.approx(alone, rel=1e-6)
    assert 0.3 < alone["map"] < 1 and (alone["images"], alone["unreadable_images"]) == (29, 1)
    assert sum(text.count("left out") for text in told) == 1


@pytest.mark.parametrize("mixup, cutmix", [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_mixed_targets_are_as_mixed_as_the_images(mixup, cutmix):
    """Images of the constant colours 0 and 1 in pairs: the mean of a mixed image is its share of the other."""
    target = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 1.0]])
    plain = torch.arange(4.0)[:, None, None, None].expand(4, 3, 8, 8).contiguous()
    for seed in range(8):
        seed_everything(seed)
        images, mixed = losses.mix(mixup, cutmix, plain.clone(), target)
        for i in range(4):
            j = 3 - i
            share = (images[i].mean() - j) / (i - j)
            assert torch.allclose(mixed[i], share * target[i] + (1 - share) * target[j], atol=1e-5)
        seed_everything(seed)
        theirs, numbers = Mixup(mixup, cutmix, label_smoothing=0.0, num_classes=4)(plain.clone(), torch.arange(4))
        assert torch.equal(images, theirs) and torch.allclose(mixed, numbers @ target)


def test_the_sigmoid_loss_and_the_right_answers_of_several_classes():
    logits, target = torch.tensor([[2.0, -1.0], [0.5, 3.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    log = lambda x: math.log(1 / (1 + math.exp(-x)))  # noqa: E731
    assert losses.sigmoid_loss(logits, target).item() == pytest.approx(-(log(2) + log(-1) + log(0.5) + log(-3)) / 2)
    assert losses.correct(logits, target).item() == 1 and losses.correct(logits, torch.tensor([0, 1])).item() == 2
