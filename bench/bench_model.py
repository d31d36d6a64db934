"""Whole models: inference and a training step of the ViT against timm's VisionTransformer, results compared before anything is timed.

    pytest bench/ --benchmark-only

A CPU runs small cases, named so; a GPU the real shapes, in bf16 under torch.compile.
"""

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from vitfast import ViT

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
CASES = (
    {"S/16 224 B64": (dict(embed_dim=384, depth=12, num_heads=6), 64), "B/16 224 B64": (dict(), 64)}
    if GPU
    else {"cpu Ti/16 64px B4": (dict(img_size=64, embed_dim=192, depth=4, num_heads=3), 4)}
)


def make(impl: str, case: str, train: bool):
    """(function to time, images) of an implementation, checked against the other one in fp32 first."""
    options, batch = CASES[case]
    torch.manual_seed(0)
    ours, theirs = ViT(**options).to(DEVICE), VisionTransformer(**options).to(DEVICE)
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(batch, 3, *ours.patch_embed.img_size, device=DEVICE)
    with torch.no_grad():
        torch.testing.assert_close(ours(images[:2]), theirs(images[:2]), atol=1e-3, rtol=1e-3)
    model = (ours if impl == "vitfast" else theirs).train(train)
    if GPU:
        model, images = model.bfloat16(), images.bfloat16()
        model.compile()

    def run():
        with torch.set_grad_enabled(train):
            logits = model(images)
            if train:
                logits.float().square().mean().backward()
                model.zero_grad(set_to_none=True)
        if GPU:
            torch.cuda.synchronize()

    return run


@pytest.mark.parametrize("train", [False, True], ids=["inference", "forward+backward"])
@pytest.mark.parametrize("impl", ["vitfast", "timm"])
@pytest.mark.parametrize("case", CASES)
def test_model(benchmark, case, impl, train):
    run = make(impl, case, train)
    benchmark.extra_info.update(impl=impl, device=torch.cuda.get_device_name() if GPU else "cpu", flops=0, bytes=0)
    benchmark.pedantic(run, rounds=10, warmup_rounds=3)
