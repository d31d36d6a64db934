"""Feeding the device: JPEG bytes to the device against the host's path, and images that stay raw until the kernel."""

import contextlib
import dataclasses
import shutil

import pictures
import pytest
import torch
import torchvision
from runs import digits

from vitfast import InputError
from vitfast.data import jpeg
from vitfast.data.loader import open_data
from vitfast.train.trainer import Trainer

CPU = torch.device("cpu")


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
