"""The tables of predictions against the kernels, and what `vitfast cost` shows of them."""

import dataclasses
import json
import os
import re
import sys
from collections import Counter

import pytest
import torch

import vitfast.doctor  # noqa: F401  before the script: kernels stay interpreted in this process
from vitfast import ViT, cost
from vitfast.cli import main
from vitfast.cost import predicted
from vitfast.kernels.launch import Launch
from vitfast.machine_code.ports import PortLoad


@pytest.fixture(scope="module")
def script():
    """tests/predict.py as a module, for what it does not compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TRITON_INTERPRET", "")  # which it drops: put back afterwards
        import predict
    return predict


def test_the_committed_predictions_say_what_they_are(script):
    for path in (script.KERNELS, script.STEPS):
        first = path.read_text().partition("\n")[0]
        assert first.startswith("# predicted, nothing in it was measured; "), path


def test_the_table_of_kernels_is_whole_and_consistent(script):
    rows = script.read(script.KERNELS)
    assert {r["preset"] for r in rows} == {
        name + (f" {size}" if size != 224 else "") for name, size in script.PRESETS.values()
    }
    for r in rows:
        if not r["predicted_h100_us"]:
            # The reason stands where the port would: a candidate whose control flow cannot be followed, or packed
            # samples, where data says whose a tile is.
            assert "Untraceable" in r["binds"] and (r["case"].endswith(")") or ", packed" in r["case"]), r
            continue
        on_ports = {port: float(r[f"{port}_us"]) for port in ("tensor", "mufu", "issue", "shared", "l2", "hbm")}
        total, h200 = float(r["predicted_h100_us"]), float(r["predicted_h200_us"])
        assert 0 < h200 <= total and total >= max(on_ports.values()) + 2.9, r
        assert r["binds"] == "latency" or on_ports[r["binds"]] >= max(on_ports.values()) - 0.11, r
        assert int(r["programs"]) > 0 and int(r["resident"]) > 0 and float(r["waves"]) >= 0


def test_predicted_steps_add_up_and_stay_above_their_floor(script):
    rows = script.read(script.STEPS)
    for r in (row for row in rows if row["what"] == "step"):
        same = [
            x
            for x in rows
            if all(x[k] == r[k] for k in ("preset", "img_size", "gpu", "direction")) and x["what"] != "step"
        ]
        assert sum(float(x["predicted_us"]) for x in same) == pytest.approx(float(r["predicted_us"]), rel=1e-3)
        with torch.device("meta"):
            model = ViT.from_preset(r["preset"], img_size=int(r["img_size"]))
        floors = [op.row(cost.rates(r["gpu"])) for op in cost.operations(model, int(r["batch_size"]))]
        directions = ("forward", "backward") if r["direction"] == "training" else ("forward",)
        floor = sum(row["times"] * row[f"{direction}_floor"] for row in floors for direction in directions)
        assert 1 < float(r["predicted_us"]) * 1e-6 / floor < 4, r


def test_a_step_with_a_kernel_that_has_no_prediction_is_not_written(script, capsys, monkeypatch, tmp_path):
    """Nor is it a success: its time would lack that kernel's."""

    @dataclasses.dataclass
    class Named:
        __name__: str

    recorded = {
        ("Nano/8", 32, 4, train): ([Launch(Named(name), (1,), {}) for name in names], [("aten::mm", 1e9, 10**6)])
        for train, names in ((False, ["a"]), (True, ["a", "b"]))
    }
    works = {
        script.key_of(launch): PortLoad(1320, 2, 4, issue=1000)
        for launches, _ in recorded.values()
        for launch in launches
    }
    for name, path in (("KERNELS", tmp_path / "ports.csv"), ("STEPS", tmp_path / "predicted.csv")):
        monkeypatch.setattr(script, name, path)
    for name, value in (
        ("PRESETS", {}),
        ("all_steps", lambda: recorded),
        ("measured", lambda launches, processes: works),
    ):
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(sys, "argv", ["predict.py"])

    def written() -> Counter:
        return Counter((row["direction"], row["what"]) for row in script.read(script.STEPS))

    assert script.main() == 0 and written()["training", "step"] == written()["training", "b"] == 2
    works[script.key_of(recorded["Nano/8", 32, 4, True][0][1])] = "b: Untraceable"
    assert script.main() == 1 and "b: Untraceable" in capsys.readouterr().out
    assert {direction for direction, _ in written()} == {"inference"} and written()["inference", "step"] == 2


def run_cost(capsys, *args) -> str:
    assert main(["cost", *args]) == 0
    return capsys.readouterr().out


def test_cost_shows_predicted_steps_and_calls_them_so(capsys):
    found = json.loads(run_cost(capsys, "--model", "B/16", "--gpu", "H100", "--json"))["port_model"]
    assert 0 < found["inference"] < found["training"]
    assert all(
        words in found["source"] for words in ("predicted", "not measured", "keep='least'", "kernels ", "triton ")
    )
    line = next(
        line for line in run_cost(capsys, "--model", "B/16", "--gpu", "H100").splitlines() if "port model" in line
    )
    assert line.count("predicted") == 2 and f"{1e3 * found['training']:,.1f} ms a training step" in line
    for other in (
        ["--model", "B/16", "--gpu", "A100"],
        ["--model", "B/16", "--dtype", "fp32"],
        ["--model", "B/16", "--dtype", "fp16"],
        ["--model", "B/16", "--img-size", "288"],
        ["--model", "B/16", "--batch-size", "127"],
        ["--model", "B/16", "--batch-size", "513"],
        ["--model", "R50+B/16"],
        ["--recipe", "finetune/cifar10"],
    ):
        assert "port model" not in run_cost(capsys, *other), other


def test_a_prediction_grows_with_the_images_but_for_launches_and_the_update(script):
    rows = [
        r
        for r in script.read(script.STEPS)
        if (r["preset"], r["img_size"], r["gpu"], r["direction"]) == ("B/16", "224", "H100", "training")
    ]
    table = {r["what"]: (1e-6 * float(r["predicted_us"]), int(r["times"])) for r in rows}
    whole, update = table.pop("step")[0], table[predicted.UPDATE][0]
    model = preset()
    at = {batch: predicted.step(model, "H100", batch)["training"] for batch in (128, 256, 512)}
    launches = 3e-6 * sum(times for what, (_, times) in table.items() if what != predicted.UPDATE)
    assert at[256] == pytest.approx(whole, rel=1e-4) and launches > 1e-4 < update
    for batch in (128, 512):
        assert at[batch] == pytest.approx(update + launches + (whole - update - launches) * batch / 256, rel=1e-4)
    assert predicted.step(model, "H100", 256, micro_batches=3)["training"] == pytest.approx(
        3 * (whole - update) + update, rel=1e-4
    )
    assert predicted.step(model, "H100", 1) is predicted.step(model, "H100", 600) is None
    parts = cost.estimate(
        preset(), dataclasses.replace(cost.rates("H100"), memory_bytes=30 * cost.GIB), batch_size=8 * 1024, gpus=8
    )
    micro, several = parts["micro_batch"], parts["accumulate"]
    assert parts["port_model"]["training"] == predicted.step(model, "H100", micro, several)["training"] and several > 1


def preset(**options) -> ViT:
    with torch.device("meta"):
        return ViT.from_preset("B/16", **options)


@pytest.mark.parametrize(
    "options",
    [
        dict(num_classes=10),
        dict(init_values=0.1),
        dict(drop_path_rate=0.1),
        dict(act_layer="gelu_tanh"),
        dict(residual_in_fp32=True),
        dict(global_pool="avg"),
        dict(qkv_bias=False),
        dict(in_chans=1),
        dict(num_heads=8),
        dict(proj_drop_rate=0.1),
    ],
    ids=str,
)
def test_no_prediction_for_other_models_than_the_presets(options):
    assert predicted.step(preset(**options), "H100", 256) is None


def test_no_prediction_for_other_optimizers():
    for options, wanted in (
        ({}, True),
        (dict(mean=0.4), True),
        (dict(optimizer="sgd"), False),
        (dict(averaged=True), False),
    ):
        model = preset(mean=options.pop("mean", 0.5))
        assert bool(cost.estimate(model, cost.rates("H100"), **options)["port_model"]) == wanted, options


def test_no_prediction_lies_below_the_floor(monkeypatch):
    monkeypatch.setattr(predicted, "step", lambda *_: dict(training=1e-9, inference=1e-9, source="predicted"))
    found = cost.estimate(preset(), cost.rates("H100"))
    forward = sum(row["times"] * row["forward_floor"] for row in found["operations"])
    assert found["port_model"]["training"] == found["floor"]["step_seconds"]
    assert found["port_model"]["inference"] == pytest.approx(forward) and forward < found["floor"]["step_seconds"]


def test_a_stale_table_says_so(script, monkeypatch, tmp_path):
    first, _, rest = predicted.STEPS.read_text().partition("\n")
    other = re.sub("kernels [0-9a-f]+", "kernels {}", first)
    monkeypatch.setattr(predicted, "STEPS", tmp_path / "predicted.csv")
    for kernels, stale in ((predicted.source_hash(), False), ("0123", True)):
        predicted.STEPS.write_text(other.format(kernels) + "\n" + rest)
        source = predicted.step(preset(), "H100", 256)["source"]
        assert f"kernels {kernels}," in source and ("stale" in source) == stale


def test_everything_printed_says_predicted(script):
    assert all("predicted" in line for line in script.notes().splitlines() if line.startswith("|") and "µs" in line)
    assert script.notes().count("predicted") >= 3
