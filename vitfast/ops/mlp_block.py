"""The MLP block of a pre-norm encoder layer (Eq. 3 of the ViT paper), fused.

    mlp_block: x + drop_path[b] * layer_scale * fc2(activation(fc1(norm(x))))

Besides the tensors that blocks.py names, the pre-activation is kept for backward. fc2's input is written again in the
pass that applies the activation's derivative; keep="all" keeps it too, and backward writes M F (4 M D) numbers less.
With it, the activation's slope may be kept in place of the pre-activation, as kernels/matmul/mlp.py says.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import Activation
from . import blocks as block
from . import checks as check
from . import reference as ref
from .blocks import Keep, Norm
from .dispatch import NO_TRITON, autocasts, constant_when_compiled, kernels_wanted, norm_unsupported, routed
from .layer_norm import fake_statistics
from .operation import Constant, as_matrix, custom_op

if NO_TRITON is None:
    from ..kernels import tiles
    from ..kernels.matmul.gelu import gelu
    from ..kernels.matmul.linear import input_grad
    from ..kernels.matmul.mlp import dgelu_matmul, linear_gelu
    from ..kernels.matmul.product import product_class


class _Arguments(NamedTuple):
    """The arguments of mlp_block; "in" is fc1, "out" is fc2."""

    x: Tensor  # (B, N, D) or (tokens, D)
    norm_weight: Tensor  # (D,)
    norm_bias: Tensor | None  # (D,)
    in_weight: Tensor  # (F, D)
    in_bias: Tensor | None  # (F,)
    out_weight: Tensor  # (D, F)
    out_bias: Tensor | None  # (D,)
    layer_scale: Tensor | None  # (D,)
    drop_path: Constant | None  # (B,) or (tokens,)
    eps: float
    norm: str
    activation: str
    keep: str


class _Saved(NamedTuple):
    """The tensors kept for backward."""

    mean: Tensor | None = None  # (M,) in fp32
    rstd: Tensor | None = None  # (M,) in fp32
    pre: Tensor | None = None  # (M, F), fc1's output; with keep="slope" the activation's slope there
    h: Tensor | None = None  # (M, D), the norm's output, with keep="all" alone
    inner: Tensor | None = None  # (M, F), fc2's input, with keep="all" alone


def _forward(t: _Arguments) -> tuple[Tensor, _Saved]:
    if block.has_few_rows(t, t.in_weight):
        return block.last_layer(*block.first_layer(t, t.activation, t.in_weight, t.in_bias), t), _Saved()
    h, mean, rstd = block.apply_norm(t)
    save = {"none": "", "slope": "slope"}.get(t.keep, "pre")
    inner, pre = linear_gelu(h, as_matrix(t.in_weight), t.in_bias, t.activation, save)
    return block.output_layer(inner, t, t.x), block.saved_outputs(t, _Saved(mean, rstd, pre, h, inner))


def _fake(t: _Arguments) -> tuple[Tensor, _Saved]:
    rows, width, new = math.prod(t.x.shape[:-1]), t.in_weight.shape[0], t.in_weight.new_empty
    saved = _Saved(*fake_statistics(t.x, t.norm == "rms"), new(rows, width), new(rows, t.x.shape[-1]), new(rows, width))
    return t.x.new_empty(t.x.shape), block.saved_outputs(t, saved)


def _backward(dout: Tensor, t: _Arguments, saved: _Saved, needs: _Arguments) -> dict[str, Tensor | None]:
    dout, below = as_matrix(dout), block.needs_norm(needs)
    g, g_sum = block.branch_gradient(dout, t, needs, norm_follows=below)
    # Through fc2 and the activation. The same product writes fc2's input again, and sums for fc1's bias.
    inner, dpre, in_sums = saved.inner, None, None
    want_inner = inner is None and (needs.out_weight or needs.layer_scale)
    if below or needs.in_weight or needs.in_bias:
        options = "slope" if t.keep == "slope" else t.activation, needs.in_bias, want_inner
        dpre, act, in_sums = dgelu_matmul(*block.through_layer_scale(g, t), saved.pre, *options)
        inner = act if want_inner else inner
    elif want_inner:
        inner = gelu(saved.pre, t.activation)
    dout_weight, dscale = block.weight_gradients(g, inner, t, needs)
    inner = act = None  # 4 M D numbers, freed before more is allocated
    # Through fc1, the norm and the residual.
    dh = input_grad(dpre, as_matrix(t.in_weight)) if below else None
    norm = block.norm_backward(t, needs, saved, dh, dout, g_sum, needs.in_weight, (in_sums,))
    dh = None
    din_weight = torch.mm(dpre.t(), norm.h) if needs.in_weight else None
    grads = dict(norm.grads, in_weight=din_weight, in_bias=norm.sums[0])
    return grads | block.output_layer_gradients(t, needs, norm.g_sum, dout_weight, dscale)


_mlp_block = custom_op("mlp_block", _Arguments, _Saved, forward=_forward, fake=_fake, backward=_backward)


@constant_when_compiled
def _kept(device: torch.device, dtype: torch.dtype, width: int, hidden: int) -> str:
    """The name of what a plain MLP keeps with keep="all", "pre" or "slope"."""
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
    approximate: check.Approximate | None = None,
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
    op = "mlp_block"
    hidden, width = check.weight(op, x, fc1_weight=fc1_weight)
    activation = check.one_activation(op, activation, approximate)
    layers = fc1_weight, fc1_bias, fc2_weight, fc2_bias
    factors = layer_scale, drop_path, eps, norm, activation, keep
    t = _Arguments(x, norm_weight, norm_bias, *layers, *factors)
    shapes = dict(fc1_=(fc1_weight, fc1_bias, (hidden, width)), fc2_=(fc2_weight, fc2_bias, (width, hidden)))
    t = t._replace(eps=block.check_block(op, t, shapes, residual_in_fp32))
    if kernels_wanted(op, fc1_weight, norm_unsupported(width, drop_path)):
        keep = block.choose_keep(t, fc1_weight, fc2_weight, layer_scale)
        slope = keep == "all" and _kept(x.device, fc1_weight.dtype, width, hidden) == "slope"
        return _mlp_block(t._replace(keep="slope" if slope else keep))
    return ref.mlp_block(x, norm_weight, norm_bias, *layers, activation=activation, **block.keywords(t))
