"""The demo reaches its accuracy, and writes its report."""

import json
import time

import pytest
import torch

from vitfast import ViT
from vitfast.experiments.demo import demo

STOPPED = dict(finished=False)


@pytest.mark.reports
@pytest.mark.slow(70)
@pytest.mark.parametrize(
    "seed, wanted", [(0, 0.97), *(pytest.param(seed, 0.96, marks=pytest.mark.long) for seed in (1, 2))]
)
def test_demo_reaches_its_accuracy_and_reports(tmp_path, capsys, seed, wanted):
    torch.set_num_threads(1)
    start = time.process_time()
    summary = demo(tmp_path, seed, "cpu")
    assert time.process_time() - start < 180  # of one core: the tests beside this one slow the clock, not the work
    assert summary["finetune_accuracy"] >= wanted and summary["pretrain_accuracy"] >= 0.9
    assert summary["test_images"] == 360 and summary["device"] == "cpu" and summary["seconds"] > 0
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    page = (tmp_path / "report.html").read_text()
    assert (
        page.count("data:image/png;base64,") == 3 + 24
        and "http" not in page
        and f"{summary['finetune_accuracy']:.4f} ± " in page
    )
    right = [round(360 * summary[f"{task}_accuracy"]) for task in ("pretrain", "finetune")]
    errors = [f"{k / 360:.4f} ± {(k / 360 * (1 - k / 360) / 360) ** 0.5:.4f}" for k in right]
    change = f"{abs(right[1] - right[0])} {'more' if right[1] > right[0] else 'fewer'}"
    change = change if right[1] != right[0] else "as many"
    said = capsys.readouterr().out
    assert f"{errors[0]} after pre-training, {errors[1]} after fine-tuning at 48 px" in said
    assert f"± is the standard error; of 360 test images {change} are answered rightly after fine-tuning" in said
    for task in ("pretrain", "finetune"):
        assert any((tmp_path / task / "tensorboard").iterdir()) and (tmp_path / task / "metrics.csv").exists()
        assert (tmp_path / task / "report.html").exists()
        ViT.from_pretrained(tmp_path / task / "checkpoints" / "last")
    assert (
        (tmp_path / "metrics.csv")
        .read_text()
        .startswith("task,step,epoch,split,loss,accuracy,lr,images_per_second,waiting_for_data\npretrain,")
    )
    before = time.process_time()
    assert (
        demo(tmp_path, seed, "cpu") == summary and time.process_time() - before < 20
    )  # finished: only the report is written again


def test_demo_runs_on_one_thread_and_gives_back_the_others(tmp_path, monkeypatch):
    """So its numbers do not depend on how many cores there are."""
    seen = []
    monkeypatch.setattr("vitfast.experiments.demo.train", lambda _: seen.append(torch.get_num_threads()) or STOPPED)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert demo(tmp_path) is None and seen == [1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
