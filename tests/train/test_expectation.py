"""The speed that a run is told to expect on its GPU, beside `vitfast cost`, and what its data would have to deliver."""

import dataclasses
import json
import re

import pytest
import torch
from commands import make_folder, run_cli
from runs import digits

from vitfast import ViT
from vitfast.data.loader import open_data
from vitfast.model.baselines import baseline
from vitfast.run.distributed import Ranks
from vitfast.train import introduction
from vitfast.train.expectation import expectation
from vitfast.train.lejepa import LeJEPA

FULL = dict(model="B/16", img_size=224, batch_size=256, hidden_head=False, pos_embed="learn", global_pool="token")


@pytest.fixture
def on_gpu(tmp_path, monkeypatch):
    """A function (name of a GPU, ranks, settings) -> (config, data) of a run there on a folder of images."""
    make_folder(tmp_path / "photos")

    def make(name="NVIDIA H200", ranks=1, **settings):
        monkeypatch.setattr("torch.cuda.get_device_name", lambda device: name)
        config = digits(tmp_path / "run", data=str(tmp_path / "photos"), **FULL | settings)
        data = open_data(config, (224, 224), (16, 16), torch.device("cpu"), prefix=1)
        return config, dataclasses.replace(data, device=torch.device("cuda"), ranks=Ranks(0, ranks))

    return make


def vit(**arguments) -> ViT:
    with torch.device("meta"):
        return ViT.from_preset("B/16", **arguments)


def cost(capsys, *args) -> float:
    """The images per second that `vitfast cost` predicts."""
    code, out, err = run_cli(capsys, "cost", *args, "--json")
    assert code == 0, err
    return json.loads(out)["predicted"]["images_per_second"]


def test_the_sentence_of_a_run_on_an_h200(on_gpu, tmp_path, caplog):
    config, data = on_gpu()
    speed, said = expectation(config, vit(), data)
    assert speed == pytest.approx(4077.6, abs=0.1)  # bench/results/h200/train_graphs.json
    sizes = [path.stat().st_size for path in sorted((tmp_path / "photos" / "train").rglob("*.png"))]
    rate = f"{speed * sum(sizes) / len(sizes) / 1e6:,.0f}"
    assert said == (
        " One H200 should give about 4,078 images/s (50% of the floors' speed, as vitfast.accelerate(timm) "
        "reduce-overhead amp reached with B/16 at 224 px, batch 256, on one H200 in amp "
        f"(bench/results/h200/train_graphs.json)); for that, the data has to deliver 4,078 images/s, {rate} MB/s."
    )
    with caplog.at_level("INFO", "vitfast"):
        assert introduction.introduce(config, vit(), data) == speed
    assert f"and writes to {tmp_path / 'run'}.{said}" in caplog.text
    cpu = dataclasses.replace(data, device=torch.device("cpu"))
    assert expectation(config, vit(), cpu) == (None, "")


def test_many_gpus_share_a_batch(on_gpu, capsys):
    config, data = on_gpu("NVIDIA H100 80GB HBM3", ranks=8, batch_size=2048, optimizer="sgd", ema_decay=0.9)
    speed, said = expectation(config, vit(), data)
    options = ("--gpus", 8, "--batch-size", 2048, "--set", "optimizer=sgd", "ema_decay=0.9")
    assert speed == cost(capsys, "--model", "B/16", "--gpu", "H100", *options)
    assert said.startswith(f" 8 H100 should give, their communication left out, about {speed:,.0f} images/s (57% of")


def test_crops_count_as_cost_counts_them(on_gpu, capsys):
    lejepa = dict(objective="lejepa", local_crops=6, projector_dim=64)
    config, data = on_gpu(**lejepa)
    with torch.device("meta"):
        model = LeJEPA(ViT.from_preset("B/16", num_classes=0), 2, 6, 0.02, config.projector_width, 64)
    options = ("--set", "objective=lejepa", "local_crops=6", "projector_dim=64")
    wanted = cost(capsys, "--model", "B/16", *options)
    assert expectation(config, model, data)[0] == pytest.approx(wanted) and wanted < 2000


@pytest.mark.parametrize(
    ("name", "settings", "model", "reason"),
    [
        ("NVIDIA T4", {}, vit, "no data sheet of NVIDIA T4 is known"),
        ("NVIDIA H200", dict(amp="none"), vit, "only vitfast's ViTs, in 16 bits and of one image size, were timed"),
        ("NVIDIA H200", {}, lambda: baseline("timm:resnet10t", 3), "only vitfast's ViTs"),
        ("NVIDIA H200", dict(sizes="112:336", tokens_per_step=50_000), vit, "only vitfast's ViTs"),
        ("NVIDIA H200", {}, lambda: vit(proj_drop_rate=0.1), "dropout is in no estimate"),
        ("NVIDIA H200", dict(batch_size=8), vit, "no step below 10 ms was timed"),
        ("NVIDIA H200", {}, lambda: vit(qk_norm=True), "qk_norm=True runs on the smaller operations, which are not"),
    ],
)
def test_where_nothing_is_known_the_run_says_why(on_gpu, name, settings, model, reason):
    config, data = on_gpu(name, **settings)
    speed, said = expectation(config, model(), data)
    assert speed is None and re.fullmatch(rf" What speed is normal is not known: {reason}.*\.", said)


def test_data_without_files_is_counted_in_pixels(on_gpu):
    config, data = on_gpu()
    numbers = open_data(digits(img_size=16), (16, 16), (8, 8), torch.device("cpu"))
    speed, said = expectation(config, vit(), dataclasses.replace(data, train=numbers.train))
    assert f"{speed * 3 * 224 * 224 / 1e6:,.0f} MB/s" in said
