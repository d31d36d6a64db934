"""LayerNorm and the residual add before it, and RMSNorm, by PyTorch's own kernels, provider "torch".

PyTorch's LayerNorm takes one dtype for everything, so where the dtypes differ it is run in fp32. It is also run in fp32
on the CPU, where it would return the statistics of 16-bit rows in 16 bits.
"""

import torch
from torch import Tensor
from torch._decomp import decomposition_table

from ..rows import row_factors

aten = torch.ops.aten


def _dtype_of(x: Tensor, *others: torch.dtype | None) -> torch.dtype:
    """The one dtype that all have, on a GPU; fp32 otherwise."""
    alike = all(dtype in (None, x.dtype) for dtype in others)
    return x.dtype if alike and x.device.type == "cuda" else torch.float32


def _as(dtype: torch.dtype, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if t is None else t.to(dtype) for t in tensors)


def _dtype(t: Tensor | None) -> torch.dtype | None:
    return None if t is None else t.dtype


def forward(
    x, residual, weight, bias, eps, layer_scale, drop_path, rows_per_sample, out_dtype, rms
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """add_layer_norm_fwd, with its arguments and results."""
    (count, width), z, normed = x.shape, None, x
    if residual is not None:
        factors = None if drop_path is None else row_factors(drop_path, rows_per_sample, count)
        if layer_scale is not None and factors is not None:
            z = torch.addcmul(residual, x * layer_scale.float(), factors)
        elif layer_scale is not None or factors is not None:
            z = torch.addcmul(residual, x, factors if layer_scale is None else layer_scale)
        else:
            z = residual + x
        normed = z = z.to(residual.dtype)
    out_dtype = out_dtype or x.dtype
    dtype = _dtype_of(normed, _dtype(weight), _dtype(bias), out_dtype)
    normed, weight, bias = _as(dtype, normed, weight, bias)
    if rms:
        y, rstd = aten._fused_rms_norm(normed, [width], weight, eps)
        return y.to(out_dtype), z, None, rstd.view(count)
    y, mean, rstd = aten.native_layer_norm(normed, [width], weight, bias, eps)
    return y.to(out_dtype), z, mean.view(count), rstd.view(count)


def backward(
    dy, z, weight, bias, mean, rstd, dz, branch, layer_scale, drop_path, rows_per_sample, *wants: bool
) -> tuple[Tensor | None, ...]:
    """layer_norm_bwd, with its arguments and results."""
    want_dx, want_dparams, want_layer_scale, want_dz_sum, want_y = wants
    count, width = z.shape
    want_dres = want_dx or want_layer_scale
    wanted = [want_dres, want_dparams and weight is not None, want_dparams and bias is not None]
    dres = dx = dlayer_scale = dweight = dbias = y = None
    if any(wanted):
        dtype = _dtype_of(z, dy.dtype, _dtype(weight), _dtype(bias))
        inputs, parameters = _as(dtype, dy, z), _as(dtype, weight, bias)
        if mean is None:
            backward = aten._fused_rms_norm_backward.default  # on the CPU there is its decomposition alone
            backward = backward if z.device.type == "cuda" else decomposition_table[backward]
            grads = *backward(*inputs, [width], rstd[:, None], parameters[0], wanted[:2]), None
        else:
            statistics = mean[:, None], rstd[:, None]
            grads = aten.native_layer_norm_backward(*inputs, [width], *statistics, *parameters, wanted)
        dres, dweight, dbias = (grad if want else None for grad, want in zip(grads, wanted))
        (dweight,), (dbias,) = _as(_dtype(weight), dweight), _as(_dtype(bias), dbias)
    if want_dres:
        dres = (dres if dz is None else dres + dz).to(z.dtype)
        scaled = dres if drop_path is None else dres * row_factors(drop_path, rows_per_sample, count).float()
        if want_layer_scale:
            dlayer_scale = (scaled * branch.float()).sum(0).to(layer_scale.dtype)
        scaled = scaled if layer_scale is None else scaled * layer_scale.float()
        if want_dx and scaled is not dres:
            dx = scaled.to(dy.dtype)
    if want_y:
        y = z * rstd[:, None] if mean is None else (z - mean[:, None]).mul_(rstd[:, None])
        if weight is not None:
            y = y.mul_(weight) if bias is None else torch.addcmul(bias, y, weight)
        elif bias is not None:
            y = y.add_(bias)
        y = y.to(dy.dtype)
    dz_sum = dz.sum(0, dtype=torch.float32) if want_dz_sum else None
    return dres if want_dx else None, dx, dweight, dbias, dlayer_scale, dz_sum, y
