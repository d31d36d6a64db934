"""The two pre-norm halves of an encoder layer, residual included (Eq. 2 and 3 of the ViT paper): the unit of speed.

Kept for backward: the input, LayerNorm's statistics, qkv, lse and the attention output; or the pre-activation. Recomputed: LayerNorm's
outputs (in the pass of its backward) and activations (in the epilogue that applies GELU's derivative).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ref
from ..kernels.attention import attention_bwd, attention_fwd
from ..kernels.layer_norm import layer_norm_bwd, layer_norm_fwd, scale_rows
from ..kernels.linear import input_grad, linear, linear_residual
from ..kernels.mlp import dgelu_matmul, linear_gelu
from ..kernels.weight_grad import weight_grad, weight_grad_scaled
from ._dispatch import autocasts, check_approximate, check_factors, check_norm, check_same, check_shape, kernels_wanted, needs_grad, only_once
from ._gradients import as_dtype, chosen, fake_gradients, filled, rows, shaped
from .attention import obstacle as head_obstacle
from .layer_norm import obstacle as width_obstacle

# Places in the masks of needed gradients, for both halves: "in" is qkv or fc1, "out" is proj or fc2.
X, NORM_WEIGHT, NORM_BIAS, IN_WEIGHT, IN_BIAS, OUT_WEIGHT, OUT_BIAS, LAYER_SCALE = range(8)


def _through_scale(g: Tensor, weight: Tensor, layer_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """(g, diag(layer_scale) W), whose product is the gradient below the layer: scaling the weight (D, K) moves less than scaling g (M, D).

    In fp16 g is scaled after all: a young layer scale, 1e-5 say, would push the weight below fp16's smallest numbers.
    """
    if layer_scale is None:
        return g, weight
    if g.dtype == torch.float16:
        return scale_rows(g, layer_scale, None, 1, want_sum=False)[0], weight
    return g, (weight * layer_scale.float()[:, None]).to(weight.dtype)


def _branch_gradient(dout: Tensor, dtype: torch.dtype, drop_path: Tensor | None, tokens: int, want_sum: bool) -> tuple[Tensor, Tensor | None]:
    """(g, column sum of g) for g = drop_path[b] * dout in the dtype of the products; dout itself where nothing changes it."""
    changed = drop_path is not None or dout.dtype != dtype
    if not changed and not want_sum:
        return dout, None
    g, total = scale_rows(dout, None, drop_path, tokens, want_scaled=changed, want_sum=want_sum, out_dtype=dtype)
    return (g if changed else dout), total


def _out_layer_gradients(g, total, inner, weight, bias, layer_scale, mask) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dweight, dbias, dlayer_scale) of layer_scale * (inner W^T + b), from g (M, D) and its column sum."""
    dweight = dscale = dbias = None
    if mask[LAYER_SCALE]:
        dweight, dscale = weight_grad_scaled(g, inner, weight, bias, layer_scale, total, weight.dtype)
    elif mask[OUT_WEIGHT]:
        dweight = weight_grad(g, inner, layer_scale=layer_scale, out_dtype=weight.dtype)
    if mask[OUT_BIAS]:
        dbias = as_dtype(total if layer_scale is None else total * layer_scale.float(), bias.dtype)
    return dweight, dbias, None if dscale is None else dscale.to(layer_scale.dtype)


def _in_layer_gradients(din, x, dout, norm_weight, norm_bias, mean, rstd, weight, eps, mask) -> tuple:
    """(dx, dnorm_weight, dnorm_bias, dweight) of in(layer_norm(x)) + the residual, from din (M, F), the gradient of what `in` put out.

    LayerNorm's backward adds the residual's gradient and rewrites LayerNorm's output, which the weight gradient needs, in one pass.
    """
    if not any(mask[X:IN_BIAS]):
        return None, None, None, None
    if any(mask[X:IN_WEIGHT]):
        want = dict(want_dx=mask[X], want_dparams=mask[NORM_WEIGHT] or mask[NORM_BIAS], want_y=mask[IN_WEIGHT])
        grads = layer_norm_bwd(input_grad(din, weight), x, norm_weight, norm_bias, mean, rstd, dz=dout, **want)
        dx, dnorm_weight, dnorm_bias, h = grads.dres, grads.dweight, grads.dbias, grads.y
    else:
        dx = dnorm_weight = dnorm_bias = None
        h = layer_norm_fwd(x, norm_weight, norm_bias, eps, out_dtype=weight.dtype)[0]
    dweight = weight_grad(din, h, out_dtype=weight.dtype) if mask[IN_WEIGHT] else None
    return (
        dx,
        as_dtype(dnorm_weight, norm_weight.dtype) if mask[NORM_WEIGHT] else None,
        as_dtype(dnorm_bias, norm_bias.dtype) if mask[NORM_BIAS] else None,
        dweight,
    )


# ---- attention half


@torch.library.custom_op("vitfast::attention_block_fwd", mutates_args=())
def _attention_fwd(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    proj_weight: Tensor,
    proj_bias: Tensor | None,
    layer_scale: Tensor | None,
    drop_path: Tensor | None,
    num_heads: int,
    eps: float,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out, mean, rstd, qkv, lse, o); all but the first are empty unless `save`."""
    (batch, tokens, _), stream = x.shape, rows(x)
    qkv_weight, proj_weight = rows(qkv_weight), rows(proj_weight)
    h, mean, rstd = layer_norm_fwd(stream, norm_weight, norm_bias, eps, out_dtype=qkv_weight.dtype)
    qkv = linear(h, qkv_weight, qkv_bias).view(batch, tokens, 3, num_heads, proj_weight.shape[1] // num_heads)
    o, lse = attention_fwd(*qkv.unbind(2), qkv.shape[-1] ** -0.5)
    out = linear_residual(o.view(-1, proj_weight.shape[1]), proj_weight, proj_bias, stream, layer_scale, drop_path, tokens)
    out = shaped(out, *x.shape)
    return (out, mean, rstd, qkv, lse, o) if save else (out, *filled(x, *[None] * 5))


@_attention_fwd.register_fake
def _(x, norm_weight, norm_bias, qkv_weight, qkv_bias, proj_weight, proj_bias, layer_scale, drop_path, num_heads, eps, save):
    batch, tokens, width = x.shape
    out = x.new_empty(batch, tokens, width)
    if not save:
        return out, *filled(x, *[None] * 5)
    statistics = x.new_empty(batch * tokens, dtype=torch.float32)
    head = qkv_weight.shape[0] // 3 // num_heads
    qkv = qkv_weight.new_empty(batch, tokens, 3, num_heads, head)
    lse = x.new_empty(batch, num_heads, tokens, dtype=torch.float32)
    return out, statistics, torch.empty_like(statistics), qkv, lse, qkv_weight.new_empty(batch, tokens, num_heads, head)


@torch.library.custom_op("vitfast::attention_block_bwd", mutates_args=())
def _attention_bwd(
    dout: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    proj_weight: Tensor,
    proj_bias: Tensor | None,
    layer_scale: Tensor | None,
    drop_path: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    qkv: Tensor,
    lse: Tensor,
    o: Tensor,
    eps: float,
    mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the first eight arguments of the forward in the order of the masks; empty where not asked for."""
    stream, dout, qkv_weight, proj_weight = rows(x), rows(dout), rows(qkv_weight), rows(proj_weight)
    g, total = _branch_gradient(dout, qkv.dtype, drop_path, x.shape[1], mask[OUT_BIAS] or mask[LAYER_SCALE])
    out_layer = _out_layer_gradients(g, total, rows(o.flatten(2)), proj_weight, proj_bias, layer_scale, mask)
    in_layer, dqkv_bias = (None,) * 4, None
    if any(mask[X:OUT_WEIGHT]):
        do = input_grad(*_through_scale(g, proj_weight, layer_scale)).view(o.shape)
        dqkv, dqkv_bias = attention_bwd(*qkv.unbind(2), o, lse, do, qkv.shape[-1] ** -0.5, want_bias_grad=mask[IN_BIAS])
        in_layer = _in_layer_gradients(rows(dqkv.flatten(2)), stream, dout, norm_weight, norm_bias, mean, rstd, qkv_weight, eps, mask)
    dx, dnorm_weight, dnorm_bias, dqkv_weight = in_layer
    dx = None if dx is None else dx.view(x.shape)
    return filled(x, dx, dnorm_weight, dnorm_bias, dqkv_weight, as_dtype(dqkv_bias, qkv_weight.dtype), *out_layer)


@_attention_bwd.register_fake
def _(dout, x, norm_weight, norm_bias, qkv_weight, qkv_bias, proj_weight, proj_bias, layer_scale, drop_path, mean, rstd, qkv, lse, o, eps, mask):
    return fake_gradients(mask, x, norm_weight, norm_bias, qkv_weight, qkv_bias, proj_weight, proj_bias, layer_scale)


def _setup(ctx, inputs, output):
    """Both halves: eight differentiable inputs, drop_path, two numbers or a name, save; what was kept follows the output."""
    *tensors, ctx.option, ctx.eps, _ = inputs
    _, *kept = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(*tensors, *kept)


def _backward(operation):
    """The autograd function of a half: its backward operation with the mask of what is needed, None for all that is not."""

    def backward(ctx, dout, *_):
        unneeded = (None,) * 4  # drop_path, the option, eps, save
        if dout is None:
            return (None,) * 8 + unneeded
        mask = list(ctx.needs_input_grad[:8])
        grads = operation(dout, *ctx.saved_tensors, *((ctx.option,) if operation is _mlp_bwd else ()), ctx.eps, mask)
        return (*chosen(grads, mask), *unneeded)

    return backward


def _check_stream(op: str, x: Tensor, weight: Tensor, residual_in_fp32: bool, norm_weight: Tensor, norm_bias: Tensor | None, **matrices: Tensor | None) -> None:
    """The residual stream x is fp32 where it is asked to be, else it has the matrices' dtype."""
    if x.dim() != 3:
        raise ValueError(f"{op}: x must be (B, N, D), got {tuple(x.shape)}")
    computed = x.new_empty(0, dtype=weight.dtype) if residual_in_fp32 else x
    check_same(op, "x", computed, **matrices)
    check_norm(op, computed, norm_weight=norm_weight, norm_bias=norm_bias)


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

    x (B, N, D); norm_weight, norm_bias (D,), in fp32 too; qkv_weight (3D, D), rows [q; k; v], head-major in each; proj_weight (D, D); biases may be
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
    matrices = dict(qkv_weight=qkv_weight, qkv_bias=qkv_bias, proj_weight=proj_weight, proj_bias=proj_bias)
    _check_stream(op, x, qkv_weight, residual_in_fp32, norm_weight, norm_bias, **matrices)
    tensors = (x, norm_weight, norm_bias, qkv_weight, qkv_bias, proj_weight, proj_bias, layer_scale)
    if kernels_wanted(op, qkv_weight, head_obstacle(inner // num_heads, 1.0) or width_obstacle(width, drop_path)):
        return _attention_fwd(*tensors, drop_path, num_heads, eps, needs_grad(*tensors))[0]
    factors = dict(layer_scale=layer_scale, drop_path=drop_path, compute_dtype=qkv_weight.dtype)
    return ref.attention_block(*tensors[:7], num_heads=num_heads, eps=eps, **factors)


# ---- MLP half


@torch.library.custom_op("vitfast::mlp_block_fwd", mutates_args=())
def _mlp_fwd(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    layer_scale: Tensor | None,
    drop_path: Tensor | None,
    approximate: str,
    eps: float,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, mean, rstd, pre-activation); all but the first are empty unless `save`."""
    stream, fc1_weight, fc2_weight = rows(x), rows(fc1_weight), rows(fc2_weight)
    h, mean, rstd = layer_norm_fwd(stream, norm_weight, norm_bias, eps, out_dtype=fc1_weight.dtype)
    act, pre = linear_gelu(h, fc1_weight, fc1_bias, approximate, save)
    out = shaped(linear_residual(act, fc2_weight, fc2_bias, stream, layer_scale, drop_path, x.shape[1]), *x.shape)
    return (out, mean, rstd, pre) if save else (out, *filled(x, *[None] * 3))


@_mlp_fwd.register_fake
def _(x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, layer_scale, drop_path, approximate, eps, save):
    batch, tokens, width = x.shape
    out = x.new_empty(batch, tokens, width)
    if not save:
        return out, *filled(x, *[None] * 3)
    statistics = x.new_empty(batch * tokens, dtype=torch.float32)
    return out, statistics, torch.empty_like(statistics), fc1_weight.new_empty(batch * tokens, fc1_weight.shape[0])


@torch.library.custom_op("vitfast::mlp_block_bwd", mutates_args=())
def _mlp_bwd(
    dout: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    layer_scale: Tensor | None,
    drop_path: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    pre: Tensor,
    approximate: str,
    eps: float,
    mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the first eight arguments of the forward in the order of the masks; empty where not asked for."""
    stream, dout, fc1_weight, fc2_weight = rows(x), rows(dout), rows(fc1_weight), rows(fc2_weight)
    g, total = _branch_gradient(dout, pre.dtype, drop_path, x.shape[1], mask[OUT_BIAS] or mask[LAYER_SCALE])
    want_act, in_layer, dfc1_bias = mask[OUT_WEIGHT] or mask[LAYER_SCALE], (None,) * 4, None
    if any(mask[X:OUT_WEIGHT]):
        dpre, act, dfc1_bias = dgelu_matmul(*_through_scale(g, fc2_weight, layer_scale), pre, approximate, mask[IN_BIAS], want_act=want_act)
    else:
        dpre, act = None, F.gelu(pre, approximate=approximate) if want_act else None
    out_layer = _out_layer_gradients(g, total, act, fc2_weight, fc2_bias, layer_scale, mask)
    del act
    if dpre is not None:
        in_layer = _in_layer_gradients(dpre, stream, dout, norm_weight, norm_bias, mean, rstd, fc1_weight, eps, mask)
    dx, dnorm_weight, dnorm_bias, dfc1_weight = in_layer
    dx = None if dx is None else dx.view(x.shape)
    return filled(x, dx, dnorm_weight, dnorm_bias, dfc1_weight, as_dtype(dfc1_bias, fc1_weight.dtype), *out_layer)


@_mlp_bwd.register_fake
def _(dout, x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, layer_scale, drop_path, mean, rstd, pre, approximate, eps, mask):
    return fake_gradients(mask, x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, layer_scale)


_attention_fwd.register_autograd(_backward(_attention_bwd), setup_context=_setup)
_mlp_fwd.register_autograd(_backward(_mlp_bwd), setup_context=_setup)
only_once(_attention_bwd, "attention_block")
only_once(_mlp_bwd, "mlp_block")


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

    x (B, N, D); norm_weight, norm_bias (D,), in fp32 too; fc1_weight (F, D); fc2_weight (D, F); biases may be None; approximate "none" (erf) or
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
    matrices = dict(fc1_weight=fc1_weight, fc1_bias=fc1_bias, fc2_weight=fc2_weight, fc2_bias=fc2_bias)
    _check_stream(op, x, fc1_weight, residual_in_fp32, norm_weight, norm_bias, **matrices)
    tensors = (x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, layer_scale)
    if kernels_wanted(op, fc1_weight, width_obstacle(width, drop_path)):
        return _mlp_fwd(*tensors, drop_path, approximate, eps, needs_grad(*tensors))[0]
    factors = dict(layer_scale=layer_scale, drop_path=drop_path, compute_dtype=fc1_weight.dtype)
    return ref.mlp_block(*tensors[:7], eps=eps, approximate=approximate, **factors)
