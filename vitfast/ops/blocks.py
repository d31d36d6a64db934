"""The two pre-norm halves of an encoder layer, residual included (Eq. 2 and 3 of the ViT paper): the unit of speed."""

from torch import Tensor

from .. import ref
from ._dispatch import autocasts, check_approximate, check_factors, check_same, check_shape, kernels_wanted


def _check_stream(op: str, x: Tensor, weight: Tensor, residual_in_fp32: bool, **parameters: Tensor | None) -> None:
    """The residual stream x is fp32 where it is asked to be, else it has the parameters' dtype."""
    if x.dim() != 3:
        raise ValueError(f"{op}: x must be (B, N, D), got {tuple(x.shape)}")
    if residual_in_fp32:
        check_same(op, "x", x.new_empty(0, dtype=weight.dtype), **parameters)
    else:
        check_same(op, "x", x, **parameters)


@autocasts
def attention_block(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    proj_weight: Tensor,
    proj_bias: Tensor | None,
    *,
    num_heads: int,
    eps: float = 1e-6,
    layer_scale: Tensor | None = None,
    drop_path: Tensor | None = None,
    residual_in_fp32: bool = False,
) -> Tensor:
    """x + drop_path[b] * layer_scale * proj(attention(qkv(layer_norm(x)))).

    x (B, N, D); norm_weight, norm_bias (D,); qkv_weight (3D, D), rows [q; k; v], head-major in each; proj_weight (D, D); biases may be
    None; layer_scale (D,) or None; drop_path (B,) factors or None. `residual_in_fp32`: x is fp32 and stays so, whatever the dtype of
    the parameters (or autocast) that the matrix products run in. Returns (B, N, D) in x's dtype.
    """
    op, width = "attention_block", x.shape[-1]
    check_shape(op, "norm_weight", norm_weight, (width,))
    check_shape(op, "norm_bias", norm_bias, (width,))
    check_shape(op, "qkv_weight", qkv_weight, (None, width))
    inner = qkv_weight.shape[0] // 3
    if num_heads < 1 or qkv_weight.shape[0] != 3 * inner or inner % num_heads:
        raise ValueError(f"{op}: qkv_weight must have 3 * num_heads * head size rows with num_heads {num_heads}, got {qkv_weight.shape[0]}")
    check_shape(op, "qkv_bias", qkv_bias, (3 * inner,))
    check_shape(op, "proj_weight", proj_weight, (width, inner))
    check_shape(op, "proj_bias", proj_bias, (width,))
    check_factors(op, x, layer_scale, drop_path, width)
    tensors = dict(qkv_weight=qkv_weight, qkv_bias=qkv_bias, proj_weight=proj_weight, proj_bias=proj_bias, norm_weight=norm_weight, norm_bias=norm_bias)
    _check_stream(op, x, qkv_weight, residual_in_fp32, **tensors)
    kernels_wanted(op, x)
    return ref.attention_block(
        x,
        norm_weight,
        norm_bias,
        qkv_weight,
        qkv_bias,
        proj_weight,
        proj_bias,
        num_heads=num_heads,
        eps=eps,
        layer_scale=layer_scale,
        drop_path=drop_path,
        compute_dtype=qkv_weight.dtype,
    )


@autocasts
def mlp_block(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    *,
    eps: float = 1e-6,
    approximate: str = "none",
    layer_scale: Tensor | None = None,
    drop_path: Tensor | None = None,
    residual_in_fp32: bool = False,
) -> Tensor:
    """x + drop_path[b] * layer_scale * fc2(gelu(fc1(layer_norm(x)))).

    x (B, N, D); norm_weight, norm_bias (D,); fc1_weight (F, D); fc2_weight (D, F); biases may be None; approximate "none" (erf) or
    "tanh"; layer_scale (D,) or None; drop_path (B,) factors or None; `residual_in_fp32` as in attention_block.
    Returns (B, N, D) in x's dtype.
    """
    op, width = "mlp_block", x.shape[-1]
    check_shape(op, "norm_weight", norm_weight, (width,))
    check_shape(op, "norm_bias", norm_bias, (width,))
    check_shape(op, "fc1_weight", fc1_weight, (None, width))
    check_shape(op, "fc1_bias", fc1_bias, (fc1_weight.shape[0],))
    check_shape(op, "fc2_weight", fc2_weight, (width, fc1_weight.shape[0]))
    check_shape(op, "fc2_bias", fc2_bias, (width,))
    check_approximate(op, approximate)
    check_factors(op, x, layer_scale, drop_path, width)
    tensors = dict(fc1_weight=fc1_weight, fc1_bias=fc1_bias, fc2_weight=fc2_weight, fc2_bias=fc2_bias, norm_weight=norm_weight, norm_bias=norm_bias)
    _check_stream(op, x, fc1_weight, residual_in_fp32, **tensors)
    kernels_wanted(op, x)
    return ref.mlp_block(
        x,
        norm_weight,
        norm_bias,
        fc1_weight,
        fc1_bias,
        fc2_weight,
        fc2_bias,
        eps=eps,
        approximate=approximate,
        layer_scale=layer_scale,
        drop_path=drop_path,
        compute_dtype=fc1_weight.dtype,
    )
