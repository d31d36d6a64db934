"""pack, PackedImages and draw_kept: one buffer that is sent, saved and replaced as one; what cannot be packed."""

import copy
import dataclasses
import pickle

import pytest
import torch
from many_sizes import images_of

from vitfast import pack
from vitfast.packed import draw_kept


def test_a_buffer_holds_everything():
    images = images_of()
    made = pack(images, 4)
    ends = made.buffer.data_ptr(), made.buffer.data_ptr() + made.buffer.numel()
    for part in (made.patches, made.places, made.offsets, made.grids):
        assert ends[0] <= part.data_ptr() and part.data_ptr() % 16 == ends[0] % 16
        assert part.data_ptr() + part.numel() * part.element_size() <= ends[1]
    assert made.shape == (135, 3, 4, 4) and made.dtype == torch.float32 and made.device.type == "cpu"
    assert made.counts == (48, 24, 1, 30, 32) and made.longest == 48
    assert made.offsets.tolist() == [0, 48, 72, 73, 103, 135] and made.grids.tolist()[3] == [10, 3]
    for i, image in enumerate(images):
        part = made.patches[made.offsets[i] : made.offsets[i + 1]].unflatten(0, made.grids[i].tolist())
        assert torch.equal(part.permute(2, 0, 3, 1, 4).reshape(image.shape), image)


@pytest.mark.parametrize("drop, count, kept", [(0.5, 48, 24), (0.0, 7, 7), (0.99, 5, 1), (0.3, 10, 7)])
def test_what_is_kept_is_drawn(drop, count, kept):
    draw = lambda seed: draw_kept(count, drop, torch.Generator().manual_seed(seed))  # noqa: E731
    numbers = draw(0)
    assert len(numbers) == kept == len(numbers.unique()) and numbers.max() < count
    assert torch.equal(numbers, draw(0)) and torch.equal(numbers, numbers.sort().values)
    if 1 < kept < count:
        assert any(not torch.equal(numbers, draw(seed)) for seed in range(1, 5))


@pytest.mark.parametrize(
    "images, error, message",
    [
        ([], ValueError, "images is empty"),
        ([torch.randn(3, 8, 8), torch.randn(8, 8)], ValueError, r"images\[1\] must be \(C, H, W\), got \(8, 8\)"),
        (
            [torch.randn(3, 8, 9)],
            ValueError,
            r"images\[0\] must have sides that are multiples of the patch 4 x 4, got 8 x 9",
        ),
        ([torch.randn(3, 8, 0)], ValueError, r"multiples of the patch 4 x 4, got 8 x 0"),
        (
            [torch.randn(3, 8, 8), torch.zeros(3, 8, 8).byte()],
            ValueError,
            r"alike, got dtype torch.float32 of images\[0\]",
        ),
        (
            [torch.randn(3, 8, 8), torch.randn(1, 8, 8)],
            ValueError,
            r"alike, got channels 3 of images\[0\], 1 of images\[1\]",
        ),
        ([torch.randn(3, 8, 8).int()], TypeError, r"images\[0\] must be uint8 or floating point, got torch.int32"),
        (["cat.jpg"], TypeError, r"images\[0\] must be a tensor or an array, got str"),
        (torch.randn(2, 3, 8, 8), TypeError, "images must be a list of .* got Tensor"),
    ],
)
def test_images_that_cannot_be_packed(images, error, message):
    with pytest.raises(error, match=message):
        pack(images, 4)


@pytest.mark.parametrize("keep", [torch.tensor([4]), torch.tensor([1, 1]), [], ["a"], torch.tensor([0.0]), [True]])
def test_patches_that_cannot_be_kept(keep):
    with pytest.raises(
        ValueError, match=r"keep\[0\] must be whole numbers of patches from 0 to 3, each once and at least one"
    ):
        pack([torch.randn(3, 8, 8)], 4, [keep])
    with pytest.raises(ValueError, match="keep must have an entry for each of 1 images, got 2"):
        pack([torch.randn(3, 8, 8)], 4, [None, None])
    with pytest.raises(ValueError, match=r"patch_size must be P or \(P, Q\) in pixels, got 0"):
        pack([torch.randn(3, 8, 8)], 0)


def test_patches_can_be_replaced():
    """The buffer is not what is sent then, nor saved."""
    images = pack(images_of(raw=True), 4)
    changed = dataclasses.replace(images, patches=images.patches.float() / 255)
    for again in (changed.to("cpu"), pickle.loads(pickle.dumps(changed)), changed._shared()):
        assert torch.equal(again.patches, changed.patches) and torch.equal(again.grids, images.grids)
    assert repr(changed) == "PackedImages(5 images, patches (135, 3, 4, 4) torch.float32 on cpu)"


def test_a_packed_batch_is_saved_once(tmp_path):
    images = pack(images_of(raw=True), 4)
    torch.save(images, tmp_path / "batch.pt")
    assert (tmp_path / "batch.pt").stat().st_size < 1.5 * images.buffer.numel() + 5000
    for again in (torch.load(tmp_path / "batch.pt", weights_only=False), copy.deepcopy(images)):
        assert torch.equal(again.patches, images.patches) and again.counts == images.counts
        assert again._together and torch.equal(again.to("cpu").places, images.places)


def micro_batch(images, k):
    """The first k images, as one would write it: views of the same memory."""
    n = sum(images.counts[:k])
    parts = dict(patches=images.patches[:n], places=images.places[:n], offsets=images.offsets[: k + 1])
    return dataclasses.replace(
        images, **parts, grids=images.grids[:k], counts=images.counts[:k], longest=max(images.counts[:k])
    )


def views_of(images):
    patches = images.patches
    return {
        "one channel": dataclasses.replace(images, patches=patches[:, :1]),
        "transposed": dataclasses.replace(images, patches=patches.transpose(-1, -2)),
        "other bits": dataclasses.replace(images, patches=patches.view(torch.int32)),
        "two images": micro_batch(images, 2),
        "all but the first": dataclasses.replace(
            images, patches=patches[48:], places=images.places[48:], offsets=images.offsets[1:] - 48,
            grids=images.grids[1:], counts=images.counts[1:], longest=max(images.counts[1:]),
        ),
        "shifted places": dataclasses.replace(images, places=images.places.flip(0)),
    }  # fmt: skip


@pytest.mark.parametrize("kind", views_of(pack(images_of(), 4)))
def test_a_part_of_a_batch_stays_that_part(kind):
    """Views of the buffer are not what the buffer would be cut into."""
    part = views_of(pack(images_of(), 4))[kind]
    copies = part.to("cpu"), pickle.loads(pickle.dumps(part)), copy.deepcopy(part), part._shared(), part.cpu()
    for again in copies:
        for name in ("patches", "places", "offsets", "grids"):
            assert torch.equal(getattr(again, name), getattr(part, name)), name
        assert (again.counts, again.longest) == (part.counts, part.longest)


def test_to_takes_devices():
    images = pack(images_of(), 4)
    for arguments in ((torch.float32,), ("cpu", torch.float32), (None,)):
        with pytest.raises(TypeError, match=r"PackedImages.to: \w+ cannot be .*dataclasses.replace"):
            images.to(*arguments)
