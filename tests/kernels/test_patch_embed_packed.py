"""Patch embedding of images of many sizes, interpreted, against float64 on each image alone."""

import pytest
import torch
from test_attention import DTYPES

from vitfast import ops, ref
from vitfast.kernels import launch, tiles

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="interpreted kernels; test_gpu.py runs the real ones")

TOL = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of the largest number: one rounding, and sums
COUNTS = {"many": [5, 40, 1, 17], "of none": [0, 9, 0, 30, 0], "one": [33]}


def alone(images, counts, weight, bias, cls_token, pos_embed, **normal):
    """Each image by itself: its patches as images of one patch, then its prefix before them."""
    found, first = [], 0
    for count in counts:
        part = slice(first, first + count)
        x = ref.patch_embed(images[part], weight, bias, **normal)[:, 0]
        x = x if pos_embed is None else x + pos_embed[part]
        found.append(x if cls_token is None else torch.cat([cls_token[0], x]))
        first += count
    return torch.cat(found)


@pytest.fixture(params=["triton", "cublas"])
def provider(request):
    if request.param == "triton":
        yield
        return
    with tiles.override("patch_embed_fwd", tiles.tile(provider="cublas")):
        with tiles.override("patch_embed_dweight", tiles.tile(provider="cublas")):
            with tiles.override("patch_embed_dimages", tiles.tile(provider="cublas")):
                yield


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("raw, prefix, patch", [(True, 1, (4, 4)), (False, 3, (2, 6)), (True, 0, (7, 7))])
def test_packed_patches_are_each_images_own(counts, raw, prefix, patch, dtype, provider, kernels_on_nan):
    N, D, C = sum(counts), 40, 3
    shape, normal = (N, C, *patch), dict(mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7)) if raw else {}
    images = torch.randint(0, 256, shape, dtype=torch.uint8) if raw else torch.randn(shape).to(dtype)
    parameters = [torch.randn(D, *shape[1:]).mul(0.1), torch.randn(D), torch.randn(N, D), torch.randn(1, prefix, D)]
    floats = [t.to(dtype) for t in ([] if raw else [images]) + parameters[: 3 + bool(prefix)]]
    offsets = torch.tensor([0, *counts]).cumsum(0)

    def run(leaves, function):
        leaves = [t.detach().clone().requires_grad_() for t in leaves]
        pixels, (w, b, pos, *cls) = (images, leaves) if raw else (leaves[0], leaves[1:])
        y = function(pixels, w, b, cls[0] if cls else None, pos)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]

    dy = torch.randn(N + len(counts) * prefix, D).to(dtype)
    ours = run(floats, lambda i, w, b, c, p: ops.patch_embed(i, w, b, c, p, offsets=offsets, **normal))
    truth = run([t.double() for t in floats], lambda i, w, b, c, p: alone(i, counts, w, b, c, p, **normal))
    for mine, exact in zip(ours, truth, strict=True):
        assert mine.dtype == dtype and mine.shape == exact.shape
        limit = TOL[dtype] * exact.abs().max().item()
        assert (mine - exact).abs().max().item() <= limit


def test_only_what_is_needed_is_computed(kernels_on_nan):
    images, offsets = torch.randn(9, 3, 4, 4), torch.tensor([0, 4, 9])
    weight, cls = torch.randn(8, 3, 4, 4), torch.randn(1, 2, 8, requires_grad=True)
    y = ops.patch_embed(images, weight, None, cls, None, offsets=offsets)
    before, dy = launch.launches_made(), torch.randn_like(y)
    grad = torch.autograd.grad(y, cls, dy)[0]
    assert launch.launches_made() == before  # a sum of PyTorch's over the prefix tokens
    torch.testing.assert_close(grad[0], dy[:2] + dy[6:8])
