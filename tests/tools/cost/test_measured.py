"""Which measured step an estimate rests on, and `vitfast cost --reached` against the result files themselves."""

import json
import statistics
from pathlib import Path

import pytest
from commands import run_cli

from vitfast.model.config import ViTConfig
from vitfast.model.presets import preset
from vitfast.tools.cost.gpus import GPUS, rates
from vitfast.tools.cost.measured import closest, rows
from vitfast.tools.cost.training import estimate

ROOT = Path(__file__).parents[3]


def model(name: str, **more) -> ViTConfig:
    return ViTConfig(**preset(name), **more)


def cost(capsys, *args) -> dict:
    code, out, err = run_cli(capsys, "cost", *args, "--json")
    assert code == 0, err
    return json.loads(out)


def test_every_row_is_a_time_of_its_file():
    """Its median seconds, batch, precision and device; no faster one of its library counts where it was timed last."""
    assert len({(row.gpu, row.model, row.img_size, row.precision, row.library) for row in rows()}) == len(rows()) > 20
    for row in rows():
        content = json.loads((ROOT / row.file).read_text())
        machine = content["machine_info"]["vitfast"]
        assert f"commit {machine['commit']}, torch {machine['torch']}," in row.machine
        assert f"driver {machine['driver_version']}" in row.machine and row.gpu in machine["device"]
        medians = [
            each["stats"]["median"]
            for each in content["benchmarks"]
            if each["extra_info"]["impl"].removesuffix(" again") == row.setting
            and each["extra_info"]["shape"] == f"{row.model} {row.img_size} B{row.batch}"
            and each["extra_info"]["op"] == "train"
        ]
        assert row.images_per_second == pytest.approx(row.batch / max(medians), abs=0.06)
        assert row.setting.endswith(row.precision) and row.library in row.setting


def test_an_estimate_of_what_was_measured_is_the_measurement():
    for row in rows():
        if row.library == "vitfast" and row.precision == "amp":
            config = model(row.model, img_size=row.img_size)
            found = estimate(config, rates(row.gpu), batch_size=row.batch, keep="auto")["predicted"]
            assert found["images_per_second"] == pytest.approx(row.images_per_second, rel=1e-3)
            assert found["basis"].startswith(f"as {row.setting} reached with {row.model} at {row.img_size} px, batch")
            assert f"on one {row.gpu} in amp ({row.file})" in found["basis"]


@pytest.mark.parametrize(
    ("gpu", "name", "wanted"),
    [
        ("H200", "L/16", ("H200", "L/16", "amp")),
        ("H200", "Ti/16", ("H200", "S/16", "amp")),
        ("H200", "H/14", ("H200", "L/16", "amp")),  # bf16 weights were timed of H/14 alone
        ("H100", "B/16", ("H100", "B/16", "amp")),
        ("H100", "S/16", ("H200", "S/16", "amp")),  # its model on another GPU of its generation
        ("H100", "H/14", ("H200", "L/16", "amp")),
        ("4090", "B/16", ("H200", "B/16", "amp")),  # of equals, the smaller share
        ("H100-PCIe", "S/16", ("H200", "S/16", "amp")),  # its generation
        ("4090", "S/16", ("H200", "S/16", "amp")),  # any
    ],
)
def test_the_closest_row_is_of_the_generation_then_of_the_model_then_of_the_gpu(gpu, name, wanted):
    row = closest(model(name), gpu, 256)
    assert (row.gpu, row.model, row.precision) == wanted and row.library == "vitfast"
    theirs = closest(model(name), gpu, 256, "timm")
    assert (theirs.gpu, theirs.model, theirs.precision) == wanted and theirs.library == "timm"
    hopper = {name for name, sheet in GPUS.items() if sheet.generation == "Hopper"}
    assert hopper == {"GH200", "H100", "H100-PCIe", "H200"}


def test_another_resolution_of_a_model_is_closer_than_another_model():
    assert closest(model("B/16", img_size=384), "H200", 256).img_size == 384
    assert closest(model("B/16", img_size=256), "H200", 256).img_size == 224


def test_a_speed_is_compared_with_what_was_measured(capsys):
    """timm's B/16 on an H100: the numbers of the files, worked out here; amp and bf16 weights of both libraries."""
    args = "--model", "timm:vit_base_patch16_224", "--gpu", "H100", "--reached", 1830
    found, times = cost(capsys, *args), {}
    for case in json.loads((ROOT / "bench/results/h100/train.json").read_text())["benchmarks"]:
        info = case["extra_info"]
        times.setdefault(info["impl"].removesuffix(" again"), []).append(256 / case["stats"]["median"])
    peers = {peer["setting"]: peer for peer in found["reached"]["peers"]}
    assert peers.keys() == times.keys() and len(peers) == 4
    for setting, speeds in times.items():
        assert peers[setting]["share"] == pytest.approx(1830 / min(speeds), rel=1e-4) and peers[setting]["measured"]
    floor = found["floor"]["images_per_second"]
    assert found["reached"]["share_of_floor"] == 1830 / floor
    assert floor == cost(capsys, "--model", "B/16", "--gpu", "H100")["floor"]["images_per_second"]
    said = run_cli(capsys, "cost", *args)[1]
    assert f"1,830 images/s is {1830 / floor:.0%} of the floors' {floor:,.0f}\n" in said
    assert "56% of the 3,264 that timm compile amp reached (commit 3e787d4, torch 2.11.0, triton 3.6.0, timm" in said
    assert "on one H100 in amp (bench/results/h100/train.json)" in said
    two = cost(capsys, *args, "--gpus", 2, "--batch-size", 512)["reached"]["peers"]
    assert statistics.mean(peer["share"] for peer in two) == pytest.approx(
        statistics.mean(peer["share"] for peer in peers.values()) / 2
    )


def test_what_was_not_measured_is_compared_by_shares_of_the_floors(capsys):
    found = cost(capsys, "--model", "timm:deit3_small_patch16_384", "--gpu", "4090", "--reached", 300)
    floor, peers = found["floor"]["images_per_second"], found["reached"]["peers"]
    assert [peer["library"] for peer in peers] == ["vitfast", "timm"] and not any(peer["measured"] for peer in peers)
    for peer in peers:
        assert peer["images_per_second"] == peer["share"] ** -1 * 300 and "would reach by its share" in peer["said"]
        row = closest(model("S/16", img_size=384), "4090", 256, peer["library"])
        assert peer["images_per_second"] == row.share * floor and row.file in peer["said"]


@pytest.mark.parametrize(
    "other",
    [
        ("--model", "R50+B/16"),
        ("--dtype", "fp32"),
        ("--set", "dropout=0.1"),
        ("--gpus", 8, "--batch-size", 8),
    ],
)
def test_what_differs_from_the_measured_step_was_not_measured(capsys, other):
    found = cost(capsys, *(() if "--model" in other else ("--model", "B/16")), "--gpu", "H100", "--reached", 99, *other)
    assert [peer["measured"] for peer in found["reached"]["peers"]] == [False, False]
    floor = found["floor"]["images_per_second"]
    assert all(peer["images_per_second"] < floor for peer in found["reached"]["peers"])


def test_a_speed_above_the_floors_is_doubted(capsys):
    said = run_cli(capsys, "cost", "--model", "B/16", "--gpu", "NVIDIA H100 80GB HBM3", "--reached", 9000)[1]
    assert "119% of the floors' 7,568, which no code exceeds: check the number" in said


def test_an_estimate_is_below_what_a_better_gpu_of_the_generation_reached():
    """An H200 is an H100 with more bandwidth; B/16 at 224 px was measured on both."""
    for row in rows():
        if (row.gpu, row.library, row.precision) == ("H200", "vitfast", "amp") and (row.model, row.img_size) != (
            "B/16",
            224,
        ):
            config = model(row.model, img_size=row.img_size)
            found = estimate(config, rates("H100"), batch_size=row.batch, keep="auto")["predicted"]
            assert found["images_per_second"] < row.images_per_second


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("timm:vit_large_patch16_224", [224, 224], ()),
        ("timm:vit_base_patch16_384", [384, 384], ()),  # timm's own size
        ("timm:vit_base_patch16_384", [224, 224], ("--img-size", 224)),
    ],
)
def test_a_vit_of_timm_costs_what_ours_does(capsys, name, size, options):
    ours = {"timm:vit_large_patch16_224": "L/16"}.get(name, "B/16")
    found = cost(capsys, "--model", name, *options)
    wanted = cost(capsys, "--model", ours, "--img-size", size[0])
    assert found["img_size"] == size and found["floor"] == wanted["floor"] and found["params"] == wanted["params"]
