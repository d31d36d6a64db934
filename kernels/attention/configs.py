"""Launch configurations of attention, as (warps, stages, BLOCK_M, BLOCK_N) where nothing is named.

A few were tried from large to small, and each is the first that compiled without spills and with every product on the
tensor cores: in Triton 3.9 for every case in tests/codegen.csv, in 3.6 and 3.8 for the cases that were tried. Only
those whose comments say so were timed, on an NVIDIA H100 in bf16 with a cold L2: 197 tokens with 12 heads of 64 (batch
256), 577 with 12 of 64 and 257 with 16 of 80 (batch 64). Options cost registers: rotary positions hold a second half of
each head and its tables, masks a block of numbers beside the logits, and padded heads the mask of their columns.
"""

import re
from collections.abc import Callable
from dataclasses import replace

from ..tiles import KernelConfig, config, configures, first

Tile = tuple[int, int, int, int]


class Case:
    """A shape class (attention_class in launchers.py) on a GPU, in words."""

    def __init__(self, shape: str, bits: str, sm: int):
        head, mask, self.tokens, self.options = re.fullmatch(r"d(\d+)([nm])(\d*|long)([rfbkps]*)", shape).groups()
        self.head, self.padded, self.fp32, self.sm = int(head), mask == "m", bits == "32", sm
        self.sync = sm in (80, 89, 120)  # their products run beside no other instructions, unlike wgmma
        self.rope, self.pairs = self.options[:1] in ("r", "f"), self.options[:1] == "r"  # interleaved pairs
        self.masked, self.packed = self.options[-1:] in ("b", "k"), self.options == "p"
        self.plain = self.options in ("", "s")  # "s": few samples
        self.medium, self.large = self.head in (80, 96), self.head == 128
        self.narrow = self.pairs and self.large and self.padded  # heads of 104 to 120, which leave the fewest registers

    def of_heads(self, small: Tile, medium: Tile, large: Tile) -> Tile:
        """Chooses the tile for heads of up to 64 columns, of up to 96, or of 128."""
        return large if self.large else medium if self.medium else small


def _config(tile: Callable[[Case], Tile], case: Case, provider: str = "triton") -> KernelConfig:
    warps, stages, rows, keys = (8, 1, 32, 32) if case.fp32 else tile(case)
    return config(warps, stages, provider, BLOCK_M=rows, BLOCK_N=keys)


@configures("attention_fwd")
def _attention_fwd(shape: str, bits: str, sm: int) -> list[KernelConfig]:
    """One program holds up to 256 keys of a head: it rescales nothing and reads K and V once."""
    c = Case(shape, bits, sm)
    tiled = _config(_forward, c, "tiled")
    if c.options == "s" and not c.fp32 and not c.large:  # compiled, not timed
        blocks = config(4, 3, "tiled", BLOCK_M=32, BLOCK_N=64)
        whole = config(4, 1, "single_pass", BLOCK_M=16)
        return [whole, blocks, tiled] if c.tokens in ("64", "128", "256") and not c.medium else [blocks, tiled]
    many_registers = c.large or c.medium and c.options == "f"
    if c.fp32 or c.sync or c.masked or c.tokens not in ("64", "128", "256") or sm == 100 and many_registers:
        return [tiled]
    eight = c.rope and (sm == 100 or c.head > 64) or sm == 100 and c.medium and c.padded
    whole = config(8 if eight else 4, 1, "single_pass", BLOCK_M=64)
    # Not timed. For 64 queries of 197 tokens, heads of 64, Triton 3.6 and 3.8 make 858 instructions in place of 884,
    # 3.9 867 in place of 895, with 135 to 155 registers in place of 166 to 168. No size was worse.
    boxes = sm == 90 and c.plain and c.head in (16, 32, 64, 128)
    return [*([replace(whole, provider="single_pass_tma")] if boxes else []), whole, tiled]


def _forward(c: Case) -> Tile:
    return first(
        (c.sync and (c.plain and not c.large or c.sm != 120 and c.options == "fp" and c.head <= 64), (4, 2, 64, 32)),
        (c.sm == 120 and c.medium and c.rope and not c.masked, (8, 1, 64, 32)),
        (c.sync, (8, 1, 32, 32) if c.large and (c.rope or c.masked) else (8, 2, 64, 32)),
        # A bias beside 64 x 64 logits leaves wgmma too few registers in small heads; the common 64 has another tile.
        (c.masked and (c.medium or c.head == 64 and not c.padded), (8, 2, 128, 64)),
        (c.masked and c.sm == 90, (8, 2, 128, 16) if c.large else (8, 2, 32, 32)),
        (c.masked, (8, 1, 64, 32)),
        (c.sm == 100 and c.medium and c.rope, (4, 3, 64, 64) if c.options == "rp" else (8, 2, 64, 64)),
        (c.rope, (8, 3 if c.head <= 64 else 2, 128, 32 if c.sm == 90 and c.narrow else 64)),
        (c.tokens == "long" or c.sm == 100 and c.plain and c.tokens != "320", (8, 3, 128, 64)),
        # 257 tokens, heads of 80: 112 us, with 3 stages 118, with 128 queries 136. Most packed samples are short.
        (True, (4, 2 if c.sm == 90 and c.tokens == "320" and c.head == 80 else 3, 64, 64)),
    )


@configures("attention_bwd")
def _attention_bwd(shape: str, bits: str, sm: int) -> list[KernelConfig]:
    """One program a head where all of it fits (up to 208 tokens): 5 products in place of 7.

    197 tokens: 393 us, with 2 stages 452, with 4 402, two kernels 510; with 16 heads and batch 128 271 and 373. Other
    generations, and heads of less than 64, were not timed; those that are padded spill above 128 tokens.
    """
    tiled, hopper = config(provider="tiled"), sm == 90 and bits == "16"
    if not hopper or shape not in ("d64n64", "d64m64", "d64n128", "d64m128", "d64n256"):
        return [tiled]
    # Gluon: 14 full waits in a row in place of 84 (counted; it has run on no GPU). It goes unless a run is faster.
    roles = [config(4, 1, "specialized")] if shape == "d64n256" else []
    return [config(4, 1, "resident", BLOCK_N=32, STAGES=3), tiled, *roles]


def _dq(c: Case) -> Tile:
    return first(
        (c.sync and c.packed, (8, 2, 32, 32) if c.large else (8, 2, 64, 32)),
        (c.sync and c.plain, c.of_heads((4, 2, 64, 32), (8, 2, 64, 32), (4, 1, 32, 32))),
        (c.sync and c.narrow or c.sm == 80 and c.rope and c.medium, (8, 1, 16 if c.sm == 120 else 32, 32)),
        (c.sync, (8, 1, 64, 32) if c.head <= 64 else (8, 2, 32, 32)),
        (c.masked and c.sm == 90, c.of_heads((8, 2, 128, 64), (8, 2, 64, 64), (8, 2, 128, 32))),
        (c.masked, (8, 1, 64, 32) if c.large else (8, 2, 128, 32)),
        (c.sm == 100 and c.options == "fp" and c.head <= 64, (4, 2, 64, 64)),
        (c.pairs and c.padded and c.head in (32, 64), (8, 2, 64, 64)),
        (c.narrow, (8, 1, 64, 32)),
        (c.sm == 100 and c.rope, (8, 2, 64, 32) if c.large and not c.pairs else (8, 2, 128, 64)),
        (c.rope, c.of_heads((8, 2, 128, 64), (8, 2, 128, 32), (8, 2, 64, 64))),
        (c.packed, (4, 3 if c.sm == 100 and c.medium else 2, 64, 64)),
        # Many small programs hide the waits for loads. 577 tokens: 282 us, 64 x 64 296, 8 warps 128 x 64 326. 197: 245.
        # 257 tokens, heads of 80: 195, with 64 x 64 201. Heads of 32, 48 and 96 were not timed.
        (c.sm == 90 and (c.head == 64 or c.head in (32, 48, 80, 96) and c.tokens != "long"), (4, 3, 64, 32)),
        (c.tokens in ("64", "320"), (8 if c.sm == 100 and c.tokens == "64" and c.head == 64 else 4, 2, 64, 64)),
        (True, (8, 2, 128, 64)),
    )


def _dkdv(c: Case) -> Tile:
    return first(
        (c.sync and c.packed, c.of_heads((8, 2, 32, 64), (8, 2, 16, 64), (8, 1, 32, 32))),
        (c.sync and c.plain, c.of_heads((4, 2, 32, 64), (8, 1, 16, 64), (8, 1, 32, 32))),
        (c.sm == 120 and c.rope and (c.head == 16 or c.medium), (8, 2, 16, 32) if c.medium else (8, 1, 32, 64)),
        (c.sync, c.of_heads((8, 1, 16, 64), (8, 1, 32, 32), (8, 1, 32, 16 if c.rope else 32))),
        (c.masked and c.sm == 90 and c.head == 80 and c.padded, (4, 1, 32, 64)),
        (c.masked and c.sm == 90, (8, 2, 32, 128) if c.medium else (8, 2, 32, 64)),
        (c.masked, c.of_heads((8, 2, 32, 128), (8, 1, 16, 64), (8, 2, 32, 64))),
        (c.sm == 100 and c.rope and c.head == 16 and "p" in c.options, (8, 2, 32, 64)),
        (c.padded and c.head in (32, 64) and (c.pairs or "p" in c.options), (8, 2, 32, 64)),
        (c.narrow, (8, 1, 16, 64)),
        (c.rope and c.head <= 64, (8, 2, 64, 128)),
        (c.rope, (8, 2 if c.sm == 90 or c.pairs and c.padded else 1, 32, 64)),
        (c.packed, (8, 2, 32, 64) if c.sm == 90 and c.head > 64 else (4, 2 if c.large else 3, 64, 64)),
        # 577 tokens: 422 us, 32 x 64 426, 8 warps 64 x 128 570. 197: 279, with 2 stages 320, 64 x 64 433. 257 tokens,
        # heads of 80: 241, 64 x 64 245, 8 warps 64 x 128 336. Heads of 32, 48 and 96 were not timed.
        (c.sm == 90 and c.head == 64, (4, 3, 64 if c.tokens == "long" else 32, 64)),
        (c.sm == 90 and c.head in (32, 48, 80, 96) and c.tokens != "long", (4, 2, 32, 64)),
        (c.sm == 90 or c.large, (8, 2, 32 if c.sm == 90 and c.large else 64, 128)),
        (True, (4, 2 if c.head == 48 and c.padded else 3, 64, 64)),
    )


def _bias(c: Case) -> Tile:
    small = c.sm == 90 and c.head == 16 or c.sm == 120 and c.large
    wide = c.sm == 100 or c.sm == 90 and not c.large or c.sm == 120 and c.head in (16, 32)
    return first((small, (8, 1, 32, 32)), (wide, (8, 1, 64, 64)), (True, (8, 1, 64, 32)))


for _name, _tile in dict(dq=_dq, dkdv=_dkdv, bias=_bias).items():
    configures(f"attention_bwd_{_name}")(lambda *case, tile=_tile: [_config(tile, Case(*case))])
# GROUPS: the number of groups of samples, whose partial sums are added up afterwards.
configures("rope_bwd")(lambda shape, bits, sm: [config(8 if sm == 100 else 4, 1, BLOCK_M=16, GROUPS=8)])
