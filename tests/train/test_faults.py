"""What can happen to a run folder, and what the same command says then: one line that names the remedy, or it goes on.

A refusal touches nothing; a run that goes on ends bit for bit as one that nothing has happened to.
"""

import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from commands import picture, run_cli
from runs import FOLDER, QUICK, content, digits, pretraining_command, records, same_runs
from safetensors.torch import load_file, save_file
from speed import first

from vitfast.train.log import read_metrics
from vitfast.train.trainer import train

MANY = dict(sizes="16:40", tokens_per_step=350, steps=2)
# The settings of the command that comes after the fault, by what there was before it.
SETTINGS = dict(nothing=dict(steps=2), four=QUICK | dict(steps=6), many_sizes=MANY | dict(steps=4), on_folder=FOLDER)


@pytest.fixture
def nothing(tmp_path) -> Path:
    (tmp_path / "nothing" / "run").mkdir(parents=True)
    return tmp_path / "nothing"


@pytest.fixture
def four(four_steps) -> Path:
    """run/, finished after four steps, with checkpoints of steps 4 and 2."""
    return four_steps.parent


@pytest.fixture(scope="module")
def many_sizes(tmp_path_factory) -> Path:
    """run/, on images of many sizes, with one checkpoint."""
    root = tmp_path_factory.mktemp("many")
    train(digits(root / "run", **MANY))
    return root


# ---- faults: functions of the run folder, beside which everything else is


def put(name: str, text: str = "mine"):
    def harm(run):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)

    return harm


def cut(name: str):
    return lambda run: (run / name).write_bytes((run / name).read_bytes()[: (run / name).stat().st_size // 2])


def change_record(change, name="checkpoints/last/state/state.json"):
    return lambda run: (run / name).write_text(json.dumps(change(json.loads((run / name).read_text()))))


def change_tensors(change, name="checkpoints/last/state/state.safetensors"):
    return lambda run: save_file(change(load_file(run / name)), run / name, metadata={"step": "4"})


def without(start: str):
    return lambda values: {name: value for name, value in values.items() if not name.startswith(start)}


def of_previous(name: str):
    """The same file or folder of the checkpoint before."""

    def harm(run):
        source, target = (run / "checkpoints" / checkpoint / name for checkpoint in ("previous", "last"))
        shutil.copytree(source, target, dirs_exist_ok=True) if source.is_dir() else shutil.copyfile(source, target)

    return harm


def only_best(run):
    (run / "checkpoints" / "last").rename(run / "checkpoints" / "best")
    shutil.rmtree(run / "checkpoints" / "previous")


def nothing_happens(run):
    pass


def no_checkpoints(run):
    shutil.rmtree(run / "checkpoints")


def both_damaged(run):
    (run / "checkpoints" / "last" / "state" / "state.json").write_text("{}")
    (run / "checkpoints" / "previous" / "model.safetensors").unlink()


def each_split(harm):
    return lambda run: [harm(run.parent / "data" / split) for split in ("train", "val")]


def add_class(split):
    (split / "fox").mkdir()
    picture(7).save(split / "fox" / "0.png")


def swap_images(run):
    """A cat is a dog now, and a dog a cat: there are as many of each as before."""
    data = run.parent / "data" / "train"
    (data / "cat" / "0.png").rename(data / "dog" / "9.png")
    (data / "dog" / "0.png").rename(data / "cat" / "9.png")


def save_picture(name: str, size: int = 64):
    return lambda run: picture(77).resize((size, size)).save(run.parent / "data" / name)


# ---- what is refused: (the fault, what is said)

FOREIGN = "run/{} is damaged, or this run did not write it; move it away, or choose another --output"
SOMEBODYS = [
    ("config.yaml", "lr: 0.1\nmodel: mine\n"),
    ("metrics.csv", "date,value\n1,2\n"),
    ("summary.json", '{"result": 1}'),
    ("report.html", "<html>mine"),
    *((name, "mine") for name in ("checkpoints", "tensorboard", "vitfast.lock/mine", "checkpoints/.writing")),
    *((f"checkpoints/{name}", "mine") for name in ("last", "last/weights.pt", "previous/weights.pt")),
    *((f"checkpoints/{name}/state/thesis.txt", "mine") for name in (".writing", ".removing")),
    *((f"{name}/thesis.txt", "mine") for name in (".best", "best")),
]
STATE = "checkpoints/last/state/"
DAMAGED = [
    (cut(STATE + "state.safetensors"), ""),
    (cut(STATE + "state.json"), ""),  # others: any damage of any file, below
    (lambda run: (run / "checkpoints/last/model.safetensors").unlink(), "No such file"),
    (of_previous("state/state.json"), "state.json is of step 2, state.safetensors of 4"),  # copied while it was written
    (of_previous("model.safetensors"), "is not the model of step 4"),
    (of_previous("state"), "is not the model of step 2"),
    (change_record(lambda record: {}), "lacks 'step'"),
    (change_record(lambda record: record | dict(step=-1)), "other types"),
    (change_record(lambda record: record | dict(settings=[])), "other types"),
    (change_record(lambda record: record | dict(data={})), "lacks 'classes'"),
    (change_record(without("optimizer.param_groups")), ""),
    (change_tensors(without("model.norm.weight")), "saved model has other tensors: norm.weight"),
    (change_tensors(without("ema.head.bias")), "saved ema has other tensors: head.bias"),
    (change_tensors(lambda tensors: tensors | {"model.more": torch.zeros(1)}), "other tensors: more"),
    (change_tensors(lambda tensors: tensors | {"model.norm.weight": torch.zeros(3)}), "norm.weight"),
    (change_tensors(lambda t: t | {"optimizer.state.norm.weight.exp_avg": torch.zeros(3)}), "norm.weight.exp_avg"),
    (
        change_tensors(without("optimizer.state.norm.weight.exp_avg")),
        "parameter: no norm.weight.exp_avg, norm.weight.exp",
    ),
    (change_tensors(without("optimizer.state.norm.weight.")), "parameter: no norm.weight.exp_avg, norm.weight.exp"),
    (change_tensors(without("optimizer.state.")), "every parameter: no .*.state"),
    (change_record(without("optimizer.stateless")), "state.json lacks 'stateless'"),
    (change_tensors(without("optimizer.state.norm.weight.step")), "every parameter: no norm.weight.step"),
    (change_tensors(lambda t: t | {"optimizer.state.more.exp_avg": torch.zeros(3)}), "optimiser's state.more.exp_avg"),
]
PLACES = [{}, dict(packing={}), dict(packing=dict(progress={})), dict(packing=dict(progress=None, patches=1))]
OTHER_SETTINGS = [
    (dict(lr=0.5), "lr: 0.002 there, 0.5 now"),
    (dict(lr=0.5, steps=4), "lr: 0.002 there, 0.5 now"),  # of a finished run
    (dict(resume="run", output="new", model="Ti/8"), "model: Nano/8 there, Ti/8 now"),
    (dict(resume="alone", output="new", seed=3, amp="bf16"), "seed: 0 there, 3 now; amp: auto there, bf16 now"),
    (dict(resume="run/checkpoints/previous", output="new", auto_augment="3a"), "auto_augment: unset there, 3a now"),
    (dict(exif_orientation=False), "exif_orientation: True there, False now"),
    (dict(drop_path=0.1, clip_norm=None), "clip_norm: 1.0 there, unset now; drop_path: 0.0 there, 0.1 now"),
    (MANY | dict(steps=6), "sizes: unset there, 16:40 now; tokens_per_step: unset there, 350 now"),
]
OTHER_DATA = [
    (each_split(lambda split: (split / "dog").rename(split / "dingo")), "classes: dog gone, dingo new"),
    (each_split(add_class), "classes: fox new, train_images: 9 there, 10 now, val_images: 9 there, 10 now"),
    (save_picture("train/cat/new.png"), "train_images: 9 there, 10 now"),
    (lambda run: Path("data/val/eel/0.png").unlink(), "val_images: 9 there, 8 now"),
    (swap_images, "train_images: files renamed or moved"),
    (save_picture("val/cat/0.png", 50), "val_images: files of other sizes"),
]


def refusals():
    """Every row of the tables above, and those that are alone: (what there was, the fault, what is said, settings)."""
    for name, text in SOMEBODYS:
        named = re.match(r"checkpoints(/[^/]+)?|[^/]+", name)[0]
        for resume in ("auto", "never")[: 2 if name == "checkpoints/last" else 1]:
            fields = dict(early_stop=2, hold_out=0.1) if "best" in name else {}
            yield "nothing", put(name, text), FOREIGN.format(named), fields | dict(resume=resume)
    neither = "run/checkpoints/last cannot be read, as it is damaged or does not fit .*{}.*"
    before = neither + "--resume run/checkpoints/previous goes on from the one before it"
    for place in PLACES:
        harm = change_record(lambda record, place=place: without("packing")(record) | place)
        yield "many_sizes", harm, neither.format("many sizes") + "--resume never", {}
    for fields, said in OTHER_SETTINGS:
        told = f"holds a run with other settings .{said}.; .*--weights .*--resume never"
        yield "four", lambda run: shutil.copytree(run / "checkpoints/last", "alone"), told, fields
    for harm, said in OTHER_DATA:
        told = f"is not what run/checkpoints/last was trained on .{said}.; restore it, .*--weights run/checkpoints/last"
        yield "on_folder", harm, told, {}
    yield "on_folder", harm, told, dict(resume="run/checkpoints/last")
    no_class = change_record(lambda record: record | dict(data=dict(classes=[1, None])))
    of_another = put("vitfast.lock", json.dumps(dict(host="elsewhere", pid=7)))
    file = put("../file")
    yield "four", no_class, "classes: None gone", {}
    yield "four", both_damaged, neither.format("") + "--resume never.*--weights run/checkpoints/last", {}
    yield "four", only_best, "run, but not its checkpoints/last; --resume run/checkpoints/best goes on", {}
    yield "four", no_checkpoints, "run, but not its checkpoints/last; bring it back", {}
    yield "four", lambda run: shutil.copytree(run, "other"), "run holds a run already", dict(resume="other")
    yield "four", nothing_happens, "--resume gone: no checkpoint there", dict(resume="gone", output="new")
    for kept in ("checkpoints/last", "checkpoints/previous", "best"):
        fields = dict(resume="never", weights=f"run/{kept}")
        yield "four", nothing_happens, f"--weights run/{kept} is in --output, .* replaced; choose another", fields
    yield "four", of_another, "run is in use by process 7 on elsewhere; .*remove run/vitfast.lock", {}
    yield (
        "nothing",
        file,
        "--output file cannot be written to: file is no folder that can be; choose another",
        dict(output="file"),
    )
    yield "nothing", file, "nothing/file is no folder that can be", dict(output="file/run/deeper")
    yield "nothing", lambda run: Path("link").symlink_to("gone"), "link is no folder that can be", dict(output="link")
    for harm, said in DAMAGED:
        yield "four", harm, before.format(said), {}


@pytest.mark.quick(6)
@pytest.mark.parametrize("source, harm, said, fields", first(8 - len(DAMAGED), refusals()))
def test_a_fault_is_one_line_and_nothing_is_touched(request, tmp_path, monkeypatch, capsys, source, harm, said, fields):
    root = shutil.copytree(request.getfixturevalue(source), tmp_path / source, dirs_exist_ok=True)
    monkeypatch.chdir(root)
    harm(Path("run"))
    before = content(root)
    settings = SETTINGS[source] | fields
    code, out, err = run_cli(capsys, *pretraining_command(settings.pop("output", "run"), **settings))
    assert code == 2 and not out and err.startswith("vitfast: error: ") and err.count("\n") == 1, err
    assert re.search(said, err), err
    assert content(root) == before


# ---- what goes on: (the fault, what is said, other settings of the command)


def leave_parts(run):
    """What a kill leaves of one checkpoint that is written and one that is removed."""
    last, writing = run / "checkpoints" / "last", run / "checkpoints" / ".writing"
    shutil.copytree(last, writing)
    for folder in (writing, writing / "state"):
        (folder / ".vitfast-br1rrj2p").mkdir()
        (folder / ".vitfast-br1rrj2p" / ".tmpciz5Ct").write_bytes(b"half")  # safetensors' name until a file is whole
    shutil.copytree(last / "state", run / "checkpoints" / ".removing" / "state")


def between_two_renames(run):
    shutil.rmtree(run / "checkpoints" / "previous")
    (run / "checkpoints" / "last").rename(run / "checkpoints" / "previous")


def last_on_another_disk(run):
    shutil.move(run / "checkpoints" / "last", "disk")
    (run / "checkpoints" / "last").symlink_to(Path("disk").absolute())


def run_on_another_disk(run):
    run.rename("disk")
    run.symlink_to("disk")


def copy_files_alone(run):
    """As rsync without -l, and buckets, copy."""
    run.rename("original")
    for path in Path("original").rglob("*"):
        if path.is_file() and not any(p.is_symlink() for p in (path, *path.parents)):
            (target := run / path.relative_to("original")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


GOES_ON = [
    (
        nothing_happens,
        "resumed from step 4",
        dict(save_every=1, eval_batch_size=100, non_finite="skip", about="another"),
    ),
    (nothing_happens, "resumed from step 2", dict(resume="run/checkpoints/previous")),
    (nothing_happens, "resumed from step 4", dict(resume="run", output="new")),
    (leave_parts, "resumed from step 4", {}),
    (between_two_renames, "resumed from step 4", {}),
    (last_on_another_disk, "resumed from step 4", dict(save_every=1)),
    (run_on_another_disk, "resumed from step 4", {}),
    (copy_files_alone, "resumed from step 4", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize("harm, said, fields", first(3, GOES_ON))
def test_a_run_goes_on_bit_for_bit(four, six_steps, tmp_path, monkeypatch, capsys, caplog, harm, said, fields):
    caplog.set_level("INFO")
    monkeypatch.chdir(shutil.copytree(four, tmp_path / "root"))
    harm(Path("run"))
    moved = content(Path("disk")) if harm is last_on_another_disk else {}
    settings = SETTINGS["four"] | fields
    output = Path(settings.pop("output", "run"))
    code, _, err = run_cli(capsys, *pretraining_command(output, **settings))
    assert code == 0 and said in caplog.text, err
    assert same_runs(output, six_steps) and records(output, "val", "step")[-1] == "6"
    checkpoints = {path.name for path in (output / "checkpoints").iterdir()}
    assert {"last"} <= checkpoints <= {"last", "previous"} and not (output / "checkpoints" / "last").is_symlink()
    assert not moved or content(Path("disk")) == moved


# ---- any damage of any file


RUN_FILES = ["config.yaml", "metrics.csv", "summary.json", "vitfast.lock", "checkpoints", "tensorboard"]
RUN_FILES += [f"checkpoints/last/{name}" for name in ("config.json", "model.safetensors", "state")]
RUN_FILES += [f"checkpoints/last/state/{name}" for name in ("state.json", "state.safetensors")]


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


@pytest.mark.slow
@pytest.mark.parametrize("finished", [True, False])
def test_damaged_files_end_in_one_line_or_in_a_run_that_goes_on(four_steps, tmp_path, capsys, finished):
    rng, refused, done, run, source = random.Random(0), 0, 0, tmp_path / "run", four_steps
    if not finished:  # the run before its last two steps
        source = shutil.copytree(four_steps, tmp_path / "source")
        (source / "summary.json").unlink()
        shutil.rmtree(source / "checkpoints" / "last")
        (source / "checkpoints" / "previous").rename(source / "checkpoints" / "last")
    command = pretraining_command(run, steps=4, **QUICK)
    for name in RUN_FILES:
        for how in ("cut", "random", "empty", "folder", "gone"):
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


def test_lines_of_metrics_csv_that_are_none_are_left_out_and_kept_aside(four_steps, tmp_path, caplog):
    run = shutil.copytree(four_steps, tmp_path / "run")
    path = run / "metrics.csv"
    header, first, *_ = path.read_text().splitlines()
    bad = ['"', "x" * 200_000, "\0\0", "1,2,3", "nan" + first]
    bad += [first.replace("train", "test"), first.replace("2", "two", 1)]
    text = "\n".join([header, *bad, first, first[: len(first) // 2]]).encode() + b"\xff\xfe"
    path.write_bytes(text)
    assert [record["step"] for record in read_metrics(run)] == [2]
    assert train(digits(run, steps=6, **QUICK))["finished"]
    assert f"{path}: {len(bad) + 1} lines cannot be read; they are left out, and kept in metrics.csv.1" in caplog.text
    assert (run / "metrics.csv.1").read_bytes() == text
    kept = [(record["step"], record["split"]) for record in read_metrics(run)]
    assert kept == [(2, "train"), (6, "train"), (6, "val")]
    path.unlink()
    assert read_metrics(run) == []
