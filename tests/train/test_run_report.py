"""report.html of a run: what is in it, how large it can get, and that it never fails a run."""

import base64
import html
import json
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from checks import randomize
from children import killed_before_its_report
from commands import RUN, make_folder, run_cli
from processes import Child
from runs import content, cut_at, digits, finetuning

from vitfast import ViT
from vitfast.data.loader import open_data
from vitfast.eval.accuracy import Collector, evaluate
from vitfast.eval.inspect.figures import as_png, draw_curves, draw_similarity
from vitfast.eval.inspect.page import page
from vitfast.run.config import Config
from vitfast.train import report
from vitfast.train.trainer import train

pytestmark = pytest.mark.reports
CPU = torch.device("cpu")
LIMIT = 3e6  # bytes
PROGRESS, ENDS = ["Curves"], ["Next commands", "Settings", "Origin"]
INSIDE = ["Position embeddings", "Attention rollout"]
ANSWERS = ["Classes", "Confusion matrix", "Most confused pairs", "Wrong answers"]


def parts(run: Path) -> tuple[str, list[str], list[str]]:
    """The text of a report, its headings, and the captions of its small pictures."""
    text = (run / "report.html").read_text()
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", text, re.S)
    return text, re.findall("<h2>(.*?)</h2>", text), list(map(html.unescape, captions))


@pytest.mark.slow
def test_a_finished_run_has_a_report_of_what_its_model_says(tmp_path):
    for task, config in (
        ("pretrain", digits(tmp_path / "pretrain", steps=60, lr=1e-3, eval_every=60)),
        ("finetune", finetuning(tmp_path / "pretrain", tmp_path / "finetune", steps=3, eval_every=3)),
    ):
        summary = train(config)
        text, headings, captions = parts(tmp_path / task)
        assert headings == [*PROGRESS, *ANSWERS, *INSIDE, *ENDS]
        assert text.count("data:image/") == 3 + len(captions) and not re.search("https?:|<script|<link|@import", text)
        p, n = summary["accuracy"], 360
        assert f"{p:.4f} ± {np.sqrt(p * (1 - p) / n):.4f}" in text
        settings = f"<tr><td>batch_size</td><td>{config.batch_size}</td><td>images of an optimiser step,"
        assert f"torch {torch.__version__}" in text and settings in text and len(text) < LIMIT
        assert len(captions) == min(200, n - round(p * n)) and "prefers-color-scheme:dark" in text


@pytest.mark.parametrize("kind", ["masked", "resnet", "no positions"])
@pytest.mark.slow
def test_other_models_show_what_they_have(tmp_path, kind):
    fields = dict(masked=dict(objective="masked"), resnet=dict(model="timm:resnet10t"))
    train(digits(tmp_path, steps=2, batch_size=4, **fields.get(kind, dict(pos_embed="none"))))
    text, headings, captions = parts(tmp_path)
    looked, inside = ANSWERS * (kind != "masked"), INSIDE * (kind != "resnet")
    assert headings == [*PROGRESS, *looked, *inside, *ENDS] and (len(captions) == 200) == bool(looked)
    commands = [name for name in ("predict", "eval", "export", "embed", "finetune") if f"vitfast {name} " in text]
    wanted = dict(masked=["export", "embed", "finetune"], resnet=["predict", "eval"])
    assert commands == wanted.get(kind, ["predict", "eval", "export", "embed"])
    assert ("Not drawn: the model adds no position" in text) == (kind == "no positions")
    assert ("±" in text.partition("<h2>")[0].partition("</table>")[0].partition("<table>")[2]) == (kind != "masked")


def test_names_are_no_markup(tmp_path, capsys):
    names = ("<script>alert(1)<", "b&amp;", "\"c'")
    data = make_folder(tmp_path / "<i>data", classes=names)
    for file in (data / "val").rglob("*.png"):
        file.rename(file.with_name(f"<b>{file.name}"))
    code, _, err = run_cli(capsys, "pretrain", "--recipe", "digits", "--data", data, "--output", tmp_path / "run", *RUN)
    assert code == 0, err
    text, _, captions = parts(tmp_path / "run")
    assert not re.search('<script|<i>|<b>|alt="validation image, "|title=""', text)
    wrong = [re.fullmatch(r"(.*) \d+%, is (.*)\nval/(.*)/<b>\d.png", caption).groups() for caption in captions]
    assert wrong and all(answer != truth == folder and {answer, truth} <= set(names) for answer, truth, folder in wrong)


@pytest.mark.slow
def test_a_run_that_stops_early_has_none_and_the_same_command_makes_it(tmp_path, monkeypatch):
    train(digits(tmp_path, steps=4))
    assert (tmp_path / "report.html").exists()
    cut_at(monkeypatch, 6)
    with pytest.raises(KeyError):
        train(digits(tmp_path, steps=8, save_every=2))
    assert not (tmp_path / "report.html").exists()  # that of 4 steps would be taken for one of 8
    monkeypatch.undo()
    assert train(digits(tmp_path, steps=8, save_every=2))["steps"] == 8
    assert "<td>steps</td><td class=n>8</td>" in parts(tmp_path)[0]


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_report_gets_it_from_the_same_command(tmp_path):
    config = digits(tmp_path, steps=2)
    child = Child(killed_before_its_report, config)
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    assert (tmp_path / "summary.json").exists() and (tmp_path / "vitfast.lock").exists()
    before = content(tmp_path)
    assert train(config) == json.loads(before["summary.json"])
    text, headings, _ = parts(tmp_path)
    assert "Attention rollout" in headings and "<td>steps</td><td class=n>2</td>" in text
    now = content(tmp_path)
    assert now.keys() == before.keys() | {"report.html"}
    assert all(now[name] == before[name] for name in now.keys() - {"report.html"})


def test_what_fails_in_a_report_is_one_line_and_the_run_is_finished(tmp_path, monkeypatch, caplog):
    def broken(*_):
        raise ValueError("no such\ncolour")

    def said() -> list[str]:
        return [r.message for r in caplog.records if "report.html" in r.message]

    with monkeypatch.context() as patch:
        patch.setattr("vitfast.eval.inspect.figures.draw_curves", broken)
        summary = train(digits(tmp_path / "a", steps=2))
    assert json.loads((tmp_path / "a" / "summary.json").read_text()) == summary and summary["finished"]
    assert said() == ["no report.html: ValueError: no such colour"] and not (tmp_path / "a" / "report.html").exists()
    caplog.clear()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
        patch.delitem(sys.modules, "vitfast.eval.inspect.figures")
        patch.delitem(sys.modules, "vitfast.eval.inspect.report")
        assert train(digits(tmp_path / "b", steps=2))["finished"]
    assert said() == ["no report.html: matplotlib is not installed"]


def test_curves_leave_gaps_where_a_number_is_none():
    values = [2.0, float("nan"), 1.5, float("inf"), 1.0, None]
    records = [dict(epoch=i, split="train", loss=v, accuracy=None, lr=0.1) for i, v in enumerate(values)]
    records += [dict(epoch=5.0, split="val", loss=float("nan"), accuracy=float("nan"), lr=None)]
    figure = draw_curves({"run": records, "nothing yet": []})
    lines = {axis.get_ylabel(): axis.lines for axis in figure.axes[::2]}
    assert np.isnan(lines["loss"][0].get_ydata()).tolist() == [False, True, False, True, False, True]
    assert np.isnan(lines["accuracy"][0].get_ydata()).all()
    assert lines["learning rate"][0].get_ydata().tolist() == [0.1] * 6
    assert as_png(figure).startswith(b"\x89PNG")


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
    collector = Collector("softmax")
    evaluate(model, data, CPU, None, collector.add)
    sections = report.curves({"run": tmp_path}) | report.answer_sections(collector.gather(data), data)
    sections |= report._inside(model, report.first_images(data, report.ATTENDED))
    size = len(page("t", {}, sections))
    pictures = re.findall(r'alt="([^"]*)" src="data:image/[a-z]+;base64,([^"]+)', str(sections))
    sizes = {name: len(base64.b64decode(content)) for name, content in pictures if not name.startswith("validation")}
    assert size < LIMIT, sizes
    assert len(pictures) == 203 and sizes["Position embeddings"] < 6e5


def test_few_of_many_patches_are_drawn_with_their_own_numbers():
    table = np.random.default_rng(0).standard_normal((37 * 37, 8))
    similarity = (table @ table.T / 8).reshape(37, 37, 37, 37)
    axis = draw_similarity(similarity, pixels=400).axes[0]
    shown = axis.images[0].get_array()
    assert max(shown.shape) <= 400
    tick, label = axis.get_xticks()[1], int(axis.get_xticklabels()[1].get_text())
    left = int(tick - 18)  # the tile's first column: 37 of them, the tick in the middle
    row = int(axis.get_yticklabels()[0].get_text())
    np.testing.assert_array_equal(shown[:37, left : left + 37], similarity[row - 1, label - 1])
    assert draw_similarity(similarity[:4, :4, :4, :4], pixels=400).axes[0].images[0].get_array().shape == (19, 19)
