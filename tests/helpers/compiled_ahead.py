"""Packs what models launch, then runs the models on a stub GPU that compiles nothing; prints JSON.

    python compiled_ahead.py FOLDER sm_90 B/16 'L/16 384' ...
    python compiled_ahead.py FOLDER sm_80     # an inference of Nano/8 alone

The models run on CPU tensors, in bf16 and under PyTorch's own autocast, and Triton finds each kernel by what
VITFAST_KERNELS_CACHE names. TRITON_INTERPRET must be unset.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
from stub_gpu import stub_gpu
from torch.nn.functional import cross_entropy

import vitfast
from vitfast.cli import main
from vitfast.kernels import rows, tiles
from vitfast.tools.machine_code import compiler, model_launches, packing

BATCHES = (1, 32)  # from some 6,000 rows on other tiles are taken


def amp(model: vitfast.ViT) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=model.head.weight.dtype == torch.float32)


def inference(model: vitfast.ViT, images: torch.Tensor) -> None:
    with torch.inference_mode(), amp(model):
        model.eval()(images)


def training(model: vitfast.ViT, images: torch.Tensor) -> None:
    labels = torch.zeros(len(images), dtype=torch.long)
    for keep in ("least", "all"):
        model.set_keep(keep)
        with amp(model):
            loss = cross_entropy(model.train()(images).float(), labels)
        loss.backward()


def embedding(model: vitfast.ViT, count: int) -> None:
    """`vitfast embed` from pixels of another size to vectors, but for the check that these are numbers."""
    embedder = vitfast.Embedder(model.eval(), device="cpu", dtype=torch.bfloat16)
    with torch.inference_mode():
        embedder._forward(embedder.backbone.prepare([torch.zeros(3, 300, 400, dtype=torch.uint8)] * count))


def run(name: str, side: int) -> None:
    """All that a model is used for, at some batches; two blocks stand for all."""
    for dtype in (torch.bfloat16, torch.float32):
        model = vitfast.ViT.from_preset(name, depth=2, num_classes=10, img_size=side).to(dtype)
        for batch in BATCHES:
            pixels = torch.zeros(batch, 3, side, side, dtype=torch.uint8)
            for images in (pixels, pixels.float()):
                inference(model, images)
                training(model, images)
            embedding(model, batch)


def unknown(name: str, side: int, sm: int) -> list[str]:
    """Kernels that all the blocks of a model launch at other batches and on a smaller GPU, and that are not packed."""
    with tiles.using(sm=sm), model_launches.launching_on_meta():
        packed = {compiler.key_of(each, sm) for each in model_launches.model_launches(name, side)}
        before, rows.multiprocessors = rows.multiprocessors, lambda device: 46
        models = [model_launches.model(name, side, train, amp) for train in (False, True) for amp in (False, True)]
        found = [each for model in models for batch in (3, 100, 777) for each in model_launches.step(model, batch)]
        rows.multiprocessors = before
    return sorted({each.kernel.__name__ for each in found if compiler.key_of(each, sm) not in packed})


def pack_inference(archive: Path, sm: int) -> None:
    """Packs what an inference of Nano/8 in bf16 launches."""
    with torch.device("meta"):
        model = vitfast.ViT.from_preset("Nano/8", img_size=32).bfloat16().eval()
    with tiles.using(sm=sm), model_launches.launching_on_meta():
        packing.write_archive(archive, sm, model_launches.step(model, 2), ["Nano/8"], 2)


if __name__ == "__main__":
    folder, gpu, *models = sys.argv[1:]
    archive, sm = Path(folder, "kernels.tar.xz"), int(gpu[3:])
    if models:
        assert main(["kernels", "pack", "--gpu", gpu, "--model", *models, "--output", str(archive)]) == 0
    else:
        pack_inference(archive, sm)
    os.environ |= {"TRITON_CACHE_DIR": str(Path(folder, "cache")), "VITFAST_KERNELS_CACHE": str(archive)}
    warnings.simplefilter("error")
    sizes = {model: (model.partition(" ")[0], int(model.partition(" ")[2] or 224)) for model in models}
    found = {}
    with stub_gpu(sm) as launched:
        for model in models:
            run(*sizes[model])
            found[model] = dict(launched)
            launched.clear()
        if not models:
            inference(vitfast.ViT.from_preset("Nano/8", img_size=32).bfloat16(), torch.zeros(3, 3, 32, 32).bfloat16())
            found["Nano/8"] = dict(launched)
            try:  # so that the test can fail: float16 was not packed
                inference(vitfast.ViT.from_preset("Nano/8", img_size=32).half(), torch.zeros(3, 3, 32, 32).half())
            except AssertionError as error:
                found["float16"] = str(error)
    others = {model: unknown(*size, sm) for model, size in sizes.items()}
    print(json.dumps(dict(found=found, unknown=others, bytes=archive.stat().st_size)))
