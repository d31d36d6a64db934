"""The cost of BiT ResNets against the paper's Table 6, and TPUv3-core-days against its Table 2."""

import json

import pytest
import timm
import torch
from cost_models import on_meta, run

from vitfast.baselines import baseline
from vitfast.cost import core_days, estimate_baseline, flops_per_image, forward_flops, tpu

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
    assert not {"floor", "predicted", "port_model", "operations"} & found.keys()
    text = run(capsys, "--recipe", "bit-r50x1/jft-7ep")[1]
    for wanted in ("R50x1, 224 x 224 px", f"{found['params']:,} parameters", "no times", "52.49 exaFLOP", "BiT-L"):
        assert wanted in text, (wanted, text)
    found = json.loads(run(capsys, "--model", "R50x1", "--img-size", 448, "--json")[1])
    assert found["img_size"] == [448, 448] and found["train_flops"] is None and found["tpu_v3"] is None
    code, out, _ = run(capsys, "--model", "timm:test_resnet", "--epochs", 1, "--images", 10, "--json")
    assert code == 0 and json.loads(out)["tpu_v3"] is None  # no row of Table 2 is like it


def test_core_days_follow_from_table_2(capsys):
    """Each row with exaFLOPs in Table 6 says a utilisation; that of ImageNet-21k lies between what these two give."""
    peak = 61.5e12 * 86_400
    rows = {row.name: row for row in tpu.TRANSFORMERS}
    huge, large = rows["ViT-H/14 on JFT-300M"], rows["ViT-L/16 on JFT-300M"]
    assert (huge.exaflops, huge.core_days, large.exaflops, large.core_days) == (4262, 2500, 1567, 680)
    assert huge.utilisation == pytest.approx(4262e18 / (2500 * peak)) == pytest.approx(0.32, abs=0.005)
    assert large.utilisation == pytest.approx(1567e18 / (680 * peak)) == pytest.approx(0.43, abs=0.005)
    for epochs, images, name, published in (
        (90, IMAGENET21K, "L/16", 230),
        (14, JFT, "L/16", 680),
        (14, JFT, "H/14", 2500),
    ):
        few, many = core_days(3 * flops_per_image(on_meta(name)) * images * epochs)["core_days"]
        assert few * 0.98 <= published <= many * 1.02 and many / few == pytest.approx(
            large.utilisation / huge.utilisation
        )
    code, out, err = run(capsys, "--recipe", "vit-l16/imagenet21k")
    assert code == 0 and "TPUv3-core-days" in out, err
    for told in ("61.5 TFLOP/s a core", "4,262 exaFLOP in 2,500 core-days, 32%", "1,567 exaFLOP in 680 core-days, 43%"):
        assert told in out
    found = json.loads(run(capsys, "--recipe", "vit-l16/imagenet21k", "--json")[1])["tpu_v3"]
    assert found["core_days"][0] < 230 < found["core_days"][1]
    assert [row["utilisation"] for row in found["basis"]] == [huge.utilisation, large.utilisation]


def test_core_days_of_resnets_follow_from_bit_l():
    with torch.device("meta"):
        bit_l = timm.create_model("resnetv2_152x4_bit", num_classes=18_291)
    assert forward_flops(bit_l, (3, 224, 224)) == tpu.BIT_L_FLOPS
    days = core_days(3 * tpu.BIT_L_FLOPS * JFT * 30, resnet=True)["core_days"]
    assert days == pytest.approx([9_900, 9_900])
