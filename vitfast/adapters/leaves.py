"""The patch projection and the LayerNorms outside the blocks: only their class is replaced."""

import torch
from torch import Tensor, nn

from .. import ops
from ..ops._dispatch import KERNEL_DTYPES
from .fallbacks import library_runs, operation_runs
from .fused_blocks import are_plain, input_unsupported
from .kinds import norm_eps, norm_kind
from .subclasses import subclass

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


def _project(self, x: Tensor) -> Tensor:
    """A patch projection on `ops.patch_embed`; (B, C, H, W) -> (B, D, H/P, W/Q), laid out channels last."""
    weight = self.weight
    if not _runs(self, PATCHES, x, _projection_unsupported(x, weight, self.bias)):
        return nn.Conv2d.forward(self, x)
    tokens = ops.patch_embed(x, weight, self.bias)
    return tokens.transpose(1, 2).unflatten(2, (x.shape[2] // weight.shape[2], x.shape[3] // weight.shape[3]))


def _weights_unsupported(weight: Tensor | None, bias: Tensor | None) -> str | None:
    return None if are_plain(weight, bias) else "its weights are of a class of their own"


def _projection_unsupported(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Why the convolution must run, whose own errors stay; None where the operation does the same."""
    reason = input_unsupported(x) or _weights_unsupported(weight, bias)
    if reason is not None:
        return reason
    p, q = weight.shape[2:]
    if x.dim() != 4 or x.shape[1] != weight.shape[1] or min(x.shape[2:]) == 0 or x.shape[2] % p or x.shape[3] % q:
        return "its input does not divide into patches"
    if torch.is_autocast_enabled(x.device.type):
        same = x.dtype in KERNEL_DTYPES and weight.dtype in KERNEL_DTYPES
    else:
        same = x.dtype == weight.dtype
    return None if same else "its input and weights differ in dtype"


def _norm_unsupported(norm: nn.Module, x: Tensor) -> str | None:
    """Why the library's norm must run; None where the operation does the same."""
    reason = input_unsupported(x) or _norm_alone_unsupported(norm)
    if reason is not None:
        return reason
    weight, bias = norm.weight, getattr(norm, "bias", None)
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        return "its input and weights differ in dtype"
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float32:
        return "its input has 16 bits under autocast"
    return None


def _norm_alone_unsupported(norm: nn.Module) -> str | None:
    """Why no call of this norm runs an operation; None where one may."""
    if getattr(norm, "_fast_norm", False):
        return "timm's fast norm is on"
    weight, bias = norm.weight, getattr(norm, "bias", None)
    if weight is None or weight.dim() != 1:
        return "it has no weight per channel"
    return _weights_unsupported(weight, bias) or ("its eps depends on the dtype" if norm_eps(norm) is None else None)


def normalized(norm: nn.Module, x: Tensor) -> Tensor:
    """norm(x) by an operation, by the library's module where that must be called."""
    return norm(x) if _norm_unsupported(norm, x) else _normalize(norm, x)


def _normalize(norm: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):  # norms stay in fp32 under autocast
        if norm_kind(type(norm)) == "rms":
            return ops.rms_norm(x, norm.weight, norm_eps(norm))
        return ops.layer_norm(x, norm.weight, norm.bias, norm_eps(norm))


def norm_class(cls: type) -> type:
    """A subclass of a norm's class that runs the operation."""

    def forward(self, x: Tensor) -> Tensor:
        runs = _runs(self, NORM, x, _norm_unsupported(self, x))
        return _normalize(self, x) if runs else cls.forward(self, x)

    return subclass(cls, forward, vitfast_part=NORM, vitfast_unsupported=_norm_alone_unsupported)


def _projection_alone_unsupported(conv: nn.Conv2d) -> str | None:
    return _weights_unsupported(conv.weight, conv.bias)


Projection = subclass(nn.Conv2d, _project, vitfast_part=PATCHES, vitfast_unsupported=_projection_alone_unsupported)
