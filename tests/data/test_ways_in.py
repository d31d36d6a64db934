"""One way in: the pixels of every odd image, and what is refused, are the same for every kind of source.

The truth of each content is arithmetic on the pixels that were put in, or torchvision's decoder of JPEG.
"""

import os
import struct
import warnings

import numpy as np
import pictures
import pytest
import shards
import torch
import torchvision
from frozen import tiny
from pictures import encoded, exif
from PIL import Image
from runs import digits

from vitfast import Embedder
from vitfast.data import jpeg
from vitfast.data.contents import content
from vitfast.data.datasets import open_sources
from vitfast.data.image_files import image_files
from vitfast.data.images import Reading, Unreadable, read_rgb
from vitfast.data.loader import open_data
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
    photo, turned = encoded(image, "JPEG", quality=95), encoded(image, "JPEG", quality=95, exif=exif(6))
    cmyk, sixteen = np.dstack([RGB, ALPHA]), GREY.astype(np.uint16) * 256 + 77
    cmyk_photo = encoded(image.convert("CMYK"), "JPEG")
    two = encoded(image, "MPO", save_all=True, append_images=[image.transpose(Image.Transpose.ROTATE_90)], quality=95)
    found = {f"turned {k}.png": (encoded(image, exif=exif(k)), turn(RGB)) for k, turn in UPRIGHT.items()}
    return found | {
        "turned.jpg": (turned, UPRIGHT[6](by_torchvision(turned))),
        "turned.webp": (encoded(image, "WEBP", lossless=True, exif=exif(8)), UPRIGHT[8](RGB)),
        "turned.tif": (encoded(image, "TIFF", exif=exif(6)), UPRIGHT[6](RGB)),
        "turned 16 bits.png": (encoded(Image.fromarray(sixteen), exif=exif(5)), UPRIGHT[5](THREE)),
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
        source = opened(f"hfds/{root}/{way}", 0)
        names = [each["path"] for each in source.reader.dataset["image"]]
        found[f"hfds {way}"] = dict(zip(names, pixels_of(source).values()))
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
        labels = [(f"{os.path.splitext(name)[0]}.cls", classes[name].encode()) for name in files]
        shards.write(root / "shards" / f"{split}.tar", [*files.items(), *labels])
        (root / "parquet").mkdir(exist_ok=True)
        columns = dict(image=stored, label=["ab".index(each) for each in classes.values()])
        kinds = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=["a", "b"]))
        datasets.Dataset.from_dict(columns, features=kinds).to_parquet(root / "parquet" / f"{split}.parquet")
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.fixture(scope="module")
def plain(ways, tmp_path_factory):
    """Two folders of the same images, by their names: as they come, and as PNG files of the truth."""
    given, right = (tmp_path_factory.mktemp(name) for name in ("given", "plain"))
    for i, (name, (file, pixels)) in enumerate(contents().items()):
        for split in ("train", "val"):
            for root in (given, right):
                (root / split / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
            (given / split / "ab"[i % 2] / f"{i:02d} {name}").write_bytes(file)
            Image.fromarray(pixels.astype(np.uint8)).save(right / split / "ab"[i % 2] / f"{i:02d} {name}.png")
    return given, right


@pytest.mark.parametrize("sizes", ["", "native"])
def test_predictions_and_vectors_are_those_of_the_plain_pixels(plain, sizes):
    """The whole way, from files to what the model says."""
    model, (files, truth) = tiny(5), (sorted(root.glob("val/?/*")) for root in plain)

    def answers(paths, **options):
        config = Config(task="eval", workers=0, sizes=sizes, **options)
        return [record["predictions"] for record in predict(model, map(str, paths), config)]

    right = answers(truth)
    assert answers(files) == right and len(right) == len(files) == len(contents())
    assert answers(files, exif_orientation=False) != right
    options = dict(sizes=sizes or None)
    right = list(Embedder(model, **options).stream(truth))
    for decode in ("host", "device"):
        for forms in (files, [file.read_bytes() for file in files], [Image.open(file) for file in files]):
            found = list(Embedder(model, decode=decode, workers=2, **options).stream(forms))
            assert [(each.height, each.width) for each in found] == [(each.height, each.width) for each in right]
            for ours, theirs in zip(found, right):
                np.testing.assert_allclose(ours.vector, theirs.vector, rtol=1e-5, atol=1e-6)
    stored = Embedder(model, exif_orientation=False, **options).embed(files)
    assert not np.allclose(stored, np.stack([each.vector for each in right]), atol=1e-3)


@pytest.mark.parametrize("decode", ["host", "device"])
@pytest.mark.parametrize("split", ["", "train"], ids=["two splits", "one that is held out from"])
def test_training_and_validation_see_the_plain_pixels(plain, decode, split):
    given, right = plain
    batches = []
    for root, turned in ((given, True), (right, True), (given, False)):
        options = dict(batch_size=16, steps=2, hflip=0.5, workers=0, exif_orientation=turned, decode=decode)
        data = open_data(digits(data=str(root / split), **options), (32, 16), (8, 8), CPU)
        batches.append([images for images, *_ in (*data.train_batches(0, 2), *data.in_order(data.val))])
    assert all(map(torch.equal, batches[0], batches[1])) and not all(map(torch.equal, batches[2], batches[1]))
