"""One way in: the pixels of every odd image, and what is refused, are the same for every kind of source.

The truth of each content is arithmetic on the pixels that were put in, or torchvision's decoder of JPEG.
"""

import io
import os
import re
import struct
import tarfile
import threading
import warnings
from functools import partial

import numpy as np
import pictures
import pytest
import torch
import torchvision
from frozen import tiny
from pictures import encoded
from PIL import ExifTags, Image
from runs import digits
from shards import card

from vitfast import Embedder, InputError
from vitfast.data import images, jpeg
from vitfast.data.contents import content
from vitfast.data.datasets import open_sources
from vitfast.data.image_files import image_files
from vitfast.data.images import LARGE, Reading, Unreadable, opened, read_rgb
from vitfast.data.records import records
from vitfast.eval.predict import Files, predict
from vitfast.run.config import Config

CPU = torch.device("cpu")
RGB = np.asarray(pictures.smooth(0, 24, 40))
GREY = RGB[..., 0]
ALPHA = np.random.default_rng(1).integers(0, 256, GREY.shape, dtype=np.uint8)
THREE = np.repeat(GREY[..., None], 3, 2)
UPRIGHT = {  # of an array as it is stored, by EXIF's table of where its first row and column are
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: x[::-1].swapaxes(0, 1),
    7: lambda x: x[::-1, ::-1].swapaxes(0, 1),
    8: lambda x: x[:, ::-1].swapaxes(0, 1),
}


def tagged(tag: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = tag
    return exif


def by_torchvision(file: bytes) -> np.ndarray:
    data = torch.frombuffer(bytearray(file), dtype=torch.uint8)
    return torchvision.io.decode_jpeg(data, mode="RGB").permute(1, 2, 0).numpy()


def of_cmyk(values: np.ndarray) -> np.ndarray:
    """(255 - c) * (255 - k) / 255, rounded."""
    inverse = 255 - values.astype(float)
    white = inverse[..., 3:]
    return (white - np.floor(values[..., :3] * white / 255 + 0.5)).astype(np.uint8)


def tiff12(grey: np.ndarray) -> bytes:
    """A TIFF file of 12-bit grey, (H, W) with an even W: two numbers in three bytes."""
    a, b = grey[:, ::2].astype(int), grey[:, 1::2].astype(int)
    data = np.stack([a >> 4, (a & 15) << 4 | b >> 8, b & 255], -1).astype(np.uint8).tobytes()
    (height, width), tags = grey.shape, []
    for tag, value in (256, width), (257, height), (258, 12), (259, 1), (262, 1), (273, 8), (277, 1), (278, height):
        tags.append(struct.pack("<HHII", tag, 4, 1, value))
    tags.append(struct.pack("<HHII", 279, 4, 1, len(data)))
    return struct.pack("<2sHI", b"II", 42, 8 + len(data)) + data + struct.pack("<H", 9) + b"".join(tags) + bytes(4)


def png16(pixels: np.ndarray, colours: int) -> bytes:
    lines = b"".join(b"\0" + line.astype(">u2").tobytes() for line in pixels)
    return pictures._png(*pixels.shape[:2], 16, colours, lines)


def contents() -> dict[str, tuple[bytes, np.ndarray]]:
    """Files by their names, and the RGB pixels of each."""
    image, wide = Image.fromarray(RGB), RGB.astype(np.uint16) * 256 + 200
    indexed = Image.fromarray(GREY // 8)
    indexed.putpalette(RGB[:8, :4].tobytes() * 8)  # 256 colours, of which 32 are used
    colours = np.frombuffer(RGB[:8, :4].tobytes() * 8, np.uint8).reshape(-1, 3)[GREY // 8]
    indexed = encoded(indexed), encoded(indexed, transparency=3), encoded(indexed, transparency=bytes(range(32)))
    frames = [
        Image.fromarray(np.where(GREY[..., None] > 120 + i, 255, 0).astype(np.uint8).repeat(3, 2)) for i in (0, 9)
    ]
    moving = dict(save_all=True, append_images=frames[1:], duration=50)
    black_white = np.asarray(frames[0])
    photo, turned = encoded(image, "JPEG", quality=95), encoded(image, "JPEG", quality=95, exif=tagged(6))
    cmyk, sixteen = np.dstack([RGB, ALPHA]), GREY.astype(np.uint16) * 256 + 77
    cmyk_photo = encoded(image.convert("CMYK"), "JPEG")
    two = encoded(image, "MPO", save_all=True, append_images=[image.transpose(Image.Transpose.ROTATE_90)], quality=95)
    found = {f"turned {k}.png": (encoded(image, exif=tagged(k)), turn(RGB)) for k, turn in UPRIGHT.items()}
    return found | {
        "turned.jpg": (turned, UPRIGHT[6](by_torchvision(turned))),
        "turned.webp": (encoded(image, "WEBP", lossless=True, exif=tagged(8)), UPRIGHT[8](RGB)),
        "turned.tif": (encoded(image, "TIFF", exif=tagged(6)), UPRIGHT[6](RGB)),
        "turned 16 bits.png": (encoded(Image.fromarray(sixteen), exif=tagged(5)), UPRIGHT[5](THREE)),
        "alpha.png": (encoded(Image.fromarray(np.dstack([RGB, ALPHA]))), RGB),
        "alpha.webp": (encoded(Image.fromarray(np.dstack([RGB, ALPHA])), "WEBP", lossless=True, exact=True), RGB),
        "alpha.tif": (encoded(Image.fromarray(np.dstack([RGB, ALPHA])), "TIFF"), RGB),
        "grey alpha.png": (encoded(Image.fromarray(np.dstack([GREY, ALPHA]))), THREE),
        "palette.png": (indexed[0], colours),
        "palette, one colour clear.png": (indexed[1], colours),
        "palette with alpha.png": (indexed[2], colours),
        "one colour clear.png": (encoded(image, transparency=tuple(map(int, RGB[3, 3]))), RGB),
        "one grey clear.png": (encoded(Image.fromarray(GREY), transparency=int(GREY[3, 3])), THREE),
        "1 bit.png": (encoded(Image.fromarray(GREY > 127)), np.where(THREE > 127, 255, 0)),
        "16 bits.png": (encoded(Image.fromarray(sixteen)), THREE),
        "16 bits.tif": (encoded(Image.fromarray(sixteen), "TIFF"), THREE),
        "12 bits.tif": (tiff12(GREY.astype(np.uint16) * 16 + 7), THREE),
        "16 bits.pgm": (encoded(Image.fromarray(sixteen.astype(np.int32)), "PPM"), THREE),
        "16-bit RGB.png": (png16(wide, 2), RGB),
        "16-bit RGBA.png": (png16(np.dstack([wide, ALPHA.astype(np.uint16) * 257]), 6), RGB),
        "16-bit grey alpha.png": (png16(np.dstack([sixteen, ALPHA.astype(np.uint16) * 257]), 4), THREE),
        "CMYK.tif": (encoded(Image.frombytes("CMYK", (40, 24), cmyk.tobytes()), "TIFF"), of_cmyk(cmyk)),
        "CMYK.jpg": (cmyk_photo, by_torchvision(cmyk_photo)),
        "plain.jpg": (photo, by_torchvision(photo)),
        "grey.jpg": (encoded(Image.fromarray(GREY), "JPEG"), by_torchvision(encoded(Image.fromarray(GREY), "JPEG"))),
        "two pictures.jpg": (two, by_torchvision(two)),
        "moving.gif": (encoded(frames[0], "GIF", **moving), black_white),
        "moving.png": (encoded(frames[0], "PNG", **moving), black_white),
        "moving.webp": (encoded(frames[0], "WEBP", lossless=True, **moving), black_white),
        "plain.bmp": (encoded(image, "BMP"), RGB),
        "plain.ppm": (encoded(image, "PPM"), RGB),
    }


def refused() -> dict[str, tuple[bytes, str]]:
    """Files, and why they are refused where a patch is 8 x 8."""
    grey = Image.fromarray(GREY)
    icon = pictures.bomb(60000, 60000)
    icon = b"\0\0\1\0\1\0\x10\x10\0\0\1\0\x20\0" + len(icon).to_bytes(4, "little") + (22).to_bytes(4, "little") + icon
    limit = "3600000000 pixels. exceeds limit of 250000000 pixels.; make it smaller, or raise max_pixels$"
    return {
        "bomb.png": (pictures.bomb(60000, 60000), f"cannot be read as an image .*{limit}"),
        "bomb.bmp": (icon, limit),  # an icon of 16 x 16 that holds that PNG
        "small.png": (encoded(Image.fromarray(RGB[:7])), "has 7 x 40 pixels, less than one patch .8 x 8.; remove it"),
        "numbers.tif": (encoded(grey.convert("I"), "TIFF"), "its pixels are 32-bit numbers"),
        "fractions.tif": (encoded(grey.convert("F"), "TIFF"), "its pixels are 32-bit numbers"),
        "cut.jpg": (encoded(Image.fromarray(RGB), "JPEG")[:-60], "is a broken image .image file is truncated"),
    }


def numbered(files: dict) -> dict:
    """Names none of which is the end of another, or differs by its suffix alone."""
    return {f"{len(files)}-{i} {name}": value for i, (name, value) in enumerate(files.items())}


def pixels_of(source) -> dict:
    """{name of a file: function that reads it} of images by index."""
    return {source.name(i): (lambda i=i: np.asarray(source[i][0])) for i in range(len(source))}


def by_sources(root, **settings) -> dict:
    """{way in: {file: function that reads it}} of what training and evaluations read."""

    def opened(spec, split, data_dir=""):
        return open_sources(spec, str(data_dir), (16, 16), (8, 8), digits(**settings))[split]

    found = {}
    for way, spec in dict(folder=f"{root}/folder", labels=f"{root}/listed", wds=f"wds/{root}/shards").items():
        for split in (0, 1):
            found[f"{way} {split}"] = pixels_of(opened(spec, split))
    for way in ("folder", "parquet"):
        source, stream = opened(f"hfds/{root}/{way}", 0), opened(f"hfids/{root}/{way}", 1)
        names = [each["path"] for each in source.reader.dataset["image"]]
        found[f"hfds {way}"] = dict(zip(names, pixels_of(source).values()))
        given = {each["path"]: partial(stream.image, each, 0) for each, _ in stream.dataset}
        found[f"hfids {way}"] = {path: lambda read=read: np.asarray(read()) for path, read in given.items()}
    source = opened("torch/image_folder", 0, root / "folder")
    found["torch"] = dict(zip((path for path, _ in source.dataset.samples), pixels_of(source).values()))
    return found


@pytest.fixture(scope="module")
def ways(tmp_path_factory):
    """{way in: {file: function that gives its pixels or raises Unreadable}}."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    root, patch = tmp_path_factory.mktemp("ways"), pytest.MonkeyPatch()
    for name in ("HF_HOME", "HF_DATASETS_CACHE"):
        patch.setenv(name, str(root / "cache"))
    import datasets

    files = {name: file for name, (file, _) in (numbered(contents()) | numbered(refused())).items()}
    classes = {name: "ab"[i % 2] for i, name in enumerate(files)}
    stored = [dict(bytes=file, path=name) for name, file in files.items()]
    for split in ("train", "validation"):
        for name, file in files.items():
            (root / "folder" / split / classes[name]).mkdir(parents=True, exist_ok=True)
            (root / "folder" / split / classes[name] / name).write_bytes(file)
        (root / "listed" / split).mkdir(parents=True)
        for name, file in files.items():
            (root / "listed" / split / name).write_bytes(file)
        lines = [f'"{name}",{classes[name]}' for name in files]
        (root / "listed" / split / "labels.csv").write_text("\n".join(["file,classes", *lines]))
        (root / "shards").mkdir(exist_ok=True)
        with tarfile.open(root / "shards" / f"{split}.tar", "w") as tar:
            for name, file in files.items():
                for member, data in ((name, file), (f"{os.path.splitext(name)[0]}.cls", classes[name].encode())):
                    info = tarfile.TarInfo(member)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        (root / "parquet").mkdir(exist_ok=True)
        columns = dict(image=stored, label=["ab".index(each) for each in classes.values()])
        kinds = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["a", "b"]))
        datasets.Dataset.from_dict(columns, features=kinds).to_parquet(root / "parquet" / f"{split}.parquet")
    for folder in ("folder", "parquet"):
        (root / folder / "README.md").write_text(card(len(files)))
    (root / "list.txt").write_text("\n".join(f"listed/train/{name}" for name in files))
    pq.write_table(pa.table(dict(image=pa.array(stored), id=list(files))), root / "images.parquet")

    found = by_sources(root)
    embedder = Embedder(tiny(5), workers=0)
    for way, spec in dict(
        folder="folder/train", list="list.txt", tar="shards/train.tar", parquet="images.parquet"
    ).items():
        for decode in ("host", "device"):

            def read(record, decode=decode):
                made = content(record.content, record.id, embedder.reading, decode == "device")
                (pixels,) = jpeg.decode([made], [record.id], CPU)
                if isinstance(pixels, Unreadable):
                    raise pixels
                assert pixels.shape[1:] == (made.height, made.width)
                return pixels.permute(1, 2, 0).numpy()

            found[f"embed {way} {decode}"] = {r.id: (lambda r=r, read=read: read(r)) for r in records(f"{root}/{spec}")}
    source = Files(Reading.of(Config(task="eval"), (8, 8)))
    found["predict"] = {
        path: (lambda path=path: np.asarray(source[path][0])) for path in image_files(f"{root}/folder/train")
    }
    found["PIL"] = {
        name: (lambda file=file: np.asarray(read_rgb(file, "x", embedder.reading))) for name, file in files.items()
    }
    patch.undo()
    return root, found


def test_every_content_has_the_same_pixels_by_every_way_in(ways):
    truth, wrong = numbered(contents()), []
    for way, found in ways[1].items():
        left = dict(truth)
        for name, read in found.items():
            key = next((key for key in left if str(name).endswith(key)), None)
            if key is not None:
                with warnings.catch_warnings():
                    warnings.simplefilter("error", Image.DecompressionBombWarning)
                    pixels = read()
                if pixels.dtype != np.uint8 or not np.array_equal(pixels, left.pop(key)[1]):
                    wrong.append((way, key))
        wrong += [(way, "absent", key) for key in left if way != "torch" or not key.endswith(".gif")]  # by its suffix
    assert not wrong


def test_every_way_in_leaves_images_as_they_are_stored_where_asked(ways):
    for way, found in by_sources(ways[0], exif_orientation=False).items():
        (read,) = (read for name, read in found.items() if str(name).endswith("turned 6.png"))
        assert np.array_equal(read(), RGB), way


def test_every_way_in_refuses_the_same(ways):
    wrong = []
    for way, found in ways[1].items():
        left = numbered(refused())
        for name, read in found.items():
            key = next((key for key in left if str(name).endswith(key)), None)
            if key is not None:
                with warnings.catch_warnings(), pytest.raises(Unreadable, match=left.pop(key)[1]) as caught:
                    warnings.simplefilter("error")
                    read()
                assert "\n" not in str(caught.value)
        wrong += [(way, key) for key in left]
    assert not wrong


def test_runs_predictions_and_embeddings_are_those_of_the_plain_pixels(ways, tmp_path):
    """The whole way, from files to what the model says: as of PNG files of the truth."""
    root, model = ways[0], tiny(5)
    for name, (_, pixels) in numbered(contents()).items():
        Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / f"{name}.png")
    files = [next(root.glob(f"folder/train/?/{name}")) for name in numbered(contents())]
    plain = [str(tmp_path / f"{file.name}.png") for file in files]
    config = Config(task="eval", workers=0)
    found, truth = ([each["predictions"] for each in predict(model, map(str, some), config)] for some in (files, plain))
    assert found == truth and len(found) == len(contents())
    embedder = Embedder(model)
    assert torch.equal(embedder.embed(files), embedder.embed(plain))
    assert torch.equal(embedder.embed([Image.open(file) for file in files]), embedder.embed(plain))


# ---- limits

MANY = 12000, 9000  # width and height of a telephone's photograph of 108 megapixels


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    """A JPEG of 108 megapixels that is to be turned: grey steps from left to right, as it is stored."""
    steps = np.arange(MANY[0], dtype=np.uint32) * 256 // MANY[0]
    image = Image.fromarray(np.broadcast_to(steps.astype(np.uint8), MANY[::-1]))
    path = tmp_path_factory.mktemp("photo") / "108.jpg"
    image.save(path, quality=90, exif=tagged(6))
    return path


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


def test_the_limit_is_a_setting_everywhere(photo, tmp_path, monkeypatch, caplog, capsys):
    limit, model = dict(max_pixels=100_000_000), tiny(5)
    told = "108.jpg .*108000000 pixels. exceeds limit of 100000000 pixels.; make it smaller, or raise max_pixels$"
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
    for own in (None, 5.5, float("inf")):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", own)
        assert read_rgb(large, "x").size == (40, 60)
        with pytest.raises(Unreadable, match="2,?400 pixels|60 x 40 pixels"):
            read_rgb(large, "x", Reading(max_pixels=2399))
