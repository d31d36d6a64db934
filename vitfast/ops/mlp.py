"""Linear layers with what surrounds them in a ViT: bias and GELU (Hendrycks & Gimpel, 2016), or bias, factors and residual."""

from torch import Tensor

from .. import ref
from ._dispatch import autocasts, check_approximate, check_factors, check_same, check_shape, kernels_wanted


def _check_linear(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, prefix: str = "") -> None:
    check_shape(op, f"{prefix}weight", weight, (None, x.shape[-1]))
    check_shape(op, f"{prefix}bias", bias, (weight.shape[0],))
    check_same(op, "x", x, **{f"{prefix}weight": weight, f"{prefix}bias": bias})


@autocasts
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, *, approximate: str = "none") -> Tensor:
    """gelu(x W^T + b). x (..., D); weight (F, D); bias (F,) or None; approximate "none" (erf) or "tanh". Returns (..., F)."""
    _check_linear("linear_gelu", x, weight, bias)
    check_approximate("linear_gelu", approximate)
    kernels_wanted("linear_gelu", x)
    return ref.linear_gelu(x, weight, bias, approximate=approximate)


@autocasts
def linear_residual(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    *,
    layer_scale: Tensor | None = None,
    drop_path: Tensor | None = None,
) -> Tensor:
    """residual + drop_path[b] * layer_scale * (x W^T + b).

    x (B, ..., F); weight (D, F); bias, layer_scale (D,) or None; residual (B, ..., D); drop_path (B,) factors or None.
    Returns (B, ..., D) in x's dtype.
    """
    _check_linear("linear_residual", x, weight, bias)
    check_shape("linear_residual", "residual", residual, (*x.shape[:-1], weight.shape[0]))
    check_same("linear_residual", "x", x, residual=residual)
    check_factors("linear_residual", x, layer_scale, drop_path, weight.shape[0])
    kernels_wanted("linear_residual", x)
    return ref.linear_residual(x, weight, bias, residual, layer_scale=layer_scale, drop_path=drop_path)


@autocasts
def mlp(x: Tensor, fc1_weight: Tensor, fc1_bias: Tensor | None, fc2_weight: Tensor, fc2_bias: Tensor | None, *, approximate: str = "none") -> Tensor:
    """gelu(x W1^T + b1) W2^T + b2. x (..., D); fc1_weight (F, D); fc2_weight (D', F). Returns (..., D')."""
    _check_linear("mlp", x, fc1_weight, fc1_bias, "fc1_")
    check_shape("mlp", "fc2_weight", fc2_weight, (None, fc1_weight.shape[0]))
    check_shape("mlp", "fc2_bias", fc2_bias, (fc2_weight.shape[0],))
    check_same("mlp", "x", x, fc2_weight=fc2_weight, fc2_bias=fc2_bias)
    check_approximate("mlp", approximate)
    kernels_wanted("mlp", x)
    return ref.mlp(x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, approximate=approximate)
