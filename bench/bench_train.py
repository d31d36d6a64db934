"""Many steps of training, ours against timm's: from JPEG files on disk, and the losses.

From files: random crops of scikit-learn's two photographs, so that nothing is downloaded. Both decode, crop (scale 0.08
to 1), resize (bicubic) and mirror in the same number of processes, and train in bf16 under autocast with clipping and
fused AdamW, compiled on a GPU. Ours hands raw uint8 to the model, timm's loader normalises on the device while it
prefetches. Times are by the wall clock. waiting_for_data is the share of the time that the same steps on a batch in
memory would not take.

Losses: both start from the same weights and see the same images, made on the device: gratings of 10 directions x 10
frequencies, in random colours and phases under noise, 100 classes that take a ViT some hundred steps to tell apart. A
case is one run of a seed; its `extra_info` has `losses`, each the mean of a window of steps, which targets.py compares.
"""

import itertools
import math
import os
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import machine
import pytest
import torch
from harness import DTYPE, description, measure
from machine import wall, warm_up
from peers import BUILDERS, Peer, Setting, learner
from PIL import Image
from result_files import BACKEND
from shapes import Shape, here, model_work, shape_of
from torch import Tensor

# ---- from files

MODELS = here("S/16 224 B256", "B/16 224 B256")
FILES, SIZE = (4096, (375, 500)) if machine.GPU else (64, (120, 160))
STEPS, ROUNDS, WARMUP = (20, 5, 8) if machine.GPU else (2, 3, 1)
WORKERS = len(os.sched_getaffinity(0))
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A folder of FILES JPEGs of SIZE (height, width), a tenth of them in val.

    They are {train,val}/<photograph>/*.jpg. Each is a crop of a quarter to all of the area, resized and compressed at
    quality 90: about 100 KB at 375 x 500.
    """
    from sklearn.datasets import load_sample_images
    from torchvision.transforms import InterpolationMode, RandomResizedCrop

    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    crop = RandomResizedCrop(SIZE, (0.25, 1.0), interpolation=InterpolationMode.BICUBIC)
    folder = tmp_path_factory.mktemp("photographs")

    def write(index: int) -> None:
        path = folder / ("val" if index % 20 < 2 else "train") / str(index % 2) / f"{index:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        crop(photographs[index % 2]).save(path, quality=90)

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, range(FILES)))
    return folder


def ours(folder, s: Shape) -> tuple[Iterator, Callable]:
    """(batches, step) of vitfast.train's loop."""
    from vitfast.train.recipes import resolve
    from vitfast.train.trainer import Trainer

    where = dict(data=str(folder), output=str(folder / "run"), workers=WORKERS)
    sizes = dict(model=s.model, img_size=s.image, batch_size=s.batch, steps=10**6)
    training = dict(lr=1e-4, weight_decay=0.05, clip_norm=1.0, hidden_head=False, weight_init="", dropout=0.0)
    crops = dict(crop_scale=SCALE, crop_ratio=RATIO)
    config = resolve("pretrain", sizes | training | crops, where)
    trainer, steps = Trainer(config, resume="never"), itertools.count()
    trainer.train_step.model.train()

    def step(images, labels):
        trainer.train_step(images, labels, next(steps), trainer.total)

    return iter(trainer.data.train_batches(0, trainer.total)), step


def timms(folder, s: Shape) -> tuple[Iterator, Callable]:
    """(batches, step) of timm's loader, with its prefetcher, and a plain training step of timm's model."""
    from timm.data import create_dataset, create_loader

    dataset, size = create_dataset("", root=str(folder / "train")), (3, s.image, s.image)
    augmentation = dict(scale=SCALE, ratio=RATIO, hflip=0.5, color_jitter=None, interpolation="bicubic")
    augmentation |= dict(mean=(0.5,) * 3, std=(0.5,) * 3)
    options = dict(is_training=True, num_workers=WORKERS, device=machine.DEVICE)
    loader = create_loader(dataset, size, s.batch, **augmentation, **options)
    peer = Peer(Setting("timm", *(("compile", "amp") if machine.GPU else ("eager", "fp32"))), s, "train")
    with machine.DEVICE:
        peer.model.reset_classifier(len(list((folder / "train").iterdir())))
    return itertools.chain.from_iterable(itertools.repeat(loader)), learner(peer, lr=1e-4)[0]


@pytest.mark.parametrize("impl", ["vitfast", "timm"])
@pytest.mark.parametrize("model", MODELS)
def test_train_from_files(benchmark, folder, model, impl):
    s = shape_of(model)
    benchmark.group = f"train from JPEG files {model}"
    batches, step = dict(vitfast=ours, timm=timms)[impl](folder, s)
    for batch in itertools.islice(batches, WARMUP):
        assert batch[0].shape == (s.batch, 3, s.image, s.image), batch[0].shape
        step(*batch[:2])
    warm_up(lambda: step(*batch[:2]))

    def run(source: Iterator) -> float:
        """The seconds that STEPS steps take."""
        start = wall()
        for images, labels, *_ in itertools.islice(source, STEPS):
            step(images, labels)
        return wall() - start

    alone = statistics.median(run(itertools.repeat(batch)) for _ in range(ROUNDS))
    seconds = measure(benchmark, lambda: run(batches), rounds=ROUNDS, timer=wall)
    info = dict(op="train from JPEG files", shape=model, direction="both", batch=s.batch, workers=WORKERS)
    rates = dict(images_per_second=STEPS * s.batch / seconds, images_per_second_in_memory=STEPS * s.batch / alone)
    info |= rates | dict(waiting_for_data=max(0.0, 1 - alone / seconds))
    work = model_work(s, DTYPE.itemsize).of("both") * STEPS
    benchmark.extra_info.update(description(impl, work, seconds, DTYPE, **info))


# ---- losses

PRECISIONS = ("fp32",) if machine.SMALL else ("amp", "bf16")
CURVE_STEPS, WINDOW = (1000, 50) if machine.GPU else (4, 2)


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
    with machine.DEVICE:
        weights = BUILDERS["timm"](shape).state_dict()
    peer = Peer(setting, shape, "train")
    peer.model.load_state_dict(weights)
    step, optimizer = learner(peer, lr=1e-3)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (0.1 * CURVE_STEPS)))
    generator, found = torch.Generator(machine.DEVICE).manual_seed(seed), []
    with peer.context():
        for _ in range(CURVE_STEPS):
            images, labels = gratings(generator, shape.batch, shape.image)
            found.append(step(images.to(setting.stored), labels))
            warmup.step()
    return torch.stack(found).double().unflatten(0, (-1, WINDOW)).mean(1).tolist()


@pytest.mark.parametrize("library", ["vitfast", BACKEND, "timm"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", here("S/16 224 B128"))
def test_loss_curve(benchmark, model, precision, seed, library):
    shape, found = shape_of(model), []
    setting = Setting(library, "eager" if machine.SMALL else "compile", precision)
    seconds = measure(benchmark, lambda: found.extend(losses(setting, shape, seed)), rounds=1)
    facts = dict(op="loss curve", shape=model, direction="both", precision=precision, seed=seed, losses=found)
    kernels = model_work(shape, setting.dtype.itemsize).of("both") * CURVE_STEPS
    benchmark.extra_info.update(description(setting.name, kernels, seconds, setting.dtype, **facts))
