"""Embeddings: the forward alone, from memory, and from JPEG files, against a script of timm's parts.

The script is what people write today: files opened with Pillow, timm's evaluation transform, torch's
DataLoader with as many worker processes as there are cores, timm's model with the same weights, compiled and in bf16 on
a GPU, in inference mode. Both see the same photographs (bench_train.folder) and give the same vectors, which is checked
before and after. Times are by the wall clock, ours and the script's in turn.

`extra_info` has ratio (the script's seconds by ours), images_per_second of both, and waiting: the share of our time
that waits for images.
"""

import math
import statistics
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import machine
import pytest
import torch
from bench_train import MODELS, WORKERS, folder  # noqa: F401
from harness import DTYPE, compiled, description, measure
from machine import wall, warm_up
from peers import BUILDERS
from PIL import Image
from shapes import Shape, model_work, shape_of
from targets import STAGES
from torch import Tensor
from torch.utils.data import DataLoader

from vitfast import ViT
from vitfast.eval.embedder import Embedder

ROUNDS, IMAGES = (5, 4096) if machine.GPU else (3, 48)
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # on the distance of the two results, by norm


def collate(transform: Callable, images: list) -> Tensor:
    """A batch of images, or of the paths of their files."""
    opened = (i if isinstance(i, Image.Image) else Image.open(i).convert("RGB") for i in images)
    return torch.stack([transform(image) for image in opened])


class Script:
    """timm's model and transform, and torch's DataLoader."""

    def __init__(self, model: ViT, s: Shape):
        from timm.data import create_transform

        self.model = BUILDERS["timm"](s).to(machine.DEVICE, DTYPE).eval()
        self.model.reset_classifier(0)
        self.model.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("head.")})
        self.run = compiled(self.model, "compile") if machine.GPU else self.model
        options = dict(interpolation="bicubic", crop_pct=1.0, mean=model.mean, std=model.std)
        self.transform, self.batch = create_transform((3, s.image, s.image), **options), s.batch

    @torch.inference_mode()
    def embed(self, images: list) -> Tensor:
        options = dict(num_workers=WORKERS, pin_memory=machine.GPU, collate_fn=partial(collate, self.transform))
        loader = DataLoader(images, self.batch, **options)
        found = [self.run(batch.to(machine.DEVICE, DTYPE, non_blocking=True)).float() for batch in loader]
        return torch.cat(found).cpu()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("model", MODELS)
def test_embed(benchmark, folder, model, stage):  # noqa: F811
    s = shape_of(model)
    benchmark.group = f"embed, {stage} {model}"
    torch.manual_seed(0)
    vit = ViT.from_preset(s.model, img_size=s.image, num_classes=0).to(machine.DEVICE, DTYPE).eval()
    tokens = s.batch * s.tokens
    embedder = Embedder(vit, workers=WORKERS, tokens=tokens, graphs=machine.GPU)
    script = Script(vit, s)
    stages = SimpleNamespace(waiting=0.0)
    paths = sorted((folder / "train").rglob("*.jpg"))[:IMAGES]
    images = paths if stage == "files" else [Image.open(path).convert("RGB") for path in paths]
    if stage == "forward":
        options = dict(device=machine.DEVICE, dtype=torch.uint8)
        pixels = torch.randint(0, 256, (s.batch, 3, s.image, s.image), **options)
        floats = ((pixels / 255 - 0.5) / 0.5).to(DTYPE)
        ours = torch.inference_mode()(lambda: embedder.backbone.embed(pixels).float().cpu())
        theirs = torch.inference_mode()(lambda: script.run(floats).float().cpu())
        count = s.batch
    else:

        def ours() -> Tensor:
            items = ((None, image, "") for image in images)
            return torch.stack([torch.from_numpy(r.vector) for _, r in embedder.stream_groups(items, stages)])

        theirs, count = partial(script.embed, images), len(images)

    def check() -> float:
        truth = theirs()
        error = ((ours() - truth).norm() / truth.norm()).item()
        assert error <= LIMIT[DTYPE], f"the two differ by {error:.1e}: no time for a wrong result"
        return error

    def time_theirs() -> None:
        start = wall()
        theirs()
        script_seconds.append(wall() - start)

    error = check()
    warm_up(ours), warm_up(theirs)
    stages.waiting, script_seconds = 0.0, []
    took = measure(benchmark, ours, setup=time_theirs, rounds=ROUNDS, timer=wall)
    other, total = statistics.median(script_seconds), benchmark.stats.stats.total if benchmark.stats else math.nan
    info = dict(op="embed", shape=model, direction="forward", stage=stage, batch=s.batch, workers=WORKERS)
    info |= dict(ratio=other / took, images_per_second=count / took, script_images_per_second=count / other)
    info |= dict(waiting=stages.waiting / total, error=error)
    work = model_work(s, DTYPE.itemsize).forward * max(1, count // s.batch)
    benchmark.extra_info.update(description("vitfast", work, took, DTYPE, error_after=check(), **info))
