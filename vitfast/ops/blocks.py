"""The two pre-norm halves of an encoder layer, residual included (Eq. 2 and 3 of the ViT paper): the unit of speed.

Kept for backward, keep="least": the input, LayerNorm's statistics, qkv, lse and the attention output; or the pre-activation. LayerNorm's
output is written again in the pass of its backward, the activation in the epilogue that applies GELU's derivative; keep="all" keeps these two
too, and backward writes 6 of M x D numbers less a layer. LayerNorm's backward reads dout, the gradient of the output, as the residual's: in
the same pass it sums dout's columns for the output layer's bias.
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
from ._dispatch import (
    autocasts,
    check_approximate,
    check_factors,
    check_norm,
    check_same,
    check_shape,
    kernels_wanted,
    needs_grad,
    only_once,
)
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


def _branch_gradient(
    dout: Tensor, dtype: torch.dtype, drop_path: Tensor | None, tokens: int, want_sum: bool, norm_sums: bool
) -> tuple[Tensor, Tensor | None]:
    """(g, column sum of g) for g = drop_path[b] * dout in the dtype of the products; dout itself where nothing changes it.

    norm_sums: LayerNorm's backward is to run. It reads dout and can sum it: for g = dout the sum is then left to it, None here.
    """
    changed = drop_path is not None or dout.dtype != dtype
    if not changed and (norm_sums or not want_sum):
        return dout, None
    g, total = scale_rows(dout, None, drop_path, tokens, want_scaled=changed, want_sum=want_sum, out_dtype=dtype)
    return (g if changed else dout), total


def _out_weight_gradients(g, inner, weight, layer_scale, mask) -> tuple[Tensor | None, Tensor | None]:
    """(dweight, dlayer_scale without the bias' part) of layer_scale * (inner W^T + b), from g (M, D)."""
    if mask[LAYER_SCALE]:
        return weight_grad_scaled(g, inner, weight, None, layer_scale, None, weight.dtype)
    return weight_grad(g, inner, layer_scale=layer_scale, out_dtype=weight.dtype) if mask[OUT_WEIGHT] else None, None


def _out_vector_gradients(total, dscale, bias, layer_scale, mask) -> tuple[Tensor | None, Tensor | None]:
    """(dbias, dlayer_scale) from g's column sum and what _out_weight_gradients made of layer_scale."""
    dbias = None
    if mask[OUT_BIAS]:
        dbias = as_dtype(total if layer_scale is None else total * layer_scale.float(), bias.dtype)
    if mask[LAYER_SCALE]:
        dscale = as_dtype(dscale if bias is None else torch.addcmul(dscale, total, bias.float()), layer_scale.dtype)
    return dbias, dscale


def _in_layer_gradients(din, x, dout, norm_weight, norm_bias, mean, rstd, weight, h, eps, want_sum, mask) -> tuple:
    """(dx, dnorm_weight, dnorm_bias, dweight, column sum of dout) of in(layer_norm(x)) + the residual, from din (M, F), the gradient of what `in` put out.

    LayerNorm's backward adds the residual's gradient, sums it where asked to, and rewrites h, LayerNorm's output, which the weight
    gradient needs, unless it was kept: all in one pass.
    """
    if not any(mask[X:IN_BIAS]):
        return (None,) * 5
    dx = dnorm_weight = dnorm_bias = total = None
    if any(mask[X:IN_WEIGHT]):
        want = dict(
            want_dx=mask[X],
            want_dparams=mask[NORM_WEIGHT] or mask[NORM_BIAS],
            want_dz_sum=want_sum,
            want_y=mask[IN_WEIGHT] and h is None,
        )
        grads = layer_norm_bwd(input_grad(din, weight), x, norm_weight, norm_bias, mean, rstd, dz=dout, **want)
        dx, total, h = grads.dres, grads.dz_sum, grads.y if h is None else h
        dnorm_weight, dnorm_bias = chosen((grads.dweight, grads.dbias), mask[NORM_WEIGHT:IN_WEIGHT])
    elif h is None:
        h = layer_norm_fwd(x, norm_weight, norm_bias, eps, out_dtype=weight.dtype)[0]
    return dx, dnorm_weight, dnorm_bias, weight_grad(din, h, out_dtype=weight.dtype) if mask[IN_WEIGHT] else None, total


def _sum_wanted(mask: list[bool], out_bias: Tensor | None) -> bool:
    """Whether a gradient is made of the column sum of g: that of the output layer's bias, or a layer scale's part that is due to this bias."""
    return mask[OUT_BIAS] or (mask[LAYER_SCALE] and out_bias is not None)


def _kept(keep: str, x: Tensor, least: tuple[Tensor, ...], more: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What forward returns beside its output, with empty tensors for what is not kept. keep: "none", "least" or "all"."""
    absent = {"none": len(least) + len(more), "least": len(more), "all": 0}[keep]
    held = (*least, *more)
    return (*held[: len(held) - absent], *filled(x, *[None] * absent))


def _gradients(
    x: Tensor, in_layer: list[Tensor | None], din_bias: Tensor | None, *out_layer: Tensor | None
) -> tuple[Tensor, ...]:
    """What a backward operation returns: eight gradients in the order of the masks, empty where not asked for."""
    dx, *rest = in_layer
    return filled(x, None if dx is None else dx.view(x.shape), *rest, din_bias, *out_layer)


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
    keep: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out, mean, rstd, qkv, lse, o, LayerNorm's output); keep "least": the last is empty, "none": all but the first are."""
    (batch, tokens, _), stream = x.shape, rows(x)
    qkv_weight, proj_weight = rows(qkv_weight), rows(proj_weight)
    h, mean, rstd = layer_norm_fwd(stream, norm_weight, norm_bias, eps, out_dtype=qkv_weight.dtype)
    qkv = linear(h, qkv_weight, qkv_bias).view(batch, tokens, 3, num_heads, proj_weight.shape[1] // num_heads)
    o, lse = attention_fwd(*qkv.unbind(2), qkv.shape[-1] ** -0.5)
    out = linear_residual(
        o.view(-1, proj_weight.shape[1]), proj_weight, proj_bias, stream, layer_scale, drop_path, tokens
    )
    out = shaped(out, *x.shape)
    return out, *_kept(keep, x, (mean, rstd, qkv, lse, o), (h,))


@_attention_fwd.register_fake
def _(
    x,
    norm_weight,
    norm_bias,
    qkv_weight,
    qkv_bias,
    proj_weight,
    proj_bias,
    layer_scale,
    drop_path,
    num_heads,
    eps,
    keep,
):
    batch, tokens, width = x.shape
    statistics = [x.new_empty(batch * tokens, dtype=torch.float32) for _ in range(2)]
    head = qkv_weight.shape[0] // 3 // num_heads
    qkv, o = (qkv_weight.new_empty(batch, tokens, *packed, num_heads, head) for packed in ((3,), ()))
    lse = x.new_empty(batch, num_heads, tokens, dtype=torch.float32)
    return x.new_empty(x.shape), *_kept(
        keep, x, (*statistics, qkv, lse, o), (qkv_weight.new_empty(batch * tokens, width),)
    )


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
    h: Tensor | None,
    eps: float,
    mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the first eight arguments of the forward in the order of the masks; empty where not asked for. h: LayerNorm's output, if kept."""
    stream, dout, qkv_weight, proj_weight = rows(x), rows(dout), rows(qkv_weight), rows(proj_weight)
    want_sum = _sum_wanted(mask, proj_bias)
    g, total = _branch_gradient(dout, qkv.dtype, drop_path, x.shape[1], want_sum, any(mask[X:IN_WEIGHT]))
    dproj_weight, dscale = _out_weight_gradients(g, rows(o.flatten(2)), proj_weight, layer_scale, mask)
    in_layer, dqkv_bias = (None,) * 5, None
    if any(mask[X:OUT_WEIGHT]):
        do = input_grad(*_through_scale(g, proj_weight, layer_scale)).view(o.shape)
        dqkv, dqkv_bias = attention_bwd(*qkv.unbind(2), o, lse, do, qkv.shape[-1] ** -0.5, want_bias_grad=mask[IN_BIAS])
        wanted = want_sum and total is None, mask
        in_layer = _in_layer_gradients(
            rows(dqkv.flatten(2)), stream, dout, norm_weight, norm_bias, mean, rstd, qkv_weight, h, eps, *wanted
        )
    *in_layer, dout_sum = in_layer
    vectors = _out_vector_gradients(dout_sum if total is None else total, dscale, proj_bias, layer_scale, mask)
    return _gradients(x, in_layer, as_dtype(dqkv_bias, qkv_weight.dtype), dproj_weight, *vectors)


@_attention_bwd.register_fake
def _(
    dout,
    x,
    norm_weight,
    norm_bias,
    qkv_weight,
    qkv_bias,
    proj_weight,
    proj_bias,
    layer_scale,
    drop_path,
    mean,
    rstd,
    qkv,
    lse,
    o,
    h,
    eps,
    mask,
):
    return fake_gradients(mask, x, norm_weight, norm_bias, qkv_weight, qkv_bias, proj_weight, proj_bias, layer_scale)


def _setup(held: int):
    """The setup_context of a half that keeps `held` tensors at least: eight differentiable inputs, drop_path, a number or a name, eps, keep."""

    def setup(ctx, inputs, output):
        *tensors, ctx.option, ctx.eps, keep = inputs
        _, *kept = output
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*kept)
        ctx.save_for_backward(*tensors, *kept[:held], *(t if keep == "all" else None for t in kept[held:]))

    return setup


def _backward(operation):
    """The autograd function of a half: its backward operation with the mask of what is needed, None for all that is not."""

    def backward(ctx, dout, *_):
        unneeded = (None,) * 4  # drop_path, the option, eps, keep
        if dout is None:
            return (None,) * 8 + unneeded
        mask = list(ctx.needs_input_grad[:8])
        grads = operation(dout, *ctx.saved_tensors, *((ctx.option,) if operation is _mlp_bwd else ()), ctx.eps, mask)
        return (*chosen(grads, mask), *unneeded)

    return backward


def _check_stream(
    op: str,
    x: Tensor,
    weight: Tensor,
    residual_in_fp32: bool,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    **matrices: Tensor | None,
) -> None:
    """The residual stream x is fp32 where it is asked to be, else it has the matrices' dtype."""
    if x.dim() != 3:
        raise ValueError(f"{op}: x must be (B, N, D), got {tuple(x.shape)}")
    computed = x.new_empty(0, dtype=weight.dtype) if residual_in_fp32 else x
    check_same(op, "x", computed, **matrices)
    check_norm(op, computed, norm_weight=norm_weight, norm_bias=norm_bias)


def _check_keep(op: str, keep: str) -> None:
    if keep not in ("least", "all"):
        raise ValueError(f"{op}: keep must be 'least' or 'all', got {keep!r}")


def _keeps(keep: str, tensors: tuple[Tensor | None, ...], weights: tuple[Tensor | None, ...]) -> str:
    """`keep` of a forward operation; what "all" adds serves the gradients of these weights alone."""
    if not needs_grad(*tensors):
        return "none"
    return keep if needs_grad(*weights) else "least"


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
    keep: str = "least",
) -> Tensor:
    """x + drop_path[b] * layer_scale * proj(attention(qkv(layer_norm(x)))).

    x (B, N, D); norm_weight, norm_bias (D,), in fp32 too; qkv_weight (3D, D), rows [q; k; v], head-major in each; proj_weight (D, D); biases may be
    None; layer_scale (D,) or None; drop_path (B,) factors or None. `residual_in_fp32`: x is fp32 and stays so, whatever the dtype of
    the parameters (or autocast) that the matrix products run in. `keep`: "least", or "all" for more memory and less traffic: LayerNorm's
    output is then kept for backward, not written again. Returns (B, N, D) in x's dtype.
    """
    op, width = "attention_block", x.shape[-1]
    check_shape(op, "norm_weight", norm_weight, (width,))
    check_shape(op, "norm_bias", norm_bias, (width,))
    check_shape(op, "qkv_weight", qkv_weight, (None, width))
    inner = qkv_weight.shape[0] // 3
    if num_heads < 1 or qkv_weight.shape[0] != 3 * inner or inner % num_heads:
        raise ValueError(
            f"{op}: qkv_weight must have 3 * num_heads * head size rows with num_heads {num_heads}, got {qkv_weight.shape[0]}"
        )
    check_shape(op, "qkv_bias", qkv_bias, (3 * inner,))
    check_shape(op, "proj_weight", proj_weight, (width, inner))
    check_shape(op, "proj_bias", proj_bias, (width,))
    check_factors(op, x, layer_scale, drop_path, width)
    matrices = dict(qkv_weight=qkv_weight, qkv_bias=qkv_bias, proj_weight=proj_weight, proj_bias=proj_bias)
    _check_stream(op, x, qkv_weight, residual_in_fp32, norm_weight, norm_bias, **matrices)
    _check_keep(op, keep)
    tensors = (x, norm_weight, norm_bias, qkv_weight, qkv_bias, proj_weight, proj_bias, layer_scale)
    if kernels_wanted(op, qkv_weight, head_obstacle(inner // num_heads, 1.0) or width_obstacle(width, drop_path)):
        return _attention_fwd(*tensors, drop_path, num_heads, eps, _keeps(keep, tensors, (qkv_weight,)))[0]
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
    keep: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(out, mean, rstd, pre-activation, LayerNorm's output, activation); keep "least": the last two are empty, "none": all but the first are."""
    stream, fc1_weight, fc2_weight = rows(x), rows(fc1_weight), rows(fc2_weight)
    h, mean, rstd = layer_norm_fwd(stream, norm_weight, norm_bias, eps, out_dtype=fc1_weight.dtype)
    act, pre = linear_gelu(h, fc1_weight, fc1_bias, approximate, keep != "none")
    out = shaped(linear_residual(act, fc2_weight, fc2_bias, stream, layer_scale, drop_path, x.shape[1]), *x.shape)
    return out, *_kept(keep, x, (mean, rstd, pre), (h, act))


@_mlp_fwd.register_fake
def _(
    x,
    norm_weight,
    norm_bias,
    fc1_weight,
    fc1_bias,
    fc2_weight,
    fc2_bias,
    layer_scale,
    drop_path,
    approximate,
    eps,
    keep,
):
    batch, tokens, width = x.shape
    statistics = [x.new_empty(batch * tokens, dtype=torch.float32) for _ in range(2)]
    h, pre, act = (fc1_weight.new_empty(batch * tokens, n) for n in (width, fc1_weight.shape[0], fc1_weight.shape[0]))
    return x.new_empty(x.shape), *_kept(keep, x, (*statistics, pre), (h, act))


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
    h: Tensor | None,
    act: Tensor | None,
    approximate: str,
    eps: float,
    mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the first eight arguments of the forward in the order of the masks; empty where not asked for. h, act: if kept."""
    stream, dout, fc1_weight, fc2_weight = rows(x), rows(dout), rows(fc1_weight), rows(fc2_weight)
    want_sum = _sum_wanted(mask, fc2_bias)
    g, total = _branch_gradient(dout, pre.dtype, drop_path, x.shape[1], want_sum, any(mask[X:IN_WEIGHT]))
    want_act, dpre, in_layer, dfc1_bias = (
        act is None and (mask[OUT_WEIGHT] or mask[LAYER_SCALE]),
        None,
        (None,) * 5,
        None,
    )
    if any(mask[X:OUT_WEIGHT]):
        dpre, written, dfc1_bias = dgelu_matmul(
            *_through_scale(g, fc2_weight, layer_scale), pre, approximate, mask[IN_BIAS], want_act=want_act
        )
        act = written if want_act else act
    elif want_act:
        act = F.gelu(pre, approximate=approximate)
    dfc2_weight, dscale = _out_weight_gradients(g, act, fc2_weight, layer_scale, mask)
    act = written = None  # 4 M D numbers, freed before more is allocated
    if dpre is not None:
        wanted = want_sum and total is None, mask
        in_layer = _in_layer_gradients(
            dpre, stream, dout, norm_weight, norm_bias, mean, rstd, fc1_weight, h, eps, *wanted
        )
    *in_layer, dout_sum = in_layer
    vectors = _out_vector_gradients(dout_sum if total is None else total, dscale, fc2_bias, layer_scale, mask)
    return _gradients(x, in_layer, as_dtype(dfc1_bias, fc1_weight.dtype), dfc2_weight, *vectors)


@_mlp_bwd.register_fake
def _(
    dout,
    x,
    norm_weight,
    norm_bias,
    fc1_weight,
    fc1_bias,
    fc2_weight,
    fc2_bias,
    layer_scale,
    drop_path,
    mean,
    rstd,
    pre,
    h,
    act,
    approximate,
    eps,
    mask,
):
    return fake_gradients(mask, x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, layer_scale)


_attention_fwd.register_autograd(_backward(_attention_bwd), setup_context=_setup(5))
_mlp_fwd.register_autograd(_backward(_mlp_bwd), setup_context=_setup(3))
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
    keep: str = "least",
) -> Tensor:
    """x + drop_path[b] * layer_scale * fc2(gelu(fc1(layer_norm(x)))).

    x (B, N, D); norm_weight, norm_bias (D,), in fp32 too; fc1_weight (F, D); fc2_weight (D, F); biases may be None; approximate "none" (erf) or
    "tanh"; layer_scale (D,) or None; drop_path (B,) factors or None; `residual_in_fp32` and `keep`, here of the activation too, as in
    attention_block. Returns (B, N, D) in x's dtype.
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
    _check_keep(op, keep)
    tensors = (x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias, layer_scale)
    if kernels_wanted(op, fc1_weight, width_obstacle(width, drop_path)):
        return _mlp_fwd(
            *tensors, drop_path, approximate, eps, _keeps(keep, tensors, (fc1_weight, fc2_weight, layer_scale))
        )[0]
    factors = dict(layer_scale=layer_scale, drop_path=drop_path, compute_dtype=fc1_weight.dtype)
    return ref.mlp_block(*tensors[:7], eps=eps, approximate=approximate, **factors)
