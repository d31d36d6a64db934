"""The stem of the hybrids (the ViT paper, 3.1): patches are cut from the feature map of a BiT ResNet.

The ResNet is timm's `ResNetV2`. BiT (Kolesnikov et al., 2020) has GroupNorm in the place of BatchNorm, and
convolutions with standardised weights, padded as TensorFlow pads. From a ResNet-50 the paper takes (i) the output of
stage 4, 1/32 of the image's size, or (ii) that of stage 3 with stage 4's layers moved there, 1/16.

A standardised convolution divides a filter by its deviation: Google's by std + 1e-5, timm's, which is used here, by
sqrt(var + eps) with eps 1e-8. Their GroupNorms have eps 1e-6 and 1e-5. Weights of both load; the norms undo nearly all
of the difference: over three random units a map moves by 5e-5 of its size where filters deviate by 0.05, by 5e-4 where
they deviate by 0.003.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..errors import InputError, unknown
from .patch_embed import PatchEmbed, pixels
from .presets import BACKBONES, pair, reduction

_DEFAULTS = dict(width=1, eps=1e-8)


def resolve(backbone: str | dict, patch: tuple[int, int]) -> dict:
    """Returns dict(layers, width, eps) of a backbone under patches of (height, width) pixels.

    config.py has checked its types and bounds. Raises InputError if it does not fit the patches.
    """
    if isinstance(backbone, str):
        if backbone not in BACKBONES:
            raise unknown("backbone", backbone, BACKBONES)
        options = BACKBONES[backbone]
        if patch[0] != patch[1] or patch[0] not in options:
            makes = f"makes patches of {' or '.join(map(str, options))} pixels"
            raise InputError(f"backbone {backbone!r} {makes}, got patch_size {patch[0]} x {patch[1]}")
        return dict(layers=list(options[patch[0]]), **_DEFAULTS)
    layers = list(backbone["layers"])
    shrink = reduction(layers)
    if any(side % shrink for side in patch):
        stages = f"{len(layers)} stages make a map {shrink} times smaller"
        raise InputError(f"backbone: {stages}, no divisor of patch_size {patch[0]} x {patch[1]}")
    return {**_DEFAULTS, **backbone, "layers": layers}


def _resnet(in_chans: int, layers: Sequence[int], width: float, eps: float):
    """Makes timm's ResNetV2 without head; timm is imported here because a plain ViT does not need it."""
    try:
        from timm.layers import StdConv2dSame
        from timm.models.resnetv2 import ResNetV2
    except ImportError as error:
        raise InputError(f"a hybrid's ResNet is timm's: pip install timm torchvision ({error})") from error
    try:
        options = dict(num_classes=0, global_pool="", preact=False, stem_type="same", zero_init_last=True)
        options |= dict(in_chans=in_chans, width_factor=width, conv_layer=partial(StdConv2dSame, eps=eps))
        return ResNetV2(layers, **options)
    except ValueError as error:  # channels that 32 groups do not divide
        raise InputError(f"backbone: width {width} does not fit a ResNet ({error})") from error


@torch.fx.wrap
def _pixels(images: Tensor, patch: tuple[int, int], weight: Tensor, mean, std) -> Tensor:
    """Images in the dtype of weight; raw ones are normalised first, because the CNN pads with zeros.

    Raises ValueError if the sides are no multiples of the patch's.
    """
    if images.shape[2] % patch[0] or images.shape[3] % patch[1]:
        sides = f"multiples of {patch[0]} x {patch[1]} pixels"
        raise ValueError(f"HybridEmbed: images must have sides that are {sides}, got {tuple(images.shape)}")
    return pixels(images, mean, std, weight.dtype)


class HybridEmbed(PatchEmbed):
    """`backbone`, a CNN, and the projection of its map's patches, `proj` (D, C', p, p).

    The names are timm's. patch_size: the pixels of the image that make a patch, a multiple of the backbone's reduction;
    p is that size divided by the reduction, 1 in the paper's models. backbone: "r50", or dict(layers=units of each
    stage, width=1, eps=1e-8): width multiplies all channels, eps is added to the variance of a filter (see above).
    PyTorch computes the convolutions, vitfast's `patch_embed` the projection, tokens and positions on the map.
    """

    def __init__(self, img_size, patch_size, in_chans: int, embed_dim: int, backbone: str | dict):
        stages = resolve(backbone, pair(patch_size))
        resnet = _resnet(in_chans, **stages)
        super().__init__(img_size, patch_size, resnet.num_features, embed_dim, shrink=reduction(stages["layers"]))
        self.backbone = resnet
        self.spec = backbone if isinstance(backbone, str) else stages

    def forward(
        self, images: Tensor, prefix: Tensor | None = None, pos_embed: Tensor | None = None, mean=None, std=None
    ) -> Tensor:
        images = _pixels(images, self.patch_size, self.proj.weight, mean, std)
        return super().forward(self.backbone(images), prefix, pos_embed)
