"""LayerNorm (Ba et al., 2016), alone and after a residual add (the ViT paper, Eq. 2 and 3); RMSNorm.

RMSNorm (Zhang & Sennrich, 2019) is a LayerNorm without mean and bias: the same kernels compute both.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import checks as check
from . import reference as ref
from .dispatch import NO_TRITON, autocasts, kernels_wanted, norm_unsupported, routed
from .operation import Constant, as_matrix, custom_op, resized, sample_rows

if NO_TRITON is None:
    from ..kernels.layer_norm import layer_norm_bwd, layer_norm_fwd


class _Arguments(NamedTuple):
    """The arguments of layer_norm and rms_norm."""

    x: Tensor  # (..., D)
    weight: Tensor | None  # (D,)
    bias: Tensor | None  # (D,)
    eps: float
    rms: bool


class _Statistics(NamedTuple):
    """The statistics kept for backward, (M,) in fp32."""

    mean: Tensor | None  # None for RMSNorm
    rstd: Tensor | None


def fake_statistics(x: Tensor, rms: bool = False) -> tuple[Tensor | None, Tensor]:
    """Empty mean (None for RMSNorm) and rstd, (M,) in fp32, for the fakes."""
    mean, rstd = (x.new_empty(math.prod(x.shape[:-1]), dtype=torch.float32) for _ in range(2))
    return None if rms else mean, rstd


def _forward(t: _Arguments) -> tuple[Tensor, _Statistics]:
    y, _, *statistics = layer_norm_fwd(as_matrix(t.x), t.weight, t.bias, t.eps, rms=t.rms)
    return resized(y, *t.x.shape), _Statistics(*statistics)


def _fake(t: _Arguments) -> tuple[Tensor, _Statistics]:
    return t.x.new_empty(t.x.shape), _Statistics(*fake_statistics(t.x, t.rms))


def _backward(dy: Tensor, t: _Arguments, saved: _Statistics, needs: _Arguments) -> dict[str, Tensor | None]:
    inputs = as_matrix(dy), as_matrix(t.x), t.weight, t.bias if needs.bias else None, *saved
    grads = layer_norm_bwd(*inputs, want_dx=needs.x, want_dparams=needs.weight or needs.bias)
    dx = grads.dres.view(t.x.shape) if needs.x else None
    return dict(x=dx, weight=grads.dweight, bias=grads.dbias)


_layer_norm, _rms_norm = (
    custom_op(name, _Arguments, _Statistics, forward=_forward, fake=_fake, backward=_backward)
    for name in ("layer_norm", "rms_norm")
)


class _AddArguments(NamedTuple):
    """The arguments of add_layer_norm."""

    x: Tensor  # (B, ..., D)
    residual: Tensor  # (B, ..., D)
    weight: Tensor | None  # (D,)
    bias: Tensor | None  # (D,)
    layer_scale: Tensor | None  # (D,)
    drop_path: Constant | None  # (B,)
    eps: float


class _AddSaved(NamedTuple):
    """The tensors kept for backward: the result z, and the statistics (M,) in fp32."""

    z: Tensor
    mean: Tensor
    rstd: Tensor


def _add_forward(t: _AddArguments) -> tuple[Tensor, Tensor, _AddSaved]:
    factors = dict(layer_scale=t.layer_scale, drop_path=t.drop_path, rows_per_sample=sample_rows(t.x))
    inputs = as_matrix(t.x), t.weight, t.bias, t.eps
    y, z, *statistics = layer_norm_fwd(*inputs, residual=as_matrix(t.residual), **factors)
    y, z = resized(y, *t.x.shape), resized(z, *t.x.shape)
    return y, z, _AddSaved(z, *statistics)


def _add_fake(t: _AddArguments) -> tuple[Tensor, Tensor, _AddSaved]:
    y, z = (t.x.new_empty(t.x.shape) for _ in range(2))
    return y, z, _AddSaved(z, *fake_statistics(t.x))


def _add_backward(
    dy: Tensor | None, dz: Tensor | None, t: _AddArguments, saved: _AddSaved, needs: _AddArguments
) -> dict[str, Tensor | None]:
    dy = torch.zeros_like(dz) if dy is None else dy
    inputs = as_matrix(dy), as_matrix(saved.z), t.weight, t.bias if needs.bias else None, saved.mean, saved.rstd
    factors = dict(layer_scale=t.layer_scale, drop_path=t.drop_path, rows_per_sample=sample_rows(saved.z))
    scale = dict(branch=as_matrix(t.x) if needs.layer_scale else None, want_layer_scale=needs.layer_scale)
    wants = dict(want_dx=needs.x or needs.residual, want_dparams=needs.weight or needs.bias)
    grads = layer_norm_bwd(*inputs, dz=as_matrix(dz), **factors, **scale, **wants)
    dx, dres = (None if g is None else g.view(saved.z.shape) for g in (grads.dx, grads.dres))
    return dict(x=dx, residual=dres, weight=grads.dweight, bias=grads.dbias, layer_scale=grads.dlayer_scale)


_add_layer_norm = custom_op(
    "add_layer_norm",
    _AddArguments,
    _AddSaved,
    forward=_add_forward,
    fake=_add_fake,
    backward=_add_backward,
    reads=lambda t, needs: t._replace(x=t.x if needs.layer_scale else None, residual=None),
    ties=lambda t: dict(x="residual") if t.layer_scale is None and t.drop_path is None else {},  # one gradient for both
    results=("y", "z"),
)


@autocasts("weight", "bias")
@routed
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-6) -> Tensor:
    """LayerNorm (Ba et al., 2016) over the last axis: (x - mean) / sqrt(var + eps) * weight + bias.

    x (..., D); weight, bias (D,) or None, in x's dtype or fp32. (Autocast leaves weight and bias as they are.) The
    statistics are fp32. Returns (..., D) in x's dtype, or under autocast in its dtype.
    """
    width = check.rows("layer_norm", x)
    check.same("layer_norm", "x", x)
    check.norm("layer_norm", x, width, weight=weight, bias=bias)
    eps = check.number("layer_norm", "eps", eps)
    if kernels_wanted("layer_norm", x, norm_unsupported(width)):
        return _layer_norm(_Arguments(x, weight, bias, eps, rms=False))
    return ref.layer_norm(x, weight, bias, eps)


@autocasts("weight", "bias")
@routed
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-6,
    *,
    layer_scale: Tensor | None = None,
    drop_path: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Adds a residual, z = residual + drop_path[b] * layer_scale * x; returns (layer_norm(z), z).

    x, residual (B, ..., D); weight, bias as in layer_norm; layer_scale (D,) or None; drop_path (B,) or None, the
    factor of each sample: 0, or 1 / (share that is kept). Both results have x's shape and dtype (autocast's).
    """
    width = check.rows("add_layer_norm", x)
    check.shape("add_layer_norm", "residual", residual, tuple(x.shape), required=True)
    check.same("add_layer_norm", "x", x, residual=residual)
    check.norm("add_layer_norm", x, width, weight=weight, bias=bias)
    eps = check.number("add_layer_norm", "eps", eps)
    check.factors("add_layer_norm", x, layer_scale, drop_path, width)
    if kernels_wanted("add_layer_norm", x, norm_unsupported(width, drop_path)):
        return _add_layer_norm(_AddArguments(x, residual, weight, bias, layer_scale, drop_path, eps))
    return ref.add_layer_norm(x, residual, weight, bias, eps, layer_scale=layer_scale, drop_path=drop_path)


@autocasts("weight")
@routed
def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> Tensor:
    """RMSNorm (Zhang & Sennrich, 2019) over the last axis: x / sqrt(mean(x^2) + eps) * weight.

    x (..., D); weight (D,) or None, in x's dtype or fp32. (Autocast leaves weight as it is.) The statistics are fp32.
    Returns (..., D) in x's dtype, or under autocast in its dtype.
    """
    width = check.rows("rms_norm", x)
    check.same("rms_norm", "x", x)
    check.norm("rms_norm", x, width, weight=weight)
    eps = check.number("rms_norm", "eps", eps)
    if kernels_wanted("rms_norm", x, norm_unsupported(width)):
        return _rms_norm(_Arguments(x, weight, None, eps, rms=True))
    return ref.rms_norm(x, weight, eps)
