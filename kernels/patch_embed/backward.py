"""Backward of the patch embedding; it uses no atomics, so its bits are the same every time.

dW = dy^T patches. The patches are gathered from the image again, and the rows are split: each split writes an fp32
partial sum, and a second kernel adds these in order. The sum of dy over the batch, made in one pass, is the gradient of
positions and prefix tokens; its column sum is the bias's. dimages = dy W, where every pixel belongs to one patch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import tiles
from ..launch import cdiv, launch
from ..matmul.scaled import scale_rows
from .patches import (
    Packed,
    channel_values,
    folding,
    geometry_of,
    k_offsets,
    load_patches,
    locate,
    patch_class,
    patch_matrix,
    token_row,
)


@triton.jit
def load_tokens(dy_ptr, row, offs_d, mask_m, mask_d, D: tl.constexpr):
    """Loads some columns of some rows of dy (B, T+N, D); zeros where masked."""
    return tl.load(dy_ptr + row[:, None] * D + offs_d[None, :], mask=mask_m[:, None] & mask_d[None, :], other=0.0)


@triton.jit(do_not_specialize=["batch"])
def patch_embed_batch_sum_kernel(
    dy_ptr,  # (B, T+N, D)
    sum_ptr,  # (N, D) fp32 or None: the sums of the patches' rows, for the bias
    dprefix_ptr,  # (T, D) or None
    dpos_ptr,  # (T+N, D) or (N, D) or None
    batch,
    tokens,
    prefix,
    pos_start,
    D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Writes the sum of dy over the batch, for one token and BLOCK_D columns, to each wanted gradient."""
    token = tl.program_id(0)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    acc = tl.zeros((BLOCK_B, BLOCK_D), tl.float32)
    for start in range(0, batch, BLOCK_B):
        image = start + tl.arange(0, BLOCK_B)
        row = image.to(tl.int64) * tokens + token
        acc += load_tokens(dy_ptr, row, offs_d, image < batch, mask_d, D).to(tl.float32)
    total = tl.sum(acc, 0)
    if sum_ptr is not None:
        if token >= prefix:
            tl.store(sum_ptr + (token - prefix) * D + offs_d, total, mask=mask_d)
    if dprefix_ptr is not None:
        if token < prefix:
            tl.store(dprefix_ptr + token * D + offs_d, total.to(dprefix_ptr.dtype.element_ty), mask=mask_d)
    if dpos_ptr is not None:
        if token >= pos_start:
            tl.store(dpos_ptr + (token - pos_start) * D + offs_d, total.to(dpos_ptr.dtype.element_ty), mask=mask_d)


@triton.jit(do_not_specialize=["rows", "rows_per_split"])
def patch_embed_dweight_kernel(
    dy_ptr,  # (B, T+N, D)
    image_ptr,  # (B, C, Hi, Wi)
    partial_ptr,  # (splits, D, K) fp32
    rows,
    rows_per_split,
    prefix,
    packed,  # (rows (N,), starts (S,)) for images of many sizes, or None
    layout,  # a patches.Layout
    strides,  # of images and of the K axis
    PRECISION: tl.constexpr,
    AXES: tl.constexpr,  # a patches.Axes
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Computes BLOCK_D x BLOCK_K of dy^T patches over one split of the rows; gathers the patches again."""
    K: tl.constexpr = AXES.k
    blocks_k: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    split = tl.program_id(1)
    offs_d = tl.program_id(0) // blocks_k * BLOCK_D + tl.arange(0, BLOCK_D)
    k = tl.program_id(0) % blocks_k * BLOCK_K + tl.arange(0, BLOCK_K)
    mask_d, mask_k = offs_d < D, k < K
    pixels = k_offsets(k, strides, AXES)
    acc = tl.zeros((BLOCK_D, BLOCK_K), tl.float32)
    first = split * rows_per_split
    for start in range(first, tl.minimum(first + rows_per_split, rows), BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        mask_m = row < rows
        image, _, corner = locate(row, layout, strides, AXES)
        dy = load_tokens(dy_ptr, token_row(row, image, prefix, packed, mask_m), offs_d, mask_m, mask_d, D)
        x_ptrs = image_ptr + corner[:, None] + pixels[None, :]
        x = load_patches(x_ptrs, mask_m[:, None] & mask_k[None, :], dy_ptr.dtype.element_ty)
        acc = tl.dot(tl.trans(dy), x, acc, input_precision=PRECISION)
    partial_ptrs = partial_ptr + (split.to(tl.int64) * D + offs_d[:, None]) * K + k[None, :]
    tl.store(partial_ptrs, acc, mask=mask_d[:, None] & mask_k[None, :])


@triton.jit(do_not_specialize=["splits"])
def patch_embed_dweight_sum_kernel(
    partial_ptr,  # (splits, D, K) fp32
    dbias_ptr,  # (D,) fp32 or None
    dweight_ptr,  # (D, C, P, Q)
    splits,
    strides,  # of dweight, D first, its K axis in the image's order
    SCALES: tl.constexpr,
    SHIFTS: tl.constexpr,
    C_INNER: tl.constexpr,
    AXES: tl.constexpr,  # a patches.Axes
    D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Sums the splits in order; for raw images, takes a times the sum plus c times the bias's gradient."""
    K: tl.constexpr = AXES.k
    d = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_K,), tl.float32)
    partial_ptrs = partial_ptr + d * K + k
    for _ in range(splits):
        total += tl.load(partial_ptrs, mask=k < K, other=0.0)
        partial_ptrs += D * K
    if dbias_ptr is not None:
        channel = k // C_INNER % len(SCALES)
        total = total * channel_values(channel, SCALES) + tl.load(dbias_ptr + d) * channel_values(channel, SHIFTS)
    offsets = d * K + k_offsets(k, strides, AXES)
    tl.store(dweight_ptr + offsets, total.to(dweight_ptr.dtype.element_ty), mask=k < K)


@triton.jit(do_not_specialize=["rows"])
def patch_embed_dimages_kernel(
    dy_ptr,  # (B, T+N, D)
    weight_ptr,  # (D, K)
    dimage_ptr,  # (B, C, Hi, Wi)
    rows,
    prefix,
    packed,  # (rows (N,), starts (S,)) for images of many sizes, or None
    layout,  # a patches.Layout
    strides,  # of images and of the K axis
    PRECISION: tl.constexpr,
    AXES: tl.constexpr,  # a patches.Axes
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Computes BLOCK_M patches x BLOCK_K pixels of dy W; a pixel has one patch, so stores do not add."""
    K: tl.constexpr = AXES.k
    blocks_k: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    row = tl.program_id(0) // blocks_k * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(0) % blocks_k * BLOCK_K + tl.arange(0, BLOCK_K)
    mask_k = k < K
    mask_m = row < rows
    image, _, corner = locate(row, layout, strides, AXES)
    dy_row = token_row(row, image, prefix, packed, mask_m)
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for start in range(0, D, BLOCK_D):
        offs_d = start + tl.arange(0, BLOCK_D)
        mask_d = offs_d < D
        dy = tl.load(dy_ptr + dy_row[:, None] * D + offs_d[None, :], mask=mask_m[:, None] & mask_d[None, :], other=0.0)
        w = tl.load(weight_ptr + offs_d[:, None] * K + k[None, :], mask=mask_d[:, None] & mask_k[None, :], other=0.0)
        acc = tl.dot(dy, w, acc, input_precision=PRECISION)
    pixels = corner[:, None] + k_offsets(k, strides, AXES)[None, :]
    tl.store(dimage_ptr + pixels, acc.to(dimage_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_k[None, :])


def _patch_rows(dy: Tensor, prefix: int, packed: Packed | None) -> Tensor:
    """The rows (M, D) of the patches in dy, (B, T+N, D) or packed."""
    if packed is not None:
        return dy[packed[0]] if prefix else dy
    return dy[:, prefix:].flatten(0, 1)


class Gradients(NamedTuple):
    """Gradients of `patch_embed_fwd`, or the dtypes of those that are wanted; None for the others."""

    images: Tensor | torch.dtype | None
    weight: Tensor | torch.dtype | None
    bias: Tensor | torch.dtype | None
    cls_token: Tensor | torch.dtype | None
    pos_embed: Tensor | torch.dtype | None


def _dweight(
    dy: Tensor,
    images: Tensor,
    weight: Tensor,
    prefix: int,
    dbias: Tensor | None,
    mean: Sequence[float],
    std: Sequence[float],
    packed: Packed | None,
) -> Tensor:
    """The weight's gradient (D, C, P, Q); dbias is given for raw images and None for floats."""
    geometry = geometry_of(images, weight.shape[2:], prefix, packed)
    width, k, rows = weight.shape[0], geometry["AXES"].k, geometry["rows"]
    config = tiles.lookup("patch_embed_dweight", dy, patch_class(images, geometry, width))
    if config.provider == "cublas":
        patches = patch_matrix(images, weight.shape[2:], dy.dtype, mean, std)
        return torch.mm(_patch_rows(dy, prefix, packed).t(), patches).view(weight.shape).to(weight.dtype)
    flags = dict(config.meta)
    blocks = cdiv(width, flags["BLOCK_D"]) * cdiv(k, flags["BLOCK_K"])
    steps = cdiv(rows, flags["BLOCK_M"])
    splits = max(1, min(flags.pop("PROGRAMS") // blocks, steps // 4))
    partial = torch.empty(splits, width, k, device=dy.device, dtype=torch.float32)
    pointers = dict(dy_ptr=dy, image_ptr=images, partial_ptr=partial)
    flags |= dict(rows_per_split=cdiv(steps, splits) * flags["BLOCK_M"], D=width)
    launch(patch_embed_dweight_kernel, (blocks, splits), **pointers, **geometry, **flags)
    dweight = torch.empty(weight.shape, device=dy.device, dtype=weight.dtype)
    flags = folding(dweight, images, *((mean, std) if dbias is not None else ((), ())))
    pointers = dict(partial_ptr=partial, dbias_ptr=dbias, dweight_ptr=dweight)
    grid = (width, cdiv(k, flags["BLOCK_K"]))
    launch(patch_embed_dweight_sum_kernel, grid, **pointers, splits=splits, D=width, **flags)
    return dweight


def _dimages(dy: Tensor, images: Tensor, weight: Tensor, prefix: int, packed: Packed | None) -> Tensor:
    """The images' gradient (B, C, Hi, Wi), contiguous whatever the layout of the images."""
    batch, chans, height, columns = images.shape
    p, q = weight.shape[2:]
    shape = patch_class(images, geometry_of(images, (p, q), prefix, packed), weight.shape[0])
    config = tiles.lookup("patch_embed_dimages", dy, shape)
    if config.provider == "cublas":
        patches = torch.mm(_patch_rows(dy, prefix, packed), weight.flatten(1))
        grid = patches.view(batch, height // p, columns // q, chans, p, q).permute(0, 3, 1, 4, 2, 5)
        return grid.reshape(images.shape).to(images.dtype)
    dimages = torch.empty(images.shape, device=dy.device, dtype=images.dtype)
    geometry = geometry_of(dimages, (p, q), prefix, packed)
    blocks = cdiv(geometry["rows"], config["BLOCK_M"]) * cdiv(geometry["AXES"].k, config["BLOCK_K"])
    pointers = dict(dy_ptr=dy, weight_ptr=weight.contiguous(), dimage_ptr=dimages)
    launch(patch_embed_dimages_kernel, (blocks,), **pointers, D=weight.shape[0], **geometry, **config.meta)
    return dimages


def patch_embed_bwd(
    dy: Tensor,
    images: Tensor | None,
    weight: Tensor,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    wanted: Gradients,
    *,
    prefix: int,
    pos_len: int,
    packed: Packed | None = None,
) -> Gradients:
    """Gradients of `patch_embed_fwd` for dy (B, T+N, D), or (N + S T, D) with `packed`.

    They have the dtypes of `wanted`. `images` may be None where neither its gradient nor the weight's is wanted; mean
    and std are read for uint8 images only.
    """
    dy = dy.contiguous()
    raw = wanted.weight is not None and images.dtype == torch.uint8
    want_bias = raw or wanted.bias is not None
    if packed is None:
        dbias, dcls, dpos = _sums(dy, prefix, pos_len, want_bias, wanted)
    else:
        images = None if images is None else images.contiguous()
        dbias, dcls, dpos = _packed_sums(dy, prefix, packed, want_bias, wanted)
    dimages = dweight = None
    if wanted.weight is not None:
        dweight = _dweight(dy, images, weight, prefix, dbias if raw else None, mean, std, packed)
    if wanted.images is not None:
        dimages = _dimages(dy, images, weight, prefix, packed)
    return Gradients(dimages, dweight, None if wanted.bias is None else dbias.to(wanted.bias), dcls, dpos)


def _packed_sums(dy, prefix, packed, want_bias: bool, wanted: Gradients) -> tuple[Tensor | None, ...]:
    """The gradients of `_sums` for images of many sizes, where every patch has a position of its own."""
    dbias = dcls = dpos = None
    if want_bias or wanted.pos_embed:
        patches = _patch_rows(dy, prefix, packed)
        dbias = scale_rows(patches, None, None, 1, want_scaled=False)[1] if want_bias else None
        dpos = patches.to(wanted.pos_embed, copy=patches is dy) if wanted.pos_embed else None
    if wanted.cls_token:
        tokens = dy[packed[1][:, None] + torch.arange(prefix, device=dy.device)]
        dcls = tokens.sum(0, keepdim=True, dtype=torch.float32).to(wanted.cls_token)
    return dbias, dcls, dpos


def _sums(dy, prefix, pos_len, want_bias: bool, wanted: Gradients) -> tuple[Tensor | None, ...]:
    """Gradients of the bias (D,), in fp32, of the prefix (1, T, D) and of the positions (1, pos_len, D)."""
    batch, tokens, width = dy.shape
    counts = tokens - prefix, prefix, pos_len
    dtypes = torch.float32 if want_bias else None, wanted.cls_token, wanted.pos_embed
    new = lambda count, dtype: None if dtype is None else dy.new_empty(1, count, width, dtype=dtype)  # noqa: E731
    patch_sums, dcls, dpos = map(new, counts, dtypes)
    if want_bias or wanted.cls_token or wanted.pos_embed:
        pointers = dict(dy_ptr=dy, sum_ptr=patch_sums, dprefix_ptr=dcls, dpos_ptr=dpos)
        sizes = dict(batch=batch, tokens=tokens, prefix=prefix, pos_start=tokens - pos_len, D=width)
        flags = dict(BLOCK_B=32, BLOCK_D=256, num_warps=4)
        launch(patch_embed_batch_sum_kernel, (tokens, cdiv(width, 256)), **pointers, **sizes, **flags)
    return None if patch_sums is None else patch_sums.sum((0, 1)), dcls, dpos
