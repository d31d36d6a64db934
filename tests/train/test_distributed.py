"""Several processes are the same run as one: DDP, FSDP2, signals, and what ranks must have in common."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pictures
import PIL
import pytest
import torch
from checks import assert_close
from children import BF16, COMMON, CROPS, MANY_SIZES, SHARDS, SPOILED, compiled, every_run
from commands import refuses, run_cli
from processes import command_line, done, free_port, ranks
from runs import QUICK, digits, pretraining_command, records, same_runs, training_tensors, wait_for
from shards import files, shards

from vitfast.data.loader import open_data
from vitfast.data.samples import PADDING, stream_keys
from vitfast.errors import InputError
from vitfast.run.distributed import FAILED, Ranks, join, leave, run_facts
from vitfast.run.lock import LOCK, locked
from vitfast.train import trainer
from vitfast.train.resume import read_training_state
from vitfast.train.trainer import Trainer, TrainingError, train


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    """A run in one process."""
    run = tmp_path_factory.mktemp("one")
    train(digits(run, **COMMON))
    return run


def assert_same_training(one: Path, two: Path, but=()) -> None:
    """Tensors up to fp32 rounding, of which Adam's division makes the most; losses, and numbers of right answers."""
    a, b = training_tensors(one), training_tensors(two)
    assert a.keys() == b.keys()
    for name, value in a.items():
        if name.endswith("attn.qkv.bias") and "keys" in but:  # softmax takes away the gradient of a bias of keys
            value, b[name] = (torch.cat((bias.chunk(3)[0], bias.chunk(3)[2])) for bias in (value, b[name]))
        assert_close(b[name], value, atol=2e-5, rtol=1e-4, name=name)
    columns = ("step", "accuracy", "loss")
    mine, theirs = records(one, "train", *columns), records(two, "train", *columns)
    assert [row[:2] for row in mine] == [row[:2] for row in theirs]
    assert [float(row[2]) for row in mine] == pytest.approx([float(row[2]) for row in theirs], abs=1e-5)


@pytest.mark.slow
def test_two_ranks_equal_one_process(one, tmp_path):
    """Every run that needs two ranks, in one pair of processes: they take longer to start than to train."""
    root, alone = tmp_path / "two", tmp_path / "one"
    train(digits(root / "fsdp", **COMMON | dict(steps=3)))
    for split, count in (("train", 12), ("val", 8)):
        shards(root / "data", files(count), [split])
    pictures.folder(root / "files")
    for name in ("a", "b"):  # all eight are read at each step, by one rank or the other
        pictures.truncate(root / "files" / "train" / name / "0.jpg")
    said = done(ranks(2, every_run, str(root), f"wds/{root / 'data'}"))
    assert sum(text.count("\naccuracy ") + text.startswith("accuracy ") for text in said) == 1  # one rank speaks
    for parallel in ("ddp", "fsdp"):
        check_one_process(one, root / parallel)
        # Cut off: random numbers of each rank, momentum, average and the place in the second epoch.
        assert same_runs(root / f"whole {parallel}", root / f"broken {parallel}")
    check_many_sizes(alone / "many", root / "many")
    check_crops(alone / "crops", root)
    check_bf16(alone / "bf16", root / "bf16")
    assert sum("left out: the norm of the gradients of step 2 is nan" in text for text in said) == 1
    check_skipped(alone / "spoiled", root / "spoiled")
    check_shards(root / "shards", f"wds/{root / 'data'}")
    assert json.loads((root / "unreadable" / "summary.json").read_text())["unreadable_images"] == 2


def check_one_process(one: Path, two: Path) -> None:
    """DDP from the start; FSDP2 from step 3 of one process, whose whole state it shards."""
    assert_same_training(one, two)
    summary, alone = (json.loads((run / "summary.json").read_text()) for run in (two, one))
    assert summary["ranks"] == 2 and summary["val_images"] == alone["val_images"] == 360
    assert summary["parameters"] == alone["parameters"] and summary["accuracy"] == alone["accuracy"]
    assert summary["loss"] == pytest.approx(alone["loss"], abs=1e-5)


def check_many_sizes(one: Path, two: Path) -> None:
    train(digits(one, **MANY_SIZES))
    assert_same_training(one, two, but=["keys"])
    mine, theirs = (json.loads((run / "summary.json").read_text()) for run in (one, two))
    for name in ("sizes", "images_per_step", "patches_per_image", "epochs"):
        assert mine[name] == theirs[name]


def check_crops(one: Path, root: Path) -> None:
    """LeJEPA on two ranks has the statistics of all images, as in one process, and the same probes of features."""
    alone = train(digits(one, **CROPS))
    for parallel in ("ddp", "fsdp"):
        run = root / f"crops {parallel}"
        summary = json.loads((run / "summary.json").read_text())
        a, b = training_tensors(one), training_tensors(run)
        for name, value in a.items():
            assert_close(b[name], value, atol=2e-5, rtol=1e-4, name=name)
        columns = ("loss", "rank")
        mine, theirs = (np.array(records(each, "train", *columns), float) for each in (one, run))
        assert mine == pytest.approx(theirs, rel=1e-4)
        for name in ("accuracy", "knn", "rank"):
            assert summary[name] == pytest.approx(alone[name], abs=0.01)
        assert summary["val_images"] == alone["val_images"] == 360


def check_bf16(one: Path, two: Path) -> None:
    """Under autocast FSDP2 gathers parameters and reduces gradients in bf16; what it updates and saves stays fp32."""
    train(digits(one, **BF16))
    losses = [[float(loss) for loss in records(run, "train", "loss")] for run in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    mine, theirs = training_tensors(one), training_tensors(two)
    for name, value in theirs.items():
        assert value.dtype == torch.float32 and mine[name].dtype == torch.float32
        # Three steps of 1e-4 at most, whose direction bf16 can turn where a gradient is near zero; momenta to bf16's
        # rounding.
        limit = 6e-4 if name.startswith(("model.", "ema.")) else 0.1 * mine[name].abs().max().item() + 1e-6
        assert (value - mine[name]).abs().max() <= limit, name
    moved = [name for name in theirs if name.startswith("model.") and (theirs[name] - mine[name]).abs().max() > 0]
    assert moved  # bf16 gradients are not fp32 ones


def check_skipped(one: Path, two: Path) -> None:
    """A gradient that was not finite on one rank alone."""
    trainer = Trainer(digits(one, **SPOILED))
    update = trainer.train_step.optimizer.step
    trainer.train_step.scaler.step = lambda optimizer: None if trainer.step == 1 else update()
    trainer.fit()
    a, b = training_tensors(one), training_tensors(two)
    for name, value in a.items():
        assert_close(b[name], value, atol=2e-5, rtol=1e-4, name=name)


def check_shards(run: Path, data: str) -> None:
    """Every rank reads its own, and together they read the validation set once."""
    summary = json.loads((run / "summary.json").read_text())
    assert [summary[name] for name in ("ranks", "classes", "val_images", "steps")] == [2, 3, 8, 3]
    # One process with a worker, which count other shares of the images: the data is the same, and the run goes on.
    assert train(digits(run, data=data, workers=1, **SHARDS | dict(steps=4)))["steps"] == 4


def start(output: Path, **fields) -> list:
    return ranks(2, command_line, pretraining_command(output, **COMMON | fields))


@pytest.mark.long
def test_torchrun_starts_two_ranks(one, tmp_path):
    port = ["--nproc-per-node", "2", "--master-port", free_port()]
    command = [sys.executable, "-m", "torch.distributed.run", *port, "-m", "vitfast"]
    environment = os.environ | dict(OMP_NUM_THREADS="1")
    command += pretraining_command(tmp_path, **COMMON)
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0 and ran.stdout.count("accuracy ") == 1, ran.stderr
    assert_same_training(one, tmp_path)


@pytest.mark.long
def test_two_compiled_ranks_equal_one_process(one, tmp_path):
    """DDP around a compiled model; FSDP2 around compiled blocks, which share a graph."""
    done(ranks(2, compiled, str(tmp_path)))
    for parallel in ("ddp", "fsdp"):
        assert_same_training(one, tmp_path / parallel)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_one_rank_ends_all(tmp_path, number):
    """With a checkpoint of the step where all stop, or of one before the kill, which the others tell in one line."""
    run = tmp_path / "run"
    processes = start(run, steps=4000, save_every=2)
    wait_for(run / "checkpoints" / "last", *processes)
    processes[1].send_signal(number)
    _, said = processes[0].communicate()
    step = read_training_state(run / "checkpoints" / "last")["step"]
    assert step >= 2 and not (run / "summary.json").exists() and not (run / LOCK).exists() and "Traceback" not in said
    if number == signal.SIGTERM:
        assert [process.communicate() and process.returncode for process in processes] == [0, 0]
        assert f"stopped at step {step} of 4000" in said
    else:
        assert processes[0].returncode == 1
        assert said.splitlines()[-1].startswith("vitfast: error: another process of this run is gone")


def test_what_the_first_rank_cannot_do_ends_all(tmp_path):
    """Here: take a folder that is held."""
    with locked(tmp_path):
        processes = start(tmp_path)
        said = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 1]
    assert f"in use by process {os.getpid()}" in said[0] and "the first rank could not go on" in said[1]
    assert not any("Traceback" in text for text in said)


@pytest.mark.parametrize(
    "environment, said",
    [
        (dict(WORLD_SIZE="2"), "RANK must be a whole number from 0 to 1, and is not set"),
        (dict(WORLD_SIZE="2", RANK="x"), "RANK must be a whole number from 0 to 1, got 'x'"),
        (dict(WORLD_SIZE="2", RANK="2"), "RANK must be a whole number from 0 to 1, got '2'"),
        (dict(WORLD_SIZE="2", RANK="0", LOCAL_RANK="first"), "LOCAL_RANK must be a whole number"),
        (dict(WORLD_SIZE="2", RANK="0"), "MASTER_PORT must be a whole number from 0 to 65535, and is not set"),
        (dict(WORLD_SIZE="2", RANK="0", MASTER_PORT="29500"), "MASTER_ADDR is not set"),
        (dict(WORLD_SIZE="two"), "WORLD_SIZE must be a whole number from 1, got 'two'"),
        (dict(WORLD_SIZE="-1"), "WORLD_SIZE must be"),
    ],
    ids=str,
)
def test_an_environment_that_is_not_torchruns_is_told(tmp_path, monkeypatch, capsys, environment, said):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    refuses(capsys, said, *pretraining_command(tmp_path / "run", steps=1, **QUICK))
    assert not (tmp_path / "run").exists()


def test_a_rank_alone_is_the_first(tmp_path, monkeypatch, capsys):
    """RANK without WORLD_SIZE: something else on this machine uses the name."""
    monkeypatch.setenv("RANK", "3")
    code, out, _ = run_cli(capsys, *pretraining_command(tmp_path / "run", steps=1, **QUICK))
    assert code == 0 and out.startswith("accuracy ")


def test_an_error_of_one_rank_stops_all(tmp_path, monkeypatch):
    """The flag that ranks exchange before every step: here the other rank has failed."""
    trainer = Trainer(digits(tmp_path, **COMMON))
    next_batch = trainer._next

    def failing(*args):
        monkeypatch.setattr(Ranks, "agree", lambda self, flag: FAILED)
        return next_batch(*args)

    trainer._next = failing
    with pytest.raises(TrainingError, match="another rank could not go on"):
        trainer.fit()


def test_gradients_travel_once_a_step(tmp_path):
    """Three micro-batches, of which DDP reduces the last alone."""
    train_step = Trainer(digits(tmp_path, **COMMON | dict(accumulate=3))).train_step
    sizes, quiet = [], []
    train_step.runner.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    train_step.runner.no_sync = lambda: quiet.append(len(sizes)) or contextlib.nullcontext()  # DDP's
    train_step(torch.randint(0, 256, (35, 3, 16, 16), dtype=torch.uint8), torch.randint(0, 10, (35,)), 0, 6)
    assert sizes == [12, 12, 11] and quiet == [0, 1]


def test_ranks_share_the_stream_and_the_validation_set():
    whole = list(stream_keys(50, 7, seed=3, start=2, stop=20))
    parts = [list(stream_keys(50, 7, 3, 2, 20, Ranks(rank, 3))) for rank in range(3)]
    assert [sum(batches, []) for batches in zip(*parts)] == whole and {len(b) for p in parts for b in p} == {2, 3}
    seen, counts = [], []
    for rank in range(7):
        data = open_data(digits(eval_batch_size=16), (32, 32), (8, 8), torch.device("cpu"), Ranks(rank, 7))
        batches = list(data.in_order(data.val))
        counts.append([len(b[1]) for b in batches])
        seen += [label for _, labels, _ in batches for label in labels.tolist()]
    assert len({tuple(c) for c in counts}) == 1  # sharded models need every rank in every forward pass
    assert seen.count(PADDING) == 7 * 52 - 360
    assert sorted(s for s in seen if s != PADDING) == sorted(data.val.labels)


# ---- ranks that differ in data, settings or versions are refused by the same line on each of them


FILE = r"\('b/1.jpg', 1, \d+\)"
REFUSED_RUNS = [
    "classes; place 2 is 'B' on rank 2 and 'b' on the first rank",
    rf"validation images; place 6 is {FILE} on rank 2 and {FILE} on the first rank",
    "settings; lr is 0.5 on rank 2 and 0.25 on the first rank; log_every is 7 on rank 2 and 8 on the first rank",
    "versions; Pillow is '1.2' on rank 2 and '3.4' on the first rank",
    "step to go on from; it is None on rank 1 and 2 on the first rank",
]
VALUES = [  # what the last rank has, what the others have, and how the error tells them apart
    (["a", "b", "c"], ["a", "c"], "place 2 is 'b' on rank 2 and 'c' on the first rank"),
    (["a", "b"], ["a"], "place 2 is 'b' on rank 2 and missing on the first rank"),
    (["e\u0301\udcff"], ["\u00e9\udcff"], r"place 1 is 'e\u0301\udcff' on rank 2 and '\xe9\udcff' on the first rank"),
    (dict(a=1), dict(a=1.0), "a is 1 on rank 2 and 1.0 on the first rank"),
    ("\u00e9", None, r"it is '\xe9' on rank 2 and None on the first rank"),
]


def config(**fields):
    return digits(**dict(data="same", output="run", img_size=16, batch_size=6, steps=2, workers=0) | fields)


def refused(function, *args) -> None:
    with pytest.raises(InputError) as caught:
        function(*args)
    print(caught.value)


def disagree(root: Path) -> None:
    """All cases on one rank, in a folder of its own as on a machine of its own; the last rank is another."""
    last, trainer.write_report = os.environ["RANK"] == "2", lambda *_: None
    os.chdir(root / os.environ["RANK"])
    if last:
        for split in ("train", "val"):
            os.rename(f"renamed/{split}/b", f"renamed/{split}/B")
        Path("resized/val/b/1.jpg").write_bytes(Path("resized/val/b/1.jpg").read_bytes() + b"\0")
    for data in ("renamed", "resized"):
        refused(trainer.train, config(data=data))
    refused(trainer.train, config(lr=0.5 if last else 0.25, log_every=7 if last else 8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PIL, "__version__", "1.2" if last else "3.4")
        refused(trainer.train, config())
    assert not Path("run").exists()
    assert trainer.train(config(output=os.path.abspath("run")))["steps"] == 2
    refused(trainer.train, config(steps=3))  # the checkpoint is on the first rank's machine alone
    sent, gather, (group, _) = [], Ranks.gather, join(torch.device("cpu"))
    Ranks.gather = lambda self, value: sent.append(value) or gather(self, value)
    group.check_same(dict(number=1, value=dict(a=1, b=2) if last else dict(b=2, a=1)))
    assert len(sent) == 1 and all(re.fullmatch("[0-9a-f]{64}", text) for text in sent[0])
    values = [there if last else first for there, first, _ in VALUES]
    for value in values:
        refused(group.check_same, dict(number=1, value=value, rank=last))
    assert sent[2::2] == values  # of the first difference alone, whatever else differs
    leave()


@pytest.mark.slow
def test_every_rank_refuses_what_is_not_the_same_on_all(tmp_path):
    for rank, name in ((rank, name) for rank in "012" for name in ("renamed", "resized", "same")):
        pictures.folder(tmp_path / rank / name)
    processes = ranks(3, disagree, tmp_path)
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    expected = [*REFUSED_RUNS, *(f"value; {re.escape(told)}" for *_, told in VALUES)]
    for line, text in zip(outputs[0][0].splitlines(), expected, strict=True):
        assert re.fullmatch(f"every rank must have the same {text}", line)
    assert outputs[0][0] == outputs[1][0] == outputs[2][0]


def test_machines_may_have_folders_and_devices_of_their_own():
    other = config(about="text", data="elsewhere", output="there", data_dir="disk", device="cuda:3", workers=5)
    assert run_facts(other) == run_facts(config()) != run_facts(config(eval_every=3))
