"""Whole ViTs: latency, throughput and a training step, against timm and others.

Logits, and in training every gradient, are compared with float64 before anything is timed and again after it
(peers.py). A training step is forward, cross-entropy, backward, clipping at norm 1 and fused AdamW. Precision bf16 has
weights and optimiser in bf16; amp has fp32 weights under autocast, where our own ViT keeps its residual stream in bf16
and timm's keeps it in fp32, so only `accelerate(timm)` has timm's numerics. max-autotune and compile run without
torch's own CUDA graphs, which reduce-overhead has: latency captures one for every other setting; throughput and
training are timed in whole steps back to back, launches included. "least memory" is ours where backward computes again
what it can. "batch-invariant" is inference of ours by vitfast.batch_invariant, whose cost is the difference to "vitfast
eager".

`extra_info` has, beside what every case has: images_per_second; model_flops (3 times the forward pass in training) and
from it mfu_ceiling (of the matrix product measured in this run) and mfu_datasheet; attention, the SDPA backend that
measured fastest. The batch of throughput is each library's best of several.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace

import machine
import pytest
import torch
from harness import bench
from machine import median_seconds
from peers import ACCELERATED, BUILDERS, INVARIANT, LEAN, Model, Peer, Setting, learner
from shapes import MAIN, model_work, planned
from torch import Tensor

from vitfast import ops
from vitfast.tools.cost.work import Kernels, update

# The models, by names without the batch; their batch is that of the training step.
MODELS = {s.name.rpartition(" B")[0]: s for s in planned(*MAIN).values()}
PRECISIONS = ("fp32",) if machine.SMALL else ("bf16", "amp")
HOWS = ("eager",) if machine.SMALL else ("compile", "eager", "max-autotune", "reduce-overhead")
EVERY = [*itertools.starmap(Setting, itertools.product(BUILDERS, HOWS, PRECISIONS))]
OURS = () if machine.SMALL else tuple(Setting(of, "compile", "bf16", LEAN) for of in ("vitfast", ACCELERATED))
INVARIANTS = (Setting("vitfast", "eager", precision, INVARIANT) for precision in PRECISIONS)
TRAINED = {s.name: s for s in (*EVERY, *OURS)}
INFERRED = {s.name: s for s in (*EVERY, *INVARIANTS)}
BATCHES = (64, 128, 256, 512)  # tried for throughput


@functools.cache
def best_batch(library: str, model: str) -> int:
    """The batch of the highest inference throughput of the library's eager model in bf16.

    It is used for all its settings. Batches that do not fit into the memory end the search.
    """
    if not machine.GPU:
        return MODELS[model].batch
    return machine.once(f"batch of {library} at {model}", lambda: _fastest_batch(library, model))


def _fastest_batch(library: str, model: str) -> int:
    speed = {}
    for batch in BATCHES:
        try:
            # eager: compiling each batch of each setting would take too long
            peer = Peer(Setting(library, "eager", "bf16"), replace(MODELS[model], batch=batch), training=False)
            with torch.inference_mode(), ops.use_kernels(peer.kernels):
                speed[batch] = batch / median_seconds(lambda p=peer: p(p.images), rounds=5)
        except torch.cuda.OutOfMemoryError:
            if not speed:
                raise
            break
    return max(speed, key=speed.get)


def work_of(peer: Peer) -> tuple[Callable[[Tensor], Tensor], Kernels]:
    """The function of a batch that is timed, and its work: a training step, or the forward pass."""
    size = peer.setting.dtype.itemsize
    if not peer.training:
        return peer, model_work(peer.shape, size).forward
    step, _ = learner(peer, lr=1e-5)
    labels = torch.randint(0, 1000, (peer.shape.batch,), device=machine.DEVICE)
    step_update = update(sum(p.numel() for p in peer.model.parameters()), size=peer.setting.stored.itemsize)
    return lambda images: step(images, labels), model_work(peer.shape, size).of("both") + step_update


def inference_peer(setting: Setting, model: str, what: str) -> Peer:
    """A peer for "latency" (one image) or "throughput" (at its library's best batch)."""
    batch = 1 if what == "latency" else best_batch(setting.library, model)
    return Peer(setting, replace(MODELS[model], batch=batch), training=False)


@pytest.mark.parametrize("setting", TRAINED)
@pytest.mark.parametrize("model", [pytest.param(model, id=shape.name) for model, shape in MODELS.items()])
def test_train(benchmark, model, setting):
    peer = Peer(TRAINED[setting], MODELS[model], training=True)
    bench(benchmark, Model(peer, "train", *work_of(peer)))


@pytest.mark.parametrize("what", ["latency", "throughput"])
@pytest.mark.parametrize("setting", INFERRED)
@pytest.mark.parametrize("model", MODELS)
def test_inference(benchmark, model, setting, what):
    peer = inference_peer(INFERRED[setting], model, what)
    bench(benchmark, Model(peer, what, *work_of(peer)))
