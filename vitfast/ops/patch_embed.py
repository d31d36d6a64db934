"""Images to tokens (Eq. 1 of the ViT paper): patch projection, prefix tokens, positions."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import packed
from . import reference as ref
from ._dispatch import KERNEL_DTYPES, NO_TRITON, autocasts, kernels_wanted, needs_grad
from ._operation import (
    check_floating,
    check_offsets,
    check_shape,
    check_tensors,
    chosen,
    filled,
    is_number,
    only_once,
    operation,
)

if NO_TRITON is None:
    from ..kernels.patch_embed.forward import patch_embed_bwd, patch_embed_fwd


class EmbedNeeds(NamedTuple):
    """Which gradients of patch_embed are needed."""

    images: bool
    weight: bool
    bias: bool
    cls_token: bool
    pos_embed: bool


@operation(
    "patch_embed",
    "Tensor images, Tensor weight, Tensor? bias, Tensor? cls_token, Tensor? pos_embed, Tensor? rows, Tensor? starts, "
    "float[] mean, float[] std",
    1,
)
def _forward(images, weight, bias, cls_token, pos_embed, rows, starts, mean, std):
    packed = None if rows is None else (rows, starts)
    return patch_embed_fwd(images, weight, bias, cls_token, pos_embed, mean, std, packed)


@_forward.register_fake
def _(images, weight, bias, cls_token, pos_embed, rows, starts, mean, std):
    width, _, p, q = weight.shape
    prefix = 0 if cls_token is None else cls_token.shape[1]
    if rows is not None:
        return weight.new_empty(images.shape[0] + starts.shape[0] * prefix, width)
    tokens = prefix + (images.shape[2] // p) * (images.shape[3] // q)
    return weight.new_empty(images.shape[0], tokens, width)


@operation(
    "patch_embed_bwd",
    "Tensor dy, Tensor? images, Tensor weight, Tensor? rows, Tensor? starts, float[] mean, float[] std, "
    "SymInt prefix, SymInt pos_len, ScalarType? bias_dtype, ScalarType? cls_dtype, ScalarType? pos_dtype, bool[] needs",
    5,
)
def _backward(dy, images, weight, rows, starts, mean, std, prefix, pos_len, bias_dtype, cls_dtype, pos_dtype, needs):
    """Gradients of the five tensors, those of the last three in the dtypes given; empty where not needed."""
    needs = EmbedNeeds(*needs)
    grads = patch_embed_bwd(
        dy,
        images,
        weight,
        mean,
        std,
        prefix=prefix,
        pos_len=pos_len,
        want_images=needs.images,
        want_weight=needs.weight,
        want_bias=needs.bias,
        want_cls=needs.cls_token,
        want_pos=needs.pos_embed,
        dtypes=(bias_dtype, cls_dtype, pos_dtype),
        packed=None if rows is None else (rows, starts),
    )
    return filled(dy, *grads)


@_backward.register_fake
def _(dy, images, weight, rows, starts, mean, std, prefix, pos_len, bias_dtype, cls_dtype, pos_dtype, needs):
    width, lead = weight.shape[0], () if rows is not None else (1,)
    wanted = (
        lambda: torch.empty(images.shape, dtype=images.dtype, device=dy.device),
        lambda: torch.empty(weight.shape, dtype=weight.dtype, device=dy.device),
        lambda: dy.new_empty(width, dtype=bias_dtype),
        lambda: dy.new_empty(1, prefix, width, dtype=cls_dtype),
        lambda: dy.new_empty(*lead, pos_len, width, dtype=pos_dtype),
    )
    return tuple(make() if need else dy.new_empty(0) for make, need in zip(wanted, needs))


def _setup_context(ctx, inputs, output):
    images, weight, bias, cls_token, pos_embed, rows, starts, ctx.mean, ctx.std = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(images if any(ctx.needs_input_grad[:2]) else None, weight, rows, starts)
    ctx.prefix = 0 if cls_token is None else cls_token.shape[1]
    ctx.pos_len = 0 if pos_embed is None else pos_embed.shape[-2]
    ctx.dtypes = [None if t is None else t.dtype for t in (bias, cls_token, pos_embed)]


def _differentiate(ctx, dy):
    needs = list(ctx.needs_input_grad[:5])
    if dy is None or not any(needs):
        return (None,) * 9
    grads = _backward(dy, *ctx.saved_tensors, ctx.mean, ctx.std, ctx.prefix, ctx.pos_len, *ctx.dtypes, needs)
    return *chosen(grads, needs), None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup_context)
only_once(_backward, "patch_embed")


_in_compute_dtype = autocasts(lambda weight: weight)


def channel_values(name: str, value, chans: int, device: torch.device) -> list[float] | Tensor | None:
    """One number or one for each channel: a list, or a tensor (1,) or (C,) of a tensor or an array.

    name: "operation: mean" or "operation: std", for the TypeError or ValueError. The values of a tensor are not looked
    at, which a GPU would have to be waited for. device: of the weight.
    """
    if value is None:
        return None
    wanted = f"one number or {chans}, one for each of the {chans} channels"
    if is_number(value):
        value = [value]
    if isinstance(value, Sequence) and not isinstance(value, str) and all(map(is_number, value)):
        low = ref.LEAST_STD if name.endswith("std") else -ref.MOST_PIXEL
        if not all(low <= v <= ref.MOST_PIXEL for v in value):
            raise ValueError(f"{name} must be from {low:g} to {ref.MOST_PIXEL:g}, got {value}")
        values, shape = [float(v) for v in value], (len(value),)
    else:
        try:
            values = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"{name} must be {wanted}, got {value!r}") from None
        if values.is_complex() or values.dtype == torch.bool:
            raise TypeError(f"{name} must be {wanted}, got {values.dtype}")
        if values.layout != torch.strided or values.device.type == "meta" != device.type:
            kind = "sparse" if values.layout != torch.strided else "meta"
            raise TypeError(f"{name} must be {wanted}, got a {kind} tensor")
        values, shape = values.reshape(-1), tuple(values.shape)
    if len(values) not in (1, chans) or max(shape, default=1) != len(values):
        got = len(values) if len(shape) == 1 else f"shape {shape}"
        raise ValueError(f"{name} must be {wanted}, got {got}")
    return values


def _numbers(values: list[float] | Tensor | None, default: float, chans: int) -> list[float]:
    """A number for each channel, as the kernel takes them."""
    values = [default] if values is None else values.tolist() if isinstance(values, Tensor) else values
    return values * chans if len(values) == 1 else values


def _unsupported_reason(mean, std, *tensors: Tensor | None) -> str | None:
    """Why no kernel takes this normalisation or reads these tensors; None where one does."""
    for name, value in (("mean", mean), ("std", std)):
        if isinstance(value, Tensor) and torch.compiler.is_compiling():
            return f"{name} is a tensor, whose numbers compiled code does not know"
        if isinstance(value, Tensor) and needs_grad(value):
            return f"{name} is a constant to the kernel, and it requires a gradient"
    given = (t for t in tensors if t is not None and t.is_floating_point())
    return next((f"no kernel reads {t.dtype}" for t in given if t.dtype not in KERNEL_DTYPES), None)


def patch_embed(
    images: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cls_token: Tensor | None = None,
    pos_embed: Tensor | None = None,
    *,
    mean: float | Sequence[float] | Tensor | None = None,
    std: float | Sequence[float] | Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """[prefix; patch_1 W; ...; patch_N W] + bias + positions.

    images (B, C, Hi, Wi): floats of any dtype, or uint8, of which (images / 255 - mean) / std is taken (mean 0, std 1
    unless given; floats are never normalised here). mean, std: one number or one per channel, as numbers (up to 1e6, a
    std from 1e-6) or as a tensor or an array with one axis longer than 1 at most, such as (1, C, 1, 1); the numbers of
    a tensor on a GPU are waited for, and no kernel runs where they are differentiated or the code is compiled. weight
    (D, C, P, Q); bias (D,) or None; cls_token (1, T, D), all prefix tokens, registers too; pos_embed (1, T+N, D), or
    (1, N, D) for the patches alone. Hi and Wi must be multiples of P and Q. Returns (B, T+N, D), contiguous, in the
    dtype of weight (under autocast: its dtype).

    Images of many sizes, cut into patches: images (N, C, P, Q), where image s owns the patches offsets[s] to
    offsets[s + 1]; offsets (S + 1,) int32 or int64, on the device, from 0 to N. pos_embed is then (N, D), a position
    for each patch. Returns (N + S T, D): the tokens of each image, one after the other.
    """
    check_tensors("patch_embed", images=images, weight=weight)
    check_shape("patch_embed", "weight", weight, (None, None, None, None))
    width, chans, p, q = weight.shape
    check_shape("patch_embed", "images", images, (None, chans, None, None))
    height, length = images.shape[-2:]
    if not p or not q:
        raise ValueError(f"patch_embed: weight must have patches of at least 1 x 1, got {tuple(weight.shape)}")
    if height % p or length % q or not height or not length:
        raise ValueError(
            f"patch_embed: images must have sides that are multiples of the patch {p} x {q}, got {height} x {length}"
        )
    if not images.is_floating_point() and images.dtype != torch.uint8:
        raise TypeError(f"patch_embed: images must be floating point or uint8, got {images.dtype}")
    check_shape("patch_embed", "bias", bias, (width,))
    check_shape("patch_embed", "cls_token", cls_token, (1, None, width))
    patches, prefix = (height // p) * (length // q), 0 if cls_token is None else cls_token.shape[1]
    rows = starts = None
    if offsets is not None:
        if (height, length) != (p, q):
            raise ValueError(
                f"patch_embed: with offsets images must be (N, {chans}, {p}, {q}), got {tuple(images.shape)}"
            )
        check_shape("patch_embed", "pos_embed", pos_embed, (len(images), width))
        check_offsets("patch_embed", offsets, len(images), images.device)
        rows, starts = packed.token_rows(offsets, len(images), prefix)
    else:
        check_shape("patch_embed", "pos_embed", pos_embed, (1, None, width))
    if offsets is None and pos_embed is not None and pos_embed.shape[1] not in (patches, patches + prefix):
        raise ValueError(
            f"patch_embed: pos_embed must have {patches + prefix} or {patches} positions, got {pos_embed.shape[1]}"
        )
    for name, tensor in (("weight", weight), ("bias", bias), ("cls_token", cls_token), ("pos_embed", pos_embed)):
        check_floating("patch_embed", name, tensor)
    for name, tensor in (("images", images), ("bias", bias), ("cls_token", cls_token), ("pos_embed", pos_embed)):
        if tensor is not None and tensor.device != weight.device:
            raise ValueError(f"patch_embed: {name} must be on {weight.device} like weight, got {tensor.device}")
    raw = images.dtype == torch.uint8
    given = (("mean", mean), ("std", std))
    mean, std = (channel_values(f"patch_embed: {name}", value, chans, weight.device) for name, value in given)
    mean, std = (mean, std) if raw else (None, None)
    # Autocast concerns the weight alone, which says what is computed in: the images, the largest tensor, are converted
    # as they are read.
    weight = _in_compute_dtype(weight)
    reason = _unsupported_reason(mean, std, images, bias, cls_token, pos_embed)
    if kernels_wanted("patch_embed", weight, reason):
        normalisation = (_numbers(mean, 0.0, chans), _numbers(std, 1.0, chans)) if raw else ([], [])
        return _forward(images, weight, bias, cls_token, pos_embed, rows, starts, *normalisation)
    given = None if rows is None else (rows, starts)
    return ref.patch_embed(images, weight, bias, cls_token, pos_embed, mean=mean, std=std, rows=given)
