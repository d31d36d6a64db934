"""Whole ViTs, latency, throughput and a training step, against timm, Hugging Face, torchvision.

Logits, and in training every gradient, are compared with float64 before anything is timed and again after it
(peers.py). A training step is forward, cross-entropy, backward, clipping at norm 1 and fused AdamW. Precision bf16:
weights and optimiser in bf16; amp: fp32 weights under autocast, where our own ViT keeps its residual stream in bf16 and
timm's keeps fp32: `accelerate(timm)` is the pair of equal numerics. max-autotune and compile run without torch's own
CUDA graphs: latency captures one for everybody, eager too, and at the batches of throughput and training the device is
the bottleneck; their time is of whole steps back to back, nothing hidden. Ours is measured first and, as "vitfast
compile bf16 again", after the peers that it is compared with: the slower of the two counts.

`extra_info` has, beside what every case has: images_per_second; in throughput batch_search, the setting that the
library's best batch was searched with, whatever setting is then timed (None on a CPU: no search); model_flops (3 times
the forward pass in training) and from it mfu_ceiling (of the matrix product measured in this run) and mfu_datasheet;
attention, the SDPA backend that measured fastest.
"""

import functools
import itertools
from dataclasses import replace

import clock
import machine
import pytest
import torch
import torch.nn.functional as F
from clock import allocated, captured, cold, median_seconds, peak_bytes, warm_up
from harness import describe, measure
from peers import BUILDERS, Peer, Setting
from shapes import CPU_SHAPE, MAIN, Shape, model_work, planned

from vitfast import ops
from vitfast.tools.cost import datasheet_flops
from vitfast.tools.cost.work import total_flops, update

LEADING = (  # what decides, first: a stage has no time for all
    Setting("vitfast", "compile", "bf16"),
    Setting("timm", "compile", "bf16"),
    Setting("vitfast", "compile", "amp"),
    Setting("timm", "compile", "amp"),
    Setting("vitfast", "compile", "bf16", again=True),
    Setting("vitfast.accelerate(timm)", "compile", "bf16"),
    Setting("vitfast.accelerate(timm)", "compile", "amp"),
    Setting("huggingface", "compile", "bf16"),
    Setting("torchvision", "compile", "bf16"),
    Setting("timm", "max-autotune", "bf16"),
    Setting("timm", "max-autotune", "amp"),
)
EVERY = itertools.starmap(Setting, itertools.product(BUILDERS, ("eager", "compile", "max-autotune"), ("bf16", "amp")))
SETTINGS = tuple(dict.fromkeys((*LEADING, *EVERY)))
CPU_SETTINGS = tuple(Setting(library, "eager", "fp32") for library in BUILDERS)
# Without the batch, which is that of the training step.
MODELS = {s.name.rpartition(" B")[0]: s for s in planned(MAIN, CPU_SHAPE)}
CASES = {s.name: s for s in (SETTINGS if clock.GPU or clock.REHEARSED else CPU_SETTINGS)}
ONCE = [name for name, setting in CASES.items() if not setting.again]
BATCHES = (64, 128, 256, 512)  # tried for throughput
SEARCH = ("eager", "bf16")  # how: compiling each batch of each setting would take too long
STEPS = 3 if clock.GPU else 1  # calls per timed round


@functools.cache
def best_batch(library: str, model: str) -> int:
    """The batch of the highest inference throughput of the library's eager model in bf16.

    It is used for all its settings. Raises RuntimeError where the smallest batch does not fit into the memory.
    """
    if not clock.GPU:
        return MODELS[model].batch
    speed = {}
    for batch in BATCHES:
        shape = Shape(MODELS[model].model, MODELS[model].image, batch)
        try:
            peer = Peer(Setting(library, *SEARCH), shape, training=False)
            with torch.inference_mode(), ops.use_kernels(peer.kernels):
                speed[batch] = batch / median_seconds(lambda p=peer: p(p.images), rounds=5)
        except torch.cuda.OutOfMemoryError:
            break
    if not speed:
        why = f"{' '.join(SEARCH)} runs out of memory at {BATCHES[0]} images"
        raise RuntimeError(f"no batch for {library} {model}: {why}")
    return max(speed, key=speed.get)


def facts(shape: Shape, peer: Peer, seconds: float, training: bool) -> dict:
    """extra_info of whole models.

    FLOPs by the convention of MFU (Chowdhery et al., 2022): those of the forward pass, three times where it trains.
    """
    flops = (3 if training else 1) * total_flops(model_work(shape, 2).forward)
    ceiling = machine.ceilings()[str(peer.setting.dtype).removeprefix("torch.")]
    promised = datasheet_flops(machine.name())
    return dict(
        shape=shape.name,
        batch=shape.batch,
        precision=peer.setting.precision,
        attention=peer.backend or "vitfast",
        images_per_second=shape.batch / seconds,
        model_flops=int(flops),
        mfu_ceiling=flops / seconds / ceiling,
        mfu_datasheet=flops / seconds / promised if promised else None,
    )


@pytest.mark.parametrize("setting", CASES)
@pytest.mark.parametrize("model", [pytest.param(model, id=shape.name) for model, shape in MODELS.items()])
def test_train(benchmark, model, setting):
    shape = MODELS[model]
    benchmark.group = f"train {model}"
    before = allocated()
    peer = Peer(CASES[setting], shape, training=True)
    with ops.use_kernels(peer.kernels):
        errors = peer.check()
        parameters = list(peer.model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=1e-5, weight_decay=0.05, fused=True)
        labels = torch.randint(0, 1000, (shape.batch,), device=clock.DEVICE)
        images = [peer.images]

        def step(batch):
            F.cross_entropy(peer(batch).float(), labels).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        def run():
            for batch in images:
                step(batch)

        warm_up(run, seconds=clock.WARM_SECONDS)
        peak = peak_bytes(run, before)
        images += [torch.randn_like(peer.images) for _ in range(STEPS - 1)]
        seconds = measure(benchmark, run, calls=len(images), rounds=max(3, clock.ROUNDS // 3))
        errors |= peer.check_again()
    dtype = peer.setting.dtype
    step_update = update(sum(p.numel() for p in parameters), size=parameters[0].element_size())
    kernels = model_work(shape, dtype.itemsize).of("both") + step_update
    info = dict(op="train", direction="both", **facts(shape, peer, seconds, training=True), **errors)
    describe(benchmark, setting, kernels, seconds, dtype, peak, **info)


@pytest.mark.parametrize("what", ["latency", "throughput"])
@pytest.mark.parametrize("setting", ONCE)
@pytest.mark.parametrize("model", MODELS)
def test_inference(benchmark, model, setting, what):
    wanted = MODELS[model]
    batch = 1 if what == "latency" else best_batch(CASES[setting].library, model)
    shape = replace(wanted, batch=batch)
    benchmark.group = f"{what} {model}"
    before = allocated()
    peer = Peer(CASES[setting], shape, training=False)
    with ops.use_kernels(peer.kernels), torch.inference_mode():
        errors = peer.check()
        images = [peer.images]

        def run():
            for batch in images:
                peer(batch)

        warm_up(run, seconds=clock.WARM_SECONDS)
        peak, graph = peak_bytes(run, before), clock.GPU and what == "latency"
        if graph:
            seconds = measure(benchmark, captured(run), cold)
        else:
            images += [torch.randn_like(peer.images) for _ in range(STEPS - 1)]
            seconds = measure(benchmark, run, calls=len(images), rounds=max(5, clock.ROUNDS // 2))
        errors |= peer.check_again()
    dtype, more = peer.setting.dtype, facts(shape, peer, seconds, training=False) | errors
    if what == "throughput":
        more["batch_search"] = " ".join(SEARCH) if clock.GPU else None
    info = dict(op=what, direction="forward", cuda_graph=graph, **more)
    describe(benchmark, setting, model_work(shape, dtype.itemsize).forward, seconds, dtype, peak, **info)
