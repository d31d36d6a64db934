"""Single images: what is said of those that cannot be read, how EXIF turns them, and how large they may be."""

import io
import os
import re
import threading
import warnings
from unittest.mock import Mock

import numpy as np
import pictures
import pytest
import torch
from frozen import tiny
from pictures import encoded, exif
from PIL import Image, ImageOps

from vitfast import Embedder, InputError
from vitfast.data import images, jpeg
from vitfast.data.contents import content, own
from vitfast.data.datasets import Named
from vitfast.data.folders import ImageFiles
from vitfast.data.images import LARGE, Reading, Unreadable, opened, read_rgb
from vitfast.eval.predict import predict
from vitfast.run.config import Config

RGB = np.asarray(pictures.smooth(0, 24, 40))
GREY = RGB[..., 0]
KINDS = {"JPEG": dict(quality=95), "PNG": {}, "WEBP": dict(lossless=True), "TIFF": {}}


def tagged(image: Image.Image, tag: int, kind: str = "JPEG") -> bytes:
    """A file whose pixels are `image` and whose EXIF orientation is the tag."""
    return encoded(image, kind, exif=exif(tag), **KINDS[kind])


def test_damaged_files_say_what_is_wrong(tmp_path, monkeypatch):
    whole = tmp_path / "whole.jpg"
    pictures.smooth(1).save(whole)
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "device.jpg").symlink_to(os.devnull)  # a pipe would let a test that fails wait for ever
    opened = Image.open
    closed = PermissionError(13, "Permission denied")  # tests may run as root, whom no file refuses
    cases = {
        "empty.jpg": (b"", "cannot be read as an image .of no known format"),
        "text.jpg": (b"not a picture", "of no known format"),
        "eps.jpg": (encoded(Image.fromarray(RGB), "EPS"), "of no known format"),  # PIL would hand it to Ghostscript
        "cut.jpg": (whole.read_bytes()[:-100], "cut.jpg is a broken image .image file is truncated"),
        "gone.jpg": (None, "cannot be read as an image .No such file or directory"),
        "folder.jpg": (None, "Is a directory"),
        "device.jpg": (None, "device.jpg cannot be read as an image .it is no regular file"),
        "line\nfeed.jpg": (b"", r"line\\nfeed.jpg cannot be read"),
        os.fsdecode(b"latin-\xe9.jpg"): (b"", r"latin-\\udce9.jpg cannot be read"),
        "näme 图.jpg": (b"", "näme 图.jpg cannot be read"),
        "small.png": (encoded(Image.fromarray(RGB[:1])), "has 1 x 40 pixels, less than one patch .8 x 8"),
        "whole.jpg": (closed, "whole.jpg cannot be read as an image .Permission denied"),
    }
    for name, (data, message) in cases.items():
        if isinstance(data, bytes):
            (tmp_path / name).write_bytes(data)
        monkeypatch.setattr(Image, "open", Mock(side_effect=closed) if data is closed else opened)
        with pytest.raises(Unreadable, match=message) as caught:
            ImageFiles([str(tmp_path / name)], [0], ["a"], Reading(min_size=(8, 8)))[0]
        assert "\n" not in str(caught.value) and str(caught.value).encode()


def test_named_data_sets_say_what_is_broken():
    """And that the test splits of some have the class -1 everywhere."""

    class Gone:
        def __getitem__(self, index):
            raise FileNotFoundError(2, "No such file or directory", "gone.png")

    class Reader(list):
        reader = Gone()

    for source in (Reader(), Gone()):
        with pytest.raises(Unreadable, match=r"hfds/x\[0\] is a broken image .*No such file"):
            Named("hfds/x", source)[0]
    with pytest.raises(InputError, match=r"hfds/x\[0\] has the class -1 .this split has no labels."):
        Named("hfds/x", [(Image.fromarray(RGB), -1)])[0]


# ---- EXIF: test_ways_in.py has every orientation in files


@pytest.mark.parametrize("kind", KINDS)
def test_images_in_memory_are_turned_once(kind):
    """The truth is PIL.ImageOps.exif_transpose; `own` copies what a caller may change."""
    for tag in range(1, 9):
        file = tagged(pictures.smooth(tag, 24, 40), tag, kind)
        with Image.open(io.BytesIO(file)) as image:
            truth, stored = np.asarray(ImageOps.exif_transpose(image).convert("RGB")), np.asarray(image.convert("RGB"))
        assert np.array_equal(read_rgb(io.BytesIO(file), "x", Reading(upright=False)), stored)  # as torchvision reads
        with opened(io.BytesIO(file), "x") as header:
            found = jpeg.encoded(header, Reading())
        assert (found.height, found.width) == truth.shape[:2]
        (pixels,) = jpeg.decode([found], ["x"], torch.device("cpu"))  # of JPEG files the device's
        assert np.array_equal(pixels.permute(1, 2, 0), truth)
        forms = [file]
        if kind != "TIFF" or tag == 1:  # Pillow turns others of TIFF, and their tag is gone
            forms += [Image.open(io.BytesIO(file)), Image.open(io.BytesIO(file)).convert("RGB")]
        for form in forms:
            for once in (form, own(form, Reading())):
                made = content(once, "x")
                assert np.array_equal(made.content.permute(1, 2, 0), truth)
                assert (made.height, made.width) == truth.shape[:2]


def test_a_draft_of_a_jpeg_is_turned_too():
    with Image.open(io.BytesIO(tagged(pictures.smooth(0, 240, 400), 8))) as image:
        image.draft("RGB", (100, 60))
        truth = np.asarray(ImageOps.exif_transpose(image))
        assert truth.shape == (100, 60, 3) and np.array_equal(content(image, "x").content.permute(1, 2, 0), truth)


def test_sides_are_checked_as_they_are_once_turned():
    file = tagged(pictures.smooth(0, 10, 40), 6)  # 40 high and 10 wide
    assert read_rgb(io.BytesIO(file), "x", Reading(min_size=(32, 8))).size == (10, 40)
    with pytest.raises(InputError, match="has 40 x 10 pixels, less than one patch .8 x 32"):
        read_rgb(io.BytesIO(file), "x", Reading(min_size=(8, 32)))


@pytest.mark.parametrize("damaged", [b"Exif\0\0damaged", b"Exif\0\0II*\0\xff\xff\xff\xff", b"", None])
def test_damaged_or_missing_metadata_costs_no_image(damaged):
    image, stream = pictures.smooth(0), io.BytesIO()
    image.save(stream, "JPEG", **({} if damaged is None else dict(exif=damaged)))
    assert np.array_equal(read_rgb(io.BytesIO(stream.getvalue()), "x"), np.asarray(Image.open(stream).convert("RGB")))


# ---- limits

MANY = 12000, 9000  # width and height of a telephone's photograph of 108 megapixels


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    """A JPEG of 108 megapixels that is to be turned: grey steps from left to right, as it is stored."""
    steps = np.arange(MANY[0], dtype=np.uint32) * 256 // MANY[0]
    image = Image.fromarray(np.broadcast_to(steps.astype(np.uint8), MANY[::-1]))
    path = tmp_path_factory.mktemp("photo") / "108.jpg"
    image.save(path, quality=90, exif=exif(6))
    return path


@pytest.mark.slow
def test_a_huge_photograph_is_read_smaller_and_amply_large(photo):
    """Without Pillow's warning, at JPEG's own scale, turned, its size told as it is whole; Pillow's limit stays."""
    before = Image.MAX_IMAGE_PIXELS
    for decode in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            made = content(photo, "x", Reading(min_size=(9001, 1)), decode)
        assert (made.height, made.width) == MANY and made.content.shape == (3, MANY[0] // 2, MANY[1] // 2)
        truth = torch.arange(MANY[0] // 2) * 256 // (MANY[0] // 2)
        assert (made.content[:, :, 17] - truth).abs().max() <= 3
    with pytest.raises(Unreadable, match="has 12000 x 9000 pixels, less than one patch"):
        read_rgb(photo, "x", Reading(min_size=(1, 9001)))
    assert Image.MAX_IMAGE_PIXELS == before and MANY[0] * MANY[1] > LARGE
    with pytest.warns(Image.DecompressionBombWarning, match="108000000 pixels. exceeds limit of 89478485"):
        Image.open(photo).close()


def test_the_limit_is_a_setting_everywhere(tmp_path):
    limit, model, photo = dict(max_pixels=1000), tiny(5), tmp_path / "photo.jpg"
    pictures.smooth(0, 40, 60).save(photo)
    told = "photo.jpg .*2400 pixels. exceeds limit of 1000 pixels.; make it smaller, or raise max_pixels$"
    with pytest.raises(InputError, match=told):
        Embedder(model, **limit).embed([photo])
    assert len(Embedder(model, workers=2).embed([photo, photo])) == 2
    for settings, error in ((limit, told), ({}, "^$")):
        (record,) = predict(model, [str(photo)], Config(task="eval", workers=0, **settings))
        assert re.search(error, record.get("error", ""))
    with pytest.raises(InputError, match="max_pixels must be a whole number from 1, got 0"):
        Embedder(model, max_pixels=0)
    with pytest.raises(InputError, match="max_pixels must be positive, and at most 2,147,483,648"):
        Config(max_pixels=0)


def test_ordinary_images_are_read_whole_and_a_large_png_too(monkeypatch):
    """A JPEG just below the size from which on it is scaled, and a PNG above it, here for a size of 3,000 pixels."""
    monkeypatch.setattr(images, "LARGE", 3000)
    monkeypatch.setattr(images, "AMPLE", 16)
    sides = [(60, 50), (60, 51), (512, 512), (16, 4000), (17, 64)]
    read = [read_rgb(encoded(pictures.smooth(0, *each), "JPEG"), "x").size[::-1] for each in sides]
    assert read == [(60, 50), (30, 26), (64, 64), (16, 4000), (17, 64)]
    assert read_rgb(encoded(pictures.smooth(0, 512, 512)), "x").size == (512, 512)
    given = Image.open(io.BytesIO(encoded(pictures.smooth(0, 512, 512), "JPEG")))
    assert read_rgb(given, "x").size == given.size == (512, 512)  # somebody's image stays as it is


def test_what_this_thread_reads_changes_no_other_thread(monkeypatch):
    """While a thread reads here, Pillow's own limit, which is the user's, holds in all others, and again afterwards."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    file, found = encoded(Image.fromarray(RGB)), []  # 960 pixels
    large = encoded(pictures.smooth(0, 60, 40))  # 2,400: Pillow raises

    def elsewhere():
        try:
            Image.open(io.BytesIO(large))
        except Image.DecompressionBombError as error:
            found.append(str(error))

    with opened(large, "x") as image:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert image.size == (40, 60)
    elsewhere()
    assert len(found) == 2 and "(2400 pixels) exceeds limit of 2000 pixels" in found[1] and found[0] == found[1]
    assert Image.MAX_IMAGE_PIXELS == 1000 and read_rgb(file, "x").size == (40, 24)
    for limit in (None, 5.5, float("inf")):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        assert read_rgb(large, "x").size == (40, 60)
        with pytest.raises(Unreadable, match="2,?400 pixels|60 x 40 pixels"):
            read_rgb(large, "x", Reading(max_pixels=2399))
