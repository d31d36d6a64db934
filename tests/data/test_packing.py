"""Sizes of images, steps filled to a budget, and the batches that come of them."""

import itertools
import math

import numpy as np
import pytest
import torch
from PIL import Image
from runs import digits

from vitfast import InputError, PackedImages
from vitfast.data.loader import open_data
from vitfast.data.packing import Packing, Progress, StepKeys, fit_grid
from vitfast.data.samples import ONE
from vitfast.run.distributed import Ranks

PACKING = Packing(low=16, high=48, patch=(8, 8), prefix=1, drop=0.0, budget=300, batch_size=20)


def steps(count, packing=PACKING, seed=0, progress=None, ranks=ONE, length=100, accumulate=1):
    """(keys of each step, where the stream is after it)."""
    config = digits(seed=seed, accumulate=accumulate)
    sampler = StepKeys(length, packing, config, count, progress or Progress(), ranks)
    return list(sampler), list(sampler.after)


@pytest.mark.parametrize(
    "height, width, most, grid",
    [
        (224, 224, 196, (14, 14)),
        (448, 224, 196, (19, 10)),  # 190 patches; 18 x 9 has the very shape, and a sixth less
        (224, 448, 196, (10, 19)),
        (16, 4000, 64, (1, 64)),
        (5, 5, 1, (1, 1)),
        (480, 640, 256, (14, 18)),
    ],
)
def test_a_grid_has_the_shape_of_its_image(height, width, most, grid):
    assert fit_grid(height, width, (16, 16), most) == grid
    assert fit_grid(width, height, (16, 16), most) == grid[::-1]


@pytest.mark.parametrize("most", [1, 4, 50, 196, 1000])
def test_no_grid_is_over_its_budget_or_far_below(most):
    for height, width in itertools.product((30, 100, 333, 512), repeat=2):
        down, across = fit_grid(height, width, (16, 14), most)
        ratio = (height / 16) / (width / 14)
        assert 1 <= down * across <= most
        if 1 / most < ratio < most:
            assert down * across >= most - math.sqrt(most * ratio) - math.sqrt(most / ratio)
            assert abs(math.log(down / across / ratio)) <= math.log(1 + 1.5 / min(down, across))


def test_every_image_is_taken_once_an_epoch():
    """Whatever the budget; none waits for long."""
    keys, after = steps(40)
    seen = [(epoch, index) for step in keys for epoch, index, *_ in step]
    assert len(seen) == len(set(seen)) == after[-1].images
    waiting = {divmod(position, 100)[0] for position in after[-1].waiting}
    whole = [sum(1 for e, _ in seen if e == epoch) for epoch in range(min(waiting))]
    assert whole and all(count == 100 for count in whole)
    drawn = [side for step in keys for *_, side, _ in step]
    assert {side: drawn.count(side) for side in sorted(set(drawn))} == after[-1].sizes
    assert set(drawn) == {16, 24, 32, 40, 48}
    assert max(drawn.count(s) for s in set(drawn)) < 1.4 * min(drawn.count(s) for s in set(drawn))


def test_steps_are_filled():
    keys, _ = steps(60)
    tokens = [sum(PACKING.tokens(side) for *_, side, _ in step) for step in keys]
    assert max(tokens) <= 300 and min(tokens) > 300 - PACKING.tokens(16)
    per_step = sum(map(len, keys)) / len(keys)
    assert abs(per_step / PACKING.images_per_step - 1) < 0.05
    for drop, kept in ((0.0, 37), (0.5, 19), (0.9, 5)):  # dropped patches are not in the budget
        assert Packing(16, 48, (8, 8), 1, drop, 300, 20).tokens(48) == kept


@pytest.mark.parametrize("length", [100, 100_000])
def test_a_large_budget_is_used(length):
    """More images than the smallest window holds; more than the data set has, too."""
    packing = Packing(16, 32, (8, 8), 1, 0.0, 30_000, 20)
    keys, _ = steps(3, packing, length=length)
    tokens = [sum(packing.tokens(side) for *_, side, _ in step) for step in keys]
    assert min(tokens) > 30_000 - packing.tokens(16) and packing.images_per_step > 2000


def test_the_same_anywhere_and_after_any_interruption():
    keys, after = steps(12)
    assert keys == steps(12)[0] and keys != steps(12, seed=1)[0]
    for cut in (1, 5, 11):
        assert (keys[cut:], after[cut:]) == steps(12 - cut, progress=Progress.of(vars(after[cut - 1])))
    for world, accumulate in ((2, 1), (3, 2)):
        parts = [steps(12, ranks=Ranks(r, world), accumulate=accumulate) for r in range(world)]
        for i, step in enumerate(keys):
            shares = [part[0][i] for part in parts]
            assert sorted(key[:3] for share in shares for key in share) == sorted(key[:3] for key in step)
            assert all({key[3] for key in share} == set(range(accumulate)) for share in shares)
            assert all(part[1][i] == after[i] for part in parts)
            sums = [sum(PACKING.tokens(key[2]) for key in share) for share in shares]
            assert max(sums) - min(sums) <= PACKING.tokens(48)


def test_without_a_budget_a_step_has_batch_size_images():
    packing = Packing(16, 48, (8, 8), 1, 0.0, None, 20)
    keys, after = steps(7, packing)
    assert [len(step) for step in keys] == [20] * 7 and after[-1].position == 140 and not after[-1].waiting
    assert packing.images_per_step == 20


def batches(count, **fields):
    config = digits(**{**dict(sizes="16:48", tokens_per_step=400), **fields})
    data = open_data(config, (32, 32), (8, 8), torch.device("cpu"), prefix=1)
    return list(data.train_batches(0, count)), data


def test_batches_of_the_digits():
    found, data = batches(3)
    for (images, labels, unreadable), (again, *_) in zip(found, batches(3, workers=2)[0], strict=True):
        assert len(images) == 1 and isinstance(images[0], PackedImages) and not unreadable
        assert len(images[0]) == len(labels) and labels.dtype == torch.int64
        tokens = sum(images[0].counts) + len(labels)
        assert 400 - 37 <= tokens <= 400 and images[0].dtype == torch.uint8
        assert all(4 <= h * w <= 36 for h, w in images[0].grids.tolist())
        assert torch.equal(images[0].patches, again[0].patches)
    assert data.progress.images == sum(len(labels) for _, labels, _ in found)


def test_patches_are_dropped_image_by_image():
    whole, dropped = batches(2)[0], batches(2, drop_tokens=0.5)[0]
    for images, labels, _ in dropped:
        kept = [max(1, round(h * w * 0.5)) for h, w in images[0].grids.tolist()]
        assert list(images[0].counts) == kept and len(labels) > len(whole[0][1])
        places = images[0].places.split(images[0].counts)
        assert all((p.diff() > 0).all() for p in places)
    assert len({tuple(p.tolist()) for p in places if len(p) == 18}) > 1  # each image its own


def test_images_keep_their_aspect_and_labels(tmp_path):
    """Folders of 2 : 1 and 1 : 2 images, a class each."""
    for name, size in (("flat", (96, 48)), ("tall", (48, 96))):
        for split in ("train", "val"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(4):
                pixels = np.full((*size[::-1], 3), 60 * i, np.uint8)
                Image.fromarray(pixels).save(tmp_path / split / name / f"{i}.png")
    fields = dict(data=str(tmp_path), train_crop_mode="squash", crop_scale=(1, 1), workers=0, tokens_per_step=200)
    for images, labels, _ in batches(4, **fields)[0]:
        for (down, across), label in zip(images[0].grids.tolist(), labels.tolist()):
            ratio = across / down if label == 0 else down / across
            assert 1.3 <= ratio <= 3 and 4 / 2 <= down * across <= 36


def test_micro_batches_and_streams(tmp_path):
    (images, labels, _), *_ = batches(1, accumulate=3)[0]
    assert len(images) == 3 and sum(map(len, images)) == len(labels)
    whole = batches(1)[0][0][1]
    assert sorted(labels.tolist()) == sorted(whole.tolist())


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(sizes="", tokens_per_step=400), "tokens_per_step is for images of many sizes"),
        (dict(mixup=0.2), "sizes packs images of many sizes, and mixup cannot: set mixup=0"),
        (dict(sizes="", tokens_per_step=None, drop_tokens=0.5, cutmix=1), "drop_tokens packs .* and cutmix cannot"),
        (dict(decode="device"), "and decode cannot: set decode=host"),
        (dict(objective="masked"), "and objective=masked cannot"),
        (dict(tokens_per_step=30), "no room for images of 48 px, 37 tokens: it must be at least 37"),
        (dict(tokens_per_step=100, accumulate=4), "one for each of 4 ranks and micro-batches: it must be at least 148"),
        (dict(scale_lr=256), "scale_lr is for steps of batch_size images: set scale_lr=none"),
        (dict(sizes="4:16"), "begin below one patch of 8 x 8"),
        (dict(data="synthetic", sizes="16:64"), "has images of 32 x 32; sizes must not be larger"),
    ],
)
def test_settings_that_do_not_go_together(fields, message):
    with pytest.raises(InputError, match=message):
        batches(1, **fields)


def test_sizes_are_two_numbers():
    for sizes in ("48:16", "16", "16:48:64", "a:b", "0:16", "16:99999", "-1:4"):
        with pytest.raises(InputError, match="sizes must be LOW:HIGH in pixels"):
            digits(sizes=sizes)


def test_synthetic_images_are_cut_to_size():
    (images, labels, _), *_ = batches(1, data="synthetic", sizes="16:32", workers=0)[0]
    assert images[0].longest <= 16 and len(labels) == len(images[0])
