"""Launch configurations of attention, as tables: the first row that matches is taken.

A row has GPU generations, options, and configurations for heads of up to 64 columns, of up to 96 and of 128, or one for
the heads that it names. Each is (warps, stages, BLOCK_M, BLOCK_N): of a few, tried from large to small, the first that
compiled without spills and with every product on the tensor cores: in Triton 3.9 for every case of its cell in
tests/codegen.csv, in 3.6 and 3.8 for the cases that were tried. Only those were timed whose comments say so, on an
NVIDIA H100 in bf16 with a cold L2: 197 tokens with 12 heads of 64 (batch 256), 577 with 12 of 64 and 257 with 16 of 80
(batch 64). Options cost registers: rotary positions hold a second half of each head and its tables, masks a block of
numbers beside the logits, and padded heads the mask of their columns ("m": 104 to 120 with interleaved pairs is the
narrowest).

Shape classes (attention_class in attention/launchers.py): the padded head size, "n", or "m" where the head is padded;
tokens up to 64, 128, 256, 320 or "long"; "r" or "f" for rotary positions, "b" for a bias, "k" for lengths of keys; for
packed samples "p" and no tokens. Providers: the paths of attention/launchers.py.
"""

from collections.abc import Iterator

from .tiles import Rule, config

# GPU generations by the instruction of their products; the last two run it beside other instructions.
MMA_SYNC, WGMMA, TCGEN05 = (80, 89, 120), (90,), (100,)
ASYNC = WGMMA + TCGEN05
_SHORT = "d[3489][0268][mn][1-6]*"  # heads of 32, 48, 80 and 96, up to 320 tokens
MASKED, ROTARY, PACKED, PLAIN, ANY = "*[bk]", "*[rf]*", "p", "*[0-9g]", "*"  # ends of shape classes
Cell = tuple[int, int, int, int]


def _row(sm: tuple[int, ...], options: str, *cells: Cell, provider: str = "triton", heads: str = "") -> Iterator[Rule]:
    """The rules of a row: a cell for each class of heads, or one for all, or for `heads` alone."""
    classes = ("d[1-6]?[mn]", "d[89]?[mn]", "d128[mn]") if len(cells) > 1 else (heads or "d*[mn]",)
    for of_heads, (warps, stages, m, n) in zip(classes, cells):
        yield Rule(config(warps, stages, provider, BLOCK_M=m, BLOCK_N=n), sm, shape=of_heads + options)


def _forward(sm: tuple[int, ...], options: str, *cells: Cell, heads: str = "") -> Iterator[Rule]:
    return _row(sm, options, *cells, provider="tiled", heads=heads)


RULES: dict[str, tuple[Rule, ...]] = {
    "attention_fwd": (
        Rule(config(8, 1, "tiled", BLOCK_M=32, BLOCK_N=32), bits="32"),
        *_forward(MMA_SYNC, PLAIN, (4, 2, 64, 32), (4, 2, 64, 32), (8, 2, 64, 32)),
        *_forward(MMA_SYNC, MASKED, (8, 2, 64, 32), (8, 2, 64, 32), (8, 1, 32, 32)),
        *_forward((80, 89), "fp", (4, 2, 64, 32), heads="d[1-6]?[mn]"),
        *_forward((120,), ROTARY, (8, 1, 64, 32), heads="d[89]?[mn]"),
        *_forward(MMA_SYNC, ROTARY, (8, 2, 64, 32), (8, 2, 64, 32), (8, 1, 32, 32)),
        *_forward(MMA_SYNC, PACKED, (8, 2, 64, 32)),
        # A bias beside 64 x 64 logits leaves wgmma too few registers at small heads; 64, the common head, is apart.
        *_forward(ASYNC, MASKED, (8, 2, 128, 64), heads="d64n"),
        *_forward(WGMMA, MASKED, (8, 2, 32, 32), (8, 2, 128, 64), (8, 2, 128, 16)),
        *_forward(TCGEN05, MASKED, (8, 1, 64, 32), (8, 2, 128, 64), (8, 1, 64, 32)),
        # Up to 256 tokens all keys of a head fit one program: no rescaling, and K and V are read once.
        Rule(config(4, 1, "single_pass", BLOCK_M=64), WGMMA, shape="d[1-6]?[mn][126]*[rf]"),
        Rule(config(8, 1, "single_pass", BLOCK_M=64), WGMMA, shape="*[mn][126]*[rf]"),
        Rule(config(8, 1, "single_pass", BLOCK_M=64), TCGEN05, shape="d[1-6]?[mn][126]*[rf] d[89]?[mn][126]*r"),
        *_forward(WGMMA, "*r*", (8, 2, 128, 32), heads="d128m"),
        *_forward(TCGEN05, "rp", (4, 3, 64, 64), heads="d[89]?[mn]"),
        *_forward(WGMMA, ROTARY, (8, 3, 128, 64), (8, 2, 128, 64), (8, 2, 128, 64)),
        *_forward(TCGEN05, ROTARY, (8, 3, 128, 64), (8, 2, 64, 64), (8, 2, 128, 64)),
        # Most packed samples are short: blocks of 64 rows.
        *_forward(ASYNC, PACKED, (4, 3, 64, 64)),
        *_forward(ASYNC, "long", (8, 3, 128, 64)),
        # Of 257 tokens, heads of 80: 112 us, with 3 stages 118, 128 queries 136.
        *_forward(WGMMA, "320", (4, 2, 64, 64), heads="d80[mn]"),
        *_forward(ASYNC, "320", (4, 3, 64, 64)),
        *_forward(TCGEN05, ANY, (8, 3, 128, 64), heads="d128?"),
        Rule(config(8, 1, "single_pass", BLOCK_M=64), TCGEN05, shape="d[89]?m*"),
        # Not timed. For 64 queries of 197 tokens, heads of 64, Triton 3.6 and 3.8 make 858 instructions in place of
        # 884, 3.9 867 in place of 895, with 135 to 155 registers in place of 166 to 168. No size was worse.
        Rule(config(4, 1, "single_pass_tma", BLOCK_M=64), WGMMA, "16", "d16?* d32?* d64?* d128?*"),
        Rule(config(4, 1, "single_pass", BLOCK_M=64)),
    ),
    # One program a head where all of it fits (up to 208 tokens): 5 products in place of 7. 197 tokens: 393 us, with 2
    # stages 452, with 4 402, two kernels 510; with 16 heads and batch 128 271 and 373. Other generations, and heads of
    # less than 64, were not timed; those that are padded spill above 128 tokens.
    "attention_bwd": (
        Rule(config(4, 1, "resident", BLOCK_N=32, STAGES=3), WGMMA, "16", "d64?64 d64?128 d64n256"),
        Rule(config(provider="tiled")),
    ),
    "attention_bwd_dq": (
        Rule(config(8, 1, BLOCK_M=32, BLOCK_N=32), bits="32"),
        *_row(MMA_SYNC, PACKED, (8, 2, 64, 32), (8, 2, 64, 32), (8, 2, 32, 32)),
        *_row(MMA_SYNC, PLAIN, (4, 2, 64, 32), (8, 2, 64, 32), (4, 1, 32, 32)),
        *_row((120,), "*r*", (8, 1, 16, 32), heads="d128m"),
        *_row(MMA_SYNC, "*r*", (8, 1, 32, 32), heads="d128m"),
        *_row((80,), ROTARY, (8, 1, 32, 32), heads="d[89]?[mn]"),
        *_row(MMA_SYNC, ANY, (8, 1, 64, 32), (8, 2, 32, 32), (8, 2, 32, 32)),
        *_row(WGMMA, MASKED, (8, 2, 128, 64), (8, 2, 64, 64), (8, 2, 128, 32)),
        *_row(TCGEN05, MASKED, (8, 2, 128, 32), (8, 2, 128, 32), (8, 1, 64, 32)),
        *_row(TCGEN05, "fp", (4, 2, 64, 64), heads="d[1-6]?[mn]"),
        *_row(ASYNC, "*r*", (8, 2, 64, 64), heads="d[36][24]m"),
        *_row(ASYNC, "*r*", (8, 1, 64, 32), heads="d128m"),
        *_row(TCGEN05, "*f*", (8, 2, 64, 32), heads="d128?"),
        *_row(WGMMA, ROTARY, (8, 2, 128, 64), (8, 2, 128, 32), (8, 2, 64, 64)),
        *_row(TCGEN05, ROTARY, (8, 2, 128, 64)),
        *_row(WGMMA, PACKED, (4, 2, 64, 64)),
        *_row(TCGEN05, PACKED, (4, 2, 64, 64), (4, 3, 64, 64), (4, 2, 64, 64)),
        *_row(TCGEN05, "64", (8, 2, 64, 64), heads="d64?"),
        # Many small programs hide the waits for loads. 577 tokens: 282 us, 64 x 64 296, 8 warps 128 x 64 326. 197: 245.
        # 257 tokens, heads of 80: 195, with 64 x 64 201. Heads of 32, 48 and 96 were not timed.
        Rule(config(4, 3, BLOCK_M=64, BLOCK_N=32), WGMMA, shape=f"d64[mn]* {_SHORT}"),
        Rule(config(4, 2, BLOCK_M=64, BLOCK_N=64), shape="*320 *64"),
        Rule(config(8, 2, BLOCK_M=128, BLOCK_N=64)),
    ),
    "attention_bwd_dkdv": (
        Rule(config(8, 1, BLOCK_M=32, BLOCK_N=32), bits="32"),
        *_row(MMA_SYNC, PACKED, (8, 2, 32, 64), (8, 2, 16, 64), (8, 1, 32, 32)),
        *_row(MMA_SYNC, PLAIN, (4, 2, 32, 64), (8, 1, 16, 64), (8, 1, 32, 32)),
        *_row((120,), ROTARY, (8, 1, 32, 64), heads="d16?"),
        *_row((120,), ROTARY, (8, 2, 16, 32), heads="d[89]?[mn]"),
        *_row(MMA_SYNC, ROTARY, (8, 1, 32, 16), heads="d128?"),
        *_row(MMA_SYNC, ANY, (8, 1, 16, 64), (8, 1, 32, 32), (8, 1, 32, 32)),
        *_row(WGMMA, MASKED, (4, 1, 32, 64), heads="d80m"),
        *_row(WGMMA, MASKED, (8, 2, 32, 64), (8, 2, 32, 128), (8, 2, 32, 64)),
        *_row(TCGEN05, "[rf]p", (8, 2, 32, 64), heads="d16?"),
        *_row(TCGEN05, MASKED, (8, 2, 32, 128), (8, 1, 16, 64), (8, 2, 32, 64)),
        *_row(ASYNC, "*[rp]*", (8, 2, 32, 64), heads="d[36][24]m"),
        *_row(ASYNC, "*r*", (8, 1, 16, 64), heads="d128m"),
        *_row(TCGEN05, "*r*", (8, 2, 32, 64), heads="d[89]?m"),
        *_row(WGMMA, ROTARY, (8, 2, 64, 128), (8, 2, 32, 64), (8, 2, 32, 64)),
        *_row(TCGEN05, ROTARY, (8, 2, 64, 128), (8, 1, 32, 64), (8, 1, 32, 64)),
        *_row(WGMMA, PACKED, (4, 3, 64, 64), (8, 2, 32, 64), (8, 2, 32, 64)),
        *_row(TCGEN05, PACKED, (4, 3, 64, 64), (4, 3, 64, 64), (4, 2, 64, 64)),
        # 577 tokens: 422 us, 32 x 64 426, 8 warps 64 x 128 570. 197: 279, with 2 stages 320, 64 x 64 433. 257 tokens,
        # heads of 80: 241, 64 x 64 245, 8 warps 64 x 128 336. Heads of 32, 48 and 96 were not timed.
        Rule(config(4, 3, BLOCK_M=64, BLOCK_N=64), WGMMA, shape="d64[mn]long"),
        Rule(config(4, 3, BLOCK_M=32, BLOCK_N=64), WGMMA, shape="d64[mn]*"),
        Rule(config(4, 2, BLOCK_M=32, BLOCK_N=64), WGMMA, shape=_SHORT),
        *_row(WGMMA, ANY, (8, 2, 64, 128), (8, 2, 64, 128), (8, 2, 32, 128)),
        *_row(TCGEN05, ANY, (4, 2, 64, 64), heads="d48m"),
        *_row(TCGEN05, ANY, (4, 3, 64, 64), (4, 3, 64, 64), (8, 2, 64, 128)),
        Rule(config(4, 2, BLOCK_M=32, BLOCK_N=64)),
    ),
    "attention_bwd_bias": (
        Rule(config(8, 1, BLOCK_M=32, BLOCK_N=32), bits="32"),
        Rule(config(8, 1, BLOCK_M=32, BLOCK_N=32), sm=(90,), shape="d16[mn]*"),
        Rule(config(8, 1, BLOCK_M=64, BLOCK_N=32), sm=(90,), shape="d128*"),
        Rule(config(8, 1, BLOCK_M=64, BLOCK_N=64), sm=(90, 100)),
        Rule(config(8, 1, BLOCK_M=32, BLOCK_N=32), sm=(120,), shape="d128*"),
        Rule(config(8, 1, BLOCK_M=64, BLOCK_N=64), sm=(120,), shape="d[13][26][mn]*"),
        Rule(config(8, 1, BLOCK_M=64, BLOCK_N=32)),
    ),
    # GROUPS: of samples, whose shares are added up afterwards.
    "rope_bwd": (
        Rule(config(8, 1, BLOCK_M=16, GROUPS=8), sm=(100,)),
        Rule(config(4, 1, BLOCK_M=16, GROUPS=8)),
    ),
}

CANDIDATES: dict[str, tuple[Rule, ...]] = {
    "attention_fwd": (
        Rule(config(4, 3, "tiled", BLOCK_M=64, BLOCK_N=64), sm=(90,), bits="16", shape="d*[0-9]n*"),
        Rule(config(8, 3, "tiled", BLOCK_M=128, BLOCK_N=64), sm=(100,), bits="16"),
    ),
    # In Gluon: 14 full waits in a row in place of 84 (counted, run on no GPU). It leaves unless one says that it wins.
    "attention_bwd": (Rule(config(provider="tiled")), Rule(config(4, 1, "specialized"), WGMMA, "16", "d64n256")),
}
