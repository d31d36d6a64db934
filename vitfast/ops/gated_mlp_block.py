"""The gated MLP block of a pre-norm encoder layer (SwiGLU, GeGLU), fused.

    gated_mlp_block: x + drop_path[b] * layer_scale * down(inner_norm(activation(gate(norm(x))) * up(norm(x))))

Kept for backward besides what _blocks.py says: what gated_mlp.py says. keep="all" keeps what goes into `down`
too, which backward else writes again in passes that it makes anyway.
"""

from typing import NamedTuple

from torch import Tensor

from . import reference as ref
from ._blocks import check, keeps, kept, normed, output_gradient, split, through_norm, with_output
from ._dispatch import NO_TRITON, autocasts, kernels_wanted
from ._operation import (
    as_dtype,
    as_matrix,
    check_activation,
    check_norm,
    check_norm_kind,
    check_rows,
    check_same,
    check_shape,
    check_tensors,
    differentiable,
    operation,
    sample_rows,
    shaped,
)
from .gated_mlp import (
    GATE,
    HIDDEN,
    Gate,
    Hidden,
    again,
    check_gate,
    fake_hidden,
    hidden_bwd,
    hidden_fwd,
    inner_unsupported,
    layers_input_grad,
    wanted,
)
from .layer_norm import fake_statistics
from .layer_norm import unsupported_reason as width_unsupported
from .linear_residual import ResidualNeeds, through_scale, weight_gradients

if NO_TRITON is None:
    from ..kernels.matmul.linear import linear_residual
    from ..kernels.matmul.weight_grad import weight_grad


class Inputs(NamedTuple):
    """The tensors of the block, named as in _blocks.py: "out" is `down`."""

    x: Tensor  # (B, N, D) or (tokens, D)
    norm_weight: Tensor  # (D,)
    norm_bias: Tensor | None  # (D,)
    up_weight: Tensor  # (F, D)
    up_bias: Tensor | None  # (F,)
    gate_weight: Tensor  # (F, D)
    gate_bias: Tensor | None  # (F,)
    inner_norm_weight: Tensor | None  # (F,)
    inner_norm_bias: Tensor | None  # (F,)
    out_weight: Tensor  # (D, F)
    out_bias: Tensor | None  # (D,)
    layer_scale: Tensor | None  # (D,)
    drop_path: Tensor | None  # (B,)

    @property
    def in_weight(self) -> Tensor:
        """The first of the two, for what both have in common."""
        return self.up_weight

    @property
    def in_bias(self) -> Tensor | None:
        """As in_weight."""
        return self.up_bias

    @property
    def gate(self) -> Gate:
        """All that stands before `down`."""
        return Gate(*self[3:9])


class GatedBlockNeeds(NamedTuple):
    """Which gradients of the block are needed."""

    x: bool
    norm_weight: bool
    norm_bias: bool
    up_weight: bool
    up_bias: bool
    gate_weight: bool
    gate_bias: bool
    inner_norm_weight: bool
    inner_norm_bias: bool
    out_weight: bool
    out_bias: bool
    layer_scale: bool

    @property
    def norm(self) -> bool:
        """Whether the backward of the norm before the layers runs."""
        return self.x or self.norm_weight or self.norm_bias

    @property
    def out(self) -> ResidualNeeds:
        """The output layer's part; that of its input where anything below it is needed."""
        below = any(wanted(self, self.norm).values())
        return ResidualNeeds(below, self.out_weight, self.out_bias, self.layer_scale)


_INPUTS = (
    f"Tensor x, Tensor norm_weight, Tensor? norm_bias, {GATE}, "
    "Tensor out_weight, Tensor? out_bias, Tensor? layer_scale, Tensor? drop_path"
)
_OPTIONS = "str activation, float eps, float inner_eps, str norm"


@operation("gated_mlp_block_fwd", f"{_INPUTS}, {_OPTIONS}, str keep", 10)
def _gated_fwd(*arguments):
    """(out, mean, rstd, Hidden, the norm's output, what goes into `down`).

    keep "least": the last two are empty, "none": all but the first are.
    """
    t, (activation, eps, inner_eps, norm, keep) = split(arguments, Inputs)
    h, mean, rstd = normed(t, eps, norm)
    inner, hidden = hidden_fwd(h, t.gate, activation, inner_eps, keep != "none")
    factors = t.layer_scale, t.drop_path, sample_rows(t.x)
    out = linear_residual(inner, as_matrix(t.out_weight), t.out_bias, as_matrix(t.x), *factors)
    # Without an inner norm `inner` is its input h, which is not kept twice.
    return shaped(out, *t.x.shape), *kept(keep, t.x, (mean, rstd, *hidden), (h, inner))


@_gated_fwd.register_fake
def _(*arguments):
    t, (_, _, _, norm, keep) = split(arguments, Inputs)
    hidden = fake_hidden(t.x, t.gate)
    h, inner = t.up_weight.new_empty(hidden.up.shape[0], t.x.shape[-1]), t.up_weight.new_empty(hidden.up.shape)
    return t.x.new_empty(t.x.shape), *kept(keep, t.x, (*fake_statistics(t.x, norm), *hidden), (h, inner))


@operation(
    "gated_mlp_block_bwd",
    f"Tensor dout, {_INPUTS}, Tensor mean, Tensor rstd, {HIDDEN}, Tensor? normed, Tensor? inner, "
    f"{_OPTIONS}, bool[] needs",
    12,
)
def _gated_bwd(dout, *arguments):
    """The gradients that GatedBlockNeeds names, empty where not needed. normed, inner: if kept."""
    t, (mean, rstd, *rest) = split(arguments, Inputs)
    hidden, (h, inner, activation, eps, inner_eps, norm, needs) = Hidden(*rest[:5]), rest[5:]
    dout, out_weight, needs = as_matrix(dout), as_matrix(t.out_weight), GatedBlockNeeds(*needs)
    g, total = output_gradient(dout, t, hidden.up.dtype, needs)
    want_inner, found, grads, dtype = needs.out_weight or needs.layer_scale, None, {}, t.up_weight.dtype
    if needs.out.x:
        scaled, wants = through_scale(g, out_weight, t.layer_scale), wanted(needs, needs.norm)
        found = hidden_bwd(*scaled, t.gate, hidden, activation, **wants, want_inner=want_inner and inner is None)
        inner, scaled = found.inner if inner is None else inner, None
    elif want_inner and inner is None:
        inner = again(t.gate, hidden, activation, inner_eps)
    dout_weight, dscale = weight_gradients(g, inner, out_weight, t.layer_scale, needs.out)
    inner = None
    if found is not None:
        found = found._replace(inner=None)  # 4 M D numbers, freed before more is allocated
        dh, want_h = layers_input_grad(found, t.gate) if needs.norm else None, needs.up_weight or needs.gate_weight
        grads, total, h = through_norm(t, needs, dout, total, dh, (mean, rstd, h), eps, norm, want_h)
        dh = None
        grads.update(up_bias=as_dtype(found.up_bias, dtype), gate_bias=as_dtype(found.gate_bias, dtype))
        grads.update(inner_norm_weight=found.inner_norm_weight, inner_norm_bias=found.inner_norm_bias)
        for name, gradient, need in (("up", found.up, needs.up_weight), ("gate", found.gate, needs.gate_weight)):
            grads[f"{name}_weight"] = weight_grad(gradient, h, out_dtype=dtype) if need else None
    return with_output(t, needs, grads, total, dout_weight, dscale)


# keep="least" trades these for time: backward writes them again in passes that it makes anyway.
differentiable(_gated_fwd, _gated_bwd, "gated_mlp_block", GatedBlockNeeds, only_all=("normed", "inner"))


@autocasts
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
    activation: str = "silu",
    norm: str = "layer",
    inner_norm_weight: Tensor | None = None,
    inner_norm_bias: Tensor | None = None,
    inner_eps: float = 1e-6,
    layer_scale: Tensor | None = None,
    drop_path: Tensor | None = None,
    residual_in_fp32: bool = False,
    keep: str = "least",
) -> Tensor:
    """x + drop_path[b] * layer_scale * gated_mlp(norm(x)).

    x (B, N, D); norm_weight, norm_bias (D,), in fp32 too; up_weight, gate_weight (F, D), down_weight (D, F), their
    biases, activation and the inner norm as in gated_mlp; layer_scale (D,) or None; drop_path (B,) factors or None;
    norm, `residual_in_fp32` and `keep`, here of what goes into `down` too, as in attention_block. Returns (B, N, D) in
    x's dtype.
    """
    op, width = "gated_mlp_block", check_rows("gated_mlp_block", x)
    check_tensors(op, norm_weight=norm_weight, up_weight=up_weight, down_weight=down_weight)
    check_shape(op, "norm_weight", norm_weight, (width,))
    check_shape(op, "norm_bias", norm_bias, (width,))
    check_shape(op, "up_weight", up_weight, (None, width))
    check_activation(op, activation)
    check_norm_kind(op, norm, norm_bias)
    hidden, inner = up_weight.shape[0], (inner_norm_weight, inner_norm_bias)
    gate = up_weight, up_bias, gate_weight, gate_bias, *inner
    t = Inputs(x, norm_weight, norm_bias, *gate, down_weight, down_bias, layer_scale, drop_path)
    eps = check(op, t, ("up", "down"), hidden, hidden, eps, residual_in_fp32, keep)
    inner_eps = check_gate(op, hidden, width, gate_weight, gate_bias, *inner, inner_eps)
    computed = x.new_empty(0, dtype=up_weight.dtype)
    check_same(op, "up_weight", computed, gate_weight=gate_weight, gate_bias=gate_bias)
    check_norm(op, computed, inner_norm_weight=inner_norm_weight, inner_norm_bias=inner_norm_bias)
    if kernels_wanted(op, up_weight, width_unsupported(width, drop_path) or inner_unsupported(t.gate)):
        keep = keeps(keep, t, up_weight, gate_weight, down_weight, layer_scale)
        return _gated_fwd(*t, activation, eps, inner_eps, norm, keep)[0]
    layers = (norm_weight, norm_bias, up_weight, up_bias, gate_weight, gate_bias, down_weight, down_bias)
    options = dict(inner_norm_weight=inner_norm_weight, inner_norm_bias=inner_norm_bias, inner_eps=inner_eps)
    options |= dict(layer_scale=layer_scale, drop_path=drop_path, compute_dtype=up_weight.dtype)
    return ref.gated_mlp_block(x, *layers, eps=eps, activation=activation, norm=norm, **options)
