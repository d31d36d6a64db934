"""The share of a batch's work that is done for padding, by the tiles that are launched.

    python bench/padding.py     # prints the tables of docs/kernels/packed.md

The work of a linear layer is its tokens; that of attention is pairs of a query and a key, times the matrix products
over them: two forward, five backward, or seven in two kernels. What backward computes again is no padding. Not counted:
the last tile of a linear layer, of all tokens together.

Attention's layouts: "packed" (image after image, padded to whole tiles each), "padded" (to the longest image, its keys
ended by key_lengths: blocks of keys that lie behind are not computed forward or for dQ, queries are) and "one size at a
time" (images of one size together, whose keys end in a short block).
"""

import clock
import harness
import torch
from mixes import ON_GPU, Mix
from torch import Tensor

from vitfast.cost.work import total_flops
from vitfast.kernels import attention, tiles
from vitfast.kernels.logits import PLAIN, Logits

GENERATIONS = tiles.GENERATIONS
FLEX_BLOCK = 128  # of torch's block masks, queries and keys
Square = tuple[int, int, float]  # (pairs that count, pairs that are computed, products over them)


def whole(rows: int, block: int) -> int:
    """Rows of whole blocks."""
    return -(-rows // block) * block


def ended(rows: int, block: int) -> int:
    """Rows of whole blocks and a short last one (attention.last_block)."""
    return rows // block * block + attention.last_block(rows, block)


def _forward(tile: tiles.Tile, layout: str, queries: int, keys: int) -> int | None:
    """Pairs of one head of one image; None where a library's tiles are not known."""
    if tile.provider == "rows":
        return whole(queries, tile["BLOCK_M"]) * sum(attention.key_blocks(keys).values())
    if tile.provider != "tiled":
        return None
    block = tile["BLOCK_N"]
    return whole(queries, tile["BLOCK_M"]) * (
        ended(keys, block) if layout == "one size at a time" else whole(keys, block)
    )


def _backward(tile: tiles.Tile, find, layout: str, queries: int, keys: int) -> list[tuple[int, int]] | None:
    """(pairs, products over them) of each kernel, or None as in _forward."""
    if tile.provider == "head":
        block, rest = tile["BLOCK_N"], keys % tile["BLOCK_N"]
        columns = keys - rest + 16 if keys > block and 0 < rest <= 16 else whole(keys, block)
        return [(whole(queries, tile["BLOCK_M"]) * columns, 5)]
    if tile.provider != "tiled":
        return None
    dq, dkdv, one_size = find("attention_bwd_dq"), find("attention_bwd_dkdv"), layout == "one size at a time"
    end = ended if one_size else whole
    rows = whole if layout == "packed" else ended
    return [
        (whole(queries, dq["BLOCK_M"]) * end(keys, dq["BLOCK_N"]), 3),
        # every key of the tensors has its program, whether it counts or not
        (whole(keys if layout == "packed" else queries, dkdv["BLOCK_N"]) * rows(queries, dkdv["BLOCK_M"]), 4),
    ]


def squares(mix: Mix, layout: str, direction: str, like: Tensor) -> list[Square] | None:
    """The pairs of one head of all images, in our kernels; None where a library that is not ours runs.

    like: a tensor of the device and dtype (tiles.targeting says of another GPU).
    """
    groups = dict(
        packed=[(1, n, n) for n in mix.lengths],
        padded=[(1, mix.longest, n) for n in mix.lengths],
    ).get(layout, [(count, n, n) for count, n in mix.uniform])
    logits = dict(packed=Logits(offsets=like, longest=mix.longest), padded=Logits(key_lengths=like)).get(layout, PLAIN)
    found = []
    for count, queries, keys in groups:
        tokens = mix.tokens if layout == "packed" else queries
        q = like.expand(1, tokens, mix.sizes["heads"], mix.sizes["head"])
        find = lambda op, q=q: attention._lookup(op, q, logits)  # noqa: E731
        parts = [] if direction == "backward" else [(_forward(find("attention_fwd"), layout, queries, keys), 2)]
        if direction != "forward":
            parts += _backward(find("attention_bwd"), find, layout, queries, keys) or [(None, 5)]
        if any(pairs is None for pairs, _ in parts):
            return None
        found += [(count * keys * keys, count * pairs, products) for pairs, products in parts]
    return found


def share(found: list[Square] | None) -> float | None:
    """The share of what is computed that does not count."""
    if found is None:
        return None
    needed, computed = (sum(square[i] * square[2] for square in found) for i in (0, 1))
    return 1 - needed / computed


def attention_share(mix: Mix, layout: str, direction: str, like: Tensor | None = None) -> float | None:
    """Of attention in our kernels; plain PyTorch pads packed images too, and computes every pair."""
    if like is None:
        if not clock.GPU:
            return 0.0 if layout == "one size at a time" else full_share(mix)
        like = torch.empty((), dtype=harness.DTYPE, device=clock.DEVICE)
    return share(squares(mix, layout, direction, like))


def token_share(mix: Mix, layout: str) -> float:
    """Of the linear layers."""
    return 1 - mix.tokens / (len(mix.lengths) * mix.longest) if layout == "padded" else 0.0


def full_share(mix: Mix) -> float:
    """Of attention that computes every pair of the padded tensors, as with a mask."""
    return 1 - mix.squares / (len(mix.lengths) * mix.longest**2)


def flex_share(mix: Mix, block: int = FLEX_BLOCK) -> float:
    """Of attention by a block mask: a block in which several images lie is computed once."""
    pairs, start = set(), 0
    for n in mix.lengths:
        blocks = range(start // block, (start + n - 1) // block + 1)
        pairs |= {(i, j) for i in blocks for j in blocks}
        start += n
    return 1 - mix.squares / (len(pairs) * block**2)


def model_share(mix: Mix, linear: float, of_attention: float | None) -> float | None:
    """Of a training step, by the FLOPs that count in linear layers and in attention."""
    if of_attention is None:
        return None
    first = total_flops(mix.linear_work(2, 1000).of("both"))
    second = total_flops(mix.attention_work(2).of("both")) * mix.sizes["depth"]
    return 1 - (first + second) / (first / (1 - linear) + second / (1 - of_attention))


# ---- the tables of the page


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


LAYOUTS = ("padded", "one size at a time", "packed")


def tables() -> str:
    """The mixes, and the padding of attention, of a training step, and of ours on each GPU."""
    like = torch.empty((), dtype=torch.bfloat16, device="meta")
    mixes, of_attention, of_step, by_gpu = [], [], [], []
    for mix in ON_GPU:
        numbers = len(mix.images), mix.tokens, min(mix.lengths), mix.longest, len(mix.groups)
        mixes.append([mix.name, *(f"{n:,}" for n in numbers)])
        with tiles.targeting(90):
            shares = {layout: attention_share(mix, layout, "both", like) for layout in LAYOUTS}
        linear = token_share(mix, "padded")
        of_attention.append([mix.name, *map(_percent, (full_share(mix), flex_share(mix), *shares.values()))])
        steps = [model_share(mix, token_share(mix, layout), shares[layout]) for layout in LAYOUTS]
        of_step.append([mix.name, _percent(linear), _percent(model_share(mix, linear, full_share(mix)))])
        of_step[-1] += map(_percent, steps)
        row = [mix.name]
        for generation in GENERATIONS:
            with tiles.targeting(generation):
                row += [_percent(attention_share(mix, "packed", way, like)) for way in ("forward", "backward")]
        by_gpu.append(row)
    ours = ["padded, key_lengths", "one size at a time", "packed"]
    found = (
        _table(["mix", "images", "tokens", "shortest", "longest", "sizes"], mixes),
        _table(["attention, sm_90", "padded, a mask", "flex_attention", *ours], of_attention),
        _table(["training step, sm_90", "padded: linear layers", "padded, a mask", *ours], of_step),
        _table(["packed", *(f"sm_{sm} {way}" for sm in GENERATIONS for way in ("forward", "backward"))], by_gpu),
    )
    return "\n".join(found)


if __name__ == "__main__":
    print(tables(), end="")
