"""Runs: what they leave, every way of training, resuming bit for bit, images that cannot be read, too little memory."""

import csv
import json
import re
import sys

import numpy as np
import pytest
import torch
import yaml
from commands import Terminal, make_folder
from runs import QUICK, changed, cut_at, digits, records, same_runs, weights
from speed import first

from vitfast import InputError, ViT
from vitfast.data.transforms import transforms
from vitfast.train.recipes import resolve
from vitfast.train.resume import read_training_state
from vitfast.train.step import TrainStep
from vitfast.train.trainer import Trainer, TrainingError, train

SMALL = dict(img_size=16, batch_size=16)


@pytest.mark.slow
def test_a_run_leaves_what_it_promises(tmp_path):
    config = digits(tmp_path, steps=6, log_every=2, eval_every=100, ema_decay=0.9, **SMALL)
    summary = train(config)
    rows = list(csv.DictReader(open(tmp_path / "metrics.csv")))
    assert list(rows[0])[:7] == ["step", "epoch", "split", "loss", "accuracy", "lr", "images_per_second"]
    assert records(tmp_path, "train", "step") == ["2", "4", "6"] and records(tmp_path, "val", "step") == ["6"]
    assert resolve("pretrain", yaml.safe_load((tmp_path / "config.yaml").read_text())) == config
    assert any((tmp_path / "tensorboard").iterdir())
    assert json.loads((tmp_path / "summary.json").read_text()) == summary and summary["train_images"] == 1437
    model = ViT.from_pretrained(tmp_path / "checkpoints" / "last").eval()  # the average: evaluated again by hand
    data = Trainer(changed(config, output=str(tmp_path / "again"))).data
    images = torch.from_numpy(np.stack([np.asarray(transforms(config, (16, 16))[1](image)) for image, _ in data.val]))
    with torch.no_grad():
        right = sum(int(k) == label for k, (_, label) in zip(model(images).argmax(-1), data.val))
    assert summary["accuracy"] == float(rows[-1]["accuracy"]) == pytest.approx(right / 360)
    assert model.config["representation_size"] == 64 and summary["images_per_second"] > 0


MANY_SIZES = dict(sizes="16:40", tokens_per_step=350, drop_tokens=0.3, drop_path=0.2, drop_path_mode="subset")
RESUMED = {
    "plain": {},
    "sgd, average, random numbers, micro-batches": dict(
        optimizer="sgd", lr=0.1, ema_decay=0.9, mixup=0.3, dropout=0.1, drop_path=0.1, accumulate=2, clip_norm=1.0
    ),
    "lamb, which counts its steps for a group": dict(optimizer="lamb", layer_decay=0.7),
    "fp16 and its scaler": dict(amp="fp16", clip_norm=1.0),
    "masked": dict(objective="masked", hidden_head=False),
    "a baseline": dict(model="timm:test_resnet", ema_decay=0.5, lr=1e-3),
    "many sizes": MANY_SIZES,
    "many sizes, worker processes": MANY_SIZES | dict(workers=2),
}


@pytest.mark.parametrize(
    "fields",
    [pytest.param(fields, id=name, marks=[pytest.mark.slow] * (name != "plain")) for name, fields in RESUMED.items()],
)
def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(tmp_path, monkeypatch, fields):
    """Model, average, optimiser, random numbers, place in the data: in the second of epochs of 4 steps."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    settings = SMALL | dict(steps=7, train_images=64, log_every=2, eval_every=100) | fields
    once = train(digits(whole, **settings | dict(workers=0)))
    config = digits(broken, save_every=4, **settings)
    cut_at(monkeypatch, 6)
    with pytest.raises(KeyError):
        train(config)
    monkeypatch.undo()
    assert read_training_state(broken / "checkpoints" / "last")["step"] == 4
    again = train(config)
    assert same_runs(whole, broken)
    states = [read_training_state(run / "checkpoints" / "last") for run in (whole, broken)]
    assert all(states[0].get(name) == states[1].get(name) for name in ("step", "packing", "scaler.scale"))
    told = ("accuracy", "loss", "epochs", "sizes", "patches_per_image", "padding_not_computed")
    assert [once.get(name) for name in told] == [again.get(name) for name in told]
    steps = records(broken, "train", "step")
    assert steps == ["2", "4", "6", "7"]  # rows after the checkpoint were dropped before they were written again


@pytest.mark.slow
@pytest.mark.parametrize("warmup", first(1, [True, False]))
def test_the_average_is_that_of_its_equation_across_a_resume(tmp_path, monkeypatch, warmup):
    """Float64: decay 0 at step 1, then min(d, 1 - n^(-2/3)) at step n, or d."""
    settings = SMALL | dict(steps=7, save_every=4, ema_decay=0.6, accumulate=2)
    config, call, truth = digits(tmp_path, ema_warmup=warmup, **settings), TrainStep.__call__, {}

    def averaged(self, images, labels, step, total, **count):
        if cut == step:
            raise KeyError("power cut")
        result = call(self, images, labels, step, total, **count)
        decay = (min(0.6, 1 - (step + 1) ** (-2 / 3)) if warmup else 0.6) if step else 0.0
        for name, value in self.model.state_dict().items():
            truth[name] = decay * truth.get(name, 0.0) + (1 - decay) * value.double()
        return result

    monkeypatch.setattr(TrainStep, "__call__", averaged)
    cut = 4  # as the cut comes right after a checkpoint, no step is taken twice
    with pytest.raises(KeyError):
        train(config)
    cut = None
    train(config)
    found = weights(tmp_path)
    assert found.keys() == truth.keys()
    for name, value in truth.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-5, atol=1e-6)  # 7 roundings of float32


@pytest.mark.parametrize(
    "fields",
    first(
        2,
        [
            dict(objective="sigmoid", head_init_bias=-10.0, lr_decay="linear", cutmix=1.0, init_values=0.1),
            dict(global_pool="avg", pos_embed="sincos2d", label_smoothing=0.1, residual_in_fp32=True, amp="bf16"),
            dict(auto_augment="rand-m5-n2", color_jitter=0.3, workers=2),
            dict(data="synthetic", eval_batch_size=512),
        ],
    ),
    ids=str,
)
def test_every_way_of_training_moves_every_parameter(tmp_path, fields):
    trainer = Trainer(digits(tmp_path, steps=3, **SMALL | fields))
    before = {k: v.clone() for k, v in trainer.train_step.model.state_dict().items()}
    assert trainer.fit()["finished"]
    moved = [k for k, v in trainer.train_step.model.named_parameters() if not torch.equal(v.detach(), before[k])]
    assert len(moved) == len(list(trainer.train_step.model.parameters()))


@pytest.mark.parametrize("accumulate, clip_norm", [(1, None), (4, None), (3, 0.01)])
def test_accumulation_or_clipping_leaves_the_gradient_of_the_whole_batch(tmp_path, accumulate, clip_norm):
    """A step of SGD against autograd on all images at once; clipped, its length is clip_norm."""
    config = digits(tmp_path, steps=4, optimizer="sgd", lr=0.1, warmup_steps=0, weight_decay=0, label_smoothing=0)
    trainer = Trainer(changed(config, accumulate=accumulate, clip_norm=clip_norm))
    images, labels = next(trainer.data.train_batches(0, 1))[:2]
    model = trainer.train_step.model
    logits = model(images)
    truth = torch.nn.functional.cross_entropy(logits, labels)
    gradients = torch.autograd.grad(truth, list(model.parameters()))
    norm = torch.cat([g.flatten() for g in gradients]).norm().item()
    scale = 1.0 if clip_norm is None else clip_norm / norm
    before = [p.detach().clone() for p in model.parameters()]
    loss, right = trainer.train_step(images, labels, 0, 4)
    assert loss.item() == pytest.approx(truth.item(), abs=1e-6) and right == (logits.argmax(-1) == labels).sum()
    assert norm > 0.1 and trainer.train_step.rate == 0.1
    for p, old, gradient in zip(model.parameters(), before, gradients):
        assert torch.allclose((old - p.detach()) / 0.1, scale * gradient, atol=2e-6)


@pytest.mark.parametrize("objective", ["softmax", "masked"])
def test_what_blocks_keep_is_decided_for_a_micro_batch_before_the_model_is_compiled(
    tmp_path, monkeypatch, caplog, objective
):
    asked, said = [], "the first step compiles the model, which may take minutes; --no-compile switches this off"
    caplog.set_level("INFO", "vitfast")
    monkeypatch.setattr(ViT, "decide_keep", lambda self, batch, dtype=None: asked.append((batch, dtype)))
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, mode: asked.append(mode))
    Trainer(digits(tmp_path, steps=1, batch_size=30, accumulate=4, compile=True, objective=objective))
    assert asked == [(8, None), "default"] and caplog.messages.count(said) == 1
    graphs = dict(objective=objective, compile_mode="reduce-overhead")
    Trainer(digits(tmp_path, steps=1, batch_size=30, compile=False, **graphs))
    assert asked[2:] == [(30, None)] and caplog.messages.count(said) == 1
    Trainer(digits(tmp_path, steps=1, batch_size=30, compile=True, **graphs))
    assert asked[3:] == [(30, None), "reduce-overhead"]


@pytest.mark.parametrize(
    ("settings", "need"),
    [
        (dict(accumulate=2), "one process and accumulate=1"),
        (dict(sizes="16:32"), "images of one size"),
        (dict(objective="lejepa", hidden_head=False), "images of one size"),
    ],
)
def test_cuda_graphs_refuse_what_they_cannot_record(tmp_path, settings, need):
    with pytest.raises(InputError, match=f"compile_mode=reduce-overhead records CUDA graphs, which need {need}; leave"):
        Trainer(digits(tmp_path, steps=1, batch_size=30, compile_mode="reduce-overhead", **settings))


def test_the_progress_bar_says_what_one_waits_for(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    train(digits(tmp_path, steps=4, log_every=2, **SMALL))
    line = sys.stderr.getvalue().replace("\r", "\n").strip().splitlines()[-1]
    numbers = r"loss \d\.\d+, [\d,]+ images/s, \d+% waiting for data\]"
    assert re.search(rf"pretrain: 100%.* 4/4 \[\d\d:\d\d<\d\d:\d\d, .*step/s, {numbers}", line), line


@pytest.mark.slow
def test_images_that_cannot_be_read_are_counted_up_to_a_limit(tmp_path, caplog):
    """Each once, however often it comes up; replaced in training, left out in validation."""
    data = make_folder(tmp_path / "data", count=12)
    settings = dict(data=str(data), steps=9, batch_size=4, img_size=16, workers=0, eval_every=3)  # one pass over 36
    trainer = Trainer(digits(tmp_path / "run", **settings))
    cut, gone, unseen = data / "train/cat/3.png", data / "train/dog/5.png", data / "val/eel/1.png"
    for path in (cut, unseen):
        path.write_bytes(path.read_bytes()[:700])  # the header is whole: only decoding finds out
    gone.unlink()
    summary = trainer.fit()
    assert (summary["unreadable_images"], summary["val_images"], summary["val_unreadable_images"]) == (2, 35, 1)
    for path, word in ((cut, "replaced"), (gone, "replaced"), (unseen, "left out")):
        assert sum(str(path) in message and word in message for message in caplog.messages) == 1, path
    broken = digits(tmp_path / "broken", **settings)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyError):
        cut_at(patch, 8)
        train(broken)
    with pytest.raises(InputError, match="could not be read, more than max_unreadable 0; the last: "):
        train(changed(broken, max_unreadable=0))  # those of before count
    assert train(broken)["unreadable_images"] == 1
    often = changed(digits(tmp_path / "often", **settings, max_unreadable=1), steps=18)
    assert train(often)["unreadable_images"] == 1  # two passes, one broken image
    assert train(changed(often, steps=19))["unreadable_images"] == 1  # of the whole run, not of what was left of it
    for path, fields in ((cut, {}), (unseen, dict(train_images=3))):
        strict = digits(tmp_path / f"strict{len(fields)}", **settings | dict(max_unreadable=0) | fields)
        with pytest.raises(InputError, match=f"1 images .*could not be read, more than max_unreadable 0.*{path.name}"):
            train(strict)
        cut.write_bytes((data / "train/cat/4.png").read_bytes())


@pytest.mark.parametrize(
    "room, wanted",
    [(9, "=4 fits, 8 at once, with the same result except for random"), (0, "a smaller model, image or batch")],
)
def test_out_of_memory_says_what_fits(tmp_path, monkeypatch, room, wanted):
    forward = ViT.forward

    def limited(self, images):
        if self.training and len(images) > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, images)

    monkeypatch.setattr(ViT, "forward", limited)
    said = f"out of memory in step 1 with 32 images at once.*{wanted}.*no checkpoint yet"
    with pytest.raises(TrainingError, match=said):
        train(digits(tmp_path, steps=6))


def test_runs_that_cannot_begin_leave_nothing(four_steps, tmp_path):
    for fields, said in (
        (dict(task="finetune"), "finetune starts from weights"),
        (dict(batch_size=3, accumulate=4), "batch_size 3 is less than one image for each"),
        (dict(batch_size=6, mixup=0.1, accumulate=2), "must be a multiple of"),
        (dict(sizes="16:40", tokens_per_step=350, model="timm:resnet18"), "sizes and drop_tokens are for ViTs"),
        (dict(sizes="16:40", tokens_per_step=350, pos_embed="relative"), "'relative' takes images of one size"),
        (dict(objective="masked", model="timm:test_resnet"), "objective=masked trains vitfast's ViTs only"),
        (dict(objective="masked", model="R50x1"), "take softmax or sigmoid for R50x1"),
    ):
        fields = QUICK | dict(steps=2) | fields
        config = digits(tmp_path / "run", **{k: v for k, v in fields.items() if k != "task"})
        with pytest.raises(InputError, match=said):
            train(changed(config, task=fields.get("task", "pretrain")))
        assert not list(tmp_path.rglob("*.*")), fields
