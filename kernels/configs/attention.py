"""Launch configurations of attention, as tables: the first row that matches is taken.

A row has GPU generations, options, and configurations for heads of up to 64 columns, of up to 96 and of 128, or one for
the heads that it names. Each is (warps, stages, BLOCK_M, BLOCK_N): of a few, tried from large to small, the first that
compiled without spills and with every product on the tensor cores: in Triton 3.9 for every case of its cell in
tests/codegen.csv, in 3.6 and 3.8 for the cases that were tried. None was timed but those of HEADS_64. Options cost
registers: rotary positions hold a second half of each head and its tables, masks a block of numbers beside the logits,
and padded heads the mask of their columns ("m": 104 to 120 with interleaved pairs is the narrowest).

Shape classes (attention_class in attention/launchers.py): the padded head size, "n", or "m" where the head is padded;
tokens up to 64, 128, 256, 320 or "long"; "r" or "f" for rotary positions, "b" for a bias, "k" for lengths of keys; for
packed samples "p" and no tokens. Providers: the paths of attention/launchers.py.
"""

from collections.abc import Iterator

from .tiles import ATTENTION_LIBRARIES, Rule, config

# GPU generations by the instruction of their products; the last two run it beside other instructions.
MMA_SYNC, WGMMA, TCGEN05 = (80, 89, 120), (90,), (100,)
ASYNC = WGMMA + TCGEN05
HEADS_64 = "d64n[1-6]*[0-9]"  # heads of 64, up to 320 tokens, no options
MASKED, ROTARY, PACKED, PLAIN, ANY = "*[bk]", "*[rf]*", "p", "*[0-9g]", "*"  # ends of shape classes
Cell = tuple[int, int, int, int]


def _row(sm: tuple[int, ...], options: str, *cells: Cell, provider: str = "triton", heads: str = "") -> Iterator[Rule]:
    """The rules of a row: a cell for each class of heads, or one for all, or for `heads` alone."""
    classes = ("d[1-6]?[mn]", "d[89]?[mn]", "d128[mn]") if len(cells) > 1 else (heads or "d*[mn]",)
    for of_heads, (warps, stages, m, n) in zip(classes, cells):
        yield Rule(config(warps, stages, provider, BLOCK_M=m, BLOCK_N=n), sm, shape=of_heads + options)


def _per_head(
    sm: int,
    shape: str,
    programs: int,
    maxnreg: int = 0,
    exact: int = 0,
    stages: int = 2,
    warps: int = 4,
    keys: int = 64,
    variant: str = "",
) -> Rule:
    """Attention's backward in one program a head, `programs` of them on a multiprocessor."""
    blocks = dict(BLOCK_M=64, BLOCK_N=keys, STAGES=stages, PER_SM=programs, EXACT=exact)
    return Rule(config(warps, 1, "per_head", maxnreg, **blocks), (sm,), "16", shape, variant)


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
        *_forward(ASYNC, "320", (4, 3, 64, 64)),
        *_forward(TCGEN05, ANY, (8, 3, 128, 64), heads="d128?"),
        Rule(config(8, 1, "single_pass", BLOCK_M=64), TCGEN05, shape="d[89]?m*"),
        Rule(config(4, 1, "single_pass", BLOCK_M=64)),
    ),
    # One program a head where Q, K, V and dO of a head and its sums fit: 5 products in place of 7. Three of them on a
    # multiprocessor wait for loads most of their time, so at heads of 64 small programs of two kernels are faster: 607
    # us against 946 on an H100 (B/16, batch 256, 197 tokens, bf16), 246 of them for dQ. Other sizes were not timed.
    "attention_bwd": (
        Rule(config(provider="tiled"), WGMMA, "16", HEADS_64),
        _per_head(90, "d[13][26][mn][1-6]*[0-9]", programs=4, maxnreg=128),
        _per_head(90, "d[46][48][mn][1-6]*[0-9]", programs=3, maxnreg=168),
        _per_head(90, "d[89][06][mn][1-6]*[0-9]", programs=2, maxnreg=248, exact=1),
        _per_head(100, "d64[mn]64", programs=4, stages=1, exact=1),
        _per_head(100, "d[89]?m[1-6]*[0-9]", programs=2, stages=1, exact=1),
        _per_head(100, "d[1-9][024568][mn][1-6]*[0-9]", programs=2, exact=1),
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
        Rule(config(4, 3, BLOCK_M=64, BLOCK_N=32), WGMMA, shape=HEADS_64),
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
        *_row(WGMMA, MASKED, (8, 2, 32, 64), (8, 2, 32, 128), (8, 2, 32, 64)),
        *_row(TCGEN05, MASKED, (8, 2, 32, 128), (8, 1, 16, 64), (8, 2, 32, 64)),
        *_row(ASYNC, "*[rp]*", (8, 2, 32, 64), heads="d[36][24]m"),
        *_row(ASYNC, "*r*", (8, 1, 16, 64), heads="d128m"),
        *_row(TCGEN05, "*r*", (8, 2, 32, 64), heads="d[89]?m"),
        *_row(WGMMA, ROTARY, (8, 2, 64, 128), (8, 2, 32, 64), (8, 2, 32, 64)),
        *_row(TCGEN05, ROTARY, (8, 2, 64, 128), (8, 1, 32, 64), (8, 1, 32, 64)),
        *_row(WGMMA, PACKED, (4, 3, 64, 64), (8, 2, 32, 64), (8, 2, 32, 64)),
        *_row(TCGEN05, PACKED, (4, 3, 64, 64), (4, 3, 64, 64), (4, 2, 64, 64)),
        Rule(config(4, 2, BLOCK_M=32, BLOCK_N=64), WGMMA, shape=HEADS_64),
        *_row(WGMMA, ANY, (8, 2, 64, 128), (8, 2, 64, 128), (8, 2, 32, 128)),
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

_ATTENTION = tuple(Rule(config(provider=library), shape=PLAIN) for library in ATTENTION_LIBRARIES)

_SHORT = "d[1-6][24568][mn][1-6]*"  # attention over at most 320 tokens, heads of one chunk or 32 + 16

CANDIDATES: dict[str, tuple[Rule, ...]] = {
    "attention_fwd": (
        # SHORT_M: the size of the last block where it is enough, as for 197 = 3 x 64 + 5, and then maxnreg holds.
        Rule(config(4, 1, "single_pass", 168, BLOCK_M=64, SHORT_M=16), WGMMA, "16", "d64n256", "short"),
        Rule(config(4, 3, "tiled", BLOCK_M=64, BLOCK_N=64), sm=(90,), bits="16", shape="d*[0-9]n*"),
        Rule(config(8, 3, "tiled", BLOCK_M=128, BLOCK_N=64), sm=(100,), bits="16"),
        *_ATTENTION,
    ),
    "attention_bwd": (
        Rule(config(4, 1, "resident", BLOCK_N=32, STAGES=3), (90,), "16", "d64[nm]64 d64[nm]128 d64[nm]256"),
        _per_head(90, HEADS_64, programs=3, maxnreg=168),
        _per_head(90, f"{_SHORT}[0-9]", programs=2, maxnreg=248, exact=1, variant="exact"),
        _per_head(90, f"{_SHORT}[0-9]", programs=1, warps=8, keys=128, variant="wide"),
        Rule(config(4, 2, "phases", BLOCK_M1=64, BLOCK_N1=64, BLOCK_M2=32, BLOCK_N2=64), (90,), "16", _SHORT),
        Rule(config(provider="tiled")),
        *_ATTENTION,
    ),
    # MASKED: one loop over all blocks, where else a short masked one comes first, whose loads nothing hides.
    "attention_bwd_dq": (Rule(config(4, 3, BLOCK_M=64, BLOCK_N=32, MASKED=1), WGMMA, "16", HEADS_64, "masked"),),
    "attention_bwd_dkdv": (
        Rule(config(4, 3, maxnreg=128, BLOCK_M=32, BLOCK_N=64, MASKED=1), WGMMA, "16", HEADS_64, "masked"),
        Rule(config(4, 3, BLOCK_M=32, BLOCK_N=64), WGMMA, "16", HEADS_64, "stages"),
    ),
}
