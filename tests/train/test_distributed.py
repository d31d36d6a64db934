"""Several processes are the same run: gloo ranks on one machine against one process, DDP and FSDP2, and back again."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from functools import partialmethod
from pathlib import Path

import pytest
import torch
from checks import assert_close
from commands import run_cli
from PIL import Image
from processes import command_line, done, free_port, ranks
from runs import QUICK, cut_at, digits, pretraining_command, records, same_runs, training_tensors, wait_for

from vitfast.data.loader import open_data
from vitfast.data.samples import PADDING, StreamSampler
from vitfast.run import distributed
from vitfast.run.distributed import FAILED, Ranks, leave
from vitfast.train import step
from vitfast.train.lock import LOCK, locked
from vitfast.train.resume import read_training_state
from vitfast.train.trainer import Trainer, TrainingError, train

# 35 images a step are 18 and 17 on two ranks, each in two micro-batches: nothing divides.
COMMON = dict(img_size=16, batch_size=35, accumulate=2, clip_norm=0.1, warmup_steps=2, log_every=2, save_every=3)
COMMON |= dict(steps=6, ema_decay=0.9)
BF16 = dict(amp="bf16", steps=3, lr=1e-4, log_every=1)
SPOILED = dict(clip_norm=None, steps=3, log_every=1)
MANY_SIZES = dict(COMMON, sizes="16:40", tokens_per_step=350, accumulate=2)
RANDOM = dict(COMMON, dropout=0.1, drop_path=0.1, mixup=0.3, batch_size=24, optimizer="sgd", train_images=64)
SHARDS = dict(COMMON, batch_size=4, steps=3, img_size=16)


def write_shards(root: Path) -> None:
    """WebDataset: two shards of 12 images to train on, two of 8 to validate."""
    for split, count in (("train", 12), ("val", 8)):
        for shard in range(2):
            with tarfile.open(root / f"{split}-{shard:04d}.tar", "w") as tar:
                for i in range(count // 2):
                    buffer = io.BytesIO()
                    Image.new("RGB", (40, 40), (20 * i, 120 * shard, 90)).save(buffer, "png")
                    for extension, content in (("png", buffer.getvalue()), ("cls", str(i % 3).encode())):
                        info = tarfile.TarInfo(f"{shard}{i:03d}.{extension}")
                        info.size = len(content)
                        tar.addfile(info, io.BytesIO(content))


def spoiled(config, gradient_of) -> None:
    """A run in which a number of the gradient that `gradient_of(trainer)` gives in step 2 is not finite."""
    trainer = Trainer(config)
    accumulate = trainer.train_step.accumulate

    def spoil(*batch):
        result = accumulate(*batch)
        if trainer.step == 1 and (gradient := gradient_of(trainer)) is not None:
            gradient[0, 0] = float("nan")
        return result

    trainer.train_step.accumulate = spoil
    trainer.fit()


def on_second_rank(trainer) -> torch.Tensor | None:
    """This rank's part of a gradient that FSDP2 has sharded."""
    if trainer.ranks.rank == 1:
        return trainer.train_step.model.blocks[0].mlp.fc1.weight.grad.to_local()
    return None


def cut_off(config, at: int) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyError):
        cut_at(patch, at)
        train(config)


def every_run(root: str, shards: str) -> int:
    """All runs that two ranks take, in one pair of processes; the last by the command, whose words are looked at."""
    root = Path(root)
    train(digits(root / "fsdp", **COMMON, parallel="fsdp"))
    train(digits(root / "bf16", **COMMON | BF16, parallel="fsdp"))
    spoiled(digits(root / "spoiled", **COMMON | SPOILED, parallel="fsdp", non_finite="skip"), on_second_rank)
    train(digits(root / "many", **MANY_SIZES))
    train(digits(root / "shards", data=shards, workers=0, **SHARDS))
    for parallel in ("ddp", "fsdp"):
        train(digits(root / f"whole {parallel}", parallel=parallel, **RANDOM))
        cut_off(digits(root / f"broken {parallel}", parallel=parallel, **RANDOM), at=4)
        train(digits(root / f"broken {parallel}", parallel=parallel, **RANDOM))
    leave()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    return command_line(pretraining_command(root / "ddp", **COMMON))


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    """The runs in one process, by name."""
    root = tmp_path_factory.mktemp("one")
    train(digits(root / "ddp", **COMMON))
    return root


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> tuple[Path, list[str]]:
    """The runs of two ranks, and what the ranks said."""
    root = tmp_path_factory.mktemp("two")
    train(digits(root / "fsdp", **COMMON | dict(steps=3)))
    (root / "data").mkdir()
    write_shards(root / "data")
    return root, done(ranks(2, every_run, str(root), f"wds/{root / 'data'}"))


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


@pytest.mark.slow(20)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_equal_one_process(one, two, parallel):
    """DDP from the start; FSDP2 from step 3 of one process, whose whole state it shards."""
    root, said = two
    assert_same_training(one / "ddp", root / parallel)
    assert sum(text.count("\naccuracy ") + text.startswith("accuracy ") for text in said) == 1  # one rank speaks
    summary, alone = (json.loads((r / "summary.json").read_text()) for r in (root / parallel, one / "ddp"))
    assert summary["ranks"] == 2 and summary["val_images"] == alone["val_images"] == 360
    assert summary["parameters"] == alone["parameters"] and summary["accuracy"] == alone["accuracy"]
    assert summary["loss"] == pytest.approx(alone["loss"], abs=1e-5)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_that_were_cut_off_go_on_bit_for_bit(two, parallel):
    """Random numbers of each rank, momentum, average and the place in the second epoch."""
    root, _ = two
    assert same_runs(root / f"whole {parallel}", root / f"broken {parallel}")


def test_two_ranks_share_images_of_many_sizes(two, tmp_path):
    root, _ = two
    train(digits(tmp_path / "run", **MANY_SIZES))
    assert_same_training(tmp_path / "run", root / "many", but=["keys"])
    summaries = [json.loads((run / "summary.json").read_text()) for run in (tmp_path / "run", root / "many")]
    for name in ("sizes", "images_per_step", "patches_per_image", "epochs"):
        assert summaries[0][name] == summaries[1][name]


def test_sharded_in_bf16_follows_one_process_and_keeps_fp32_weights(two, tmp_path):
    """Under autocast FSDP2 gathers parameters and reduces gradients in bf16; what it updates and saves stays fp32."""
    root, _ = two
    train(digits(tmp_path, **COMMON | BF16))
    losses = [[float(loss) for loss in records(run, "train", "loss")] for run in (tmp_path, root / "bf16")]
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    mine, theirs = training_tensors(tmp_path), training_tensors(root / "bf16")
    for name, value in theirs.items():
        assert value.dtype == torch.float32 and mine[name].dtype == torch.float32
        # Three steps of 1e-4 at most, whose direction bf16 can turn where a gradient is near zero; momenta to bf16's
        # rounding.
        limit = 6e-4 if name.startswith(("model.", "ema.")) else 0.1 * mine[name].abs().max().item() + 1e-6
        assert (value - mine[name]).abs().max() <= limit, name
    moved = [name for name in theirs if name.startswith("model.") and (theirs[name] - mine[name]).abs().max() > 0]
    assert moved  # bf16 gradients are not fp32 ones


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(two, tmp_path):
    root, said = two
    assert sum("left out: the norm of the gradients of step 2 is nan" in text for text in said) == 1
    trainer = Trainer(digits(tmp_path, **COMMON | SPOILED))
    update = trainer.train_step.optimizer.step
    trainer.train_step.scaler.step = lambda optimizer: None if trainer.step == 1 else update()
    trainer.fit()
    a, b = training_tensors(tmp_path), training_tensors(root / "spoiled")
    for name, value in a.items():
        assert_close(b[name], value, atol=2e-5, rtol=1e-4, name=name)


def test_shards_are_divided_among_ranks(two):
    """Every rank reads its own, and together they read the validation set once."""
    run, data = two[0] / "shards", f"wds/{two[0] / 'data'}"
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
    assert_same_training(one / "ddp", tmp_path)


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
        train(digits(Path(output) / parallel, parallel=parallel, compile=True, **COMMON | dict(accumulate=1)))
        if counters["stats"]["unique_graphs"] != number or counters["graph_break"]:
            return 1
    leave()
    return int(compiled_before != [True, False])  # the blocks, and those of their average, which is not compiled


@pytest.mark.long
def test_two_compiled_ranks_equal_one_process(one, tmp_path):
    """DDP around a compiled model; FSDP2 around compiled blocks, which share a graph."""
    done(ranks(2, compiled, str(tmp_path)))
    for parallel in ("ddp", "fsdp"):
        assert_same_training(one / "ddp", tmp_path / parallel)


def test_a_signal_to_one_rank_saves_and_stops_all(tmp_path):
    run = tmp_path / "run"
    processes = start(run, steps=4000, save_every=2)
    wait_for(run / "checkpoints" / "last", *processes)
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
    code, out, err = run_cli(capsys, *pretraining_command(tmp_path / "run", steps=1, **QUICK))
    assert code == 2 and not out and err.count("\n") == 1 and said in err and not (tmp_path / "run").exists()


def test_a_rank_alone_is_the_first(tmp_path, monkeypatch, capsys):
    """RANK without WORLD_SIZE: something else on this machine uses the name."""
    monkeypatch.setenv("RANK", "3")
    code, out, _ = run_cli(capsys, *pretraining_command(tmp_path / "run", steps=1, **QUICK))
    assert code == 0 and out.startswith("accuracy ")


def test_a_rank_that_is_killed_ends_the_others_in_one_line(tmp_path):
    run = tmp_path / "run"
    processes = start(run, steps=4000, save_every=2)
    wait_for(run / "checkpoints" / "last", *processes)
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
    train_step.runner, quiet, calls = DistributedRunner(train_step.model), [], []
    train_step.runner.quiet, train_step.runner.calls = quiet, calls
    train_step(torch.randint(0, 256, (35, 3, 16, 16), dtype=torch.uint8), torch.randint(0, 10, (35,)), 0, 6)
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
        data = open_data(digits(eval_batch_size=16), (32, 32), (8, 8), torch.device("cpu"), Ranks(rank, 7))
        batches = list(data.eval_batches())
        counts.append([len(b[1]) for b in batches])
        seen += [label for _, labels, _ in batches for label in labels.tolist()]
    assert len({tuple(c) for c in counts}) == 1  # sharded models need every rank in every forward pass
    assert seen.count(PADDING) == 7 * 52 - 360
    assert sorted(s for s in seen if s != PADDING) == sorted(data.val.labels)
