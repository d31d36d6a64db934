"""A norm and the linear layer behind it, as at a ViT's end: one kernel for few rows in evaluation."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import checks as check
from . import reference as ref
from .blocks import Norm
from .dispatch import NO_TRITON, autocasts, kernels_wanted, norm_unsupported, routed
from .operation import NothingSaved, as_matrix, custom_op, resized

if NO_TRITON is None:
    from ..kernels.layer_norm import layer_norm_bwd, layer_norm_fwd
    from ..kernels.matmul import few_rows
    from ..kernels.matmul.linear import input_grad, linear
    from ..kernels.matmul.scaled import scale_rows


class _Arguments(NamedTuple):
    """The arguments of norm_linear."""

    x: Tensor  # (..., D)
    norm_weight: Tensor  # (D,)
    norm_bias: Tensor | None  # (D,)
    weight: Tensor  # (N, D)
    bias: Tensor | None  # (N,)
    eps: float
    norm: str


def _normalised(t: _Arguments) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """norm(x) (M, D), and the mean and rstd of each row in fp32."""
    h, _, mean, rstd = layer_norm_fwd(as_matrix(t.x), t.norm_weight, t.norm_bias, t.eps, rms=t.norm == "rms")
    return h, mean, rstd


def _forward(t: _Arguments) -> tuple[Tensor, NothingSaved]:
    x, weight, norm = as_matrix(t.x), as_matrix(t.weight), (t.norm_weight, t.norm_bias, t.eps)
    if few_rows.takes(x, weight):
        out = few_rows.norm_linear(x, *norm, weight, t.bias, rms=t.norm == "rms")
    else:
        out = linear(_normalised(t)[0], weight, t.bias)
    return resized(out, *t.x.shape[:-1], len(weight)), NothingSaved()


def _fake(t: _Arguments) -> tuple[Tensor, NothingSaved]:
    return t.x.new_empty(*t.x.shape[:-1], t.weight.shape[0]), NothingSaved()


def _backward(dout: Tensor, t: _Arguments, _, needs: _Arguments) -> dict[str, Tensor | None]:
    dout, (h, *statistics) = as_matrix(dout), _normalised(t)  # again: a model takes this operation in evaluation alone
    dh = input_grad(dout, as_matrix(t.weight))
    norm = layer_norm_bwd(dh, as_matrix(t.x), t.norm_weight, t.norm_bias, *statistics)
    grads = dict(x=norm.dres.view(t.x.shape), norm_weight=norm.dweight, norm_bias=norm.dbias)
    dbias = scale_rows(dout, None, None, 1, want_scaled=False)[1].to(dout.dtype) if needs.bias else None
    return dict(**grads, weight=torch.mm(dout.t(), h) if needs.weight else None, bias=dbias)


_norm_linear = custom_op("norm_linear", _Arguments, NothingSaved, forward=_forward, fake=_fake, backward=_backward)


@autocasts()
@routed
def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float = 1e-6,
    norm: Norm = "layer",
) -> Tensor:
    """A norm, then a linear layer: norm(x) W^T + b.

    x (..., D); norm_weight, norm_bias (D,), in x's dtype or fp32; weight (N, D); bias (N,) or None. norm: as in
    attention_block. Returns (..., N) in x's dtype, or under autocast in its dtype.
    """
    op, width = "norm_linear", check.rows("norm_linear", x)
    check.linear(op, x, weight, bias)
    check.tensors(op, norm_weight=norm_weight)
    check.norm(op, x, width, norm_weight=norm_weight, norm_bias=norm_bias)
    if norm not in ("layer", "rms"):
        raise ValueError(f"{op}: norm must be 'layer' or 'rms', got {norm!r}")
    if norm == "rms" and norm_bias is not None:
        raise ValueError(f"{op}: norm_bias must be None where norm is 'rms', which has no bias")
    t = _Arguments(x, norm_weight, norm_bias, weight, bias, check.number(op, "eps", eps), norm)
    if kernels_wanted(op, x, norm_unsupported(width)):
        return _norm_linear(t)
    return ref.norm_linear(x, norm_weight, norm_bias, weight, bias, eps=t.eps, norm=norm)
