"""What a run goes on with, its data and classes; evaluations after a resume; early stopping and what it keeps."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from commands import CLASSES, picture
from runs import FOLDER, QUICK, content, cut_at, digits, records, same, same_runs, weights
from safetensors.torch import load_file
from timm.models._hub import save_for_hf

from vitfast import InputError, ViT
from vitfast.data.folders import ImageFiles
from vitfast.data.identity import fingerprint
from vitfast.data.loader import open_data
from vitfast.eval.accuracy import evaluate
from vitfast.model.baselines import baseline
from vitfast.train import trainer
from vitfast.train import trainer as trainer_module
from vitfast.train.resume import read_training_state
from vitfast.train.run_data import check_data
from vitfast.train.run_folder import kept_weights
from vitfast.train.step import TrainStep
from vitfast.train.trainer import Trainer, train


def test_a_finished_run_resumed_elsewhere_is_evaluated_again(four_steps, tmp_path):
    assert train(digits(tmp_path / "new", steps=4, **QUICK), resume=str(four_steps))["steps"] == 4
    assert same_runs(tmp_path / "new", four_steps) and records(tmp_path / "new", "val", "step") == ["4"]


@pytest.mark.slow
def test_a_run_goes_on_whose_optimiser_has_no_state_for_a_parameter_without_gradients(tmp_path, monkeypatch):
    accumulate = TrainStep.accumulate

    def none_for_the_norm(self, *args):
        result = accumulate(self, *args)
        self.model.norm.weight.grad = None
        return result

    monkeypatch.setattr(TrainStep, "accumulate", none_for_the_norm)
    for steps in (2, 4):
        assert train(digits(tmp_path, steps=steps, **QUICK))["steps"] == steps


@pytest.mark.quick(1)
@pytest.mark.parametrize("there", [True, False])
def test_a_run_computes_its_steps_in_its_own_way_whatever_wrote_the_checkpoint(tmp_path, there):
    """SGD is fused, but not under FSDP2, which cannot shard that; the scaler of non_finite=skip asks which it is."""
    options = dict(optimizer="sgd", non_finite="skip", **QUICK)
    train(digits(tmp_path, steps=2, **options))
    path = tmp_path / "checkpoints" / "last" / "state" / "state.json"
    record = json.loads(path.read_text())
    fused = [name for name in record if name.endswith(".fused")]
    path.write_text(json.dumps(record | dict.fromkeys(fused, there)))
    trainer = Trainer(digits(tmp_path, steps=3, **options))
    assert fused and all(group["fused"] is True for group in trainer.train_step.optimizer.param_groups)
    assert trainer.fit()["steps"] == 3


# ---- data


def test_classes_in_another_order_are_told():
    saved = dict(classes=["a", "b"], train_images=4, val_images=2)
    with pytest.raises(InputError, match="classes: another order"):
        check_data(saved, saved | dict(classes=["b", "a"]), Path("run"))
    check_data(saved, saved, Path("run"))


def test_other_labels_are_told(tmp_path):
    """The same files with other classes in labels.csv."""
    picture(1).save(tmp_path / "a.png")
    files = [str(tmp_path / "a.png"), str(tmp_path / "gone.png")]
    saved, now = (
        dict(classes=["x", "y"], train_images=2, val_images=2)
        | {f"val_{kind}": value for kind, value in fingerprint(source)[0].items()}
        for source in (ImageFiles(files, labels, ["x", "y"]) for labels in ([(0,), (1,)], [(0, 1), (1,)]))
    )
    assert saved["val_paths"] == now["val_paths"] and saved["val_sizes"] == now["val_sizes"]
    with pytest.raises(InputError, match=r"\(val_images: files of other classes\); restore it"):
        check_data(saved, now, Path("run"))


def test_a_model_knows_its_class_names(on_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(on_folder)
    last = Path("run", "checkpoints", "last")
    assert json.loads((last / "config.json").read_text())["class_names"] == list(CLASSES)
    assert ViT.from_pretrained(last).class_names == CLASSES
    assert ViT.from_pretrained(last, num_classes=5).class_names is None
    options = FOLDER | dict(output=tmp_path / "run")
    for fields in ({}, dict(ema_decay=0.9), dict(model="timm:test_resnet")):
        model = Trainer(digits(**options | fields)).train_step.averaged
        assert tuple(model.class_names) == CLASSES, fields
    assert not getattr(Trainer(digits(**options, objective="masked")).train_step.model.vit, "class_names", None)


def test_a_baseline_saves_its_class_names_as_timm_does(tmp_path):
    model = baseline("timm:test_resnet", 3)
    save_for_hf(model, tmp_path / "timm", model_config=dict(label_names=list(CLASSES)))
    theirs = json.loads((tmp_path / "timm" / "config.json").read_text())
    for names in (None, CLASSES):
        model.class_names = names
        model.save_pretrained(tmp_path)
        ours = json.loads((tmp_path / "config.json").read_text())
        assert ours.get("label_names") == (names and theirs["label_names"] == list(names) and theirs["label_names"])


# ---- evaluation


@pytest.mark.slow
def test_an_evaluation_that_fails_loses_nothing_and_is_made_up_for(tmp_path, monkeypatch):
    """A validation image that cannot be read, say: the steps before it are saved, and it is tried again."""
    whole, config = tmp_path / "whole", digits(tmp_path / "run", steps=4, eval_every=2, **QUICK)
    train(digits(whole, steps=4, eval_every=2, **QUICK))
    evaluate, works = trainer_module.evaluate, iter([False, False, True, False])

    def sometimes(*args):
        if not next(works):
            raise InputError("a broken image")
        return evaluate(*args)

    monkeypatch.setattr(trainer_module, "evaluate", sometimes)
    for step in (2, 2, 4):
        with pytest.raises(InputError, match="a broken image"):
            train(config)
        assert read_training_state(tmp_path / "run" / "checkpoints" / "last")["step"] == step
    monkeypatch.undo()
    assert records(tmp_path / "run", "val", "step") == ["2"]
    assert train(config)["finished"]
    assert records(tmp_path / "run", "val", "step") == records(whole, "val", "step") == ["2", "4"]
    assert same_runs(tmp_path / "run", whole)


@pytest.mark.slow
def test_a_step_that_was_evaluated_is_not_evaluated_again(four_steps, tmp_path, monkeypatch):
    run = shutil.copytree(four_steps, tmp_path / "run")
    evaluated, evaluate = [], trainer_module.evaluate
    monkeypatch.setattr(trainer_module, "evaluate", lambda *args: evaluated.append(trainer.step) or evaluate(*args))
    trainer = Trainer(digits(run, steps=6, eval_every=4, **QUICK))
    trainer.fit()
    assert evaluated == [6] and records(run, "val", "step") == ["4", "6"]


# ---- early stopping (the paper's 4.3): when a run ends, what it keeps, and that it goes on as if it had not been cut


ACCURACIES = (0.3, 0.5, 0.5, 0.4, 0.6, 0.6, 0.1, 0.2, 0.9)  # the fifth is best until three were not better


def stopping(output: Path, **fields):
    settings = dict(steps=18, eval_every=2, log_every=2, warmup_steps=0, lr_decay="constant", batch_size=8, img_size=16)
    return digits(output, **settings | dict(early_stop=3, hold_out=0.2, train_images=64) | fields)


def best(run: Path) -> dict:
    return load_file(run / "best" / "model.safetensors")


@pytest.mark.slow
def test_the_best_is_the_best_on_held_out_images_and_starts_again_with_the_run(tmp_path):
    config = stopping(tmp_path / "run", steps=8, lr=0.01, early_stop=9)
    summary = train(config)
    told = records(tmp_path / "run", "val", "step", "accuracy")
    accuracies = {int(step): float(accuracy) for step, accuracy in told}
    assert not summary["stopped_early"] and summary["steps"] == 8
    assert summary["best_accuracy"] == max(accuracies.values()) == accuracies[summary["best_step"]]
    model, cpu = ViT.from_pretrained(tmp_path / "run" / "best"), torch.device("cpu")
    data = open_data(config, (16, 16), (8, 8), cpu)
    assert evaluate(model, data)["accuracy"] == summary["best_accuracy"]
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_best_of_a_run_whose_best_is_gone_is_one_that_is_kept(scripted, tmp_path):
    """An earlier vitfast kept a best/ only with early_stop."""
    run = tmp_path / "run"
    assert train(stopping(run, steps=12, early_stop=None))["best_step"] == 10
    shutil.rmtree(run / "best")
    summary = train(stopping(run, steps=16, early_stop=None))
    assert (summary["best_step"], summary["best_accuracy"]) == (16, 0.2)
    assert same(best(run), weights(run))
