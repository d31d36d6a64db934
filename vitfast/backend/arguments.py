"""Functions that a rewritten graph calls to turn a model's tensors into arguments of the operations."""

import math
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from .nodes import size


def pack_qkv(
    weights: list[Tensor], biases: list[Tensor | None], heads: int, axis: int, order: tuple, scale: float | Tensor
) -> tuple[Tensor, Tensor | None]:
    """Returns (weight (3K, D), bias (3K,) or None) with the rows [q; k; v], head by head in each.

    The rows of q are multiplied by scale.

    weights, biases: of the layers that compute q, k and v. Their concatenated rows are viewed as (heads, Dh) with one
    more axis of length three, inserted as number `axis` (0, 1, 2). On it, q, k and v are at the positions `order`.
    """
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    bias = biases[0]
    if len(biases) > 1 and any(b is not None for b in biases):
        bias = torch.cat([w.new_zeros(w.shape[0]) if b is None else b.to(w.dtype) for w, b in zip(weights, biases)])
    return tuple(None if t is None else _packed(t, heads, axis, order, scale) for t in (weight, bias))


def _packed(rows: Tensor, heads: int, axis: int, order: tuple, scale: float | Tensor) -> Tensor:
    scaled = isinstance(scale, Tensor) or scale != 1
    if (axis, order) == (0, (0, 1, 2)) and not scaled:
        return rows
    sizes = [heads, -1]
    sizes.insert(axis, 3)
    three = [t.flatten(0, 1) for t in rows.unflatten(0, sizes).unbind(axis)]
    q, k, v = (three[place] for place in order)
    return torch.cat([q * scale if scaled else q, k, v])


def as_rows(weight: Tensor, rows_from: tuple[int, ...], columns_from: tuple[int, ...]) -> Tensor:
    """Returns a weight as (rows, columns): its axes that the output has, and those that are summed over."""
    return weight.permute(*rows_from, *columns_from).flatten(len(rows_from)).flatten(0, len(rows_from) - 1)


def logit_bias(masks: list[Tensor], hide: list[bool], heads: int, dtype: torch.dtype) -> Tensor:
    """Returns the sum of masks (..., N) as a bias of ops.attention, (B or 1, heads, N, N).

    hide: for each boolean mask, whether True hides a key, else False does. heads: -1 for as many as the masks have.
    """
    total, tokens = None, masks[0].shape[-1]
    for mask, hides in zip(masks, hide):
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(mask if hides else ~mask, float("-inf"))
        total = mask if total is None else total + mask
    total = total[(None,) * (4 - total.dim())].expand(-1, heads, tokens, tokens)
    return total if total.dtype in (dtype, torch.float32) else total.to(dtype)


def shown_keys(mask: Tensor, hides: bool) -> Tensor:
    """Returns the number (B,) of keys that the first row of each sample's mask (B, ..., N) shows.

    A boolean mask shows keys by True, or by False if it `hides`; any other has 0 for shown keys, and -inf."""
    rows = mask.flatten(1, -2)[:, 0] if mask.dim() > 2 else mask
    rows = rows if rows.dtype == torch.bool else rows == 0
    return rows.shape[-1] - rows.sum(-1) if hides else rows.sum(-1)


def module_mask(mask: Tensor, heads: int, padding: bool) -> Tensor:
    """Reshapes a mask of nn.MultiheadAttention to one that broadcasts to (B, H, N, N).

    padding: whether it is key_padding_mask (B, N), or attn_mask."""
    if padding:
        return mask[:, None, None]
    return mask.view(-1, heads, *mask.shape[1:]) if mask.dim() == 3 else mask


def rotary_table(tables: list[Tensor], width: int, rest: float) -> Tensor:
    """Returns cos or sin as (N, Dh), (H, N, Dh) or (B, 1 or H, N, Dh), without other axes of length 1.

    tables: one, or one for each part of a head that is rotated by itself. These are concatenated, and the columns that
    are left of the head's width get `rest`.
    """
    table = tables[0]
    if len(tables) > 1:
        table = torch.cat(tables, -1)
        table = F.pad(table, (0, width - table.shape[-1]), value=rest)
    if table.dim() > 2 and table.shape[-2] == 1:
        table = table.squeeze(-2)
    while table.dim() > 2 and table.shape[0] == 1:
        table = table.squeeze(0)
    return table


def table_rows(table: Tensor) -> int:
    """Returns the number of tokens that a rotary table has rows for."""
    return next((n for n in table.shape[-2::-1] if size(n) != 1), 1)


def tokens_without_row(x: Tensor, table: Tensor) -> int:
    """Returns how many tokens of x (B, ..., D) come before those that a rotary table has rows for."""
    return math.prod(x.shape[1:-1]) - table_rows(table)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None, axes: str = "bhnd", **masks) -> Tensor:
    """PyTorch's scaled_dot_product_attention, computed by ops.attention.

    q, k, v, and what is returned: (B, H, N, Dh) or (H, N, Dh) with axes "bhnd", (B, N, H, Dh) with "bnhd". masks: bias
    and key_lengths of ops.attention, or offsets and longest of samples that are packed as one.
    """
    heads_first = axes == "bhnd"
    if flat := q.dim() == 3:
        q, k, v = (t[None] for t in (q, k, v))
    if heads_first:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if "bias" in masks:
        masks["bias"] = masks["bias"].expand(-1, q.shape[2], -1, -1)
    if "offsets" in masks:
        out = ops.attention(q[0], k[0], v[0], scale=scale, **masks)[None]
    else:
        out = ops.attention(q, k, v, scale=scale, **masks)
    out = out.transpose(1, 2) if heads_first else out
    return out[0] if flat else out


def offsets_of(lengths: Tensor) -> Tensor:
    """The offsets (S + 1,) of packed samples of these lengths (S,)."""
    return F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def laid_out(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Returns x with the same axes, laid out in memory in this order of them, the outermost first."""
    if [*axes] == [*range(x.dim())]:
        return x.contiguous()
    return x.permute(axes).contiguous().permute([axes.index(i) for i in range(x.dim())])


def halves(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Splits one linear layer into the two of a gated MLP: weight and bias of each half of its rows."""
    first, second = weight.chunk(2)
    return (first, None, second, None) if bias is None else (first, bias.chunk(2)[0], second, bias.chunk(2)[1])


def factors(drop_path: Tensor, factor: float) -> Tensor:
    """Returns drop path's factors (B, 1, 1) as (B,), multiplied by a number."""
    return drop_path.flatten() if factor == 1 else drop_path.flatten() * factor


def patch_weight(weight: Tensor, sizes: tuple[int, int, int], order: tuple[int, ...]) -> Tensor:
    """Returns the weight (D, C P Q) of a linear layer as that of a convolution (D, C, P, Q).

    sizes: (C, P, Q). order: at which place channels, rows and columns of a patch are in the layer's input."""
    lengths = dict(zip(order, sizes))
    return weight.view(-1, *(lengths[place] for place in range(3))).permute(0, *(place + 1 for place in order))


def whole_patches(images: Tensor, weight: Tensor) -> Tensor:
    """Crops images to whole patches; a convolution does not read the rows and columns that are left."""
    height, width = (n - n % side for n, side in zip(images.shape[-2:], weight.shape[-2:]))
    return images[..., :height, :width]


def per_channel(weight: Tensor, bias: Tensor | None, black: Tensor, white: Tensor) -> tuple[Tensor, Tensor]:
    """Folds a normalisation into the weight (D, C, P, P) and bias (D,) of a convolution.

    The returned weight and bias take pixels from 0 to 1. black, white (1, C, 1, 1): the normalised values of 0 and 1.
    """
    shift = (weight * black).sum((1, 2, 3))
    shift = shift if bias is None else shift + bias
    return (weight * (white - black)).to(weight.dtype), shift.to(weight.dtype)


def prefix_and_positions(steps: list[tuple[str, Tensor]]) -> tuple[Tensor | None, Tensor | None]:
    """Returns cls_token (1, T, D) and pos_embed of ops.patch_embed for these steps after the projection.

    steps: ("prefix", tokens to put in front) or ("positions", embeddings to add to all tokens there are by then).
    """
    prefix = positions = None
    for place, (kind, rows) in enumerate(steps):
        rows = rows.reshape(1, -1, rows.shape[-1])
        count = 0 if prefix is None else prefix.shape[1]
        if kind == "prefix":
            prefix = rows if prefix is None else torch.cat([rows, prefix], 1)
        elif positions is None and place == len(steps) - 1:
            return prefix, rows
        else:
            prefix = None if prefix is None else prefix + rows[:, :count]
            positions = rows[:, count:] if positions is None else positions + rows[:, count:]
    return prefix, positions


def patches_as_image(tokens: Tensor, images: Tensor, weight: Tensor) -> Tensor:
    """Returns tokens (B, N, D) as a convolution does: (B, D, H / P, W / Q), in the channels-last layout."""
    return tokens.transpose(1, 2).unflatten(2, tuple(n // p for n, p in zip(images.shape[2:], weight.shape[2:])))


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Calls ops.layer_norm; as in PyTorch's, the output of an fp32 input is fp32 under autocast too."""
    with _in_dtype_of(x):
        return ops.layer_norm(x, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Calls ops.rms_norm; the output of an fp32 input is fp32 under autocast too."""
    with _in_dtype_of(x):
        return ops.rms_norm(x, weight, eps)


def _in_dtype_of(x: Tensor) -> AbstractContextManager:
    active = x.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type)
    return torch.autocast(x.device.type, enabled=False) if active else nullcontext()
