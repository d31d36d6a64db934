"""The answers in a report against scikit-learn's numbers for the saved weights; how many are shown; of many forms."""

import dataclasses
import html
import json
import re

import numpy as np
import pytest
import torch
from commands import make_folder
from PIL import Image
from processes import done, ranks
from runs import digits
from sklearn.datasets import load_digits
from sklearn.metrics import confusion_matrix, precision_score, recall_score

from vitfast import ViT
from vitfast.data.loader import open_data
from vitfast.data.shards import Shards
from vitfast.eval.accuracy import Collector
from vitfast.run.config import Config
from vitfast.run.distributed import leave
from vitfast.train.report import answers as module
from vitfast.train.report.answers import answer_sections
from vitfast.train.trainer import train

pytestmark = pytest.mark.reports
CPU = torch.device("cpu")


def cells(text: str, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, without its header."""
    table = re.search("<table.*?</table>", text.partition(f"<h2>{heading}</h2>")[2], re.S)[0].partition("</thead>")[2]
    rows = [re.findall("<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall("<tr.*?</tr>", table)]
    return [[html.unescape(cell) for cell in row] for row in rows]


def matrix(text: str) -> list[list[int]]:
    return [[int(cell or 0) for cell in row[1:]] for row in cells(text, "Confusion matrix")]


def captions(text: str) -> list[str]:
    return [html.unescape(each) for each in re.findall("<figcaption[^>]*>(.*?)</figcaption>", text, re.S)]


def resized(image: Image.Image, side: int = 16) -> torch.Tensor:
    return torch.from_numpy(np.array(image.convert("RGB").resize((side, side), Image.Resampling.BICUBIC)))


def test_images() -> tuple[torch.Tensor, list[int]]:
    """The test split of the digits at 16 pixels, uint8 (360, 3, 16, 16), and its classes, read anew."""
    val = open_data(Config(data="digits"), (16, 16), (8, 8), CPU).val
    pixels = (load_digits().images[val.indices] * (255 / 16)).round().astype(np.uint8)
    return torch.stack([resized(Image.fromarray(each)) for each in pixels]).permute(0, 3, 1, 2), val.labels


test_images.__test__ = False


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """(report, its run) of a short run on the digits; (classes, answers, probabilities) of its saved weights."""
    run = tmp_path_factory.mktemp("run")
    train(digits(run, steps=60, lr=3e-3, warmup_steps=5, eval_every=60, img_size=16))
    return (run / "report.html").read_text(), run, predicted(run)


def predicted(run) -> tuple[list[int], list[int], list[float]]:
    model, (images, truth) = ViT.from_pretrained(run / "checkpoints" / "last").eval(), test_images()
    with torch.no_grad():
        probabilities, found = model(images).softmax(-1).max(-1)
    return truth, found.tolist(), probabilities.tolist()


def test_matrix_classes_and_pairs_are_those_of_scikit_learn(said):
    text, _, (truth, found, _) = said
    wanted = confusion_matrix(truth, found, labels=range(10))
    assert wanted.trace() > 100 and matrix(text) == wanted.tolist()
    trained = np.bincount(open_data(Config(data="digits"), (16, 16), (8, 8), CPU).train.labels)
    options = dict(labels=range(10), average=None, zero_division=np.nan)
    scores = [score(truth, found, **options) for score in (recall_score, precision_score)]
    shares = [["" if np.isnan(share) else f"{share:.1%}" for share in both] for both in zip(*scores)]
    rows = [[str(k), str(trained[k]), str(truth.count(k)), *shares[k]] for k in range(10)]
    assert cells(text, "Classes") == rows
    pairs = [(int(a), int(b), int(n)) for a, b, n in cells(text, "Most confused pairs")]
    np.fill_diagonal(wanted, 0)
    assert [n for *_, n in pairs] == sorted(wanted.flatten(), reverse=True)[: len(pairs)] and len(pairs) == 10
    assert all(wanted[a, b] == n for a, b, n in pairs) and len(set(pairs)) == 10


def test_wrong_images_are_all_there_the_most_confident_first(said):
    text, _, (truth, found, probabilities) = said
    wrong = [(p, f"{f} {p:.0%}, is {t}\nimage {i}") for i, (t, f, p) in enumerate(zip(*said[2])) if t != f]
    wrong = [caption for _, caption in sorted(wrong, key=lambda pair: -pair[0])]
    assert 30 < len(wrong) <= 200 and captions(text) == wrong
    assert f"Of 360 validation images, {len(wrong)} are classified wrongly." in text
    assert len(captions(text.partition("<details>")[0])) == module.OPEN


def test_a_report_that_a_run_lacks_has_the_same_answers(said):
    """As after a kill: the last evaluation is gone, and the model looks again."""
    text, run, _ = said
    (run / "report.html").unlink()
    train(digits(run, steps=60, lr=3e-3, warmup_steps=5, eval_every=60, img_size=16))
    again = (run / "report.html").read_text()
    assert matrix(again) == matrix(text) and captions(again) == captions(text)


def on_ranks(config) -> None:
    train(config)
    leave()


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_bring_their_answers_together(tmp_path, parallel):
    """Of an odd number of images, so that one rank has one more."""
    config = digits(tmp_path, steps=40, lr=3e-3, warmup_steps=5, eval_every=40, img_size=16, parallel=parallel)
    config = dataclasses.replace(config, hold_out=0.25, early_stop=3)
    done(ranks(2, on_ranks, config))
    text, val = (tmp_path / "report.html").read_text(), open_data(config, (16, 16), (8, 8), CPU).val
    model = ViT.from_pretrained(tmp_path / "checkpoints" / "last").eval()
    with torch.no_grad():
        found = model(torch.stack([resized(val[i][0]) for i in range(len(val))]).permute(0, 3, 1, 2)).argmax(-1)
    assert len(val) % 2 and matrix(text) == confusion_matrix(val.labels, found, labels=range(10)).tolist()
    wrong = {val.name(i) for i in range(len(val)) if val.labels[i] != found[i]}
    assert len(wrong) <= 200 and {caption.partition("\n")[2] for caption in captions(text)} == wrong


@pytest.mark.parametrize("count", [0, 1, 200, 201])
def test_at_most_200_wrong_images_are_shown(count, monkeypatch):
    """Of 300 synthetic ones, whose 1,000 classes are too many for a matrix."""
    data = open_data(Config(data="synthetic"), (16, 16), (8, 8), CPU)
    data.val.labels = data.val.labels[:300]
    collector, labels = Collector("softmax"), torch.tensor(data.val.labels)
    order = torch.randperm(300)
    answers = labels.clone()
    answers[order[:count]] = (labels[order[:count]] + 1) % 1000
    scores = torch.linspace(3, 9, 300)[order.argsort()]  # the first of `order` are the least confident
    collector.add(torch.nn.functional.one_hot(answers, 1000) * scores[:, None], labels)
    sections = answer_sections(collector.gather(data), data)
    note, text = sections["Wrong answers"]
    shown = [int(caption.split()[-1]) for caption in captions(text)]
    assert shown == order[:count].flip(0)[:200].tolist() and "Confusion matrix" not in sections
    assert ("; these are 200 of them" in note) == (count == 201) and ("all right" in note) == (count == 0)
    assert ("validation images, 1 is classified wrongly." in note) == (count == 1)
    text = sections["Classes"][1]
    worst = cells(f"<h2>Classes</h2>{text}", "Classes")
    assert len(worst) == 30 and "970 more" in text and (worst[0][3] == "0.0%") == (count > 0)
    assert len(str(sections)) < 1e6


def test_what_is_read_in_order_shows_no_wrong_images():
    data = open_data(Config(data="digits"), (16, 16), (8, 8), CPU)

    class Stream(Shards):
        def __len__(self):
            return 12

    data.val = Stream("hfids/x", None, data.classes)
    collector = Collector("softmax")
    collector.add(torch.eye(10)[torch.arange(12) % 10 // 2 * 2], torch.arange(12) % 10)  # the even ones are right
    note, text = answer_sections(collector.gather(data), data)["Wrong answers"]
    assert note.startswith("Of 12 validation images, 6 are classified wrongly. They are not shown") and not text


def test_images_of_several_classes_have_their_own_numbers(tmp_path, capsys):
    rng, names = np.random.default_rng(0), ("a", "b<", "c", "d")
    for split, count in (("train", 12), ("val", 30)):
        (tmp_path / split).mkdir()
        lines = {}
        for i in range(count):
            Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(tmp_path / split / f"{i}.png")
            lines[f"{i}.png"] = [name for name in names if rng.random() < 0.4] if i != 1 else []
        (tmp_path / split / "labels.json").write_text(json.dumps(lines))
    settings = dict(data=str(tmp_path), objective="sigmoid", steps=2, img_size=16, workers=0)
    train(config := digits(tmp_path / "run", **settings))
    text, val = (tmp_path / "run" / "report.html").read_text(), open_data(config, (16, 16), (8, 8), CPU).val
    model = ViT.from_pretrained(tmp_path / "run" / "checkpoints" / "last").eval()
    images, truth = zip(*(val[i] for i in range(30)))
    with torch.no_grad():
        probabilities = model(torch.stack(list(map(resized, images))).permute(0, 3, 1, 2)).sigmoid()
    truth, named, first = np.stack(truth), (probabilities > 0.5).numpy(), probabilities.argmax(1).tolist()
    scores = [f(truth, named, average=None, zero_division=np.nan) for f in (recall_score, precision_score)]
    told = [[float(cell.strip("%") or "nan") / 100 for cell in row[3:]] for row in cells(text, "Classes")]
    np.testing.assert_allclose(told, np.transpose(scores), atol=6e-4)
    assert [int(row[2]) for row in cells(text, "Classes")] == truth.sum(0).tolist() and "Confusion" not in text
    wrong = {i for i in range(30) if not truth[i, first[i]]}
    shown = [re.fullmatch(r"(\S+) \d+%, is (.*)\nval/(\d+).png", caption).groups() for caption in captions(text)]
    assert {int(i) for *_, i in shown} == wrong and 1 in wrong and len(shown) == len(wrong)
    for answer, classes, i in shown:
        own = [names[k] for k in np.flatnonzero(truth[int(i)])]
        assert answer == names[first[int(i)]] and classes == (", ".join(own) or "of no class")


def test_unreadable_images_have_no_answer(tmp_path, capsys):
    data = make_folder(tmp_path / "data", count=3)
    (data / "val" / "cat" / "1.png").write_bytes(b"no image")
    train(digits(tmp_path / "run", data=str(data), steps=1, img_size=16, batch_size=4, workers=0))
    text = (tmp_path / "run" / "report.html").read_text()
    assert "Of 8 of the 9 validation images, " in text or "The answers to 8 of the 9 validation images" in text
    assert [row[1:3] for row in cells(text, "Classes")].count(["3", "2"]) == 1
    assert sum(map(sum, matrix(text))) == 8 and "cat/1.png" not in text
