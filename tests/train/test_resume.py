"""What a run goes on with: its own data and classes, and whether the step of its last checkpoint was evaluated."""

import json
import shutil
from pathlib import Path

import pytest
from commands import CLASSES, picture
from runs import FOLDER, QUICK, digits, records, same_runs
from timm.models._hub import save_for_hf

from vitfast import InputError, ViT
from vitfast.data.folders import ImageFiles
from vitfast.data.identity import fingerprint
from vitfast.model.baselines import baseline
from vitfast.train import trainer as trainer_module
from vitfast.train.resume import read_training_state
from vitfast.train.run_data import check_data
from vitfast.train.step import TrainStep
from vitfast.train.trainer import Trainer, train


def test_a_finished_run_resumed_elsewhere_is_evaluated_again(four_steps, tmp_path):
    assert train(digits(tmp_path / "new", steps=4, **QUICK), resume=str(four_steps))["steps"] == 4
    assert same_runs(tmp_path / "new", four_steps) and records(tmp_path / "new", "val", "step") == ["4"]


def test_a_run_goes_on_whose_optimiser_has_no_state_for_a_parameter_without_gradients(tmp_path, monkeypatch):
    accumulate = TrainStep.accumulate

    def none_for_the_norm(self, *args):
        result = accumulate(self, *args)
        self.model.norm.weight.grad = None
        return result

    monkeypatch.setattr(TrainStep, "accumulate", none_for_the_norm)
    for steps in (2, 4):
        assert train(digits(tmp_path, steps=steps, **QUICK))["steps"] == steps


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


def test_a_step_that_was_evaluated_is_not_evaluated_again(four_steps, tmp_path, monkeypatch):
    run = shutil.copytree(four_steps, tmp_path / "run")
    evaluated, evaluate = [], trainer_module.evaluate
    monkeypatch.setattr(trainer_module, "evaluate", lambda *args: evaluated.append(trainer.step) or evaluate(*args))
    trainer = Trainer(digits(run, steps=6, eval_every=4, **QUICK))
    trainer.fit()
    assert evaluated == [6] and records(run, "val", "step") == ["4", "6"]
