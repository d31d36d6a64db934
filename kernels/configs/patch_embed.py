"""Tiles of patch embedding, for sm_80 and newer."""

from .tiles import Rule, config

RULES: dict[str, tuple[Rule, ...]] = {
    # Shape classes: "u8-even-large", see patches.patch_class. PROGRAMS: the number that splitting the rows aims at.
    "patch_embed_fwd": (
        Rule(config(4, 3, BLOCK_M=64, BLOCK_D=64, BLOCK_K=16), bits="32", shape="f32-even-*"),
        Rule(config(4, 3, BLOCK_M=32, BLOCK_D=64, BLOCK_K=16), bits="32", shape="u8-*"),
        Rule(config(4, 3, BLOCK_M=32, BLOCK_D=64, BLOCK_K=32), bits="32"),
        Rule(config(8, 4, BLOCK_M=128, BLOCK_D=256, BLOCK_K=32), sm=(90,), shape="f32-odd-large"),
        Rule(config(8, 3, BLOCK_M=128, BLOCK_D=256, BLOCK_K=64), sm=(90, 100), shape="*-large"),
        Rule(config(8, 4, BLOCK_M=128, BLOCK_D=128, BLOCK_K=32), sm=(80,), shape="*-large"),
        Rule(config(8, 3, BLOCK_M=128, BLOCK_D=128, BLOCK_K=32), shape="*-large"),
        Rule(config(4, 3, BLOCK_M=64, BLOCK_D=64, BLOCK_K=64)),
    ),
    "patch_embed_dweight": (
        Rule(config(4, 3, BLOCK_M=16, BLOCK_D=64, BLOCK_K=64, PROGRAMS=264), bits="32", shape="u8-*"),
        Rule(config(4, 3, BLOCK_M=32, BLOCK_D=64, BLOCK_K=64, PROGRAMS=264), bits="32"),
        Rule(config(8, 3, BLOCK_M=64, BLOCK_D=256, BLOCK_K=128, PROGRAMS=132), sm=(90,), shape="*-large"),
        Rule(config(8, 2, BLOCK_M=64, BLOCK_D=256, BLOCK_K=128, PROGRAMS=132), sm=(100,), shape="*-large"),
        Rule(config(8, 3, BLOCK_M=32, BLOCK_D=128, BLOCK_K=128, PROGRAMS=132), shape="*-large"),
        Rule(config(4, 3, BLOCK_M=32, BLOCK_D=64, BLOCK_K=64, PROGRAMS=264), sm=(80, 89, 120)),
        Rule(config(4, 3, BLOCK_M=64, BLOCK_D=64, BLOCK_K=64, PROGRAMS=264)),
    ),
    "patch_embed_dimages": (
        Rule(config(4, 3, BLOCK_M=64, BLOCK_D=32, BLOCK_K=64), bits="32"),
        Rule(config(8, 3, BLOCK_M=128, BLOCK_D=32, BLOCK_K=128), sm=(89,), shape="*-large"),
        Rule(config(8, 3, BLOCK_M=128, BLOCK_D=64, BLOCK_K=64), sm=(120,), shape="*-large"),
        Rule(config(8, 3, BLOCK_M=128, BLOCK_D=64, BLOCK_K=128), shape="*-large"),
        Rule(config(4, 3, BLOCK_M=64, BLOCK_D=64, BLOCK_K=32), sm=(80, 89, 120)),
        Rule(config(4, 3, BLOCK_M=64, BLOCK_D=64, BLOCK_K=64)),
    ),
}
CANDIDATES: dict[str, tuple[Rule, ...]] = {op: (Rule(config(provider="cublas")),) for op in RULES}
# Raw pixels on sm_90, where each block of columns converts them: instructions of the main loop for a number of the
# result, counted with Triton 3.6 at B/16, not timed: 15.1 for 128 x 256 x 64 above. 128 x 128 would take 26.3.
CANDIDATES["patch_embed_fwd"] += (
    Rule(config(8, 2, BLOCK_M=128, BLOCK_D=256, BLOCK_K=128), (90,), shape="u8-even-large", variant="long"),  # 11.1
    Rule(config(4, 3, BLOCK_M=64, BLOCK_D=256, BLOCK_K=64), (90,), shape="u8-*-large", variant="two programs"),  # 19.1
)
