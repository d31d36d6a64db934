"""Compiled under DDP and FSDP2: gradients of two gloo ranks equal those of one process that is not compiled."""

import pytest
import timm
import torch
import torch.distributed as dist
from checks import assert_close, randomize
from processes import done, ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from vitfast import backend

OPTIONS = dict(backend="vitfast", options={"inner": "aot_eager"})
WHOLE = {"attention block", "MLP block"}


def of_timm() -> nn.Module:
    """Of 4 MiB, so that DDP's buckets of 1 MiB cut it."""
    torch.manual_seed(0)
    sizes = dict(embed_dim=192, depth=2, num_heads=3, img_size=32, num_classes=3)
    return randomize(timm.create_model("vit_tiny_patch16_224", **sizes))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Images and an upstream gradient of the outputs."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(4, 3, 32, 32, generator=generator), torch.randn(4, 3, generator=generator)


def regions(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.compile(**OPTIONS)
    return model


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def distributed(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)


# name: (the model as it is called, what torch._dynamo.config.optimize_ddp is, the kinds of parts that are replaced).
WAYS = {
    "DDP, cut at its buckets": (lambda m: torch.compile(distributed(m), **OPTIONS), True, None),
    "DDP, whole": (lambda m: torch.compile(distributed(m), **OPTIONS), False, WHOLE),
    "DDP of regions": (lambda m: distributed(regions(m)), False, WHOLE),
    "FSDP2": (lambda m: torch.compile(sharded(m), **OPTIONS), True, WHOLE),
    "FSDP2 of regions": (lambda m: sharded(regions(m)), True, WHOLE),
}


def one_of_two() -> None:
    """A rank with its half of the batch, every way after the other."""
    dist.init_process_group("gloo")
    rank, (images, upstream), model = dist.get_rank(), batch(), of_timm()
    model(images).backward(upstream)
    wanted = {name: p.grad for name, p in model.named_parameters()}
    for way, (make, optimize_ddp, kinds) in WAYS.items():
        torch._dynamo.reset()
        backend._reports.clear()
        torch._dynamo.config.optimize_ddp = optimize_ddp
        model = of_timm()
        run = make(model)
        for _ in range(2):  # the second time with DDP's buckets in the order of the gradients
            model.zero_grad()
            run(images[rank::2]).backward(2 * upstream[rank::2])  # the mean of two ranks is their sum
        for name, p in model.named_parameters():
            given = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            assert_close(given, wanted[name], atol=1e-4, rtol=1e-4, name=f"{way}: {name}")
        report = backend.report(1000)
        cut = [entry for entry in report.left if entry.kind == "graph"]
        assert report.replaced and bool(cut) == (kinds is None), (way, report)
        assert kinds is None or kinds <= {entry.kind for entry in report.replaced}, (way, report)
        assert kinds is None or not report.left, (way, report)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_have_the_gradients_of_one_process():
    done(ranks(2, one_of_two))
