"""The patch projection and the LayerNorms outside the blocks: only their class is replaced."""

import torch
from torch import Tensor, nn

from .. import ops
from ..ops._dispatch import KERNEL_DTYPES
from .fallbacks import library_runs, operation_runs
from .fused_blocks import are_plain, input_unsupported

PATCHES, NORM = "patch projection", "norm"  # the parts, for reports


def is_patch_projection(conv: nn.Conv2d) -> bool:
    """Whether a convolution cuts the image into patches: its stride, above 1, is its kernel."""
    return (
        min(conv.stride) > 1
        and conv.stride == conv.kernel_size
        and conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.padding in ((0, 0), "valid")
    )


def _runs(module: nn.Module, part: str, x: Tensor, reason: str | None) -> bool:
    """Whether the operation runs; where a reason speaks against it, that is told."""
    if reason is None:
        operation_runs(module, part)
    elif isinstance(x, Tensor):  # not a proxy of FX
        library_runs(module, part, reason, of_this_call=True)
    return reason is None


class Conv2d(nn.Conv2d):
    """A patch projection on `ops.patch_embed`; (B, C, H, W) -> (B, D, H/P, W/Q), laid out channels last."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if not _runs(self, PATCHES, x, _projection_unsupported(x, weight, self.bias)):
            return super().forward(x)
        tokens = ops.patch_embed(x, weight, self.bias)
        return tokens.transpose(1, 2).unflatten(2, (x.shape[2] // weight.shape[2], x.shape[3] // weight.shape[3]))


def _projection_unsupported(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Why the convolution must run, whose own errors stay; None where the operation does the same."""
    reason = input_unsupported(x)
    if reason is not None:
        return reason
    if not are_plain(weight, bias):
        return "its weights are of a class of their own"
    p, q = weight.shape[2:]
    if x.dim() != 4 or x.shape[1] != weight.shape[1] or min(x.shape[2:]) == 0 or x.shape[2] % p or x.shape[3] % q:
        return "its input does not divide into patches"
    if torch.is_autocast_enabled(x.device.type):
        same = x.dtype in KERNEL_DTYPES and weight.dtype in KERNEL_DTYPES
    else:
        same = x.dtype == weight.dtype
    return None if same else "its input and weights differ in dtype"


def _norm_unsupported(norm: nn.LayerNorm, x: Tensor) -> str | None:
    """Why the library's LayerNorm must run; None where the operation does the same."""
    reason = "timm's fast norm is on" if getattr(norm, "_fast_norm", False) else input_unsupported(x)
    if reason is not None:
        return reason
    weight, bias = norm.weight, norm.bias
    if not are_plain(weight, bias):
        return "its weights are of a class of their own"
    if weight is None or weight.dim() != 1:
        return "it has no weight per channel"
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        return "its input and weights differ in dtype"
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float32:
        return "its input has 16 bits under autocast"
    return None


def normalize(norm: nn.LayerNorm, x: Tensor) -> Tensor | None:
    """norm(x) by `ops.layer_norm`; None where the library's must run."""
    if not _runs(norm, NORM, x, _norm_unsupported(norm, x)):
        return None
    if not torch.is_autocast_enabled(x.device.type):
        return ops.layer_norm(x, norm.weight, norm.bias, norm.eps)
    with torch.autocast(x.device.type, enabled=False):  # LayerNorm stays in fp32 under autocast
        return ops.layer_norm(x, norm.weight, norm.bias, norm.eps)


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm on `ops.layer_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        y = normalize(self, x)
        return super().forward(x) if y is None else y
