"""report.html of a run: what it says of losses, settings, answers and commands; that it is small and fails no run."""

import base64
import dataclasses
import html
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from checks import randomize
from commands import CLASSES, make_folder
from PIL import Image
from processes import done, ranks
from runs import content, cut_at, digits
from sklearn.datasets import load_digits
from sklearn.metrics import confusion_matrix, precision_score, recall_score

from vitfast import ViT
from vitfast.data.loader import open_data
from vitfast.eval.answers import Collector, evenly, look
from vitfast.eval.inspect.page import page
from vitfast.run.config import Config
from vitfast.run.distributed import leave
from vitfast.train import report, trainer
from vitfast.train.report import answers as module
from vitfast.train.report import commands, progress
from vitfast.train.report.answers import answer_sections
from vitfast.train.trainer import train

pytestmark = pytest.mark.reports
CPU = torch.device("cpu")
LIMIT = 3e6  # bytes
PROGRESS, ENDS = ["Curves", "Evaluations"], ["Next commands", "Settings", "Origin"]
INSIDE = ["Position embeddings", "Attention rollout"]
ANSWERS = ["Classes", "Confusion matrix", "Most confused pairs", "Wrong answers"]


def opened(config) -> object:
    """The data of a run on images of 16 x 16 pixels."""
    return open_data(config, (16, 16), (8, 8), CPU)


def read(run: Path) -> tuple[str, list[str]]:
    """The text of a report and its headings."""
    text = (run / "report.html").read_text()
    return text, re.findall("<h2>(.*?)</h2>", text)


def cells(text: str, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, without its header."""
    table = re.search("<table.*?</table>", text.partition(f"<h2>{heading}</h2>")[2], re.S)[0].partition("</thead>")[2]
    rows = [re.findall("<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall("<tr.*?</tr>", table)]
    return [[html.unescape(cell) for cell in row] for row in rows]


def matrix(text: str) -> list[list[int]]:
    return [[int(cell or 0) for cell in row[1:]] for row in cells(text, "Confusion matrix")]


def captions(text: str) -> list[str]:
    return [html.unescape(each) for each in re.findall("<figcaption[^>]*>(.*?)</figcaption>", text, re.S)]


def resized(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.convert("RGB").resize((16, 16), Image.Resampling.BICUBIC)))


# ---- a whole report, and the answers in it against scikit-learn's numbers for the saved weights


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """(report, the config of its run) on the digits; (classes, answers, probabilities) of its saved weights."""
    config = digits(tmp_path_factory.mktemp("run"), steps=60, lr=3e-3, warmup_steps=5, eval_every=60, img_size=16)
    train(config)
    val = opened(Config(data="digits")).val
    pixels = (load_digits().images[val.indices] * (255 / 16)).round().astype(np.uint8)  # read anew
    images = torch.stack([resized(Image.fromarray(each)) for each in pixels]).permute(0, 3, 1, 2)
    with torch.no_grad():
        logits = ViT.from_pretrained(f"{config.output}/checkpoints/last").eval()(images)
    probabilities, found = logits.softmax(-1).max(-1)
    return read(Path(config.output))[0], config, (val.labels, found.tolist(), probabilities.tolist())


@pytest.mark.slow
def test_a_finished_run_has_a_report_of_what_its_model_says(said):
    text, config, (truth, found, _) = said
    assert read(Path(config.output))[1] == [*PROGRESS, "Speed", *ANSWERS, *INSIDE, *ENDS]
    assert text.count("data:image/") == 3 + len(captions(text)) and not re.search("https?:|<script|<link|@import", text)
    p = np.mean(np.equal(truth, found))
    assert f"{p:.4f} ± {np.sqrt(p * (1 - p) / 360):.4f}" in text and len(text) < LIMIT
    settings = f"<tr><td>batch size</td><td>{config.batch_size}</td><td>batch_size</td></tr>"
    assert f"torch {torch.__version__}" in text and settings in text and "prefers-color-scheme:dark" in text
    assert re.search(r"finished on \d{4}-\d\d-\d\d at \d\d:\d\d \S+ on the CPU \(", text)
    assert html.escape(commands.cpu_name()) in text and "<td>CPU threads</td><td>1</td>" in text


def test_matrix_classes_and_pairs_are_those_of_scikit_learn(said):
    text, _, (truth, found, _) = said
    wanted = confusion_matrix(truth, found, labels=range(10))
    assert wanted.trace() > 100 and matrix(text) == wanted.tolist()
    trained = np.bincount(opened(Config(data="digits")).train.labels)
    recalls = recall_score(truth, found, labels=range(10), average=None)
    rows = [[str(k), str(trained[k]), str(truth.count(k)), f"{recalls[k]:.1%}"] for k in range(10)]
    assert cells(text, "Classes") == rows
    pairs = [(int(a), int(b), int(n)) for a, b, n, _ in cells(text, "Most confused pairs")]
    np.fill_diagonal(wanted, 0)
    assert [n for *_, n in pairs] == sorted(wanted.flatten(), reverse=True)[: len(pairs)] and len(pairs) == 10
    assert all(wanted[a, b] == n for a, b, n in pairs) and len(set(pairs)) == 10


def test_wrong_images_are_all_there_the_most_confident_first(said):
    text, _, answers = said
    wrong = [(p, f"{f} {p:.0%}, is {t}\nimage {i}") for i, (t, f, p) in enumerate(zip(*answers)) if t != f]
    wrong = [caption for _, caption in sorted(wrong, key=lambda pair: -pair[0])]
    assert 30 < len(wrong) <= 200 and captions(text) == wrong
    assert f"Of 360 validation images, {len(wrong)} are classified wrongly." in text
    assert len(captions(text.partition("<details>")[0])) == module.OPEN


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_report_gets_it_from_the_same_command(said):
    """The last evaluation is gone, and the model looks again; nothing else is written."""
    text, config, _ = said
    run = Path(config.output)
    before = content(run)
    (run / "report.html").unlink()
    assert train(config) == json.loads(before["summary.json"])
    again = read(run)[0]
    assert matrix(again) == matrix(text) and captions(again) == captions(text)
    assert {**content(run), "report.html": before["report.html"]} == before
    written = (run / "report.html").stat().st_mtime_ns
    (run / "vitfast.lock").touch()
    train(config)  # after a kill behind the report
    assert (run / "report.html").stat().st_mtime_ns == written and not (run / "vitfast.lock").exists()


@pytest.mark.slow
def test_a_run_that_is_cut_off_has_no_report_of_fewer_steps(tmp_path, monkeypatch):
    """That of 2 steps would be taken for one of 4; and what is in summary.json is there before the report."""
    options = dict(img_size=16, batch_size=4, save_every=1)
    train(digits(tmp_path, steps=2, **options))
    assert (tmp_path / "report.html").exists()
    cut_at(monkeypatch, 3)
    with pytest.raises(KeyError):
        train(digits(tmp_path, steps=4, **options))
    assert not (tmp_path / "report.html").exists()
    monkeypatch.undo()
    monkeypatch.setattr(trainer, "write_report", lambda *_: {}["killed"])
    with pytest.raises(KeyError):
        train(digits(tmp_path, steps=4, **options))
    monkeypatch.undo()
    assert json.loads((tmp_path / "summary.json").read_text())["finished"]
    assert train(digits(tmp_path, steps=4, **options))["steps"] == 4
    assert "<td>steps</td><td class=n>4</td>" in read(tmp_path)[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["masked", "resnet", "no positions"])
def test_other_models_show_what_they_have(tmp_path, kind):
    fields = dict(masked=dict(objective="masked"), resnet=dict(model="timm:resnet10t"))
    train(digits(tmp_path, steps=2, batch_size=4, **fields.get(kind, dict(pos_embed="none"))))
    text, headings = read(tmp_path)
    looked, inside = ["Neighbours"] if kind == "masked" else ANSWERS, INSIDE * (kind != "resnet")
    assert headings == [*PROGRESS, *looked, *inside, *ENDS] and (len(captions(text)) == 200) == (kind != "masked")
    said = [
        name for name in ("predict", "eval", "export", "embed", "finetune", "fewshot") if f"vitfast {name} " in text
    ]
    wanted = dict(masked=["export", "embed", "finetune", "fewshot"], resnet=["predict", "eval"])
    assert said == wanted.get(kind, ["predict", "eval", "export", "embed"])
    assert ("Not drawn: the model adds no position" in text) == (kind == "no positions")
    assert "±" in text.partition("<h2>")[0].partition("</table>")[0].partition("<table>")[2]


@pytest.mark.slow
def test_what_fails_in_a_report_is_one_line_and_the_run_is_finished(tmp_path, monkeypatch, caplog):
    def broken(*_):
        raise ValueError("no such\ncolour")

    monkeypatch.setattr("vitfast.eval.inspect.figures.draw_curves", broken)
    options = dict(steps=1, img_size=16, batch_size=4)
    summary = train(digits(tmp_path / "a", **options))
    assert json.loads((tmp_path / "a" / "summary.json").read_text()) == summary and summary["finished"]
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    for name in ("figures", "report"):
        monkeypatch.delitem(sys.modules, f"vitfast.eval.inspect.{name}", raising=False)
    assert train(digits(tmp_path / "b", **options))["finished"] and not list(tmp_path.rglob("report.html"))
    said = [record.message for record in caplog.records if "report.html" in record.message]
    assert said == ["no report.html: ValueError: no such colour", "no report.html: matplotlib is not installed"]


@pytest.mark.slow
def test_a_report_stays_small_whatever_is_in_the_images(tmp_path):
    """Noise, which no format compresses, on 37 x 37 patches, after a million steps."""
    torch.manual_seed(0)
    model = randomize(ViT(img_size=296, patch_size=8, embed_dim=16, depth=1, num_heads=1, num_classes=1000)).eval()
    data = open_data(Config(data="synthetic"), (296, 296), (8, 8), CPU)
    rng = np.random.default_rng(0)
    (tmp_path / "metrics.csv").write_text(
        "step,epoch,split,loss,accuracy,lr,images_per_second,waiting_for_data\n"
        + "".join(f"{10 * i},{i / 100},train,{x},{y},0.1,1,0\n" for i, (x, y) in enumerate(rng.random((100_000, 2))))
    )
    sections = progress.curves({"run": tmp_path}) | report.model_sections(model, data)
    pictures = re.findall(r'alt="([^"]*)" src="data:image/[a-z]+;base64,([^"]+)', str(sections))
    sizes = {name: len(base64.b64decode(content)) for name, content in pictures if not name.startswith("validation")}
    assert len(page("t", {}, sections)) < LIMIT, sizes
    assert len(pictures) == 203 and sizes["Position embeddings"] < 6e5


# ---- answers


def on_ranks(config) -> None:
    train(config)
    leave()


@pytest.mark.slow
def test_ranks_bring_their_answers_together(tmp_path):
    """Of an odd number of images, so that one rank has one more."""
    config = digits(tmp_path, steps=40, lr=3e-3, warmup_steps=5, eval_every=40, img_size=16, parallel="fsdp")
    config = dataclasses.replace(config, hold_out=0.25, early_stop=3)
    done(ranks(2, on_ranks, config))
    text, val = read(tmp_path)[0], opened(config).val
    model = ViT.from_pretrained(tmp_path / "checkpoints" / "last").eval()
    with torch.no_grad():
        found = model(torch.stack([resized(val[i][0]) for i in range(len(val))]).permute(0, 3, 1, 2)).argmax(-1)
    assert len(val) % 2 and matrix(text) == confusion_matrix(val.labels, found, labels=range(10)).tolist()
    wrong = {val.name(i) for i in range(len(val)) if val.labels[i] != found[i]}
    assert len(wrong) <= 200 and {caption.partition("\n")[2] for caption in captions(text)} == wrong


@pytest.mark.parametrize("count", [0, 1, 201])
def test_at_most_200_wrong_images_are_shown(count):
    """Of 300 synthetic ones, whose 1,000 classes are too many for a matrix."""
    data = opened(Config(data="synthetic"))
    data.val.labels = data.val.labels[:300]
    collector, labels = Collector("softmax"), torch.tensor(data.val.labels)
    order, answers = torch.randperm(300), labels.clone()
    answers[order[:count]] = (labels[order[:count]] + 1) % 1000
    scores = torch.linspace(3, 9, 300)[order.argsort()]  # the first of `order` are the least confident
    collector.add(torch.nn.functional.one_hot(answers, 1000) * scores[:, None], labels)
    sections = answer_sections(collector.gather(data), data)
    note, text = sections["Wrong answers"]
    shown = [int(caption.split()[-1]) for caption in captions(text)]
    assert shown == order[:count].flip(0)[:200].tolist() and "Confusion matrix" not in sections
    assert ("; these are 200 of them" in note) == (count == 201) and ("all right" in note) == (count == 0)
    assert ("validation images, 1 is classified wrongly." in note) == (count == 1)
    note, text = sections["Classes"]
    assert "the 1,000 classes has 0 to 1 of 300 validation images and 8 to 9 of 8,192 training images." in note
    assert len(cells(f"<h2>Classes</h2>{text}", "Classes")) == 30 and "All 1,000 classes" in text
    assert len(str(sections)) < 1e6


def test_a_large_validation_set_is_looked_at_in_part():
    data, seen = opened(Config(data="digits", eval_batch_size=64)), []

    def model(images):
        seen.append(len(images))
        return torch.eye(10)[:1].expand(len(images), 10)

    answers = look(model, data, 100)
    assert seen == [64, 36] and answers.index.tolist() == evenly(360, 100) and answers.index[-1] == 359
    assert answers.labels.tolist() == [data.val.labels[i] for i in answers.index]
    note = answer_sections(answers, data)["Wrong answers"][0]
    assert note.startswith("Of 100 of the 360 validation images, ")


@pytest.mark.slow
def test_images_of_several_classes_have_their_own_numbers(tmp_path):
    """The names of classes and files are no markup."""
    rng, names = np.random.default_rng(0), ("a", "<b>", "c", "d")
    for split, count in (("train", 12), ("val", 30)):
        (tmp_path / split).mkdir()
        lines = {}
        for i in range(count):
            Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(tmp_path / split / f"<i>{i}.png")
            lines[f"<i>{i}.png"] = [name for name in names if rng.random() < 0.4] if i != 1 else []
        (tmp_path / split / "labels.json").write_text(json.dumps(lines))
    settings = dict(data=str(tmp_path), objective="sigmoid", steps=2, img_size=16, workers=0)
    train(config := digits(tmp_path / "run", **settings))
    text, val = read(tmp_path / "run")[0], opened(config).val
    model = ViT.from_pretrained(tmp_path / "run" / "checkpoints" / "last").eval()
    images, truth = zip(*(val[i] for i in range(30)))
    with torch.no_grad():
        probabilities = model(torch.stack(list(map(resized, images))).permute(0, 3, 1, 2)).sigmoid()
    truth, named, first = np.stack(truth), (probabilities > 0.5).numpy(), probabilities.argmax(1).tolist()
    scores = [f(truth, named, average=None, zero_division=np.nan) for f in (recall_score, precision_score)]
    told = [[float(cell.strip("%") or "nan") / 100 for cell in row[3:]] for row in cells(text, "Classes")]
    np.testing.assert_allclose(told, np.transpose(scores), atol=6e-4)
    assert [int(row[2]) for row in cells(text, "Classes")] == truth.sum(0).tolist() and "Confusion" not in text
    order, wrong = val.classes, {i for i in range(30) if not truth[i, first[i]]}
    shown = [re.fullmatch(r"(\S+) \d+%, is (.*)\nval/<i>(\d+).png", caption).groups() for caption in captions(text)]
    number = {val.name(i).rpartition(">")[2]: i for i in range(30)}
    assert {number[f"{i}.png"] for *_, i in shown} == wrong and len(shown) == len(wrong)
    assert number["1.png"] in wrong and not re.search("<b>|<i>", text)
    for answer, classes, i in shown:
        own = [order[k] for k in np.flatnonzero(truth[number[f"{i}.png"]])]
        assert answer == order[first[number[f"{i}.png"]]] and classes == (", ".join(own) or "of no class")


@pytest.mark.slow
def test_unreadable_images_have_no_answer_and_other_data_has_another_fingerprint(tmp_path):
    data, prints = make_folder(tmp_path / "data", count=3), []
    for name in ("a", "b"):
        if name == "b":
            (data / "val" / CLASSES[0] / "1.png").write_bytes(b"no image")
        train(digits(tmp_path / name, data=str(data), steps=1, img_size=16, batch_size=4, workers=0))
        text = read(tmp_path / name)[0]
        prints.append(re.findall(r"fingerprint of the \w+ images</td><td>(\w{16})<", text))
    assert prints[1][0] == prints[0][0] and prints[1][1] != prints[0][1]
    assert "Each of the 3 classes has 2 to 3 of 8 of the 9 validation images and 3 of 9 training images" in text
    assert sum(map(sum, matrix(text))) == 8 and f"{CLASSES[0]}/1.png" not in text
