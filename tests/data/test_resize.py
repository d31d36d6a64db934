"""Pillow's resize: every byte against Pillow at random sizes and boxes, and stored bytes of 12 and 13."""

import hashlib

import numpy as np
import PIL
import pytest
import torch
from PIL import Image

from vitfast import ops
from vitfast.data.resize import FILTERS, INSTALLED, PILLOWS, order_of, resize
from vitfast.kernels.launch import launches_made


def draw(seed: int, count: int, most: int = 150) -> list[tuple]:
    """(pixels (H, W) or (H, W, 3), (height, width), box or None) of sizes from 1 to `most`; some stay as they are."""
    rng, cases = np.random.default_rng(seed), []
    for _ in range(count):
        H, W, h, w = (int(side) for side in rng.integers(1, rng.choice([most // 8, most // 3, most]) + 1, 4))
        h, w = H if rng.random() < 0.1 else h, W if rng.random() < 0.1 else w
        pixels = rng.integers(0, 256, (H, W, 3) if rng.random() < 0.7 else (H, W), dtype=np.uint8)
        if rng.random() < 0.4:  # black and white alone: the filters' overshoots are clipped
            pixels = np.where(pixels > 127, 255, 0).astype(np.uint8)
        (left, right), (top, bottom) = np.sort(rng.random(2) * W), np.sort(rng.random(2) * H)
        box = tuple(map(float, (left, top, right, bottom)))
        box = tuple(map(float, map(int, box))) if rng.random() < 0.3 else box  # whole numbers; some have no area
        cases.append((pixels, (h, w), box if rng.random() < 0.5 else None))
    return cases


def tensor(pixels: np.ndarray) -> torch.Tensor:
    return (
        torch.from_numpy(pixels.copy()).permute(2, 0, 1) if pixels.ndim == 3 else torch.from_numpy(pixels.copy())[None]
    )


def by_pillow(pixels: np.ndarray, size: tuple[int, int], box: tuple | None, name: str) -> torch.Tensor:
    image = Image.fromarray(pixels).resize(size[::-1], Image.Resampling[name.upper()], box)
    return tensor(np.asarray(image))


def check(cases: list[tuple], name: str) -> None:
    pixels, sizes, boxes = zip(*cases)
    for case, got in zip(cases, resize(list(map(tensor, pixels)), sizes, name, boxes)):
        assert got.is_contiguous() and torch.equal(got, by_pillow(*case, name)), (case[0].shape, *case[1:])


@pytest.mark.quick(1)
@pytest.mark.parametrize("count", [300, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FILTERS)
def test_bytes_are_those_of_pillow(name, count):
    check(draw(list(FILTERS).index(name), count), name)


@pytest.mark.quick(3)
@pytest.mark.parametrize("count, most", [(8, 40), pytest.param(334, 150, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", FILTERS)
def test_kernels_give_the_bytes_of_pillow(name, count, most):
    with ops.use_kernels("on"):
        check(draw(10 + list(FILTERS).index(name), count, most), name)


@pytest.mark.long
def test_a_million_pixels_give_the_bytes_of_pillow():
    """Photographs' sizes, to what models take, up and down."""
    rng = np.random.default_rng(0)
    shapes = [(1000, 1000, 3), (613, 1631, 3), (1631, 613), (2000, 500, 3)]
    for shape, size in zip(shapes, [(224, 224), (256, 680), (384, 144), (1100, 700)]):
        for name in FILTERS:
            case = rng.integers(0, 256, shape, dtype=np.uint8), size, None
            for mode in ("off", "on"):
                with ops.use_kernels(mode):
                    check([case], name)


# Sizes (H, W) -> (h, w) that are resized with both orders. The last seven lie where Pillow 13's order changes.
SIZES = [(113, 87, 47, 72), (30, 33, 7, 105), (91, 95, 65, 90), (84, 117, 33, 53), (68, 71, 3, 34), (51, 3, 55, 48)]
SIZES += [(59, 40, 20, 20), (60, 40, 20, 20), (61, 40, 20, 20), (40, 40, 20, 41), (41, 40, 41, 41), (41, 40, 40, 41)]
SIZES += [(42, 40, 40, 39)]
# Filter -> the first digits of `digest` of what Pillow 12.3.0 and 13.0.0 made of them.
STORED = {
    "nearest": "64aea66a77cec1ed 64aea66a77cec1ed",
    "lanczos": "cf6f7bf06a198a8f 61e05edb63e4eb27",
    "bilinear": "078ced94bba90f8c 251fe5112d6b0fc6",
    "bicubic": "7bbf07684f9eca54 ff6eb7cac93fe470",
    "box": "8a404626deec6f05 47928e1c39571240",
    "hamming": "346d58e352fc4427 d7148121a9ad6ef6",
}


def noise(height: int, width: int) -> np.ndarray:
    """RGB noise (H, W, 3) that is the same everywhere."""
    count = 3 * height * width
    return np.frombuffer(hashlib.shake_256(b"%d" % count).digest(count), np.uint8).reshape(height, width, 3)


def digest(results) -> str:
    return hashlib.sha256(b"".join(image.contiguous().numpy().tobytes() for image in results)).hexdigest()[:16]


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", FILTERS)
def test_both_orders_give_the_stored_bytes(name):
    """One order is the installed Pillow's; the other is held to what that other Pillow gave."""
    pixels, sizes = [noise(*size[:2]) for size in SIZES], [size[2:] for size in SIZES]
    stored = dict(zip(PILLOWS, STORED[name].split()))
    assert digest(by_pillow(*case, None, name) for case in zip(pixels, sizes)) == stored[INSTALLED]
    for pillow, wanted in stored.items():
        for mode in ("off", "on") if name == "box" else ("off",):
            with ops.use_kernels(mode):
                assert digest(resize(list(map(tensor, pixels)), sizes, name, pillow=pillow)) == wanted, (pillow, mode)
    assert len(set(stored.values())) == 2 or name == "nearest"


def test_what_is_cropped_is_a_part_of_the_whole():
    rng = np.random.default_rng(3)
    for name in FILTERS:
        for pixels, (h, w), box in draw(rng.integers(1000), 12, 60):
            top, left = int(rng.integers(h)), int(rng.integers(w))
            height, width = int(rng.integers(1, h - top + 1)), int(rng.integers(1, w - left + 1))
            for mode in ("off", "on")[: 1 + (rng.random() < 0.1)]:
                with ops.use_kernels(mode):
                    got = resize(tensor(pixels), (h, w), name, box, crop=(top, left, height, width))
                whole = by_pillow(pixels, (h, w), box, name)
                assert torch.equal(got, whole[:, top : top + height, left : left + width])


@pytest.mark.slow
def test_images_of_any_strides_and_what_is_given_back():
    """One image gives one, a list a list; nothing shares memory with what came in, or is changed."""
    whole = tensor(noise(40, 60))
    views = [whole[:, 5:30, 7:50], whole.transpose(1, 2), whole[:1], whole.flip(0)[1:]]
    for mode in ("off", "on"):
        with ops.use_kernels(mode):
            before = whole.clone()
            for view, got in zip(views, resize(views, (21, 23))):
                assert torch.equal(got, resize(view.contiguous(), (21, 23)))
            same = resize(whole, (40, 60))
            assert torch.equal(same, whole) and same.data_ptr() != whole.data_ptr()
            part = resize(whole, (10, 20), box=(3, 4, 23, 14))
            assert torch.equal(part, whole[:, 4:14, 3:23]) and torch.equal(before, whole)
            assert resize([], (3, 3)) == [] and len(resize([whole], (3, 3))) == 1
            with torch.device("meta"):  # a default device is no matter
                assert resize(whole, (3, 3)).device.type == "cpu"


@pytest.mark.slow
def test_several_images_share_a_launch():
    images, counts = [tensor(noise(*size[:2])) for size in SIZES[-4:]], []
    for pillow in PILLOWS:
        before = launches_made()
        with ops.use_kernels("on"):
            resize(images, [size[2:] for size in SIZES[-4:]], pillow=pillow)
        counts.append(launches_made() - before)
    assert counts == [2, 4]


def test_the_order_is_that_of_the_installed_pillow():
    versions = {"9.5.0": "12", "12.3.0": "12", "13.0.0": "13", "14.1.0.dev0": "13"}
    assert {version: order_of(version) for version in versions} == versions
    assert INSTALLED == order_of(PIL.__version__)


WRONG = [
    (dict(images=torch.zeros(3, 4, 4)), r"images must be uint8 \(C, H, W\).*, got torch.float32 \(3, 4, 4\)"),
    (dict(images=torch.zeros(3, 0, 4, dtype=torch.uint8)), r"images must be .*, got torch.uint8 \(3, 0, 4\)"),
    (dict(images=[np.zeros((3, 4, 4), np.uint8)]), "images must be .*, got ndarray"),
    (
        dict(images=[torch.zeros(1, 2, 2, dtype=torch.uint8, device=d) for d in ("cpu", "meta")]),
        "images must be on one device, got cpu and meta",
    ),
    (dict(size=0), "size must be 2 numbers, or a list of as many for each of 1 images, got 0"),
    (dict(size=(4, 0)), r"size must be two whole numbers from 1 on, \(height, width\), got \(4.0, 0.0\)"),
    (dict(size=(float("nan"), 4)), "size must be two whole numbers"),
    (dict(size=[(4, 4), (4, 4)]), "size must be 2 numbers, or a list of as many for each of 1 images"),
    (dict(resample="cubic"), "resample must be one of nearest, .*, got 'cubic'"),
    (dict(pillow="11"), "pillow must be one of 12, 13, got '11'"),
    (dict(box=(0, 0, 9, 4)), r"box must be \(left, .*inside an image of 8 x 8.*, got \(0.0, 0.0, 9.0, 4.0\)"),
    (dict(box=(5, 0, 4, 4)), "box must be"),
    (dict(box=(0, float("nan"), 4, 4)), "box must be"),
    (dict(crop=(0, 0, 5, 4)), r"crop must be whole .* inside a result of 4 x 4, got \(0.0, 0.0, 5.0, 4.0\)"),
    (dict(crop=(0.5, 0, 2, 2)), "crop must be"),
]


@pytest.mark.parametrize("arguments, message", WRONG)
def test_what_is_no_resize_is_refused(arguments, message):
    with pytest.raises(ValueError, match=f"^resize: {message}"):
        resize(**dict(images=torch.zeros(3, 8, 8, dtype=torch.uint8), size=(4, 4)) | arguments)


def test_kernels_are_never_left_out_in_silence():
    with ops.use_kernels("on"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitfast.ops.dispatch.INTERPRETED", False)
        with pytest.raises(RuntimeError, match="^resize: kernels are switched on, but tensors on cpu need"):
            resize(torch.zeros(3, 8, 8, dtype=torch.uint8), (4, 4))
