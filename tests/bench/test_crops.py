"""bench/crops.py: its counts by arithmetic, and the results that are committed."""

import json
import sys

import pytest
import torch

from vitfast import ViT


@pytest.fixture
def crops(monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.config.rootpath / "bench"))
    import crops

    yield crops
    del sys.modules["crops"]


def test_the_committed_counts_are_those_of_now(crops, request):
    """Tokens: 2 x 197 + 6 x 37 an image, against 8 x 197 with padding. One step launches fewer kernels than two."""
    found = json.loads((request.config.rootpath / "bench/results/unlabelled/crops.json").read_text())
    ways, images = found["ways"], found["images"]
    assert [ways[name]["tokens"] for name in ("packed", "separate", "padded")] == [images * n for n in (616, 616, 1576)]
    launches = crops.launches(found["model"], images)
    assert launches == {name: each["launches"] for name, each in ways.items()}
    assert launches["packed"] < launches["separate"]
    for name, each in ways.items():  # six FLOPs a token and weight, and attention on top
        dense = 6 * each["tokens"] * 12 * 12 * 384**2
        assert dense < each["flops"] < 1.3 * dense, name
    assert ways["padded"]["seconds"] > 1.5 * ways["packed"]["seconds"]


def test_all_ways_compute_the_same_features(crops):
    torch.manual_seed(0)
    model = ViT.from_preset("Ti/16", depth=1, num_classes=0, dynamic_img_size=True)
    found = crops.measured(model, images=1, turns=1)  # raises where packed features are others
    assert found["padded"]["flops"] > 2 * found["packed"]["flops"] and set(found) == {"packed", "separate", "padded"}
