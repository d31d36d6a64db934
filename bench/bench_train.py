"""End to end, JPEG files on disk to optimiser steps: vitfast's loader and loop against timm's.

The files are random crops of scikit-learn's two photographs: nothing is downloaded. Both decode, crop (scale 0.08 to
1), resize (bicubic) and mirror in the same number of processes, and train in bf16 under autocast with clipping and
fused AdamW, compiled on a GPU. Ours hands raw uint8 to the model, timm's loader normalises on the device while it
prefetches. Times are by the clock on the wall. waiting_for_data: the share of it that the same steps on a batch in
memory would not take.
"""

import itertools
import os
import random
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import clock
import pytest
import torch
from clock import wall, warm_up
from harness import describe, measure
from peers import Peer, Setting, learner
from PIL import Image
from shapes import Shape, model_work, planned

MODELS = planned(Shape("S/16", 224, 256), Shape("B/16", 224, 256))
FILES, SIZE = (4096, (500, 375)) if clock.GPU else (64, (160, 120))
STEPS, ROUNDS, WARMUP = (20, 5, 8) if clock.GPU else (2, 3, 1)
WORKERS = len(os.sched_getaffinity(0))
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def write_photographs(folder: Path, count: int, size: tuple[int, int]) -> Path:
    """Writes `count` JPEGs of `size` (width, height), a tenth of them in val.

    They are folder/{train,val}/<photograph>/*.jpg. Each is a crop of a quarter to all of the area, resized and
    compressed at quality 90: about 100 KB at 500 x 375.
    """
    from sklearn.datasets import load_sample_images

    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]

    def write(index: int) -> None:
        rng, photo = random.Random(index), photographs[index % 2]
        width, height = (round(side * rng.uniform(0.5, 1)) for side in photo.size)
        left, top = rng.randint(0, photo.width - width), rng.randint(0, photo.height - height)
        crop = photo.resize(size, Image.Resampling.BICUBIC, (left, top, left + width, top + height))
        path = folder / ("val" if index % 20 < 2 else "train") / str(index % 2) / f"{index:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        crop.save(path, quality=90)

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, range(count)))
    return folder


@pytest.fixture(scope="session")
def photographs(tmp_path_factory):
    return write_photographs(tmp_path_factory.mktemp("photographs"), FILES, SIZE)


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
    options = dict(is_training=True, num_workers=WORKERS, device=clock.DEVICE)
    loader = create_loader(dataset, size, s.batch, **augmentation, **options)
    peer = Peer(Setting("timm", *(("compile", "amp") if clock.GPU else ("eager", "fp32"))), s, training=True)
    with clock.DEVICE:
        peer.model.reset_classifier(len(list((folder / "train").iterdir())))
    return itertools.chain.from_iterable(itertools.repeat(loader)), learner(peer, lr=1e-4)[0]


@pytest.mark.parametrize("impl", ["vitfast", "timm"])
@pytest.mark.parametrize("model", MODELS)
def test_train_from_files(benchmark, photographs, model, impl):
    s = MODELS[model]
    benchmark.group = f"train from JPEG files {model}"
    batches, step = dict(vitfast=ours, timm=timms)[impl](photographs, s)
    for batch in itertools.islice(batches, WARMUP):
        assert batch[0].shape == (s.batch, 3, s.image, s.image), batch[0].shape
        step(*batch[:2])
    warm_up(lambda: step(*batch[:2]), seconds=clock.WARM_SECONDS)

    def run(source: Iterator) -> float:
        """The seconds of some steps."""
        start = wall()
        for images, labels, *_ in itertools.islice(source, STEPS):
            step(images, labels)
        return wall() - start

    alone = statistics.median(run(itertools.repeat(batch)) for _ in range(ROUNDS))
    seconds = measure(benchmark, lambda: run(batches), rounds=ROUNDS, timer=wall)
    dtype = torch.bfloat16 if clock.GPU else torch.float32
    info = dict(op="train from JPEG files", shape=model, direction="both", batch=s.batch, workers=WORKERS)
    rates = dict(images_per_second=STEPS * s.batch / seconds, images_per_second_in_memory=STEPS * s.batch / alone)
    info |= rates | dict(waiting_for_data=max(0.0, 1 - alone / seconds))
    describe(benchmark, impl, model_work(s, dtype.itemsize).of("both") * STEPS, seconds, dtype, **info)
