"""Random erasing, crops, policies, and transforms of evaluations, in every pixel timm's or transformers'."""

import numpy as np
import pictures
import pytest
import torch
import transformers
from PIL import Image
from runs import digits
from timm.data import create_transform
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from vitfast import InputError
from vitfast.data.eval_transforms import EvalTransform
from vitfast.data.transforms import Erase, SquashedCrop, transforms
from vitfast.model.checkpoint import hugging_face
from vitfast.train.recipes import RECIPES


def ramp(height: int, width: int) -> Image.Image:
    """Red is the column, green the row, each from 0 to 200: a crop can be read off its pixels."""
    rows, columns = np.mgrid[0:height, 0:width]
    return Image.fromarray(
        np.dstack([columns * 200 / (width - 1), rows * 200 / (height - 1), rows * 0]).astype(np.uint8)
    )


def ends(pixels, axis: int) -> tuple[float, float]:
    """Where the first and the last pixel of a line of a ramp come from, as shares of its side."""
    line = np.asarray(pixels)[0].mean(0) if axis else np.asarray(pixels)[1].mean(1)
    step = (line[-1] - line[0]) / (len(line) - 1)
    return (line[0] - step / 2) / 200, (line[-1] + step / 2) / 200


def test_evaluations_see_what_the_sources_see():
    """By hand, of a picture twice as wide as high: the share of each side that is left."""
    image = ramp(200, 400)
    cases = {
        "plain-s16/imagenet-90ep": ((1 / 16, 15 / 16), (9 / 32, 23 / 32)),  # resize_small(256)|central_crop(224)
        "vit-b16/imagenet21k": ((1 / 16, 15 / 16), (9 / 32, 23 / 32)),
        "finetune/imagenet": ((0, 1), (0, 1)),  # resized to a square
        "finetune/vtab": ((0, 1), (0, 1)),
        "deit3-b16/imagenet": ((0, 1), (1 / 4, 3 / 4)),  # the largest square in the middle
    }
    for name, (height, width) in cases.items():
        pixels = transforms(RECIPES[name], (224, 224))[1](image)
        assert [*ends(pixels, 0), *ends(pixels, 1)] == pytest.approx([*height, *width], abs=0.006)
    unset = transforms(digits(), (224, 224))[1](image)  # no recipe says anything: as before
    assert np.array_equal(unset, transforms(RECIPES["deit3-b16/imagenet"], (224, 224))[1](image))
    for wrong, message in ((dict(crop_pct=0), "crop_pct must"), (dict(crop_mode="middle"), "crop_mode must be one of")):
        with pytest.raises(InputError, match=message):
            digits(**wrong)


def test_a_squashed_crop_is_bits():
    """Resize to 448, crop 384: crops of 6/7 of each side, at every place."""
    image, share = ramp(140, 280), (384 / 448) ** 2
    crop, places = SquashedCrop((64, 64), (share, share), interpolation="bicubic"), []
    for _ in range(200):
        pixels = np.asarray(crop(image)).transpose(2, 0, 1)
        for axis in (0, 1):
            first, last = ends(pixels, axis)
            assert last - first == pytest.approx(6 / 7, abs=0.02)
            places.append(first)
    assert min(places) < 0.01 and max(places) > 1 / 7 - 0.015 and np.mean(places) == pytest.approx(1 / 14, abs=0.01)


def test_a_long_image_is_cut_before_it_is_resized():
    """16 x 60000 pixels would be resized to 224 x 840,000."""
    _, evaluate = transforms(digits(), (224, 224))
    long, seen = ramp(16, 20000), []
    evaluate.transforms.insert(1, lambda image: seen.append(image.size) or image)
    pixels = evaluate(long)
    assert seen == [(256, 16)] and pixels.shape == (3, 224, 224)
    first, last = ends(pixels, 1)
    assert (first + last) / 2 == pytest.approx(0.5, abs=0.01)


def test_erasing_changes_one_rectangle_of_its_share():
    torch.manual_seed(1)
    image = torch.zeros(3, 40, 40, dtype=torch.uint8)
    changed = 0
    for _ in range(400):
        out = Erase(0.25)(image)
        assert out.dtype == torch.uint8 and not image.any()
        if out.any():
            changed += 1
            rows, columns = out.any(0).any(1).nonzero(), out.any(0).any(0).nonzero()
            area = (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1) / 1600
            assert 0.01 < area < 0.36 and (out.any(0).sum() / 1600 - area).abs() < 0.02
    assert 70 <= changed <= 130  # 400 x 0.25, four standard deviations


POLICIES = ["original", "originalr", "v0", "v0r-mstd0.5", "3a", "augmix-m9-w4-d2-b1", "rand", "rand-m9-mstd0.5-inc1"]
POLICIES += ["rand-m9-n3-tweights", "rand-m9-t3a-inc1", "rand-m10-t3aw", "rand-m12-mmax15-inc1"]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_operation_of_a_policy_takes_every_strength(policy):
    image = pictures.smooth(1, 40, 40)
    steps = transforms(digits(auto_augment=policy), (32, 32))[0].transforms
    operations = [op for step in steps for op in getattr(step, "ops", ())]
    operations += [op for step in steps for several in getattr(step, "policy", ()) for op in several]
    assert len(operations) >= 3
    for op in operations:
        op.prob, op.magnitude_std = 1.0, 0
        for op.magnitude in range(16):
            assert op(image).size == image.size, op


def test_posterizing_keeps_the_highest_bits_and_none_of_them_is_black():
    """As Pillow did before it refused 0: timm's policies v0 and rand-...-inc1 draw it."""
    steps = transforms(digits(auto_augment="rand"), (32, 32))[0].transforms
    keep = next(op for step in steps for op in getattr(step, "ops", ()) if op.name == "Posterize").aug_fn
    image = pictures.smooth(2, 30, 30)
    for bits in range(-1, 9):
        mask = 256 - 2 ** (8 - max(0, bits))
        assert np.array_equal(keep(image, bits, fillcolor=0), np.asarray(image) & mask), bits


# ---- transforms of an evaluation on tensors


def images(seed: int, count: int) -> list[np.ndarray]:
    """RGB noise (H, W, 3) of many sizes, from a few pixels to three hundred, and of every aspect up to 1 : 100."""
    rng = np.random.default_rng(seed)
    sides = [tuple(int(2 ** rng.uniform(1, 8.2)) for _ in range(2)) for _ in range(count - 4)]
    sides += [(224, 224), (32, 48), (3, 300), (301, 4)]
    return [rng.integers(0, 256, (*side, 3), dtype=np.uint8) for side in sides]


def tensors(arrays: list[np.ndarray]) -> list[torch.Tensor]:
    return [torch.from_numpy(array).permute(2, 0, 1) for array in arrays]


@pytest.mark.quick(2)
@pytest.mark.parametrize("size", [32, (24, 40), (57, 33)], ids=str)
@pytest.mark.parametrize("mode", ["center", "squash", "border"])
def test_pixels_are_those_of_timm(mode, size):
    for seed, (pct, name) in enumerate([(1.0, "bicubic"), (0.875, "bilinear"), (0.9, "lanczos"), (0.95, "nearest")]):
        arrays, mean = images(seed, 60), (0.485, 0.456, 0.406)
        sides = (size, size) if isinstance(size, int) else size
        options = dict(crop_mode=mode, crop_pct=pct, interpolation=name, mean=mean)
        theirs = create_transform((3, *sides), is_training=False, use_prefetcher=True, **options)
        ours = EvalTransform.timm(size, **options)
        wanted = []
        for array in arrays:
            try:
                wanted.append(torch.as_tensor(np.asarray(theirs(Image.fromarray(array)))))
            except ValueError:  # an image so long that the other side would be no pixel
                wanted.append(None)
        for got, want, array in zip(ours(tensors(arrays)), wanted, arrays):
            assert want is None or torch.equal(got, want), (array.shape, pct, name)
        assert sum(want is None for want in wanted) <= (10 if mode == "border" else 0)
        assert torch.equal(ours(tensors(arrays)[-4]), wanted[-4])


PROCESSORS = {
    "vit": (ViTImageProcessorPil, dict(size=dict(height=33, width=48))),
    "vit, cut": (ViTImageProcessorPil, dict(size=40, do_center_crop=True, crop_size=dict(height=31, width=36))),
    "deit": (DeiTImageProcessorPil, dict(size=dict(height=64, width=64), crop_size=dict(height=57, width=56))),
    "siglip": (SiglipImageProcessorPil, dict(size=dict(height=48, width=48))),
    "clip": (CLIPImageProcessorPil, dict(size=dict(shortest_edge=32), crop_size=dict(height=32, width=32))),
    "dinov2": (BitImageProcessorPil, dict(size=dict(shortest_edge=64), crop_size=dict(height=57, width=58))),
    "padded": (
        BitImageProcessorPil,
        dict(size=dict(shortest_edge=32), crop_size=dict(height=63, width=40), resample=1),
    ),
    "not resized": (BitImageProcessorPil, dict(do_resize=False, crop_size=dict(height=50, width=61))),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_pixels_are_those_of_hugging_face(name):
    make, options = PROCESSORS[name]
    processor, arrays = make(**options, do_rescale=False, do_normalize=False), images(len(name), 30)
    theirs = [torch.from_numpy(np.stack(processor(Image.fromarray(a))["pixel_values"]))[0] for a in arrays]
    ours = EvalTransform.hugging_face(processor.to_dict())(tensors(arrays))
    for got, want, array in zip(ours, theirs, arrays):
        assert torch.equal(got, want), array.shape


def test_processors_of_older_files_have_their_classes_defaults():
    old = EvalTransform.hugging_face(dict(feature_extractor_type="ViTFeatureExtractor", size=224))
    assert old == EvalTransform.hugging_face(ViTImageProcessorPil().to_dict()) and old.resample == "bilinear"
    for name in hugging_face.PROCESSORS:
        told = getattr(transformers, f"{name}ImageProcessorPil")().to_dict()
        bare = dict(image_processor_type=told["image_processor_type"])
        assert EvalTransform.hugging_face(bare) == EvalTransform.hugging_face(told)


def test_what_a_transform_does_not_know_is_refused():
    edge, edges = dict(shortest_edge=400), dict(longest_edge=500, shortest_edge=400)
    for name, options, message in (
        ("DINOv3ViTImageProcessorFast", {}, "unknown image processor 'DINOv3ViTImageProcessorFast'"),
        ("ViTImageProcessor", dict(size=edges), "ViT.*: give size as height and width.*got size={'longest_edge'"),
        ("ViTImageProcessor", dict(size=edge), "ViTImageProcessor: give size.*got size={'shortest_edge"),
        ("CLIPImageProcessor", dict(resample=6), "CLIP.*: give .* a resample from 0 to 5; .*resample=6"),
    ):
        with pytest.raises(InputError, match=message):
            EvalTransform.hugging_face(options | dict(image_processor_type=name))
    with pytest.raises(InputError, match="unknown crop_mode 'middle'"):
        EvalTransform.timm(224, crop_mode="middle")
    with pytest.raises(InputError, match="unknown interpolation 'cubic'; did you mean bicubic"):
        EvalTransform.timm(224, interpolation="cubic")
