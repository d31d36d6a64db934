"""Position embeddings (the ViT paper, D.4 and Table 8), and their resizing.

"learn"     one table in raster order, with a slot for each prefix token unless no_embed_class is set (the paper's
            1-D, its default)
"learn2d"   a table for columns and one for rows, each D/2 wide, concatenated; for patches only, since a class token has
            no coordinates (at the stem a learned vector added to the learned token would be one vector with it)
"factorized" like "learn2d", but each table is D wide and they are added (NaViT, Dehghani et al., 2023; when they are
            resampled, they are its fractional ones)
"sincos2d"  a fixed table of sines and cosines, see `sincos_2d`
"relative"  in each layer an embedding of every offset between two patches in raster order, as an extra key
"none"      no positions are added

Rotary positions ("dinov3", "cat") have no table: `rope_tables` computes them. A table's first axis counts the layers
that have their own: it is 1 at the stem and if all layers share one, else the depth.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import reference as ref
from ..ops.packed import PackedImages, token_rows
from ..ops.reference import owners, packed_tokens
from .config import ROPES, Resample
from .layers import Attention

Grid = tuple[int, int]
Batch = Tensor | PackedImages  # images of one size, (B, C, H, W), or of many
AXES = ("learn2d", "factorized")  # the kinds with a table for the columns and one for the rows
ROPE_LAYOUTS = {"dinov3": "half", "cat": "interleaved"}  # the values of ops.attention's rope_layout


def prefix_slots(vit: nn.Module) -> int:
    """How many prefix tokens have a slot in the position table."""
    return 0 if vit.no_embed_class or vit._config["pos_embed"] in AXES else vit.num_prefix_tokens


def make_tables(vit: nn.Module) -> None:
    """Makes the tables of this kind of positions, parameters or fixed; init_weights fills them."""
    c, (height, width), d = vit._config, vit.patch_embed.grid_size, vit.embed_dim
    kind, count = c["pos_embed"], c["depth"] if c["pos_embed_at"] == "layers" else 1
    shapes = {}
    if kind in ("learn", "sincos2d"):
        shapes = {"pos_embed": (count, prefix_slots(vit) + height * width, d)}
    elif kind in AXES:
        dim = d // 2 if kind == "learn2d" else d
        shapes = {"pos_embed_x": (count, width, dim), "pos_embed_y": (count, height, dim)}
    elif kind == "relative":
        shapes = {"pos_embed_rel": (c["depth"], 2 * height * width - 1, d // c["num_heads"])}
    vit._tables = tuple(shapes)
    vit.register_buffer("pos_embed", None)
    for name, shape in shapes.items():
        setattr(vit, name, torch.empty(shape) if kind == "sincos2d" else nn.Parameter(torch.empty(shape)))


@torch.no_grad()
def change_tables(vit: nn.Module, change: Callable[[str, Tensor], Tensor]) -> None:
    """Puts change(name, table) in the place of each table."""
    for name in vit._tables:
        before = getattr(vit, name)
        after = change(name, before)
        setattr(vit, name, nn.Parameter(after, before.requires_grad) if isinstance(before, nn.Parameter) else after)


def _tables_at(vit: nn.Module, images: Batch) -> dict[str, Tensor]:
    """The position tables, resampled for the grid of the images if the model takes any size."""
    tables, stem = {name: getattr(vit, name) for name in vit._tables}, vit.patch_embed
    if not vit.dynamic_img_size or isinstance(images, PackedImages):
        return tables
    how = stem.grid_size, stem.dynamic_feat_size(images.shape[2:]), prefix_slots(vit), vit._config["pos_resample"]
    return {name: resize_table(name, table, *how) for name, table in tables.items()}


def added_positions(vit: nn.Module, images: Batch) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
    """Positions added to tokens or patches at the stem, to packed prefix tokens, and before each block."""
    kind, place, depth = vit._config["pos_embed"], vit._config["pos_embed_at"], len(vit.blocks)
    tables, prefix, first = _tables_at(vit, images), vit.num_prefix_tokens, None
    if not tables or kind == "relative":
        return None, None, [None] * depth
    if isinstance(images, PackedImages):
        how = vit.patch_embed.grid_size, prefix_slots(vit), vit._config["pos_resample"]
        table, slots = packed_positions(kind, tables, images, *how)
        stem, first = table[0], None if slots is None else slots[:1]
        slots = table.new_zeros(len(table), prefix, table.shape[2]) if slots is None else slots
        rows = token_rows(images.offsets, len(images.patches), prefix)
        at = lambda i: packed_tokens(table[i], slots[i : i + 1], None, *rows)  # noqa: E731
    else:
        table = absolute(kind, tables)
        stem = table if place == "stem" else table[:1]
        at = lambda i: F.pad(table[i : i + 1], (0, 0, prefix - prefix_slots(vit), 0))  # noqa: E731
    if place == "stem":
        return stem, first, [None] * depth
    return stem, first, [None, *([at(0)] * (depth - 1) if place == "layers_shared" else map(at, range(1, depth)))]


def attention_options(vit: nn.Module, images: Batch, x: Tensor) -> list[dict]:
    """Each block's arguments of attention: relative or rotary positions, the layout of packed tokens x."""
    c, packed, prefix = vit._config, isinstance(images, PackedImages), vit.num_prefix_tokens
    if c["pos_embed"] == "relative":
        table = _tables_at(vit, images)["pos_embed_rel"]
        return [dict(relative=table[i]) for i in range(len(vit.blocks))]
    options = token_layout(images, prefix)._asdict() if packed else {}
    if (kind := c["rope"]) is not None:
        how = c["rope_temperature"] or ROPES[kind], c["ref_feat_shape"]
        rope = rope_tables(kind, images, x, vit.patch_embed.patch_size, vit.blocks[0].attn.head_dim, *how)
        options |= dict(rope=(rope[0], rope[1]), rope_layout=ROPE_LAYOUTS[kind], num_prefix=0 if packed else prefix)
    return [options] * len(vit.blocks)


class TokenLayout(NamedTuple):
    """Where the tokens of S packed images lie: image s owns the tokens offsets[s] to offsets[s + 1].

    The fields are named as the arguments of ops.attention.
    """

    offsets: Tensor  # (S + 1,)
    longest: int  # tokens of the longest image, or more


def token_layout(images: PackedImages, prefix: int) -> TokenLayout:
    """Where the tokens of packed images lie; each image has `prefix` tokens before its patches."""
    count = torch.arange(len(images) + 1, device=images.device, dtype=images.offsets.dtype)
    return TokenLayout(images.offsets + count * prefix, images.longest + prefix)


@torch.fx.wrap  # it looks at shapes in Python
def resize_table(
    name: str, table: Tensor, old: Grid, new: Grid, prefix: int, how: Resample = "bicubic_antialias"
) -> Tensor:
    """The table of this name, which was made for an `old` grid (h, w), resampled for a `new` one."""
    if name == "pos_embed_x":
        return resample(table, (1, old[1]), (1, new[1]), how=how)
    if name == "pos_embed_y":
        return resample(table, (1, old[0]), (1, new[0]), how=how)
    return resample_offsets(table, old, new, how) if name == "pos_embed_rel" else resample(table, old, new, prefix, how)


def absolute(kind: str, tables: dict[str, Tensor]) -> Tensor | None:
    """The positions to add to tokens (n, T+N, D) or to patches alone (n, N, D); None if there are none."""
    if kind not in AXES:
        return tables.get("pos_embed")
    x, y = tables["pos_embed_x"][:, None, :], tables["pos_embed_y"][:, :, None]  # (n, 1, w, D'), (n, h, 1, D')
    return _joined(kind, x.expand(-1, y.shape[1], -1, -1), y.expand(-1, -1, x.shape[2], -1)).flatten(1, 2)


def _joined(kind: str, x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x, y], dim=-1) if kind == "learn2d" else x + y


def grid_places(grid: Grid, device: torch.device | None) -> tuple[tuple[Tensor, Tensor], Grid]:
    """Row and column, (N,) each, of every patch in raster order; and the number of rows and columns."""
    number = torch.arange(grid[0] * grid[1], device=device)
    return (number // grid[1], number % grid[1]), grid


def packed_places(images: PackedImages) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Row and column of each patch of many images; the height and width of its image's grid. (N,) each."""
    height, width = images.grids.long()[owners(images.offsets, len(images.patches))].unbind(1)
    number = images.places.long()
    return (number // width, number % width), (height, width)


def axis_weights(place: Tensor, size: Tensor, old: int, dtype: torch.dtype, how: Resample) -> Tensor:
    """(N, old) in `dtype`: the weights of `old` positions along an axis at `place` (N,) of `size` (N,).

    They are the rows of `resample`'s linear map, PyTorch's. With antialias the filter (Keys, 1981, a = -1/2; or a
    triangle) is stretched if the axis shrinks, and normalised; without, a = -3/4, and the border is repeated.
    """
    mode, antialias = how.removesuffix("_antialias"), how.endswith("_antialias")
    a, border = (-0.5, 0) if antialias else (-0.75, 2)
    scale = old / size.to(dtype)
    centre, width = scale * (place + 0.5), scale.clamp(min=1.0) if antialias else torch.ones_like(scale)
    source = torch.arange(-border, old + border, device=place.device, dtype=dtype) + 0.5
    t = ((source - centre[:, None]) / width[:, None]).abs()
    near, far = ((a + 2) * t - (a + 3)) * t * t + 1, ((a * t - 5 * a) * t + 8 * a) * t - 4 * a
    weights = torch.where(t <= 1, near, torch.where(t < 2, far, 0.0)) if mode == "bicubic" else (1 - t).clamp(min=0.0)
    if border:
        index = torch.arange(-border, old + border, device=place.device).clamp(0, old - 1)
        weights = weights.new_zeros(len(weights), old).index_add(1, index, weights)
    return weights / weights.sum(1, keepdim=True)


def _without_autocast(x: Tensor):
    """A context in which products with x keep their dtype."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def packed_positions(
    kind: str, tables: dict[str, Tensor], images: PackedImages, grid: Grid, prefix: int, how: Resample
) -> tuple[Tensor, Tensor | None]:
    """Positions (n, N, D) of patches of many images, and (n, prefix, D) of prefix tokens, or None.

    tables: those made for `grid`. One product serves all images, however many sizes they have, because `resample` is
    linear in a table and treats columns and rows separately.
    """
    first = next(iter(tables.values()))
    work = torch.promote_types(first.dtype, torch.float32)
    down, across = (axis_weights(*axis, work, how) for axis in zip(*packed_places(images), grid))
    with _without_autocast(first):  # as resample computes
        product = lambda weights, table: (weights @ table.to(work)).to(table.dtype)  # noqa: E731
        if kind in AXES:
            x, y = product(across, tables["pos_embed_x"]), product(down, tables["pos_embed_y"])
            return _joined(kind, x, y), None
        both = (down[:, :, None] * across[:, None]).flatten(1)
        table = tables["pos_embed"]
        return product(both, table[:, prefix:]), table[:, :prefix] if prefix else None


@torch.fx.wrap  # it looks at shapes in Python
def rope_tables(
    kind: str, images: Batch, x: Tensor, patch: Grid, head_dim: int, temperature: float, ref_grid: Grid | None
) -> tuple[Tensor, Tensor]:
    """cos and sin of rotary positions (Su et al., 2021): (N, Dh / 2), of the patches row by row.

    For packed images there is a row for each token of x, and prefix tokens are not rotated. The dtype is that of x, but
    fp32 at least. Attention rotates each of a head's Dh / 2 pairs of columns by one angle: the first Dh / 4 by the
    patch's row, the others by its column, each times frequency i, temperature^(-4i / Dh). "dinov3" (Simeoni et al.,
    2025): rows and columns run from -1 to 1 over the image, whatever its size, times 2 pi. "cat" (timm's word; EVA-02,
    Fang et al., 2023): they count patches, those of ref_grid if it is given.
    """
    packed, dtype = isinstance(images, PackedImages), torch.promote_types(x.dtype, torch.float32)
    if packed:
        places, sizes = packed_places(images)
    else:
        places, sizes = grid_places((images.shape[2] // patch[0], images.shape[3] // patch[1]), images.device)
    band = torch.arange(head_dim // 4, device=images.device, dtype=dtype)
    along = [place.to(dtype) for place in places]
    if kind == "dinov3":
        along = [2 * (place + 0.5) / n - 1 for place, n in zip(along, sizes)]
        period, turn = temperature ** (4 * band / head_dim), 2 * math.pi
        angles = [turn * place[:, None] / period for place in along]
    else:
        if ref_grid is not None:
            along = [place / n * ref for place, n, ref in zip(along, sizes, ref_grid)]
        angles = [place[:, None] * temperature ** (-band / (head_dim // 4)) for place in along]
    angle = torch.cat(angles, -1)
    if packed:
        rows, _ = token_rows(images.offsets, len(angle), (len(x) - len(angle)) // len(images))
        angle = angle.new_zeros(len(x), angle.shape[1]).index_copy(0, rows, angle)
    return angle.cos(), angle.sin()


def sincos_2d(grid: Grid, dim: int, prefix: int = 0) -> Tensor:
    """Fixed positions (1, prefix + h*w, dim) in fp32, zeros for prefix tokens.

    They are those of "Better plain ViT baselines for ImageNet-1k" (Beyer et al., 2022): [sin x, cos x, sin y, cos y] at
    dim/4 frequencies each, from 1 to 1/10,000. dim must be 8 or more and divisible by 4.
    """
    (y, x), _ = grid_places(grid, None)
    omega = 10_000.0 ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4 - 1))
    x, y = x[:, None] * omega, y[:, None] * omega
    table = torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)
    return torch.cat([table.new_zeros(prefix, dim), table])[None].float()


def resample(pos_embed: Tensor, old: Grid, new: Grid, prefix: int = 0, how: Resample = "bicubic_antialias") -> Tensor:
    """Positions (n, prefix + h*w, D) of an `old` (h, w) grid -> those of a `new` one.

    Prefix positions stay as they are, and so does the dtype. The filter is F.interpolate's, computed in fp32 at least
    (the ViT paper, 3.2).
    """
    if tuple(old) == tuple(new):
        return pos_embed
    if pos_embed.shape[1] != prefix + old[0] * old[1]:
        expected = f"{prefix} + {old[0]} x {old[1]} positions"
        raise ValueError(f"resample: pos_embed must have {expected}, got {pos_embed.shape[1]}")
    first, table = pos_embed[:, :prefix], pos_embed[:, prefix:]
    table = table.to(torch.promote_types(table.dtype, torch.float32)).unflatten(1, old)
    # Compiled, torch 2.14 has no derivative of interpolate to sizes that may change; on a GPU it adds in any order.
    compiled = torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled() and table.requires_grad
    if torch.are_deterministic_algorithms_enabled() or compiled:
        places = [(at, torch.full_like(at, len(at))) for at in (torch.arange(n, device=table.device) for n in new)]
        down, across = (axis_weights(*at, n, table.dtype, how) for at, n in zip(places, old))
        with _without_autocast(table):
            table = torch.einsum("yh,xw,nhwd->nyxd", down, across, table)
    else:
        table = table.permute(0, 3, 1, 2)
        mode, antialias = how.removesuffix("_antialias"), how.endswith("_antialias")
        table = F.interpolate(table, size=new, mode=mode, antialias=antialias).permute(0, 2, 3, 1)
    return torch.cat([first, table.flatten(1, 2).to(pos_embed.dtype)], dim=1)


def relative_logits(q: Tensor, table: Tensor) -> Tensor:
    """q (B, N, H, Dh) times the embedding of each pair's offset, table (2n-1, Dh) -> (B, H, N, N).

    The logits are scaled by 1/sqrt(Dh) like attention's. This is the 1-D relative attention of the ViT paper: the last
    n of the N tokens are patches in raster order; for the query at p and the key at k, row p - k + n - 1 of the table
    is an extra key, the same for all heads (Shaw et al., 2018). The N - n prefix tokens have no position in the image:
    where one is query or key, this logit is 0. (So the last layer's table learns only in models that pool patches.)
    """
    patches = (table.shape[0] + 1) // 2
    prefix, place = q.shape[1] - patches, torch.arange(patches, device=q.device)
    keys = table.to(q.dtype)[place[:, None] - place + patches - 1]  # (n, n, Dh)
    return F.pad(torch.einsum("bqhd,qkd->bhqk", q[:, prefix:] * q.shape[-1] ** -0.5, keys), (prefix, 0, prefix, 0))


@torch.fx.wrap  # it looks at shapes in Python
def relative_attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """Attention of q, k, v (B, N, H, Dh) with `relative_logits` as a bias: (B, N, H, Dh).

    PyTorch's attention computes it. The bias depends on q, so it and its gradient are of shape (B, H, N, N).
    """
    bias = relative_logits(q, table)
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=bias).transpose(1, 2)


class RelativeAttention(Attention):
    """Attention with relative positions: `relative` is this layer's table of them, (2n-1, Dh)."""

    unfused_reason = "relative positions"

    def unsupported_reason(self) -> str:
        return self.unfused_reason

    def probabilities(self, x: Tensor, relative: Tensor) -> Tensor:
        q, k, _ = self.heads(x)
        return ref.attention_probabilities(q, k, bias=relative_logits(q, relative))

    def attend(self, x: Tensor, relative: Tensor) -> Tensor:
        return relative_attention(*self.heads(x), relative)


def resample_offsets(table: Tensor, old: Grid, new: Grid, how: Resample = "bicubic_antialias") -> Tensor:
    """Embeddings (L, 2N-1, Dh) of raster-order offsets in an `old` grid -> a `new` one's.

    A grid is (h, w), N = h*w. An offset o stands for the displacements (dy, dx) with o = w*dy + dx, which another grid
    numbers differently: interpolation along o would turn columns into rows. So the table is laid out over all
    displacements, resampled there in 2-D as `resample` does, centre on centre, and gathered again. If several
    displacements share a new offset, it gets their mean, weighted by how many pairs of patches each separates.
    """
    if tuple(old) == tuple(new):
        return table
    (h, w), offsets = old, 2 * old[0] * old[1] - 1
    if table.shape[1] != offsets:
        expected = f"{offsets} offsets for a grid of {h} x {w}"
        raise ValueError(f"resample_offsets: the table must have {expected}, got {table.shape[1]}")
    (before, _), (after, pairs) = (_displacements(grid, table.device) for grid in (old, new))
    plane = resample(table[:, before], tuple(2 * n - 1 for n in old), tuple(2 * n - 1 for n in new), how=how)
    plane = plane.to(torch.promote_types(plane.dtype, torch.float32))
    sums = plane.new_zeros(len(table), 2 * new[0] * new[1] - 1, table.shape[2])
    sums = sums.index_add(1, after, plane * pairs[:, None])
    return (sums / pairs.new_zeros(sums.shape[1]).index_add(0, after, pairs)[:, None]).to(table.dtype)


def _displacements(grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    """The index of each displacement's offset, and how many pairs of patches the displacement separates.

    There are (2h-1)(2w-1) displacements in a grid; indices start at 0.
    """
    dy, dx = (torch.arange(1 - n, n, device=device) for n in grid)
    offsets = dy[:, None] * grid[1] + dx + grid[0] * grid[1] - 1
    pairs = (grid[0] - dy.abs())[:, None] * (grid[1] - dx.abs())
    return offsets.flatten(), pairs.flatten().float()
