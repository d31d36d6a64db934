"""Several processes, started by torchrun: DDP or FSDP2, and what the ranks tell each other.

    torchrun --nproc-per-node 8 -m vitfast pretrain ...

is the same run on eight GPUs, all by torch.distributed. One process goes through the same code and communicates
nothing.
"""

import hashlib
import itertools
import json
import logging
import os
import re
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import PIL
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import InputError, TrainingError, both_ends
from ..version import __version__
from .config import Config, as_plain
from .device import choose_device

GO, STOP, FAILED = 0, 1, 2  # the ranks' flags before every step; the largest counts
OWN = frozenset("about data probe output device workers data_dir".split())  # settings that may differ between machines


def world_size() -> int:
    """How many processes torchrun started, known before `join` too."""
    return _from_environment("WORLD_SIZE", 1, default="1")


def rank_of_world() -> tuple[int, int]:
    """(rank, world) of this process as torchrun sets them, known before `join` and after `leave` too."""
    world = world_size()
    return 0 if world == 1 else _from_environment("RANK", 0, world - 1), world


def is_first_rank() -> bool:
    """Whether this process is the one that writes and prints."""
    return rank_of_world()[0] == 0


def local_device(name: str) -> torch.device:
    """`choose_device(name)`; under torchrun, "" and "cuda" are the GPU of this process on its machine."""
    device = choose_device(name)
    if world_size() == 1 or device.type != "cuda" or device.index is not None:
        return device
    return choose_device(f"cuda:{_from_environment('LOCAL_RANK', 0, default='0')}")


def _from_environment(name: str, least: int, most: int | None = None, default: str = "") -> int:
    """A whole number that torchrun sets. Raises InputError."""
    text = os.environ.get(name, default)
    if text.isdecimal() and least <= int(text) and (most is None or int(text) <= most):
        return int(text)
    said = f"got {text!r}" if text else "and is not set"
    upper = "" if most is None else f" to {most}"
    advice = "torchrun sets it (torchrun --nproc-per-node N -m vitfast ...); for one process unset WORLD_SIZE"
    raise InputError(f"the environment variable {name} must be a whole number from {least}{upper}, {said}; {advice}")


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
        """The largest flag of all ranks, once every rank has called this."""
        if self.world == 1:
            return flag
        value = torch.tensor(flag)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.control)
        return int(value)

    def on_first(self, function: Callable, *args) -> None:
        """Calls the function on the first rank; where it fails there, every rank raises."""
        error = None
        if self.first:
            try:
                function(*args)
            except (InputError, TrainingError, OSError) as caught:
                error = caught
        flag = self.agree(FAILED if error else GO)
        if error:
            raise error
        if flag == FAILED:
            raise TrainingError("the first rank could not go on; its message says why")

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: object) -> list:
        """The values of all ranks, by rank."""
        everyone = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(everyone, value, group=self.control)
        return everyone

    def union(self, texts: list[str]) -> list[str]:
        """The texts of all ranks, each once."""
        return list(dict.fromkeys(itertools.chain(*self.gather(texts))))

    def check_same(self, facts: dict[str, object], listed: dict[str, Callable[[], list]] | None = None) -> None:
        """Raises the same InputError on every rank where a fact is not the same on all of them.

        facts: values of JSON by name, in one order on all ranks. Ranks exchange hashes, and the values of the first
        fact that differs. listed: for facts that are hashes themselves, functions that list what was hashed.
        """
        if self.world == 1:
            return
        hashes = [hashlib.sha256(json.dumps(each, sort_keys=True).encode()).hexdigest() for each in facts.values()]
        for (name, value), found in zip(facts.items(), zip(*self.gather(hashes))):
            if rank := next((i for i, each in enumerate(found) if each != found[0]), 0):
                value = listed[name]() if listed and name in listed else value
                raise InputError(f"every rank must have the same {name}; {_difference(self.gather(value), rank)}")


def _difference(values: list, rank: int) -> str:
    """Says how a rank differs from the first: in one place of a list, or in up to three of a dict."""

    def entries(value: object) -> dict:
        named = {f"place {i}": each for i, each in enumerate(value, 1)} if isinstance(value, list) else {"it": value}
        return value if isinstance(value, dict) else named

    here, first, found = entries(values[rank]), entries(values[0]), []
    for name in first | here:  # ascii: names that differ may look alike
        pair = [ascii(each[name]) if name in each else "missing" for each in (here, first)]
        if pair[0] != pair[1]:
            found.append(f"{name} is {pair[0]} on rank {rank} and {pair[1]} on the first rank")
    return "; ".join(found[: 1 if isinstance(values[0], list) else 3])


def run_facts(config: Config) -> dict[str, dict]:
    """The versions and the settings that must be the same on every rank of a run."""
    versions = dict(vitfast=__version__, Pillow=PIL.__version__, PyTorch=str(torch.__version__))
    return dict(versions=versions, settings={k: v for k, v in as_plain(config).items() if k not in OWN})


def join(device: torch.device) -> tuple[Ranks, torch.device]:
    """Joins the processes that torchrun started. Returns the ranks, and the device of this one.

    Raises InputError where the environment is not torchrun's, TrainingError where the processes do not find each other.
    """
    world = world_size()
    if world == 1:
        return Ranks(), device
    rank, local = _from_environment("RANK", 0, world - 1), _from_environment("LOCAL_RANK", 0, world - 1, default="0")
    port = _from_environment("MASTER_PORT", 0, 65535)
    where = os.environ.get("MASTER_ADDR")
    if not where:
        raise InputError(f"WORLD_SIZE is {world}, and MASTER_ADDR is not set; start with torchrun, or unset WORLD_SIZE")
    if device.type == "cuda":
        if local >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise InputError(f"rank {rank} wants GPU {local} of {count}; lower --nproc-per-node")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        try:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        except (RuntimeError, ValueError, OSError) as error:
            said = f"the {world} processes did not find each other at {where}:{port} ({both_ends(str(error))})"
            raise TrainingError(said) from error
    control = dist.group.WORLD if device.type == "cpu" else dist.new_group(backend="gloo")
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), control)
    if not ranks.first:
        logging.getLogger("vitfast").setLevel(logging.WARNING)
    return ranks, device


@contextmanager
def peers_told():
    """Raises TrainingError where another process is gone, in place of what gloo, NCCL or torch say."""
    try:
        yield
    except RuntimeError as error:
        lost = isinstance(error, dist.DistError) or re.search("gloo|nccl|connection", str(error), re.IGNORECASE)
        if isinstance(error, TrainingError) or world_size() == 1 or not lost:
            raise
        said = f"another process of this run is gone, and may have said why ({both_ends(str(error))})"
        raise TrainingError(f"{said}; the same command goes on from the last checkpoint") from error


def leave() -> None:
    """Ends the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def shard(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Shards a model in place by FSDP2: every block is a unit, and the rest is another.

    With a 16-bit `dtype`, parameters are gathered and gradients are reduced in it.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype) if dtype else MixedPrecisionPolicy()
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if hasattr(model, "views"):  # it learns without labels, and evaluations call this in place of forward
        register_fsdp_forward_method(model, "features")


@contextmanager
def reducing(runner: nn.Module, last: bool):
    """A context for one micro-batch: ranks reduce their gradients after the last one of a step only."""
    if hasattr(runner, "set_requires_gradient_sync"):
        runner.set_requires_gradient_sync(last)
    with nullcontext() if last or not hasattr(runner, "no_sync") else runner.no_sync():  # DDP's; FSDP2 has none
        yield
