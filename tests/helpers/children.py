"""What children of the tests do: runs of two ranks, runs on a full disk."""

import os
import resource
import sys
from functools import partialmethod
from pathlib import Path

import pytest
import torch
from processes import command_line
from runs import cut_at, digits, pretraining_command

from vitfast.run import distributed
from vitfast.run.distributed import leave
from vitfast.train import step, trainer
from vitfast.train.trainer import Trainer, train

# 35 images a step are 18 and 17 on two ranks, each in two micro-batches: nothing divides.
COMMON = dict(img_size=16, batch_size=35, accumulate=2, clip_norm=0.1, warmup_steps=2, log_every=2, save_every=3)
COMMON |= dict(steps=6, ema_decay=0.9)
BF16 = COMMON | dict(amp="bf16", steps=3, lr=1e-4, log_every=1)
SPOILED = COMMON | dict(clip_norm=None, steps=3, log_every=1)
MANY_SIZES = COMMON | dict(sizes="16:40", tokens_per_step=350)
RANDOM = COMMON | dict(dropout=0.1, drop_path=0.1, mixup=0.3, batch_size=24, optimizer="sgd", train_images=64)
SHARDS = COMMON | dict(batch_size=4, steps=3)
# Statistics over the crops of all ranks; drop path would draw others on each, and Adam would divide gradients that are
# nothing but rounding, as those of biases before BatchNorm are, by themselves.
CROPS = dict(recipe="ssl/small", model="Nano/8", img_size=16, local_size=8, batch_size=35, projector_width=32, steps=6)
CROPS |= dict(
    epochs=None,
    optimizer="sgd",
    lr=0.02,
    drop_path=0.0,
    log_every=2,
    save_every=3,
    train_images=100,
    local_crops=3,
    color_jitter=0.2,
)


def every_run(root: str, shards: str) -> int:
    """All runs that two ranks take, in one pair of processes; the last by the command, whose words are looked at."""
    root, trainer.write_report = Path(root), lambda *_: None
    train(digits(root / "fsdp", **COMMON, parallel="fsdp"))
    train(digits(root / "bf16", **BF16, parallel="fsdp"))
    spoiled(digits(root / "spoiled", **SPOILED, parallel="fsdp", non_finite="skip"))
    train(digits(root / "many", **MANY_SIZES))
    train(digits(root / "shards", data=shards, workers=0, **SHARDS))
    train(digits(root / "unreadable", data=str(root / "files"), workers=0, **COMMON | dict(batch_size=8, steps=2)))
    for parallel in ("ddp", "fsdp"):
        train(digits(root / f"crops {parallel}", parallel=parallel, **CROPS))
        train(digits(root / f"whole {parallel}", parallel=parallel, **RANDOM))
        config = digits(root / f"broken {parallel}", parallel=parallel, **RANDOM)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyError):
            cut_at(patch, 4)
            train(config)
        train(config)
    leave()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    return command_line(pretraining_command(root / "ddp", **COMMON))


def logged_run(root: str, wrong: bool) -> None:
    """A run whose `on_metrics` prints each row, or fails."""
    trainer.write_report = lambda *_: None

    def say(row: dict) -> None:
        print(f"row of step {row['step']}, {row['split']}", flush=True)
        if wrong:
            raise KeyError("loss/train")

    train(digits(root, **COMMON | dict(steps=2)), on_metrics=say)


def spoiled(config) -> None:
    """A run in which the second rank's part of a gradient, which FSDP2 has sharded, is not finite in step 2."""
    run = Trainer(config)
    accumulate = run.train_step.accumulate

    def spoil(*batch):
        result = accumulate(*batch)
        if run.step == 1 and run.ranks.rank == 1:
            run.train_step.model.blocks[0].mlp.fc1.weight.grad.to_local()[0, 0] = float("nan")
        return result

    run.train_step.accumulate = spoil
    run.fit()


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


def limited(sizes: list[int], *commands: list[str]) -> int:
    """`vitfast ...` several times, where no file may become larger than so many bytes; 0 where all end with 1."""
    sys.dont_write_bytecode = True  # Python would leave half of what it compiles, for other tests to import
    for size, argv in zip(sizes, commands, strict=True):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        if command_line(argv) != 1:
            return 2
    return 0
