"""Modules that are replaced alone: the patch projection, and norms and MLPs outside the blocks."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .. import ops
from .fallback_log import library_runs, operation_runs
from .fused_blocks import are_plain, dtypes_fit, input_unsupported
from .known_classes import norm_eps, norm_kind
from .small import WIDTH
from .subclasses import subclass

PATCHES, NORM = "patch projection", "norm"  # the parts, for reports
DTYPES = "its input and weights differ in dtype"


def leaf_class(
    cls: type,
    part: str,
    operation: Callable[[nn.Module, Tensor], Tensor | str],
    unsupported: Callable[[nn.Module], str | None],
) -> type:
    """A subclass of a library's class that runs an operation where it can.

    unsupported(module): why no call of the module can run the operation, None if one may. operation(module, x): the
    result or, in words, why the library's code must run, which then raises its own errors.
    """

    def forward(self, x: Tensor) -> Tensor:
        out = input_unsupported(x) or unsupported(self) or operation(self, x)
        if not isinstance(out, str):
            operation_runs(self, part)
            return out
        if isinstance(x, Tensor):  # not a proxy of FX
            library_runs(self, part, out, of_this_call=True)
        return cls.forward(self, x)

    return subclass(cls, forward, vitfast_part=part, vitfast_unsupported=lambda module: unsupported(module))


def is_patch_projection(conv: nn.Conv2d) -> bool:
    """Whether a convolution cuts the image into patches: its stride, above 1, is its kernel."""
    return (
        min(conv.stride) > 1
        and conv.stride == conv.kernel_size
        and conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.padding in ((0, 0), "valid")
    )


def _weights_unsupported(module: nn.Module) -> str | None:
    if "parametrizations" in module._modules:  # each look at a weight computes it; a spectral norm changes then
        return "its weights are parametrised"
    plain = are_plain(module.weight, getattr(module, "bias", None))
    return None if plain else "its weights are of a class of their own"


def _project(conv: nn.Conv2d, x: Tensor) -> Tensor | str:
    """`ops.patch_embed`; (B, C, H, W) -> (B, D, H/P, W/Q), laid out channels last."""
    weight = conv.weight
    p, q = weight.shape[2:]
    if x.dim() != 4 or x.shape[1] != weight.shape[1] or min(x.shape[2:]) == 0 or x.shape[2] % p or x.shape[3] % q:
        return "its input does not divide into patches"
    if not dtypes_fit(x, weight):
        return DTYPES
    tokens = ops.patch_embed(x, weight, conv.bias)
    return tokens.transpose(1, 2).unflatten(2, (x.shape[2] // p, x.shape[3] // q))


Projection = leaf_class(nn.Conv2d, PATCHES, _project, _weights_unsupported)


def _norm_unsupported(norm: nn.Module) -> str | None:
    if getattr(norm, "_fast_norm", False):
        return "timm's fast norm is on"
    if (reason := _weights_unsupported(norm)) is not None:
        return reason
    if norm.weight is None or norm.weight.dim() != 1:
        return "it has no weight per channel"
    return "its eps depends on the dtype" if norm_eps(norm) is None else None


def _normalize(norm: nn.Module, x: Tensor) -> Tensor | str:
    weight, bias = norm.weight, getattr(norm, "bias", None)
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        return DTYPES
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float32:
        return "its input has 16 bits under autocast"
    with torch.autocast(x.device.type, enabled=False):  # norms stay in fp32 under autocast
        if norm_kind(norm) == "rms":
            return ops.rms_norm(x, weight, norm_eps(norm))
        return ops.layer_norm(x, weight, bias, norm_eps(norm))


def normalized(norm: nn.Module, x: Tensor) -> Tensor:
    """norm(x) by an operation, or by the library's module if that must be called."""
    out = input_unsupported(x) or _norm_unsupported(norm) or _normalize(norm, x)
    return norm(x) if isinstance(out, str) else out


def norm_and_class(cls: type) -> tuple[nn.Module, type]:
    """A small norm of a class, and our subclass that runs the operation."""
    return cls(WIDTH), leaf_class(cls, NORM, _normalize, _norm_unsupported)
