"""A pass of the resize at the edges of its tiles, against the formula in NumPy; the sanitizer watches."""

import numpy as np
import pytest
import torch

from vitfast import ops
from vitfast.data.resize import resize, taps
from vitfast.kernels.resize.passes import BLOCK_C, BLOCK_R, Source, resize_pass


def by_formula(x: np.ndarray, first: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """x (C, n, m) along its last axis."""
    sums = sum(w * x[..., first + k].astype(np.int64) for k, w in enumerate(weights.astype(np.int64)))
    return ((sums + (1 << 21)) >> 22).clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize("vertical", [False, True])
def test_a_pass_over_many_images_is_its_formula(vertical):
    """Results around a tile's sides, of parts of images that lie in one buffer."""
    rng = np.random.default_rng(0)
    sides = [(1, 1, 1), (3, BLOCK_R - 1, BLOCK_C + 1), (2, BLOCK_R, BLOCK_C), (1, 2 * BLOCK_R + 1, 2 * BLOCK_C - 1)]
    buffer, sources, wanted = rng.integers(0, 256, 60_000, dtype=np.uint8), [], []
    for start, (channels, height, width) in zip((5, 100, 20_000, 40_000), sides):
        n = 2 * (height if vertical else width) + 3
        rows, columns = (n, width) if vertical else (height, n)
        strides = (rows * (columns + 3), columns + 3)
        x = np.lib.stride_tricks.as_strided(buffer[start:], (channels, rows, columns), (*strides, 1))
        count = height if vertical else width
        t = taps(n, count, "lanczos", 0.0, float(n), range(count))
        sources.append(Source(start, *strides, channels, height, width, t.first, t.weights))
        along = by_formula(x.swapaxes(1, 2) if vertical else x, t.first, t.weights)
        wanted.append(along.swapaxes(1, 2) if vertical else along)
    got = resize_pass(torch.from_numpy(buffer), sources, vertical)
    assert np.array_equal(got, np.concatenate([each.ravel() for each in wanted]))


def test_plain_pytorch_and_kernels_agree_on_images_that_need_one_pass_each_or_none():
    images = [torch.randint(256, (3, 20, 30), dtype=torch.uint8) for _ in range(4)]
    sizes = [(20, 30), (10, 30), (20, 15), (7, 8)]
    with ops.use_kernels("on"):
        got = resize(images, sizes)
    for image, size, each in zip(images, sizes, got):
        assert torch.equal(each, resize(image, size))
        assert torch.equal(each, images[0]) if size == (20, 30) else True


@pytest.mark.gpu
def test_a_gpu_gives_the_bytes_of_the_cpu():
    rng = np.random.default_rng(1)
    for name in ("nearest", "box", "bilinear", "bicubic", "hamming", "lanczos"):
        images = [torch.randint(256, (3, *map(int, rng.integers(1, 700, 2))), dtype=torch.uint8) for _ in range(64)]
        sizes = [tuple(map(int, rng.integers(1, 500, 2))) for _ in images]
        for got, want in zip(resize([image.cuda() for image in images], sizes, name), resize(images, sizes, name)):
            assert torch.equal(got.cpu(), want), (want.shape, name)
    large = torch.randint(256, (3, 30_000, 25_000), dtype=torch.uint8, device="cuda")  # more than 2^31 bytes
    assert torch.equal(resize(large, (300, 251)).cpu(), resize(large.cpu(), (300, 251)))
