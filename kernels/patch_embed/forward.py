"""Patch embedding, one implicit GEMM: prefix tokens, then patch W^T + bias, all plus positions.

Images (B, C, Hi, Wi) become (B, T+N, D) tokens. A row of the GEMM is a patch; its K = C*P*Q numbers are gathered from
the image as it lies in memory, and no patch matrix is ever written (the implicit GEMM of cuDNN, Chetlur et al. 2014).
patches.py finds the patches and folds the normalisation of raw images. Backward: backward.py.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from .. import tiles
from ..dependent import MOST_ROWS, dependent_launch, wait_for_kernel_before
from ..launch import cdiv, launch
from ..rows import contiguous_or_none
from ..tiles import batch_invariant
from .patches import (
    Packed,
    channel_values,
    folding,
    geometry_of,
    in_image_order,
    k_offsets,
    load_patches,
    locate,
    patch_class,
    patch_matrix,
    token_row,
)


@triton.jit
def patch_embed_fold_kernel(
    weight_ptr,  # (D, C, P, Q)
    bias_ptr,  # (D,) or None
    folded_ptr,  # (D, K)
    folded_bias_ptr,  # (D,) fp32
    scale_ptr,  # (D,) fp32 or None
    strides,  # of the weight, D first, its K axis in the image's order
    SCALES: tl.constexpr,
    SHIFTS: tl.constexpr,
    C_INNER: tl.constexpr,
    AXES: tl.constexpr,  # a patches.Axes
    BLOCK_K: tl.constexpr,
):
    """Writes W a / scale, K in the image's order, and bias + sum_k W c.

    a (SCALES) and c (SHIFTS) have a number per channel. scale is a power of two for each row that makes its largest
    number fit fp16; it is 1 if scale_ptr is None.
    """
    K: tl.constexpr = AXES.k
    d = tl.program_id(0).to(tl.int64)
    inverse = 1.0
    if scale_ptr is not None:
        largest = tl.zeros((BLOCK_K,), tl.float32)
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            w = tl.load(weight_ptr + d * strides[0] + k_offsets(k, strides, AXES), mask=k < K, other=0.0)
            folded = w.to(tl.float32) * channel_values(k // C_INNER % len(SCALES), SCALES)
            largest = tl.maximum(largest, tl.abs(folded))
        # The exponent's bits of the largest number are 2^e; subtraction gives 2^-e. It becomes 2^14 to 2^15.
        bits = tl.minimum(tl.maximum(tl.max(largest, 0), 2.0**-100), 2.0**126).to(tl.int32, bitcast=True) & 0x7F800000
        tl.store(scale_ptr + d, bits.to(tl.float32, bitcast=True) * 2.0**-14)
        inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True) * 2.0**14
    total = tl.zeros((BLOCK_K,), tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        w = tl.load(weight_ptr + d * strides[0] + k_offsets(k, strides, AXES), mask=k < K, other=0.0).to(tl.float32)
        channel = k // C_INNER % len(SCALES)
        ptrs, folded = folded_ptr + d * K + k, w * channel_values(channel, SCALES) * inverse
        tl.store(ptrs, folded.to(folded_ptr.dtype.element_ty), mask=k < K)
        total += w * channel_values(channel, SHIFTS)
    bias = tl.sum(total, 0)
    if bias_ptr is not None:
        bias += tl.load(bias_ptr + d).to(tl.float32)
    tl.store(folded_bias_ptr + d, bias)


@triton.jit
def _store_tokens(acc, out_ptr, scale_ptr, bias_ptr, pos_ptr, out_row, pos_row, offs_d, mask_m, D: tl.constexpr):
    """Writes the tokens of some patches, with their scale, bias and positions."""
    mask = mask_m[:, None] & (offs_d < D)[None, :]
    if scale_ptr is not None:
        acc *= tl.load(scale_ptr + offs_d, mask=offs_d < D, other=0.0)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs_d, mask=offs_d < D, other=0.0).to(tl.float32)[None, :]
    if pos_ptr is not None:
        acc += tl.load(pos_ptr + pos_row[:, None] * D + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + out_row[:, None] * D + offs_d[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["batch", "rows"])
def patch_embed_fwd_kernel(
    image_ptr,  # (B, C, Hi, Wi)
    weight_ptr,  # (D, K)
    scale_ptr,  # (D,) or None, of the weight's rows
    bias_ptr,  # (D,) or None
    prefix_ptr,  # (T, D) or None
    pos_ptr,  # (T+N, D) or (N, D) or None
    out_ptr,  # (B, T+N, D)
    batch,
    rows,
    prefix,
    pos_start,
    packed,  # (rows (N,), starts (S,)) for images of many sizes, or None
    layout,  # a patches.Layout
    strides,  # of images and of the K axis
    PRECISION: tl.constexpr,
    AXES: tl.constexpr,  # a patches.Axes
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes BLOCK_M patches, which neighbours share in L2, x BLOCK_D columns; last come the prefixes."""
    wait_for_kernel_before(PDL)
    K: tl.constexpr = AXES.k
    blocks_d: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    block = tl.program_id(0) // blocks_d
    blocks = (rows + BLOCK_M - 1) // BLOCK_M
    start_d = tl.program_id(0) % blocks_d * BLOCK_D
    offs_d = start_d + tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    if block < blocks:
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)
        mask_m = row < rows
        image, patch, corner = locate(row, layout, strides, AXES)
        # Images of another dtype, uint8 or fp32 under autocast, get the weights' in registers. A wgmma reads its first
        # operand from there, and Triton before 3.9 overwrites such registers too early (triton-lang/triton#9433; on an
        # H100 a model of fp32 images was wrong). The second operand lies in shared memory.
        SECOND: tl.constexpr = image_ptr.dtype.element_ty != weight_ptr.dtype.element_ty
        acc = tl.zeros((BLOCK_D, BLOCK_M) if SECOND else (BLOCK_M, BLOCK_D), tl.float32)
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            x_ptrs = image_ptr + corner[:, None] + k_offsets(k, strides, AXES)[None, :]
            w_ptrs = weight_ptr + offs_d[None, :] * K + k[:, None]
            if K % BLOCK_K == 0:
                x = load_patches(x_ptrs, mask_m[:, None], weight_ptr.dtype.element_ty, True)
                w = tl.load(w_ptrs, mask=mask_d[None, :], other=0.0)
            else:
                x = load_patches(x_ptrs, mask_m[:, None] & (k < K)[None, :], weight_ptr.dtype.element_ty, True)
                w = tl.load(w_ptrs, mask=(k < K)[:, None] & mask_d[None, :], other=0.0)
            if SECOND:
                acc = tl.dot(tl.trans(w), tl.trans(x), acc, input_precision=PRECISION)
            else:
                acc = tl.dot(x, w, acc, input_precision=PRECISION)
        if SECOND:
            acc = tl.trans(acc)
        # Tokens are written in two halves: the registers cannot hold all positions beside the accumulator.
        half: tl.constexpr = BLOCK_D // 2
        left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, half)), (0, 2, 1)))
        out_row = token_row(row, image, prefix, packed, mask_m)
        pos_row = patch + prefix - pos_start if packed is None else row.to(tl.int64)
        offs_half = start_d + tl.arange(0, half)
        _store_tokens(left, out_ptr, scale_ptr, bias_ptr, pos_ptr, out_row, pos_row, offs_half, mask_m, D)
        _store_tokens(right, out_ptr, scale_ptr, bias_ptr, pos_ptr, out_row, pos_row, offs_half + half, mask_m, D)
    elif prefix_ptr is not None:
        token = (block - blocks) % prefix
        image = (block - blocks) // prefix * BLOCK_M + tl.arange(0, BLOCK_M)
        value = tl.load(prefix_ptr + token * D + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        if pos_ptr is not None:
            if token >= pos_start:
                value += tl.load(pos_ptr + (token - pos_start) * D + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        if packed is None:
            first = image.to(tl.int64) * (prefix + layout.patches)
        else:
            first = tl.load(packed[1] + image, mask=image < batch, other=0).to(tl.int64)
        out_ptrs = out_ptr + (first + token)[:, None] * D + offs_d[None, :]
        tl.store(out_ptrs, value.to(out_ptr.dtype.element_ty)[None, :], mask=(image < batch)[:, None] & mask_d[None, :])


class Folded(NamedTuple):
    """A patch projection with the normalisation of raw images in it, by patch_embed_fold_kernel."""

    weight: Tensor  # (D, K), in the order of the image's K axis
    bias: Tensor  # (D,) in fp32
    scale: Tensor | None  # (D,) in fp32, of the rows


def fold_normalization(
    images: Tensor, weight: Tensor, bias: Tensor | None, mean: Sequence[float], std: Sequence[float]
) -> Folded:
    """The projection of raw images that lie in memory as these do."""
    arguments = dict(weight_ptr=in_image_order(weight, images), bias_ptr=contiguous_or_none(bias))
    # Bytes become fp16 at the least cost, so bf16 weights do too: with a scale for each row that loses nothing.
    width, k, halves = weight.shape[0], weight[0].numel(), weight.itemsize == 2
    folded = torch.empty(width, k, device=weight.device, dtype=torch.float16 if halves else weight.dtype)
    vectors = [torch.empty(width, device=weight.device, dtype=torch.float32) for _ in range(1 + halves)]
    result = Folded(folded, vectors[0], vectors[1] if halves else None)
    arguments |= dict(zip(("folded_ptr", "folded_bias_ptr", "scale_ptr"), result))
    launch(patch_embed_fold_kernel, (width,), **arguments, **folding(weight, images, mean, std))
    return result


def patch_embed_fwd(
    images: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cls_token: Tensor | None,
    pos_embed: Tensor | None,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    packed: Packed | None = None,
    folded: Folded | None = None,
) -> Tensor:
    """(B, T+N, D) in weight's dtype. mean and std, one number per channel, are for uint8 images only.

    folded: fold_normalization of the other arguments, if that has been computed before.
    packed: see patches.geometry_of. The images are then patches (N, C, P, Q), pos_embed is (N, D) and the result is
    (N + S T, D).
    """
    (width, _, p, q), prefix = weight.shape, 0 if cls_token is None else cls_token.shape[1]
    batch = len(images) if packed is None else len(packed[1])
    # packed patches are walked c before p before q; batch invariance walks every image so
    images = images.contiguous() if packed is not None or batch_invariant() else images
    geometry = geometry_of(images, (p, q), prefix, packed)
    patches = geometry["layout"].patches
    config = tiles.lookup("patch_embed_fwd", weight, patch_class(images, geometry, width))
    if config.provider == "cublas":
        bias, cls_token, pos_embed = (None if t is None else t.to(weight.dtype) for t in (bias, cls_token, pos_embed))
        tokens = F.linear(patch_matrix(images, (p, q), weight.dtype, mean, std), weight.flatten(1), bias)
        if packed is not None:
            return _packed_tokens(tokens, cls_token, pos_embed, *packed)
        return _with_prefix(tokens.view(batch, patches, width), cls_token, pos_embed)
    ordered, scale = in_image_order(weight, images), None
    if images.dtype == torch.uint8:
        ordered, bias, scale = folded or fold_normalization(images, weight, bias, mean, std)
    if packed is None:
        size, pos_start = (batch, prefix + patches), 0 if pos_embed is None else prefix + patches - pos_embed.shape[1]
    else:
        size, pos_start = (len(images) + batch * prefix,), prefix
    few = math.prod(size) <= MOST_ROWS and not batch_invariant()
    out = torch.empty(*size, width, device=weight.device, dtype=weight.dtype)
    blocks = cdiv(geometry["rows"], config["BLOCK_M"]) + prefix * cdiv(batch, config["BLOCK_M"])
    vectors = dict(bias_ptr=bias, prefix_ptr=cls_token if prefix else None, pos_ptr=pos_embed)
    pointers = {name: contiguous_or_none(t) for name, t in vectors.items()}
    pointers |= dict(image_ptr=images, weight_ptr=ordered.contiguous(), scale_ptr=scale, out_ptr=out)
    sizes = dict(pos_start=pos_start, batch=batch, D=width)
    grid = (blocks * cdiv(width, config["BLOCK_D"]),)
    dependent = dependent_launch(weight) if few else dict(PDL=False)
    launch(patch_embed_fwd_kernel, grid, **pointers, **sizes, **geometry, **config.meta, **dependent)
    return out


def _packed_tokens(
    patches: Tensor, cls_token: Tensor | None, pos_embed: Tensor | None, rows: Tensor, starts: Tensor
) -> Tensor:
    """(N, D) -> (N + S T, D): `_with_prefix` of images of many sizes; pos_embed (N, D)."""
    prefix, width = 0 if cls_token is None else cls_token.shape[1], patches.shape[1]
    out = patches.new_empty(len(patches) + len(starts) * prefix, width)
    out[rows] = patches if pos_embed is None else patches + pos_embed
    if prefix:
        out[starts[:, None] + torch.arange(prefix, device=starts.device)] = cls_token
    return out


def _with_prefix(patches: Tensor, cls_token: Tensor | None, pos_embed: Tensor | None) -> Tensor:
    """(B, N, D) -> (B, T+N, D): prefix tokens first, positions added to all or to the patches alone."""
    batch, count, width = patches.shape
    prefix = 0 if cls_token is None else cls_token.shape[1]
    if pos_embed is None or pos_embed.shape[1] == count:
        first = cls_token
    else:
        first = None if cls_token is None else cls_token + pos_embed[:, :prefix]
        pos_embed = pos_embed[:, prefix:]
    patches = patches if pos_embed is None else patches + pos_embed
    return patches if first is None else torch.cat([first.expand(batch, -1, -1), patches], 1)
