"""LayerNorm, and LayerNorm after a residual add (Ba et al., 2016; pre-norm blocks of the ViT paper, Eq. 2 and 3)."""

from torch import Tensor

from .. import ref
from ._dispatch import autocasts, check_factors, check_same, check_shape, kernels_wanted


@autocasts
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-6) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last axis; statistics in fp32.

    x (..., D); weight, bias (D,) or None, in x's dtype. Returns (..., D) in x's dtype (under autocast: its dtype).
    """
    width = x.shape[-1]
    check_shape("layer_norm", "weight", weight, (width,))
    check_shape("layer_norm", "bias", bias, (width,))
    check_same("layer_norm", "x", x, weight=weight, bias=bias)
    kernels_wanted("layer_norm", x)
    return ref.layer_norm(x, weight, bias, eps)


@autocasts
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-6,
    *,
    layer_scale: Tensor | None = None,
    drop_path: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(layer_norm(z), z) with z = residual + drop_path[b] * layer_scale * x.

    x, residual (B, ..., D); weight, bias, layer_scale (D,) or None; drop_path (B,) factors, 0 or 1/keep, or None.
    Returns two tensors shaped and typed like x.
    """
    width = x.shape[-1]
    check_shape("add_layer_norm", "residual", residual, tuple(x.shape))
    check_shape("add_layer_norm", "weight", weight, (width,))
    check_shape("add_layer_norm", "bias", bias, (width,))
    check_same("add_layer_norm", "x", x, residual=residual, weight=weight, bias=bias)
    check_factors("add_layer_norm", x, layer_scale, drop_path, width)
    kernels_wanted("add_layer_norm", x)
    return ref.add_layer_norm(x, residual, weight, bias, eps, layer_scale=layer_scale, drop_path=drop_path)
