"""LeJEPA's crops: how many, of which area, what is changed in them, and how a step's are packed."""

import colorsys

import numpy as np
import pictures
import pytest
import shards
import torch
from PIL import Image

from vitfast.data.crops import Crops
from vitfast.data.loader import WATCHED, open_data
from vitfast.data.samples import seed_everything
from vitfast.data.transforms import transforms
from vitfast.errors import InputError
from vitfast.run.config import crop_sizes
from vitfast.train.recipes import resolve

CPU, PLAIN = torch.device("cpu"), dict(color_jitter=0, hue_jitter=0, grayscale=0, blur=0, solarize=0, hflip=0)


def config(**fields):
    settings = dict(recipe="ssl/small", data="digits", output="unused", device="cpu", img_size=64, batch_size=8)
    return resolve("pretrain", settings | dict(workers=0) | fields)


def ramp(size: int = 200) -> Image.Image:
    """Red is the column, green the row: a crop can be read off its pixels."""
    rows, columns = np.mgrid[0:size, 0:size]
    return Image.fromarray(np.dstack([columns, rows, rows * 0]).astype(np.uint8))


@pytest.mark.parametrize(
    ("img_size", "patch", "local_size", "expected"),
    [(224, 16, None, 96), (224, 14, None, 98), (128, 8, None, 56), (32, 4, 16, 16), (16, 16, None, 16)],
)
def test_sizes_are_whole_patches(img_size, patch, local_size, expected):
    found = crop_sizes(config(local_size=local_size), (img_size, img_size), (patch, patch))
    assert found == [(2, (img_size, img_size)), (6, (expected, expected))]


def test_crops_cover_the_share_of_the_image_that_settings_say():
    made, image, areas = Crops(config(local_crops=2, **PLAIN), (64, 64), (8, 8)), ramp(), []
    for seed in range(100):
        seed_everything(seed)
        crops = made.transform(image)
        assert [tuple(crop.shape) for crop in crops] == [(3, 64, 64)] * 2 + [(3, 24, 24)] * 2
        # A side of a crop: the way of red or green from its first to its last pixel, and half a pixel at both ends.
        spans = [(np.ptp(crop[0].numpy().mean(0)), np.ptp(crop[1].numpy().mean(1))) for crop in crops]
        sides = [(x * n / (n - 1) / 200, y * n / (n - 1) / 200) for (x, y), n in zip(spans, (64, 64, 24, 24))]
        areas.append([x * y for x, y in sides])
    areas = np.array(areas)
    large, small = areas[:, :2], areas[:, 2:]
    assert large.min() > 0.27 and large.max() > 0.9 and small.min() > 0.035 and 0.2 < small.max() < 0.34
    assert np.unique(areas.round(4)).size > 350  # each crop is another


def test_colours_change_as_often_as_settings_say():
    """Hue, grey and solarised pictures of one colour, counted over 400 crops; five standard deviations."""
    image, patch = Image.new("RGB", (40, 40), (200, 40, 40)), (8, 8)

    def colours(**fields) -> np.ndarray:
        made, found = Crops(config(global_crops=1, local_crops=1, **PLAIN | fields), (32, 32), patch), []
        for seed in range(400):
            seed_everything(seed)
            found.append(made.transform(image)[0].numpy().mean((1, 2)))
        return np.array(found)

    def share(hits: np.ndarray, expected: float) -> None:
        assert abs(hits.mean() - expected) < 5 * (expected * (1 - expected) / len(hits)) ** 0.5

    assert (colours() == (200, 40, 40)).all()
    share(np.ptp(colours(grayscale=0.2), axis=1) == 0, 0.2)
    share((colours(solarize=0.3) == (55, 40, 40)).all(1), 0.3)
    hues = np.array([colorsys.rgb_to_hsv(*colour / 255)[0] for colour in colours(hue_jitter=0.2, jitter_share=0.8)])
    moved = np.minimum(hues, 1 - hues)
    assert 0.17 < moved.max() < 0.21
    share(moved > 1e-3, 0.8)


def test_a_blur_is_pillows_of_a_share_of_the_images():
    image, sharp = pictures.smooth(0, 96, 96), Crops(config(crop_scale=(1, 1), **PLAIN), (96, 96), (8, 8))
    blurred = Crops(config(crop_scale=(1, 1), **PLAIN | dict(blur=0.5)), (96, 96), (8, 8))
    different = 0
    for seed in range(200):
        seed_everything(seed)
        crop = blurred.transform(image)[0].float()
        seed_everything(seed)
        other = sharp.transform(image)[0].float()
        if not torch.equal(crop, other):
            different += 1
            assert crop.diff(dim=2).abs().mean() < other.diff(dim=2).abs().mean()
    assert 65 < different < 135


def test_settings_without_crops_are_those_of_before():
    """The new settings leave the transforms of all other recipes as they were."""
    from timm.data import create_transform

    chain, image = (
        transforms(resolve("pretrain", dict(recipe="vit-b16/imagenet", output="x", data="y")), (64, 64))[0],
        ramp(),
    )
    known = create_transform((3, 64, 64), True, use_prefetcher=True, color_jitter=None, interpolation="bicubic")
    assert [type(step) for step in chain.transforms] == [type(step) for step in known.transforms]
    seed_everything(3)
    found = chain(image)
    assert found.shape == (3, 64, 64)


def test_a_step_is_packed_view_by_view_in_its_micro_batches():
    made = Crops(config(local_crops=2, accumulate=2, **PLAIN), (64, 64), (8, 8))
    images = [[torch.full((3, side, side), 10 * i + v, dtype=torch.uint8) for v, side in enumerate((64, 64, 24, 24))]
              for i in range(5)]  # fmt: skip
    first, second = made.pack(tuple(images))
    for packed, numbers in ((first, (0, 1, 2)), (second, (3, 4))):
        assert packed.counts == (64,) * 2 * len(numbers) + (9,) * 2 * len(numbers)
        starts = packed.patches[packed.offsets[:-1].long(), 0, 0, 0].tolist()
        assert starts == [10 * i + v for v in range(4) for i in numbers]
    assert made.patches == 2 * 64 + 2 * 9


def test_batches_of_a_run_depend_on_seed_and_step_alone():
    def batches(workers: int, start: int):
        data = open_data(config(workers=workers, train_images=20), (32, 32), (8, 8), CPU)
        return [[*parts] for parts, _, _ in data.train_batches(start, 4)]

    whole, resumed, aside = batches(0, 0), batches(0, 2), batches(1, 0)
    for mine, theirs in (*zip(whole[2:], resumed, strict=True), *zip(whole, aside, strict=True)):
        assert torch.equal(mine[0].patches, theirs[0].patches) and mine[0].counts == theirs[0].counts
    assert not torch.equal(whole[0][0].patches, whole[1][0].patches)


# ---- images without labels


def opened(data, **fields):
    return open_data(config(data=str(data), **fields), (16, 16), (8, 8), CPU)


def names(source) -> list[str]:
    return sorted(source.path(i) for i in range(len(source)))


def test_any_folder_is_read_whole(tmp_path):
    """Flat, nested, mixed with class folders: all images train, and some of them are watched."""
    flat, deep = tmp_path / "flat", tmp_path / "deep"
    for path in (flat / "a.jpg", flat / "b.jpg", deep / "x" / "1.png", deep / "x" / "y" / "2.png", deep / "3.png"):
        path.parent.mkdir(parents=True, exist_ok=True)
        pictures.smooth(1, 24, 24).save(path)
    for folder, expected in ((flat, ["a.jpg", "b.jpg"]), (deep, ["3.png", "x/1.png", "x/y/2.png"])):
        data = opened(folder)
        assert names(data.train) == expected and data.probe is None and data.classes == ["images"]
        assert names(data.val) == expected and len(data.val) <= WATCHED
        batch, labels, unreadable = next(iter(data.train_batches(0, 1)))
        assert len(batch[0]) == 8 * 8 and labels.tolist() == [0] * 8 and not unreadable


def test_validation_images_are_not_trained_on(tmp_path, caplog):
    """Images of train/ without classes, beside class folders or images in val/, which may be the probe."""
    for layout in ("labelled", "flat"):
        root = pictures.folder(tmp_path / layout, splits=("val",) if layout == "labelled" else ())
        for path in (root / "train", root / "val"):
            path.mkdir(parents=True, exist_ok=True)
        for number in range(3):
            pictures.smooth(number, 24, 24).save(root / "train" / f"{number}.png")
        if layout == "flat":
            pictures.smooth(9, 24, 24).save(root / "val" / "9.png")
        with caplog.at_level("INFO", logger="vitfast"):
            data = opened(root)
        assert names(data.train) == ["0.png", "1.png", "2.png"] and data.probe is None
        assert "train: its 3 images train as one set" in caplog.text and f"--set probe={root / 'val'}" in caplog.text
    labelled = opened(tmp_path / "labelled", probe=str(tmp_path / "labelled" / "val"))
    assert labelled.probe.classes == ["a", "b"] and len(labelled.train) == 3
    with pytest.raises(InputError, match="holds val and no train/"):
        opened(pictures.folder(tmp_path / "alone", splits=("val",)))
    circle = tmp_path / "circle"
    circle.mkdir()
    pictures.smooth(1, 24, 24).save(circle / "1.png")
    (circle / "up").symlink_to(tmp_path)
    with pytest.raises(InputError, match="links back to a folder around it"):
        opened(circle)


def test_class_folders_are_labels_of_evaluations(tmp_path):
    data = opened(pictures.folder(tmp_path / "splits"))
    assert data.probe is data and (len(data.train), len(data.val)) == (8, 8) and data.classes == ["a", "b"]
    data = opened(tmp_path / "splits" / "train")
    assert data.probe is data and (len(data.train), len(data.val)) == (6, 2)


def test_other_images_may_be_the_labelled_ones(tmp_path):
    (tmp_path / "flat").mkdir()
    for number in range(3):
        pictures.smooth(number, 24, 24).save(tmp_path / "flat" / f"{number}.png")
    data = opened(tmp_path / "flat", probe=str(pictures.folder(tmp_path / "labelled")))
    assert len(data.train) == 3 and data.classes == ["images"]
    assert data.probe.classes == ["a", "b"] and (len(data.probe.train), len(data.probe.val)) == (8, 8)
    with pytest.raises(InputError, match=r"probe=\S*/a: \S* lies in no class folder"):
        opened(tmp_path / "flat", probe=str(tmp_path / "labelled" / "train" / "a"))


def test_images_of_several_classes_have_no_probe(tmp_path):
    pictures.folder(tmp_path, splits=("train",))
    lines = ["path,label", "a/0.jpg,cat", "a/1.jpg,cat dog", "b/0.jpg,", "b/1.jpg,dog"]
    (tmp_path / "train" / "labels.csv").write_text("\n".join(lines))
    data = opened(tmp_path)
    assert data.multi_label and data.probe is None and len(data.train) == 3


def test_lists_are_read(tmp_path):
    pictures.folder(tmp_path / "photos")
    (tmp_path / "list.txt").write_text("photos/train/a/0.jpg\nphotos/val/b/1.jpg\n")
    assert names(opened(tmp_path / "list.txt").train) == ["photos/train/a/0.jpg", "photos/val/b/1.jpg"]
    (tmp_path / "list.md").write_text("photos/train/a/0.jpg\n")
    with pytest.raises(InputError, match=r"list\.md is a file; --data takes a folder, or a list of images \(\.txt"):
        opened(tmp_path / "list.md")


def test_shards_need_no_labels(tmp_path):
    contents = shards.files(6)
    shards.write(tmp_path / "bare" / "a-0.tar", [(f"{i}.png", content) for i, content in enumerate(contents)])
    data = opened(f"wds/{tmp_path / 'bare'}")
    assert len(data.train) == 6 and data.classes == ["images"] and data.probe is None
    assert len(next(iter(data.train_batches(0, 1)))[0][0]) == 8 * 8
    labelled = opened(f"wds/{shards.shards(tmp_path / 'with', contents)}")
    assert labelled.probe is labelled and len(labelled.classes) == 3
    # One image without a class, and validation images with classes: all train, and the others are left out.
    shards.write(tmp_path / "with" / "train-2.tar", [("more/0.png", contents[0])])
    data = opened(f"wds/{tmp_path / 'with'}")
    assert len(data.train) == 7 and data.classes == ["images"] and data.probe is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(mixup=0.2), "LeJEPA takes its targets from the images: set mixup=0 cutmix=0"),
        (dict(sizes="16:32"), "LeJEPA packs the crops of images, and sizes cannot: set sizes=none"),
        (dict(drop_tokens=0.5), "drop_tokens cannot: set drop_tokens=none"),
        (dict(decode="device"), "decode cannot: set decode=host"),
        (dict(objective="softmax", probe="photos"), "probe is for training without labels"),
        (dict(local_crops=-1), r"local_crops must lie in \[0, 100\]"),
        (dict(projector_dim=1), r"projector_dim must lie in \[2, 1e5\]"),
        (dict(global_crops=1, local_crops=0), "global_crops and local_crops must be 2 at least"),
        (dict(batch_size=8, accumulate=4), "batch_size 8 over accumulate 4 must be at least 4"),
        (dict(layer_decay=0.7), "layer_decay is for fine-tuning, and not for LeJEPA"),
    ],
)
def test_settings_that_contradict_crops_are_named(fields, said):
    with pytest.raises(InputError, match=said):
        config(**fields)


def test_fine_tuning_is_by_labels():
    with pytest.raises(
        InputError, match="fine-tuning learns classes, and LeJEPA none: vitfast pretrain takes --weights"
    ):
        resolve("finetune", dict(recipe="ssl/small", weights="x", data="digits"))


def test_what_needs_labels_or_whole_patches_says_so(tmp_path):
    pictures.folder(tmp_path, splits=("",), classes=("a",))
    with pytest.raises(
        InputError, match="early_stop waits for a better accuracy, and there is no class for each image"
    ):
        opened(tmp_path / "a", early_stop=3)
    with pytest.raises(InputError, match="local_size 20 must be a multiple of the patch, 8 x 8"):
        opened(tmp_path / "a", local_size=20)
