"""What a run goes on with: its own settings and data, at the step after its last checkpoint, evaluated or not."""

import csv
import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from commands import CLASSES, make_folder, picture, run_cli
from runs import content, cut_at, digits, pretraining_command, same, training_tensors, weights
from timm.models._hub import save_for_hf

from vitfast import InputError, ViT
from vitfast.baselines import baseline
from vitfast.data.datasets import fingerprint
from vitfast.data.folders import ImageFiles
from vitfast.train import trainer as trainer_module
from vitfast.train.resume import check_data, read_training_state
from vitfast.train.trainer import Trainer, train

QUICK = dict(img_size=16, batch_size=16, save_every=2)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished run with checkpoints of steps 4 and 2."""
    folder = tmp_path_factory.mktemp("run") / "run"
    train(digits(folder, steps=4, **QUICK))
    return folder


def rows(folder: Path, split: str) -> list[str]:
    """The steps of the records of a split."""
    with open(folder / "metrics.csv") as file:
        return [row["step"] for row in csv.DictReader(file) if row["split"] == split]


# ---- settings


@pytest.mark.parametrize("given", ["run", "run/checkpoints/previous", "alone"])
def test_resuming_a_path_checks_the_settings_of_its_run(run, tmp_path, capsys, given):
    """Wherever the checkpoint is; without it a Nano would go on under a config.yaml that says Ti."""
    source = run.parent / given
    if given == "alone":
        source = tmp_path / "alone"
        shutil.copytree(run / "checkpoints" / "last", source)
    before = content(run)
    command = pretraining_command(tmp_path / "new", steps=6, **QUICK)
    for other, said in (
        (["--model", "Ti/8"], "model: Nano/8 there, Ti/8 now"),
        (["--lr", 0.5], "lr: 0.002 there, 0.5 now"),
        (["--set", "seed=3", "amp=bf16"], "seed: 0 there, 3 now; amp: auto there, bf16 now"),
        (["--set", "auto_augment=3a"], "(auto_augment: unset there, 3a now)"),
        (
            ["--set", "drop_path=0.1", "clip_norm=none"],
            "(clip_norm: 1.0 there, unset now; drop_path: 0.0 there, 0.1 now)",
        ),
    ):
        code, _, err = run_cli(capsys, *command, "--resume", source, *other)
        assert code == 2 and err.count("\n") == 1 and said in err and "--weights" in err
        assert not (tmp_path / "new").exists()
    assert run_cli(capsys, *command, "--resume", source)[0] == 0
    assert read_training_state(tmp_path / "new" / "checkpoints" / "last")["step"] == 6
    assert content(run) == before


def test_what_a_recipe_says_about_itself_is_no_setting(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    config = digits(tmp_path / "run", steps=6, **QUICK)
    assert train(dataclasses.replace(config, about="another command"))["steps"] == 6


def test_settings_may_change_that_do_not_change_the_course(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    config = digits(tmp_path / "run", steps=5, **QUICK | dict(save_every=1), eval_batch_size=100, non_finite="skip")
    assert train(config)["steps"] == 5


def test_resuming_a_path_does_not_replace_another_run(run, tmp_path, capsys):
    other = tmp_path / "other"
    train(digits(other, steps=2, lr=0.1, batch_size=16))
    before = content(other)
    code, _, err = run_cli(capsys, *pretraining_command(other, steps=6, **QUICK), "--resume", run)
    assert code == 2 and f"{other} holds a run already" in err and content(other) == before


def test_a_finished_run_resumed_elsewhere_has_its_checkpoint_there(run, tmp_path):
    assert train(digits(tmp_path, steps=4, **QUICK), resume=str(run))["steps"] == 4
    assert same(weights(tmp_path), weights(run)) and same(training_tensors(tmp_path), training_tensors(run))
    assert rows(tmp_path, "val") == ["4"]


def test_going_back_to_the_previous_checkpoint(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    config = digits(tmp_path / "run", steps=4, **QUICK)
    assert train(config, resume=str(tmp_path / "run" / "checkpoints" / "previous"))["steps"] == 4
    assert same(training_tensors(tmp_path / "run"), training_tensors(run))


# ---- data


FOLDER = dict(data="data", output="run", model="Nano/8", img_size=16, batch_size=4, save_every=1, workers=0)


@pytest.fixture(scope="module")
def cut_off(tmp_path_factory) -> Path:
    """A folder with `data`, three classes of images, and `run`, of two steps, which was cut off after the first."""
    root = tmp_path_factory.mktemp("cut_off")
    make_folder(root / "data", count=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        cut_at(patch, 1)
        with pytest.raises(KeyError):
            train(digits(**FOLDER, steps=2))
    return root


def rename_class(data: Path) -> None:
    for split in ("train", "val"):
        (data / split / "dog").rename(data / split / "dingo")


def add_image(data: Path) -> None:
    picture(77).save(data / "train" / "cat" / "new.png")


def remove_validation_image(data: Path) -> None:
    (data / "val" / "eel" / "0.png").unlink()


def add_class(data: Path) -> None:
    for split in ("train", "val"):
        (data / split / "fox").mkdir()
        picture(7).save(data / split / "fox" / "0.png")


def move_images(data: Path) -> None:
    """A cat is a dog now, and a dog a cat: there are as many of each as before."""
    (data / "train" / "cat" / "0.png").rename(data / "train" / "dog" / "9.png")
    (data / "train" / "dog" / "0.png").rename(data / "train" / "cat" / "9.png")


def replace_image(data: Path) -> None:
    picture(77).resize((50, 50)).save(data / "val" / "cat" / "0.png")


@pytest.mark.parametrize(
    "change, said",
    [
        (rename_class, "classes: dog gone, dingo new"),
        (add_image, "train_images: 9 there, 10 now"),
        (remove_validation_image, "val_images: 9 there, 8 now"),
        (move_images, "train_images: files renamed or moved"),
        (replace_image, "val_images: files of other sizes"),
        (add_class, "classes: fox new, train_images: 9 there, 10 now, val_images: 9 there, 10 now"),
    ],
)
@pytest.mark.parametrize("resume", ["auto", "run/checkpoints/last"])
def test_data_that_has_changed_is_told(cut_off, tmp_path, monkeypatch, capsys, change, said, resume):
    shutil.copytree(cut_off, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    change(tmp_path / "data")
    before = content(tmp_path)
    options = {key: value for key, value in FOLDER.items() if key != "workers"}
    command = pretraining_command(**options, steps=2)
    code, _, err = run_cli(capsys, *command, "--resume", resume, "--set", "workers=0")
    assert code == 2 and err.count("\n") == 1 and f"({said}); restore it" in err and "--weights run/" in err
    assert content(tmp_path) == before


def test_classes_in_another_order_are_told():
    saved = dict(classes=["a", "b"], train_images=4, val_images=2)
    with pytest.raises(InputError, match="classes: another order"):
        check_data(saved, saved | dict(classes=["b", "a"]), Path("run"))
    check_data(saved, saved, Path("run"))


def test_other_labels_are_told_but_not_of_an_earlier_checkpoint(tmp_path):
    """The same files with other classes in labels.csv. A checkpoint without a fingerprint goes on as it did."""
    picture(1).save(tmp_path / "a.png")
    files = [str(tmp_path / "a.png"), str(tmp_path / "gone.png")]
    earlier = dict(classes=["x", "y"], train_images=2, val_images=2)
    saved, now = (
        earlier | {f"val_{kind}": value for kind, value in fingerprint(source).items()}
        for source in (ImageFiles(files, labels, ["x", "y"], (1, 1)) for labels in ([(0,), (1,)], [(0, 1), (1,)]))
    )
    assert saved["val_names"] == now["val_names"] and saved["val_sizes"] == now["val_sizes"]
    with pytest.raises(InputError, match=r"\(val_images: files of other classes\); restore it"):
        check_data(saved, now, Path("run"))
    check_data(earlier, now, Path("run"))


def test_a_model_knows_its_class_names(cut_off, tmp_path, monkeypatch):
    monkeypatch.chdir(cut_off)
    last = Path("run", "checkpoints", "last")
    assert json.loads((last / "config.json").read_text())["class_names"] == list(CLASSES)
    assert (
        ViT.from_pretrained(last).class_names == CLASSES
        and ViT.from_pretrained(last, num_classes=5).class_names is None
    )
    options = FOLDER | dict(output=str(tmp_path / "run"), steps=1)
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


def test_an_evaluation_that_fails_loses_nothing_and_is_made_up_for(run, tmp_path, monkeypatch):
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
    assert rows(tmp_path / "run", "val") == ["2"]
    assert train(config)["finished"]
    assert rows(tmp_path / "run", "val") == rows(whole, "val") == ["2", "4"]
    assert same(training_tensors(tmp_path / "run"), training_tensors(whole))


def test_a_step_that_was_evaluated_is_not_evaluated_again(run, tmp_path, monkeypatch):
    shutil.copytree(run, tmp_path / "run")
    evaluated, evaluate = [], trainer_module.evaluate
    monkeypatch.setattr(trainer_module, "evaluate", lambda *args: evaluated.append(trainer.step) or evaluate(*args))
    trainer = Trainer(digits(tmp_path / "run", steps=6, eval_every=4, **QUICK))
    trainer.fit()
    assert evaluated == [6] and rows(tmp_path / "run", "val") == ["4", "6"]
