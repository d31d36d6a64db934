"""The MLP blocks of a pre-norm encoder layer (Eq. 3 of the ViT paper), plain and gated, fused.

    mlp_block:       x + drop_path[b] * layer_scale * fc2(activation(fc1(norm(x))))
    gated_mlp_block: x + drop_path[b] * layer_scale * down(inner_norm(activation(gate(norm(x))) * up(norm(x))))

The tensors that blocks.py and mlp.py name are kept for backward. The last layer's input is written again in the pass
that applies the activation's derivative; keep="all" keeps it too, and backward writes M F (4 M D) numbers less a layer.
With it, a plain MLP may keep the activation's slope in place of the pre-activation, as kernels/matmul/configs.py says.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import Activation
from . import blocks as block
from . import checks as check
from . import reference as ref
from .blocks import Keep, Norm
from .dispatch import NO_TRITON, autocasts, constant_when_compiled, kernels_wanted, routed
from .layer_norm import fake_statistics, width_unsupported
from .mlp import Approximate, Hidden, HiddenSaved, check_inner, one_activation
from .operation import Constant, as_matrix, custom_op

if NO_TRITON is None:
    from ..kernels import tiles
    from ..kernels.matmul.product import product_class


class _Arguments(NamedTuple):
    """The arguments of both blocks; "in" is fc1 or gate, "out" is fc2 or down."""

    x: Tensor  # (B, N, D) or (tokens, D)
    norm_weight: Tensor  # (D,)
    norm_bias: Tensor | None  # (D,)
    hidden: Hidden
    out_weight: Tensor  # (D, F)
    out_bias: Tensor | None  # (D,)
    layer_scale: Tensor | None  # (D,)
    drop_path: Constant | None  # (B,) or (tokens,)
    eps: float
    norm: str
    keep: str


class _Saved(NamedTuple):
    """Kept for backward."""

    mean: Tensor | None = None  # (M,) in fp32
    rstd: Tensor | None = None  # (M,) in fp32
    hidden: HiddenSaved = HiddenSaved()
    h: Tensor | None = None  # (M, D), the norm's output, with keep="all" alone
    inner: Tensor | None = None  # (M, F), the last layer's input, with keep="all" alone


def _forward(t: _Arguments) -> tuple[Tensor, _Saved]:
    h, mean, rstd = block.apply_norm(t)
    inner, hidden = t.hidden.forward(h, {"none": "", "slope": "slope"}.get(t.keep, "pre"))
    return block.output_layer(inner, t, t.x), block.saved_outputs(t, _Saved(mean, rstd, hidden, h, inner))


def _fake(t: _Arguments) -> tuple[Tensor, _Saved]:
    hidden = t.hidden.fake(t.x)
    h, inner = t.out_weight.new_empty(hidden.pre.shape[0], t.x.shape[-1]), t.out_weight.new_empty(hidden.pre.shape)
    statistics = fake_statistics(t.x, t.norm == "rms")
    return t.x.new_empty(t.x.shape), block.saved_outputs(t, _Saved(*statistics, hidden, h, inner))


def _backward(dout: Tensor, t: _Arguments, saved: _Saved, needs: _Arguments) -> dict[str, Tensor | None]:
    dout, inner, slopes, sums, grads = as_matrix(dout), saved.inner, None, {}, {}
    hidden = t.hidden._replace(activation="slope") if t.keep == "slope" else t.hidden
    g, total = block.branch_gradient(dout, t, needs, norm_follows=block.needs_norm(needs))
    want_inner = inner is None and (needs.out_weight or needs.layer_scale)
    if block.needs_norm(needs) or any(needs.hidden):
        wants = needs.hidden, block.needs_norm(needs), want_inner
        slopes, again, sums, grads = hidden.backward(*block.scale_one(g, t), saved.hidden, *wants)
        inner = again if want_inner else inner
    elif want_inner:
        inner = t.hidden.recompute(saved.hidden)
    dout_weight, dscale = block.weight_gradients(g, inner, t, needs)
    inner = again = None  # 4 M D numbers, freed before more is allocated
    if slopes is not None:
        dh = t.hidden.input_gradient(slopes) if block.needs_norm(needs) else None
        want_h = needs.hidden.in_weight or needs.hidden.up_weight
        found, total, h = block.norm_gradients(t, needs, saved, dout, total, dh, want_h, sums)
        dh = None
        grads |= found | t.hidden.weight_gradients(slopes, h, needs.hidden)
    return grads | block.output_layer_gradients(t, needs, total, dout_weight, dscale)


_mlp_block, _gated_mlp_block = (
    custom_op(name, _Arguments, _Saved, forward=_forward, fake=_fake, backward=_backward)
    for name in ("mlp_block", "gated_mlp_block")
)


@constant_when_compiled
def _kept(device: torch.device, dtype: torch.dtype, width: int, hidden: int) -> str:
    """Whether a plain MLP keeps "pre" or "slope" with keep="all"."""
    return tiles.lookup("mlp_kept", torch.empty(0, device=device, dtype=dtype), product_class(width, hidden)).provider


@autocasts()
@routed
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
    activation: Activation | None = None,
    approximate: Approximate | None = None,
    norm: Norm = "layer",
    layer_scale: Tensor | None = None,
    drop_path: Tensor | None = None,
    residual_in_fp32: bool = False,
    keep: Keep = "least",
    save_policy: Keep | None = None,
) -> Tensor:
    """An MLP block: x + drop_path[b] * layer_scale * fc2(activation(fc1(norm(x)))).

    x (B, N, D); norm_weight, norm_bias (D,), in the layers' dtype or fp32; fc1_weight (F, D); fc2_weight (D, F); biases
    may be None; layer_scale (D,) or None; drop_path (B,) factors or None. activation, approximate: as in linear_gelu.
    norm, residual_in_fp32, keep ("all" keeps the activation too): as in attention_block. Returns (B, N, D) like x.
    """
    hidden, width = check.weight("mlp_block", x, fc1_weight=fc1_weight)
    activation = one_activation("mlp_block", activation, approximate)
    inner = Hidden(fc1_weight, fc1_bias, activation=activation)
    t = _Arguments(x, norm_weight, norm_bias, inner, fc2_weight, fc2_bias, layer_scale, drop_path, eps, norm, keep)
    layers = dict(fc1_=(fc1_weight, fc1_bias, (hidden, width)), fc2_=(fc2_weight, fc2_bias, (width, hidden)))
    t = t._replace(eps=block.check_block("mlp_block", t, layers, residual_in_fp32))
    if kernels_wanted("mlp_block", fc1_weight, width_unsupported(width, drop_path)):
        keep = block.choose_keep(t, fc1_weight, fc2_weight, layer_scale)
        slope = keep == "all" and _kept(x.device, fc1_weight.dtype, width, hidden) == "slope"
        return _mlp_block(t._replace(keep="slope" if slope else keep))
    layers = fc1_weight, fc1_bias, fc2_weight, fc2_bias
    return ref.mlp_block(x, norm_weight, norm_bias, *layers, **block.keywords(t), **inner.options)


@autocasts()
@routed
def gated_mlp_block(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    up_weight: Tensor,
    up_bias: Tensor | None,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None,
    *,
    eps: float = 1e-6,
    activation: Activation = "silu",
    norm: Norm = "layer",
    inner_norm_weight: Tensor | None = None,
    inner_norm_bias: Tensor | None = None,
    inner_eps: float = 1e-6,
    layer_scale: Tensor | None = None,
    drop_path: Tensor | None = None,
    residual_in_fp32: bool = False,
    keep: Keep = "least",
    save_policy: Keep | None = None,
) -> Tensor:
    """A gated MLP block: x + drop_path[b] * layer_scale * gated_mlp(norm(x)).

    x (B, N, D); norm_weight, norm_bias (D,), in the layers' dtype or fp32; up_weight, gate_weight (F, D), down_weight
    (D, F), their biases, activation and the inner norm are as in gated_mlp; layer_scale (D,) or None; drop_path (B,)
    factors or None. norm, `residual_in_fp32` and `keep` are as in attention_block, but "all" keeps the input of `down`
    too. Returns (B, N, D) in x's dtype.
    """
    op, inner_norm = "gated_mlp_block", (inner_norm_weight, inner_norm_bias)
    hidden, width = check.weight(op, x, up_weight=up_weight)
    inner = Hidden(gate_weight, gate_bias, up_weight, up_bias, *inner_norm, activation, inner_eps)
    t = _Arguments(x, norm_weight, norm_bias, inner, down_weight, down_bias, layer_scale, drop_path, eps, norm, keep)
    layers = dict(up_=(up_weight, up_bias, (hidden, width)), gate_=(gate_weight, gate_bias, (hidden, width)))
    layers |= dict(down_=(down_weight, down_bias, (width, hidden)))
    t = t._replace(eps=block.check_block(op, t, layers, residual_in_fp32), hidden=check_inner(op, inner))
    if kernels_wanted(op, up_weight, width_unsupported(width, drop_path) or inner.unsupported):
        keep = block.choose_keep(t, up_weight, gate_weight, down_weight, layer_scale)
        return _gated_mlp_block(t._replace(keep=keep))
    layers = up_weight, up_bias, gate_weight, gate_bias, down_weight, down_bias
    return ref.gated_mlp_block(x, norm_weight, norm_bias, *layers, **block.keywords(t), **t.hidden.options)
