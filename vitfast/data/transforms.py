"""Training and evaluation transforms: timm's, and random erasing of raw images."""

import random

import torch
from timm.data import create_transform
from torch import Tensor
from torchvision.transforms import RandomErasing

from ..config import Config


class Erase:
    """Random erasing (Zhong et al., 2017) of a uint8 (C, H, W) image.

    share: of the images, in which a rectangle becomes noise around the middle grey.
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


def transforms(config: Config, img_size: tuple[int, int]):
    """timm's (training, evaluation) transforms, ending in uint8 (C, H, W): the model normalises."""
    train = create_transform(
        (3, *img_size),
        is_training=True,
        use_prefetcher=True,
        scale=config.crop_scale,
        ratio=config.crop_ratio,
        hflip=config.hflip,
        color_jitter=config.color_jitter or None,
        auto_augment=config.auto_augment or None,
        interpolation="bicubic",
    )
    if config.random_erasing:
        train.transforms.append(Erase(config.random_erasing))
    evaluate = create_transform(
        (3, *img_size), is_training=False, use_prefetcher=True, interpolation="bicubic", crop_pct=1.0
    )
    return train, evaluate
