"""The patch projection and the LayerNorms outside the blocks: only their class is replaced."""

import torch
from torch import Tensor, nn

from .. import ops
from ..ops._dispatch import KERNEL_DTYPES
from .fused_blocks import are_plain, is_supported_input


def is_patch_projection(conv: nn.Conv2d) -> bool:
    """Whether a convolution cuts the image into patches: its stride, above 1, is its kernel."""
    return (
        min(conv.stride) > 1
        and conv.stride == conv.kernel_size
        and conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.padding in ((0, 0), "valid")
    )


class Conv2d(nn.Conv2d):
    """A patch projection on `ops.patch_embed`; (B, C, H, W) -> (B, D, H/P, W/Q), laid out channels last."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if not is_supported_input(x) or not are_plain(weight, self.bias) or not _projects(x, weight):
            return super().forward(x)
        tokens = ops.patch_embed(x, weight, self.bias)
        return tokens.transpose(1, 2).unflatten(2, (x.shape[2] // weight.shape[2], x.shape[3] // weight.shape[3]))


def _projects(x: Tensor, weight: Tensor) -> bool:
    """Whether the operation takes what the convolution would, whose own errors stay."""
    p, q = weight.shape[2:]
    if x.dim() != 4 or x.shape[1] != weight.shape[1] or min(x.shape[2:]) == 0 or x.shape[2] % p or x.shape[3] % q:
        return False
    if torch.is_autocast_enabled(x.device.type):
        return x.dtype in KERNEL_DTYPES and weight.dtype in KERNEL_DTYPES
    return x.dtype == weight.dtype


def normalize(norm: nn.LayerNorm, x: Tensor) -> Tensor | None:
    """norm(x) by `ops.layer_norm`; None where PyTorch's must run.

    That is without a weight, over several axes, in mixed dtypes, or in 16 bits under autocast.
    """
    weight, bias = norm.weight, norm.bias
    if not is_supported_input(x) or not are_plain(weight, bias) or weight is None or weight.dim() != 1:
        return None
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        return None
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return ops.layer_norm(x, weight, bias, norm.eps)
    if x.dtype != torch.float32:
        return None
    with torch.autocast(device, enabled=False):  # LayerNorm stays in fp32 under autocast
        return ops.layer_norm(x, weight, bias, norm.eps)


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm on `ops.layer_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        y = normalize(self, x)
        return super().forward(x) if y is None else y
