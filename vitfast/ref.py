"""The operations in plain PyTorch: the way without kernels and, in float64, the truth.

B batch, N tokens, D width, H heads, Dh head size, F MLP width, C channels, P x Q patch, T prefix tokens. The
activation's dtype is the dtype of the computation and the parameters follow it; factors (`layer_scale`, `drop_path`)
act in fp32 at least.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad


def _upcastable(function):
    """Adds `upcast=False`: with True every floating tensor becomes float64 before anything is computed."""

    def double(a):
        return a.double() if isinstance(a, Tensor) and a.is_floating_point() else a

    @functools.wraps(function)
    def wrapper(*args, upcast: bool = False, **kwargs):
        if upcast:
            args, kwargs = tuple(double(a) for a in args), {k: double(v) for k, v in kwargs.items()}
        return function(*args, **kwargs)

    return wrapper


def _like(parameter: Tensor | None, x: Tensor) -> Tensor | None:
    return None if parameter is None else parameter.to(x.dtype)


def transformed() -> bool:
    """Whether a transform of torch.func (vmap, grad, jvp) or forward-mode differentiation is at work."""
    if forward_ad._current_level >= 0:
        return True
    # Dynamo takes the other question for true always; the transforms that it traces say themselves what they lack.
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def normalize(images: Tensor, mean, std, dtype: torch.dtype) -> Tensor:
    """uint8 (B, C, Hi, Wi) -> `dtype`, (images / 255 - mean) / std.

    None is mean 0, std 1. At least fp32 inside.
    """
    work = torch.promote_types(dtype, torch.float32)
    x = images.to(work) / 255
    for value, apply in ((mean, torch.sub), (std, torch.div)):
        if value is not None:
            x = apply(x, torch.as_tensor(value, dtype=work, device=x.device).reshape(-1, 1, 1))
    return x.to(dtype)


@_upcastable
def patch_embed(images, weight, bias, cls_token=None, pos_embed=None, *, mean=None, std=None):
    """(B, C, Hi, Wi) floats or uint8 -> (B, T+N, D): Eq. 1 of the paper.

    Computes in the dtype of `weight` (D, C, P, Q).
    """
    dtype = weight.dtype
    images = normalize(images, mean, std, dtype) if images.dtype == torch.uint8 else images.to(dtype)
    x = F.conv2d(images, weight, _like(bias, weight), stride=weight.shape[-2:]).flatten(2).transpose(1, 2)
    return with_prefix_and_positions(x, [] if cls_token is None else [cls_token], pos_embed).contiguous()


def with_prefix_and_positions(x: Tensor, prefix: list[Tensor], pos_embed: Tensor | None) -> Tensor:
    """Patches (B, N, D) -> tokens (B, T+N, D), positions added to all or to the patches alone."""
    patches_only = pos_embed is not None and pos_embed.shape[1] == x.shape[1]
    if patches_only:
        x = x + pos_embed.to(x.dtype)
    if prefix:
        x = torch.cat([*(token.to(x.dtype).expand(x.shape[0], -1, -1) for token in prefix), x], dim=1)
    return x if pos_embed is None or patches_only else x + pos_embed.to(x.dtype)


@_upcastable
def layer_norm(x, weight, bias, eps=1e-6):
    """(..., D) -> (..., D), in x's dtype; parameters in fp32 act in fp32."""
    work = x
    for parameter in (weight, bias):
        if parameter is not None:
            work = work.to(torch.promote_types(work.dtype, parameter.dtype))
    return F.layer_norm(work, (x.shape[-1],), _like(weight, work), _like(bias, work), eps).to(x.dtype)


@_upcastable
def residual_add(x, residual, *, layer_scale=None, drop_path=None):
    """residual + drop_path[b] * layer_scale * x, in the dtype of `residual`. x, residual (B, ..., D)."""
    if layer_scale is not None:
        x = x * layer_scale.to(torch.promote_types(x.dtype, torch.float32))
    if drop_path is not None:
        factor = drop_path.to(torch.promote_types(x.dtype, torch.float32))
        x = x * factor.reshape(-1, *[1] * (x.dim() - 1))
    return (residual + x).to(residual.dtype)


@_upcastable
def add_layer_norm(x, residual, weight, bias, eps=1e-6, *, layer_scale=None, drop_path=None):
    """(layer_norm(z), z) with z = residual + drop_path[b] * layer_scale * x."""
    z = residual_add(x, residual, layer_scale=layer_scale, drop_path=drop_path)
    return layer_norm(z, weight, bias, eps), z


@_upcastable
def attention(q, k, v, *, scale=None):
    """softmax(q k^T * scale) v; q, k, v (B, N, H, Dh) -> (B, N, H, Dh). scale: 1/sqrt(Dh) unless given."""
    if transformed():  # PyTorch's fused attention has no tangents and no second derivative
        probabilities = attention_probabilities(q, k, scale=scale).to(v.dtype)
        return (probabilities @ v.transpose(1, 2)).transpose(1, 2).contiguous()
    o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale=scale)
    return o.transpose(1, 2).contiguous()


@_upcastable
def attention_probabilities(q, k, *, scale=None):
    """softmax(q k^T * scale): q, k (B, N, H, Dh) -> (B, H, N, N) in fp32 at least."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = (q.transpose(1, 2) * scale) @ k.permute(0, 2, 3, 1)
    return logits.to(torch.promote_types(q.dtype, torch.float32)).softmax(-1)


@_upcastable
def linear(x, weight, bias=None):
    """x W^T + b in the dtype of x; weight (out, in)."""
    return F.linear(x, _like(weight, x), _like(bias, x))


@_upcastable
def linear_gelu(x, weight, bias, *, approximate="none"):
    """gelu(x W^T + b)."""
    return F.gelu(linear(x, weight, bias), approximate=approximate)


@_upcastable
def linear_residual(x, weight, bias, residual, *, layer_scale=None, drop_path=None):
    """residual + drop_path[b] * layer_scale * (x W^T + b)."""
    return residual_add(linear(x, weight, bias), residual, layer_scale=layer_scale, drop_path=drop_path)


@_upcastable
def mlp(x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, *, approximate="none"):
    """gelu(x W1^T + b1) W2^T + b2."""
    return linear(linear_gelu(x, fc1_weight, fc1_bias, approximate=approximate), fc2_weight, fc2_bias)


@_upcastable
def attention_block(
    x,
    norm_weight,
    norm_bias,
    qkv_weight,
    qkv_bias,
    proj_weight,
    proj_bias,
    *,
    num_heads,
    eps=1e-6,
    layer_scale=None,
    drop_path=None,
    compute_dtype=None,
):
    """x + drop_path[b] * layer_scale * proj(attention(qkv(layer_norm(x)))), in x's dtype.

    (B, N, D) -> (B, N, D). compute_dtype: of the matrix products.
    """
    h = layer_norm(x, norm_weight, norm_bias, eps)
    qkv = linear(h if compute_dtype is None else h.to(compute_dtype), qkv_weight, qkv_bias)
    q, k, v = qkv.unflatten(-1, (3, num_heads, -1)).unbind(2)
    return linear_residual(
        attention(q, k, v).flatten(2), proj_weight, proj_bias, x, layer_scale=layer_scale, drop_path=drop_path
    )


@_upcastable
def mlp_block(
    x,
    norm_weight,
    norm_bias,
    fc1_weight,
    fc1_bias,
    fc2_weight,
    fc2_bias,
    *,
    eps=1e-6,
    approximate="none",
    layer_scale=None,
    drop_path=None,
    compute_dtype=None,
):
    """x + drop_path[b] * layer_scale * mlp(layer_norm(x)): (B, N, D) -> (B, N, D), in x's dtype."""
    h = layer_norm(x, norm_weight, norm_bias, eps)
    h = linear_gelu(h if compute_dtype is None else h.to(compute_dtype), fc1_weight, fc1_bias, approximate=approximate)
    return linear_residual(h, fc2_weight, fc2_bias, x, layer_scale=layer_scale, drop_path=drop_path)
