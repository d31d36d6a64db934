"""Two steps of a small ViT on interpreted kernels, whole or on one of two ranks."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from vitfast import ViT, ops
from vitfast.tools import interpreter

SMALL = dict(img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5)


def head_start() -> ViT:
    torch.manual_seed(0)
    model = ViT(**SMALL, weight_init="jax_nlhb")
    torch.nn.init.normal_(model.head.weight, std=0.1)
    return model


def one_of_two(kind: str, folder: Path) -> None:
    """A rank's two steps on its half of each batch; the first one saves what came out."""
    interpreter.quicken()
    dist.init_process_group("gloo")
    rank, model = dist.get_rank(), head_start()
    if kind == "ddp":
        run = torch.nn.parallel.DistributedDataParallel(model)
    else:
        for block in model.blocks:
            fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
        run = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    train(run, [(images[rank::2], labels[rank::2]) for images, labels in torch.load(folder / "data.pt")])
    state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    if rank == 0:
        torch.save(state, folder / "state.pt")
    dist.destroy_process_group()


def train(model: torch.nn.Module, data) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ops.use_kernels("on"):
        for images, labels in data:
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
