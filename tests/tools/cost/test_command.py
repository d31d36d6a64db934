"""`vitfast cost`: what it prints and refuses, times of a whole training, rates from a file."""

import json

import pytest
import timm
import torch
from commands import run_cli
from cost_models import on_meta

from vitfast import InputError, ViT
from vitfast.tools.cost.gpus import GPUS, rates
from vitfast.tools.cost.training import estimate

JFT = 303e6


def as_json(capsys, *args) -> dict:
    code, out, err = run_cli(capsys, "cost", *args, "--json")
    assert code == 0, err
    return json.loads(out)


def test_days_follow_from_the_step():
    found = estimate(on_meta("L/16"), rates("H100"), batch_size=4096, gpus=8, images=14 * JFT)
    step, seconds = found["floor"]["step_seconds"], 14 * JFT / 4096 * found["floor"]["step_seconds"]
    assert found["floor"]["train_seconds"] == pytest.approx(seconds)
    reached = found["predicted"]["efficiency"]
    assert 0.4 < reached < 0.6 and found["predicted"]["train_seconds"] == pytest.approx(seconds / reached)
    assert found["predicted"]["gpu_days"] == pytest.approx(seconds / reached * 8 / 86400)
    one = estimate(on_meta("L/16"), rates("H100"), batch_size=512)  # an eighth of the work, and the same update
    assert found["micro_batch"] == 512 and one["floor"]["step_seconds"] == pytest.approx(step)
    parts = estimate(on_meta("L/16"), rates("A100-40"), batch_size=4096)
    update = parts["operations"][-1]["backward_floor"]
    rest = sum(row["times"] * (row["forward_floor"] + row["backward_floor"]) for row in parts["operations"][:-1])
    wanted = parts["accumulate"] * rest + update
    assert parts["accumulate"] > 1 and parts["floor"]["step_seconds"] == pytest.approx(wanted)


def test_recipes_and_presets_give_model_and_length(capsys):
    found = as_json(capsys, "--recipe", "plain-s16/imagenet-90ep", "--gpu", "rtx 4090")
    hidden = 384 * 384 + 384  # of the head
    assert found["params"] == 22_050_664 - 384 - 197 * 384 + hidden  # no class token, fixed positions
    wanted = dict(model="S/16", batch_size=1024, train_images=90 * 1_281_167)
    assert wanted.items() <= found.items() and found["device"]["gpu"] == "4090"
    found = as_json(capsys, "--recipe", "finetune/cifar10", "--model", "L/16")
    assert dict(model="L/16", img_size=[384, 384], train_images=10_000 * 512).items() <= found.items()
    assert found["memory"]["state"]["optimiser state"] == 4 * found["params"]
    for name in ("DINOv3-7B/16", "SigLIP2-So400m/14", "EVA02-L/14"):
        with torch.device("meta"):
            wanted = sum(p.numel() for p in ViT.from_preset(name).parameters())
        assert as_json(capsys, "--model", name)["params"] == wanted


@pytest.mark.slow
def test_a_resnets_recipe_has_no_times(capsys):
    """Parameters as timm has them, FLOPs, fixed memory; and no time, for which there is no basis."""
    found = as_json(capsys, "--recipe", "bit-r50x1/jft-7ep")
    with torch.device("meta"):
        theirs = timm.create_model("resnetv2_50x1_bit", num_classes=18_291)
    assert found["params"] == sum(p.numel() for p in theirs.parameters()) and found["train_images"] == 7 * JFT
    assert found["train_flops"] == pytest.approx(50e18, rel=0.06)
    assert found["memory"]["state"]["optimiser state"] == 8 * found["params"]
    assert not {"floor", "predicted", "operations"} & found.keys()
    text = run_cli(capsys, "cost", "--recipe", "bit-r50x1/jft-7ep")[1]
    for wanted in ("R50x1, 224 x 224 px", f"{found['params']:,} parameters", "no times", "52.49 exaFLOP"):
        assert wanted in text, (wanted, text)
    found = as_json(capsys, "--model", "R50x1", "--img-size", 448)
    assert found["img_size"] == [448, 448] and found["train_flops"] is None
    assert as_json(capsys, "--model", "timm:test_resnet", "--epochs", 1, "--images", 10)["train_flops"] > 0


def test_text_tells_what_the_json_holds(capsys):
    args = ("--model", "B/16", "--gpus", 2, "--epochs", 300, "--images", 1281167)
    found, text = as_json(capsys, *args), run_cli(capsys, "cost", *args)[1]
    for wanted in (
        *("86,567,656 parameters", "35.13 GFLOP", "data sheet", "batch 256 on 2 x H200", "50% of that, as vitfast"),
        f"{found['floor']['images_per_second']:,.0f} images/s",
        f"{found['predicted']['gpu_days']:,.1f} GPU-days",
        f"largest batch on each {found['largest_batch']:,}",
        *(row["name"] for row in found["operations"]),
    ):
        assert wanted in text, (wanted, text)


def test_crops_are_those_of_the_recipe_and_of_set(capsys):
    args = ("--recipe", "ssl/small", "--images", 9469)
    text = run_cli(capsys, "cost", *args)[1]
    assert "S/8, of each image 2 crops of 128 px and 6 of 56 px, 806 tokens: " in text and "projector" in text
    found = as_json(capsys, *args, "--set", "global_crops=4", "local_crops=0")
    assert (found["crops"], found["tokens"], found["batch_size"]) == ([[4, [128, 128]]], 1024, 256)
    found = as_json(capsys, "--model", "B/16", "--set", "objective=lejepa", "local_size=112", "projector_dim=64")
    assert found["crops"] == [[2, [224, 224]], [6, [112, 112]]] and found["train_images"] is None
    assert found["operations"][-2]["name"] == "projector, 2048 to 64"
    assert as_json(capsys, "--model", "B/16")["crops"] == []


def test_auto_keeps_all_where_it_fits(capsys):
    """B/16, batch 256: 5.6 GB more on an H200. A batch that fits with the least alone is not split for more."""
    found = as_json(capsys, "--model", "B/16")
    u = 256 * 197 * 768 * 2
    assert found["keep"]["taken"] == "all" and found["keep"]["more_per_image"] * 256 == 12 * 6 * u
    assert found["memory"]["kept_per_image"]["activation"] * 256 == 12 * 4 * u
    both = found["keep"]["largest_batch"]
    assert both["all"] == found["largest_batch"] < both["least"]
    between = (both["all"] + both["least"]) // 2
    for options, wanted in (((), ("least", 1)), (("--keep", "all"), ("all", 2))):
        found = as_json(capsys, "--model", "B/16", "--batch-size", between, *options)
        assert (found["keep"]["taken"], found["accumulate"]) == wanted
    assert "keep='all' taken" in run_cli(capsys, "cost", "--model", "B/16")[1]


@pytest.mark.parametrize(
    "args, told",
    [
        ((), "add --model NAME or --recipe NAME"),
        (("--model", "B/17"), "unknown preset 'B/17'"),
        (("--model", "B/16", "--gpu", "H300"), "unknown GPU 'H300'; did you mean H200"),
        (("--model", "B/16", "--img-size", 100), "no multiple of the patch size"),
        (("--model", "B/16", "--epochs", 3), "both --epochs N and --images N"),
        (("--model", "R50x1", "--epochs", 3), "both --epochs N and --images N"),
        (("--model", "R50x1", "--epochs", -3, "--images", 3), "--epochs must be positive, got -3"),
        (("--model", "B/16", "--epochs", "nan", "--images", 1e6), "--epochs must be positive, got nan"),
        (("--model", "B/16", "--epochs", 1, "--images", "inf"), "--images must be positive, got inf"),
        (("--model", "R50x1", "--img-size", 0), "takes no images of 0 x 0 pixels"),
        (("--model", "R50x9"), "unknown model 'R50x9'; did you mean R50x"),
        (("--model", "qqqq"), "R50x1, R50x2, R101x1, R152x1, R152x2, R200x3, timm:NAME"),
        (("--model", "timm:nothing"), "timm cannot build 'nothing'"),
        (("--model", "B/16", "--batch-size", 0), "batch_size must be positive"),
        (("--model", "B/16", "--reached", 0), "reached must be positive, got 0"),
        (("--model", "B/16", "--reached", "nan"), "reached must be positive, got nan"),
        (("--model", "timm:resnet18", "--reached", 9), "--reached is for ViTs that vitfast reads; timm:resnet18 is"),
        (("--model", "R50x1", "--set", "objective=lejepa"), "objective=lejepa trains vitfast's ViTs only"),
        (("--recipe", "no/such"), "unknown recipe"),
        (("--recipe", "ssl/small"), "recipe ssl/small is for any data: add --images N, the images in an epoch"),
        (("--recipe", "ssl/small", "--images", 9, "--set", "local_size=60"), "must be a multiple of the patch, 8 x 8"),
        (("--recipe", "ssl/small", "--images", 9, "--model", "R50+B/16"), "a hybrid takes images of one size"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(capsys, args, told):
    code, out, err = run_cli(capsys, "cost", *args)
    assert code == 2 and told in err and err.count("\n") == 1 and not out, err


@pytest.mark.quick(1)
@pytest.mark.parametrize("options", [dict(qk_norm=True), dict(scale_mlp_norm=True), dict(pos_embed="relative")])
def test_what_is_not_counted_is_refused(options):
    with pytest.raises(InputError, match="not counted"):
        estimate(on_meta("B/16", **options), rates())


def test_help_names_every_gpu(capsys):
    assert set(GPUS) <= set(run_cli(capsys, "cost", "--help")[1].split())
