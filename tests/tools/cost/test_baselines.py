"""The cost of BiT ResNets, against the paper's Table 6."""

import json

import pytest
import timm
import torch
from cost_models import run

from vitfast.model.baselines import baseline
from vitfast.tools.cost import estimate_baseline, forward_flops

JFT, IMAGENET21K = 303e6, 14_197_122


@pytest.mark.parametrize(
    "name, epochs, published",
    [
        ("R50x1", 7, 50),
        ("R50x2", 7, 199),
        ("R152x2", 14, 1126),
        ("R200x3", 14, 3306),
    ],
)
def test_flops_of_resnets_are_table_6s(name, epochs, published):
    with torch.device("meta"):
        model = baseline(name, 1000)
    found = estimate_baseline(model, (224, 224), images=JFT * epochs)
    assert found["train_flops"] == pytest.approx(published * 1e18, rel=0.05)
    assert found["train_flops"] == 3 * found["flops_per_image"] * JFT * epochs


def test_flops_of_a_convolution_by_hand():
    """The stem of a ResNet on 16 x 16 pixels: 64 filters of 3 x 7 x 7 at half the size."""
    with torch.device("meta"):
        stem = baseline("R50x1", 10).stem.conv
    assert forward_flops(stem, (3, 16, 16)) == 2 * 64 * 3 * 49 * 8 * 8


def test_cost_of_a_resnets_recipe(capsys):
    """Parameters as timm has them, FLOPs, fixed memory; and no time, for which there is no basis."""
    code, out, err = run(capsys, "--recipe", "bit-r50x1/jft-7ep", "--json")
    assert code == 0, err
    found = json.loads(out)
    with torch.device("meta"):
        theirs = timm.create_model("resnetv2_50x1_bit", num_classes=18_291)
    assert found["params"] == sum(p.numel() for p in theirs.parameters()) and found["train_images"] == 7 * JFT
    assert found["train_flops"] == pytest.approx(50e18, rel=0.06)
    assert found["memory"]["state"]["optimiser state"] == 8 * found["params"]
    assert not {"floor", "predicted", "operations"} & found.keys()
    text = run(capsys, "--recipe", "bit-r50x1/jft-7ep")[1]
    for wanted in ("R50x1, 224 x 224 px", f"{found['params']:,} parameters", "no times", "52.49 exaFLOP"):
        assert wanted in text, (wanted, text)
    found = json.loads(run(capsys, "--model", "R50x1", "--img-size", 448, "--json")[1])
    assert found["img_size"] == [448, 448] and found["train_flops"] is None
    code, out, _ = run(capsys, "--model", "timm:test_resnet", "--epochs", 1, "--images", 10, "--json")
    assert code == 0 and json.loads(out)["train_flops"] > 0
