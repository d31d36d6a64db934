"""The demo: its two runs and its report in a few steps; in `make long` its accuracy too."""

import dataclasses
import json
import time

import pytest
import torch

from vitfast import ViT
from vitfast.experiments import demo as module
from vitfast.experiments import runs
from vitfast.experiments.demo import demo

WHOLE = [pytest.param(None, seed, wanted, marks=pytest.mark.long) for seed, wanted in ((0, 0.97), (1, 0.96), (2, 0.96))]


@pytest.mark.reports
@pytest.mark.parametrize("epochs, seed, wanted", [pytest.param(0.1, 0, 0.0, marks=pytest.mark.slow), *WHOLE])
def test_demo_reaches_its_accuracy_and_reports(tmp_path, capsys, monkeypatch, epochs, seed, wanted):
    if epochs:
        configs = [dataclasses.replace(each, epochs=epochs) for each in module.demo_configs(tmp_path, seed)]
        monkeypatch.setattr(module, "demo_configs", lambda *_: configs)
    torch.set_num_threads(1)
    start = time.process_time()
    summary = demo(tmp_path, seed, "cpu")
    assert time.process_time() - start < 180  # of one core: the tests beside this one slow the clock, not the work
    assert summary["finetune_accuracy"] >= wanted and (epochs or summary["pretrain_accuracy"] >= 0.9)
    assert summary["test_images"] == 360 and summary["device"] == "cpu" and summary["seconds"] > 0
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/") == 3 + page.count("<figcaption") and "http" not in page
    assert all(f'<a href="{task}/report.html">' in page for task in ("pretrain", "finetune"))
    assert f"{summary['finetune_accuracy']:.4f} ± " in page
    before, after = (round(360 * summary[f"{task}_accuracy"]) for task in ("pretrain", "finetune"))
    errors = [f"{k / 360:.4f} ± {(k / 360 * (1 - k / 360) / 360) ** 0.5:.4f}" for k in (before, after)]
    change = f"{abs(after - before)} {'more' if after > before else 'fewer'}" if after != before else "as many"
    told = f"{before} are classified correctly after pre-training and {after} after fine-tuning at 48 pixels: {change}."
    assert f"Of 360 test images, {told}" in page
    said = capsys.readouterr().out
    assert f"{errors[0]} after pre-training, {errors[1]} after fine-tuning at 48 px" in said
    assert f"± is the standard error. Of 360 test images, {told}" in said
    for run in (tmp_path / "pretrain", tmp_path / "finetune"):
        assert any((run / "tensorboard").iterdir()) and (run / "metrics.csv").exists()
        assert (run / "report.html").exists()
        ViT.from_pretrained(run / "checkpoints" / "last")
    columns = "task,step,epoch,split,loss,accuracy,lr,images_per_second,waiting_for_data,knn,rank"
    assert (tmp_path / "metrics.csv").read_text().startswith(f"{columns}\npretrain,")
    start = time.process_time()
    assert demo(tmp_path, seed, "cpu") == summary
    assert time.process_time() - start < 20  # finished: only the report is written again


def test_demo_runs_on_one_thread_and_gives_back_the_others(tmp_path, monkeypatch):
    """So its numbers do not depend on how many cores there are."""
    seen, stopped = [], dict(finished=False)
    monkeypatch.setattr(runs, "train", lambda *_: seen.append(torch.get_num_threads()) or stopped)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(runs.Stopped):
            demo(tmp_path)
        assert seen == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
