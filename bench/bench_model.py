"""Whole ViTs: latency, throughput and a training step, against timm and others.

Logits, and in training every gradient, are compared with float64 before anything is timed and again after it
(peers.py). A training step is forward, cross-entropy, backward, clipping at norm 1 and fused AdamW. Precision bf16 has
weights and optimiser in bf16; amp has fp32 weights under autocast, where our own ViT keeps its residual stream in bf16
and timm's keeps it in fp32, so only `accelerate(timm)` has timm's numerics. max-autotune and compile run without
torch's own CUDA graphs, which reduce-overhead has. Latency is that of one call; throughput and training are timed in
whole steps back to back. Launches are included. "graphed" is vitfast.graphed, and for latency max-autotune has torch's
CUDA graphs too ("max-autotune-graphs"). In "least memory" our backward computes again what it can.
"batch-invariant" is our inference by vitfast.batch_invariant, whose cost is the difference to "vitfast eager".

`extra_info` has, beside what every case has: images_per_second; model_flops (3 times the forward pass in training) and
from it mfu_ceiling (of the matrix product measured in this run) and mfu_datasheet; attention, the SDPA backend that
measured fastest. The batch of throughput is each library's best of several.
"""

import itertools
from dataclasses import replace

import machine
import pytest
import torch
from harness import bench
from machine import median_seconds
from peers import BUILDERS, INVARIANT, LEAN, Peer, Setting
from result_files import ACCELERATED, BACKEND
from shapes import MAIN, Shape, here, shape_of

MODELS = {name.rpartition(" B")[0]: name for name in here(*MAIN)}  # shapes by names without the batch
PRECISIONS = ("fp32",) if machine.SMALL else ("bf16", "amp")
HOWS = ("eager",) if machine.SMALL else ("compile", "eager", "max-autotune", "reduce-overhead")
EVERY = [*itertools.starmap(Setting, itertools.product(BUILDERS, HOWS, PRECISIONS))]
OURS = () if machine.SMALL else tuple(Setting(of, "compile", "bf16", LEAN) for of in ("vitfast", ACCELERATED))
INVARIANTS = (Setting("vitfast", "eager", precision, INVARIANT) for precision in PRECISIONS)
TRAINED = {s.name: s for s in (*EVERY, *OURS)}
INFERRED = {s.name: s for s in (*EVERY, *INVARIANTS)}
GRAPHED = (Setting(of, "graphed", "bf16") for of in ("vitfast", ACCELERATED, BACKEND))
STRONGEST = (Setting("timm", how, "bf16") for how in ("max-autotune-graphs", "tensorrt"))
QUICKEST = INFERRED | ({} if machine.SMALL else {s.name: s for s in (*GRAPHED, *STRONGEST)})
SETTINGS = TRAINED | QUICKEST
FEW = [f"{model} B{count}" for model in MODELS for count in ((1,) if machine.SMALL else (1, 2, 4, 8))]
BATCHES = (64, 128, 256, 512)  # tried for throughput


def best_batch(library: str, shape: Shape) -> int:
    """The batch of the highest inference throughput of the library's eager model in bf16.

    It is used for all its settings. Batches that do not fit into the memory end the search.
    """

    def fastest() -> int:
        speed = {}
        for batch in BATCHES:
            try:
                # eager: compiling each batch of each setting would take too long
                peer = Peer(Setting(library, "eager", "bf16"), replace(shape, batch=batch), "throughput")
                with peer.context():
                    speed[batch] = batch / median_seconds(lambda p=peer: p(p.images), rounds=5)
            except torch.cuda.OutOfMemoryError:
                if not speed:
                    raise
                break
        return max(speed, key=speed.get)

    name = shape.name.rpartition(" B")[0]
    return machine.once(f"batch of {library} at {name}", fastest) if machine.GPU else shape.batch


def timed(what: str, shape: str, setting: str) -> Peer:
    """A model as it is timed: "train", "latency" (few images) or "throughput" (the best batch)."""
    s, made = shape_of(shape), SETTINGS[setting]
    if what == "throughput":
        s = replace(s, batch=best_batch(made.library, s))
    return Peer(made, s, what)


@pytest.mark.parametrize("setting", TRAINED)
@pytest.mark.parametrize("model", MODELS.values())
def test_train(benchmark, model, setting):
    bench(benchmark, timed("train", model, setting))


@pytest.mark.parametrize("setting", QUICKEST)
@pytest.mark.parametrize("shape", FEW)
def test_latency(benchmark, shape, setting):
    bench(benchmark, timed("latency", shape, setting))


@pytest.mark.parametrize("setting", INFERRED)
@pytest.mark.parametrize("model", MODELS)
def test_throughput(benchmark, model, setting):
    bench(benchmark, timed("throughput", MODELS[model], setting))
