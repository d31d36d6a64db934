"""Gated MLPs (Shazeer, 2020), and the block of an encoder layer with one.

    gated_mlp:       down(inner_norm(activation(gate(x)) * up(x)))
    gated_mlp_block: x + drop_path[b] * layer_scale * gated_mlp(norm(x))

They are SwiGLU with "silu", GeGLU with "gelu". "in" is gate, whose output is the pre-activation `pre`; "out" is down.
Kept for backward are the inputs and the outputs of `in` and `up`; with an inner norm, so are its input and statistics.
The activation is computed again where needed; with keep="all" the block keeps down's input too. Passes over memory:

forward     One product reads x and writes up and pre (in training) and the last layer's input. With an inner norm, that
            product writes the norm's input h, and one more pass writes the last layer's input.
backward    One product reads dout, up and pre, and writes dup, dpre, the last layer's input again and sums for both
            biases. The weight gradients read dout and that input, x and dup, x and dpre. dx is one product, and a
            second is added onto it. With an inner norm, a product makes dinner from dout; a pass makes dh and the
            norm's output again from dinner and h; and one makes dup, dpre and the sums from dh, up and pre.
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
from .dispatch import NO_TRITON, autocasts, kernels_wanted, norm_unsupported, routed
from .layer_norm import fake_statistics
from .operation import Constant, as_matrix, custom_op, flat, needs_grad, resized

if NO_TRITON is None:
    from ..kernels.layer_norm import layer_norm_bwd, layer_norm_fwd
    from ..kernels.matmul.gated import dgated_matmul, gated_bwd, gated_linear
    from ..kernels.matmul.gelu import gelu
    from ..kernels.matmul.linear import input_grad, linear
    from ..kernels.matmul.scaled import scale_rows
    from ..kernels.rows import column_sums


class _HiddenSaved(NamedTuple):
    """The tensors kept for backward."""

    pre: Tensor | None = None  # (M, F)
    up: Tensor | None = None  # (M, F)
    inner_h: Tensor | None = None  # (M, F); this and the next two are for an inner norm only
    inner_mean: Tensor | None = None  # (M,) in fp32
    inner_rstd: Tensor | None = None  # (M,) in fp32


class _Hidden(NamedTuple):
    """The parameters and options of all layers before the last, and what kernels compute with them."""

    in_weight: Tensor  # (F, D), gate
    in_bias: Tensor | None  # (F,)
    up_weight: Tensor  # (F, D)
    up_bias: Tensor | None  # (F,)
    inner_norm_weight: Tensor | None  # (F,)
    inner_norm_bias: Tensor | None  # (F,)
    activation: str
    inner_eps: float

    @property
    def options(self) -> dict:
        """The options as keyword arguments of ref.gated_mlp."""
        inner = dict(inner_norm_weight=self.inner_norm_weight, inner_norm_bias=self.inner_norm_bias)
        return dict(activation=self.activation, inner_eps=self.inner_eps, **inner)

    @property
    def unsupported(self) -> str | None:
        """Why no kernel computes the inner norm; None where one does, or there is none."""
        reason = None if self.inner_norm_weight is None else norm_unsupported(self.in_weight.shape[0])
        return reason and f"inner norm: {reason}"

    def forward(self, x: Tensor, save: bool) -> tuple[Tensor, _HiddenSaved]:
        """The last layer's input (M, F) for x (M, D), and the tensors kept for backward if `save`."""
        layers = as_matrix(self.up_weight), self.up_bias, as_matrix(self.in_weight), self.in_bias
        inner, up, pre = gated_linear(x, *layers, self.activation, save)
        if self.inner_norm_weight is None:
            return inner, _HiddenSaved(pre, up) if save else _HiddenSaved()
        h = inner
        inner, _, *statistics = layer_norm_fwd(h, self.inner_norm_weight, self.inner_norm_bias, self.inner_eps)
        return inner, _HiddenSaved(pre, up, h, *statistics) if save else _HiddenSaved()

    def fake(self, x: Tensor) -> _HiddenSaved:
        """The fake of the tensors kept for backward; x gives the number of rows."""
        pre, up, h = (self.in_weight.new_empty(math.prod(x.shape[:-1]), self.in_weight.shape[0]) for _ in range(3))
        norm = (None,) * 3 if self.inner_norm_weight is None else (h, *fake_statistics(x))
        return _HiddenSaved(pre, up, *norm)

    def recompute(self, saved: _HiddenSaved) -> Tensor:
        """Computes the input of the last layer again."""
        if self.inner_norm_weight is not None:
            return layer_norm_fwd(saved.inner_h, self.inner_norm_weight, self.inner_norm_bias, self.inner_eps)[0]
        return gelu(saved.pre, self.activation).mul_(saved.up)

    def backward(
        self, g: Tensor, out_weight: Tensor, saved: _HiddenSaved, needs: "_Hidden", below: bool, want_inner: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, tuple, dict[str, Tensor | None]]:
        """(dpre, dup, the last layer's input, workspaces, gradients of the inner norm's parameters by name).

        The first three are (M, F), the two workspaces (row blocks, F), for the biases of up and in; those that are not
        wanted are None. g: the gradient (M, D') of the last layer's output; out_weight (D', F). below: whether the
        gradient of x is needed. want_inner: whether the last layer's input is needed.
        """
        want_sums = needs.in_bias or needs.up_bias
        if self.inner_norm_weight is None:
            options = self.activation, want_sums, want_inner
            dup, dpre, inner, *sums = dgated_matmul(g, out_weight, saved.up, saved.pre, *options)
            return dpre, dup, inner, tuple(sums), {}
        want_layers = below or needs.in_weight or needs.in_bias or needs.up_weight or needs.up_bias
        want_norm = needs.inner_norm_weight or needs.inner_norm_bias
        parameters = self.inner_norm_weight, self.inner_norm_bias, saved.inner_mean, saved.inner_rstd
        wants = dict(want_dx=want_layers, want_dparams=want_norm, want_y=want_inner)
        norm = layer_norm_bwd(input_grad(g, out_weight), saved.inner_h, *parameters, **wants)
        dup, dpre, sums = None, None, (None, None)
        if want_layers:
            dup, dpre, _, *sums = gated_bwd(norm.dres, saved.up, saved.pre, self.activation, want_sums)
        return dpre, dup, norm.y, tuple(sums), dict(inner_norm_weight=norm.dweight, inner_norm_bias=norm.dbias)

    def input_gradient(self, dpre: Tensor, dup: Tensor) -> Tensor:
        """dx (M, D): one product, onto which a second one is added."""
        return input_grad(dpre, as_matrix(self.in_weight), input_grad(dup, as_matrix(self.up_weight)))

    def weight_gradients(self, dpre: Tensor, dup: Tensor, x: Tensor | None, needs: "_Hidden") -> dict[str, Tensor]:
        """Gradients of the weights by name, as far as needed; x (M, D) is the layers' input."""
        pairs = dict(up_weight=(dup, needs.up_weight), in_weight=(dpre, needs.in_weight))
        return {name: torch.mm(slope.t(), x) for name, (slope, needed) in pairs.items() if needed}


def _checked_inner(op: str, t: _Hidden) -> _Hidden:
    """Checks the activation and the inner norm; returns t with inner_eps as a Python number."""
    parameters = dict(inner_norm_weight=t.inner_norm_weight, inner_norm_bias=t.inner_norm_bias)
    check.norm(op, t.in_weight, t.in_weight.shape[0], **parameters)
    if t.inner_norm_weight is None and t.inner_norm_bias is not None:
        raise ValueError(f"{op}: inner_norm_bias needs an inner_norm_weight, without which there is no inner norm")
    check.activation(op, t.activation)
    return t._replace(inner_eps=check.number(op, "inner_eps", t.inner_eps))


# ---- the MLP alone


class _Mlp(NamedTuple):
    """The arguments of gated_mlp."""

    x: Tensor  # (..., D)
    hidden: _Hidden
    out_weight: Tensor  # (D', F)
    out_bias: Tensor | None  # (D',)
    save: bool


def _forward(t: _Mlp) -> tuple[Tensor, _HiddenSaved]:
    inner, saved = t.hidden.forward(as_matrix(t.x), t.save)
    out = linear(inner, as_matrix(t.out_weight), t.out_bias)
    return resized(out, *t.x.shape[:-1], out.shape[1]), saved


def _fake(t: _Mlp) -> tuple[Tensor, _HiddenSaved]:
    out = t.x.new_empty(*t.x.shape[:-1], t.out_weight.shape[0])
    return out, t.hidden.fake(t.x) if t.save else _HiddenSaved()


def _backward(dout: Tensor, t: _Mlp, saved: _HiddenSaved, needs: _Mlp) -> dict[str, Tensor | None]:
    g, grads, inner = as_matrix(dout), {}, None
    if needs.x or any(needs.hidden):
        wants = needs.hidden, needs.x, needs.out_weight
        dpre, dup, inner, sums, norm = t.hidden.backward(g, as_matrix(t.out_weight), saved, *wants)
        up_bias, in_bias = column_sums(sums[0], sums, [t.out_weight.dtype] * 2)
        grads = dict(norm, up_bias=up_bias, in_bias=in_bias)
        if needs.x:
            grads["x"] = t.hidden.input_gradient(dpre, dup).view(t.x.shape)
        grads |= t.hidden.weight_gradients(dpre, dup, as_matrix(t.x), needs.hidden)
    if needs.out_weight:
        grads["out_weight"] = torch.mm(g.t(), t.hidden.recompute(saved) if inner is None else inner)
    if needs.out_bias:
        grads["out_bias"] = scale_rows(g, None, None, 1, want_scaled=False)[1].to(t.x.dtype)
    return grads


_gated_mlp = custom_op("gated_mlp", _Mlp, _HiddenSaved, forward=_forward, fake=_fake, backward=_backward)


# ---- the block


class _Block(NamedTuple):
    """The arguments of gated_mlp_block."""

    x: Tensor  # (B, N, D) or (tokens, D)
    norm_weight: Tensor  # (D,)
    norm_bias: Tensor | None  # (D,)
    hidden: _Hidden
    out_weight: Tensor  # (D, F)
    out_bias: Tensor | None  # (D,)
    layer_scale: Tensor | None  # (D,)
    drop_path: Constant | None  # (B,) or (tokens,)
    eps: float
    norm: str
    keep: str


class _BlockSaved(NamedTuple):
    """The tensors kept for backward."""

    mean: Tensor | None = None  # (M,) in fp32
    rstd: Tensor | None = None  # (M,) in fp32
    hidden: _HiddenSaved = _HiddenSaved()
    h: Tensor | None = None  # (M, D), the norm's output, with keep="all" alone
    inner: Tensor | None = None  # (M, F), the last layer's input, with keep="all" alone


def _block_forward(t: _Block) -> tuple[Tensor, _BlockSaved]:
    layer = t.hidden.in_weight, t.hidden.in_bias, t.hidden.up_weight, t.hidden.up_bias
    if t.hidden.inner_norm_weight is None and block.has_few_rows(t, *layer[::2], gated=True):
        return block.last_layer(*block.first_layer(t, t.hidden.activation, *layer), t), _BlockSaved()
    h, mean, rstd = block.apply_norm(t)
    inner, hidden = t.hidden.forward(h, t.keep != "none")
    return block.output_layer(inner, t, t.x), block.saved_outputs(t, _BlockSaved(mean, rstd, hidden, h, inner))


def _block_fake(t: _Block) -> tuple[Tensor, _BlockSaved]:
    hidden = t.hidden.fake(t.x)
    h, inner = t.out_weight.new_empty(hidden.pre.shape[0], t.x.shape[-1]), t.out_weight.new_empty(hidden.pre.shape)
    saved = _BlockSaved(*fake_statistics(t.x, t.norm == "rms"), hidden, h, inner)
    return t.x.new_empty(t.x.shape), block.saved_outputs(t, saved)


def _block_backward(dout: Tensor, t: _Block, saved: _BlockSaved, needs: _Block) -> dict[str, Tensor | None]:
    dout, below = as_matrix(dout), block.needs_norm(needs)
    g, g_sum = block.branch_gradient(dout, t, needs, norm_follows=below)
    # Gradients through down, the inner norm and the activation. The same product may write down's input again.
    inner, dpre, dup, sums, grads = saved.inner, None, None, (), {}
    want_inner = inner is None and (needs.out_weight or needs.layer_scale)
    if below or any(needs.hidden):
        wants = needs.hidden, below, want_inner
        dpre, dup, h, sums, grads = t.hidden.backward(*block.through_layer_scale(g, t), saved.hidden, *wants)
        inner = h if want_inner else inner
    elif want_inner:
        inner = t.hidden.recompute(saved.hidden)
    dout_weight, dscale = block.weight_gradients(g, inner, t, needs)
    inner = h = None  # 4 M D numbers, freed before more is allocated
    # Gradients through gate and up, the norm and the residual.
    dh = t.hidden.input_gradient(dpre, dup) if below else None
    want_h = needs.hidden.in_weight or needs.hidden.up_weight
    norm = block.norm_backward(t, needs, saved, dh, dout, g_sum, want_h, sums)
    dh = None
    grads = grads | norm.grads | dict(zip(("up_bias", "in_bias"), norm.sums))
    grads |= t.hidden.weight_gradients(dpre, dup, norm.h, needs.hidden)
    return grads | block.output_layer_gradients(t, needs, norm.g_sum, dout_weight, dscale)


_functions = dict(forward=_block_forward, fake=_block_fake, backward=_block_backward)
_gated_mlp_block = custom_op("gated_mlp_block", _Block, _BlockSaved, **_functions)


@autocasts()
@routed
def gated_mlp(
    x: Tensor,
    up_weight: Tensor,
    up_bias: Tensor | None,
    gate_weight: Tensor,
    gate_bias: Tensor | None,
    down_weight: Tensor,
    down_bias: Tensor | None,
    *,
    activation: Activation = "silu",
    inner_norm_weight: Tensor | None = None,
    inner_norm_bias: Tensor | None = None,
    inner_eps: float = 1e-6,
) -> Tensor:
    """A gated MLP (Shazeer, 2020): down(inner_norm(activation(gate(x)) * up(x))).

    x (..., D); up_weight, gate_weight (F, D), also halves of one (2F, D); down_weight (D', F); biases may be None.
    activation: "silu" for SwiGLU, "gelu" for GeGLU, or another one of linear_gelu's. The inner norm is a LayerNorm
    (EVA-02); there is none unless its weight (F,) is given. Returns (..., D').
    """
    op, inner_norm = "gated_mlp", (inner_norm_weight, inner_norm_bias)
    check.linear(op, x, up_weight, up_bias, "up_")
    check.linear(op, x, gate_weight, gate_bias, "gate_", tuple(up_weight.shape))
    check.linear(op, x, down_weight, down_bias, "down_", ("*", up_weight.shape[0]))
    t = _checked_inner(op, _Hidden(gate_weight, gate_bias, up_weight, up_bias, *inner_norm, activation, inner_eps))
    if kernels_wanted(op, x, t.unsupported):
        save = needs_grad(x, *flat(t), down_weight, down_bias)
        return _gated_mlp(_Mlp(x, t, down_weight, down_bias, save))
    return ref.gated_mlp(x, up_weight, up_bias, gate_weight, gate_bias, down_weight, down_bias, **t.options)


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
    inner = _Hidden(gate_weight, gate_bias, up_weight, up_bias, *inner_norm, activation, inner_eps)
    t = _Block(x, norm_weight, norm_bias, inner, down_weight, down_bias, layer_scale, drop_path, eps, norm, keep)
    layers = dict(up_=(up_weight, up_bias, (hidden, width)), gate_=(gate_weight, gate_bias, (hidden, width)))
    layers |= dict(down_=(down_weight, down_bias, (width, hidden)))
    t = t._replace(eps=block.check_block(op, t, layers, residual_in_fp32), hidden=_checked_inner(op, inner))
    if kernels_wanted(op, up_weight, norm_unsupported(width, drop_path) or inner.unsupported):
        keep = block.choose_keep(t, up_weight, gate_weight, down_weight, layer_scale)
        return _gated_mlp_block(t._replace(keep=keep))
    layers = up_weight, up_bias, gate_weight, gate_bias, down_weight, down_bias
    return ref.gated_mlp_block(x, norm_weight, norm_bias, *layers, **block.keywords(t), **t.hidden.options)
