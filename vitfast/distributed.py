"""Several processes, started by torchrun: DDP or FSDP2, one voice for the log, and whole tensors out of shards.

    torchrun --nproc-per-node 8 -m vitfast pretrain ...

is the same run on eight GPUs. Everything here is torch.distributed's; one process goes through the same code and pays nothing.
"""

import logging
import os
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from .errors import InputError

GO, STOP, FAILED = 0, 1, 2  # what ranks tell each other before every step; the largest counts


@dataclass(frozen=True)
class Ranks:
    """This process among `world` of them. `control` is a CPU group for flags: they never wait for a GPU."""

    rank: int = 0
    world: int = 1
    control: object = None

    @property
    def first(self) -> bool:
        """True in the one process that writes and speaks."""
        return self.rank == 0

    def share(self, count: int) -> tuple[int, int]:
        """Bounds of this rank's part of `count` things; parts differ by one at most."""
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
        """Until every rank is here."""
        if self.world > 1:
            dist.barrier(group=self.control)


def join(device: torch.device) -> tuple[Ranks, torch.device]:
    """Joins the processes that torchrun started (it sets WORLD_SIZE): these ranks, and the device of this one."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Ranks(), device
    if device.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise InputError(
                f"rank {os.environ.get('RANK')} wants GPU {local} of {torch.cuda.device_count()}; lower --nproc-per-node"
            )
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
    """Ends the group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def shard(model: nn.Module, dtype: torch.dtype | None) -> None:
    """FSDP2 in place: every block a unit, the rest another. With a 16-bit `dtype` parameters are gathered and gradients reduced in it."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype) if dtype else MixedPrecisionPolicy()
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def data_parallel(model: nn.Module, device: torch.device) -> nn.Module:
    """DDP around the model: its gradients are averaged in buckets while backward goes on."""
    return nn.parallel.DistributedDataParallel(
        model, device_ids=[device.index] if device.type == "cuda" else None, gradient_as_bucket_view=True
    )


@contextmanager
def reducing(runner: nn.Module, last: bool):
    """Gradients travel with the last micro-batch of a step only."""
    if hasattr(runner, "set_requires_gradient_sync"):
        runner.set_requires_gradient_sync(last)
        yield
    elif not last and hasattr(runner, "no_sync"):
        with runner.no_sync():
            yield
    else:
        yield


def whole(value):
    """Nested dicts and lists with every sharded tensor gathered. Called on all ranks at once."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {k: whole(v) for k, v in value.items()}
    return [whole(v) for v in value] if isinstance(value, (list, tuple)) else value


def like(value: Tensor, reference: Tensor) -> Tensor:
    """A whole tensor as `reference` is: on its device, and sharded as it is."""
    value = value.to(reference.device)
    if isinstance(reference, DTensor):
        return distribute_tensor(value, reference.device_mesh, reference.placements, src_data_rank=None)
    return value


def load_model(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """A whole state dict into a model that may be sharded. The keys must be equal."""
    own = model.state_dict()
    if own.keys() != tensors.keys():
        odd = sorted(own.keys() ^ tensors.keys())
        raise InputError(f"the saved model does not fit this one: {', '.join(odd[:3])}{' ...' if len(odd) > 3 else ''}")
    with torch.no_grad():
        for name, target in own.items():
            target.copy_(like(tensors[name], target))


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict) -> None:
    """A whole optimiser state into one whose parameters may be sharded: parameters count in the order of the groups on any number of ranks."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        index: {
            name: like(v, parameters[index]) if isinstance(v, Tensor) and v.shape == parameters[index].shape else v
            for name, v in entry.items()
        }
        for index, entry in saved["state"].items()
    }
    optimizer.load_state_dict({**saved, "state": state})
