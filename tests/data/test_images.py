"""Images of every mode as 8-bit RGB, the same on the host's path and the device's; files that cannot be read."""

import io
import os
import warnings
from unittest.mock import Mock

import numpy as np
import pictures
import pytest
import torch
import torchvision
from pictures import encoded
from PIL import Image, features
from runs import digits

from vitfast import InputError
from vitfast.data.datasets import Named
from vitfast.data.folders import ImageFiles
from vitfast.data.image_files import SUFFIXES
from vitfast.data.images import Reading, Unreadable, read_rgb
from vitfast.data.loader import open_data

CPU = torch.device("cpu")
RGB = np.asarray(pictures.smooth(0))  # (60, 80, 3)
GREY = np.asarray(pictures.smooth(0).convert("L"))
SIXTEEN = GREY.astype(np.uint16) * 256 + 77  # the high byte is the 8-bit picture


def palette() -> tuple[bytes, np.ndarray]:
    image = Image.fromarray(RGB).quantize(64)
    return encoded(image, "PNG", transparency=bytes([0] * 32 + [255] * 32)), np.asarray(image.convert("RGB"))


def kinds() -> dict[str, tuple[bytes, np.ndarray]]:
    """Files, and the RGB pixels of each by arithmetic on what was put in; of CMYK as torchvision converts it."""
    three = np.repeat(GREY[..., None], 3, 2)
    alpha = np.full_like(GREY, 7)
    turned = Image.Exif()
    turned[0x0112] = 6  # "turn by 90 degrees"
    turned = encoded(Image.fromarray(GREY), exif=turned)
    cmyk = encoded(Image.fromarray(RGB).convert("CMYK"), "JPEG")
    decoded = torchvision.io.decode_jpeg(torch.frombuffer(bytearray(cmyk), dtype=torch.uint8), mode="RGB")
    return {
        "16-bit grey": (encoded(Image.fromarray(SIXTEEN)), three),
        "16-bit RGB": (pictures.png16(RGB.astype(np.uint16) * 256 + 200), RGB),
        "16-bit PGM": (encoded(Image.fromarray(SIXTEEN.astype(np.int32)), "PPM"), three),
        "16-bit TIFF": (encoded(Image.fromarray(SIXTEEN), "TIFF"), three),
        "LA": (encoded(Image.fromarray(np.dstack([GREY, alpha]))), three),
        "RGBA": (encoded(Image.fromarray(np.dstack([RGB, alpha]))), RGB),
        "1": (encoded(Image.fromarray(GREY > 127)), np.where(three > 127, 255, 0).astype(np.uint8)),
        "palette with transparency": palette(),
        "grey PNG that says it is turned": (turned, three),
        "CMYK JPEG": (cmyk, decoded.permute(1, 2, 0).numpy()),
    }


@pytest.mark.parametrize("kind", kinds())
def test_every_mode_is_the_picture_on_both_paths(kind, tmp_path):
    content, truth = kinds()[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = np.asarray(read_rgb(io.BytesIO(content), kind, Reading(upright=False)))
    assert found.dtype == np.uint8 and np.array_equal(found, truth)
    for name in "ab":
        (tmp_path / "train" / name).mkdir(parents=True)
        for i in range(2):
            (tmp_path / "train" / name / f"{i}.png").write_bytes(content)
    settings = dict(data=str(tmp_path), batch_size=2, workers=0, crop_scale=(1, 1), train_crop_mode="squash", hflip=0)
    settings["exif_orientation"] = False  # test_exif.py turns them
    for where in ("host", "device"):
        (images, _, told), *_ = open_data(digits(decode=where, **settings), (60, 80), (8, 8), CPU).train_batches(0, 1)
        assert not told
        difference = np.abs(images[0].permute(1, 2, 0).numpy().astype(int) - truth)
        assert difference.max() <= 1, (where, difference.max())


def test_16_bits_keep_their_high_byte():
    values = np.array([[0, 255, 256, 511, 32768, 65279, 65280, 65535]], np.uint16)
    for image in (Image.fromarray(values), Image.open(io.BytesIO(encoded(Image.fromarray(values))))):
        assert np.asarray(read_rgb(image, "x"))[0, :, 0].tolist() == [0, 0, 1, 1, 128, 254, 255, 255]
    for mode in ("I", "F"):
        with pytest.raises(Unreadable, match="x.tiff is a broken image .its pixels are 32-bit numbers"):
            read_rgb(io.BytesIO(encoded(Image.fromarray(GREY).convert(mode), "TIFF")), "x.tiff")


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
        "small.png": (encoded(Image.fromarray(RGB[:1])), "has 1 x 80 pixels, less than one patch .8 x 8"),
        "whole.jpg": (closed, "whole.jpg cannot be read as an image .Permission denied"),
    }
    for name, (content, message) in cases.items():
        if isinstance(content, bytes):
            (tmp_path / name).write_bytes(content)
        monkeypatch.setattr(Image, "open", Mock(side_effect=closed) if content is closed else opened)
        with pytest.raises(Unreadable, match=message) as caught:
            ImageFiles([str(tmp_path / name)], [0], ["a"], Reading(min_size=(8, 8)))[0]
        assert "\n" not in str(caught.value) and str(caught.value).encode()


def test_a_file_may_hold_what_pillow_reads_whatever_its_suffix():
    Image.init()
    kinds = {Image.EXTENSION[suffix] for suffix in SUFFIXES} | {"TGA", "JPEG2000"}
    kinds |= {"MPO"} | ({"AVIF"} if features.check("avif") else set())  # MPO: a camera's JPEG with a second picture
    for kind in kinds:
        found = np.asarray(read_rgb(io.BytesIO(encoded(Image.fromarray(RGB), kind)), "x.jpg")).astype(int)
        assert np.abs(found - RGB).mean() < 8, kind


def test_animations_are_their_first_frame():
    frames = [pictures.smooth(i) for i in range(3)]
    for kind in ("GIF", "WEBP"):
        content = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=50)
        difference = np.asarray(read_rgb(io.BytesIO(content), "x")).astype(int) - RGB
        assert np.abs(difference).mean() < 8, kind


def test_named_data_sets_say_what_is_broken():
    """And that the test splits of some have the class -1 everywhere."""

    class Gone:
        def __getitem__(self, index):
            raise FileNotFoundError(2, "No such file or directory", "gone.png")

    class Reader(list):
        reader = Gone()

    class Stored(list):
        reader = [(io.BytesIO(encoded(Image.fromarray(SIXTEEN))), 1)]

    for source in (Reader(), Gone()):
        with pytest.raises(Unreadable, match=r"hfds/x\[0\] is a broken image .*No such file"):
            Named("hfds/x", source)[0]
    image, label = Named("hfds/x", Stored())[0]
    assert label == 1 and np.array_equal(np.asarray(image)[..., 0], GREY)
    with pytest.raises(InputError, match=r"hfds/x\[0\] has the class -1 .this split has no labels."):
        Named("hfds/x", [(Image.fromarray(RGB), -1)])[0]
