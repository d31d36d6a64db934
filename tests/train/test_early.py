"""Early stopping (the paper's 4.3): when a run ends, what it keeps, and that it goes on as if it had not been cut."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from runs import content, cut_at, digits, records, same, weights
from safetensors.torch import load_file

from vitfast import InputError, ViT
from vitfast.data.loader import open_data
from vitfast.eval.accuracy import evaluate
from vitfast.train import trainer
from vitfast.train.run_folder import kept_weights
from vitfast.train.trainer import train

ACCURACIES = (0.3, 0.5, 0.5, 0.4, 0.6, 0.6, 0.1, 0.2, 0.9)  # the fifth is best until three were not better


def stopping(output: Path, **fields):
    settings = dict(steps=18, eval_every=2, log_every=2, warmup_steps=0, lr_decay="constant", batch_size=8, img_size=16)
    return digits(output, **settings | dict(early_stop=3, hold_out=0.2, train_images=64) | fields)


def best(run: Path) -> dict:
    return load_file(run / "best" / "model.safetensors")


def test_the_best_is_the_best_on_held_out_images_and_starts_again_with_the_run(tmp_path):
    config = stopping(tmp_path / "run", steps=8, lr=0.01, early_stop=9)
    summary = train(config)
    told = records(tmp_path / "run", "val", "step", "accuracy")
    accuracies = {int(step): float(accuracy) for step, accuracy in told}
    assert not summary["stopped_early"] and summary["steps"] == 8
    assert summary["best_accuracy"] == max(accuracies.values()) == accuracies[summary["best_step"]]
    model, cpu = ViT.from_pretrained(tmp_path / "run" / "best"), torch.device("cpu")
    data = open_data(config, (16, 16), (8, 8), cpu)
    assert evaluate(model, data, cpu, None)["accuracy"] == summary["best_accuracy"]
    assert summary["val_images"] == len(data.val) == 1437 - 1150
    with pytest.raises(InputError, match="continues in its own folder only: give --output .*run"):
        train(stopping(tmp_path / "other", steps=10, lr=0.01, early_stop=9), resume=str(tmp_path / "run"))
    summary = train(stopping(tmp_path / "run", steps=2, early_stop=None), resume="never")
    assert summary["best_step"] == 2 and "stopped_early" not in summary
    assert same(best(tmp_path / "run"), weights(tmp_path / "run"))


@pytest.fixture(scope="module")
def scripted():
    """Evaluations tell ACCURACIES, by their step; the weights are those that are trained."""

    def say(self) -> dict:
        return dict(accuracy=ACCURACIES[self.step // 2 - 1], loss=1.0, images=1, unreadable_images=0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.Trainer, "evaluate", say)
        yield


@pytest.fixture(scope="module")
def whole(scripted, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("early") / "whole"
    train(stopping(run))
    return run


def test_a_run_ends_after_the_evaluations_it_may_wait_and_keeps_the_best(whole, tmp_path):
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["finished"] and summary["stopped_early"] and summary["steps"] == 16
    assert json.loads((whole / "best" / "state" / "best.json").read_text()) == dict(step=10, accuracy=0.6)
    assert (summary["best_step"], summary["best_accuracy"], summary["accuracy"]) == (10, 0.6, 0.2)
    assert records(whole, "val", "step") == [str(step) for step in range(2, 17, 2)]
    train(stopping(tmp_path / "ten", early_stop=None, steps=10))
    assert same(best(whole), weights(tmp_path / "ten")) and not same(best(whole), weights(whole))
    ten = json.loads((tmp_path / "ten" / "summary.json").read_text())
    assert (ten["best_step"], ten["best_accuracy"]) == (10, 0.6) and same(
        best(tmp_path / "ten"), weights(tmp_path / "ten")
    )
    assert kept_weights(whole) == whole / "best" and ViT.from_pretrained(whole / "best").num_classes == 10
    assert kept_weights(tmp_path / "ten") == tmp_path / "ten" / "checkpoints" / "last"
    assert train(stopping(whole)) == summary  # it is finished: nothing is trained again


@pytest.mark.parametrize("cut", [10, 13])
def test_a_run_that_was_cut_off_stops_where_the_whole_one_does(whole, tmp_path, cut):
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyError):
        cut_at(patch, cut)
        train(stopping(run))
    if cut == 10:  # cut off before the copy of the best checkpoint, which is the last one, has its name
        (run / "best").rename(run / ".best")
    again, once = train(stopping(run)), json.loads((whole / "summary.json").read_text())
    for name in ("steps", "best_step", "best_accuracy", "stopped_early", "accuracy"):
        assert again[name] == once[name], name
    for split in ("train", "val"):
        columns = (split, "step", "loss", "accuracy", "lr")
        assert records(run, *columns) == records(whole, *columns)
    assert same(weights(run), weights(whole)) and same(best(run), best(whole))


@pytest.mark.parametrize(
    "source, alone, resume",
    [
        ("checkpoints/last", True, "auto"),  # of another run
        ("best", True, "auto"),
        ("best", True, "never"),
        ("checkpoints/last", False, "never"),  # of this run
    ],
)
def test_a_best_folder_that_the_run_did_not_write_is_refused_and_stays(whole, tmp_path, source, alone, resume):
    run = tmp_path / "run"
    if not alone:
        shutil.copytree(whole, run)
        shutil.rmtree(run / "best")
    shutil.copytree(whole / source, run / "best")
    before = content(run)
    with pytest.raises(InputError, match=f"{run}/best is damaged, or this run did not write it; move it away"):
        train(stopping(run, seed=int(alone), steps=20), resume=resume)
    assert content(run) == before
    if not alone:
        train(stopping(run))  # finished: nothing is written
        assert content(run) == before


def test_the_best_of_a_run_whose_best_is_gone_is_one_that_is_kept(scripted, tmp_path):
    run = tmp_path / "run"
    assert train(stopping(run, steps=12, early_stop=None))["best_step"] == 10
    shutil.rmtree(run / "best")
    summary = train(stopping(run, steps=16, early_stop=None))
    assert (summary["best_step"], summary["best_accuracy"]) == (16, 0.2)
    assert same(best(run), weights(run))
