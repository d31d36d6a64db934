"""Several processes, started by torchrun: DDP or FSDP2, and what the ranks tell each other.

    torchrun --nproc-per-node 8 -m vitfast pretrain ...

is the same run on eight GPUs, all by torch.distributed. One process goes through the same code and communicates
nothing.
"""

import logging
import os
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .errors import InputError

GO, STOP, FAILED = 0, 1, 2  # the ranks' flags before every step; the largest counts


def world_size() -> int:
    """How many processes torchrun started, known before `join` too."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_rank() -> bool:
    """Whether this process is the one that writes and prints, known before `join` and after `leave` too."""
    return os.environ.get("RANK", "0") == "0"


@dataclass(frozen=True)
class Ranks:
    """This process among `world` of them. `control` is a CPU group for flags: they never wait for a GPU."""

    rank: int = 0
    world: int = 1
    control: object = None

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and logs."""
        return self.rank == 0

    def share(self, count: int) -> tuple[int, int]:
        """(first, end) of this rank's share of `count` items; shares differ by one item at most."""
        return count * self.rank // self.world, count * (self.rank + 1) // self.world

    def agree(self, flag: int) -> int:
        """The largest flag of all ranks."""
        if self.world == 1:
            return flag
        value = torch.tensor(flag)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.control)
        return int(value)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        """Returns once every rank has called it."""
        if self.world > 1:
            dist.barrier(group=self.control)


def join(device: torch.device) -> tuple[Ranks, torch.device]:
    """Joins the processes that torchrun started. Returns the ranks, and the device of this one."""
    if world_size() == 1:
        return Ranks(), device
    if device.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise InputError(f"rank {os.environ.get('RANK')} wants GPU {local} of {count}; lower --nproc-per-node")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    control = dist.group.WORLD if device.type == "cpu" else dist.new_group(backend="gloo")
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), control)
    if not ranks.first:
        logging.getLogger("vitfast").setLevel(logging.WARNING)
    return ranks, device


def leave() -> None:
    """Ends the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def shard(model: nn.Module, dtype: torch.dtype | None) -> None:
    """FSDP2 in place: every block a unit, the rest another.

    With a 16-bit `dtype` parameters are gathered and gradients reduced in it.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype) if dtype else MixedPrecisionPolicy()
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def data_parallel(model: nn.Module, device: torch.device) -> nn.Module:
    """DDP around the model: gradients are averaged in buckets during backward."""
    ids = [device.index] if device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)


@contextmanager
def reducing(runner: nn.Module, last: bool):
    """A context for one micro-batch: ranks reduce their gradients after the last one of a step only."""
    if hasattr(runner, "set_requires_gradient_sync"):
        runner.set_requires_gradient_sync(last)
    with nullcontext() if last or not hasattr(runner, "no_sync") else runner.no_sync():  # DDP's; FSDP2 has none
        yield
