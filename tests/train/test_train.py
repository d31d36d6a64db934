"""Runs: they learn, they continue bit for bit, they stop in order, and every way of training takes steps."""

import csv
import dataclasses
import io
import json
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import runs
import torch
import yaml
from processes import Child, command_line, done
from runs import cut_at, finetuning, pretraining_command, same, training_tensors, weights

from vitfast import InputError, ViT
from vitfast.train.recipes import resolve
from vitfast.train.resume import read_training_state
from vitfast.train.trainer import Trainer, TrainingError, train


def digits(output: Path, **fields):
    return runs.digits(output, log_every=2, eval_every=100, **fields)


def test_a_run_leaves_what_it_promises(tmp_path):
    summary = train(digits(tmp_path, steps=6, batch_size=32))
    rows = list(csv.DictReader(open(tmp_path / "metrics.csv")))
    assert list(rows[0])[:7] == ["step", "epoch", "split", "loss", "accuracy", "lr", "images_per_second"]
    assert [r["step"] for r in rows if r["split"] == "train"] == ["2", "4", "6"] and [
        r["step"] for r in rows if r["split"] == "val"
    ] == ["6"]
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["lr"] == 2e-3
    assert any((tmp_path / "tensorboard").iterdir())
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert (
        summary["accuracy"] == float(rows[-1]["accuracy"])
        and summary["train_images"] == 1437
        and summary["images_per_second"] > 0
    )
    model = ViT.from_pretrained(tmp_path / "checkpoints" / "last")
    assert model.num_classes == 10 and model.config["representation_size"] == 64
    assert resolve("pretrain", yaml.safe_load((tmp_path / "config.yaml").read_text())) == digits(
        tmp_path, steps=6, batch_size=32
    )


@pytest.mark.parametrize("objective", ["softmax", "masked"])
def test_what_blocks_keep_is_decided_for_a_micro_batch_before_the_model_is_compiled(
    tmp_path, monkeypatch, caplog, objective
):
    asked, said = [], "the first step compiles the model, which may take minutes; --no-compile does without"
    caplog.set_level("INFO", "vitfast")
    monkeypatch.setattr(ViT, "decide_keep", lambda self, batch, dtype=None: asked.append((batch, dtype)))
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: asked.append("compile"))
    Trainer(digits(tmp_path, steps=1, batch_size=30, accumulate=4, compile=True, objective=objective))
    assert asked == [(8, None), "compile"] and caplog.messages.count(said) == 1
    Trainer(digits(tmp_path, steps=1, batch_size=30, compile=False, objective=objective))
    assert asked[2:] == [(30, None)] and caplog.messages.count(said) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {},
        dict(optimizer="sgd", lr=0.1, ema_decay=0.9, mixup=0.3, dropout=0.1, drop_path=0.1, accumulate=2),
        dict(optimizer="lamb", layer_decay=0.7),  # counts its steps for a group, not for a parameter
    ],
    ids=["plain", "all", "lamb"],
)
def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(tmp_path, monkeypatch, fields):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(digits(whole, steps=10, batch_size=32, **fields))
    trainer = Trainer(digits(broken, steps=10, batch_size=32, save_every=4, **fields))
    cut_at(monkeypatch, 6)
    with pytest.raises(KeyError):
        trainer.fit()
    monkeypatch.undo()
    assert read_training_state(broken / "checkpoints" / "last")["step"] == 4
    train(digits(broken, steps=10, batch_size=32, save_every=4, **fields))
    assert same(weights(whole), weights(broken))
    assert same(training_tensors(whole), training_tensors(broken))
    steps = [r["step"] for r in csv.DictReader(open(broken / "metrics.csv")) if r["split"] == "train"]
    assert steps == sorted(set(steps), key=int)  # rows after the checkpoint were dropped before they were written again


def wait_for(path: Path, seconds: float = 90) -> None:
    end = time.time() + seconds
    while not path.exists():
        assert time.time() < end, f"{path} never came"
        time.sleep(0.02)


@pytest.mark.slow(7)
def test_sigterm_saves_and_the_same_command_goes_on(tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"
    command = pretraining_command(run, steps=60, save_every=3)
    process = Child(command_line, [str(c) for c in command])
    wait_for(run / "checkpoints" / "last")
    process.send_signal(signal.SIGTERM)
    (errors,) = done([process])
    assert "stopped at step" in errors
    stopped = read_training_state(run / "checkpoints" / "last")["step"]
    assert 3 <= stopped < 60

    torch.set_num_threads(1)
    config = digits(whole, steps=60, batch_size=32, save_every=3)
    train(dataclasses.replace(config, output=str(run), log_every=10, eval_every=None))
    train(dataclasses.replace(config, log_every=10, eval_every=None))
    assert same(weights(run), weights(whole))

    (errors,) = done([Child(command_line, [str(c) for c in command])])
    assert "is finished" in errors


def test_the_progress_bar_says_what_one_waits_for(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    train(digits(tmp_path, steps=8, batch_size=32))
    line = sys.stderr.getvalue().replace("\r", "\n").strip().splitlines()[-1]
    assert re.search(
        r"pretrain: 100%.* 8/8 \[\d\d:\d\d<\d\d:\d\d, .*step/s, loss \d\.\d+, [\d,]+ images/s, \d+% waiting for data\]",
        line,
    ), line


def test_other_settings_do_not_continue_a_run(tmp_path):
    train(digits(tmp_path, steps=4, batch_size=32))
    with pytest.raises(InputError, match="other settings .*lr: 0.002 there, 0.5 now"):
        train(digits(tmp_path, steps=4, batch_size=32, lr=0.5))
    assert train(digits(tmp_path, steps=4, batch_size=32, lr=0.5), resume="never")["steps"] == 4
    longer = train(digits(tmp_path, steps=6, batch_size=32, lr=0.5))
    assert longer["steps"] == 6
    with pytest.raises(InputError, match="no checkpoint there"):
        train(digits(tmp_path / "new", steps=4), resume=str(tmp_path / "nowhere"))
    assert not (tmp_path / "new").exists()
    assert train(digits(tmp_path / "new", steps=8, batch_size=32, lr=0.5), resume=str(tmp_path))["steps"] == 8


def test_a_damaged_state_is_refused(tmp_path):
    train(digits(tmp_path, steps=3, batch_size=32))
    path = tmp_path / "checkpoints" / "last" / "state" / "state.safetensors"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(InputError, match="training state in .* is damaged"):
        train(digits(tmp_path, steps=5, batch_size=32))


def test_a_state_of_an_earlier_version_is_called_so(tmp_path):
    train(digits(tmp_path, steps=3, batch_size=32))
    path = tmp_path / "checkpoints" / "last" / "state" / "state.json"
    path.write_text('{"dict": [["step", {"value": 3}]]}')  # as it was laid out before
    with pytest.raises(InputError, match="written by an earlier vitfast.*--weights"):
        train(digits(tmp_path, steps=5, batch_size=32))


def test_accumulation_gives_the_gradient_of_the_whole_batch(tmp_path):
    results = []
    for parts in (1, 4):
        trainer = Trainer(
            digits(tmp_path / str(parts), steps=4, batch_size=32, accumulate=parts, optimizer="sgd", lr=0.1)
        )
        loss, correct = trainer.train_step(*next(trainer.data.train_batches(0, 1))[:2], 0, 4)
        results.append((loss, correct, {k: v.clone() for k, v in trainer.train_step.model.state_dict().items()}))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-6) and results[0][1] == results[1][1]
    for key, value in results[0][2].items():
        assert torch.allclose(value, results[1][2][key], atol=1e-6), key


def test_a_loss_that_is_no_number_stops_and_names_the_step(tmp_path):
    train(digits(tmp_path, steps=4, batch_size=32))
    trainer = Trainer(digits(tmp_path, steps=20, batch_size=32))
    objective, seen = trainer.train_step.objective, []

    def poisoned(logits, target, smoothing):
        seen.append(1)
        return objective(logits, target, smoothing) * (float("nan") if len(seen) == 3 else 1.0)

    trainer.train_step.objective = poisoned
    with pytest.raises(TrainingError, match=r"loss of step 7 is nan \(epoch 0, images 192 to 223.*last \(step 4\)"):
        trainer.fit()
    assert read_training_state(tmp_path / "checkpoints" / "last")["step"] == 4


@pytest.mark.parametrize(
    "fields",
    [
        dict(objective="sigmoid", head_init_bias=-10.0, lr_decay="linear"),
        dict(global_pool="avg", pos_embed="sincos2d", label_smoothing=0.1, residual_in_fp32=True, amp="bf16"),
        dict(cutmix=1.0, auto_augment="rand-m5-n2", color_jitter=0.3, init_values=0.1),
        dict(workers=2),
        dict(amp="fp16", clip_norm=1.0),
    ],
    ids=str,
)
def test_every_way_of_training_takes_steps(tmp_path, fields):
    trainer = Trainer(digits(tmp_path, steps=3, batch_size=16, **fields))
    before = {k: v.clone() for k, v in trainer.train_step.model.state_dict().items()}
    summary = trainer.fit()
    assert summary["finished"] and 0 <= summary["accuracy"] <= 1
    moved = [k for k, v in trainer.train_step.model.named_parameters() if not torch.equal(v.detach(), before[k])]
    assert len(moved) == len(list(trainer.train_step.model.parameters()))


def test_finetuning_starts_from_a_zero_head_at_the_new_size(tmp_path):
    train(digits(tmp_path / "pre", steps=3, batch_size=32))
    trainer = Trainer(finetuning(tmp_path / "pre", tmp_path / "fine", steps=3))
    model = trainer.train_step.model
    assert (
        model.patch_embed.img_size == (48, 48)
        and (model.head.weight == 0).all()
        and isinstance(model.pre_logits, torch.nn.Identity)
    )
    assert model.pos_embed.shape[1] == 37
    assert trainer.fit()["steps"] == 3
    with pytest.raises(InputError, match="starts from weights"):
        train(resolve("finetune", dict(data="digits", output=str(tmp_path / "none"))))


def test_synthetic_data_feeds_any_model(tmp_path):
    summary = train(runs.digits(tmp_path, data="synthetic", steps=2, batch_size=8, eval_batch_size=512))
    assert summary["classes"] == 1000 and summary["val_images"] == 512
