"""Losses: softmax and sigmoid cross-entropy, with class numbers or mixed-up targets."""

import torch
import torch.nn.functional as F
from torch import Tensor


def softmax_loss(logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy. logits (B, K); target (B,) class numbers or (B, K) probabilities. fp32 inside."""
    return F.cross_entropy(logits.float(), target, label_smoothing=label_smoothing)


def sigmoid_loss(logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Binary cross-entropy, summed over the classes, mean over the batch.

    As the released code pre-trains on JFT-300M. logits (B, K); target (B,) class numbers or (B, K) probabilities.
    """
    classes = logits.shape[-1]
    if target.dim() == 1:
        target = F.one_hot(target, classes)
    target = target.to(torch.float32) * (1 - label_smoothing) + label_smoothing / classes
    return F.binary_cross_entropy_with_logits(logits.float(), target, reduction="sum") / logits.shape[0]


OBJECTIVES = {"softmax": softmax_loss, "sigmoid": sigmoid_loss}
