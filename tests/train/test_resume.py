"""What a run goes on with: its own settings and data, at the step after its last checkpoint, evaluated or not."""

import json
import shutil
from pathlib import Path

import pytest
from commands import CLASSES, make_folder, picture, run_cli
from runs import QUICK, changed, content, cut_at, digits, pretraining_command, records, same_runs
from timm.models._hub import save_for_hf

from vitfast import InputError, ViT
from vitfast.data.datasets import fingerprint
from vitfast.data.folders import ImageFiles
from vitfast.model.baselines import baseline
from vitfast.train import trainer as trainer_module
from vitfast.train.resume import check_data, read_training_state
from vitfast.train.trainer import Trainer, train

# ---- settings


@pytest.mark.parametrize("given", ["run", "run/checkpoints/previous", "alone"])
def test_resuming_a_path_checks_the_settings_of_its_run(four_steps, tmp_path, capsys, given):
    """Wherever the checkpoint is; without it a Nano would go on under a config.yaml that says Ti."""
    source = four_steps.parent / given
    if given == "alone":
        source = shutil.copytree(four_steps / "checkpoints" / "last", tmp_path / "alone")
    before, settings = content(four_steps), QUICK | dict(steps=6)
    for other, said in (
        (dict(model="Ti/8"), "model: Nano/8 there, Ti/8 now"),
        (dict(seed=3, amp="bf16"), "seed: 0 there, 3 now; amp: auto there, bf16 now"),
        (dict(auto_augment="3a"), "(auto_augment: unset there, 3a now)"),
        (dict(drop_path=0.1, clip_norm=None), "(clip_norm: 1.0 there, unset now; drop_path: 0.0 there, 0.1 now)"),
        (dict(sizes="16:40", tokens_per_step=350), "tokens_per_step: unset there, 350 now"),
    ):
        code, _, err = run_cli(capsys, *pretraining_command(tmp_path / "new", source, **settings | other))
        assert code == 2 and err.count("\n") == 1 and said in err and "--weights" in err
        assert not (tmp_path / "new").exists()
    assert run_cli(capsys, *pretraining_command(tmp_path / "new", source, **settings))[0] == 0
    assert read_training_state(tmp_path / "new" / "checkpoints" / "last")["step"] == 6
    assert content(four_steps) == before


def test_settings_that_change_the_course_do_not_continue_a_run(four_steps, tmp_path):
    run, other = shutil.copytree(four_steps, tmp_path / "run"), tmp_path / "other"
    with pytest.raises(InputError, match="other settings .*lr: 0.002 there, 0.5 now"):
        train(digits(run, **QUICK, steps=4, lr=0.5))
    fields = dict(save_every=1, eval_batch_size=100, non_finite="skip", steps=5)  # these do not
    assert train(changed(digits(run, **QUICK | fields), about="another command"))["steps"] == 5
    assert train(digits(run, **QUICK, steps=4, lr=0.5), resume="never")["steps"] == 4
    assert train(digits(run, **QUICK, steps=6, lr=0.5))["steps"] == 6
    with pytest.raises(InputError, match="no checkpoint there"):
        train(digits(other, **QUICK, steps=4), resume=str(tmp_path / "nowhere"))
    assert not other.exists()
    before = content(run)
    with pytest.raises(InputError, match=f"{run} holds a run already"):
        train(digits(run, **QUICK, steps=6), resume=str(four_steps))
    assert content(run) == before


def test_a_finished_run_resumed_elsewhere_or_from_its_previous_checkpoint_is_the_same(four_steps, tmp_path):
    assert train(digits(tmp_path / "new", steps=4, **QUICK), resume=str(four_steps))["steps"] == 4
    assert same_runs(tmp_path / "new", four_steps) and records(tmp_path / "new", "val", "step") == ["4"]
    run = shutil.copytree(four_steps, tmp_path / "run")
    config = digits(run, steps=4, **QUICK)
    assert train(config, resume=str(run / "checkpoints" / "previous"))["steps"] == 4
    assert same_runs(run, four_steps)


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


CHANGES = {
    rename_class: "classes: dog gone, dingo new",
    add_image: "train_images: 9 there, 10 now",
    remove_validation_image: "val_images: 9 there, 8 now",
    move_images: "train_images: files renamed or moved",
    replace_image: "val_images: files of other sizes",
    add_class: "classes: fox new, train_images: 9 there, 10 now, val_images: 9 there, 10 now",
}


@pytest.mark.parametrize("change", CHANGES)
def test_data_that_has_changed_is_told(cut_off, tmp_path, monkeypatch, capsys, change):
    shutil.copytree(cut_off, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    change(tmp_path / "data")
    before = content(tmp_path)
    for resume in ("auto", "run/checkpoints/last"):
        code, _, err = run_cli(capsys, *pretraining_command(**FOLDER, steps=2, resume=resume))
        assert code == 2 and err.count("\n") == 1 and f"({CHANGES[change]}); restore it" in err
        assert "--weights run/" in err and content(tmp_path) == before


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
    assert ViT.from_pretrained(last).class_names == CLASSES
    assert ViT.from_pretrained(last, num_classes=5).class_names is None
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
