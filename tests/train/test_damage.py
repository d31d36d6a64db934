"""Damaged files of a run: one line that names the file, or the run goes on; nothing is touched, nothing is lost."""

import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from commands import run_cli
from runs import QUICK, content, digits, pretraining_command, same_runs
from safetensors.torch import load_file, save_file

from vitfast import InputError
from vitfast.train.log import read_metrics
from vitfast.train.resume import read_training_state
from vitfast.train.trainer import train

RUN_FILES = ["config.yaml", "metrics.csv", "summary.json", "vitfast.lock", "checkpoints", "tensorboard"]
LAST = [f"checkpoints/last/{name}" for name in ("config.json", "model.safetensors", "state")]
LAST += [f"checkpoints/last/state/{name}" for name in ("state.json", "state.safetensors")]
DAMAGES = ("cut", "random", "empty", "folder", "gone")


@pytest.fixture(scope="module")
def unfinished(four_steps, tmp_path_factory) -> Path:
    """The run of four steps before its last two."""
    run = shutil.copytree(four_steps, tmp_path_factory.mktemp("unfinished") / "run")
    (run / "summary.json").unlink()
    shutil.rmtree(run / "checkpoints" / "last")
    (run / "checkpoints" / "previous").rename(run / "checkpoints" / "last")
    return run


MANY = dict(sizes="16:40", tokens_per_step=350, steps=2)


@pytest.fixture(scope="module")
def many_sizes(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("many") / "run"
    train(digits(run, **MANY))
    return run


def damage(path: Path, how: str, rng: random.Random) -> bool:
    """Damages a file, or puts something in the place of a folder; False where this says nothing new."""
    if path.is_dir():
        if how not in ("random", "gone"):
            return False
        shutil.rmtree(path)
        if how == "random":
            path.write_bytes(rng.randbytes(30))
        return True
    if how in ("cut", "gone") and not path.exists():
        return False
    old = path.read_bytes() if path.exists() else b""
    path.unlink(missing_ok=True)
    if how == "folder":
        path.mkdir()
    elif how != "gone":
        path.write_bytes(dict(cut=old[: len(old) // 2], random=rng.randbytes(300), empty=b"")[how])
    return True


@pytest.mark.slow(8)
@pytest.mark.parametrize("state", ["four_steps", "unfinished"])
def test_damaged_files_end_in_one_line_or_in_a_run_that_goes_on(request, tmp_path, capsys, state):
    rng, refused, done, source = random.Random(0), 0, 0, request.getfixturevalue(state)
    run = tmp_path / "run"
    command = pretraining_command(run, steps=4, **QUICK)
    for name in RUN_FILES + LAST:
        for how in DAMAGES:
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(source, run, ignore=shutil.ignore_patterns("previous"))
            if not damage(run / name, how, rng):
                continue
            before = content(run)
            code, _, err = run_cli(capsys, *command)
            if code:
                assert code in (1, 2) and err.startswith("vitfast: error: ") and err.count("\n") == 1, (name, how, err)
                assert str(run) in err and content(run) == before, (name, how)
                refused += 1
            else:
                assert json.loads((run / "summary.json").read_text())["steps"] == 4, (name, how)
                done += 1
    assert refused >= 6 and done >= 9


def without(start: str):
    return lambda values: {name: value for name, value in values.items() if not name.startswith(start)}


def packed(**content):
    """A run on images of many sizes that says this of its place among them."""
    return lambda record: record | dict(packing=content)


NO_FIT, NO_PLACE = "does not fit.*", "does not say where its images of many sizes are .*--resume never"
RECORDS = [
    (lambda record: [], "is damaged"),
    (lambda record: record | dict(step="2"), "is damaged"),
    (lambda record: record | dict(step=-1), "is damaged"),
    (lambda record: record | dict(seconds=None), "is damaged"),
    (lambda record: record | dict(settings=[]), "is damaged"),
    (lambda record: record | dict(data={}), "is damaged"),
    (lambda record: record | dict(data=dict(classes=[1, None])), "is not what"),
    (without("settings"), "written by an earlier vitfast.*--weights"),
    (lambda record: {"dict": [["step", {"value": 3}]]}, "written by an earlier vitfast.*--weights"),  # so it was
    (without("optimizer.param_groups"), NO_FIT),
    (lambda record: record | {"optimizer.param_groups.elsewhere.lr": 1.0}, NO_FIT),
]
PLACES = [without("packing"), packed(), packed(progress=dict(position="x")), packed(progress=None, patches=1)]
STATES = [
    (without("model.norm.weight"), "other tensors: norm.weight"),
    (without("ema.head.bias"), "saved ema has other tensors: head.bias"),
    (without("model."), "other tensors"),
    (lambda tensors: tensors | {"model.more": torch.zeros(1)}, "other tensors: more"),
    (lambda tensors: tensors | {"model.norm.weight": torch.zeros(3)}, ""),
    (lambda tensors: tensors | {"optimizer.state.norm.weight.exp_avg": torch.zeros(3)}, "expected \\(64,\\)"),
    (without("optimizer.state.norm.weight.exp_avg"), "state of norm.weight is not whole"),
]
WRONG = [("unfinished", "state.json", *row) for row in RECORDS]
WRONG += [("many_sizes", "state.json", change, NO_PLACE) for change in PLACES]
WRONG += [("unfinished", "state.safetensors", change, NO_FIT + said) for change, said in STATES]


@pytest.mark.parametrize("source, name, change, said", WRONG)
def test_a_training_state_of_other_content_is_refused_in_one_line(request, tmp_path, source, name, change, said):
    run = shutil.copytree(request.getfixturevalue(source), tmp_path / "run")
    path = run / "checkpoints" / "last" / "state" / name
    if name == "state.json":
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
    else:
        save_file(change(load_file(path)), path, metadata={"step": "2"})
    fields = QUICK if source == "unfinished" else MANY
    with pytest.raises(InputError, match=said) as error:
        train(digits(run, **fields | dict(steps=4)))
    assert "\n" not in str(error.value)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def of_previous(path: Path) -> None:
    """The same file or folder of the checkpoint before."""
    other = Path(str(path).replace("last", "previous"))
    shutil.copytree(other, path, dirs_exist_ok=True) if path.is_dir() else shutil.copyfile(other, path)


BAD = {
    "state.safetensors cut": ("state/state.safetensors", cut, "is damaged"),
    "state.json {}": ("state/state.json", lambda path: path.write_text("{}"), "is damaged"),
    "state.json of other names": ("state/state.json", lambda path: path.write_text('{"step": 4}'), "an earlier"),
    "state.json cut": ("state/state.json", cut, "is damaged"),
    "another step's state.json": ("state/state.json", of_previous, "is of step 2, state.safetensors of 4"),
    "no model": ("model.safetensors", Path.unlink, "is damaged"),
    "model cut": ("model.safetensors", cut, "is damaged"),
    "another step's model": ("model.safetensors", of_previous, "is not the model of step 4"),
    "another step's state": ("state", of_previous, "is not the model of step 2"),
}


@pytest.mark.parametrize("bad", BAD)
def test_the_checkpoint_before_a_damaged_one_is_named_and_goes_on(four_steps, six_steps, tmp_path, capsys, bad):
    run = shutil.copytree(four_steps, tmp_path / "run")
    name, harm, said = BAD[bad]
    harm(run / "checkpoints" / "last" / name)
    before = content(run)
    command = pretraining_command(run, steps=6, **QUICK)
    code, _, err = run_cli(capsys, *command)
    assert code == 2 and err.count("\n") == 1 and said in err and content(run) == before
    advice = re.search(r"--resume \S+(?= goes on from the one before it)", err)[0].split()
    assert advice[1] == str(run / "checkpoints" / "previous")
    assert run_cli(capsys, *command, *advice)[0] == 0
    assert same_runs(run, six_steps)


def test_where_no_checkpoint_is_whole_the_run_can_only_begin_again(four_steps, tmp_path, capsys):
    run = shutil.copytree(four_steps, tmp_path / "run")
    (run / "checkpoints" / "last" / "state" / "state.json").write_text("{}")
    (run / "checkpoints" / "previous" / "model.safetensors").unlink()
    command = pretraining_command(run, steps=6, **QUICK)
    code, _, err = run_cli(capsys, *command)
    assert code == 2 and "--resume never" in err and "previous" not in err
    assert run_cli(capsys, *command, "--resume", "never")[0] == 0


@pytest.mark.parametrize("fields", [dict(objective="masked"), dict(model="timm:test_resnet")])
def test_the_model_beside_a_state_is_compared_whatever_is_trained(tmp_path, fields):
    sizes = dict(img_size=16, batch_size=4, train_images=8, steps=2, save_every=1)
    train(digits(tmp_path / "run", **sizes, **fields))
    last, previous = (tmp_path / "run" / "checkpoints" / name for name in ("last", "previous"))
    assert read_training_state(last)["step"] == 2
    shutil.copyfile(previous / "model.safetensors", last / "model.safetensors")
    with pytest.raises(InputError, match="model.safetensors is not the model of step 2"):
        read_training_state(last)


def test_lines_of_metrics_csv_that_are_none_are_left_out_and_kept_aside(unfinished, tmp_path, caplog):
    run = shutil.copytree(unfinished, tmp_path / "run")
    path = run / "metrics.csv"
    header, first, *_ = path.read_text().splitlines()
    bad = ['"', "x" * 200_000, "\0\0", "1,2,3", "nan" + first]
    bad += [first.replace("train", "test"), first.replace("2", "two", 1)]
    text = "\n".join([header, *bad, first, first[: len(first) // 2]])
    path.write_bytes(text.encode() + b"\xff\xfe")
    assert [record["step"] for record in read_metrics(run)] == [2]
    assert train(digits(run, steps=4, **QUICK))["finished"]
    assert f"{path}: {len(bad) + 1} lines cannot be read; they are left out, and kept in metrics.csv.1" in caplog.text
    assert (run / "metrics.csv.1").read_bytes() == text.encode() + b"\xff\xfe"
    kept = [(record["step"], record["split"]) for record in read_metrics(run)]
    assert kept == [(2, "train"), (4, "train"), (4, "val")]
    os.remove(path)
    assert read_metrics(run) == []
