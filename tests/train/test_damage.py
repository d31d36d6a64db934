"""Damaged files of a run: one line that names the file, or the run goes on; nothing is touched, nothing is lost."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from commands import run_cli
from runs import content, digits, pretraining_command, training_tensors
from safetensors.torch import load_file, save_file

from vitfast import InputError
from vitfast.train.log import read_metrics
from vitfast.train.trainer import train

SIZES = dict(img_size=16, batch_size=16, save_every=2)
QUICK = dict(**SIZES, ema_decay=0.9)
RUN_FILES = ["config.yaml", "metrics.csv", "summary.json", "vitfast.lock", "checkpoints", "tensorboard"]
LAST = [f"checkpoints/last/{name}" for name in ("config.json", "model.safetensors", "state")]
LAST += [f"checkpoints/last/state/{name}" for name in ("state.json", "state.safetensors")]
DAMAGES = ("cut", "random", "empty", "folder", "gone")


@pytest.fixture(scope="module")
def runs_(tmp_path_factory) -> dict[str, Path]:
    """A finished run of four steps, and the same before its last two."""
    folder = tmp_path_factory.mktemp("runs")
    train(digits(folder / "finished", steps=4, **QUICK))
    unfinished = shutil.copytree(folder / "finished", folder / "unfinished")
    (unfinished / "summary.json").unlink()
    shutil.rmtree(unfinished / "checkpoints" / "last")
    (unfinished / "checkpoints" / "previous").rename(unfinished / "checkpoints" / "last")
    return dict(finished=folder / "finished", unfinished=unfinished)


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
@pytest.mark.parametrize("state", ["finished", "unfinished"])
def test_damaged_files_end_in_one_line_or_in_a_run_that_goes_on(runs_, tmp_path, capsys, state):
    rng, refused, done = random.Random(0), 0, 0
    command = pretraining_command(tmp_path / "run", steps=4, **SIZES)
    for name in RUN_FILES + LAST:
        for how in DAMAGES:
            run = tmp_path / "run"
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(runs_[state], run, ignore=shutil.ignore_patterns("previous"))
            if not damage(run / name, how, rng):
                continue
            before = content(run)
            code, _, err = run_cli(capsys, *command, "--set", "ema_decay=0.9")
            if code:
                assert code in (1, 2) and err.startswith("vitfast: error: ") and err.count("\n") == 1, (name, how, err)
                assert str(run) in err and content(run) == before, (name, how)
                refused += 1
            else:
                summary = json.loads((run / "summary.json").read_text())
                assert summary["steps"] == 4, (name, how)
                done += 1
    assert refused >= 6 and done >= 9


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda state: [], "is damaged"),
        (lambda state: state | dict(step="2"), "is damaged"),
        (lambda state: state | dict(step=-1), "is damaged"),
        (lambda state: state | dict(seconds=None), "is damaged"),
        (lambda state: state | dict(settings=[]), "is damaged"),
        (lambda state: state | dict(data={}), "is damaged"),
        (lambda state: state | dict(data=dict(classes=[1, None])), "is not what"),
        (lambda state: {k: v for k, v in state.items() if k != "settings"}, "an earlier vitfast"),
        (lambda state: {k: v for k, v in state.items() if not k.startswith("optimizer.param_groups")}, "does not fit"),
        (lambda state: state | {"optimizer.param_groups.elsewhere.lr": 1.0}, "does not fit"),
    ],
)
def test_a_state_json_with_other_content(runs_, tmp_path, change, said):
    run = shutil.copytree(runs_["unfinished"], tmp_path / "run")
    path = run / "checkpoints" / "last" / "state" / "state.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(InputError, match=said) as error:
        train(digits(run, steps=4, **QUICK))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda t: t.pop("model.norm.weight"), "other tensors: norm.weight"),
        (lambda t: t.pop("ema.head.bias"), "saved ema has other tensors: head.bias"),
        (lambda t: t.update({"model.more": torch.zeros(1)}), "other tensors: more"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), "does not fit"),
        (lambda t: t.update({"optimizer.state.norm.weight.exp_avg": torch.zeros(3)}), "expected \\(64,\\)"),
        (lambda t: t.pop("optimizer.state.norm.weight.exp_avg"), "state of norm.weight is not whole"),
        (lambda t: [t.pop(k) for k in list(t) if k.startswith("model.")], "other tensors"),
    ],
)
def test_a_state_with_other_tensors(runs_, tmp_path, change, said):
    run = shutil.copytree(runs_["unfinished"], tmp_path / "run")
    path = run / "checkpoints" / "last" / "state" / "state.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(InputError, match=f"does not fit.*{said}" if said != "does not fit" else said):
        train(digits(run, steps=4, **QUICK))


def test_the_checkpoint_before_a_damaged_one_is_named_and_goes_on(runs_, tmp_path, capsys):
    run = shutil.copytree(runs_["finished"], tmp_path / "run")
    path = run / "checkpoints" / "last" / "state" / "state.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    command = [*pretraining_command(run, steps=6, **SIZES), "--set", "ema_decay=0.9"]
    code, _, err = run_cli(capsys, *command)
    previous = run / "checkpoints" / "previous"
    assert code == 2 and f"--resume {previous} goes on from the one before it" in err
    assert run_cli(capsys, *command, "--resume", previous)[0] == 0
    train(digits(tmp_path / "whole", steps=6, **QUICK))
    mine, whole = training_tensors(run), training_tensors(tmp_path / "whole")
    assert all(torch.equal(mine[name], value) for name, value in whole.items())


def test_lines_of_metrics_csv_that_are_none_are_left_out_and_kept_aside(runs_, tmp_path, caplog):
    run = shutil.copytree(runs_["unfinished"], tmp_path / "run")
    path = run / "metrics.csv"
    header, first, *_ = path.read_text().splitlines()
    bad = [
        '"',
        "x" * 200_000,
        "\0\0",
        "1,2,3",
        first.replace("train", "test"),
        first.replace("2", "two", 1),
        "nan" + first,
    ]
    text = "\n".join([header, *bad, first, first[: len(first) // 2]])
    path.write_bytes(text.encode() + b"\xff\xfe")
    assert [record["step"] for record in read_metrics(run)] == [2]
    assert train(digits(run, steps=4, **QUICK))["finished"]
    assert f"{path}: {len(bad) + 1} lines cannot be read; they are left out, and kept in metrics.csv.1" in caplog.text
    assert (run / "metrics.csv.1").read_bytes() == text.encode() + b"\xff\xfe"
    assert [(record["step"], record["split"]) for record in read_metrics(run)] == [
        (2, "train"),
        (4, "train"),
        (4, "val"),
    ]
    os.remove(path)
    assert read_metrics(run) == []
