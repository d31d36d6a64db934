"""Images turned upright as EXIF says, wherever files are read: the truth is PIL.ImageOps.exif_transpose."""

import io
import time

import numpy as np
import pictures
import pytest
import torch
from frozen import tiny
from PIL import ExifTags, Image, ImageOps
from runs import digits

import vitfast
from vitfast import Embedder
from vitfast.data import jpeg
from vitfast.data.contents import content, own
from vitfast.data.images import Reading, opened, orientation, read_rgb
from vitfast.data.loader import open_data
from vitfast.data.records import records
from vitfast.eval import embed
from vitfast.eval.predict import predict
from vitfast.run.config import Config

CPU, STORED = torch.device("cpu"), Reading(upright=False)
KINDS = {"JPEG": dict(quality=95), "PNG": {}, "WEBP": dict(lossless=True), "TIFF": {}}


def stored(image: Image.Image, tag: int, kind: str = "JPEG", **options) -> bytes:
    """A file whose pixels are `image` and whose EXIF orientation is the tag."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = tag
    stream = io.BytesIO()
    image.save(stream, kind, exif=exif, **KINDS[kind] | options)
    return stream.getvalue()


def upright(file: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(file)) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


def as_stored(file: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(file)) as image:
        return np.asarray(image.convert("RGB"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two classes of JPEG files, one of each orientation, and beside them the same with upright pixels as PNG."""
    root = tmp_path_factory.mktemp("photos")
    for split in ("train", "val"):
        for name in "ab":
            for kind in ("tagged", "upright"):
                (root / kind / split / name).mkdir(parents=True)
            for tag in range(1, 9):
                file = stored(pictures.smooth(10 * tag + ord(name), 40, 64), tag)
                (root / "tagged" / split / name / f"{tag}.jpg").write_bytes(file)
                Image.fromarray(upright(file)).save(root / "upright" / split / name / f"{tag}.png")
    return root


@pytest.mark.parametrize("tag", range(1, 9))
@pytest.mark.parametrize("kind", KINDS)
def test_pixels_and_sizes_of_every_orientation(kind, tag):
    file = stored(pictures.smooth(tag, 24, 40), tag, kind)
    truth = upright(file)
    assert np.array_equal(read_rgb(io.BytesIO(file), "x"), truth)
    assert np.array_equal(read_rgb(io.BytesIO(file), "x", STORED), as_stored(file))  # as timm and torchvision read it
    with opened(io.BytesIO(file), "x") as header:
        found = jpeg.encoded(header, Reading())
    assert (found.height, found.width) == truth.shape[:2]
    (pixels,) = jpeg.decode([found], ["x"], CPU)
    assert torch.equal(pixels, torch.from_numpy(truth.copy()).permute(2, 0, 1))
    for form in (file, Image.open(io.BytesIO(file)), Image.open(io.BytesIO(file)).convert("RGB")):
        if kind == "TIFF" and tag > 1 and not isinstance(form, bytes):
            continue  # Pillow has turned it, and its tag is gone
        for once in (form, own(form, Reading())):  # a copy of an upright image is not turned again
            made = content(once, "x")
            assert np.array_equal(made.content.permute(1, 2, 0), truth)
            assert (made.height, made.width) == truth.shape[:2]


@pytest.mark.parametrize("mode", ["L", "CMYK", "P", "1", "I;16"])
def test_pixels_of_every_mode(mode):
    image = pictures.smooth(0, 24, 40)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) << 8)
    file = stored(image.convert(mode), 6, "TIFF" if mode == "CMYK" else "PNG")
    with Image.open(io.BytesIO(file)) as opened_image:
        turned = ImageOps.exif_transpose(opened_image)
    truth = np.asarray(turned) >> 8 if mode == "I;16" else np.asarray(turned.convert("RGB"))
    got = np.asarray(read_rgb(io.BytesIO(file), "x"))
    assert np.array_equal(got[..., 0] if mode == "I;16" else got, truth)


def test_a_draft_of_a_jpeg_is_turned_too():
    with Image.open(io.BytesIO(stored(pictures.smooth(0, 240, 400), 8))) as image:
        image.draft("RGB", (100, 60))
        truth = np.asarray(ImageOps.exif_transpose(image))
        assert truth.shape == (100, 60, 3) and np.array_equal(content(image, "x").content.permute(1, 2, 0), truth)


def test_sides_are_checked_as_they_are_once_turned():
    file = stored(pictures.smooth(0, 10, 40), 6)  # 40 high and 10 wide
    assert read_rgb(io.BytesIO(file), "x", Reading(min_size=(32, 8))).size == (10, 40)
    with pytest.raises(vitfast.InputError, match="has 40 x 10 pixels, less than one patch .8 x 32"):
        read_rgb(io.BytesIO(file), "x", Reading(min_size=(8, 32)))


@pytest.mark.parametrize("exif", [b"Exif\0\0damaged", b"Exif\0\0II*\0\xff\xff\xff\xff", b"", None])
def test_damaged_or_missing_metadata_costs_no_image(exif):
    image, stream = pictures.smooth(0), io.BytesIO()
    image.save(stream, "JPEG", **({} if exif is None else dict(exif=exif)))
    assert np.array_equal(read_rgb(io.BytesIO(stream.getvalue()), "x"), as_stored(stream.getvalue()))


def test_untagged_images_take_no_longer():
    stream = io.BytesIO()
    pictures.smooth(0).save(stream, "JPEG")
    image = Image.open(stream)
    begun = time.perf_counter()
    for _ in range(1000):
        orientation(image)
    assert time.perf_counter() - begun < 0.1  # 0.1 ms an image; decoding a photograph takes several


@pytest.mark.parametrize("decode", ["host", "device"])
@pytest.mark.parametrize("split", ["", "train"], ids=["two splits", "one that is held out from"])
def test_training_and_validation_see_upright_images(folder, decode, split):
    batches = {}
    for kind, turned in (("tagged", True), ("upright", True), ("tagged", False)):
        options = dict(batch_size=16, steps=2, hflip=0.5, workers=0, exif_orientation=turned, decode=decode)
        data = open_data(digits(data=str(folder / kind / split), **options), (32, 16), (8, 8), CPU)
        batches[kind, turned] = [images for images, *_ in (*data.train_batches(0, 2), *data.eval_batches())]
    truth = batches["upright", True]
    assert all(map(torch.equal, batches["tagged", True], truth))
    assert not any(map(torch.equal, batches["tagged", False], truth))


@pytest.mark.parametrize("sizes", ["", "native"])
def test_predictions_are_those_of_upright_images(folder, sizes):
    model = tiny(5)
    names = [folder / kind / "val/a" / f"{tag}.{suffix}" for kind, suffix in (("tagged", "jpg"), ("upright", "png"))
             for tag in range(1, 9)]  # fmt: skip

    def answers(paths, **options):
        config = Config(task="eval", workers=0, sizes=sizes, **options)
        return [record["predictions"] for record in predict(model, map(str, paths), config)]

    tagged, truth = answers(names[:8]), answers(names[8:])
    assert tagged == truth and answers(names[:8], exif_orientation=False)[1:] != truth[1:]


@pytest.mark.parametrize("decode", ["host", "device"])
@pytest.mark.parametrize("sizes", [None, "native"])
def test_vectors_are_those_of_upright_images(folder, decode, sizes):
    model = tiny(5)
    files, truth = ([folder / kind / "val/a" / f"{tag}.{suffix}" for tag in range(1, 9)]
                    for kind, suffix in (("tagged", "jpg"), ("upright", "png")))  # fmt: skip
    wanted = list(Embedder(model, sizes=sizes).stream(truth))
    for forms in (files, [path.read_bytes() for path in files], [Image.open(path) for path in files]):
        found = list(Embedder(model, decode=decode, sizes=sizes, workers=2).stream(forms))
        assert [(f.height, f.width) for f in found] == [(w.height, w.width) for w in wanted]
        for ours, theirs in zip(found, wanted):
            np.testing.assert_allclose(ours.vector, theirs.vector, rtol=1e-5, atol=1e-6)
    left = Embedder(model, exif_orientation=False, sizes=sizes).embed(files)
    assert not np.allclose(left[5], wanted[5].vector, atol=1e-3)
    transform = vitfast.transform(model)
    assert torch.equal(transform(files[5]), transform(truth[5]))
    assert torch.equal(transform(Image.open(files[5]).convert("RGB")), transform(truth[5]))  # as ImageFolder gives it


def test_embeddings_record_the_setting(folder, tmp_path):
    model = tiny(5)
    spec = str(folder / "tagged/val")
    old = Embedder(model, exif_orientation=False)
    embed.embed_to(old, records(spec), tmp_path)
    assert embed.embed_to(old, records(spec), tmp_path).kept == 16
    with pytest.raises(vitfast.InputError, match="holds embeddings with exif_orientation false, not true"):
        embed.embed_to(Embedder(model), records(spec), tmp_path)
