"""Training on images of many sizes: one run wherever it is cut and on however many ranks; each image weighs as much."""

import csv
import json

import pytest
import torch
from checks import assert_close
from processes import command_line, done, ranks
from runs import cut_at, digits, same, training_tensors, weights
from safetensors.torch import load_file

from vitfast import InputError, ViT
from vitfast.train.losses import softmax_loss
from vitfast.train.resume import read_record
from vitfast.train.setup import set_up
from vitfast.train.step import TrainStep
from vitfast.train.trainer import train

QUICK = dict(sizes="16:40", tokens_per_step=350, steps=8, save_every=2, log_every=2, warmup_steps=2)


def rows(run, split="train"):
    with open(run / "metrics.csv") as file:
        return [row for row in csv.DictReader(file) if row["split"] == split]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = tmp_path_factory.mktemp("whole") / "run"
    return run, train(digits(run, drop_tokens=0.3, drop_path=0.2, drop_path_mode="subset", **QUICK))


@pytest.mark.slow(10)
@pytest.mark.parametrize("step", [3, 6])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_is_cut_off_goes_on_bit_for_bit(whole, tmp_path, monkeypatch, step, workers):
    run, summary = whole
    config = digits(tmp_path, drop_tokens=0.3, drop_path=0.2, drop_path_mode="subset", workers=workers, **QUICK)
    cut_at(monkeypatch, step)
    with pytest.raises(KeyError):
        train(config)
    monkeypatch.undo()
    again = train(config)
    assert same(training_tensors(run), training_tensors(tmp_path)) and same(weights(run), weights(tmp_path))
    records = [read_record(r / "checkpoints" / "last")["packing"] for r in (run, tmp_path)]
    assert records[0] == records[1] and records[0]["progress"]["images"] > 8 * 10
    for name in ("sizes", "images_per_step", "patches_per_image", "padding_not_computed", "epochs", "accuracy"):
        assert again[name] == summary[name]
    for mine, theirs in zip(rows(tmp_path), rows(run), strict=True):
        assert [mine[k] for k in ("step", "epoch", "loss", "accuracy")] == [
            theirs[k] for k in ("step", "epoch", "loss", "accuracy")
        ]


@pytest.mark.slow(12)
@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_two_ranks_take_the_same_steps(tmp_path, parallel):
    fields = dict(recipe="digits", data="digits", device="cpu", accumulate=2, **QUICK)
    train(digits(tmp_path / "one", accumulate=2, **QUICK))
    settings = {k: v for k, v in fields.items() if k not in ("recipe", "data", "device")} | dict(parallel=parallel)
    chosen = ["--recipe", "digits", "--data", "digits", "--device", "cpu", "--batch-size", "32"]
    argv = ["pretrain", *chosen, "--output", str(tmp_path / "two"), "--set", *(f"{k}={v}" for k, v in settings.items())]
    done(ranks(2, command_line, argv))
    one, two = (load_file(tmp_path / run / "checkpoints/last/state/state.safetensors") for run in ("one", "two"))
    for name, value in one.items():  # fp32 rounding, of which Adam's division makes the most
        if name.endswith("attn.qkv.bias"):  # and nothing else of keys' biases: softmax takes their gradient away
            value, two[name] = (torch.cat((bias.chunk(3)[0], bias.chunk(3)[2])) for bias in (value, two[name]))
        assert_close(two[name], value, atol=2e-5, rtol=1e-4, name=name)
    summaries = [json.loads((tmp_path / run / "summary.json").read_text()) for run in ("one", "two")]
    for name in ("sizes", "images_per_step", "patches_per_image", "epochs"):
        assert summaries[0][name] == summaries[1][name]
    for mine, theirs in zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True):
        assert float(mine["loss"]) == pytest.approx(float(theirs["loss"]), abs=1e-5)
        assert mine["accuracy"] == theirs["accuracy"]


def test_each_image_weighs_as_much(tmp_path):
    """The gradients of a step are those of the mean loss over its images, however they are split."""
    config = digits(tmp_path, accumulate=3, clip_norm=None, label_smoothing=0.0, **QUICK)
    model, data = set_up(config, torch.device("cpu"))
    step = TrainStep(config, model, 10, torch.device("cpu"), None, data.ranks)
    images, labels, _ = next(data.train_batches(0, 1))
    assert len(images) == 3 and len({len(some) for some in images}) > 1
    loss, _ = step.accumulate(images, labels, 3, len(labels))
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    logits = torch.cat([model(some) for some in images])
    truth = softmax_loss(logits, labels)
    truth.backward()
    assert loss.item() == pytest.approx(truth.item(), abs=1e-6)
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, atol=1e-6, rtol=1e-4)


def test_counts_are_those_of_the_batches(tmp_path):
    summary = train(digits(tmp_path, **QUICK))
    _, data = set_up(digits(tmp_path / "again", **QUICK), torch.device("cpu"))
    batches = [images for images, *_ in data.train_batches(0, 8)]
    images = sum(len(some) for each in batches for some in each)
    patches = sum(len(some.patches) for each in batches for some in each)
    padded = sum(len(some) * max(some.counts) for each in batches for some in each)
    assert summary["images_per_step"] == round(images / 8, 2) and summary["epochs"] == round(images / 1437, 4)
    assert summary["patches_per_image"] == round(patches / images, 2)
    assert summary["padding_not_computed"] == round(1 - patches / padded, 4) > 0.3
    assert sum(summary["sizes"].values()) == images and list(summary["sizes"]) == ["16", "24", "32", "40"]


@pytest.mark.slow(12)
def test_epochs_are_passes_over_the_data(tmp_path):
    config = digits(
        tmp_path, **{**QUICK, "steps": None, "epochs": 2, "tokens_per_step": 1200, "log_every": 50, "save_every": 100}
    )
    summary = train(config)
    assert summary["epochs"] == pytest.approx(2, rel=0.03) and summary["images_per_step"] == pytest.approx(
        summary["expected_images_per_step"], rel=0.03
    )
    before = (tmp_path / "metrics.csv").read_text()
    assert train(config)["steps"] == summary["steps"] and (tmp_path / "metrics.csv").read_text() == before  # finished


@pytest.mark.reports
def test_the_report_shows_sizes_and_padding(tmp_path):
    train(digits(tmp_path, **QUICK))
    text = (tmp_path / "report.html").read_text()
    assert "how many images were drawn each size" in text and "would have been padding" in text
    assert "padding not computed" in text and "{&#x27;16" not in text and "{'16" not in text


@pytest.mark.slow(15)
def test_digits_of_many_sizes_are_learned(tmp_path):
    """A fifth of the demo's length, in which one size comes to 0.6; the whole is in `make long`."""
    summary = train(digits(tmp_path, sizes="24:40", tokens_per_step=1000, epochs=9, pos_embed="factorized"))
    assert summary["accuracy"] > 0.45


@pytest.mark.long
def test_digits_of_many_sizes_reach_the_demos_accuracy(tmp_path):
    """The recipe of the demo with sizes: 0.9889 without; the standard error of 360 images is 0.0055."""
    summary = train(digits(tmp_path, sizes="24:40", tokens_per_step=850, pos_embed="factorized"))
    assert summary["accuracy"] >= 0.9889 - 2 * 0.0055


@pytest.mark.parametrize(
    "damage", [None, {}, dict(progress=dict(position="x")), dict(progress=None, patches=1, padded=1)]
)
def test_a_checkpoint_without_its_place_in_the_stream(tmp_path, damage):
    config = digits(tmp_path, **{**QUICK, "steps": 2})
    train(config)
    path = tmp_path / "checkpoints" / "last" / "state" / "state.json"
    record = json.loads(path.read_text())
    del record["packing"]
    path.write_text(json.dumps(record | ({} if damage is None else dict(packing=damage))))
    with pytest.raises(InputError, match="does not say where its images of many sizes are .*--resume never"):
        train(digits(tmp_path, **{**QUICK, "steps": 4}))


def test_other_sizes_are_another_run(tmp_path):
    train(digits(tmp_path, **{**QUICK, "steps": 2}))
    with pytest.raises(InputError, match=r"sizes: 16:40 there, 16:48 now"):
        train(digits(tmp_path, **{**QUICK, "steps": 4, "sizes": "16:48"}))


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(model="timm:resnet18"), "takes images of one size: sizes and drop_tokens are for ViTs"),
        (dict(pos_embed="relative"), "pos_embed='relative' takes images of one size"),
    ],
)
def test_models_of_one_size_are_refused(tmp_path, fields, message):
    with pytest.raises(InputError, match=message):
        train(digits(tmp_path, **QUICK, **fields))


def test_finetuning_takes_sizes(tmp_path):
    """Weights of one size go on at many; the mode of drop path is the recipe's."""
    ViT.from_preset("Nano/8", img_size=32, num_classes=10).save_pretrained(tmp_path / "weights")
    from vitfast.train.recipes import resolve

    config = resolve(
        "finetune",
        dict(data="digits", weights=str(tmp_path / "weights"), output=str(tmp_path / "run"), device="cpu")
        | dict(drop_path=0.5, drop_path_mode="subset", **QUICK),
    )
    assert train(config)["steps"] == 8
    assert ViT.from_pretrained(tmp_path / "run" / "checkpoints" / "last").config["drop_path_mode"] == "subset"
