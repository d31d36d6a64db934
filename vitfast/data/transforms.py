"""Training and evaluation transforms: timm's, and random erasing of raw images."""

import itertools
import math
import random
from collections.abc import Sequence
from functools import partial

import torch
from PIL import Image
from timm.data import auto_augment, create_transform
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch import Tensor
from torchvision.transforms import RandomApply, RandomErasing, RandomSolarize
from torchvision.transforms.functional import center_crop, get_image_size

from ..run.config import Config


class SquashedCrop(RandomResizedCropAndInterpolation):
    """A random crop in the image's own aspect, a share `scale` of its area, that is squashed to `size`.

    BiT's crop for transfer (Kolesnikov et al., 2019, 3.3: "we resize the image to a square, crop out a smaller random
    square"), resampled once in place of twice.
    """

    @staticmethod
    def get_params(img, scale: tuple[float, float], ratio=None) -> tuple[int, int, int, int]:
        """(top, left, height, width) of a crop of the image, a PIL image or (..., H, W)."""
        width, height = get_image_size(img)
        side = math.sqrt(random.uniform(*scale))
        h, w = max(1, round(height * side)), max(1, round(width * side))
        return random.randint(0, height - h), random.randint(0, width - w), h, w


CROPS = {"rrc": RandomResizedCropAndInterpolation, "squash": SquashedCrop}


class Trim:
    """Cuts an image of extreme shape to its middle, 16 times as long as a central crop of `size` sees.

    An image of 16 x 60000 pixels, resized to cover 224 x 224, would be 840,000 wide.
    """

    def __init__(self, size: tuple[int, int]):
        self.longest = 16 * max(size) / min(size)

    def __call__(self, image: Image.Image) -> Image.Image:
        longest = math.ceil(self.longest * min(image.size))
        return center_crop(image, [min(image.height, longest), min(image.width, longest)])


class Erase:
    """Random erasing (Zhong et al., 2017) of a uint8 (C, H, W) image.

    share: the share of the images in which a rectangle becomes noise around the middle grey.
    """

    def __init__(self, share: float):
        self.share = share

    def __call__(self, image: Tensor) -> Tensor:
        if random.random() >= self.share:
            return image
        top, left, h, w, _ = RandomErasing.get_params(image, scale=(0.02, 1 / 3), ratio=(0.3, 3.3), value=[0.0])
        image = image.clone()
        image[:, top : top + h, left : left + w] = torch.randn(len(image), h, w).mul(64).add(127.5).clamp(0, 255)
        return image


def posterize(image: Image.Image, bits: int, **_) -> Image.Image:
    """timm's posterize; 0 bits, which its policies draw and Pillow 13 refuses, make the image black."""
    return auto_augment.posterize(image, bits) if bits > 0 else Image.new(image.mode, image.size)


def transforms(config: Config, img_size: tuple[int, int], mean: Sequence[float] = (0.5, 0.5, 0.5)):
    """timm's (training, evaluation) transforms, ending in uint8 (C, H, W): the model normalises.

    mean: the colour that fills up an image where crop_mode="border".
    """
    jitter = config.color_jitter, config.hue_jitter
    train = create_transform(
        (3, *img_size),
        is_training=True,
        use_prefetcher=True,
        hflip=config.hflip,
        color_jitter=(*(config.color_jitter,) * 3, config.hue_jitter) if any(jitter) else None,
        color_jitter_prob=None if config.jitter_share == 1 else config.jitter_share,
        grayscale_prob=config.grayscale,
        auto_augment=config.auto_augment or None,
        interpolation="bicubic",
    )
    for step in train.transforms:
        for op in (*getattr(step, "ops", ()), *itertools.chain(*getattr(step, "policy", ()))):
            op.aug_fn = posterize if op.aug_fn is auto_augment.posterize else op.aug_fn
    crop = CROPS[config.train_crop_mode]
    train.transforms[0] = crop(img_size, config.crop_scale, config.crop_ratio, interpolation="bicubic")
    blur = partial(auto_augment.gaussian_blur_rand, factor=min(1, max(img_size) / 96))  # a radius of up to 2 pixels
    last = [RandomApply([blur], config.blur)] * (config.blur > 0)
    last += [RandomSolarize(128, config.solarize)] * (config.solarize > 0)
    train.transforms[-1:-1] = last  # before the image becomes an array
    if config.random_erasing:
        train.transforms.append(Erase(config.random_erasing))
    mode = config.crop_mode or "center"
    evaluate = create_transform(
        (3, *img_size),
        is_training=False,
        use_prefetcher=True,
        interpolation=config.interpolation or "bicubic",
        crop_pct=config.crop_pct or 1.0,
        crop_mode=mode,
        mean=mean,
    )
    if mode == "center":
        evaluate.transforms.insert(0, Trim(img_size))
    return train, evaluate
