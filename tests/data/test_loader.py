"""The stream of samples, the digits, and subsets of a data set."""

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image
from runs import digits

from vitfast import InputError
from vitfast.data.loader import open_data
from vitfast.data.samples import Samples, stream_keys
from vitfast.data.shards import Shards, ShardSamples

CPU = torch.device("cpu")


def test_stream_covers_each_epoch_once_and_starts_anywhere():
    whole = list(stream_keys(10, 4, seed=3, start=0, stop=10))
    assert all(len(batch) == 4 for batch in whole)
    flat = [key for batch in whole for key in batch]
    for epoch in range(4):
        indices = [i for e, i in flat if e == epoch]
        assert sorted(indices) == list(range(10))
    assert [i for e, i in flat if e == 0] != [i for e, i in flat if e == 1]
    assert list(stream_keys(10, 4, seed=3, start=7, stop=10)) == whole[7:]
    assert list(stream_keys(10, 4, seed=4, start=0, stop=10)) != whole
    assert len(next(iter(stream_keys(3, 8, 0, 0, 1)))) == 8  # a batch may be larger than the data


def test_a_sample_depends_on_seed_epoch_and_index_alone():
    config = digits()
    data = open_data(config, (32, 32), (8, 8), CPU)
    samples = Samples(data.train, data.train_transform, 5)
    torch.manual_seed(0)
    first = samples[1, 7][0]
    torch.manual_seed(9)
    np.random.seed(9)
    assert np.array_equal(samples[1, 7][0], first) and not np.array_equal(samples[2, 7][0], first)
    assert first.dtype == torch.uint8 and first.shape == (3, 32, 32)
    alone = list(data.train_batches(3, 5))
    with_workers = list(dataclasses.replace(data, workers=2).train_batches(3, 5))
    for (a, la, _), (b, lb, _) in zip(alone, with_workers):
        assert torch.equal(a, b) and torch.equal(la, lb)


def test_digits_split_is_fixed_and_disjoint():
    from sklearn.datasets import load_digits

    data = open_data(digits(seed=4), (32, 32), (8, 8), CPU)
    train, test = set(data.train.indices), set(data.val.indices)
    assert not train & test and len(train | test) == 1797 and len(test) == 360
    scan = load_digits().images[data.val.indices[5]]
    assert np.array_equal(data.val.pixels[5], (scan * (255 / 16)).round().astype(np.uint8))
    assert set(open_data(digits(seed=5), (32, 32), (8, 8), CPU).val.indices) == test
    images, labels, _ = zip(*data.eval_batches())
    assert images[0].dtype == torch.uint8 and [len(some) for some in labels] == [256, 104]
    assert torch.cat(labels).tolist() == data.val.labels


def test_subsets_of_a_data_set():
    whole = open_data(digits(), (32, 32), (8, 8), CPU)
    few = open_data(digits(shots=5), (32, 32), (8, 8), CPU)
    assert np.bincount(few.train.labels).tolist() == [5] * 10 and len(few.val) == len(whole.val)
    assert few.train.indices == open_data(digits(shots=5), (32, 32), (8, 8), CPU).train.indices
    assert few.train.indices != open_data(digits(shots=5, seed=1), (32, 32), (8, 8), CPU).train.indices
    held = open_data(digits(hold_out=0.2), (32, 32), (8, 8), CPU)
    assert not set(held.train.indices) & set(held.val.indices) and len(held.train) + len(held.val) == len(whole.train)
    assert min(np.bincount(held.val.labels)) >= 27  # a fifth of each class
    assert len(open_data(digits(train_images=700), (32, 32), (8, 8), CPU).train) == 700


def test_readers_of_the_same_shards_each_have_their_own_transform():
    grey = [(Image.new("L", (1, 1), value), label) for value, label in ((1, 0), (2, 1))]
    shards = Shards("hfids/x", grey, ["a", "b"])
    readers = [ShardSamples(shards, lambda image, add=add: np.asarray(image) + add) for add in (10, 20)]
    both = [[(int(image[0, 0, 0]), *rest) for image, *rest in reader] for reader in readers]
    assert both == [[(11, 0, []), (12, 1, [])], [(21, 0, []), (22, 1, [])]]
    assert shards.dataset == grey


class Stream(list):
    """What timm's iterable data sets are called with, and the items themselves."""

    set_loader_cfg = set_epoch = lambda self, *args, **kwargs: None


@pytest.mark.parametrize("label, said", [(2.7, "class 2.7"), (None, "class None"), (2, "class 2;"), ("x", "class 'x'")])
def test_a_label_of_a_stream_that_is_no_class_is_one_error(label, said):
    grey = Image.new("L", (8, 8))
    source = Shards("hfids/x", Stream([(grey, 1), (grey, label)]), ["a", "b"])
    data = open_data(digits(workers=0, batch_size=2), (8, 8), (8, 8), CPU)
    data = dataclasses.replace(data, train=source, val=source, workers=1)
    for batches in (data.eval_batches(), data.train_batches(0, 1)):  # in this process, and in another one
        with pytest.raises(InputError, match=f"^hfids/x, image 1 of a pass, has the {said}") as caught:
            list(batches)
        assert "\n" not in str(caught.value)
