"""Losses: softmax and sigmoid cross-entropy, for class numbers or mixed targets."""

import torch
import torch.nn.functional as F
from timm.data import Mixup
from torch import Tensor


def softmax_loss(logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy. logits (B, K); target (B,) class numbers or (B, K) probabilities. fp32 inside."""
    return F.cross_entropy(logits.float(), target, label_smoothing=label_smoothing)


def sigmoid_loss(logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Binary cross-entropy, summed over the classes, mean over the batch.

    The released code pre-trains on JFT-300M with it. logits (B, K); target (B,) class numbers, or (B, K) probabilities
    of which any number may be 1.
    """
    classes = logits.shape[-1]
    if target.dim() == 1:
        target = F.one_hot(target, classes)
    target = target.to(torch.float32) * (1 - label_smoothing) + label_smoothing / classes
    return F.binary_cross_entropy_with_logits(logits.float(), target, reduction="sum") / logits.shape[0]


def correct(logits: Tensor, target: Tensor) -> Tensor:
    """How many images have a right most probable class: their target (B,), or one that is 1 in (B, K)."""
    guess = logits.detach().argmax(-1)
    return ((guess == target) if target.dim() == 1 else target.gather(1, guess[:, None]) == 1).sum()


def mix(mixup: float, cutmix: float, images: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Mixes images (B, C, H, W) and targets (B, K) with any number of ones, as timm's Mixup does.

    timm gets the images' indices as their classes. So it returns the share (B, B) that each image has in each result.
    """
    mixer = Mixup(mixup, cutmix, label_smoothing=0.0, num_classes=len(images))
    images, shares = mixer(images, torch.arange(len(images), device=images.device))
    return images, shares @ target


OBJECTIVES = {"softmax": softmax_loss, "sigmoid": sigmoid_loss}
