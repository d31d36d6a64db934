"""Numbers that are not finite: never saved, told with their step, left out where the recipe says so."""

import json
import logging
import math

import pytest
import torch
from runs import cut_at, digits, records, same_runs
from safetensors.torch import load_file
from speed import first
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vitfast.train import trainer as trainer_module
from vitfast.train.resume import read_training_state
from vitfast.train.trainer import Trainer, TrainingError, train

QUICK = dict(img_size=16, batch_size=16, save_every=2)


def poisoned(config, steps: set[int], value: float = math.nan) -> Trainer:
    """A run in which one gradient of these steps (from 1) is `value`, and no loss is."""
    trainer = Trainer(config)
    trainer.train_step.model.blocks[0].mlp.fc1.weight.register_hook(
        lambda gradient: torch.full_like(gradient, value) if trainer.step + 1 in steps else gradient
    )
    return trainer


@pytest.mark.parametrize("value, optimizer, clip_norm", [(math.inf, "adamw", 1.0), (math.nan, "sgd", None)])
def test_a_step_that_spoils_the_weights_is_not_saved(tmp_path, value, optimizer, clip_norm):
    """At a saving step, whose loss is finite still: the checkpoint before it stays the last."""
    config = digits(tmp_path, steps=6, optimizer=optimizer, clip_norm=clip_norm, **QUICK)
    what = "norm of the gradients of step 4 is (nan|inf)" if clip_norm else "after step 4 a weight .* is not finite"
    with pytest.raises(TrainingError, match=rf"{what}.*last \(step 2\).*non_finite=skip") as error:
        poisoned(config, {4}, value).fit()
    assert "\n" not in str(error.value)
    assert read_training_state(tmp_path / "checkpoints" / "last")["step"] == 2
    for path in (tmp_path / "checkpoints").rglob("*.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(path).values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    first(1, [dict(clip_norm=None), dict(optimizer="sgd", amp="bf16", ema_decay=0.9), dict(optimizer="lamb")]),
    ids=["adamw, not clipped", "sgd, bf16", "lamb"],
)
def test_a_step_is_skipped_where_the_recipe_says_so(tmp_path, caplog, monkeypatch, fields):
    """Against a run whose optimiser is not called in that step, and which scales nothing."""
    skipping, without = tmp_path / "skipping", tmp_path / "without"
    summary = poisoned(digits(skipping, steps=4, non_finite="skip", log_every=1, **QUICK | fields), {2}).fit()
    said = "left out: the norm of the gradients of step 2 is nan (epoch 0, images 16 to 31"
    assert summary["finished"] and said in caplog.text
    trainer = Trainer(digits(without, steps=4, log_every=1, **QUICK | fields))
    update = trainer.train_step.optimizer.step
    trainer.train_step.scaler.step = lambda optimizer: None if trainer.step + 1 == 2 else update()
    trainer.fit()
    assert same_runs(skipping, without)
    losses, truth = records(skipping, "train", "loss"), records(without, "train", "loss")
    assert losses[1] == "nan" and losses[:1] + losses[2:] == truth[:1] + truth[2:]


@pytest.mark.slow
def test_skipping_changes_nothing_where_all_is_finite_and_ends_where_nothing_is(tmp_path):
    for name in ("stop", "skip"):
        train(digits(tmp_path / name, steps=3, non_finite=name, **QUICK))
    assert same_runs(tmp_path / "stop", tmp_path / "skip")
    every = set(range(4, 100))
    with pytest.raises(TrainingError, match=r"step 23 is nan.*, as in 20 steps in a row; .*last \(step 3\)"):
        poisoned(digits(tmp_path / "skip", steps=60, non_finite="skip", **QUICK | dict(save_every=60)), every).fit()


@pytest.mark.slow
def test_the_scaler_of_fp16_goes_on_with_its_factor(tmp_path):
    fields = dict(amp="fp16", clip_norm=1.0, **QUICK)
    poisoned(digits(tmp_path, steps=2, **fields), {2}).fit()  # fp16 leaves such a step out itself
    assert read_training_state(tmp_path / "checkpoints" / "last")["scaler.scale"] == 2.0**15
    trainer = Trainer(digits(tmp_path, steps=4, non_finite="skip", **fields))
    assert trainer.train_step.scaler.get_scale() == 2.0**15 and trainer.fit()["finished"]


# ---- the log


@pytest.mark.slow
def test_a_validation_loss_that_is_no_number_breaks_nothing(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    evaluate = trainer_module.evaluate
    monkeypatch.setattr(trainer_module, "evaluate", lambda *args: evaluate(*args) | dict(loss=math.nan))
    summary = train(digits(tmp_path, steps=4, eval_every=2, **QUICK))
    text = (tmp_path / "summary.json").read_text()
    told = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert summary["finished"] and told == summary and summary["loss"] is None and "loss nan" in caplog.text
    assert records(tmp_path, "val", "step", "loss") == [("2", "nan"), ("4", "nan")]
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(e.step, math.isnan(e.value)) for e in board.Scalars("val/loss")] == [(2, True), (4, True)]
    monkeypatch.undo()
    train(digits(tmp_path, steps=6, eval_every=2, **QUICK))
    assert [loss == "nan" for loss in records(tmp_path, "val", "loss")] == [True, True, False]


@pytest.mark.slow
def test_tensorboard_reads_what_metrics_csv_says(tmp_path, monkeypatch):
    """A resumed run too: the events of the steps that it takes again count once."""
    config = digits(tmp_path, steps=8, log_every=1, **QUICK | dict(save_every=4))
    cut_at(monkeypatch, 5)
    with pytest.raises(KeyError):
        train(config)
    monkeypatch.undo()
    train(config)
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    for column in ("loss", "accuracy", "lr", "images_per_second"):
        events = [(event.step, event.value) for event in board.Scalars(f"train/{column}")]
        rows = records(tmp_path, "train", "step", column)
        assert events == [(int(step), pytest.approx(float(value), rel=1e-6)) for step, value in rows]
