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

from vitfast.kernels.attention import launchers as attention
from vitfast.kernels.attention.options import PLAIN, Logits
from vitfast.kernels.configs import tiles
from vitfast.tools.cost.work import total_flops

GENERATIONS = tiles.GENERATIONS
LAYOUTS = ("padded", "one size at a time", "packed")
FLEX_BLOCK = 128  # of torch's block masks, queries and keys


def whole(rows: int, block: int) -> int:
    """Rows of whole blocks."""
    return -(-rows // block) * block


def ended(rows: int, block: int) -> int:
    """Rows of whole blocks and a short last one (attention.last_block)."""
    return rows // block * block + attention.last_block(rows, block)


def _forward(find, layout: str, queries: int, keys: int) -> list[tuple[int | None, int]]:
    """(pairs of one head of one image, products over them); None where a library's tiles are not known."""
    tile = find("attention_fwd")
    if tile.provider == "rows":
        return [(whole(queries, tile["BLOCK_M"]) * sum(attention.key_blocks(keys).values()), 2)]
    if tile.provider != "tiled":
        return [(None, 2)]
    end = ended if layout == "one size at a time" else whole
    return [(whole(queries, tile["BLOCK_M"]) * end(keys, tile["BLOCK_N"]), 2)]


def _backward(find, layout: str, queries: int, keys: int) -> list[tuple[int | None, int]]:
    """The same of each kernel."""
    tile = find("attention_bwd")
    if tile.provider == "head":
        block, rest = tile["BLOCK_N"], keys % tile["BLOCK_N"]
        columns = keys - rest + 16 if keys > block and 0 < rest <= 16 else whole(keys, block)
        return [(whole(queries, tile["BLOCK_M"]) * columns, 5)]
    if tile.provider != "tiled":
        return [(None, 5)]
    dq, dkdv, packed = find("attention_bwd_dq"), find("attention_bwd_dkdv"), layout == "packed"
    end = ended if layout == "one size at a time" else whole
    # every key of the tensors has its program, whether it counts or not
    programs = whole(keys if packed else queries, dkdv["BLOCK_N"])
    rows = whole if packed else ended
    return [
        (whole(queries, dq["BLOCK_M"]) * end(keys, dq["BLOCK_N"]), 3),
        (programs * rows(queries, dkdv["BLOCK_M"]), 4),
    ]


def attention_share(mix: Mix, layout: str, direction: str, like: Tensor | None = None) -> float | None:
    """Of attention in our kernels; None where a library that is not ours runs.

    like: a tensor of the device and dtype (tiles.targeting says of another GPU). On a CPU plain PyTorch pads packed
    images too, and computes every pair.
    """
    if like is None and not clock.GPU:
        return 0.0 if layout == "one size at a time" else full_share(mix)
    like = torch.empty((), dtype=harness.DTYPE, device=clock.DEVICE) if like is None else like
    groups = dict(packed=[(1, n, n) for n in mix.lengths], padded=[(1, mix.longest, n) for n in mix.lengths])
    logits = dict(packed=Logits(offsets=like, longest=mix.longest), padded=Logits(key_lengths=like)).get(layout, PLAIN)
    needed = computed = 0
    for count, queries, keys in groups.get(layout, [(count, n, n) for count, n in mix.uniform]):
        tokens = mix.tokens if layout == "packed" else queries
        q = like.expand(1, tokens, mix.sizes["heads"], mix.sizes["head"])
        find = lambda op, q=q: attention._lookup(op, q, logits)  # noqa: E731
        parts = [] if direction == "backward" else _forward(find, layout, queries, keys)
        parts += [] if direction == "forward" else _backward(find, layout, queries, keys)
        for pairs, products in parts:
            if pairs is None:
                return None
            needed, computed = needed + count * keys * keys * products, computed + count * pairs * products
    return 1 - needed / computed


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


def tables() -> str:
    """The mixes, and the padding of attention, of a training step, and of ours on each GPU."""
    like, ways = torch.empty((), dtype=torch.bfloat16, device="meta"), ("forward", "backward")
    ours = "padded, key_lengths | one size at a time | packed"
    headers = ["mix | images | tokens | shortest | longest | sizes"]
    headers += [f"attention, sm_90 | padded, a mask | flex_attention | {ours}"]
    headers += [f"training step, sm_90 | padded: linear layers | padded, a mask | {ours}"]
    headers += [" | ".join(["packed", *(f"sm_{sm} {way}" for sm in GENERATIONS for way in ways)])]
    found = [[f"| {h} |", "| --- |" + " ---: |" * h.count(" | ")] for h in headers]

    def add(lines: list[str], mix: Mix, cells) -> None:
        shown = (f"{c:,}" if isinstance(c, int) else "-" if c is None else f"{100 * c:.1f} %" for c in cells)
        lines.append(f"| {' | '.join([mix.name, *shown])} |")

    for mix in ON_GPU:
        add(found[0], mix, (len(mix.images), mix.tokens, min(mix.lengths), mix.longest, len(mix.groups)))
        with tiles.targeting(90):
            shares = {layout: attention_share(mix, layout, "both", like) for layout in LAYOUTS}
        add(found[1], mix, (full_share(mix), flex_share(mix), *shares.values()))
        linear, masked = token_share(mix, "padded"), model_share(mix, token_share(mix, "padded"), full_share(mix))
        steps = [model_share(mix, token_share(mix, layout), shares[layout]) for layout in LAYOUTS]
        add(found[2], mix, (linear, masked, *steps))
        row = []
        for generation in GENERATIONS:
            with tiles.targeting(generation):
                row += [attention_share(mix, "packed", way, like) for way in ways]
        add(found[3], mix, row)
    return "\n\n".join("\n".join(lines) for lines in found)


if __name__ == "__main__":
    print(tables())
