"""Losses of the same training, ours and timm's, from the same weights on the same images.

A case is one run of a seed.

The task is made on the device: gratings of 10 directions x 10 frequencies, in random colours and phases under noise,
100 classes that take a ViT some hundred steps to tell apart. Compiled on a GPU. `extra_info` has `losses`, each the
mean of a window of steps; targets.py compares them over the seeds that both have run.
"""

import math

import clock
import pytest
import torch
from harness import describe, measure
from peers import BUILDERS, Peer, Setting, learner
from shapes import Shape, model_work, planned
from torch import Tensor

from vitfast import ops

MODELS = planned(Shape("S/16", 224, 128))
PRECISIONS = ("fp32",) if clock.SMALL else ("amp", "bf16")
STEPS, WINDOW = (1000, 50) if clock.GPU else (4, 2)


def gratings(generator: torch.Generator, batch: int, size: int) -> tuple[Tensor, Tensor]:
    """(images (B, 3, size, size) fp32, labels (B,)): a label is 10 * direction + frequency."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=generator.device)

    labels = torch.randint(100, (batch,), generator=generator, device=generator.device)
    angle, frequency = math.pi * (labels // 10) / 10, 2.0 + 1.5 * (labels % 10)
    y, x = torch.meshgrid(*[torch.linspace(0, 1, size, device=generator.device)] * 2, indexing="ij")
    along = angle.cos()[:, None, None] * x + angle.sin()[:, None, None] * y
    wave = (2 * math.pi * (frequency[:, None, None] * along + uniform(batch, 1, 1))).sin()
    images = wave[:, None] * (2 * uniform(batch, 3, 1, 1) - 1)
    return images + torch.randn(images.shape, generator=generator, device=generator.device), labels


def losses(setting: Setting, shape: Shape, seed: int) -> list[float]:
    """The mean loss of every window of a run from timm's initial weights of this seed."""
    torch.manual_seed(seed)
    with clock.DEVICE:
        weights = BUILDERS["timm"](shape).state_dict()
    peer = Peer(setting, shape, training=True)
    peer.model.load_state_dict(weights)
    step, optimizer = learner(peer, lr=1e-3)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (0.1 * STEPS)))
    generator, found = torch.Generator(clock.DEVICE).manual_seed(seed), []
    for _ in range(STEPS):
        images, labels = gratings(generator, shape.batch, shape.image)
        found.append(step(images.to(setting.stored), labels))
        warm_up.step()
    return torch.stack(found).double().unflatten(0, (-1, WINDOW)).mean(1).tolist()


@pytest.mark.parametrize("library", ["vitfast", "timm"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", MODELS)
def test_loss_curve(benchmark, model, precision, seed, library):
    shape, found = MODELS[model], []
    setting = Setting(library, "eager" if clock.SMALL else "compile", precision)
    with ops.use_kernels("on" if clock.GPU and library == "vitfast" else "auto"):
        seconds = measure(benchmark, lambda: found.extend(losses(setting, shape, seed)), rounds=1)
    facts = dict(op="loss curve", shape=model, direction="both", precision=precision, seed=seed, losses=found)
    kernels = model_work(shape, setting.dtype.itemsize).of("both") * STEPS
    describe(benchmark, setting.name, kernels, seconds, setting.dtype, **facts)
