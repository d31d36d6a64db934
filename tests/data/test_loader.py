"""The stream of samples, subsets, the processes that read, and JPEG bytes that the device decodes."""

import contextlib
import dataclasses
import multiprocessing
import os
import shutil
import subprocess
import time

import numpy as np
import pictures
import pytest
import torch
import torchvision
from runs import digits

from vitfast import InputError
from vitfast.data import jpeg, workers
from vitfast.data.loader import open_data
from vitfast.data.samples import ONE, Samples, stream_keys
from vitfast.train.trainer import Trainer

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
    images, labels, _ = zip(*data.in_order(data.val))
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


# ---- processes: within the cores and the memory of the machine


BATCH = 32 * 3 * 32 * 32  # bytes of the images of a batch


def processes(**settings) -> int:
    return open_data(digits(eval_batch_size=32, **settings), (32, 32), (8, 8), CPU).workers


def test_workers_are_bounded_by_cores_and_memory(monkeypatch, caplog):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6))
    unset = digits(data="hfds/any"), (32, 32), 1, ONE
    assert processes(workers=24) == 24 and processes(workers=0) == 0 and not caplog.text
    assert workers.loader_processes(*unset) == 6
    assert processes(workers=1_000_000_000) == 24
    assert "workers=1000000000 is lowered to 24: at most 4 for each of 6 cores" in caplog.text
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # ranks share the machine
    assert processes(workers=24) == 12 and workers.loader_processes(*unset) == 3
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    caplog.clear()
    monkeypatch.setattr(workers, "total_memory", lambda: 5 * 2 * 4 * BATCH)  # half of it: four batches of each of five
    assert processes(workers=24) == 5 and "half of the memory holds no more of the 4 batches" in caplog.text


def test_the_memory_of_a_container_counts():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 2**28 < workers.total_memory() <= total


def test_batches_larger_than_the_memory_are_refused_before_anything_is_read(monkeypatch):
    """But more than the images of a validation set are never at once: there is no reason to refuse."""
    with pytest.raises(InputError, match="batch_size=1000000000 is too large: a batch takes"):
        open_data(digits(batch_size=10**9), (32, 32), (8, 8), CPU)
    open_data(digits(eval_batch_size=10**9), (32, 32), (8, 8), CPU)
    monkeypatch.setattr(workers, "total_memory", lambda: 300 * BATCH // 32)
    with pytest.raises(InputError, match="eval_batch_size=200 is too large"):
        open_data(digits(eval_batch_size=200), (32, 32), (8, 8), CPU)
    assert open_data(digits(eval_batch_size=100), (32, 32), (8, 8), CPU).workers == 0


def _waits(ready) -> None:
    workers.leave_signals(0)
    ready.set()
    time.sleep(60)


def test_a_loader_process_ends_by_its_parent_alone():
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_waits, args=(ready := context.Event(),))
    process.start()
    assert ready.wait(30)
    for name in ("INT", "TERM"):
        subprocess.run(["kill", f"-{name}", str(process.pid)], check=True)
    process.join(0.3)
    assert process.is_alive()
    process.terminate()
    process.join(30)
    assert process.exitcode == 0


# ---- JPEG bytes to the device against the host's path


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Two classes of smooth JPEG files of many sizes, some of them grey."""
    root = tmp_path_factory.mktemp("photos")
    for split in ("train", "val"):
        for name in "ab":
            (root / split / name).mkdir(parents=True)
            for i in range(8):
                image = pictures.smooth(10 * ord(name) + i, 60 + 7 * i, 90 - 3 * i)
                image.convert("L" if i == 5 else "RGB").save(root / split / name / f"{i}.jpg", quality=95)
    return root


def config(photos, **fields):
    return digits(data=str(photos), **dict(batch_size=6, steps=3, hflip=0.5, workers=0) | fields)


def test_images_decoded_on_the_device_are_those_of_the_host(photos):
    """The same crops and flips; pixels differ by the rounding of two resamplers."""
    sides = [
        list(open_data(config(photos, decode=where), (32, 32), (8, 8), CPU).train_batches(0, 3))
        for where in ("host", "device")
    ]
    for (host, labels, _), (device, others, told) in zip(*sides):
        assert torch.equal(labels, others) and device.dtype == torch.uint8 and device.shape == host.shape and not told
        difference = (host.int() - device.int()).abs().float()
        assert difference.mean() < 1.5 and difference.amax() <= 16, (difference.mean(), difference.amax())
    assert (sides[0][0][0].float() - sides[0][1][0].float()).abs().mean() > 5  # other crops would show


@pytest.mark.slow
def test_a_broken_jpeg_is_replaced_by_the_next_of_its_batch(photos, tmp_path):
    """Cut off: known before, as GPU decoders fill up what is missing. With an end: only decoding finds out."""
    path = shutil.copytree(photos, tmp_path / "data") / "train" / "a" / "3.jpg"
    whole = path.read_bytes()
    settings = config(tmp_path / "data", decode="device", batch_size=16)
    data = open_data(settings, (32, 32), (8, 8), CPU)
    for broken in (whole[:-60], whole[: whole.rfind(jpeg.START) + 2] + jpeg.END):
        path.write_bytes(broken)
        (images, _, (told,)), *_ = data.train_batches(0, 1)
        assert str(path) in told and len(images) == 16 and images.float().std(dim=(1, 2, 3)).min() > 0
    on_host = open_data(dataclasses.replace(settings, decode="host"), (32, 32), (8, 8), CPU)
    path.write_bytes(whole[:-60])
    (host, labels, told), (device, others, also_told) = (next(each.train_batches(0, 1)) for each in (on_host, data))
    assert torch.equal(labels, others) and (host.int() - device.int()).abs().float().mean() < 2
    assert len(told) == len(also_told) == 1


def test_a_gpu_decodes_into_memory_that_no_queued_kernel_uses(monkeypatch):
    """nvJPEG waits for no stream, so that its images must not be allocated on the one that runs the model."""
    log, current, gpu = [], ["model"], torch.device("cuda", 0)

    class Stream:
        def __init__(self, device, name="allocating"):
            self.name = name

        def wait_stream(self, other):
            log.append(f"{self.name} waits for {other.name}")

    class Image:
        def record_stream(self, stream):
            log.append(f"freed after {stream.name}")

    @contextlib.contextmanager
    def entered(stream):
        current.append(stream.name)
        yield
        current.pop()

    def decode_jpeg(files, mode, device):
        assert device == gpu
        log.append(f"allocated on {current[-1]}")
        return [Image() for _ in files]

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(device, current[-1]))
    monkeypatch.setattr(torchvision.io, "decode_jpeg", decode_jpeg)
    jpeg._allocating_stream.cache_clear()
    try:
        images = jpeg.decode([jpeg.Encoded(torch.zeros(9, dtype=torch.uint8), 1, 1)] * 2, ["a", "b"], gpu)
    finally:
        jpeg._allocating_stream.cache_clear()
    assert log == ["allocated on allocating", "model waits for allocating"] + 2 * ["freed after model"]
    assert len(images) == 2 and all(isinstance(image, Image) for image in images)


def test_what_the_device_path_cannot_do_is_said(photos):
    with pytest.raises(InputError, match="decode=device reads JPEG files from a folder; 'digits' is none"):
        open_data(config("digits", decode="device"), (32, 32), (8, 8), CPU)
    with pytest.raises(InputError, match="crops and flips only; set auto_augment=none"):
        open_data(config(photos, decode="device", auto_augment="rand-m5-n2"), (32, 32), (8, 8), CPU)


def test_images_reach_the_model_raw(photos, tmp_path):
    """No float image on the host: what the model is called with is uint8."""
    trainer = Trainer(dataclasses.replace(config(photos), output=str(tmp_path / "run")))
    seen = []
    trainer.train_step.model.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    trainer.fit()
    assert seen and set(seen) == {torch.uint8}
