"""The operations in plain PyTorch, for calls without kernels; in float64, tests compare with them.

B batch, N tokens, D width, H heads, Dh head size, F MLP width, C channels, P x Q patch, T prefix tokens. Operations
compute in the dtype of their input x, to which the parameters are cast; factors (`layer_scale`, `drop_path`) act in
fp32 at least.
"""

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .checks import at_hand, transformed

Result = TypeVar("Result")


def _upcastable(function: Callable[..., Result]) -> Callable[..., Result]:
    """Adds `upcast=False`: with True every floating tensor becomes float64 before anything is computed."""

    @functools.wraps(function)
    def wrapper(*args, upcast: bool = False, **kwargs):
        if upcast:
            double = lambda x: x.double() if x.is_floating_point() else x  # noqa: E731
            args, kwargs = tree_map_only(Tensor, double, (args, kwargs))
        return function(*args, **kwargs)

    return wrapper


def _like(parameter: Tensor | None, x: Tensor) -> Tensor | None:
    return None if parameter is None else parameter.to(x.dtype)


def owners(offsets: Tensor, count: int) -> Tensor:
    """The sample of each packed token, (count,) int64."""
    place = torch.arange(count, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, place, right=True) - 1


def packed_tokens(x, cls_token, pos_embed, rows, starts):
    """Patches, positions (N, D) and prefix tokens -> (N + S T, D); rows, starts: packed.token_rows."""
    x = x if pos_embed is None else x + pos_embed.to(x.dtype)
    if cls_token is None:
        return x.contiguous()
    prefix = cls_token[0].to(x.dtype).expand(len(starts), -1, -1)
    first = starts[:, None] + torch.arange(prefix.shape[1], device=x.device)
    out = x.new_zeros(len(x) + first.numel(), x.shape[1])
    return out.index_copy(0, rows, x).index_copy(0, first.flatten(), prefix.flatten(0, 1))


def normalize(images: Tensor, mean, std, dtype: torch.dtype) -> Tensor:
    """(images / 255 - mean) / std of uint8 images (B, C, Hi, Wi), in `dtype`.

    mean None stands for 0, std None for 1. It computes in fp32 at least.
    """
    work = torch.promote_types(dtype, torch.float32)
    x = images.to(work) / 255
    for value, apply in ((mean, torch.sub), (std, torch.div)):
        if value is not None:
            listed = isinstance(value, (list, tuple))  # of which a GPU makes a tensor itself: a CUDA graph can
            value = torch.stack([x.new_full((), v) for v in value]) if listed else value
            x = apply(x, torch.as_tensor(value, dtype=work, device=x.device).reshape(-1, 1, 1))
    return x.to(dtype)


@_upcastable
def patch_embed(images, weight, bias, cls_token=None, pos_embed=None, *, mean=None, std=None, rows=None):
    """(B, C, Hi, Wi) floats or uint8 -> (B, T+N, D): Eq. 1 of the paper.

    Computes in the dtype of `weight` (D, C, P, Q). rows: packed.token_rows for images of many sizes, which are cut into
    patches (N, C, P, Q) with positions (N, D); the result is then (N + S T, D).
    """
    dtype = weight.dtype
    images = normalize(images, mean, std, dtype) if images.dtype == torch.uint8 else images.to(dtype)
    x = F.conv2d(images, weight, _like(bias, weight), stride=weight.shape[-2:]).flatten(2).transpose(1, 2)
    if rows is not None:
        return packed_tokens(x[:, 0], cls_token, pos_embed, *rows)
    return with_prefix_and_positions(x, cls_token, pos_embed).contiguous()


def with_prefix_and_positions(x: Tensor, prefix: Tensor | None, pos_embed: Tensor | None) -> Tensor:
    """Patches (B, N, D) -> tokens (B, T+N, D), positions added to all or to the patches alone."""
    patches_only = pos_embed is not None and pos_embed.shape[1] == x.shape[1]
    if patches_only:
        x = x + pos_embed.to(x.dtype)
    if prefix is not None:
        x = torch.cat([prefix.to(x.dtype).expand(x.shape[0], -1, -1), x], dim=1)
    return x if pos_embed is None or patches_only else x + pos_embed.to(x.dtype)


@_upcastable
def layer_norm(x, weight, bias, eps=1e-6):
    """LayerNorm over the last axis, (..., D) -> (..., D) in x's dtype; parameters in fp32 act in fp32."""
    dtypes = [parameter.dtype for parameter in (weight, bias) if parameter is not None]
    work = x.to(functools.reduce(torch.promote_types, dtypes, x.dtype))
    return F.layer_norm(work, (x.shape[-1],), _like(weight, work), _like(bias, work), eps).to(x.dtype)


@_upcastable
def rms_norm(x, weight, eps=1e-6):
    """x / sqrt(mean(x^2) + eps) * weight: (..., D) -> contiguous (..., D) in x's dtype; fp32 inside."""
    work = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.rms_norm(work, (x.shape[-1],), _like(weight, work), eps).to(x.dtype).contiguous()


@_upcastable
def residual_add(x, residual, *, layer_scale=None, drop_path=None):
    """residual + drop_path[b] * layer_scale * x: (B, ..., D), contiguous, in the dtype of `residual`."""
    if layer_scale is not None:
        x = x * layer_scale.to(torch.promote_types(x.dtype, torch.float32))
    if drop_path is not None:
        factor = drop_path.to(torch.promote_types(x.dtype, torch.float32))
        x = x * factor.reshape(-1, *[1] * (x.dim() - 1))
    return (residual + x).to(residual.dtype).contiguous()


@_upcastable
def add_layer_norm(x, residual, weight, bias, eps=1e-6, *, layer_scale=None, drop_path=None):
    """(layer_norm(z), z) with z = residual + drop_path[b] * layer_scale * x."""
    z = residual_add(x, residual, layer_scale=layer_scale, drop_path=drop_path)
    return layer_norm(z, weight, bias, eps), z


def _by_token(table: Tensor) -> Tensor:
    """A table (N, Dh), (H, N, Dh) or (B, 1|H, N, Dh), viewed so that it broadcasts with (B, N, H, Dh)."""
    return table[:, None] if table.dim() == 2 else table.transpose(-3, -2)


@_upcastable
def rotate(x, cos, sin, *, rope_layout="half", num_prefix=0):
    """x cos + turned(x) sin for tokens after the first num_prefix of x (B, N, H, Dh), in x's dtype.

    turned(x) has (-b, a) for each pair (a, b) of columns, which are i and i + Dh/2 ("half") or 2i and 2i + 1
    ("interleaved"). cos, sin: see `attention`.
    """
    half, axis = (x.shape[-1] // 2, -2 if rope_layout == "half" else -1)
    pair = (2, half) if rope_layout == "half" else (half, 2)
    if cos.shape[-1] == half:
        cos, sin = (torch.stack([table, table], axis).flatten(-2) for table in (cos, sin))
    patches = x[:, num_prefix:].to(torch.promote_types(x.dtype, cos.dtype))
    a, b = patches.unflatten(-1, pair).unbind(axis)
    turned = torch.stack([-b, a], axis).flatten(-2)
    patches = patches * _by_token(cos) + turned * _by_token(sin)
    return torch.cat([x[:, :num_prefix], patches.to(x.dtype)], dim=1)


def _mask(q: Tensor, bias: Tensor | None, key_lengths: Tensor | None) -> Tensor | None:
    """Numbers to add to the logits or a bool mask of keys, (B|1, H|1, N|1, N); q is (B, N, H, Dh)."""
    if bias is not None:
        bias = bias.to(q.dtype)
        bias = bias if bias.dim() == 4 else bias[None]
    if key_lengths is None:
        return bias
    keys = (torch.arange(q.shape[1], device=q.device) < key_lengths[:, None])[:, None, None]
    return keys if bias is None else bias.masked_fill(~keys, float("-inf"))


def _packed_attention(q, k, v, scale, offsets, longest):
    """Attention of packed samples, (tokens, H, Dh).

    Where the host has the offsets, samples of one length run together; else each is padded to `longest` tokens.
    """
    lengths = offsets.diff()
    if at_hand(offsets):
        rows = [offsets[:-1][lengths == n, None] + torch.arange(n) for n in lengths.unique().tolist() if n]
        o = [attention(q[each], k[each], v[each], scale=scale).flatten(0, 1) for each in rows]
        return torch.cat(o).index_select(0, torch.cat([each.flatten() for each in rows]).argsort())
    longest = longest or int(lengths.max())
    owner = owners(offsets, len(q))
    rows = owner * longest + torch.arange(len(q), device=q.device) - offsets[owner]
    spread = lambda x: x.new_zeros(len(lengths) * longest, *x.shape[1:]).index_copy(0, rows, x)  # noqa: E731
    q, k, v = (spread(x).unflatten(0, (len(lengths), longest)) for x in (q, k, v))
    return attention(q, k, v, scale=scale, key_lengths=lengths).flatten(0, 1)[rows]


@_upcastable
def attention(q, k, v, *, scale=None, bias=None, key_lengths=None, offsets=None, longest=None, rope=None, **turned):
    """softmax(q k^T * scale + bias) v; q, k, v (B, N, H, Dh) -> (B, N, H, Dh).

    scale: 1/sqrt(Dh) unless given. rope: (cos, sin); `turned`: the other arguments of `rotate`. bias: (H, N, N) or
    (B|1, H, N, N). key_lengths (B,): keys from there on do not count. offsets (S + 1,), longest: for samples packed as
    (tokens, H, Dh), each of which attends to itself alone.
    """
    if rope is not None:
        q, k = (rotate(x if offsets is None else x[None], *rope, **turned).reshape(x.shape) for x in (q, k))
    if offsets is not None:
        return _packed_attention(q, k, v, scale, offsets, longest) if len(q) else q + k + v
    if transformed():  # PyTorch's fused attention has no tangents and no second derivative
        probabilities = attention_probabilities(q, k, scale=scale, bias=bias, key_lengths=key_lengths).to(v.dtype)
        return (probabilities @ v.transpose(1, 2)).transpose(1, 2).contiguous()
    mask = _mask(q, bias, key_lengths)
    if isinstance(mask, Tensor) and mask.dtype != torch.bool:
        mask = mask.expand(q.shape[0], q.shape[2], *mask.shape[2:])
    o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, scale=scale)
    return o.transpose(1, 2).contiguous()


@_upcastable
def attention_logits(
    q,
    k,
    *,
    bias=None,
    key_lengths=None,
    offsets=None,
    longest=None,
    scale=None,
    rope=None,
    rope_layout="half",
    num_prefix=0,
):
    """q k^T * scale + bias: q, k (B, N, H, Dh) -> (B, H, N, N), in fp32 at least.

    Keys that do not count have -inf. Options are as in `attention`; packed (tokens, H, Dh) give (H, tokens, tokens).
    """
    turned = dict(rope_layout=rope_layout, num_prefix=num_prefix)
    if offsets is not None:
        owner = owners(offsets, len(q))
        whole = attention_logits(q[None], k[None], bias=bias, scale=scale, rope=rope, **turned)[0]
        return whole.masked_fill(owner != owner[:, None], float("-inf"))
    if rope is not None:
        q, k = (rotate(x, *rope, **turned) for x in (q, k))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = ((q.transpose(1, 2) * scale) @ k.permute(0, 2, 3, 1)).to(torch.promote_types(q.dtype, torch.float32))
    mask = _mask(q, bias, key_lengths)
    if mask is None:
        return logits
    return logits + mask if mask.dtype != torch.bool else logits.masked_fill(~mask, float("-inf"))


@_upcastable
def attention_probabilities(q, k, **options):
    """The softmax of attention_logits over the keys.

    A query that sees no key has zeros, as in PyTorch's fused attention.
    """
    logits = attention_logits(q, k, **options)
    if options.get("bias") is None and options.get("key_lengths") is None:
        return logits.softmax(-1)
    return logits.softmax(-1).masked_fill((logits == float("-inf")).all(-1, keepdim=True), 0.0)


@_upcastable
def linear(x, weight, bias=None):
    """x W^T + b in the dtype of x; weight (out, in)."""
    return F.linear(x, _like(weight, x), _like(bias, x))


@_upcastable
def norm_linear(x, norm_weight, norm_bias, weight, bias, *, eps=1e-6, norm="layer"):
    """norm(x) W^T + b in the dtype of x."""
    h = rms_norm(x, norm_weight, eps) if norm == "rms" else layer_norm(x, norm_weight, norm_bias, eps)
    return linear(h, weight, bias)


# GELU by erf, by tanh and as x sigmoid(1.702 x) (Hendrycks & Gimpel, 2016), and SiLU, x sigmoid(x).
ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
}


@_upcastable
def linear_gelu(x, weight, bias, *, activation="gelu"):
    """activation(x W^T + b)."""
    return ACTIVATIONS[activation](linear(x, weight, bias))


@_upcastable
def linear_residual(x, weight, bias, residual, *, layer_scale=None, drop_path=None):
    """residual + drop_path[b] * layer_scale * (x W^T + b)."""
    return residual_add(linear(x, weight, bias), residual, layer_scale=layer_scale, drop_path=drop_path)


@_upcastable
def mlp(x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, *, activation="gelu"):
    """activation(x W1^T + b1) W2^T + b2."""
    return linear(linear_gelu(x, fc1_weight, fc1_bias, activation=activation), fc2_weight, fc2_bias)


@_upcastable
def gated_mlp(
    x,
    up_weight,
    up_bias,
    gate_weight,
    gate_bias,
    down_weight,
    down_bias,
    *,
    activation="silu",
    inner_norm_weight=None,
    inner_norm_bias=None,
    inner_eps=1e-6,
):
    """down(inner_norm(activation(gate(x)) * up(x))), the inner norm only where its weight is given."""
    h = linear_gelu(x, gate_weight, gate_bias, activation=activation) * linear(x, up_weight, up_bias)
    if inner_norm_weight is not None:
        h = layer_norm(h, inner_norm_weight, inner_norm_bias, inner_eps)
    return linear(h, down_weight, down_bias)


def self_attention(x, qkv_weight, qkv_bias, proj_weight, proj_bias, *, num_heads, **options):
    """proj(attention(qkv(x))), with the options of `attention`."""
    q, k, v = linear(x, qkv_weight, qkv_bias).unflatten(-1, (3, num_heads, -1)).unbind(-3)
    return linear(attention(q, k, v, **options).flatten(-2), proj_weight, proj_bias)


def _block(branch):
    """The operation x + drop_path[b] * layer_scale * branch(norm(x)), (B, N, D) in x's dtype.

    layers, options: the arguments of `branch` after its input. compute_dtype: that of the matrix products.
    """

    @_upcastable
    def block(
        x,
        norm_weight,
        norm_bias,
        *layers,
        eps=1e-6,
        norm="layer",
        layer_scale=None,
        drop_path=None,
        compute_dtype=None,
        **options,
    ):
        h = rms_norm(x, norm_weight, eps) if norm == "rms" else layer_norm(x, norm_weight, norm_bias, eps)
        h = h if compute_dtype is None else h.to(compute_dtype)
        return residual_add(branch(h, *layers, **options), x, layer_scale=layer_scale, drop_path=drop_path)

    return block


attention_block, mlp_block, gated_mlp_block = _block(self_attention), _block(mlp), _block(gated_mlp)
