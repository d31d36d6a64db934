"""Accuracy against compute."""

import csv

import pytest
from runs import digits

from vitfast.experiments.scaling import scaling, training_flops
from vitfast.train.recipes import resolve


def test_scaling_counts_compute_as_the_paper_does(tmp_path):
    config = resolve("pretrain", dict(recipe="vit-l16/jft-14ep"))
    exaflops = training_flops(config, 1000) * 14 * 303e6 / 1e18
    assert exaflops == pytest.approx(1567, rel=0.03)  # Table 6
    rows = scaling(digits(tmp_path, eval_batch_size=360), ["Nano/8", "timm:test_vit"], [0.05])
    assert [row["model"] for row in rows] == ["Nano/8", "timm:test_vit"] and rows[0]["exaflops"] > 0
    assert (tmp_path / "scaling.png").stat().st_size > 5000 and len(
        list(csv.DictReader(open(tmp_path / "scaling.csv")))
    ) == 2
