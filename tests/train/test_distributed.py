"""Several processes are the same run: gloo ranks on one machine against one process, DDP and FSDP2, and back again."""

import contextlib
import csv
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from functools import partialmethod
from pathlib import Path

import pytest
import torch
from checks import assert_close
from commands import run_cli
from PIL import Image
from processes import command_line, done, free_port, ranks
from runs import pretraining_command
from safetensors.torch import load_file

from vitfast import distributed
from vitfast.data.loader import open_data
from vitfast.data.samples import PADDING, StreamSampler
from vitfast.distributed import FAILED, Ranks, leave
from vitfast.train import step
from vitfast.train.lock import LOCK, locked
from vitfast.train.recipes import resolve
from vitfast.train.resume import read_training_state
from vitfast.train.trainer import Trainer, TrainingError, train

# 35 images a step are 18 and 17 on two ranks, each in two micro-batches: nothing divides.
COMMON = dict(
    recipe="digits",
    data="digits",
    device="cpu",
    steps=6,
    batch_size=35,
    accumulate=2,
    clip_norm=0.1,
    log_every=2,
    save_every=3,
    warmup_steps=2,
)


def config(output: Path, **fields):
    return resolve("pretrain", dict(COMMON, output=str(output), **fields))


def start(output: Path, torchrun: bool = False, **fields) -> list:
    """`vitfast pretrain` with these settings on two ranks: by torchrun, or, quicker, started as torchrun does."""
    settings = {**COMMON, **fields}
    chosen = [option for name in ("recipe", "data", "device") for option in (f"--{name}", settings.pop(name))]
    argv = ["pretrain", *chosen, "--output", str(output), "--set", *(f"{k}={v}" for k, v in settings.items())]
    if not torchrun:
        return ranks(2, command_line, argv)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        free_port(),
        "-m",
        "vitfast",
        *argv,
    ]
    return [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    ]


def wait_for(path: Path, processes: list) -> None:
    end = time.time() + 120
    while not path.exists():
        assert time.time() < end and all(process.poll() is None for process in processes)
        time.sleep(0.05)


def tensors(run: Path) -> dict:
    return load_file(run / "checkpoints" / "last" / "state" / "state.safetensors")


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The run in one process."""
    run = tmp_path_factory.mktemp("one")
    train(config(run, ema_decay=0.9))
    return run


@pytest.mark.slow(12)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_equal_one_process(one, tmp_path, parallel):
    """DDP from the start; FSDP2 from step 3 of one process, whose whole state it shards."""
    run = tmp_path / "two"
    if parallel == "fsdp":
        train(config(run, ema_decay=0.9, steps=3))
    said = done(start(run, torchrun=parallel == "ddp", parallel=parallel, ema_decay=0.9))
    assert sum(text.count("\naccuracy ") + text.startswith("accuracy ") for text in said) == 1  # one rank speaks
    a, b = tensors(one), tensors(run)
    assert a.keys() == b.keys()
    for name, value in a.items():  # fp32 rounding, of which Adam's division makes the most
        assert_close(b[name], value, atol=2e-5, rtol=1e-4, name=name)
    rows = [[r for r in csv.DictReader(open(r / "metrics.csv")) if r["split"] == "train"] for r in (one, run)]
    assert [r["step"] for r in rows[0]] == [r["step"] for r in rows[1]] == ["2", "3", "4", "6"]
    for mine, theirs in zip(*rows):
        assert (
            float(mine["loss"]) == pytest.approx(float(theirs["loss"]), abs=1e-5)
            and mine["accuracy"] == theirs["accuracy"]
        )
    summary, alone = (json.loads((r / "summary.json").read_text()) for r in (run, one))
    assert (
        summary["ranks"] == 2
        and summary["val_images"] == alone["val_images"] == 360
        and summary["parameters"] == alone["parameters"]
    )
    assert summary["accuracy"] == alone["accuracy"] and summary["loss"] == pytest.approx(alone["loss"], abs=1e-5)


def compiled(output: str) -> int:
    """Compiled runs of two ranks, without the seconds that Inductor takes. Returns 1 where not one graph is all."""
    from torch._dynamo.utils import counters

    compiled_before = []

    def sharding(model, dtype):
        compiled_before.append(all(block._compiled_call_impl for block in model.blocks))
        distributed.shard(model, dtype)

    torch.nn.Module.compile = partialmethod(torch.nn.Module.compile, backend="aot_eager")
    step.shard = sharding
    for number, parallel in enumerate(("ddp", "fsdp"), 1):
        train(config(Path(output) / parallel, parallel=parallel, compile=True, accumulate=1, ema_decay=0.9))
        if counters["stats"]["unique_graphs"] != number or counters["graph_break"]:
            return 1
    leave()
    return int(compiled_before != [True, False])  # the blocks, and those of their average, which is not compiled


@pytest.mark.slow(20)
def test_two_compiled_ranks_equal_one_process(one, tmp_path):
    """DDP around a compiled model; FSDP2 around compiled blocks, which share a graph."""
    done(ranks(2, compiled, str(tmp_path)))
    a = tensors(one)
    for b in (tensors(tmp_path / parallel) for parallel in ("ddp", "fsdp")):
        assert a.keys() == b.keys()
        for name, value in a.items():
            assert_close(b[name], value, atol=2e-5, rtol=1e-4, name=name)


def test_sharded_in_bf16_follows_one_process_and_keeps_fp32_weights(tmp_path):
    """Under autocast FSDP2 gathers parameters and reduces gradients in bf16; what it updates and saves stays fp32."""
    train(config(tmp_path / "one", amp="bf16", steps=3, lr=1e-4, log_every=1))
    done(start(tmp_path / "two", parallel="fsdp", amp="bf16", steps=3, lr=1e-4, log_every=1))
    losses = [
        [float(r["loss"]) for r in csv.DictReader(open(tmp_path / run / "metrics.csv")) if r["split"] == "train"]
        for run in ("one", "two")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    one, two = tensors(tmp_path / "one"), tensors(tmp_path / "two")
    for name, value in two.items():
        assert value.dtype == torch.float32 and one[name].dtype == torch.float32
        # Three steps of 1e-4 at most, whose direction bf16 can turn where a gradient is near zero; momenta to bf16's
        # rounding.
        limit = 6e-4 if name.startswith("model.") else 0.1 * one[name].abs().max().item() + 1e-6
        assert (value - one[name]).abs().max() <= limit, name
    moved = [name for name in two if name.startswith("model.") and (two[name] - one[name]).abs().max() > 0]
    assert moved  # bf16 gradients are not fp32 ones


def test_a_signal_to_one_rank_saves_and_stops_all(tmp_path):
    run = tmp_path / "run"
    processes = start(run, steps=4000, save_every=2)
    wait_for(run / "checkpoints" / "last", processes)
    processes[1].send_signal(signal.SIGTERM)
    said = done(processes)
    step = read_training_state(run / "checkpoints" / "last")["step"]
    assert f"stopped at step {step} of 4000" in said[0] and step >= 2 and not (run / "summary.json").exists()


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
    code, out, err = run_cli(capsys, *pretraining_command(tmp_path / "run", steps=1))
    assert code == 2 and not out and err.count("\n") == 1 and said in err and not (tmp_path / "run").exists()


def test_a_rank_alone_is_the_first(tmp_path, monkeypatch, capsys):
    """RANK without WORLD_SIZE: something else on this machine uses the name."""
    monkeypatch.setenv("RANK", "3")
    code, out, _ = run_cli(capsys, *pretraining_command(tmp_path / "run", steps=1))
    assert code == 0 and out.startswith("accuracy ")


def test_a_rank_that_is_killed_ends_the_others_in_one_line(tmp_path):
    run = tmp_path / "run"
    processes = start(run, steps=4000, save_every=2)
    wait_for(run / "checkpoints" / "last", processes)
    processes[1].send_signal(signal.SIGKILL)
    _, err = processes[0].communicate()
    assert processes[0].returncode == 1 and "Traceback" not in err, err
    assert err.splitlines()[-1].startswith("vitfast: error: another process of this run is gone")
    assert read_training_state(run / "checkpoints" / "last")["step"] >= 2 and not (run / LOCK).exists()


def test_what_the_first_rank_cannot_do_ends_all(tmp_path):
    """Here: take a folder that is held."""
    with locked(tmp_path):
        processes = start(tmp_path)
        said = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 1]
    assert f"in use by process {os.getpid()}" in said[0] and "the first rank could not go on" in said[1]
    assert not any("Traceback" in text for text in said)


def spoiled(output: str) -> int:
    """A sharded run of two ranks, in which one number of one rank's part of a gradient is not finite in step 2."""
    trainer = Trainer(config(Path(output), parallel="fsdp", non_finite="skip", clip_norm=None, steps=3, log_every=1))
    accumulate = trainer.train_step.accumulate

    def spoil(*batch):
        result = accumulate(*batch)
        if trainer.step == 1 and trainer.ranks.rank == 1:
            trainer.train_step.model.blocks[0].mlp.fc1.weight.grad.to_local()[0, 0] = float("nan")
        return result

    trainer.train_step.accumulate = spoil
    trainer.fit()
    leave()
    return 0


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(tmp_path):
    said = done(ranks(2, spoiled, str(tmp_path / "two")))
    assert sum("left out: the norm of the gradients of step 2 is nan" in text for text in said) == 1
    trainer = Trainer(config(tmp_path / "one", clip_norm=None, steps=3, log_every=1))
    update = trainer.train_step.optimizer.step
    trainer.train_step.scaler.step = lambda optimizer: None if trainer.step == 1 else update()
    trainer.fit()
    one, two = tensors(tmp_path / "one"), tensors(tmp_path / "two")
    for name, value in one.items():
        assert_close(two[name], value, atol=2e-5, rtol=1e-4, name=name)


def test_shards_are_divided_among_ranks(tmp_path):
    """WebDataset shards: every rank reads its own, and together they read the validation set once."""
    for split, count in (("train", 12), ("val", 8)):
        for shard in range(2):
            with tarfile.open(tmp_path / f"{split}-{shard:04d}.tar", "w") as tar:
                for i in range(count // 2):
                    buffer = io.BytesIO()
                    Image.new("RGB", (40, 40), (20 * i, 120 * shard, 90)).save(buffer, "png")
                    for extension, content in (("png", buffer.getvalue()), ("cls", str(i % 3).encode())):
                        info = tarfile.TarInfo(f"{shard}{i:03d}.{extension}")
                        info.size = len(content)
                        tar.addfile(info, io.BytesIO(content))
    done(start(tmp_path / "run", data=f"wds/{tmp_path}", batch_size=4, steps=3, workers=0))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["ranks"] == 2 and summary["classes"] == 3 and summary["val_images"] == 8 and summary["steps"] == 3
    # One process with a worker, which count other shares of the images: the data is the same, and the run goes on.
    assert train(config(tmp_path / "run", data=f"wds/{tmp_path}", batch_size=4, steps=4, workers=1))["steps"] == 4


def test_an_error_of_one_rank_stops_all(tmp_path, monkeypatch):
    """The flag that ranks exchange before every step: here the other rank has failed."""
    trainer = Trainer(config(tmp_path / "run"))
    next_batch = trainer._next

    def failing(*args):
        monkeypatch.setattr(Ranks, "agree", lambda self, flag: FAILED)
        return next_batch(*args)

    trainer._next = failing
    with pytest.raises(TrainingError, match="another rank could not go on"):
        trainer.fit()


def test_gradients_travel_once_a_step(tmp_path):
    """Three micro-batches, of which DDP reduces the last alone."""
    train_step = Trainer(config(tmp_path / "run", accumulate=3)).train_step
    train_step.runner, quiet, calls = DistributedRunner(train_step.model), [], []
    train_step.runner.quiet, train_step.runner.calls = quiet, calls
    train_step(torch.randint(0, 256, (35, 3, 32, 32), dtype=torch.uint8), torch.randint(0, 10, (35,)), 0, 6)
    assert calls == [12, 12, 11] and quiet == [12, 12]


class DistributedRunner(torch.nn.Module):
    """DDP's face: notes the images of each forward pass, and of those without a reduction."""

    def __init__(self, module):
        super().__init__()
        self.module, self.silent = module, False

    def forward(self, images):
        self.calls.append(len(images))
        if self.silent:
            self.quiet.append(len(images))
        return self.module(images)

    @contextlib.contextmanager
    def no_sync(self):
        self.silent = True
        yield
        self.silent = False


def test_ranks_share_the_stream_and_the_validation_set():
    whole = [batch for batch in StreamSampler(50, 7, seed=3, start=2, stop=20)]
    parts = [list(StreamSampler(50, 7, 3, 2, 20, Ranks(rank, 3))) for rank in range(3)]
    assert [sum(batches, []) for batches in zip(*parts)] == whole and {len(b) for p in parts for b in p} == {2, 3}
    seen, counts = [], []
    for rank in range(7):
        data = open_data(
            config(Path("unused"), eval_batch_size=16), (32, 32), (8, 8), torch.device("cpu"), Ranks(rank, 7)
        )
        batches = list(data.eval_batches())
        counts.append([len(b[1]) for b in batches])
        seen += [label for _, labels, _ in batches for label in labels.tolist()]
    assert len({tuple(c) for c in counts}) == 1  # sharded models need every rank in every forward pass
    assert seen.count(PADDING) == 7 * 52 - 360
    assert sorted(s for s in seen if s != PADDING) == sorted(data.val.labels)
