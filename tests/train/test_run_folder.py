"""The run folder: what is somebody else's stays, every copy goes on, a kill at any point leaves a whole checkpoint."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from commands import run_cli
from runs import QUICK, content, digits, pretraining_command, same, same_runs, weights

from vitfast import InputError, ViT
from vitfast.train import run_folder
from vitfast.train.resume import read_training_state
from vitfast.train.trainer import Trainer, train

# ---- what vitfast did not write


def test_nothing_of_somebody_else_is_removed(tmp_path, capsys):
    theirs = {
        "checkpoints/best.pt": b"mine",
        "checkpoints/step-00000003/model.safetensors": b"mine too",
        "tensorboard/events.out.tfevents.1700000000.host.1.0": b"another run",
        "notes.txt": b"do not lose",
    }
    for name, data in theirs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    train(digits(tmp_path, steps=2, **QUICK))
    shutil.copytree(tmp_path / "checkpoints" / "last", tmp_path / "checkpoints" / "best")
    best = content(tmp_path / "checkpoints" / "best")
    train(digits(tmp_path, steps=6, **QUICK))
    train(digits(tmp_path, steps=2, **QUICK), resume="never")
    held = content(tmp_path)
    assert {name: held[name] for name in theirs} == theirs
    assert content(tmp_path / "checkpoints" / "best") == best
    events = [path for path in (tmp_path / "tensorboard").iterdir() if path.name.endswith(".vitfast")]
    assert len(events) == 1  # those of the runs before were vitfast's own


SOMEBODYS = {
    "config.yaml": "lr: 0.1\nmodel: mine\n",
    "metrics.csv": "date,value\n1,2\n",
    "summary.json": '{"result": 1}',
    "checkpoints/last": "a file",
    "checkpoints/last/weights.pt": "mine",
    "checkpoints/previous/weights.pt": "mine",
    "checkpoints": "a file",
    "tensorboard": "a file",
    "checkpoints/.writing": "a file",
    "checkpoints/.writing/thesis.txt": "mine",
    "checkpoints/.removing/state/thesis.txt": "mine",
    ".best/thesis.txt": "mine",
}


@pytest.mark.parametrize("name", SOMEBODYS)
def test_a_file_that_would_be_replaced_is_refused_before_anything_is_touched(tmp_path, capsys, name):
    path, early = tmp_path / name, dict(early_stop=2, hold_out=0.1) if "best" in name else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(SOMEBODYS[name])
    before = content(tmp_path)
    for resume in ("auto", "never"):
        code, _, err = run_cli(capsys, *pretraining_command(tmp_path, resume, steps=2, **early))
        named = "/".join(name.split("/")[: 1 if early else 2])
        assert code == 2 and err.count("\n") == 1
        assert f"{tmp_path / named} is damaged, or no run of vitfast wrote it" in err and content(tmp_path) == before


def test_what_a_kill_left_of_a_checkpoint_goes(four_steps, tmp_path):
    run = shutil.copytree(four_steps, tmp_path / "run")
    shutil.copytree(run / "checkpoints" / "last", run / "checkpoints" / ".writing")
    (run / "checkpoints" / ".writing" / ".model.safetensors.0a1b2c3d.tmp").write_bytes(b"half")
    shutil.copytree(run / "checkpoints" / "last" / "state", run / "checkpoints" / ".removing" / "state")
    train(digits(run, steps=8, **QUICK))
    steps = {path.name: read_training_state(path)["step"] for path in (run / "checkpoints").iterdir()}
    assert steps == dict(last=8, previous=6)


def test_a_folder_that_somebody_puts_in_the_place_of_a_checkpoint_gets_another_name(tmp_path, caplog):
    trainer = Trainer(digits(tmp_path, steps=4, **QUICK))
    take = trainer._train

    def put(images, labels):
        if trainer.step == 3:  # checkpoints/last is of step 2
            (tmp_path / "checkpoints" / "previous").mkdir()
            (tmp_path / "checkpoints" / "previous" / "thesis.txt").write_text("mine")
        return take(images, labels)

    trainer._train = put
    trainer.fit()
    assert (tmp_path / "checkpoints" / "previous.1" / "thesis.txt").read_text() == "mine"
    assert "is previous.1 now" in caplog.text
    steps = [read_training_state(tmp_path / "checkpoints" / name)["step"] for name in ("previous", "last")]
    assert steps == [2, 4]


# ---- copies


def cp(*options: str):
    return lambda source, target: subprocess.run(["cp", *options, str(source), str(target)], check=True)


def without_links(source: Path, target: Path) -> None:
    """As rsync without -l, and buckets, copy: the files."""
    for path in source.rglob("*"):
        if path.is_file() and not any(p.is_symlink() for p in (path, *path.parents)):
            (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / path.relative_to(source))


COPIES = {"cp -r": cp("-r"), "cp -rL": cp("-rL"), "without links": without_links}


@pytest.mark.parametrize("way", COPIES)
def test_every_copy_of_a_run_goes_on(four_steps, six_steps, tmp_path, capsys, caplog, way):
    caplog.set_level("INFO")
    copy = tmp_path / "copy"
    COPIES[way](four_steps, copy)
    before = content(copy)
    assert run_cli(capsys, *pretraining_command(copy, steps=4, **QUICK))[0] == 0
    assert "is finished: 4 steps" in caplog.text and content(copy) == before
    assert same(ViT.from_pretrained(copy / "checkpoints" / "last").state_dict(), weights(four_steps))
    assert run_cli(capsys, *pretraining_command(copy, steps=6, **QUICK))[0] == 0
    assert "resumed from step 4" in caplog.text
    assert same_runs(copy, six_steps)


def test_a_last_that_is_a_link_is_replaced_and_what_it_names_stays(four_steps, tmp_path):
    """Checkpoints moved to another disk, say."""
    run, disk = shutil.copytree(four_steps, tmp_path / "run"), tmp_path / "disk"
    shutil.move(run / "checkpoints" / "last", disk)
    (run / "checkpoints" / "last").symlink_to(disk)
    before = content(disk)
    assert train(digits(run, steps=10, **QUICK))["steps"] == 10  # three saves
    assert content(disk) == before and not (run / "checkpoints" / "last").is_symlink()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["last", "previous"]


def test_a_run_whose_checkpoints_are_gone_does_not_begin_again_over_the_rest(four_steps, tmp_path, capsys):
    run = shutil.copytree(four_steps, tmp_path / "run")
    (run / "checkpoints" / "last").rename(run / "checkpoints" / "best")
    shutil.rmtree(run / "checkpoints" / "previous")
    before = content(run)
    assert run_cli(capsys, *pretraining_command(run, steps=4, **QUICK))[0] == 0  # it is finished
    code, _, err = run_cli(capsys, *pretraining_command(run, steps=6, **QUICK))
    assert code == 2 and f"but checkpoints/best; --resume {run}/checkpoints/best goes on from it" in err
    assert content(run) == before
    shutil.rmtree(run / "checkpoints")
    code, _, err = run_cli(capsys, *pretraining_command(run, steps=6, **QUICK))
    assert code == 2 and "holds a finished run, but not its checkpoints/last" in err


def test_weights_in_the_folder_that_they_would_be_removed_from_are_refused(four_steps, tmp_path, capsys):
    run = shutil.copytree(four_steps, tmp_path / "run")
    before = content(run)
    settings = dict(steps=2, **QUICK)
    for kept, code in (("last", 2), ("mine", 0)):  # which would not be removed
        given = run / "checkpoints" / kept
        command = [*pretraining_command(run, "never", **settings), "--weights", given]
        result, _, err = run_cli(capsys, *command)
        assert result == code and ("is in --output, where it would be replaced" in err) == (code == 2)
        if code:
            assert content(run) == before
            shutil.copytree(given, run / "checkpoints" / "mine")


# ---- where a run can be written


def test_places_that_cannot_hold_a_run_are_named(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for place, said in (
        ("file", "is a file; give a folder"),
        ("file/run/deeper", f"as {tmp_path / 'file'} is no folder"),
        ("link", "is a link to nothing"),
    ):
        code, _, err = run_cli(capsys, *pretraining_command(tmp_path / place, steps=2))
        assert code == 2 and err.count("\n") == 1 and said in err
    assert not (tmp_path / "nothing").exists()


def test_a_folder_behind_a_link_is_as_good(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "far")
    train(digits(tmp_path / "run", steps=2, **QUICK))
    assert (tmp_path / "far" / "checkpoints" / "last" / "model.safetensors").exists()


def test_a_read_only_folder_is_refused():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        pid = os.fork()
        if not pid:  # as a user who may read the folder alone
            if os.getuid() == 0:
                os.setuid(65534)
            with contextlib.suppress(BaseException):
                for path in (Path(folder), Path(folder) / "run"):
                    with pytest.raises(InputError, match="written to"):
                        run_folder.check_output(path)
                os._exit(0)
            os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0


# ---- killed while saving


def write_checkpoint(run: Path, step: int) -> None:
    """The calls of a save, with a few bytes for tensors."""
    work = run_folder.begin_checkpoint(run)
    (work / "model.safetensors").write_text(str(step))
    (work / "state").mkdir()
    (work / "state" / "state.safetensors").write_text(str(step))
    (work / "state" / "state.json").write_text(str(step))
    run_folder.keep_as_last(work)


def steps_of(run: Path) -> dict[str, set]:
    """The step that each file of each checkpoint is of: one, where it is whole."""
    folders = [path for path in (run / "checkpoints").iterdir() if not path.name.startswith(".")]
    return {path.name: {file.read_text() for file in path.rglob("*") if file.is_file()} for path in folders}


def die(work: Path, killed_at: int) -> int:
    """The exit code of a process that saves step 3 and is killed (99) at this call of the file system, if it comes."""
    calls = "open os.rename os.remove os.rmdir os.mkdir shutil.rmtree ctypes.dlopen os.listdir os.scandir".split()
    pid = os.fork()
    if not pid:
        count = 0

        def hook(event, _):
            nonlocal count
            count += event in calls
            if count == killed_at:
                os._exit(99)

        sys.addaudithook(hook)
        write_checkpoint(work, 3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("exchangeable", [True, False], ids=["names exchanged", "two renames"])
def test_a_kill_at_every_point_of_a_save_leaves_a_whole_checkpoint(tmp_path, monkeypatch, exchangeable):
    if not exchangeable:
        monkeypatch.setattr(run_folder, "exchange", lambda a, b: False)
    template, work, points = tmp_path / "template", tmp_path / "work", 0
    for step in (1, 2):
        write_checkpoint(template, step)
    assert steps_of(template) == dict(last={"2"}, previous={"1"})
    seen, code = [], 99
    while code == 99:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(template, work)
        points += 1
        code = die(work, points)
        kept = run_folder.find_checkpoint(work)
        seen.append((kept.name, *(steps := steps_of(work))[kept.name]))
        assert all(len(of) == 1 and len(list((work / "checkpoints" / k).rglob("*"))) == 4 for k, of in steps.items())
        write_checkpoint(work, 4)
        assert steps_of(work).keys() == {"last", "previous"} and steps_of(work)["last"] == {"4"}
        assert len(list((work / "checkpoints").iterdir())) == 2  # nothing is left behind
    assert code == 0 and points > 20
    expected = [("last", "2"), ("last", "3")] if exchangeable else [("last", "2"), ("previous", "2"), ("last", "3")]
    assert list(dict.fromkeys(seen)) == expected
