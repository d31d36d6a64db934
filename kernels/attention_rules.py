"""Tiles of attention, for tile_rules.py.

Shape classes: padded head size, tokens up to 64, 128, 256, 320 or "long"; "r" or "f", "b", "k" for rotary positions, a
bias, lengths of keys; of packed samples "p" and no tokens (Logits.suffix). Providers: the paths of attention.py.
"""

from . import attention_libraries
from .tile import Rule, tile


def _head(
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
    return Rule(tile(warps, 1, "head", maxnreg, **blocks), (sm,), "16", shape, variant)


RULES: dict[str, tuple[Rule, ...]] = {
    "attention_fwd": (
        Rule(tile(8, 1, "tiled", BLOCK_M=32, BLOCK_N=32), bits="32"),
        # Packed samples: small blocks, as most of them are short.
        Rule(tile(8, 2, "tiled", BLOCK_M=128, BLOCK_N=64), sm=(90,), shape="d128[rf]p"),
        Rule(tile(4, 2, "tiled", BLOCK_M=64, BLOCK_N=64), sm=(90,), shape="d96fp"),
        Rule(tile(4, 2, "tiled", BLOCK_M=64, BLOCK_N=64), sm=(100,), shape="d128fp"),
        Rule(tile(4, 3, "tiled", BLOCK_M=64, BLOCK_N=128), sm=(100,), shape="d16*p"),
        Rule(tile(4, 3, "tiled", BLOCK_M=64, BLOCK_N=64), sm=(90, 100), shape="*p"),
        Rule(tile(8, 1, "tiled", BLOCK_M=64, BLOCK_N=32), shape="d128[rf]p"),
        Rule(tile(8, 2, "tiled", BLOCK_M=64, BLOCK_N=32), shape="d128p"),
        Rule(tile(8, 2, "tiled", BLOCK_M=64, BLOCK_N=32), sm=(120,), shape="d96fp"),
        Rule(tile(4, 2, "tiled", BLOCK_M=64, BLOCK_N=32), shape="*fp"),
        Rule(tile(4, 2, "tiled", BLOCK_M=64, BLOCK_N=32), shape="d[89]?rp"),
        Rule(tile(4, 2, "tiled", BLOCK_M=64, BLOCK_N=64), shape="*p"),
        Rule(tile(4, 1, "rows", BLOCK_M=64), sm=(90,), shape="d[1-6]?n[126]*[rf]"),
        Rule(tile(8, 1, "rows", BLOCK_M=64), sm=(90,), shape="*n[126]*[rf]"),
        Rule(tile(8, 1, "rows", BLOCK_M=64), sm=(100,), shape="d[1-6]?n[126]*[rf]"),
        Rule(tile(8, 1, "rows", BLOCK_M=64), sm=(100,), shape="*n[126]*r"),
        Rule(tile(8, 3, "tiled", BLOCK_M=128, BLOCK_N=64), sm=(100,), shape="d[1-6]?n*[rf]"),
        Rule(tile(8, 2, "tiled", BLOCK_M=32, BLOCK_N=32), sm=(90,), shape="d16n*[bk]"),
        Rule(tile(8, 1, "tiled", BLOCK_M=64, BLOCK_N=32), sm=(100,), shape="d[14][68]n*[bk]"),
        Rule(tile(8, 2, "tiled", BLOCK_M=32, BLOCK_N=32), sm=(90,), shape="d32n*[rf][bk]*"),
        Rule(tile(4, 2, "tiled", BLOCK_M=64, BLOCK_N=32), sm=(90,), shape="d48n*[rf][bk]*"),
        Rule(tile(8, 2, "tiled", BLOCK_M=128, BLOCK_N=32), sm=(90, 100), shape="d[134][268]n*[bk]"),
        Rule(tile(4, 2, "tiled", BLOCK_M=64, BLOCK_N=64), sm=(100,), shape="d64n*[0-9g][bk]*"),
        Rule(tile(4, 1, "tiled", BLOCK_M=64, BLOCK_N=32), sm=(90,), shape="d128*f[bk]*"),
        Rule(tile(4, 1, "tiled", BLOCK_M=64, BLOCK_N=16), sm=(90,), shape="d128*[0-9g]b*"),
        Rule(tile(8, 2, "tiled", BLOCK_M=128, BLOCK_N=64), sm=(90,), shape="d128*[0-9g]k"),
        Rule(tile(8, 1, "tiled", BLOCK_M=64, BLOCK_N=32), sm=(100,), shape="d128*[0-9g][bk]*"),
        Rule(tile(8, 2, "tiled", BLOCK_M=128, BLOCK_N=32), sm=(90,), shape="d128*[bk]"),
        Rule(tile(8, 2, "tiled", BLOCK_M=128, BLOCK_N=64), sm=(90, 100), shape="*[rfbk]"),
        Rule(tile(8, 1, "tiled", BLOCK_M=64, BLOCK_N=16), shape="d128*[bk]"),
        Rule(tile(8, 1, "tiled", BLOCK_M=64, BLOCK_N=32), shape="d128*[rf]"),
        Rule(tile(8, 2, "tiled", BLOCK_M=64, BLOCK_N=32), shape="*f*"),
        Rule(tile(8, 2, "tiled", BLOCK_M=64, BLOCK_N=64), shape="d[1-6]?n*[rbk]"),
        Rule(tile(8, 2, "tiled", BLOCK_M=64, BLOCK_N=32), shape="*[rbk]"),
        Rule(tile(8, 3, "tiled", BLOCK_M=128, BLOCK_N=64), sm=(90, 100), shape="*nlong"),
        Rule(tile(4, 3, "tiled", BLOCK_M=64, BLOCK_N=64), sm=(90, 100), shape="*n320"),
        Rule(tile(8, 3, "tiled", BLOCK_M=128, BLOCK_N=64), sm=(100,), shape="d128*"),
        Rule(tile(4, 1, "rows", BLOCK_M=64), sm=(90, 100)),
        Rule(tile(8, 2, "tiled", BLOCK_M=64, BLOCK_N=32), shape="d128*"),
        Rule(tile(4, 2, "tiled", BLOCK_M=64, BLOCK_N=32), shape="d96*"),
        Rule(tile(4, 2, "tiled", BLOCK_M=64, BLOCK_N=64)),
    ),
    "attention_bwd": (
        _head(90, "d[13][26]n[1-6]*[0-9]", programs=4, maxnreg=128),
        _head(90, "d[46][48]n[1-6]*[0-9]", programs=3, maxnreg=168),
        _head(90, "d[89][06]n[1-6]*[0-9]", programs=2, maxnreg=248, exact=1),
        _head(100, "d64n64", programs=4, stages=1, exact=1),
        _head(100, "d[1-9][024568]n[1-6]*[0-9]", programs=2, exact=1),
        Rule(tile(provider="tiled")),
    ),
    "attention_bwd_dq": (
        Rule(tile(8, 1, BLOCK_M=32, BLOCK_N=32), bits="32"),
        Rule(tile(8, 2, BLOCK_M=64, BLOCK_N=64), sm=(90, 100), shape="d128[rf]p"),
        Rule(tile(8, 2, BLOCK_M=64, BLOCK_N=64), sm=(90, 100), shape="d[89]?fp"),
        Rule(tile(8, 2, BLOCK_M=64, BLOCK_N=64), sm=(90,), shape="d96rp"),
        Rule(tile(4, 3, BLOCK_M=64, BLOCK_N=64), sm=(100,), shape="d64rp"),
        Rule(tile(4, 2, BLOCK_M=64, BLOCK_N=64), sm=(90, 100), shape="*p"),
        Rule(tile(8, 2, BLOCK_M=32, BLOCK_N=32), shape="d128*p"),
        Rule(tile(8, 2, BLOCK_M=32, BLOCK_N=32), sm=(120,), shape="d[89]?[rf]p"),
        Rule(tile(8, 1, BLOCK_M=64, BLOCK_N=32), shape="d[89]?[rf]p"),
        Rule(tile(8, 2, BLOCK_M=64, BLOCK_N=32), sm=(120,), shape="d96p"),
        Rule(tile(4, 1, BLOCK_M=64, BLOCK_N=32), sm=(89,), shape="d48rp"),
        Rule(tile(4, 2, BLOCK_M=64, BLOCK_N=32), shape="*p"),
        Rule(tile(8, 2, BLOCK_M=32, BLOCK_N=32), sm=(90,), shape="d16n*[bk]"),
        Rule(tile(8, 2, BLOCK_M=64, BLOCK_N=32), sm=(100,), shape="d16n*[bk]"),
        Rule(tile(8, 2, BLOCK_M=64, BLOCK_N=32), sm=(90, 100), shape="d128*f[bk]*"),
        Rule(tile(8, 2, BLOCK_M=64, BLOCK_N=64), sm=(90, 100), shape="d128*[rf]"),
        Rule(tile(8, 2, BLOCK_M=128, BLOCK_N=32), sm=(100,), shape="d48*[rf]"),
        Rule(tile(8, 2, BLOCK_M=128, BLOCK_N=32), sm=(90, 100), shape="*[bk]"),
        Rule(tile(8, 2, BLOCK_M=128, BLOCK_N=64), sm=(90, 100), shape="*[rf]"),
        Rule(tile(8, 2, BLOCK_M=32, BLOCK_N=32), shape="d128*[bk]"),
        Rule(tile(8, 2, BLOCK_M=32, BLOCK_N=32), shape="d[89]?n*[rf][bk]*"),
        Rule(tile(8, 2, BLOCK_M=32, BLOCK_N=32), shape="d96*f"),
        Rule(tile(8, 2, BLOCK_M=32, BLOCK_N=32), sm=(120,), shape="d128*[rf]"),
        Rule(tile(8, 2, BLOCK_M=32, BLOCK_N=32), sm=(120,), shape="d[89]?n*[rf]"),
        Rule(tile(8, 1, BLOCK_M=64, BLOCK_N=32), shape="d128*[rf]"),
        Rule(tile(8, 2, BLOCK_M=64, BLOCK_N=32), shape="*[rfbk]"),
        Rule(tile(8, 2, BLOCK_M=128, BLOCK_N=32), sm=(90, 100), shape="d128*"),
        Rule(tile(4, 2, BLOCK_M=64, BLOCK_N=64), sm=(90, 100), shape="*n320"),
        Rule(tile(4, 2, BLOCK_M=64, BLOCK_N=64), sm=(90, 100), shape="*n64"),
        Rule(tile(8, 2, BLOCK_M=128, BLOCK_N=64), sm=(90, 100)),
        Rule(tile(4, 1, BLOCK_M=32, BLOCK_N=32), shape="d128*"),
        Rule(tile(8, 2, BLOCK_M=64, BLOCK_N=32), shape="d96*"),
        Rule(tile(4, 2, BLOCK_M=64, BLOCK_N=32)),
    ),
    "attention_bwd_dkdv": (
        Rule(tile(8, 1, BLOCK_M=32, BLOCK_N=32), bits="32"),
        Rule(tile(8, 2, BLOCK_M=64, BLOCK_N=128), sm=(90, 100), shape="d[46]?fp"),
        Rule(tile(8, 2, BLOCK_M=64, BLOCK_N=128), sm=(90,), shape="d64rp"),
        Rule(tile(4, 3, BLOCK_M=64, BLOCK_N=64), sm=(90, 100), shape="d[1-6]?p"),
        Rule(tile(4, 3, BLOCK_M=64, BLOCK_N=64), sm=(90, 100), shape="d[1-6]?[rf]p"),
        Rule(tile(4, 2, BLOCK_M=64, BLOCK_N=64), sm=(90, 100), shape="d80p"),
        Rule(tile(8, 1, BLOCK_M=32, BLOCK_N=64), sm=(100,), shape="d128rp"),
        Rule(tile(8, 2, BLOCK_M=32, BLOCK_N=64), sm=(90, 100), shape="*[rf]p"),
        Rule(tile(8, 2, BLOCK_M=32, BLOCK_N=128), sm=(90, 100), shape="*p"),
        Rule(tile(8, 2, BLOCK_M=16, BLOCK_N=32), sm=(120,), shape="d128fp"),
        Rule(tile(8, 1, BLOCK_M=32, BLOCK_N=32), shape="d128*p"),
        Rule(tile(8, 1, BLOCK_M=32, BLOCK_N=32), shape="d[89]?[rf]p"),
        Rule(tile(8, 2, BLOCK_M=16, BLOCK_N=64), sm=(120,), shape="d[89]?p"),
        Rule(tile(4, 2, BLOCK_M=16, BLOCK_N=64), shape="d96p"),
        Rule(tile(8, 1, BLOCK_M=16, BLOCK_N=64), sm=(120,), shape="*[rf]p"),
        Rule(tile(4, 2, BLOCK_M=32, BLOCK_N=64), shape="*p"),
        Rule(tile(8, 2, BLOCK_M=64, BLOCK_N=128), sm=(90, 100), shape="d[13][26]n*[rfbk]"),
        Rule(tile(8, 2, BLOCK_M=32, BLOCK_N=128), sm=(90, 100), shape="d[1-6]?n*f*"),
        Rule(tile(8, 2, BLOCK_M=32, BLOCK_N=128), sm=(90, 100), shape="d[1-6]?n*r[bk]*"),
        Rule(tile(8, 2, BLOCK_M=64, BLOCK_N=128), sm=(90, 100), shape="d[1-6]?n*[rbk]"),
        Rule(tile(8, 2, BLOCK_M=32, BLOCK_N=64), sm=(90, 100), shape="*[rfbk]"),
        Rule(tile(8, 1, BLOCK_M=16, BLOCK_N=32), shape="d128*f[bk]*"),
        Rule(tile(8, 1, BLOCK_M=32, BLOCK_N=32), shape="d128*[rfbk]"),
        Rule(tile(8, 1, BLOCK_M=16, BLOCK_N=64), shape="d96*[0-9g][bk]*"),
        Rule(tile(8, 1, BLOCK_M=32, BLOCK_N=32), shape="d[89]?n*[rfbk]"),
        Rule(tile(8, 1, BLOCK_M=32, BLOCK_N=32), sm=(120,), shape="d16n*[rf]"),
        Rule(tile(8, 2, BLOCK_M=16, BLOCK_N=64), shape="*[rf]*"),
        Rule(tile(8, 2, BLOCK_M=16, BLOCK_N=64), sm=(80,), shape="*n64b*"),
        Rule(tile(8, 2, BLOCK_M=16, BLOCK_N=64), sm=(120,), shape="*[bk]"),
        Rule(tile(8, 2, BLOCK_M=32, BLOCK_N=64), shape="*[bk]"),
        Rule(tile(8, 2, BLOCK_M=32, BLOCK_N=128), sm=(90, 100), shape="d128*"),
        Rule(tile(8, 2, BLOCK_M=64, BLOCK_N=128), sm=(90, 100), shape="*nlong"),
        Rule(tile(4, 3, BLOCK_M=64, BLOCK_N=64), sm=(90, 100)),
        Rule(tile(8, 2, BLOCK_M=32, BLOCK_N=32), sm=(120,), shape="d128*"),
        Rule(tile(4, 2, BLOCK_M=16, BLOCK_N=64), sm=(120,), shape="d32*"),
        Rule(tile(4, 2, BLOCK_M=16, BLOCK_N=32), shape="d128*"),
        Rule(tile(8, 2, BLOCK_M=32, BLOCK_N=64), shape="d96*"),
        Rule(tile(4, 2, BLOCK_M=16, BLOCK_N=64), shape="d80*"),
        Rule(tile(4, 2, BLOCK_M=32, BLOCK_N=64)),
    ),
    "attention_bwd_bias": (
        Rule(tile(8, 1, BLOCK_M=32, BLOCK_N=32), bits="32"),
        Rule(tile(8, 1, BLOCK_M=32, BLOCK_N=32), sm=(90,), shape="d16n*"),
        Rule(tile(8, 1, BLOCK_M=64, BLOCK_N=32), sm=(90,), shape="d128*"),
        Rule(tile(8, 1, BLOCK_M=64, BLOCK_N=64), sm=(90, 100)),
        Rule(tile(8, 1, BLOCK_M=32, BLOCK_N=32), sm=(120,), shape="d128*"),
        Rule(tile(8, 1, BLOCK_M=64, BLOCK_N=64), sm=(120,), shape="d[13][26]n*"),
        Rule(tile(8, 1, BLOCK_M=64, BLOCK_N=32)),
    ),
    # GROUPS: of samples, whose shares are added up afterwards.
    "rope_bwd": (Rule(tile(4, 1, BLOCK_M=16, GROUPS=8)),),
}

_PLAIN = "*[0-9g]"  # attention without rotary positions, a bias or lengths of keys
_ATTENTION = tuple(Rule(tile(provider=library), shape=_PLAIN) for library in attention_libraries.PROVIDERS)

_SHORT = "d[1-6][24568]n[1-6]*"  # attention over at most 320 tokens, heads of one chunk or 32 + 16

CANDIDATES: dict[str, tuple[Rule, ...]] = {
    "attention_fwd": (
        Rule(tile(4, 3, "tiled", BLOCK_M=64, BLOCK_N=64), sm=(90,), bits="16"),
        Rule(tile(8, 3, "tiled", BLOCK_M=128, BLOCK_N=64), sm=(100,), bits="16"),
        *_ATTENTION,
    ),
    "attention_bwd": (
        _head(90, f"{_SHORT}[0-9]", programs=2, maxnreg=248, exact=1, variant="exact"),
        _head(90, f"{_SHORT}[0-9]", programs=1, warps=8, keys=128, variant="wide"),
        Rule(
            tile(4, 2, "phases", BLOCK_M1=64, BLOCK_N1=64, BLOCK_M2=32, BLOCK_N2=64), sm=(90,), bits="16", shape=_SHORT
        ),
        Rule(tile(provider="tiled")),
        *_ATTENTION,
    ),
}
