"""Pillow's resize of 8-bit images, bit for bit, on the CPU and the GPU.

A resize is one pass along the rows and one along the columns. Output i of n_out, over [start, end) of n_in pixels, has
its centre at start + (i + 0.5) scale, where scale = (end - start) / n_out; the filter is `max(scale, 1)` times as wide
as its support, and its values in double precision are divided by their sum. These weights become integers of 22 bits
after the point, a pixel is a rounded sum of products of integers, and between the passes it has 8 bits again. So the
order of the passes matters: Pillow 12 begins with the rows. Pillow 13 begins with the columns where the height shrinks,
by more than twice the pixels that the width shrinks by.

Checked against Pillow on x86-64. A compiler that fuses a product and a sum, as on ARM, may round a weight otherwise.
"""

import functools
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Literal, NamedTuple

import numpy as np
import PIL
import torch
from torch import Tensor

from ..errors import both_ends
from ..model.config import Interpolation
from ..ops.dispatch import NO_TRITON, kernels_wanted

if NO_TRITON is None:
    from ..kernels.resize import passes as kernels

Box = tuple[float, float, float, float]
PILLOWS = ("12", "13")  # the orders of the passes, by the first version that has them


def order_of(version: str) -> Literal["12", "13"]:
    """The order in which a version of Pillow runs the passes; later versions are taken for the newest."""
    return PILLOWS[int(version.split(".")[0]) >= 13]


INSTALLED = order_of(PIL.__version__)
BITS = 22
_elementwise = functools.partial(np.vectorize, otypes=[np.float64])
_sin, _cos = _elementwise(math.sin), _elementwise(math.cos)  # NumPy's own may differ from C's in the last bit


def _bicubic(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    near, far = (1.5 * x - 2.5) * x * x + 1.0, (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _sinc(x: np.ndarray) -> np.ndarray:
    x = np.where(x == 0, 1e-30, x) * math.pi  # sin(x) / x is 1 there
    return _sin(x) / x


def _hamming(x: np.ndarray) -> np.ndarray:
    window = float(np.float32(0.54)) + float(np.float32(0.46)) * _cos(x * math.pi)  # Pillow has these two as floats
    return np.where(x == 0, 1.0, np.where(np.abs(x) < 1, _sinc(x) * window, 0.0))


# Name -> (its function, its support). The order is that of Pillow's numbers.
FILTERS: dict[str, tuple[Callable | None, float]] = {
    "nearest": (None, 0.0),
    "lanczos": (lambda x: np.where((x >= -3) & (x < 3), _sinc(x) * _sinc(x / 3.0), 0.0), 3.0),
    "bilinear": (lambda x: np.maximum(1.0 - np.abs(x), 0.0), 1.0),
    "bicubic": (_bicubic, 2.0),
    "box": (lambda x: np.where((x > -0.5) & (x <= 0.5), 1.0, 0.0), 0.5),
    "hamming": (_hamming, 1.0),
}


class Taps(NamedTuple):
    """The coefficients of one axis: output i is sum_k weights[k, i] pixels[source][first[i] + k]."""

    source: range  # the pixels that the outputs depend on
    first: np.ndarray  # (n,) int32, never falling
    weights: np.ndarray  # (K, n) int32
    changes: bool  # False where the outputs are the source itself


@functools.lru_cache(256)
def taps(n_in: int, n_out: int, resample: str, start: float, end: float, outputs: range) -> Taps:
    """The coefficients of `outputs`, some of n_out, over [start, end) (fp32 numbers) of n_in pixels."""
    scale, changes = float(np.float32(end) - np.float32(start)) / n_out, (n_out, 0, n_out) != (n_in, start, end)
    if not changes:
        first, weights = np.array(outputs), np.full((1, len(outputs)), 1 << BITS)
    elif resample == "nearest":
        # Pillow adds up scales, and leaves a pixel beyond the image black.
        place = np.cumsum([start + 0.5 * scale, *[scale] * (outputs.stop - 1)])[outputs.start :].astype(np.int64)
        first, weights = np.minimum(place, n_in - 1), (place < n_in)[None] * (1 << BITS)
    else:
        first, weights = _filtered(n_in, *FILTERS[resample], start + (np.array(outputs) + 0.5) * scale, scale)
    source = range(int(first[0]), int(first[-1]) + len(weights))
    return Taps(source, (first - source.start).astype(np.int32), weights.astype(np.int32), changes)


def _filtered(n_in: int, function: Callable, support: float, center: np.ndarray, scale: float) -> tuple:
    """(first, weights), with equally many weights for each output: those outside its filter are 0."""
    wide = max(scale, 1.0)
    support *= wide
    begin = np.maximum((center - support + 0.5).astype(np.int64), 0)
    stop = np.minimum((center + support + 0.5).astype(np.int64), n_in)
    count = max(1, int((stop - begin).max()))
    first = np.minimum(begin, n_in - count)
    x = first + np.arange(count)[:, None]
    weights = np.where((x >= begin) & (x < stop), function((x - center + 0.5) * (1.0 / wide)), 0.0)
    total = np.cumsum(weights, 0)[-1]  # one after the other, as Pillow adds them
    weights = weights / np.where(total == 0, 1.0, total)
    return first, np.trunc(weights * (1 << BITS) + np.where(weights < 0, -0.5, 0.5))


class Plan(NamedTuple):
    """The two passes over an image, of which one or both may change nothing."""

    rows: Taps  # the vertical pass
    columns: Taps
    columns_first: bool  # whether the vertical pass, which runs along columns, comes first


def _plan(image: Tensor, size: tuple | None, box: tuple | None, crop: tuple | None, resample: str, pillow: str) -> Plan:
    """The passes over an image. Raises ValueError for a size, box or crop that is not possible."""
    _, height, width = image.shape
    if size is None or not all(side.is_integer() and side >= 1 for side in size):
        raise ValueError(f"resize: size must be two whole numbers from 1 on, (height, width), got {size}")
    h, w = map(int, size)
    left, top, right, bottom = (float(np.float32(edge)) for edge in box or (0, 0, width, height))  # fp32 as in Pillow
    if not (0 <= left <= right <= width and 0 <= top <= bottom <= height):
        where = f"(left, top, right, bottom) inside an image of {height} x {width} (height x width)"
        raise ValueError(f"resize: box must be {where}, got {box}")
    whole = all(number.is_integer() and number >= 0 for number in crop or ())
    y, x, ch, cw = map(int, crop or (0, 0, h, w)) if whole else (0, 0, 0, 0)
    if ch < 1 or cw < 1 or y + ch > h or x + cw > w:
        where = f"(top, left, height, width) inside a result of {h} x {w}"
        raise ValueError(f"resize: crop must be whole numbers {where}, got {crop}")
    columns_first = pillow == "13" and height > h and height - h > 2 * (width - w)
    rows = taps(height, h, resample, top, bottom, range(y, y + ch))
    return Plan(rows, taps(width, w, resample, left, right, range(x, x + cw)), columns_first)


# ---- the passes in plain PyTorch


def _plain(image: Tensor, plan: Plan) -> Tensor:
    rows, columns = plan.rows.source, plan.columns.source
    image = image[:, rows.start : rows.stop, columns.start : columns.stop]
    axes = [(t, dim) for t, dim in ((plan.rows, 1), (plan.columns, 2)) if t.changes]
    for t, dim in axes if plan.columns_first else reversed(axes):
        image = _plain_pass(image, t, dim)
    return image if axes else image.clone(memory_format=torch.contiguous_format)


def _plain_pass(image: Tensor, t: Taps, dim: int) -> Tensor:
    """A pass along an axis of (C, H, W), as products of matrices in fp64, which holds these sums exactly."""
    (count, n), device = t.weights.shape, image.device
    if count == 1:  # the weight is 1, or 0 beyond the image
        image, inside = image.index_select(dim, torch.from_numpy(t.first).to(device)), t.weights[0] != 0
        if inside.all():
            return image
        return image * torch.from_numpy(inside[:, None] if dim == 1 else inside).to(device)
    out = image.new_empty([*image.shape[:dim], n, *image.shape[dim + 1 :]])
    step = max(8, min(n, count * n // len(t.source)))  # so that a matrix is at most half zeros
    for i in range(0, n, step):
        first, weights = t.first[i : i + step], t.weights[:, i : i + step]
        matrix = np.zeros((int(first[-1] - first[0]) + count, len(first)))
        matrix[first - first[0] + np.arange(count)[:, None], np.arange(len(first))] = weights
        matrix = torch.from_numpy(matrix).to(device)
        pixels = image.narrow(dim, int(first[0]), len(matrix)).double()
        sums = matrix.T @ pixels if dim == 1 else pixels @ matrix
        sums = sums.add_(1 << (BITS - 1)).mul_(2.0**-BITS).floor_().clamp_(0, 255)
        out.narrow(dim, i, len(first)).copy_(sums)
    return out


# ---- the passes on kernels


def _by_kernels(images: list[Tensor], plans: list[Plan]) -> list[Tensor]:
    """The results, views of one buffer for the images whose first pass is the same."""
    results: dict[int, Tensor] = {}
    for columns_first in (False, True):
        chosen = [i for i, each in enumerate(plans) if each.columns_first == columns_first]
        if chosen:
            parts = _together([images[i] for i in chosen], [plans[i] for i in chosen], columns_first)
            results |= dict(zip(chosen, parts))
    return [results[i] for i in range(len(images))]


def _together(images: list[Tensor], plans: list[Plan], columns_first: bool) -> list[Tensor]:
    """The results for images whose first pass is the same: one launch for each pass."""
    if not any(t.changes for each in plans for t in each[:2]):
        return [_plain(*each) for each in zip(images, plans)]
    x, views, start = torch.cat([image.flatten() for image in images]), [], 0
    for image, each in zip(images, plans):
        channels, height, width = image.shape
        corner = start + each.rows.source.start * width + each.columns.source.start
        views.append(((channels, len(each.rows.source), len(each.columns.source)), corner, height * width, width))
        start += image.numel()
    for vertical in (columns_first, not columns_first):
        axis = [each.rows if vertical else each.columns for each in plans]
        if not any(t.changes for t in axis):
            continue
        sources = []
        for ((channels, height, width), *place), t in zip(views, axis):
            height, width = (t.weights.shape[1], width) if vertical else (height, t.weights.shape[1])
            sources.append(kernels.Source(*place, channels, height, width, t.first, t.weights))
        x, views, start = kernels.resize_pass(x, sources, vertical), [], 0
        for made in sources:
            shape = made.channels, made.height, made.width
            views.append((shape, start, made.height * made.width, made.width))
            start += math.prod(shape)
    return [part.view(shape) for part, (shape, *_) in zip(x.split([math.prod(view[0]) for view in views]), views)]


def resize(
    images: Tensor | Sequence[Tensor],
    size: tuple[int, int] | Sequence[tuple[int, int]],
    resample: Interpolation = "bicubic",
    box: Box | Sequence[Box | None] | None = None,
    *,
    crop: tuple[int, int, int, int] | Sequence[tuple[int, int, int, int]] | None = None,
    pillow: Literal["12", "13"] | None = None,
) -> Tensor | list[Tensor]:
    """Resizes images as `PIL.Image.resize` does, bit for bit.

    images: uint8 (C, H, W), or a list of them, of any sizes, on one device; each channel is resized by itself, so alpha
    counts as a colour. size: (height, width). resample: one of FILTERS. box: (left, top, right, bottom), the part of
    the image that is resized, in pixels and fractions of pixels; None is the whole image. crop: (top, left, height,
    width), the part of the result that is wanted; the rest is not computed. size, box and crop are for all images, or
    lists with one for each image. pillow: the order of the passes, by the version of Pillow; None is the installed one.

    Returns uint8 (C, height, width), or a list of them, contiguous and never the input itself. CUDA tensors run two
    launches for all images (four where Pillow 13 takes the passes of some in the other order). Raises ValueError for
    another dtype, shape or name, a box that is not inside the image, and a crop that is not inside the result.
    """
    several = not isinstance(images, Tensor)
    each = list(images) if several else [images]
    device = each[0].device if each and isinstance(each[0], Tensor) else None
    for image in each:
        if not isinstance(image, Tensor) or image.dtype != torch.uint8 or image.dim() != 3 or not image.numel():
            what = f"{image.dtype} {tuple(image.shape)}" if isinstance(image, Tensor) else type(image).__name__
            raise ValueError(f"resize: images must be uint8 (C, H, W) with no side of 0, got {what}")
        if image.device != device:
            raise ValueError(f"resize: images must be on one device, got {device} and {image.device}")
    if resample not in FILTERS:
        raise ValueError(f"resize: resample must be one of {', '.join(FILTERS)}, got {resample!r}")
    pillow = INSTALLED if pillow is None else pillow
    if pillow not in PILLOWS:
        raise ValueError(f"resize: pillow must be one of {', '.join(PILLOWS)}, got {pillow!r}")
    named = (("size", size, 2), ("box", box, 4), ("crop", crop, 4))
    given = zip(*(_one_each(*argument, len(each)) for argument in named))
    plans = [_plan(image, *arguments, resample, pillow) for image, arguments in zip(each, given)]
    if each and kernels_wanted("resize", torch.empty(0, device=device)):  # the device decides: every kernel takes uint8
        results = _by_kernels(each, plans)
    else:
        results = [_plain(*pair) for pair in zip(each, plans)]
    return results if several else results[0]


def _one_each(name: str, value, count: int, images: int) -> list[tuple[float, ...] | None]:
    """An argument of `count` numbers, or None, for each image; or a list that has one for each already."""
    try:
        values = [value] * images if value is None or isinstance(value[0], Real) else list(value)
        found = [each if each is None else tuple(map(float, each)) for each in values]
    except (TypeError, ValueError, IndexError, KeyError):
        found = None
    if found is None or len(found) != images or any(each is not None and len(each) != count for each in found):
        wanted = f"{count} numbers, or a list of as many for each of {images} images"
        raise ValueError(f"resize: {name} must be {wanted}, got {both_ends(repr(value))}")
    return found
